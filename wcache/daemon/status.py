# SPDX-License-Identifier: Apache-2.0
"""The one status document: what `wcache status`, its --json, STATUS= and metrics show of a rank.

Pure rendering of a `Snapshot`; runs in the daemon. All numbers are bytes and seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wcache import __version__
from wcache.config import Config
from wcache.model import RankState
from wcache.protocol.messages import ProgressInfo, RankStatus

if TYPE_CHECKING:
    from wcache.daemon.facts import Snapshot

_PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a daemon runs. `since`: epoch seconds."""

    rank: int
    config: Config
    nonce: str
    since: float
    fd_store: bool


def document(
    who: Identity, state: RankState, device: str | None, snapshot: Snapshot, *, trouble: str = ""
) -> RankStatus:
    """`trouble`: what is wrong with the daemon itself (its socket was removed, ...)."""
    return RankStatus(
        rank=who.rank,
        state=state,
        device=device or "",
        backend=who.config.backend,
        mode=who.config.mode,
        policy=who.config.identity,
        model=who.config.model,
        pid=os.getpid(),
        nonce=who.nonce,
        version=__version__,
        since=who.since,
        text=text(state, snapshot),
        shards=snapshot.shards,
        progress=snapshot.progress,
        last_miss=snapshot.last_miss,
        misses=snapshot.misses,
        problem="; ".join(p for p in (trouble, snapshot.problem) if p),
        fd_store=who.fd_store,
        memory={"weights": snapshot.weight_bytes},
        rss=resident_set(),
    )


def text(state: RankState, snapshot: Snapshot) -> str:
    """One line for STATUS= and people."""
    if state is RankState.LOADING:
        return "loading" if snapshot.progress is None else progress_text(snapshot.progress)
    if state is RankState.FAILED:
        return f"failed: {snapshot.problem}"
    if state is RankState.DRAINING:
        return f"draining: {count(snapshot.attached, 'engine')} attached" if snapshot.shards else "drained"
    if state is not RankState.READY:
        return str(state)
    parts = [f"ready: {count(len(snapshot.shards), 'shard')}, {size(snapshot.weight_bytes)}"]
    parts.append(f"{count(snapshot.attached, 'engine')} attached")
    if snapshot.progress is not None:
        parts.append(progress_text(snapshot.progress))
    return ", ".join(parts) + "".join(f"; {p}" for p in (snapshot.note, snapshot.problem) if p)


def progress_text(progress: ProgressInfo) -> str:
    """As in `loading 31 %, 12/66 files, 1.9 GB/s`."""
    verb = {"load": "loading", "identify": "identifying", "digest": "digesting"}.get(progress.phase, progress.phase)
    parts = [verb]
    if progress.bytes_total > 0:
        parts[0] += f" {min(100, 100 * progress.bytes_done // progress.bytes_total)} %"
    if progress.files_total > 0:
        parts.append(f"{progress.files_done}/{progress.files_total} files")
    if progress.bytes_per_s > 0:
        parts.append(f"{progress.bytes_per_s / 1e9:.1f} GB/s")
    return ", ".join(parts)


def size(nbytes: int) -> str:
    """Binary units, as memory is counted."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def resident_set() -> int:
    """Bytes of memory this process has resident (proc_pid_statm(5)); includes no weights."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
