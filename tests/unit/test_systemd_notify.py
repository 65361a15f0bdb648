# SPDX-License-Identifier: Apache-2.0
"""What is said to systemd arrives, descriptors too; what systemd passes in is believed only as far as it can be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Manager

from wcache.errors import SystemdError
from wcache.host.fds import OwnedFd, sealed_memfd
from wcache.host.systemd import Inherited, Notifier, listen_fds, listening_socket, watchdog_interval

US = str(os.getpid())


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    manager = Manager(tmp_path / "n")
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    yield manager
    manager.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    notifier = Notifier()
    yield notifier
    notifier.close()


def test_every_message_has_its_words(manager: Manager, notifier: Notifier) -> None:
    notifier.status("loading 31 %\nREADY=1 ümlaut")
    notifier.extend(60)
    notifier.watchdog()
    notifier.ready("ready")
    notifier.stopping("bye")
    assert notifier.barrier()
    assert [t.text for t in manager.told] == [
        "STATUS=loading 31 % READY=1 ümlaut",
        "EXTEND_TIMEOUT_USEC=60000000",
        "WATCHDOG=1",
        "READY=1\nSTATUS=ready",
        "STOPPING=1\nSTATUS=bye",
        "BARRIER=1",
    ]


def test_a_descriptor_is_stored_and_removed_by_name(manager: Manager, notifier: Notifier) -> None:
    with sealed_memfd("x", b"weights") as fd:
        assert notifier.store("seg.a.1.0", fd)
        assert notifier.barrier()
        (name, kept) = manager.kept[0]
        assert name == "seg.a.1.0"
        assert os.fstat(kept.fileno()).st_ino == os.fstat(fd.fileno()).st_ino
    notifier.remove("seg.a.1.0")
    assert notifier.barrier()
    assert not manager.kept


def test_a_barrier_that_nobody_passes_ends_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notifier = Notifier()
        assert not notifier.barrier(0.1)
        notifier.close()


def test_the_abstract_namespace_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0wcache-test-{US}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@wcache-test-{US}")
        notifier = Notifier()
        notifier.watchdog()
        assert manager.recv(100) == b"WATCHDOG=1"
        notifier.close()


def test_without_systemd_nothing_is_said_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    assert not (notifier.active or notifier.stores or notifier.ready("x") or notifier.barrier())


def test_a_manager_that_went_away_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notifier = Notifier()
    assert not notifier.status("x")
    notifier.close()


def test_children_do_not_see_the_notify_socket(notifier: Notifier) -> None:
    assert "NOTIFY_SOCKET" not in os.environ


@pytest.mark.parametrize(("limit", "stores"), [("0", False), ("64", True), (None, True)])
def test_the_fd_store_is_used_unless_systemd_says_it_takes_nothing(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, limit: str | None, stores: bool
) -> None:
    if limit is None:
        monkeypatch.delenv("FDSTORE", raising=False)
    else:
        monkeypatch.setenv("FDSTORE", limit)
    notifier = Notifier()
    assert notifier.stores is stores
    notifier.close()


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "ü", "x" * 256])
def test_a_name_the_fd_store_cannot_take_is_refused(notifier: Notifier, name: str) -> None:
    with sealed_memfd("x", b"") as fd, pytest.raises(SystemdError):
        notifier.store(name, fd)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": US},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": US, "LISTEN_FDS": "0"},
    ],
    ids=["nothing", "no-pid", "no-count", "other-pid", "zero"],
)
def test_what_was_not_passed_to_us_is_ignored(environment: dict[str, str]) -> None:
    given = dict(environment)
    assert listen_fds(given) == []
    assert not given


@pytest.mark.parametrize(
    "environment",
    [
        {"LISTEN_PID": US, "LISTEN_FDS": "x"},
        {"LISTEN_PID": "x", "LISTEN_FDS": "1"},
        {"LISTEN_PID": US, "LISTEN_FDS": "-1"},
        {"LISTEN_PID": US, "LISTEN_FDS": "9999999"},
        {"LISTEN_PID": US, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "one"},
    ],
    ids=["junk-count", "junk-pid", "negative", "not-open", "names"],
)
def test_values_systemd_never_sets_are_refused(environment: dict[str, str]) -> None:
    code = (
        "import os, sys\nfrom wcache.host.systemd import listen_fds\nfrom wcache.errors import SystemdError\n"
        f"e = {environment!r}\nif e['LISTEN_PID'] == {US!r}: e['LISTEN_PID'] = str(os.getpid())\n"
        "try: listen_fds(e)\nexcept SystemdError: sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, "AF_INET/SOCK_STREAM"),
        (socket.AF_UNIX, socket.SOCK_STREAM, "AF_UNIX/SOCK_STREAM"),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, "does not listen"),
    ],
)
def test_a_socket_of_another_kind_is_refused(family: int, kind: int, message: str) -> None:
    fd = OwnedFd(socket.socket(family, kind).detach())
    with pytest.raises(SystemdError, match=message):
        listening_socket(Inherited("control", fd))


def test_a_file_is_no_socket() -> None:
    with sealed_memfd("x", b"") as fd, pytest.raises(SystemdError, match="not a socket"):
        listening_socket(Inherited("control", fd))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, 1.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": US}, 1.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_interval_by_its_own_process(
    environment: dict[str, str], expected: float | None
) -> None:
    assert watchdog_interval(environment) == expected
    assert "WATCHDOG_USEC" not in environment


@pytest.mark.parametrize("value", ["0", "x", "-5", ""])
def test_a_watchdog_interval_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SystemdError):
        watchdog_interval({"WATCHDOG_USEC": value})
