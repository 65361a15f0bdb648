# SPDX-License-Identifier: Apache-2.0
"""A fork while a connection is a publication's: the child neither keeps it open nor speaks on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import daemons
import pytest
import torch
from daemons import Daemon

from wcache.engine import publish as publishing
from wcache.engine.client import attach_shard
from wcache.engine.entries import Entry
from wcache.engine.lease import LeaseState
from wcache.engine.publish import Publication, begin
from wcache.model import Kind
from wcache.protocol.connection import Connection
from wcache.protocol.messages import Reattach

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # 3.12 on


@pytest.fixture
def fork() -> Iterator[Callable[[], None]]:
    """Forks a child that does nothing until the test ends."""
    children: list[int] = []
    end, keep = os.pipe()

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os.close(keep)
            os.read(end, 1)
            os._exit(0)
        children.append(child)

    yield fork
    os.close(keep)
    os.close(end)
    assert children, "nobody forked"
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)


def started(daemon: Daemon) -> Publication:
    publication = begin(daemons.query(), daemon.path, wait_s=5)
    assert publication is not None
    return publication


def entries() -> list[Entry]:
    return [Entry(("weight",), Kind.PARAMETER, torch.ones(4))]


def no_leases(daemon: Daemon) -> None:
    daemon.wait_status(lambda s: not any(shard.leases for shard in s.shards), "no lease")


def test_a_publication_ends_with_its_writer_while_the_writers_child_lives(
    daemon: Daemon, fork: Callable[[], None]
) -> None:
    publication = started(daemon)
    fork()
    publication._connection.close()  # all that the daemon sees of a writer that is killed
    with started(daemon) as other:
        other.write(entries()).close()


def test_a_fork_after_the_commit_leaves_no_lease_behind(
    daemon: Daemon, fork: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = publishing.map_segments

    def forking(*args: Any) -> Any:
        fork()
        return mapped(*args)

    monkeypatch.setattr(publishing, "map_segments", forking)
    attachment = started(daemon).write(entries())
    assert len(daemon.status().shards[0].leases) == 1
    attachment.close()
    no_leases(daemon)


def test_a_fork_while_a_lease_is_taken_up_again_leaves_none_behind(
    daemon: Daemon, fork: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started(daemon).write(entries()).close()
    attachment = attach_shard(daemons.query(), daemon.path)
    assert attachment.lease is not None
    ask = Connection.ask

    def forking(self: Connection, message: Any, *args: Any, **options: Any) -> Any:
        if isinstance(message, Reattach):
            fork()
        return ask(self, message, *args, **options)

    monkeypatch.setattr(Connection, "ask", forking)
    daemon.kill()
    assert attachment.lease.wait(LeaseState.LOST, 5)
    daemon.start()
    assert attachment.lease.wait(LeaseState.HELD, 20)
    attachment.close()
    no_leases(daemon)


def test_a_forked_child_cannot_abort_its_parents_publication(daemon: Daemon) -> None:
    publication = started(daemon)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            publication.abort("the child has no right to")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publication.write(entries()).close()
    assert len(daemon.status().shards) == 1
