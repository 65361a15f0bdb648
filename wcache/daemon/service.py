# SPDX-License-Identifier: Apache-2.0
"""One rank's daemon, `wcache@R.service`: listen, serve at once, restore, get the weights resident, tell systemd.

The main thread is the one that reports: it takes the state lock for every STATUS=, READY=1 and WATCHDOG=1, so a daemon
whose lock is stuck is not vouched for. Others accept, serve (one thread a connection), and load. It owns the listening
socket, the lock beside it and the store; children die with it. Exit status: 0 after SIGTERM, 1 when the weights could
not be loaded or an invariant broke; the fd store survives either way. 2 when the loader refused the configuration
and nothing is resident that the fd store could lose.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from wcache.config import Config, Scope, runtime_dir, state_dir
from wcache.daemon.device import open_device
from wcache.daemon.facts import shard_of
from wcache.daemon.listening import Acceptor, listen
from wcache.daemon.loading import Preloader, Surroundings
from wcache.daemon.rank import Rank
from wcache.daemon.reporting import Reporter
from wcache.daemon.state import State
from wcache.daemon.status import Identity
from wcache.daemon.store import Store
from wcache.daemon.verifying import verify_in_background
from wcache.host.fds import OwnedFd
from wcache.host.systemd import Notifier, listen_fds, watchdog_interval
from wcache.log import READY, fields
from wcache.model import BackendName
from wcache.protocol.connection import socket_path

log = logging.getLogger(__name__)

GATHER_S = 0.02
JOIN_TIMEOUT_S = 5.0


class Service:
    """`run` until a signal or a failure. `loader_command` replaces the loader child's command line."""

    def __init__(
        self,
        config: Config,
        rank: int,
        scope: Scope,
        *,
        config_path: Path | None = None,
        loader_command: Sequence[str] | None = None,
    ) -> None:
        self._inherited = listen_fds()  # before anything else is opened: the numbers are fixed
        device = config.device(rank)
        self._config = config
        self._number = rank
        self._scope = scope
        self._config_path = config_path
        self._loader_command = loader_command
        self._stop = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._stopping = False
        self._exit_status = 0
        self._problem = ""  # why it gives up; the last status that systemd keeps of it
        self._notifier = Notifier()
        self._watchdog_s = watchdog_interval()
        self._store = Store(rank, config.backend, self._notifier)
        # Milliseconds since the epoch: a generation never comes again, not even when the fd store was emptied, so an
        # engine that reattaches to memory of an earlier life is told so.
        state = State(model=config.model, device=device, next_generation=time.time_ns() // 1_000_000)
        who = Identity(rank, config, secrets.token_hex(8), time.time(), self._notifier.stores)
        self._rank = Rank(who, state, self._store, self._broken)

    def run(self) -> int:
        """Serve until told to stop. Returns the exit status. Raises WcacheError if it cannot even listen."""
        with ExitStack() as undo:
            undo.callback(self._stop.close)
            undo.callback(self._rank.changed.close)
            undo.callback(self._notifier.close)
            undo.callback(self._store.close)
            listener = listen(self._config, self._path(), self._inherited)
            undo.callback(listener.close)
            where = Surroundings(listener.path, self._state_dir(), self._config_path, self._loader_command)
            preloader = Preloader(self._rank, where, self._fail, lambda: self._stopping)
            acceptor = Acceptor(listener, self._rank, self._stop)
            self._rank.on_drop(acceptor.drop)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
            undo.callback(acceptor.close)
            self._restore()  # before the first answer: an engine that reattaches must find what it holds
            acceptor_thread = self._thread("accept", acceptor.run)
            loading_thread = self._thread("preload", preloader.run)
            self._report()
            self._notifier.stopping(self._problem or "stopping")
            self._rank.wake()
            for thread in (acceptor_thread, loading_thread):
                thread.join(JOIN_TIMEOUT_S)
        return self._exit_status

    def _path(self) -> Path:
        return socket_path(Path(self._config.socket_dir or runtime_dir(self._scope)), self._number)

    def _state_dir(self) -> Path:
        return Path(self._config.state_dir or state_dir(self._scope))

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """A thread whose unexpected end is the daemon's."""

        def run() -> None:
            try:
                work()
            except Exception as e:  # noqa: BLE001  (the thread's boundary: else the daemon would look alive)
                self._broken(e)

        thread = threading.Thread(target=run, name=f"wcache-{name}", daemon=True)
        thread.start()
        return thread

    def _restore(self) -> None:
        found = self._store.restore(self._inherited)
        shards = [shard_of(manifest, generation, restored=True) for generation, manifest in found]
        with self._rank.state() as state:
            state.restored(shards, verify=self._config.backend is BackendName.CUDA)
        for shard in shards:
            log.info(
                "rank %d took back shard %s generation %d from the fd store", self._number, shard.name, shard.generation
            )

    def _report(self) -> None:
        """Until told to stop: tell systemd what is going on, whenever something changed and when its clocks are due."""
        reporter = Reporter(self._rank, self._notifier, self._watchdog_s)
        stop, wake = select.poll(), select.poll()
        stop.register(self._stop.fileno(), select.POLLIN)
        for fd in (self._stop, self._rank.changed):
            wake.register(fd.fileno(), select.POLLIN)
        while not self._stopping:
            pause_s = reporter.report()
            if reporter.take_ready():
                self._became_ready()
            if any(fd == self._rank.changed.fileno() for fd, _ in wake.poll(pause_s * 1000)):
                stop.poll(GATHER_S * 1000)  # changes come in bursts
                os.eventfd_read(self._rank.changed.fileno())

    def _became_ready(self) -> None:
        log.info("ready", extra=fields(MESSAGE_ID=READY, WCACHE_RANK=self._number))
        if self._config.backend is BackendName.HOST:
            self._thread("verify", lambda: verify_in_background(self._rank, lambda: self._stopping))
            return
        device = self._rank.read(lambda state: state.device)
        if device is not None and not self._store.keeps_device and (fd := open_device(device)) is not None:
            self._store.keep_device(fd)

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End soon; async-signal-safe as far as Python goes: no lock is taken."""
        self._stopping = True
        os.eventfd_write(self._stop.fileno(), 1)

    def _fail(self, problem: str, status: int) -> None:
        log.error("rank %d gives up: %s", self._number, problem.splitlines()[0])
        self._exit_status, self._problem = status, problem
        self.stop()

    def _broken(self, error: Exception) -> None:
        log.critical("rank %d: broken invariant: %s", self._number, error, exc_info=error)
        self._exit_status = 1
        self.stop()
