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
from private_systemd import REPO, Host, Manager, Public, config

NOBODY = 65534


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


@pytest.fixture(scope="session")
def public(host: Host) -> Public:
    return Public(host)


@pytest.fixture
def user(host: Host, public: Public, llama: Path) -> Iterator[Manager]:
    """The manager of a user without any privileges, with one rank."""
    manager = Manager(host, uid=NOBODY, public=public)
    manager.install(config(llama))
    yield manager
    manager.clear()
    host.run("systemctl", "stop", f"user@{NOBODY}.service")
    shutil.rmtree(host.path(f"/run/home/{NOBODY}"), ignore_errors=True)
