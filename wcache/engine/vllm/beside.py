# SPDX-License-Identifier: Apache-2.0
"""Files beside the checkpoint's own that vLLM reads while it builds and loads a model: adapters, projections, codecs.

Runs in the process that loads from disk, and in the engine that attaches. Which files these are only the code of the
model knows; so what was opened is noted while it loads, its digests travel with the shard, and an engine in whose
directory they differ has a miss. The checkpoint's identity covers none of them.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wcache.engine.options import host_store
from wcache.weights.checkpoint import Survey
from wcache.weights.identity import digests_of

_INDEX = ".index.json"  # says which file has which tensor, which the content of the files does too


@contextmanager
def noted() -> Iterator[set[str]]:
    """The files that Python code opens to read, while it lasts."""
    found: set[str] = set()
    opened = builtins.open

    def noting(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and not set(mode) & set("wax+"):
            found.add(os.path.abspath(file))  # noqa: PTH100 - not where a link in the hub's cache leads
        return opened(file, mode, *args, **kwargs)

    builtins.open = io.open = noting
    try:
        yield found
    finally:
        builtins.open = io.open = opened


def digests(survey: Survey, opened: Iterable[str]) -> dict[str, str]:
    """SHA-256 of what was opened in a checkpoint's directory and its identity does not cover, by relative path.

    Whoever opens one file of a folder may have read the others in ways that nobody sees.
    """
    directory = survey.directory.resolve()
    covered = {f.path.name for f in survey.files} | survey.config_digests.keys()
    everything = (Path(f).parent.resolve() / Path(f).name for f in opened)
    inside = [f for f in everything if f.is_relative_to(directory)]
    found = {f for f in inside if f.parent == directory and f.name not in covered and not f.name.endswith(_INDEX)}
    for folder in {f.parent for f in inside} - {directory}:
        found |= set(folder.iterdir())
    return digests_in(directory, found)


def differing(directory: Path, said: dict[str, str]) -> str | None:
    """The first of these files that is not there, or another one."""
    now = digests_in(directory, (directory / name for name in said))
    return next((name for name in said if now.get(name) != said[name]), None)


def digests_in(directory: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of those of the files that are files, by path relative to `directory`; the digest store knows them."""
    paths = {str(f.relative_to(directory)): f for f in sorted(files) if f.is_file()}
    if not paths:
        return {}
    with host_store() as store:
        return digests_of(paths, store)
