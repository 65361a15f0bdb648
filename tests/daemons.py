# SPDX-License-Identifier: Apache-2.0
"""Real daemons in the foreground for tests: a stand-in for systemd that keeps descriptors, and a minimal client.

`Manager` is a notify socket that records what it is told and is a fd store; `Daemon` is a real `python -m
wcache.daemon` process on a directory of its own; `publish` and `shard_bytes` speak the protocol without torch.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wcache.errors import Unavailable
from wcache.host.fds import OwnedFd, close_all, sealed_memfd
from wcache.model import CPU, BackendName, Kind, Origin
from wcache.protocol.connection import Connection, connect, socket_path
from wcache.protocol.messages import (
    Committed,
    Done,
    GetStatus,
    Granted,
    PublishBegin,
    PublishCommit,
    PublishSegments,
    Query,
    RankStatus,
    Status,
)
from wcache.weights import manifest as manifests
from wcache.weights.fingerprint import Fingerprint, LayoutKey
from wcache.weights.manifest import Manifest, SegmentSpec, StorageSpec, TensorSpec
from wcache.weights.segment_host import HostBackend

START_TIMEOUT_S = 20.0
CHILD = Path(__file__).with_name("daemon_child.py")


@dataclass
class Told:
    at: float
    text: str


class Manager:
    """The notify socket of a service manager, and its fd store. `stores` False: as with FileDescriptorStoreMax=0."""

    def __init__(self, path: Path, *, stores: bool = True) -> None:
        self.path = path
        self.stores = stores
        self.told: list[Told] = []
        self.kept: list[tuple[str, OwnedFd]] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, name="manager", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        space = socket.CMSG_SPACE(16 * 4)
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, space, socket.MSG_CMSG_CLOEXEC)
            numbers = array.array("i")
            for _, _, raw in ancillary:
                numbers.frombytes(raw)
            fds = [OwnedFd(n) for n in numbers]
            if data == b"END":
                return
            with self._changed:
                self._take(data.decode(), fds)
                self._changed.notify_all()
            close_all(fds)

    def _take(self, text: str, fds: list[OwnedFd]) -> None:
        self.told.append(Told(time.monotonic(), text))
        values = dict(line.split("=", 1) for line in text.splitlines())
        if "FDSTORE" in values and self.stores:
            assert values["FDPOLL"] == "0"
            self.kept += [(values["FDNAME"], fd.duplicate()) for fd in fds]
        if "FDSTOREREMOVE" in values:
            gone = [fd for name, fd in self.kept if name == values["FDNAME"]]
            self.kept = [(name, fd) for name, fd in self.kept if name != values["FDNAME"]]
            close_all(gone)

    def texts(self, prefix: str = "") -> list[str]:
        with self._changed:
            return [t.text for t in self.told if t.text.startswith(prefix)]

    def names(self) -> list[str]:
        with self._changed:
            return [name for name, _ in self.kept]

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                raise AssertionError(f"{what}: not within {timeout_s} s; told {[t.text for t in self.told[-5:]]}")

    def wait_told(self, prefix: str, timeout_s: float = START_TIMEOUT_S) -> str:
        def found() -> str | None:
            return next((t.text for t in self.told if t.text.startswith(prefix)), None)

        self.wait(found, f"message {prefix!r}", timeout_s)
        return found() or ""

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"END", str(self.path))
        self._thread.join()
        self._socket.close()
        close_all(fd for _, fd in self.kept)
        self.path.unlink()


@dataclass
class Daemon:
    """One rank's daemon on its own directory. `start` again after its end is what systemd does."""

    directory: Path
    rank: int = 0
    config: dict[str, object] = field(default_factory=dict)
    manager: Manager | None = None
    loader: Sequence[str] | None = None
    listener: socket.socket | None = None
    watchdog_usec: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket_dir(self) -> Path:
        return self.directory / "run"

    @property
    def path(self) -> Path:
        return socket_path(self.socket_dir, self.rank)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *, wait: bool = True) -> Daemon:
        self.socket_dir.mkdir(exist_ok=True)
        toml = self.directory / "wcache.toml"
        settings = {"socket_dir": str(self.socket_dir), "state_dir": str(self.directory / "state"), **self.config}
        toml.write_text("".join(_toml(k, v) for k, v in sorted(settings.items(), key=lambda i: isinstance(i[1], dict))))
        passed: list[int] = []
        names: list[str] = []
        if self.listener is not None:
            passed, names = [self.listener.fileno()], ["control"]
        if self.manager is not None:
            kept = list(reversed(self.manager.kept))
            passed += [fd.fileno() for _, fd in kept]
            names += [name for name, _ in kept]
        order = {
            "rank": self.rank, "config": str(toml), "passed": passed, "names": names,
            "loader": None if self.loader is None else list(self.loader), "watchdog_usec": self.watchdog_usec,
        }  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "WCACHE_CONFIG")}
        environment |= self.environment
        if self.manager is not None:
            environment["NOTIFY_SOCKET"] = str(self.manager.path)
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CHILD), json.dumps(order)],
                pass_fds=passed, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        if wait:
            self.wait_answer()
        return self

    def wait_answer(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.connect().close()
                return
            except Unavailable:
                assert self.process is not None
                assert self.process.poll() is None, self.log
                assert time.monotonic() < deadline, self.log
                time.sleep(0.01)

    def connect(self, role: str = "admin", name: str = "test", *, device: str | None = None) -> Connection:
        return connect(self.path, role=role, name=name, device=device, timeout_s=5.0)

    def status(self) -> RankStatus:
        with self.connect() as connection:
            return connection.ask(GetStatus(), Status).status

    def wait_status(self, condition: Callable[[RankStatus], object], what: str, timeout_s: float = 20.0) -> RankStatus:
        deadline = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s: {status}\n{self.log}"
            time.sleep(0.02)
        return status

    def fds(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(START_TIMEOUT_S)

    def stop(self) -> int:
        return self.kill(signal.SIGTERM)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


@contextlib.contextmanager
def making(directory: Path) -> Iterator[Callable[..., Daemon]]:
    """Make (not start) daemons on one directory; all are ended at the end of the block, and their log is printed."""
    made: list[Daemon] = []

    def make(**options: object) -> Daemon:
        made.append(Daemon(directory, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()
    if made:
        print(made[0].log)


def _toml(key: str, value: object) -> str:
    if isinstance(value, dict):
        return f"[{key}]\n" + "".join(f"{k} = {_toml_value(v)}\n" for k, v in value.items())
    return f"{key} = {_toml_value(value)}\n"


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


# --- a minimal client -------------------------------------------------------------------------------------------------


def layout(**fields: object) -> LayoutKey:
    base = LayoutKey(engine="minimal", engine_version="1", architecture="Bytes", dtype="uint8")
    return msgspec.structs.replace(base, **fields)


def content_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def query(text: str = "a", **fields: object) -> Query:
    return Query(layout=layout(**fields), model=f"/models/{text}", content=content_of(text))


def payload(seed: int, size: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(size)


def make(
    asked: Query, *, segments: int = 2, size: int = 5000, rank: int = 0, origin: Origin = Origin.ENGINE,
    spec: str | None = None, content: str | None = None, spoil: bool = False,
) -> tuple[Manifest, list[OwnedFd]]:  # fmt: skip
    """A manifest of one uint8 tensor a segment and its sealed segments. `spoil`: the last digest is wrong."""
    backend = HostBackend()
    fds, specs = [], []
    for i in range(segments):
        segment = backend.create(f"test{i}", size)
        segment.memory()[:size] = payload(i, size)
        specs.append(SegmentSpec(size, segment.aligned_size, segment.digest()))
        fds.append(segment.seal())
    if spoil:
        specs[-1] = msgspec.structs.replace(specs[-1], digest="sha256:" + "0" * 64)
    manifest = Manifest(
        version=manifests.VERSION,
        fingerprint=Fingerprint(content or asked.content or "0" * 64, asked.layout),
        rank=rank,
        backend=BackendName.HOST,
        device=CPU,
        origin=origin,
        model=asked.model,
        created=time.time(),
        segments=tuple(specs),
        storages=tuple(StorageSpec(i, 0, size) for i in range(segments)),
        tensors=tuple(TensorSpec((f"t{i}",), Kind.PARAMETER, "uint8", (size,), (1,), i) for i in range(segments)),
        spec=spec,
    )
    return manifest, fds


def commit(connection: Connection, manifest: Manifest, fds: list[OwnedFd]) -> Committed:
    """From the grant to the commit; closes the descriptors."""
    try:
        for first in range(0, len(fds), 128):
            connection.ask(PublishSegments(first=first), Done, fds[first : first + 128])
        with sealed_memfd("manifest", manifests.encode(manifest)) as memfd:
            return connection.ask(PublishCommit(), Committed, [memfd])
    finally:
        close_all(fds)


def publish(
    connection: Connection, asked: Query, *, origin: Origin = Origin.ENGINE, wait_s: float = 0.0, **how: object
) -> Committed:
    """Publish anew; `wait_s`: for another writer."""
    manifest, fds = make(asked, origin=origin, **how)  # type: ignore[arg-type]
    try:
        size = manifest.segment_bytes
        begin = PublishBegin(query=asked, origin=origin, bytes_total=size, spec=manifest.spec, wait_s=wait_s)
        connection.ask(begin, Granted)
        return commit(connection, manifest, fds)
    finally:
        close_all(fds)


def read(fd: OwnedFd, size: int) -> bytes:
    with mmap.mmap(fd.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as data:
        return data[:size]


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[socket.socket]:
    """A connection that says nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        yield sock
