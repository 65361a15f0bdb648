# SPDX-License-Identifier: Apache-2.0
"""Logging: journald fields under systemd, plain lines on a terminal. Stdlib `logging` everywhere.

Pass fields as `log.info("...", extra=fields(WCACHE_RANK=0))`; `MESSAGE_ID` marks the events operators alert on
(systemd.journal-fields(7), journald's native protocol: one datagram, a memfd for what does not fit in one).
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import sys
import traceback
from typing import Any

JOURNAL_SOCKET = "/run/systemd/journal/socket"

# Stable identifiers of the events operators alert on (journalctl MESSAGE_ID=...).
READY = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f801"
RESTORED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f802"
PUBLISHED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f803"
MISSED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f804"
QUARANTINED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f805"
EVICTED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f806"
LOAD_FAILED = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f807"
DAEMON_LOST = "5a2f7c1e0d9b4c67a1f3e8b2d4c6f808"

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def fields(**values: Any) -> dict[str, Any]:
    """`extra=` for a log call: journald fields, upper case; None values are left out."""
    return {"journal": {k: str(v) for k, v in values.items() if v is not None}}


def set_up(*, debug: bool = False) -> None:
    """Configure the root logger of a process of ours (never called inside an engine)."""
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    handler: logging.Handler = JournalHandler() if _stderr_is_journal() else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if isinstance(handler, JournalHandler) else _PLAIN))
    root.handlers[:] = [handler]


_PLAIN = "%(asctime)s %(levelname)s %(message)s"


def _stderr_is_journal() -> bool:
    """systemd sets JOURNAL_STREAM to device:inode of the stream (systemd.exec(5))."""
    try:
        device, inode = os.environ.get("JOURNAL_STREAM", "").split(":")
        st = os.fstat(2)
        return stat.S_ISSOCK(st.st_mode) and (st.st_dev, st.st_ino) == (int(device), int(inode))
    except (ValueError, OSError):
        return False


class JournalHandler(logging.Handler):
    """Sends records to journald with their fields; falls back to stderr when the journal does not take them."""

    def __init__(self) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(self._payload(record))
        except OSError:
            sys.stderr.write(self.format(record) + "\n")

    def _payload(self, record: logging.LogRecord) -> bytes:
        values = {
            "MESSAGE": record.getMessage(),
            "PRIORITY": str(_PRIORITY.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": "wcache",
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            **getattr(record, "journal", {}),
        }
        if record.exc_info:
            values["TRACEBACK"] = "".join(traceback.format_exception(*record.exc_info))
        return b"".join(_field(k, v) for k, v in values.items())

    def _send(self, payload: bytes) -> None:
        try:
            self._socket.sendto(payload, JOURNAL_SOCKET)
        except OSError as e:
            if e.errno != errno.EMSGSIZE:
                raise
            self._send_memfd(payload)

    def _send_memfd(self, payload: bytes) -> None:
        """What is too long for a datagram goes as a sealed memfd."""
        fd = os.memfd_create("journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, payload)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]).tobytes())
            self._socket.sendmsg([b""], [rights], 0, JOURNAL_SOCKET)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._socket.close()
        super().close()


def _field(key: str, value: str) -> bytes:
    data = value.encode(errors="replace")
    if b"\n" in data:
        return key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
    return key.encode() + b"=" + data + b"\n"
