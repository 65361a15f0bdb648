# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory: which files and tensors it consists of, before a byte of weights is read.

`survey` opens no checkpoint file: it reads the index and the configuration files and takes stamps, all of it in
parallel, because on a network file system each call is a round trip. `open_checkpoint` reads and checks every header.
Runs in the daemon, the loader child, the CLI and engines; imports no torch.
The index is a per-file allowlist: a tensor counts only in the file the index assigns it to; copies in other files
(hard-linked or overlaid shards have them) are ignored and counted.
"""

from __future__ import annotations

import hashlib
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from wcache.errors import CheckpointError
from wcache.host.statx import fresh_stat
from wcache.model import CheckpointFault
from wcache.weights.checkpoint_file import CheckpointFile, Stamp, open_surveyed
from wcache.weights.directory import (
    CONFIG,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SUFFIX,
    blob_digest,
    choose_index,
    complete_set,
    config_names,
    kind,
    parse_config,
    parse_index,
    read_small,
    resolve_directory,
)
from wcache.weights.header import Header, describe, read_header, refuse

PARALLEL_CALLS = 32  # round trips under way at once
SLOW_CALL_S = 0.001  # a stat that takes longer was a round trip; below, a thread costs more than it saves

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Survey:
    """What a directory says it holds. `directory` is the snapshot itself, `commit` its id where a hub cache has one.

    `weight_map`: tensor name to file name, as the index assigns them; None without an index. `config`: config.json.
    `config_digests`: SHA-256 of each configuration file that decides how bytes are used, by name.
    `ignored_files`: files beside those that count.
    """

    directory: Path
    files: tuple[CheckpointFile, ...]
    weight_map: dict[str, str] | None
    config: dict[str, Any]
    config_digests: dict[str, str]
    commit: str | None = None
    index: str | None = None
    ignored_files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all checkpoint files."""
        return sum(f.stamp.size for f in self.files)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `offset` is absolute in file `file` of the survey (bytes); dtype is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor that counts. `ignored`: tensors found in a file that the index does not assign them to."""

    survey: Survey
    tensors: dict[str, TensorEntry]
    ignored: int
    warnings: tuple[str, ...]


def survey(directory: Path | str, *, revision: str | None = None, allow_stale_index: bool = False) -> Survey:
    """What a checkpoint directory, or a hub cache's repository at `revision`, consists of. Opens no checkpoint file.

    `allow_stale_index`: an index none of whose files is there is ignored (with a warning) if the files that are there
    are a complete set. Raises CheckpointError; where several files are bad the message lists each.
    """
    root, commit, names = resolve_directory(Path(directory), revision)
    if CONFIG not in names:
        refuse(CheckpointFault.NO_CONFIG, f"{root}: no {CONFIG}", "is this the model's directory?")
    index = choose_index(names, root)
    listed = sorted(n for n in names if n.endswith(SUFFIX))
    configs = config_names(names)
    with ThreadPoolExecutor(min(PARALLEL_CALLS, len(listed) + len(configs) + 1), "wcache-survey") as pool:
        # Small files first: an open and a read take longer than a stat.
        reading = {name: pool.submit(read_small, root / name, MAX_CONFIG_BYTES) for name in configs}
        reading_index = pool.submit(read_small, root / index, MAX_INDEX_BYTES) if index else None
        found = _look_at_all(root, listed, pool)
        weight_map = parse_index(reading_index.result(), root / (index or "")) if reading_index else None
        assigned = sorted(set(weight_map.values())) if weight_map is not None else None
        found.update(_look_at_all(root, [name for name in assigned or () if name not in found], pool))
        config = parse_config(reading[CONFIG].result(), root / CONFIG)
        # Model code decides something only where config.json says so; elsewhere it may as well be unreadable.
        deciding = [name for name in configs if name.endswith(".json") or "auto_map" in config]
        digests = {name: hashlib.sha256(reading[name].result()).hexdigest() for name in deciding}
    warnings: list[str] = []
    if index and assigned and _is_stale(assigned, found, root, index, listed, allow_stale_index):
        warnings.append(f"{index} is stale: none of its {len(assigned)} files is here; it is ignored")
        weight_map = assigned = index = None
    if assigned is None:
        complete_set(listed, names, root)
        assigned = listed
    files = _all_good([found[name] for name in assigned], root)
    ignored = tuple(sorted(set(listed) - set(assigned)))
    if ignored:
        warnings.append(f"not named by {index}, ignored: {describe(ignored)}")
    return Survey(root, tuple(files), weight_map, config, digests, commit, index, ignored, tuple(warnings))


def open_checkpoint(survey: Survey) -> Checkpoint:
    """Read and check every header, in parallel; nothing else is allocated.

    Raises CheckpointError; where several files are bad the message lists each. A file that changed since the survey is
    refused, so that what the survey recognised is what is read.
    """
    with ThreadPoolExecutor(max(1, min(PARALLEL_CALLS, len(survey.files))), "wcache-header") as pool:
        headers = _all_good(list(pool.map(partial(_attempt, _header), survey.files)), survey.directory)
    if survey.weight_map is None:
        tensors, ignored = _take_all(survey, headers), Counter[str]()
    else:
        tensors, ignored = _take_assigned(survey, survey.weight_map, headers)
    if not tensors:
        refuse(CheckpointFault.NO_WEIGHTS, f"{survey.directory}: the checkpoint files hold no tensor")
    warnings = survey.warnings
    if ignored:
        counts = ", ".join(f"{count} in {name}" for name, count in sorted(ignored.items()))
        warnings += (
            f"{ignored.total()} ignored that {survey.index} does not assign to the file they are in: {counts}",
        )
    return Checkpoint(survey, tensors, ignored.total(), warnings)


def check_nothing_twice(survey: Survey) -> None:
    """For engines that read whole files, whatever the index says. Raises CheckpointError if a tensor is in two."""
    open_checkpoint(replace(survey, weight_map=None))


def _look_at_all(
    directory: Path, names: Iterable[str], pool: ThreadPoolExecutor
) -> dict[str, CheckpointFile | CheckpointError]:
    """Look at files one after the other while that is fast; from the first slow one on, at many at once."""
    found = {}
    left = list(names)
    while left:
        start = time.monotonic()
        name = left.pop()
        found[name] = _look_at(directory, name)
        if time.monotonic() - start > SLOW_CALL_S:
            break
    found.update(zip(left, pool.map(partial(_look_at, directory), left), strict=True))
    return found


def _look_at(directory: Path, name: str) -> CheckpointFile | CheckpointError:
    """The file's stamp, or why it cannot be a checkpoint file. Follows symlinks, opens nothing."""
    path = directory / name
    try:
        st = fresh_stat(path)
        blob = blob_digest(path)
    except (FileNotFoundError, NotADirectoryError):
        target = f" (a symlink to {path.readlink()})" if path.is_symlink() else ""
        return CheckpointError(
            CheckpointFault.MISSING_FILE, f"{name}{target}: no such file", hint="finish the download"
        )
    except OSError as e:
        return CheckpointError(CheckpointFault.UNREADABLE, f"stat {name}: {e.strerror}")
    if not stat.S_ISREG(st.st_mode):
        return CheckpointError(CheckpointFault.NOT_A_FILE, f"{name}: {kind(st.st_mode)}, not a file")
    if st.st_size == 0:
        return CheckpointError(CheckpointFault.EMPTY_FILE, f"{name}: the file has 0 bytes", hint="download it again")
    return CheckpointFile(name, path, Stamp.of(st), blob)


