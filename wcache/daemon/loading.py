# SPDX-License-Identifier: Apache-2.0
"""Getting the configured weights resident: re-adopt what was restored, else have a loader child read them.

One thread of the daemon. A restored shard of the same spec whose content the checkpoint still has is adopted without
any child; a checkpoint directory that cannot be reached is no reason to give up what is resident. A load that fails
ends the daemon with a non-zero status (systemd's start limits then apply), unless a matching shard is still there:
2 if the configuration is to blame and nothing at all is resident (systemd does not try again, and drops the fd store).
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wcache.config import Config
from wcache.daemon import loader
from wcache.daemon.facts import Shard, label
from wcache.daemon.preload import Preload
from wcache.daemon.rank import Rank
from wcache.daemon.status import count, size
from wcache.daemon.verifying import verify_restored
from wcache.errors import CheckpointError, ConfigError, LoaderError, WcacheError
from wcache.log import LOAD_FAILED, RESTORED, fields
from wcache.model import CheckpointFault, IdentityPolicy, Origin
from wcache.weights.spec import preload_spec

log = logging.getLogger(__name__)

RECOGNISE_TIMEOUT_S = 30.0  # a dead network file system blocks for ever
# How loaders say that memory did not suffice: our own code, torch's and CUDA's words, the kernel's signal.
_SHORT_OF_MEMORY = re.compile(r"out[ _]of[ _]memory|OutOfMemory|SIGKILL", re.IGNORECASE)
_CODE = re.compile(r" \([a-z_]+\)$")  # the error's class, which the loader adds for us
_HINT = "hint: "
_UNREACHABLE = {CheckpointFault.NO_DIRECTORY, CheckpointFault.UNREADABLE}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the loader finds things. `command` replaces the loader's own (for tests of this file's behaviour)."""

    socket: Path
    state_dir: Path
    config_path: Path | None
    command: Sequence[str] | None = None


