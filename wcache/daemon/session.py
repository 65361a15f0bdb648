# SPDX-License-Identifier: Apache-2.0
"""A connection's life in the daemon: handshake, requests, and what its end means.

One thread a session, a blocking socket, a deadline on every wait: a client that is silent, slow or hostile loses its
own connection and delays nobody. A session without a lease and without a publication may not idle. Errors that a
client caused travel to it; what nobody expected gets an id that is in the journal and in the client's message.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from wcache import __version__
from wcache.daemon.facts import Client, Found, Grant, NotHere, Wait
from wcache.daemon.publishing import Writer
from wcache.daemon.rank import Rank
from wcache.daemon.state import State
from wcache.daemon.status import count
from wcache.daemon.verifying import verify
from wcache.errors import (
    Busy,
    ConnectionClosed,
    DeadlineExceeded,
    Denied,
    InternalError,
    Miss,
    NoSuchShard,
    ProtocolError,
    WcacheError,
)
from wcache.host.fds import MAX_FDS_PER_RECORD, OwnedFd, close_all, receive, send
from wcache.host.peer import Peer, identify
from wcache.log import MISSED, fields
from wcache.model import IdentityPolicy, MissReason, Origin
from wcache.protocol import messages as m

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
PENDING_EVERY_S = 1.5
MAX_WAIT_S = 24 * 3600.0
MAX_NAME = 200
ROLES = ("engine", "loader", "admin")

Answer = TypeVar("Answer")


class Session:
    """One accepted connection. `run` is the thread's target; `drop` may be called from any thread."""

    def __init__(self, number: int, sock: socket.socket, rank: Rank) -> None:
        self.number = number
        self._sock = sock
        self._rank = rank
        self._config = rank.who.config
        self._writer = Writer(rank, number)
        self._peer: Peer | None = None
        self._client: Client | None = None

    def drop(self) -> None:
        """End the connection; its thread then cleans up."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it ended by itself
            return

    def run(self) -> None:
        try:
            self._handshake()
            while True:
                self._serve_one()
        except ConnectionClosed:
            pass
        except WcacheError as e:
            log.info("rank %d: connection %s dropped: %s", self._rank.who.rank, self._who(), e)
            self._fail(e)
        except RecursionError:  # a value nested deeper than any real one
            self._fail(ProtocolError("a value is nested too deeply"))
        except Exception:  # the connection's loop: a defect costs this client, not the others
            error_id = secrets.token_hex(6)
            log.exception("rank %d: defect while serving %s (error id %s)", self._rank.who.rank, self._who(), error_id)
            self._fail(InternalError(f"the daemon failed to answer (error id {error_id})", error_id))
        finally:
            self._end()

    def _who(self) -> str:
        return f"{self.number} of {self._client.name if self._client else 'a client'} ({self._peer or 'unknown'})"

    def _end(self) -> None:
        with self._rank.state() as state:
            publication = state.disconnected(self.number)
        if publication is not None:
            log.warning(
                "rank %d: %s ended before its commit; nothing remains", self._rank.who.rank, publication.client.name
            )
        self._writer.close()
        self._sock.close()

    # --- handshake ----------------------------------------------------------------------------------------------------

    def _handshake(self) -> None:
        config = self._config
        self._sock.settimeout(config.timeouts.handshake_s)
        self._peer = peer = identify(self._sock)
        hello, fds = self._receive()
        close_all(fds)
        if not peer.may(config.allowed_uids + config.publish_uids, config.allowed_gids):
            with self._rank.state() as state:
                state.note_miss(None, None, NotHere(MissReason.DENIED, str(peer)), time.time())
            raise Denied(f"{peer} may not use rank {self._rank.who.rank}")
        if not isinstance(hello, m.Hello):
            raise ProtocolError(f"{type(hello).__name__} before Hello")
        if hello.protocol != m.PROTOCOL_VERSION:
            raise ProtocolError(f"protocol {hello.protocol}; this daemon ({__version__}) speaks {m.PROTOCOL_VERSION}")
        if hello.role not in ROLES:
            raise ProtocolError(f"role {hello.role[:MAX_NAME]!r}; there are {', '.join(ROLES)}")
        if hello.role == "loader" and not peer.privileged:
            raise Denied(f"{peer} may not act as this rank's loader")
        self._client = Client(self.number, _printable(hello.name), hello.role, peer.pid, peer.uid, hello.device)
        device = self._rank.read(lambda state: state.device)
        who = self._rank.who
        self._send(
            m.Welcome(
                protocol=m.PROTOCOL_VERSION,
                version=__version__,
                nonce=who.nonce,
                rank=who.rank,
                device=device or "",
                backend=config.backend,
            )
        )

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ProtocolError("no Hello yet")
        return self._client

    # --- requests -----------------------------------------------------------------------------------------------------

    def _serve_one(self) -> None:
        may_idle = self.client.role == "loader" or self._rank.read(
            lambda state: state.has_lease(self.number) or state.has_publication(self.number)
        )
        self._sock.settimeout(None if may_idle else IDLE_TIMEOUT_S)
        request, fds = self._receive()
        try:
            self._dispatch(request, fds)
        except (ConnectionClosed, DeadlineExceeded, ProtocolError):
            raise
        except WcacheError as e:  # the answer to this request; the connection goes on
            self._send(m.Failure.of(e))
        finally:
            close_all(fds)  # what nobody took over

    def _dispatch(self, request: m.ToDaemon, fds: list[OwnedFd]) -> None:
        match request:
            case m.Attach():
                self._attach(request)
            case m.Reattach():
                self._reattach(request)
            case m.Release():
                with self._rank.state() as state:
                    evicted, holders = state.release(self.number, request.fingerprint, evict=request.evict)
                self._send(m.Released(evicted=evicted, holders=holders))
            case m.PublishBegin():
                self._publish_begin(request)
            case m.Progress():
                with self._rank.state() as state:
                    state.progress(self.client, request.progress)
            case m.PublishSegments():
                self._publishing(lambda: self._writer.add(request.first, _take(fds)))
                self._send(m.Done())
            case m.PublishCommit():
                shard = self._publishing(lambda: self._writer.commit(_take(fds)))
                self._send(m.Committed(fingerprint=shard.id, generation=shard.generation))
            case m.PublishAbort():
                self._publish_abort(request)
            case m.GetStatus():
                self._send(m.Status(status=self._rank.status()))
            case m.Explain():
                self._explain(request)
            case m.Evict() | m.Verify() | m.Reload() | m.Drain():
                self._administer(request)
            case m.Hello():
                raise ProtocolError("a second Hello")

    # --- attach -------------------------------------------------------------------------------------------------------

    def _attach(self, request: m.Attach) -> None:
        answer = self._await(
            lambda state: state.attach(self.client, request.query, request.mode, time.time()), request.wait_s
        )
        if isinstance(answer, Wait):
            answer = _gave_up(answer, request.wait_s)
        if isinstance(answer, NotHere):
            raise self._missed(answer, request.query)
        try:
            with self._rank.store.lend(answer.generation) as holding:
                hit = m.Hit(fingerprint=answer.id, generation=answer.generation, segments=len(holding.segments))
                self._send(hit, [holding.manifest])
                for first in range(0, len(holding.segments), MAX_FDS_PER_RECORD):
                    self._send(m.SegmentFds(first=first), holding.segments[first : first + MAX_FDS_PER_RECORD])
        except NoSuchShard as e:  # evicted by force between the answer and here
            raise self._missed(NotHere(MissReason.GENERATION_GONE, str(e)), request.query) from e

    def _missed(self, answer: NotHere, query: m.Query) -> Miss:
        if query.content is None and query.policy is not IdentityPolicy.TRUST:
            # Only asked whether somebody is publishing it; the engine's miss is the question that names a content.
            return Miss(answer.reason, answer.message, answer.differences)
        with self._rank.state() as state:
            state.note_miss(self.client, query, answer, time.time())
        log.info(
            "rank %d: miss (%s) for %s: %s", self._rank.who.rank, answer.reason, self.client.name, answer.message,
            extra=fields(MESSAGE_ID=MISSED, WCACHE_RANK=self._rank.who.rank, WCACHE_REASON=answer.reason),
        )  # fmt: skip
        return Miss(answer.reason, answer.message, answer.differences)

    def _reattach(self, request: m.Reattach) -> None:
        answer = self._await(
            lambda s: s.reattach(self.client, request.fingerprint, request.generation, request.mode, time.time()),
            IDLE_TIMEOUT_S,
        )
        if isinstance(answer, Wait):
            answer = _gave_up(answer, 0.0)
        if answer is not None:
            with self._rank.state() as state:
                state.note_miss(self.client, None, answer, time.time())
            raise Miss(answer.reason, answer.message)
        self._send(m.Done())

    def _explain(self, request: m.Explain) -> None:
        answer = self._rank.read(lambda state: state.resolve(request.query, self.client.device))
        if isinstance(answer, Wait):
            answer = _gave_up(answer, 0.0)
        if isinstance(answer, Found):
            self._send(m.Explained(hit=answer.id, weight_bytes=answer.weight_bytes))
            return
        self._send(
            m.Explained(
                hit=None,
                reason=answer.reason,
                message=answer.message,
                differences=answer.wire(),
                weight_bytes=answer.weight_bytes,
            )
        )

    # --- publish ------------------------------------------------------------------------------------------------------

    def _publish_begin(self, request: m.PublishBegin) -> None:
        config = self._config
        if self._peer is None or not self._peer.may(config.publish_uids):
            raise Denied(f"{self._peer} may not publish", hint="publish_uids in wcache.toml says who may")
        if (request.origin is Origin.PRELOAD) != (self.client.role == "loader"):
            raise Denied(f"a client of role {self.client.role} may not publish as {request.origin}")
        answer = self._await(
            lambda state: state.publish_begin(
                self.client, request.query, request.origin, request.spec, request.bytes_total, time.time()
            ),
            request.wait_s,
        )
        match answer:
            case Grant(generation):
                self._send(m.Granted(generation=generation))
            case Found():
                self._send(m.Resident(fingerprint=answer.id, generation=answer.generation))
            case Wait():
                raise Busy(answer.text)

    def _publishing(self, step: Callable[[], Answer]) -> Answer:
        """A step of a publication: if it fails, the publication is over and nothing of it remains."""
        self._rank.read(lambda state: state.publication(self.number))
        try:
            return step()
        except WcacheError:
            self._writer.close()
            with self._rank.state() as state:
                if state.has_publication(self.number):
                    state.abort(self.number)
            raise

    def _publish_abort(self, request: m.PublishAbort) -> None:
        self._writer.close()
        with self._rank.state() as state:
            publication = state.abort(self.number)
            if publication.origin is Origin.PRELOAD:
                state.preload.reason = _printable(request.reason, 2000)
        log.warning(
            "rank %d: %s gave its publication up: %s", self._rank.who.rank, self.client.name,
            _printable(request.reason, 2000),
        )  # fmt: skip
        self._send(m.Done())

    # --- administration -----------------------------------------------------------------------------------------------

    def _administer(self, request: m.Evict | m.Verify | m.Reload | m.Drain) -> None:
        if self._peer is None or not self._peer.privileged or self.client.role != "admin":
            raise Denied(
                f"{self._peer} in role {self.client.role} may not ask for {type(request).__name__}",
                hint="only root and the daemon's own user may",
            )
        self._await(lambda state: state.started or Wait("the rank is starting", None), IDLE_TIMEOUT_S)
        match request:
            case m.Evict():
                with self._rank.state() as state:
                    freed = state.evict(request.fingerprint, force=request.force)
                names = tuple(dict.fromkeys(f.id for f in freed))
                self._send(m.Evicted(fingerprints=names, bytes_freed=sum(f.bytes_freed for f in freed)))
            case m.Verify():
                verdicts = verify(self._rank, request.fingerprint, lambda text: self._send(m.Pending(text=text)))
                self._send(m.Verified(verdicts=verdicts))
            case m.Reload():
                with self._rank.state() as state:
                    state.reload()
                self._send(m.Done(text="loading anew"))
            case m.Drain():
                self._drain(_capped(request.deadline_s))

    def _drain(self, deadline_s: float) -> None:
        rank = self._rank
        with rank.state() as state:
            state.drain()
        log.info("rank %d draining: no new attaches", rank.who.rank)
        try:
            over = self._await(lambda s: True if s.drained else Wait("waiting for engines to detach", None), deadline_s)
        except BaseException:  # who asked for it went away
            with rank.state() as state:
                state.give_up_drain()
            raise
        with rank.state() as state:
            if isinstance(over, Wait):
                raise state.give_up_drain()
            freed = state.finish_drain()
        rank.store.drop_device()
        text = f"{count(len(freed), 'shard')} freed"
        log.info("rank %d drained: %s", rank.who.rank, text)
        self._send(m.Done(text=text))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _await(self, event: Callable[[State], Answer], wait_s: float) -> Answer:
        """Ask until the answer is not Wait or `wait_s` is over; tells the client that it is not forgotten."""
        now = time.monotonic()
        deadline, told = now + _capped(wait_s), now
        while True:
            answer, version = self._rank.decide(event)
            now = time.monotonic()
            if not isinstance(answer, Wait) or now >= deadline:
                return answer
            if now - told >= PENDING_EVERY_S:
                self._send(m.Pending(text=answer.text, progress=answer.progress))
                told = now
            self._rank.wait(version, min(deadline - now, told + PENDING_EVERY_S - now))

    def _receive(self) -> tuple[m.ToDaemon, list[OwnedFd]]:
        record, fds = receive(self._sock)
        try:
            return m.decode_request(record), fds
        except BaseException:
            close_all(fds)
            raise

    def _send(self, message: m.Message, fds: list[OwnedFd] | None = None) -> None:
        self._sock.settimeout(SEND_TIMEOUT_S)
        send(self._sock, m.encode(message), fds or [])

    def _fail(self, error: WcacheError) -> None:
        """Say why, if the client still listens; it gets no second chance."""
        try:
            self._sock.settimeout(1.0)
            send(self._sock, m.encode(m.Failure.of(error)))
        except WcacheError:
            return


def _gave_up(wait: Wait, waited_s: float) -> NotHere:
    if waited_s > 0:
        return NotHere(MissReason.DEADLINE, f"{wait.text}; not resident within {waited_s:g} s")
    return NotHere(MissReason.LOADING, wait.text)


def _capped(seconds: float) -> float:
    """A client's wish as a finite wait; NaN is none."""
    return min(seconds, MAX_WAIT_S) if seconds > 0 else 0.0


def _printable(text: str, limit: int = MAX_NAME) -> str:
    """A client's words as one harmless line."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


def _take(fds: list[OwnedFd]) -> list[OwnedFd]:
    """Hand descriptors on: the list they came in no longer owns them."""
    taken = list(fds)
    fds.clear()
    return taken
