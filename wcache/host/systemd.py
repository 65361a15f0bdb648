# SPDX-License-Identifier: Apache-2.0
"""What a service says to systemd and gets from it: sd_notify(3), sd_listen_fds(3), the fd store, the watchdog.

Runs in the daemon. `sdnotify` finds and connects the notify socket; messages go out here, because that package encodes
Latin-1 (STATUS= is UTF-8) and cannot pass descriptors. Everything read from the environment is removed from it, so
that no child takes it for its own. Surprising: stored descriptors come back inheritable and in reverse order, after
the sockets: only their names tell which is which.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import select
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from sdnotify import SystemdNotifier

from wcache.errors import SystemdError
from wcache.host.fds import OwnedFd, close_all

log = logging.getLogger(__name__)

LISTEN_FDS_START = 3
SEND_TIMEOUT_S = 5.0
BARRIER_TIMEOUT_S = 10.0
MAX_FD_NAME = 255


class Notifier:
    """The notify socket of this service; without one every call does nothing and says False."""

    def __init__(self) -> None:
        self._socket = self._connect() if os.environ.get("NOTIFY_SOCKET") else None
        os.environ.pop("NOTIFY_SOCKET", None)
        limit = os.environ.pop("FDSTORE", None)
        self.store_limit = None if limit is None else _parse(limit, "FDSTORE")

    @staticmethod
    def _connect() -> socket.socket:
        try:
            sock: socket.socket = SystemdNotifier(debug=True).socket
        except OSError as e:
            raise SystemdError(f"connect to NOTIFY_SOCKET {os.environ.get('NOTIFY_SOCKET')}: {e.strerror}") from e
        sock.settimeout(SEND_TIMEOUT_S)
        return sock

    @property
    def active(self) -> bool:
        return self._socket is not None

    @property
    def stores(self) -> bool:
        """True if the fd store takes descriptors, as far as systemd says: $FDSTORE exists since version 254."""
        return self.active and self.store_limit != 0

    def notify(self, text: str, fds: Sequence[OwnedFd] = ()) -> bool:
        """Send one message; False if nobody took it. A manager that is away must not take the service down."""
        if self._socket is None:
            return False
        numbers = array.array("i", [fd.fileno() for fd in fds]).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if fds else []
        try:
            self._socket.sendmsg([text.encode(errors="replace")], ancillary)
        except OSError as e:
            log.warning("systemd did not take %r: %s", text.split("\n", 1)[0], e)
            return False
        return True

    def ready(self, status: str) -> bool:
        return self.notify(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> bool:
        return self.notify(f"STATUS={_line(status)}")

    def stopping(self, status: str) -> bool:
        return self.notify(f"STOPPING=1\nSTATUS={_line(status)}")

    def extend(self, seconds: float) -> bool:
        """Ask for `seconds` from now before the current start or stop is given up."""
        return self.notify(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def watchdog(self) -> bool:
        return self.notify("WATCHDOG=1")

    def store(self, name: str, fd: OwnedFd) -> bool:
        """Keep a descriptor in the fd store under `name`; it stays ours as well. Follow with `barrier`."""
        return self.notify(f"FDSTORE=1\nFDNAME={_fd_name(name)}\nFDPOLL=0", [fd])

    def remove(self, name: str) -> bool:
        """Drop every stored descriptor of that name."""
        return self.notify(f"FDSTOREREMOVE=1\nFDNAME={_fd_name(name)}")

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> bool:
        """Wait until the manager has read everything sent before: it then closes its end of the pipe."""
        if self._socket is None:
            return False
        read_end, write_end = (OwnedFd(n) for n in os.pipe2(os.O_CLOEXEC))
        with read_end:
            with write_end:
                if not self.notify("BARRIER=1", [write_end]):
                    return False
            poll = select.poll()
            poll.register(read_end.fileno(), select.POLLHUP)
            if poll.poll(timeout_s * 1000):
                return True
        log.warning("systemd did not pass a barrier within %.0f s", timeout_s)
        return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """A descriptor that systemd passed in, owned by whoever holds this."""

    name: str
    fd: OwnedFd


def listen_fds(environment: MutableMapping[str, str] = os.environ) -> list[Inherited]:
    """The descriptors passed to this process, close-on-exec; [] if there are none or they are for another pid.

    Removes LISTEN_* from the environment. Raises SystemdError for values that systemd never sets.
    """
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
    given = {name: environment.pop(name, None) for name in names}
    pid, count = given["LISTEN_PID"], given["LISTEN_FDS"]
    if pid is None or count is None:
        return []
    if _parse(pid, "LISTEN_PID") != os.getpid():
        log.debug("LISTEN_PID=%s is not this process: nothing was passed in", pid)
        return []
    total = _parse(count, "LISTEN_FDS")
    labels = (given["LISTEN_FDNAMES"] or "").split(":") if given["LISTEN_FDNAMES"] else ["unknown"] * total
    if len(labels) != total:
        raise SystemdError(f"LISTEN_FDNAMES has {len(labels)} names for LISTEN_FDS={total}")
    return [Inherited(label, fd) for label, fd in zip(labels, _adopt(total), strict=True)]


def _adopt(total: int) -> list[OwnedFd]:
    fds: list[OwnedFd] = []
    for number in range(LISTEN_FDS_START, LISTEN_FDS_START + total):
        try:
            fcntl.fcntl(number, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError as e:
            close_all(fds)
            raise SystemdError(f"LISTEN_FDS={total}, but descriptor {number} is not open") from e
        fds.append(OwnedFd(number))
    return fds


def listening_socket(inherited: Inherited) -> socket.socket:
    """The inherited descriptor as a listening SEQPACKET socket; takes it over. Raises SystemdError for others."""
    what = f"inherited descriptor {inherited.name!r}"
    try:
        sock = socket.socket(fileno=inherited.fd.fileno())
    except OSError as e:
        raise SystemdError(f"{what} is not a socket") from e
    inherited.fd.take()
    try:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            kind = f"{sock.family.name}/{socket.SocketKind(sock.type).name}"
            raise SystemdError(f"{what} is {kind}", hint="the socket unit needs ListenSequentialPacket=")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise SystemdError(f"{what} does not listen", hint="the socket unit needs Accept=no")
    except BaseException:
        sock.close()
        raise
    return sock


def watchdog_interval(environment: MutableMapping[str, str] = os.environ) -> float | None:
    """Seconds between two WATCHDOG=1: half of what systemd waits; None if it does not watch this process."""
    usec, pid = environment.pop("WATCHDOG_USEC", None), environment.pop("WATCHDOG_PID", None)
    if usec is None or (pid is not None and _parse(pid, "WATCHDOG_PID") != os.getpid()):
        return None
    interval = _parse(usec, "WATCHDOG_USEC")
    if interval == 0:
        raise SystemdError("WATCHDOG_USEC=0 is no interval")
    return interval / 2e6


def _parse(value: str, name: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise SystemdError(f"{name}={value!r} is no number")
    return int(value)


def _fd_name(name: str) -> str:
    """A name that systemd takes (sd_notify(3)): ASCII without control characters and without a colon."""
    if not name.isascii() or not name.isprintable() or ":" in name or not 0 < len(name) <= MAX_FD_NAME:
        raise SystemdError(f"{name!r} cannot name a descriptor in the fd store")
    return name


def _line(status: str) -> str:
    return " ".join(status.split())
