# SPDX-License-Identifier: Apache-2.0
"""What an installed package has to have: every program answers --help, and units and installer are in the wheel."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAMS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]
MODULES = ("wcache", "wcache.daemon", "wcache.engine.loader", "wcache.engine.checker")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_installed_program_answers_help(name: str) -> None:
    done = subprocess.run([Path(sys.executable).with_name(name), "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", MODULES[:3])
def test_every_module_that_a_unit_or_a_daemon_runs_answers_help(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_entry_point_can_be_loaded() -> None:
    ours = [e for e in importlib.metadata.distribution("wcache").entry_points if e.group != "console_scripts"]
    assert ours
    for entry in ours:
        assert callable(entry.load())


@pytest.mark.skipif(not os.environ.get("WCACHE_TEST_WHEEL"), reason="there is a wheel in scripts/test only")
def test_the_wheel_has_units_installer_plans_and_types_and_nothing_of_the_tests() -> None:
    (wheel,) = (REPO / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    units = {f"wcache/units/{path.name}" for path in (REPO / "units").iterdir()}
    assert units | {"wcache/units/install", "wcache/py.typed"} <= names
    assert any(name.startswith("wcache/weights/plans/") for name in names)
    assert not [name for name in names if name.startswith(("tests", "scripts")) or name.endswith(".safetensors")]
