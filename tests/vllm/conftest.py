# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines in child processes, a real daemon per rank, and tiny real checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wcache.errors import WcacheError
from wcache.protocol.connection import connect, socket_path
from wcache.protocol.messages import GetStatus, RankStatus, Status, Verified, Verify

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
MAKE_MODEL = HERE.parent.parent / "scripts" / "make_model.py"
START_DEADLINE_S = 30.0

ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads that spin cost more than they give where cores are shared
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints: tiny llama, qwen3 (tied), qwen3-moe and mixtral, and a real smollm2."""
    root = tmp_path_factory.mktemp("models")
    for what in (("tiny", root), ("smollm2", root / "smollm2")):
        command = [sys.executable, "-W", "ignore", str(MAKE_MODEL), *map(str, what)]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    return root


class Daemon:
    """One rank's daemon in the foreground, with its own configuration, sockets and state."""

    def __init__(self, root: Path, rank: int, config: str) -> None:
        self.rank, self.root = rank, root
        self.config = root / "wcache.toml"
        self.sockets = root / "s"
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        self.config.write_text(f'socket_dir = "{self.sockets}"\nstate_dir = "{root / "state"}"\n{config}')
        self.log = root / f"daemon-{rank}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def env(self) -> dict[str, str]:
        return {"WCACHE_CONFIG": str(self.config), "WCACHE_STATE_DIR": str(self.root / "state")}

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wcache.daemon", "--rank", str(self.rank), "--config", str(self.config)],
                stdout=log, stderr=log, env={**os.environ, **ENGINE_ENV, **self.env},
            )  # fmt: skip
        self.wait(bool)

    def extra(self, **options: Any) -> dict[str, Any]:
        """Options for an engine that is to use this daemon."""
        return {"socket_dir": str(self.sockets), **options}

    def status(self) -> RankStatus:
        with connect(socket_path(self.sockets, self.rank), role="admin", name="test") as connection:
            return connection.ask(GetStatus(), Status).status

    def verify(self) -> dict[str, bool]:
        """Have every shard's digests computed anew: by fingerprint, whether they are those that were committed."""
        with connect(socket_path(self.sockets, self.rank), role="admin", name="test") as connection:
            return {v.fingerprint: v.ok for v in connection.ask(Verify(), Verified).verdicts}

    def wait(self, condition: Any, deadline_s: float = START_DEADLINE_S) -> RankStatus:
        """Wait until the rank's status meets a condition."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                status = self.status()
                if condition(status):
                    return status
            except WcacheError:
                status = None
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{status}\n{self.log.read_text()}"
            time.sleep(0.05)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(20)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Any]:
    """Start daemons: `daemons(rank, toml text)`; all end with the test."""
    running: list[Daemon] = []

    def start(rank: int = 0, config: str = "") -> Daemon:
        running.append(Daemon(tmp_path, rank, config))
        return running[-1]

    yield start
    for daemon in running:
        daemon.kill(signal.SIGTERM)


class Engines:
    """A child process that runs engines on command; see child.py."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self.log = log
        mine, theirs = os.pipe()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(HERE / "child.py"), str(theirs)],
                stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=(theirs,), text=True,
                env={**os.environ, "PYTHONPATH": str(HERE.parent), **ENGINE_ENV, **env},
            )  # fmt: skip
        os.close(theirs)
        self.answers = os.fdopen(mine)

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have it done; raises AssertionError with the child's words if that failed or the child died."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.answers.readline()
        assert line, f"the engine process ended:\n{self.log.read_text()[-4000:]}"
        answer = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.log.read_text()[-4000:]}"
        return answer["ok"]

    def failing(self, do: str, **arguments: Any) -> str:
        """Have something done that must fail; returns the error's words."""
        with pytest.raises(AssertionError) as caught:
            self(do, **arguments)
        return str(caught.value)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Start engine processes: `engines(daemon)`; all end with the test."""
    running: list[Engines] = []

    def start(daemon: Daemon | None = None, **env: str) -> Engines:
        # Without a daemon of its own an engine must not find this machine's.
        base = (
            daemon.env if daemon else {"WCACHE_STATE_DIR": str(tmp_path / "no-state"), "XDG_RUNTIME_DIR": str(tmp_path)}
        )
        running.append(Engines({**base, **env}, tmp_path / f"engine-{len(running)}.log"))
        return running[-1]

    yield start
    for child in running:
        child.close()


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """One engine process for many tests: importing vLLM costs more than an engine of a tiny model."""
    root = tmp_path_factory.mktemp("process")
    child = Engines({"WCACHE_STATE_DIR": str(root / "state"), "XDG_RUNTIME_DIR": str(root)}, root / "engine.log")
    yield child
    child.close()


@pytest.fixture
def child(process: Engines) -> Iterator[Engines]:
    """The shared engine process; engines that a test leaves behind are stopped."""
    yield process
    for name in process("names"):
        process("stop", name=name)


@pytest.fixture
def copy_of(tmp_path: Path) -> Any:
    """Copy a checkpoint to another directory."""

    def copy(model: Path, name: str) -> Path:
        return Path(shutil.copytree(model, tmp_path / name))

    return copy
