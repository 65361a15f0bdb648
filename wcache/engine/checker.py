# SPDX-License-Identifier: Apache-2.0
"""The checker child: maps a shard's segments as an engine would and recomputes their digests.

`python -m wcache.engine.checker FD` where FD is its end of a SEQPACKET pair with the daemon (`protocol/checks.py`).
A process of its own so that the daemon stays without CUDA: what it maps and every context it opens ends with it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from wcache.errors import ConnectionClosed, ProtocolError, WcacheError
from wcache.host.fds import OwnedFd, close_all, receive, send
from wcache.protocol.checks import (
    CheckFailed,
    CheckRequest,
    FromChecker,
    SegmentDigest,
    Segments,
    decode_to_checker,
    encode,
)
from wcache.weights.segment import Mapping, open_backend

REQUEST_TIMEOUT_S = 30.0


def main(argv: Sequence[str]) -> int:
    with socket.socket(fileno=int(argv[0])) as sock:
        sock.settimeout(REQUEST_TIMEOUT_S)
        try:
            request, fds = _receive(sock)
            os.nice(request.nice)
            _check(sock, request, fds)
        except ConnectionClosed:  # the daemon no longer wants to know
            return 1
        except WcacheError as e:
            _say(sock, CheckFailed(code=e.code, message=str(e)))
            return 1
    return 0


def _receive(sock: socket.socket) -> tuple[CheckRequest, list[OwnedFd]]:
    record, fds = receive(sock)
    request = decode_to_checker(record)
    if not isinstance(request, CheckRequest) or fds:
        raise ProtocolError("a check begins with its request")
    while len(fds) < len(request.sizes):
        record, more = receive(sock)
        part = decode_to_checker(record)
        if not isinstance(part, Segments) or part.first != len(fds) or not more:
            raise ProtocolError(f"segments broke off after {len(fds)} of {len(request.sizes)}")
        fds.extend(more)
    return request, fds


def _check(sock: socket.socket, request: CheckRequest, fds: list[OwnedFd]) -> None:
    mapping = open_backend(request.backend, request.device).map(fds, request.sizes)
    close_all(fds)
    try:
        for index, digest in enumerate(_digests(mapping, len(request.sizes), request.threads)):
            _say(sock, SegmentDigest(index=index, digest=digest))
    finally:
        mapping.close()


def _digests(mapping: Mapping, count: int, threads: int) -> Iterator[str]:
    """In order. One thread is this one: a CUDA context is current in the thread that made it."""
    if threads <= 1:
        yield from map(mapping.digest, range(count))
        return
    with ThreadPoolExecutor(threads, "wcache-check") as pool:
        yield from pool.map(mapping.digest, range(count))


def _say(sock: socket.socket, message: FromChecker) -> None:
    send(sock, encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