def _is_stale(
    assigned: Collection[str],
    found: Mapping[str, CheckpointFile | CheckpointError],
    root: Path,
    index: str,
    listed: Collection[str],
    allowed: bool,
) -> bool:
    """True if the index describes other files than those here, and may be ignored. Raises if files are missing."""
    faults = {n: r for n in assigned if isinstance(r := found[n], CheckpointError)}
    absent = {n: r for n, r in faults.items() if r.fault is CheckpointFault.MISSING_FILE}
    if not absent:
        return False
    total = len(assigned)
    # A dangling symlink is listed: the index does describe this directory, but a hub cache's blob is gone.
    if len(absent) < total or absent.keys() & set(listed):
        what = "; ".join(map(str, faults.values()))
        message = f"{root}: {len(absent)} of the {total} files that {index} names are missing: {what}"
        fault = CheckpointFault.INCOMPLETE_DOWNLOAD if len(absent) < total else CheckpointFault.MISSING_FILE
        refuse(fault, message, "finish the download")
    if not listed:
        message = f"{root}: {index} is here, but none of the {total} files it names: {describe(absent)}"
        refuse(CheckpointFault.MISSING_FILE, message, "finish the download")
    if not allowed:
        message = f"{root}: {index} is stale: it names {describe(assigned)}, but the files here are {describe(listed)}"
        refuse(
            CheckpointFault.STALE_INDEX,
            message,
            "if these files are the model, remove it or say allow_stale_index; else download it again",
        )
    return True


