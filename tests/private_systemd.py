# SPDX-License-Identifier: Apache-2.0
"""A real systemd as PID 1 of private namespaces, with our units installed by our installer: for tests.

`Host` drives it through scripts/private_systemd, `Manager` is its system manager or a user's in it. Ranks are reached
from this process, which is in other namespaces, through /proc/PID/root: like an engine in a container.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wcache.host.fds import close_all
from wcache.protocol.connection import Connection, connect, socket_path
from wcache.protocol.messages import Attach, GetStatus, Query, RankStatus, Status

REPO = Path(__file__).resolve().parent.parent
SCRIPT = REPO / "scripts" / "private_systemd"
WCACHE = Path(sys.executable).with_name("wcache")
DEADLINE_S = 120.0

Command = subprocess.CompletedProcess[str]


class Host:
    """The private namespaces; `directory` holds their state and logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        subprocess.run([SCRIPT, "start", directory], check=True, stdin=subprocess.DEVNULL)
        found = subprocess.run([SCRIPT, "pid", directory], check=True, capture_output=True, text=True)
        self.init = int(found.stdout)

    def run(self, *command: str | Path, check: bool = True, text: str | None = None, uid: int | None = None) -> Command:
        """Run a command inside, as root or, with its manager's environment, as another user."""
        verb = ["exec", self.directory] if uid is None else ["user", self.directory, str(uid)]
        done = subprocess.run(
            [SCRIPT, *verb, *command], input=text, capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def path(self, inside: str | Path) -> Path:
        """A path of the inside as this process reaches it."""
        return Path(f"/proc/{self.init}/root{inside}")

    def log(self, unit: str) -> str:
        path = self.directory / "log" / f"{unit}.log"
        return path.read_text() if path.exists() else ""

    def pids(self) -> list[int]:
        """Every process inside, by our numbers."""
        ours = Path(f"/proc/{self.init}/ns/pid").stat().st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "ns/pid").stat().st_ino == ours:
                        found.append(int(entry.name))
                except OSError:  # ended meanwhile
                    continue
        return found

    def holders(self, inode: int) -> list[str]:
        """Who inside holds the memory file with that inode open."""
        found = []
        for pid in self.pids():
            for entry in self._fds(pid):
                try:
                    if "/memfd:" in str(entry.readlink()) and entry.stat().st_ino == inode:
                        found.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
                except OSError:
                    continue
        return found

    @staticmethod
    def _fds(pid: int) -> list[Path]:
        try:
            return list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # ended meanwhile
            return []

    def stop(self) -> None:
        subprocess.run([SCRIPT, "stop", self.directory], check=True)


class Public:
    """Our Python, its packages and this checkout where every user inside can reach them, wherever they lie outside."""

    ROOT = Path("/run/public")

    def __init__(self, host: Host) -> None:
        packages = [path for path in sys.path if path.endswith("site-packages")]
        there = [str(self._bind(host, Path(path), f"packages-{i}")) for i, path in enumerate(packages)]
        checkout = self._bind(host, REPO, "checkout")
        if not os.environ.get("WCACHE_TEST_WHEEL"):
            there.append(str(checkout))
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        python = self._bind(host, Path(sys.base_prefix), "python") / "bin" / version
        self.installer: tuple[str | Path, ...] = (python, checkout / "scripts" / "install")
        self.wcache = self.ROOT / "wcache"
        host.run("tee", self.wcache, text=f'#!/bin/sh\nPYTHONPATH={":".join(there)} exec {python} -P -m wcache "$@"\n')
        host.run("chmod", "755", self.wcache)

    def _bind(self, host: Host, outside: Path, name: str) -> Path:
        inside = self.ROOT / name
        host.run("mkdir", "-p", inside)
        host.run("mount", "--bind", outside, inside)
        return inside


