# SPDX-License-Identifier: Apache-2.0
"""One real systemd for all tests of this folder; each test finds it without units that run and without memory kept."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_systemd import REPO, Host, Manager, config

NOBODY = 65534
_USERS_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="session")
def shared_dir() -> Iterator[Path]:
    """A directory that every user can read, with a short name."""
    with tempfile.TemporaryDirectory(prefix="wcs-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def host(shared_dir: Path) -> Iterator[Host]:
    """Needs root; without it the tests of this folder that boot are skipped (scripts/test lets none skip)."""
    if os.geteuid() != 0:
        pytest.skip("booting a systemd needs root")
    host = Host(shared_dir / "host")
    yield host
    host.stop()


@pytest.fixture(scope="session")
def llama(shared_dir: Path) -> Path:
    """A tiny real Llama checkpoint in two files."""
    subprocess.run([sys.executable, REPO / "scripts" / "make_model.py", "tiny", shared_dir, "llama"], check=True)
    return shared_dir / "llama"


@pytest.fixture(scope="session")
def large(shared_dir: Path, llama: Path) -> Path:
    """A checkpoint of 512 MiB that takes no disk: holes, read as zeros. Large enough to watch a load."""
    out = shared_dir / "large"
    out.mkdir()
    rows = 1 << 20
    config = json.loads((llama / "config.json").read_text()) | {"vocab_size": rows, "num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(config))
    shapes = {name: shape for file in llama.glob("*.safetensors") for name, shape in shapes_of(file).items()}
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        shape = [rows, shape[1]] if "embed_tokens" in name or "lm_head" in name else shape
        begin, end = end, end + math.prod(shape) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return out


def shapes_of(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


@pytest.fixture
def group(host: Host, llama: Path) -> Iterator[Manager]:
    """The system manager with two ranks of the tiny Llama installed; nothing runs yet."""
    manager = Manager(host)
    manager.install(config(llama, tp_size=2))
    yield manager
    logs = {path.name: path.read_text() for path in (host.directory / "log").glob("wcache*")}
    manager.clear()
    for name, text in logs.items():
        print(f"--- {name}\n{text}")


@pytest.fixture
def ready(group: Manager) -> Manager:
    """Both ranks are ready."""
    group.systemctl("start", "wcache.target")
    return group


@pytest.fixture
def user(host: Host, llama: Path, shared_dir: Path) -> Iterator[Manager]:
    """The manager of a user without privileges, with one rank; root's own where no other user can run our Python."""
    program = shared_dir / "wcache"
    paths = ":".join(path for path in sys.path if path.endswith("site-packages"))
    source = "" if os.environ.get("WCACHE_TEST_WHEEL") else f":{REPO}"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}{source}" exec {_USERS_PYTHON} -P -m wcache "$@"\n')
    program.chmod(0o755)
    can = host.run(program, "version", uid=NOBODY, check=False)
    uid, wcache = (NOBODY, program) if can.returncode == 0 else (0, Manager(host).wcache)
    if uid == 0:
        print(f"uid {NOBODY} cannot run wcache here, using root's user manager: {can.stderr}")
    manager = Manager(host, uid=uid, wcache=wcache)
    manager.install(config(llama))
    yield manager
    manager.clear()
    host.run("systemctl", "stop", f"user@{uid}.service")
    shutil.rmtree(host.path(f"/run/home/{uid}"), ignore_errors=True)
