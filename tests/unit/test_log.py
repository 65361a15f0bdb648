# SPDX-License-Identifier: Apache-2.0
"""What reaches the journal, and what happens when there is none."""

from __future__ import annotations

import array
import logging
import os
import socket
from pathlib import Path

import pytest

from wcache import log


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "journal"))
    sock.settimeout(2)
    monkeypatch.setattr(log, "JOURNAL_SOCKET", str(tmp_path / "journal"))
    return sock


def emit(message: str, *args: object, **fields: object) -> None:
    handler = log.JournalHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    record = logging.LogRecord("wcache.test", logging.WARNING, __file__, 1, message, args, None)
    record.__dict__.update(log.fields(**fields))
    handler.handle(record)
    handler.close()


def test_a_record_carries_its_fields(journal: socket.socket) -> None:
    with journal:
        emit("rank %d ready", 3, WCACHE_RANK=3, MESSAGE_ID=log.READY, WCACHE_NOTHING=None)
        lines = journal.recv(65536).decode().splitlines()
    assert "MESSAGE=rank 3 ready" in lines
    assert "WCACHE_RANK=3" in lines
    assert "PRIORITY=4" in lines
    assert f"MESSAGE_ID={log.READY}" in lines
    assert not any(line.startswith("WCACHE_NOTHING") for line in lines)


def test_a_message_with_newlines_stays_one_field(journal: socket.socket) -> None:
    with journal:
        emit("one\nPRIORITY=0\ntwo")
        data = journal.recv(65536)
    assert data.startswith(b"MESSAGE\n" + (len(b"one\nPRIORITY=0\ntwo")).to_bytes(8, "little"))


def test_what_is_too_long_for_a_datagram_goes_as_a_sealed_memfd(journal: socket.socket) -> None:
    with journal:
        emit("x" * 2_000_000)
        _, ancillary, _, _ = journal.recvmsg(16, socket.CMSG_SPACE(4))
        fd = array.array("i", ancillary[0][2])[0]
        assert os.fstat(fd).st_size > 2_000_000
        os.close(fd)


def test_without_a_journal_the_line_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "JOURNAL_SOCKET", str(tmp_path / "none"))
    emit("still said")
    assert "still said" in capsys.readouterr().err


def test_message_ids_are_unique_and_well_formed() -> None:
    ids = [v for k, v in vars(log).items() if k.isupper() and isinstance(v, str) and len(v) == 32]
    assert len(ids) == len(set(ids)) == 8
    assert all(int(i, 16) for i in ids)
