# SPDX-License-Identifier: Apache-2.0
"""A lease: the connection that an engine keeps for as long as it maps a shard.

Runs in engines. The lease owns its connection and one keeper thread, which notices the daemon's death by end of file,
logs it once, reconnects with backoff and takes the lease up again; the mapping itself never depends on the daemon.
A lease ends by `end()`, or by itself when the last mapped memory object dies; then thread and connection are gone.
Surprising: after fork() the child has the mapping but no lease: it closes the inherited descriptors and says nothing,
because two processes on one connection would garble it. Memory stays mapped there all the same. The connection
closes itself there, as every one does.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections.abc import Iterable
from enum import StrEnum

from wcache.errors import Miss, WcacheError
from wcache.host.fds import OwnedFd
from wcache.log import DAEMON_LOST, fields
from wcache.model import MissReason, Mode
from wcache.protocol.connection import Connection, connect
from wcache.protocol.messages import Done, Reattach, Release, Released

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.05
BACKOFF_MOST_S = 5.0
RECONNECT_TIMEOUT_S = 2.0  # one attempt; a daemon that still restores its shards is asked again
_JOIN_S = 1.0  # a keeper that is just connecting ends by itself a little later
_PASSING = {MissReason.LOADING, MissReason.DRAINING, MissReason.BUSY, MissReason.DEADLINE, MissReason.NO_DAEMON}


class LeaseState(StrEnum):
    HELD = "held"
    LOST = "lost"  # the daemon is away; the keeper tries to come back
    GONE = "gone"  # the daemon no longer has this generation; the mapping is this process's own now
    ENDED = "ended"


class Lease:
    """The right to a shard that `connection` was given. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        fingerprint: str,
        generation: int,
        mode: Mode,
        name: str,
        *,
        device: str | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.generation = generation
        self.mode = mode
        self.rank = connection.welcome.rank
        self._name = name
        self._device = device
        self._path = connection.path
        self._connection: Connection | None = connection
        self._changed = threading.Condition()
        self._state = LeaseState.HELD
        self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))  # closed when nobody can write to it
        self._held: set[int] = set()
        self._finalizers: list[weakref.finalize[..., object]] = []
        self._thread = threading.Thread(target=self._keep, name=f"wcache-lease-{self.rank}", daemon=True)
        _leases.add(self)
        self._thread.start()

    @property
    def state(self) -> LeaseState:
        return self._state

    def wait(self, state: LeaseState, timeout_s: float) -> bool:
        """Wait until the lease is in `state`; False if it is not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is state, timeout_s)

    def bind(self, memories: Iterable[object]) -> None:
        """End the lease by itself when every one of these objects has died."""
        for memory in memories:
            self._held.add(id(memory))
            finalizer = weakref.finalize(memory, self._died, id(memory))
            finalizer.atexit = False
            self._finalizers.append(finalizer)

    def _died(self, identity: int) -> None:
        """Called by the garbage collector in any thread: no locks here, the keeper does the rest."""
        self._held.discard(identity)
        if not self._held:
            self._stop()

    def release(self, *, evict: bool) -> Released | None:
        """End the lease and learn whether the shard was freed; None if the daemon is away or did not say."""
        connection = self._withdraw()
        if connection is None:
            return None
        try:
            return connection.ask(Release(fingerprint=self.fingerprint, evict=evict), Released)
        except WcacheError as e:
            log.warning("rank %d: the cache was not released: %s", self.rank, e)
            return None
        finally:
            connection.close()

    def end(self) -> None:
        """End the lease: connection closed, keeper gone. Idempotent."""
        connection = self._withdraw()
        if connection is not None:
            connection.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _withdraw(self) -> Connection | None:
        """Take the connection out of the keeper's hands for good."""
        for finalizer in self._finalizers:
            finalizer.detach()
        with self._changed:
            connection, self._connection = self._connection, None
            self._state = LeaseState.ENDED
            self._changed.notify_all()
        self._stop()
        return connection

    def _stop(self) -> None:
        os.eventfd_write(self._wake.fileno(), 1)

    # --- the keeper thread ---------------------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            while self._watch():
                self._lose()
                if not self._come_back():
                    return
        finally:
            self._retire()

    def _watch(self) -> bool:
        """Sleep until the daemon goes away (True) or the lease is to end (False)."""
        with self._changed:
            if self._connection is None:
                return False
            fd = self._connection.fileno()
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        poll.register(fd, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll()}
            with self._changed:
                if self._wake.fileno() in ready or self._connection is None:
                    return False
                if self._connection.ended():
                    return True

    def _lose(self) -> None:
        self._take(None)
        log.warning(
            "rank %d: the weight cache daemon went away; the weights stay mapped, the lease is taken up again"
            " when it is back",
            self.rank,
            extra=fields(MESSAGE_ID=DAEMON_LOST, WCACHE_RANK=self.rank, WCACHE_FINGERPRINT=self.fingerprint),
        )
        self._become(LeaseState.LOST)

    def _come_back(self) -> bool:
        """Reconnect and reattach, however long it takes; False when the lease ended or its generation is gone."""
        delay = BACKOFF_FIRST_S
        while not self._woken(delay):
            try:
                if self._reattach():
                    return True
            except Miss as e:
                if e.reason not in _PASSING:
                    log.warning(
                        "rank %d: the daemon no longer has generation %d of shard %s (%s); this process keeps its"
                        " own mapping",
                        self.rank,
                        self.generation,
                        self.fingerprint[:12],
                        e,
                    )
                    self._become(LeaseState.GONE)
                    return False
            except (WcacheError, OSError) as e:
                log.debug("rank %d: not back yet: %s", self.rank, e)
            delay = min(delay * 2, BACKOFF_MOST_S)
        return False

    def _reattach(self) -> bool:
        """One attempt. Raises what stands in the way; False when the lease ended meanwhile."""
        connection = connect(
            self._path, role="engine", name=self._name, device=self._device, timeout_s=RECONNECT_TIMEOUT_S
        )
        try:
            again = Reattach(fingerprint=self.fingerprint, generation=self.generation, mode=self.mode)
            connection.ask(again, Done)
        except BaseException:
            connection.close()
            raise
        if not self._take(connection):
            connection.close()
            return False
        log.info("rank %d: the weight cache daemon is back; the lease stands again", self.rank)
        self._become(LeaseState.HELD)
        return True

    def _take(self, connection: Connection | None) -> bool:
        """Replace the connection unless the lease has ended."""
        with self._changed:
            if self._state is LeaseState.ENDED:
                return False
            old, self._connection = self._connection, connection
        if old is not None:
            old.close()
        return True

    def _woken(self, delay_s: float) -> bool:
        """Sleep; True if the lease is to end."""
        ready, _, _ = select.select([self._wake.fileno()], [], [], delay_s)
        return bool(ready)

    def _become(self, state: LeaseState) -> None:
        with self._changed:
            if self._state is LeaseState.ENDED:
                return
            self._state = state
            self._changed.notify_all()

    def _retire(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
            if self._state is not LeaseState.GONE:
                self._state = LeaseState.ENDED
            self._changed.notify_all()
        if connection is not None:
            connection.close()
        _leases.discard(self)

    def _abandon(self) -> None:
        """In a forked child: the parent's lease is not ours. The keeper thread does not exist here."""
        self._changed = threading.Condition()
        for finalizer in self._finalizers:
            finalizer.detach()
        self._connection, self._state = None, LeaseState.ENDED


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lease in list(_leases):
        lease._abandon()
    _leases.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def held() -> int:
    """Leases of this process that have a keeper."""
    return len(_leases)
