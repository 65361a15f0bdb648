# SPDX-License-Identifier: Apache-2.0
"""A session whose daemon has a defect: the client gets an id that is in the log, and nothing more."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from wcache.config import Config
from wcache.daemon.rank import Rank
from wcache.daemon.session import Session
from wcache.daemon.state import State
from wcache.daemon.status import Identity
from wcache.daemon.store import Store
from wcache.errors import InternalError
from wcache.host.fds import receive, send
from wcache.host.systemd import Notifier
from wcache.model import CPU, BackendName
from wcache.protocol.messages import Failure, GetStatus, Hello, RankStatus, decode_reply, encode


class Defective(Rank):
    def status(self) -> RankStatus:
        raise KeyError("a secret detail")


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Defective:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    state = State(model=None, device=CPU, next_generation=1)
    state.restored([], verify=False)

    def broken(error: Exception) -> None:
        raise error

    who = Identity(0, Config(), "nonce", time.time(), False)
    return Defective(who, state, Store(0, BackendName.HOST, Notifier()), broken)


def test_a_defect_has_the_same_id_in_the_answer_and_in_the_log(
    rank: Defective, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, caplog.at_level(logging.ERROR):
        thread = threading.Thread(target=Session(1, theirs, rank).run)
        thread.start()
        ours.settimeout(5)
        send(ours, encode(Hello(protocol=1, role="engine", name="x", version="0")))
        receive(ours)
        send(ours, encode(GetStatus()))
        reply = decode_reply(receive(ours)[0])
        thread.join()
    assert isinstance(reply, Failure)
    error = reply.error()
    assert isinstance(error, InternalError)
    assert error.error_id in caplog.text
    assert "secret" not in error.message
    rank.changed.close()