def _all_good(results: Iterable[T | CheckpointError], root: Path) -> list[T]:
    """Every result, or one error that lists all that went wrong; its fault and hint are those of the first."""
    good: list[T] = []
    bad: list[CheckpointError] = []
    for result in results:
        if isinstance(result, CheckpointError):
            bad.append(result)
        else:
            good.append(result)
    if bad:
        count = f"{len(bad)} checkpoint files are unusable: " if len(bad) > 1 else ""
        raise CheckpointError(bad[0].fault, f"{root}: {count}{'; '.join(map(str, bad))}", hint=bad[0].hint)
    return good


def _attempt(work: Callable[[CheckpointFile], T], file: CheckpointFile) -> T | CheckpointError:
    """One bad file must not hide the others."""
    try:
        return work(file)
    except CheckpointError as e:
        return e


def _header(file: CheckpointFile) -> Header:
    with open_surveyed(file) as fd:
        try:
            return read_header(fd.fileno(), file.stamp.size, file.name)
        except OSError as e:
            raise CheckpointError(CheckpointFault.UNREADABLE, f"read {file.name}: {e.strerror}") from e


def _take_all(survey: Survey, headers: list[Header]) -> dict[str, TensorEntry]:
    """Without an index nobody decides between two tensors of one name."""
    tensors: dict[str, TensorEntry] = {}
    twice: dict[str, str] = {}
    for i, header in enumerate(headers):
        for e in header.entries:
            if e.name in tensors:
                twice[e.name] = f"{e.name!r} in {survey.files[tensors[e.name].file].name} and {survey.files[i].name}"
            tensors[e.name] = TensorEntry(e.name, e.dtype, e.shape, i, e.offset, e.nbytes)
    if twice:
        message = f"{survey.directory}: {len(twice)} tensors twice and no index to decide: {describe(twice.values())}"
        refuse(CheckpointFault.DUPLICATE_TENSOR, message, "keep the files of one model, or restore its index")
    return tensors


def _take_assigned(
    survey: Survey, weight_map: Mapping[str, str], headers: list[Header]
) -> tuple[dict[str, TensorEntry], Counter[str]]:
    """The tensors in the files that the index assigns them to; what else lies there is counted by file."""
    tensors: dict[str, TensorEntry] = {}
    ignored: Counter[str] = Counter()
    for i, (file, header) in enumerate(zip(survey.files, headers, strict=True)):
        for e in header.entries:
            if weight_map.get(e.name) == file.name:
                tensors[e.name] = TensorEntry(e.name, e.dtype, e.shape, i, e.offset, e.nbytes)
            else:
                ignored[file.name] += 1
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        listed = describe(f"{name!r} in {weight_map[name]}" for name in missing)
        message = f"{survey.directory}: {len(missing)} tensors are not where {survey.index} says: {listed}"
        refuse(CheckpointFault.MISSING_TENSOR, message, "the index and the files are of different downloads")
    return tensors, ignored