class Manager:
    """The system manager of a host, or with `uid` that user's; our units are those of the test's checkpoint."""

    def __init__(self, host: Host, *, uid: int | None = None, public: Public | None = None) -> None:
        self.host = host
        self.uid = uid
        self.wcache = WCACHE if public is None else public.wcache
        self.installer = (sys.executable, REPO / "scripts/install") if public is None else public.installer
        home = f"/run/home/{uid}/.config"
        self.units = Path("/etc/systemd/system" if uid is None else f"{home}/systemd/user")
        self.config = Path("/etc/wcache/wcache.toml" if uid is None else f"{home}/wcache/wcache.toml")
        self.socket_dir = Path("/run/wcache" if uid is None else f"/run/user/{uid}/wcache")

    def run(self, *command: str | Path, check: bool = True, text: str | None = None) -> Command:
        return self.host.run(*command, check=check, text=text, uid=self.uid)

    def systemctl(self, *words: str, check: bool = True) -> Command:
        scope = [] if self.uid is None else ["--user"]
        return self.run("systemctl", *scope, *words, check=check)

    def cli(self, *words: str, check: bool = True) -> Command:
        scope = [] if self.uid is None else ["--user"]
        return self.run(self.wcache, *scope, *words, check=check)

    def write(self, path: Path, text: str) -> None:
        self.run("mkdir", "-p", path.parent)
        self.run("tee", path, text=text)

    def install(self, config: str) -> None:
        """The configuration, our units by scripts/install, and a daemon-reload."""
        self.write(self.config, config)
        scope = [] if self.uid is None else ["--user"]
        self.run(*self.installer, *scope, "--wcache", self.wcache, "--reload")

    def drop_in(self, text: str) -> None:
        """Directives for all ranks, as an operator would add them; "" takes them away."""
        path = self.units / "wcache@.service.d" / "90-test.conf"
        if text:
            self.write(path, text)
        else:
            self.run("rm", "-f", path)
        self.systemctl("daemon-reload")

    def clear(self) -> None:
        """Nothing runs, nothing is kept, nothing is remembered."""
        self.systemctl("stop", "wcache.target", "wcache@*.service", "wcache@*.socket", check=False)
        self.systemctl("reset-failed")
        self.drop_in("")
        state = "/var/lib/wcache" if self.uid is None else f"/run/home/{self.uid}/.local/state/wcache"
        self.run("sh", "-c", f"rm -rf {state}/* {self.socket_dir}/*")
        for log in (self.host.directory / "log").glob("wcache*"):
            log.unlink()

    # --- what the manager says ----------------------------------------------------------------------------------------

    def show(self, unit: str, name: str) -> str:
        return self.systemctl("show", "-P", name, unit).stdout.strip()

    def number(self, unit: str, name: str) -> int:
        value = self.show(unit, name)
        return int(value) if value.isdigit() else 0

    def pid(self, rank: int) -> int:
        return self.number(f"wcache@{rank}.service", "MainPID")

    def kill(self, rank: int, signal: str = "KILL") -> None:
        self.run("kill", f"-{signal}", str(self.pid(rank)))

    # --- what a rank says ---------------------------------------------------------------------------------------------

    def socket(self, rank: int) -> Path:
        return socket_path(self.host.path(self.socket_dir), rank)

    def connect(self, rank: int, role: str = "admin") -> Connection:
        return connect(self.socket(rank), role=role, name="test", timeout_s=30.0)

    def status(self, rank: int) -> RankStatus:
        with self.connect(rank) as connection:
            return connection.ask(GetStatus(), Status).status

    @contextmanager
    def engine(self, rank: int) -> Iterator[Mapped]:
        """Attach to what the rank holds, as an engine of this process, and keep it mapped."""
        shard = self.status(rank).shards[0]
        query = Query(layout=shard.layout, content=shard.content, model=shard.model)
        with connect(self.socket(rank), role="engine", name="test engine", timeout_s=30.0) as connection:
            _, manifest, segments = connection.attach(Attach(query=query))
            inodes = tuple(os.fstat(fd.fileno()).st_ino for fd in segments)
            maps = [mmap.mmap(fd.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) for fd in segments]
            close_all([manifest, *segments])
            try:
                yield Mapped(maps, inodes, shard.generation)
            finally:
                for one in maps:
                    one.close()


@dataclass
class Mapped:
    """A shard as this process has it mapped; `inodes` of its memory files are what makes it the same memory."""

    maps: list[mmap.mmap]
    inodes: tuple[int, ...]
    generation: int

    def digest(self) -> str:
        whole = hashlib.sha256()
        for one in self.maps:
            whole.update(one)
        return whole.hexdigest()


class Traced:
    """Counts what a rank's daemon and all its children read below a directory: every such system call, by strace.

    `directives` make the unit run under it; `delay_reads` makes each read that fills memory wait first.
    """

    def __init__(self, host: Host, wcache: Path, directory: Path) -> None:
        self._logs = host.directory / "strace"  # one for each rank: two tracers would write into each other's lines
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir()
        self._directory = directory
        self._wcache = wcache

    def directives(self, *options: str) -> str:
        # -D: the tracer is a grandchild, so that the daemon stays the unit's main process
        calls = "open,openat,openat2,read,readv,pread64,preadv,preadv2,mmap"
        strace = f"/usr/bin/strace -D -A -f -y --seccomp-bpf -qqq -e signal=none -e trace={calls} -o {self._logs}/%i"
        return f"[Service]\nExecStart=\nExecStart={strace} {' '.join(options)} {self._wcache} daemon --rank %i\n"

    def bytes_read(self) -> int:
        """Bytes that read calls returned, and bytes that were mapped, of files below the directory."""
        name = re.escape(str(self._directory))
        read = re.compile(rf"p?readv?2?(?:64)?\(\d+<{name}/[^>]*>.* = (\d+)(?: \(DELAYED\))?$", re.MULTILINE)
        mapped = re.compile(rf"mmap\([^,\n]*, (\d+), [^<\n]*<{name}/", re.MULTILINE)
        texts = [self._whole(log.read_text()) for log in self._logs.iterdir()]
        return sum(int(size) for text in texts for calls in (read, mapped) for size in calls.findall(text))

    def opened(self) -> list[str]:
        """Checkpoint files that were opened."""
        name = re.escape(str(self._directory))
        opened = re.compile(rf"open(?:at2?)?\([^\n]*= \d+<({name}/[^>]*\.safetensors)>")
        return [path for log in self._logs.iterdir() for path in opened.findall(self._whole(log.read_text()))]

    def forget(self) -> None:
        for log in self._logs.iterdir():
            log.write_text("")

    @staticmethod
    def _whole(text: str) -> str:
        """Calls that strace had to print in two pieces, put together again."""
        waiting: dict[str, str] = {}
        lines = []
        for line in text.splitlines():
            pid, _, rest = line.partition(" ")
            rest = rest.strip()
            if rest.endswith("<unfinished ...>"):
                waiting[pid] = rest.removesuffix("<unfinished ...>")
            elif match := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
                lines.append(waiting.pop(pid, "") + match[1])
            else:
                lines.append(rest)
        return "\n".join(lines)


def config(model: Path, *, tp_size: int = 1, **more: object) -> str:
    """A wcache.toml for `tp_size` ranks."""
    lines = [f'model = "{model}"', f"ranks = {list(range(tp_size))}", f"parallel = {{tp_size = {tp_size}}}"]
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in more.items())]) + "\n"


def seconds_until(condition: Callable[[], object], deadline_s: float, what: str) -> float:
    """Wait for a condition; how long it took. Fails with `what`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > deadline_s:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        time.sleep(0.05)
    return time.monotonic() - start
