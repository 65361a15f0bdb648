# SPDX-License-Identifier: Apache-2.0
"""Our units in the service manager: their state in one call, and the jobs that start, stop and restart them.

Runs in the CLI only; everything goes through `systemctl`, which speaks to the system manager, to a user's, and to a
PID 1 that has no D-Bus. A rank's daemon is `wcache@RANK.service`, its socket `wcache@RANK.socket`.
Surprising: `systemctl show` knows every name (LoadState says not-found), and a unit whose socket listens must not be
connected to just to look at it: that would start it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from wcache.config import Scope, default_scope
from wcache.errors import SystemdError

TARGET = "wcache.target"
INSTANCES = "wcache@*.service"
SHOW_TIMEOUT_S = 10.0
FDSTORE_PRESERVE_VERSION = 254  # FileDescriptorStorePreserve= and clean --what=fdstore, systemd.service(5)

_PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "Result", "MainPID", "StatusText", "NRestarts",
    "NFileDescriptorStore", "FileDescriptorStoreMax", "NeedDaemonReload", "UnitFileState", "ExecMainStatus",
    "ExecMainCode", "FragmentPath",
)  # fmt: skip
_UP = frozenset({"active", "activating", "reloading"})
_INSTANCE = re.compile(r"wcache@(\d+)\.service")


@dataclass(frozen=True, slots=True)
class Unit:
    """What the manager says of one unit. `stored_fds`: descriptors its fd store keeps. `restarts`: automatic ones."""

    name: str
    load: str
    active: str
    sub: str
    result: str = "success"
    pid: int = 0
    text: str = ""
    restarts: int = 0
    stored_fds: int = 0
    max_stored_fds: int = 0
    stale: bool = False
    enabled: str = ""
    exit_status: int = 0
    exit_code: int = 0
    path: str = ""

    @property
    def exists(self) -> bool:
        return self.load == "loaded"

    @property
    def up(self) -> bool:
        """A process is there, or on its way: connecting to its socket starts nothing."""
        return self.active in _UP and not self.restarting

    @property
    def restarting(self) -> bool:
        """It died, and the manager will start it again in a moment."""
        return self.sub.startswith("auto-restart")

    @property
    def rank(self) -> int | None:
        found = _INSTANCE.fullmatch(self.name)
        return int(found[1]) if found else None


def service(rank: int) -> str:
    return f"wcache@{rank}.service"


def socket_unit(rank: int) -> str:
    return f"wcache@{rank}.socket"


def reachable(scope: Scope) -> bool:
    """Is such a manager running (sd_booted(3); a user's manager has its private socket)?"""
    if scope is Scope.SYSTEM:
        return Path("/run/systemd/system").is_dir()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return Path(runtime, "systemd/private").exists()


def managing_scope() -> Scope | None:
    """The manager that has our units; the one that fits the user first. None: no unit of ours is installed."""
    first = default_scope()
    second = Scope.USER if first is Scope.SYSTEM else Scope.SYSTEM
    for scope in (first, second):
        if reachable(scope) and installed(scope):
            return scope
    return None


def installed(scope: Scope) -> bool:
    """Has this manager our units? A manager that does not answer has none."""
    try:
        return show(scope, [TARGET])[TARGET].exists
    except SystemdError:
        return False


def show(scope: Scope, names: Sequence[str]) -> dict[str, Unit]:
    """State of all named units (patterns match what is in memory) in one call. Raises SystemdError."""
    out = _systemctl(scope, "show", "--property", ",".join(_PROPERTIES), "--", *names)
    units = [_parse(block) for block in out.split("\n\n") if block.strip()]
    return {unit.name: unit for unit in units}


def version() -> int | None:
    """systemd's major version; None without systemd."""
    try:
        out = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, timeout=SHOW_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"systemd (\d+)", out.stdout)
    return int(found[1]) if found else None


class Job:
    """A `systemctl start|stop|restart` under way; the manager goes on with it even if we end."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], what: str) -> None:
        self._process = process
        self._stderr = stderr
        self._what = what

    def done(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for the end."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def problem(self) -> str:
        """After the end: empty if all went well, else what systemctl said."""
        if self._process.returncode == 0:
            return ""
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip()
        return said or f"{self._what} exited with status {self._process.returncode}"


@contextmanager
def job(scope: Scope, verb: str, names: Sequence[str]) -> Iterator[Job]:
    """Queue one job for all named units and watch it. Raises SystemdError if there is no systemctl."""
    with tempfile.TemporaryFile() as stderr:
        arguments = _arguments(scope, verb, "--", *names)
        try:
            process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=_environment()
            )
        except OSError as e:
            raise SystemdError(f"systemctl: {e.strerror}") from e
        try:
            yield Job(process, stderr, f"systemctl {verb}")
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def start_soon(scope: Scope, name: str) -> None:
    """Queue a start and do not wait. A target waits for its members for as long as they are started again and again."""
    _systemctl(scope, "start", "--no-block", "--", name)


def reset_failed(scope: Scope, names: Sequence[str]) -> None:
    """Forget failures and start limits, so that a start asked for by a person is tried."""
    _systemctl(scope, "reset-failed", "--", *names)


def clean_fd_store(scope: Scope, names: Sequence[str]) -> None:
    """Empty the fd stores of stopped units (systemd 254 and newer keeps them if the unit says so)."""
    _systemctl(scope, "clean", "--what=fdstore", "--", *names)


def _parse(block: str) -> Unit:
    values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)

    def number(key: str) -> int:
        text = values.get(key, "")
        return int(text) if text.isdigit() else 0

    return Unit(
        name=values.get("Id", ""),
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        pid=number("MainPID"),
        text=values.get("StatusText", ""),
        restarts=number("NRestarts"),
        stored_fds=number("NFileDescriptorStore"),
        max_stored_fds=number("FileDescriptorStoreMax"),
        stale=values.get("NeedDaemonReload") == "yes",
        enabled=values.get("UnitFileState", ""),
        exit_status=number("ExecMainStatus"),
        exit_code=number("ExecMainCode"),
        path=values.get("FragmentPath", ""),
    )


def _systemctl(scope: Scope, *arguments: str) -> str:
    try:
        done = subprocess.run(
            _arguments(scope, *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SHOW_TIMEOUT_S,
            env=_environment(),
        )
    except subprocess.TimeoutExpired as e:
        raise SystemdError(f"the {scope} manager did not answer within {SHOW_TIMEOUT_S} s") from e
    except OSError as e:
        raise SystemdError(f"systemctl: {e.strerror}") from e
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise SystemdError(f"systemctl {arguments[0]}: {said}")
    return done.stdout


def _arguments(scope: Scope, *arguments: str) -> list[str]:
    return ["systemctl", f"--{scope}", "--no-ask-password", "--no-pager", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"}
