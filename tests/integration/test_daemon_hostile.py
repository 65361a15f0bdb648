# SPDX-License-Identifier: Apache-2.0
"""Clients that are silent, broken, hostile or short of descriptors cost their own connection and nothing else."""

from __future__ import annotations

import contextlib
import os
import pickle  # noqa: TID251  (what an attacker would send)
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from daemons import Daemon, commit, content_of, hanging, make, publish, query

from wcache.errors import (
    Busy,
    ConnectionClosed,
    Denied,
    ManifestError,
    ProtocolError,
    PublishError,
    WcacheError,
)
from wcache.host.fds import MAX_RECORD_BYTES, close_all, memfd, receive, sealed_memfd, send
from wcache.model import Origin
from wcache.protocol.connection import Connection
from wcache.protocol.messages import (
    Attach,
    Done,
    Drain,
    Evict,
    Evicted,
    Explain,
    Explained,
    Failure,
    GetStatus,
    Granted,
    Hello,
    PublishAbort,
    PublishBegin,
    PublishCommit,
    PublishSegments,
    decode_reply,
    encode,
)

FRAMES = 10_000


def begin(connection: Connection, text: str = "a", *, origin: Origin = Origin.ENGINE) -> None:
    connection.ask(PublishBegin(query=query(text), origin=origin, bytes_total=1), Granted)


