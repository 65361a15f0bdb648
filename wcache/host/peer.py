# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end of a Unix socket: SO_PEERCRED and SO_PEERGROUPS (unix(7)).

Runs in the daemon. A pid is only for people to read: nothing is decided by it, since two containers may show the same
one, a pid namespace that is not ours shows none at all, and a pid that is shown may be somebody else's by now.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass

_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_MOST_GROUPS = 65536  # NGROUPS_MAX
_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials from the moment of connect(2). `pid`: as we see it, None for a foreign pid namespace."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    pid: int | None

    def may(self, uids: Collection[int], gids: Collection[int] = ()) -> bool:
        """True for root, for our own uid, and for who is listed."""
        return self.privileged or self.uid in uids or self.gid in gids or not set(gids).isdisjoint(self.groups)

    @property
    def privileged(self) -> bool:
        """Root, or the uid the daemon runs as: may stop it anyway, so may do everything here."""
        return self.uid in (0, os.geteuid())

    def __str__(self) -> str:
        who = "a process of another pid namespace" if self.pid is None else f"pid {self.pid}"
        return f"{who} (uid {self.uid}, gid {self.gid})"


def identify(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket. Raises OSError only for what is no such socket."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(uid, gid, _groups(sock), pid if pid > 0 else None)


def _groups(sock: socket.socket) -> tuple[int, ...]:
    size = 64
    while size <= _MOST_GROUPS:
        try:
            data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size * 4)
        except OSError as e:
            if e.errno != errno.ERANGE:
                return ()  # a kernel before 4.13
            size *= 8
            continue
        groups: array.array[int] = array.array("I")
        groups.frombytes(data)
        return tuple(groups)
    return ()
