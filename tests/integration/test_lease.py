# SPDX-License-Identifier: Apache-2.0
"""The lease of an engine: outlives the daemon, ends with the memory, stays behind at a fork; odd ranks are misses."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import daemons
import psutil
import pytest
from daemons import Daemon, Manager

from wcache.engine.client import Attachment, as_miss, attach_shard
from wcache.engine.lease import LeaseState, held
from wcache.errors import Miss, WcacheError
from wcache.host.fds import receive, send
from wcache.model import BackendName, MissReason, Origin
from wcache.protocol.messages import PROTOCOL_VERSION, Granted, Hit, PublishBegin, Welcome, encode


@pytest.fixture
def attachment(daemon: Daemon) -> Iterator[Attachment]:
    """An attachment to a small shard of a running rank."""
    with daemon.connect(role="engine") as connection:
        daemons.publish(connection, daemons.query())
    held = attach_shard(daemons.query(), daemon.path, name="engine")
    yield held
    held.close()


def leases(daemon: Daemon) -> list[int | None]:
    return [lease.pid for shard in daemon.status().shards for lease in shard.leases]


def test_the_daemons_death_is_noticed_within_a_second_and_said_once(
    daemon: Daemon, attachment: Attachment, caplog: pytest.LogCaptureFixture
) -> None:
    assert attachment.lease is not None
    before = [attachment.mapping.digest(i) for i in range(2)]
    daemon.kill()
    start = time.monotonic()
    assert attachment.lease.wait(LeaseState.LOST, 5)
    assert time.monotonic() - start < 1
    assert [attachment.mapping.digest(i) for i in range(2)] == before
    with pytest.raises(WcacheError) as e:
        attach_shard(daemons.query(), daemon.path, connect_timeout_s=0.5)
    assert as_miss(e.value).reason is MissReason.NO_DAEMON
    assert sum("went away" in message for message in caplog.messages) == 1
    daemon.start()
    assert attachment.lease.wait(LeaseState.HELD, 20)
    assert leases(daemon) == [os.getpid()]
    assert sum("went away" in message for message in caplog.messages) == 1


def test_a_daemon_that_lost_the_shard_leaves_the_engine_its_mapping(
    make_daemon: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a fd store nothing is restored: the lease is gone, the bytes are not, no thread goes on asking."""
    daemon = make_daemon().start()
    with daemon.connect(role="engine") as connection:
        daemons.publish(connection, daemons.query())
    attachment = attach_shard(daemons.query(), daemon.path)
    before = attachment.mapping.digest(0)
    lease = attachment.lease
    assert lease is not None
    daemon.kill()
    daemon.start()
    assert lease.wait(LeaseState.GONE, 20)
    assert attachment.mapping.digest(0) == before
    assert "keeps its own mapping" in caplog.text
    deadline = time.monotonic() + 5
    while held():
        assert time.monotonic() < deadline, "the keeper goes on"
        time.sleep(0.01)
    attachment.close()


def test_closing_while_the_daemon_is_away_ends_the_keeper(daemon: Daemon, attachment: Attachment) -> None:
    assert attachment.lease is not None
    daemon.kill()
    assert attachment.lease.wait(LeaseState.LOST, 5)
    start = time.monotonic()
    attachment.close()
    assert time.monotonic() - start < 1.5
    deadline = time.monotonic() + 5
    while held():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12 on
def test_a_forked_child_has_the_bytes_and_leaves_the_lease_to_its_parent(
    daemon: Daemon, attachment: Attachment
) -> None:
    expected = attachment.mapping.digest(0)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            lease = attachment.lease
            good = lease is not None and lease.state is LeaseState.ENDED and held() == 0
            attachment.lease = None
            code = 0 if good and attachment.mapping.digest(0) == expected else 2
            attachment.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert leases(daemon) == [os.getpid()]
    assert attachment.lease is not None
    assert attachment.lease.state is LeaseState.HELD
    daemon.kill()
    assert attachment.lease.wait(LeaseState.LOST, 5), "the parent's keeper still watches"


def test_a_thousand_attaches_leave_nothing_behind(daemon: Daemon, attachment: Attachment) -> None:
    """Descriptors on both sides, threads, mapped segments, and memory to within a page or two per hundred."""
    process = psutil.Process()

    def cycle(times: int) -> None:
        for _ in range(times):
            with attach_shard(daemons.query(), daemon.path) as other:
                assert len(other.manifest.tensors) == 2

    def now() -> tuple[int, int, int]:
        return process.num_fds(), daemon.fds(), threading.active_count()

    cycle(200)
    daemon.wait_status(lambda s: len(s.shards[0].leases) == 1, "one lease")
    before, rss = now(), process.memory_info().rss
    cycle(1000)
    daemon.wait_status(lambda s: len(s.shards[0].leases) == 1 and now() <= before, "as before")
    assert process.memory_info().rss - rss < 4 << 20