def test_silent_half_and_unreading_clients_delay_nobody(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config={"timeouts": {"handshake_s": 1.0}}).start()
    with daemon.connect("engine") as writer:
        publish(writer, query())
    hello = encode(Hello(protocol=1, role="engine", name="x", version="0"))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(hanging(daemon.path)) for _ in range(8)]
        for _ in range(8):
            stack.enter_context(hanging(daemon.path)).send(hello[: len(hello) // 2])
        deaf = stack.enter_context(hanging(daemon.path))
        deaf.send(hello)
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                deaf.send(encode(GetStatus()))
        start = time.monotonic()
        with daemon.connect("engine") as engine:
            _, manifest, fds = engine.attach(Attach(query=query()))
            close_all([manifest, *fds])
        assert time.monotonic() - start < 1.0
        for sock in silent:  # dropped by the handshake's deadline, with a reason
            sock.settimeout(5.0)
            reply = decode_reply(receive(sock)[0])
            assert isinstance(reply, Failure)
            assert reply.code == "deadline"


def test_ten_thousand_random_frames_do_not_hurt_the_daemon(daemon: Daemon) -> None:
    noise = random.Random(7)
    valid = [
        encode(m) for m in (GetStatus(), Attach(query=query()), Evict(), PublishCommit(), PublishSegments(first=0))
    ]
    hello = encode(Hello(protocol=1, role="engine", name="x", version="0"))
    before, sent = daemon.fds(), 0
    while sent < FRAMES:
        with hanging(daemon.path) as sock:
            sock.settimeout(5.0)
            if noise.random() < 0.5:
                sock.send(hello)
                sent += 1
            for _ in range(noise.randrange(1, 8)):
                frame = bytearray(noise.choice(valid))
                for _ in range(noise.randrange(4)):
                    frame[noise.randrange(len(frame))] = noise.randrange(256)
                if noise.random() < 0.3:
                    frame = bytearray(noise.randbytes(noise.randrange(1, 300)))
                sent += 1
                try:
                    sock.send(frame)
                except OSError:  # it has had enough of us
                    break
    daemon.wait_status(lambda _: daemon.fds() <= before + 3, "descriptors return")
    assert "defect" not in daemon.log


@pytest.mark.parametrize(
    "record",
    [b"\x91" * 100_000, b"\x81\xa1a" * 30_000, b"x" * (MAX_RECORD_BYTES + 1)],
    ids=["nested-lists", "nested-maps", "too-long"],
)
def test_a_record_made_to_break_the_parser_is_refused(daemon: Daemon, record: bytes) -> None:
    with hanging(daemon.path) as sock:
        sock.settimeout(5.0)
        sock.send(encode(Hello(protocol=1, role="engine", name="x", version="0")))
        receive(sock)
        sock.send(record)
        with pytest.raises(ProtocolError):
            raise decode_reply(receive(sock)[0]).error()  # type: ignore[union-attr]
    assert daemon.status()


def test_deeply_nested_values_in_a_query_are_refused(daemon: Daemon) -> None:
    deep: object = 1
    for _ in range(300):
        deep = {"a": deep}
    with daemon.connect("engine") as engine:
        asked = query(rope={"deep": deep})
        with pytest.raises(WcacheError) as refused:
            engine.attach(Attach(query=asked))
    assert refused.value.code in ("protocol", "miss")
    assert daemon.status()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def test_a_pickle_is_not_unpickled(daemon: Daemon, short_dir: Path) -> None:
    target = short_dir / "pwned"
    with hanging(daemon.path) as sock:
        sock.settimeout(5.0)
        sock.send(pickle.dumps(Bomb(target)))
        assert isinstance(decode_reply(receive(sock)[0]), Failure)
        with pytest.raises(ConnectionClosed):
            receive(sock)
    assert not target.exists()
    assert daemon.status()


@pytest.mark.parametrize("change", [{"protocol": 99}, {"role": "king"}], ids=str)
def test_a_hello_that_does_not_fit_is_refused_by_name(daemon: Daemon, change: dict[str, object]) -> None:
    hello = msgspec.structs.replace(Hello(protocol=1, role="engine", name="x", version="0"), **change)
    with hanging(daemon.path) as sock:
        sock.settimeout(5.0)
        sock.send(encode(hello))
        reply = decode_reply(receive(sock)[0])
    assert isinstance(reply, Failure)
    assert str(next(iter(change.values()))) in reply.message


def test_six_hundred_segments_attach(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer, daemon.connect("engine") as reader:
        publish(writer, query(), segments=600, size=10)
        hit, manifest, fds = reader.attach(Attach(query=query()))
        close_all([manifest, *fds])
        assert (hit.segments, len(fds)) == (600, 600)


SHORT_OF_FDS = """
import os, resource, sys
from daemons import query
from pathlib import Path
from wcache.errors import FdLimit
from wcache.protocol.connection import connect
from wcache.protocol.messages import Attach
c = connect(Path(sys.argv[1]), role="engine", name="short")
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
try:
    c.attach(Attach(query=query()))
except FdLimit as e:
    print(e.code, len(os.listdir("/proc/self/fd")) - before)
"""


def test_a_client_short_of_descriptors_is_told_so_and_leaks_none(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query(), segments=600, size=10)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_FDS, str(daemon.path)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["fd_limit", "0"], done.stderr
    daemon.wait_status(lambda s: not s.shards[0].leases, "the lease of the failed attach ends")


# --- publications that must not become shards -------------------------------------------------------------------------


def test_an_unsealed_segment_is_refused_and_nothing_remains(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        begin(writer)
        with memfd("open", 8192) as fd, pytest.raises(ManifestError, match="not a sealed memfd"):
            writer.ask(PublishSegments(first=0), Done, [fd])
        publish(writer, query())  # the same connection may try again


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"rank": 1}, "of rank 1"),
        ({"content": content_of("other")}, "content is not the one"),
        ({"origin": Origin.PRELOAD}, "origin"),
        ({"spec": "x"}, "origin or spec"),
    ],
    ids=str,
)
def test_a_manifest_that_was_not_begun_is_refused(daemon: Daemon, how: dict[str, object], message: str) -> None:
    manifest, fds = make(query(), **how)  # type: ignore[arg-type]
    with daemon.connect("engine") as writer:
        begin(writer)
        with pytest.raises(ManifestError, match=message):
            commit(writer, manifest, fds)
    assert not daemon.status().shards


@pytest.mark.parametrize("lie", ["missing", "short", "garbage"])
def test_a_manifest_that_does_not_describe_its_segments_is_refused(daemon: Daemon, lie: str) -> None:
    manifest, fds = make(query())
    with daemon.connect("engine") as writer:
        begin(writer)
        if lie == "missing":
            close_all([fds.pop()])
        if lie == "short":
            close_all([fds.pop()])
            fds.append(sealed_memfd("short", b"x"))
        with pytest.raises(ManifestError):
            if lie == "garbage":
                writer.ask(PublishSegments(first=0), Done, fds)
                with sealed_memfd("m", b"not a manifest") as fd:
                    writer.ask(PublishCommit(), Done, [fd])
            else:
                commit(writer, manifest, fds)
        close_all(fds)
    assert not daemon.status().shards


def test_segments_out_of_order_and_without_a_grant_are_refused(daemon: Daemon) -> None:
    manifest, fds = make(query())
    with daemon.connect("engine") as writer:
        with pytest.raises(PublishError, match="publishing nothing"):
            writer.ask(PublishSegments(first=0), Done, fds)
        begin(writer)
        with pytest.raises(PublishError, match="have come before"):
            writer.ask(PublishSegments(first=1), Done, fds)
    close_all(fds)
    assert manifest


