# SPDX-License-Identifier: Apache-2.0
"""statx says what stat says, and is asked of the server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wcache.host import statx
from wcache.host.statx import FreshStat, fresh_stat


def same(fresh: object, st: os.stat_result) -> bool:
    return all(getattr(fresh, name) == getattr(st, name) for name in FreshStat._fields)


@pytest.mark.parametrize("path", ["/", "/dev/null", __file__, "/dev/shm"])
def test_it_gives_the_fields_of_stat(path: str) -> None:
    assert same(fresh_stat(Path(path)), Path(path).stat())


def test_it_takes_times_before_the_epoch_and_large_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    os.truncate(path, 5 << 40)
    os.utime(path, ns=(-1_500_000_001, -1_500_000_001))
    assert fresh_stat(path).st_mtime_ns == -1_500_000_001
    assert same(fresh_stat(path), path.stat())


def test_it_follows_symlinks_and_takes_descriptors(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(__file__)
    with Path(__file__).open() as f:
        assert same(fresh_stat(tmp_path / "link"), os.fstat(f.fileno()))
        assert same(fresh_stat(f.fileno()), os.fstat(f.fileno()))


def test_its_errors_are_those_of_the_operating_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        fresh_stat(tmp_path / "absent")
    with pytest.raises(NotADirectoryError):
        fresh_stat(Path(__file__) / "x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        fresh_stat(1_000_000)
    with pytest.raises(ValueError, match="NUL"):
        fresh_stat(Path("a\0b"))


def test_a_c_library_without_statx_answers_with_stat(monkeypatch) -> None:
    monkeypatch.setattr(statx, "_statx", None)
    assert same(fresh_stat(Path(__file__)), Path(__file__).stat())