class Preloader:
    """`fail(problem, status)` ends the daemon with a non-zero status; `stopping()` is True once it ends anyway."""

    def __init__(
        self, rank: Rank, where: Surroundings, fail: Callable[[str, int], None], stopping: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._where = where
        self._fail = fail
        self._stopping = stopping
        self._spec = preload_spec(rank.who.config, rank.who.rank) if rank.who.config.model is not None else ""

    def run(self) -> None:
        """Until the daemon stops: get the configured weights, and again after a reload or a quarantine."""
        verify_restored(self._rank, self._stopping)
        if self._rank.who.config.model is not None:
            self._adopt()
        while not self._stopping():
            version = self._rank.version()
            if self._rank.read(lambda s: s.preload.ordered and not s.draining):
                self._load()
            else:
                self._rank.wait(version, 60.0)

    # --- what was restored --------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Shard]:
        """Shards that a loader with this configuration made, newest first."""
        shards = self._rank.read(lambda state: state.shards())
        mine = [s for s in shards if s.served and s.origin is Origin.PRELOAD and s.spec == self._spec]
        return sorted(mine, key=lambda s: s.generation, reverse=True)

    def _adopt(self) -> None:
        candidates = self._candidates()
        if not candidates:
            return
        try:
            content = self._content(candidates)
        except _Unreachable as e:
            self._take(candidates[0], f"the model directory cannot be read ({e}); serving what was restored")
            return
        for shard in candidates:
            if shard.fingerprint.content == content:
                self._take(shard, "")
                return

    def _take(self, shard: Shard, problem: str) -> None:
        with self._rank.state() as state:
            if state.shard(shard.generation) is not shard:
                return  # evicted meanwhile
            state.adopt(shard.generation, problem=problem)
        log.info(
            "rank %d restored shard %s generation %d (%s) without reading it", self._rank.who.rank, shard.name,
            shard.generation, size(shard.segment_bytes),
            extra=fields(MESSAGE_ID=RESTORED, WCACHE_RANK=self._rank.who.rank, WCACHE_FINGERPRINT=shard.id),
        )  # fmt: skip
        if problem:
            log.warning("rank %d: %s", self._rank.who.rank, problem)

    def _content(self, candidates: list[Shard]) -> str | None:
        """The checkpoint's content as far as it is known without opening a file. Raises _Unreachable."""
        config = self._rank.who.config
        model = config.model or ""
        if config.identity is IdentityPolicy.TRUST:
            return next((s.fingerprint.content for s in candidates if label(s.model) == label(model)), None)
        found: list[str | WcacheError | None] = []

        def look() -> None:
            try:
                found.append(_recognise(config, self._where.state_dir))
            except WcacheError as e:
                found.append(e)

        thread = threading.Thread(target=look, name="wcache-recognise", daemon=True)
        thread.start()
        thread.join(RECOGNISE_TIMEOUT_S)
        if not found:
            raise _Unreachable(f"no answer within {RECOGNISE_TIMEOUT_S:.0f} s")
        answer = found[0]
        if isinstance(answer, CheckpointError) and answer.fault in _UNREACHABLE:
            raise _Unreachable(str(answer))
        return None if isinstance(answer, WcacheError) else answer

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        rank = self._rank
        with rank.state() as state:
            state.preload.started()
        try:
            environment = {"WCACHE_STATE_DIR": str(self._where.state_dir)}
            problem, status = loader.run(rank, self._command(), environment, self._where.socket.parent, self._unwanted)
        except loader.Gone:
            with rank.state() as state:
                state.preload.ended()
            return
        except OSError as e:
            problem, status = f"the loader could not be started: {e}", None
        with rank.state() as state:
            problem = _outcome(problem, state.preload)
            if not problem:
                state.preload.ended()
                return
            room = state.make_room(self._spec) if _SHORT_OF_MEMORY.search(problem) else []
            if room:
                state.preload.ended()
                state.preload.order(reloading=False)
            else:
                state.preload.fail(_headline(problem))
        log.error(
            "rank %d: Weight load failed: %s", rank.who.rank, problem,
            extra=fields(MESSAGE_ID=LOAD_FAILED, WCACHE_RANK=rank.who.rank),
        )  # fmt: skip
        if room:
            log.warning(
                "rank %d: %s of another configuration made room; trying again",
                rank.who.rank,
                count(len(room), "unused shard"),
            )
        else:
            self._after_failure(problem, status)

    def _after_failure(self, problem: str, status: int | None) -> None:
        candidates = self._candidates()
        if candidates:
            self._take(candidates[0], f"{_headline(problem)}; serving the older shard")
        elif self._rank.read(lambda state: state.preload.current is None):
            final = status == ConfigError.exit_status and not self._rank.read(lambda state: state.shards())
            self._fail(_headline(problem), ConfigError.exit_status if final else LoaderError.exit_status)

    def _unwanted(self) -> bool:
        return self._stopping() or self._rank.read(lambda state: state.draining)

    def _command(self) -> list[str]:
        if self._where.command is not None:
            return [*self._where.command]
        command = [sys.executable, "-m", "wcache.engine.loader", "--rank", str(self._rank.who.rank)]
        command += ["--socket", str(self._where.socket), "--spec", self._spec]
        if self._where.config_path is not None:
            command += ["--config", str(self._where.config_path)]
        return command


class _Unreachable(Exception):
    pass


def _outcome(problem: str, preload: Preload) -> str:
    """What a loader that has ended leaves undone; its own reason for giving up comes first."""
    if not problem and preload.current is None and not (preload.released or preload.ordered):
        return "the loader ended with exit status 0 but published nothing"
    if problem and preload.reason and preload.reason not in problem:
        return f"{preload.reason}\n  {problem}"
    return problem


def _headline(problem: str) -> str:
    """One line: how it ended, and the loader's error where that is all there is to go by."""
    first, *words = problem.splitlines()
    if words and first.endswith(":"):
        return f"Weight load failed: {first} {_error([word.strip() for word in words])}"
    return f"Weight load failed: {first.rstrip(':')}"


def _error(words: list[str]) -> str:
    """The loader's error with its hint, if it gave one; else the last thing it said."""
    for error, hint in reversed(list(itertools.pairwise(words))):
        if hint.startswith(_HINT):
            return f"{_CODE.sub('', error)}; {hint}"
    return _CODE.sub("", words[-1])


def _recognise(config: Config, state_dir: Path) -> str | None:
    from wcache.weights.checkpoint import survey
    from wcache.weights.identity import open_store, recognise

    found = survey(Path(config.model or ""), revision=config.revision, allow_stale_index=config.allow_stale_index)
    with open_store(state_dir) as store:
        return recognise(found, store, config.identity).content