def test_a_writer_that_dies_leaves_nothing_and_makes_room(daemon: Daemon) -> None:
    before = daemon.fds()
    with daemon.connect("engine") as writer, daemon.connect("engine") as second:
        begin(writer)
        _, fds = make(query())
        writer.ask(PublishSegments(first=0), Done, fds)
        close_all(fds)
        with pytest.raises(Busy, match="is publishing it"):
            begin(second)
        writer.close()
        second.ask(PublishBegin(query=query(), origin=Origin.ENGINE, bytes_total=1, wait_s=5.0), Granted)
        second.ask(PublishAbort(reason="a test"), Done)
    daemon.wait_status(lambda _: daemon.fds() <= before + 3, "descriptors return")


def test_aborted_attaches_at_every_step_leave_nothing(daemon: Daemon) -> None:
    with daemon.connect("engine") as writer:
        publish(writer, query(), segments=300, size=10)
    before = daemon.fds()
    for step in range(60):
        with hanging(daemon.path) as sock:
            sock.settimeout(5.0)
            for number, message in enumerate(
                [Hello(protocol=1, role="engine", name="x", version="0"), Attach(query=query())]
            ):
                if step % 5 > number:
                    send(sock, encode(message))
            for _ in range(max(0, step % 5 - 1)):
                close_all(receive(sock)[1])
    daemon.wait_status(lambda s: daemon.fds() <= before + 3 and not s.shards[0].leases, "all is as before")


# --- who may do what --------------------------------------------------------------------------------------------------


def test_an_engine_may_not_administer_nor_preload(daemon: Daemon) -> None:
    with daemon.connect("engine") as engine:
        for request in (Evict(), Drain(deadline_s=1.0)):
            with pytest.raises(Denied):
                engine.ask(request, Done)
        with pytest.raises(Denied):
            begin(engine, origin=Origin.PRELOAD)
        assert engine.ask(Explain(query=query()), Explained).reason == "empty"


AS_SOMEBODY = """
import os, sys
from pathlib import Path
from daemons import query
from wcache.errors import WcacheError
from wcache.protocol.connection import connect
from wcache.model import Origin
from wcache.protocol.messages import *
os.setgroups([int(g) for g in sys.argv[4:]])
os.setresgid(*[int(sys.argv[3])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
try:
    with connect(Path(sys.argv[1]), role="engine", name="somebody") as c:
        print("welcome", c.ask(Explain(query=query()), Explained).reason)
        c.ask(PublishBegin(query=query(), origin=Origin.ENGINE, bytes_total=1), Granted)
        print("granted")
except WcacheError as e:
    print(e.code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize(
    ("config", "who", "expected"),
    [
        ({"allowed_uids": [4001]}, ["4002", "4002"], ["denied"]),
        ({"allowed_uids": [4001]}, ["4001", "4001"], ["welcome", "empty", "denied"]),
        ({"allowed_uids": [1], "allowed_gids": [5005]}, ["4003", "4003", "5005"], ["welcome", "empty", "denied"]),
        ({"publish_uids": [4004]}, ["4004", "4004"], ["welcome", "empty", "granted"]),
    ],
    ids=["stranger", "uid", "supplementary-group", "publisher"],
)
def test_credentials_decide(
    make_daemon: Callable[..., Daemon], short_dir: Path, config: dict[str, object], who: list[str], expected: list[str]
) -> None:
    daemon = make_daemon(config=config).start()
    short_dir.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", AS_SOMEBODY, str(daemon.path), *who], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == expected, done.stderr


def test_every_descriptor_of_the_daemon_is_close_on_exec(daemon: Daemon) -> None:
    flags = []
    for fd in Path(f"/proc/{daemon.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found = [line.split()[1] for line in fd.read_text().splitlines() if line.startswith("flags")]
            flags += found if int(fd.name) > 2 else []
    assert flags
    assert all(int(f, 8) & os.O_CLOEXEC for f in flags)


def test_more_silent_connections_than_there_is_room_for_do_not_lock_others_out(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1100):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(sock)
                sock.connect(str(daemon.path))
        assert daemon.status()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_evict_of_nothing_frees_nothing(daemon: Daemon) -> None:
    with daemon.connect() as admin:
        assert admin.ask(Evict(), Evicted) == Evicted(fingerprints=(), bytes_freed=0)