def test_two_attachments_of_one_shard_in_a_process_are_independent(daemon: Daemon, attachment: Attachment) -> None:
    expected = attachment.mapping.digest(0)
    with attach_shard(daemons.query(), daemon.path) as other:
        assert other.mapping.digest(0) == expected
        assert len(leases(daemon)) == 2
    daemon.wait_status(lambda s: len(s.shards[0].leases) == 1, "one lease")
    assert attachment.mapping.digest(0) == expected


def test_an_engine_on_another_device_is_a_miss_that_names_both(daemon: Daemon, attachment: Attachment) -> None:
    with pytest.raises(Miss) as e:
        attach_shard(daemons.query(), daemon.path, device="GPU-00000000-0000-0000-0000-000000000000")
    assert e.value.reason is MissReason.DEVICE
    assert "GPU-00000000-0000-0000-0000-000000000000" in str(e.value)
    assert "cpu" in str(e.value)


@contextlib.contextmanager
def odd_rank(path: Path, behave: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something that listens where a rank should and treats its one client as `behave` says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError, WcacheError):
            client.settimeout(10)
            behave(client)

    thread = threading.Thread(target=serve, name="odd-rank")
    thread.start()
    yield
    thread.join()
    listener.close()


def silent(client: socket.socket) -> None:
    receive(client)
    client.recv(1)


def garbage(client: socket.socket) -> None:
    receive(client)
    send(client, b"\x80\x04\x95not a message")


def welcome(client: socket.socket) -> None:
    receive(client)
    hello = Welcome(protocol=PROTOCOL_VERSION, version="0", nonce="n", rank=0, device="cpu", backend=BackendName.HOST)
    send(client, encode(hello))
    receive(client)


def hit_without_anything(client: socket.socket) -> None:
    welcome(client)
    send(client, encode(Hit(fingerprint="0" * 64, generation=1, segments=3)))


def dies_when_asked(client: socket.socket) -> None:
    welcome(client)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (silent, MissReason.NO_DAEMON),
        (garbage, MissReason.PROTOCOL),
        (hit_without_anything, MissReason.PROTOCOL),
        (dies_when_asked, MissReason.NO_DAEMON),
    ],
)
def test_whatever_listens_there_an_engine_gets_a_typed_miss_in_time(
    short_dir: Path, behave: Callable[[socket.socket], None], reason: MissReason
) -> None:
    path = short_dir / "rank-0.sock"
    start = time.monotonic()
    with odd_rank(path, behave), pytest.raises(WcacheError) as e:
        attach_shard(daemons.query(), path, connect_timeout_s=0.5)
    assert as_miss(e.value).reason is reason
    assert time.monotonic() - start < 3


def test_a_process_short_of_descriptors_gets_a_miss_and_leaks_none(daemon: Daemon, attachment: Attachment) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 1, hard))
    try:
        with pytest.raises((WcacheError, OSError)) as e:
            attach_shard(daemons.query(), daemon.path, connect_timeout_s=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(e.value, WcacheError | OSError)
    assert as_miss(e.value).reason in (MissReason.UNSUPPORTED, MissReason.PROTOCOL, MissReason.NO_DAEMON)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert leases(daemon) == [os.getpid()]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12 on
def test_a_writer_killed_half_way_leaves_nothing_behind(daemon: Daemon, manager: Manager) -> None:
    """A real process with the publication in hand dies by SIGKILL; whoever waited gets to write."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            connection = daemon.connect(role="engine", name="writer")
            asked = PublishBegin(query=daemons.query(), origin=Origin.ENGINE, bytes_total=1)
            connection.ask(asked, Granted)
            os.write(write, b"!")
            time.sleep(60)
        os._exit(1)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    assert daemon.status().shards == ()
    os.kill(child, 9)
    os.waitpid(child, 0)
    with daemon.connect(role="engine") as connection:
        daemons.publish(connection, daemons.query(), wait_s=20.0)
    assert len(daemon.status().shards) == 1
    assert sum(name.startswith("manifest") for name in manager.names()) == 1


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wcache")
