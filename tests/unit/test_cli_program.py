# SPDX-License-Identifier: Apache-2.0
"""The program's boundary: global options anywhere, one error line, one hint, the exit status of the error's class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from wcache import __version__
from wcache.cli import main as program
from wcache.cli.main import app, globals_first, run
from wcache.cli.ranks import GroupReport
from wcache.host import units

VERBS = (
    "status", "start", "stop", "restart-group", "clean", "explain", "fingerprint", "verify", "evict", "drain", "logs",
    "doctor", "daemon", "version",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the machine of the test is not this test's business."""
    monkeypatch.setattr(units, "reachable", lambda _: False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "wcache.toml"
    path.write_text(
        f'ranks = [0, 1]\nsocket_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n[parallel]\ntp_size = 2\n'
    )
    return path


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["status", "--user"], ["--user", "status"]),
        (["status", "--json", "--config", "x"], ["--config", "x", "status", "--json"]),
        (["--debug", "status", "--config=x"], ["--debug", "--config=x", "status"]),
        (["explain", "--", "--user"], ["explain", "--", "--user"]),
        (["status", "--config"], ["--config", "status"]),
    ],
)
def test_global_options_may_stand_anywhere_before_a_double_dash(typed: list[str], read: list[str]) -> None:
    assert globals_first(typed) == read


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert f"wcache {verb}" in result.output


def test_the_overview_names_every_verb() -> None:
    output = CliRunner().invoke(app, ["--help"], prog_name="wcache").output
    assert [verb for verb in VERBS if f"  {verb} " not in output] == []


def test_no_arguments_print_the_overview_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "restart-group" in said.err


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["status", "x"],
        ["--user", "--system", "status"],
        ["daemon"],
        ["evict", ""],
    ],
)
def test_wrong_usage_is_one_line_and_a_hint_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert said.out == "" and first.startswith("wcache: ") and second.startswith("hint: wcache")


def test_a_stopped_group_is_not_ready(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--config", str(config)]) == 3
    said = capsys.readouterr()
    assert said.out.startswith("0 of 2 ranks ready") and said.err == ""


def test_the_json_of_status_is_the_typed_document(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json", "--config", str(config)]) == 3
    report = msgspec.json.decode(capsys.readouterr().out, type=GroupReport)
    assert [(r.rank, r.state, r.ready, r.device) for r in report.ranks] == [
        (0, "stopped", False, "cpu"), (1, "stopped", False, "cpu"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argv", [["status", "7"], ["verify", "7"], ["evict", "--rank", "7"], ["drain", "7"], ["start", "7"]]
)
def test_a_rank_that_is_not_here_has_status_4(
    argv: list[str], config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if argv[0] == "start":
        monkeypatch.setattr(units, "reachable", lambda _: True)
        monkeypatch.setattr(units, "installed", lambda _: True)
    assert run([*argv, "--config", str(config)]) == 4
    assert capsys.readouterr().err == "wcache: rank 7 is not one of this host's ranks (0, 1)\n"


def test_a_wrong_key_of_the_configuration_is_named_with_the_nearest_one(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("rank = [0]\n")
    assert run(["status", "--config", str(config)]) == 2
    assert "unknown key rank; did you mean ranks" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["start", "stop", "restart-group", "logs"])
def test_without_units_the_group_verbs_say_what_to_do_instead(
    verb: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, "--config", str(config)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "no service manager here has wcache units" in first
    assert "scripts/install" in second and "wcache daemon --rank N" in second


def test_a_traceback_comes_only_with_debug(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["start", "--config", str(config)])
    assert "Traceback" not in capsys.readouterr().err
    run(["start", "--config", str(config), "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_is_one_line_with_status_1(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("wcache.cli.status.look", broken)
    assert run(["status", "--config", str(config)]) == 1
    assert capsys.readouterr().err == "wcache: RuntimeError: a bug\nhint: this is a defect; --debug shows where\n"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wcache.cli.status.look", interrupted)
    assert run(["status", "--config", str(config)]) == program.INTERRUPTED


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_prints_the_version_alone(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("argv", "banned"),
    [
        (["--help"], {"torch", "numpy", "pydantic", "rich", "safetensors", "psutil", "sqlite3"}),
        (["status"], {"torch", "numpy", "pydantic", "safetensors", "psutil", "sqlite3"}),
        (["status", "--json"], {"torch", "numpy", "pydantic", "rich", "safetensors", "psutil", "sqlite3"}),
    ],
)
def test_looking_imports_nothing_slow(argv: list[str], banned: set[str], config: Path) -> None:
    script = (
        "import sys, json; from wcache.cli.main import run; run(sys.argv[1:]);"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    environment = {**os.environ, "WCACHE_CONFIG": str(config)}  # an option that is given does import pydantic
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, env=environment)
    assert banned & set(json.loads(done.stderr)) == set()
