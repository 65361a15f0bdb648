# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint directory's names and small files mean: hub caches, the index, configuration files.

Helper of `checkpoint.py`, in every process that surveys. Untrusted input: names from an index stay inside the
directory, small files have a size limit, and nothing is opened that could block (a FIFO in the place of config.json).
A symlink is the operator's (or the hub cache's) own doing and may lead anywhere.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, cast

from wcache.errors import CheckpointError
from wcache.host.fds import OwnedFd
from wcache.model import CheckpointFault
from wcache.weights.header import DuplicateKey, describe, is_lfs_pointer, refuse, unique

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model" + INDEX_SUFFIX
CONFIG = "config.json"
MAX_CONFIG_BYTES = 64 << 20
MAX_INDEX_BYTES = 1 << 30
READ_AHEAD_BYTES = 128 << 10

# Files besides config.json from which engines learn how bytes are used: GPTQ, AWQ, AutoRound, ModelOpt, Mistral's own
# format, adapters. generation_config.json and tokenizers decide nothing about weights.
CONFIG_FILES = frozenset({
    CONFIG, "quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json",
    "params.json", "adapter_config.json",
})  # fmt: skip

_SPLIT = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def resolve_directory(path: Path, revision: str | None) -> tuple[Path, str | None, set[str]]:
    """The directory itself, its commit id where it is a hub cache's snapshot, and the names in it.

    A hub cache's repository (`models--org--name`) stands for the snapshot of `revision`, "main" by default.
    """
    try:
        names = _list(path)
    except FileNotFoundError:
        if path.parent.name == "snapshots" and path.parent.is_dir():
            _unknown_snapshot(path.parent, f"snapshot {path.name}")
        refuse(CheckpointFault.NO_DIRECTORY, f"{path}: no such directory")
    except NotADirectoryError:
        refuse(CheckpointFault.NO_DIRECTORY, f"{path}: not a directory")
    if "snapshots" not in names or CONFIG in names or not names & {"refs", "blobs"}:
        commit = path.absolute().name if path.absolute().parent.name == "snapshots" else None
        return path, commit, names
    revision = "main" if revision is None else revision
    commit = _commit(path, revision)
    snapshot = path / "snapshots" / commit
    try:
        return snapshot, commit, _list(snapshot)
    except (FileNotFoundError, NotADirectoryError):
        _unknown_snapshot(snapshot.parent, f"refs/{revision} names snapshot {commit}, which")


def _list(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))  # noqa: PTH208 - names, not paths
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as e:
        raise CheckpointError(CheckpointFault.UNREADABLE, f"list {path}: {_reason(e)}") from e


def _commit(repository: Path, revision: str) -> str:
    """The commit that a revision stands for now: a branch or tag in refs/, or a commit id itself."""
    parts = PurePosixPath(revision).parts
    if not parts or parts[0] == "/" or ".." in parts:
        refuse(CheckpointFault.UNKNOWN_SNAPSHOT, f"{repository}: {revision!r} is no revision")
    if len(parts) == 1 and (repository / "snapshots" / revision).is_dir():
        return revision
    try:
        commit = read_small(repository / "refs" / revision, 256).decode().strip()
    except (CheckpointError, UnicodeDecodeError) as e:
        _unknown_snapshot(repository / "snapshots", f"revision {revision} ({e})")
    if not commit or len(PurePosixPath(commit).parts) != 1 or commit in {".", ".."}:
        refuse(CheckpointFault.UNKNOWN_SNAPSHOT, f"{repository}: refs/{revision} holds {commit!r}, no commit id")
    return commit


def _unknown_snapshot(snapshots: Path, what: str) -> NoReturn:
    there = sorted(p.name for p in snapshots.iterdir()) if snapshots.is_dir() else []
    found = f"there: {describe(there)}" if there else "there is none"
    message = f"{snapshots.parent}: {what} is not in the cache; {found}"
    refuse(CheckpointFault.UNKNOWN_SNAPSHOT, message, "download it, or name a snapshot that is there")


def blob_digest(path: Path) -> str | None:
    """The SHA-256 in the name of the hub cache's blob that this symlink leads to (LFS files), or None."""
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    return target.name if target.parent.name == "blobs" and _SHA256.fullmatch(target.name) else None


def choose_index(names: Collection[str], directory: Path) -> str | None:
    """The index that decides; None if there is none."""
    found = sorted(n for n in names if n.endswith(INDEX_SUFFIX))
    if INDEX in found:
        return INDEX
    if len(found) > 1:
        message = f"{directory}: several indexes and none is {INDEX}: {describe(found)}"
        refuse(CheckpointFault.BAD_INDEX, message, "remove those that are not meant")
    return found[0] if found else None


def config_names(names: Collection[str]) -> list[str]:
    """Files that may decide how bytes are used; model code counts only if config.json refers to it (`auto_map`)."""
    return sorted(n for n in names if n in CONFIG_FILES or n.endswith(".py"))


def parse_config(data: bytes, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(CheckpointFault.BAD_CONFIG, f"{path}: not JSON: {e}") from e
    if type(config) is not dict:
        refuse(CheckpointFault.BAD_CONFIG, f"{path}: a {type(config).__name__}, not an object")
    return cast(dict[str, Any], config)


def parse_index(data: bytes, path: Path) -> dict[str, str]:
    """Tensor name to file name, normalised and inside the directory. Raises CheckpointError."""
    try:
        document = json.loads(data, object_pairs_hook=unique)
    except DuplicateKey as e:
        raise CheckpointError(CheckpointFault.BAD_INDEX, f"{path}: {str(e)!r} is there twice") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(CheckpointFault.BAD_INDEX, f"{path}: not JSON: {e}") from e
    weight_map = document.get("weight_map") if type(document) is dict else None
    if type(weight_map) is not dict or not weight_map:
        refuse(CheckpointFault.BAD_INDEX, f"{path}: no weight_map that maps tensors to files")
    for name in weight_map if b"\\u" in data else ():
        if any("\ud800" <= c <= "\udfff" for c in name):
            refuse(CheckpointFault.BAD_INDEX, f"{path}: the tensor name {name!a} is not valid Unicode")
    known: dict[Any, str] = {}
    for name, file in weight_map.items():
        if type(file) is not str:
            refuse(CheckpointFault.BAD_INDEX, f"{path}: the file of {name!r} is {file!r:.60}, not a name")
        if file not in known:
            known[file] = _inside(file, path)
        weight_map[name] = known[file]
    return cast(dict[str, str], weight_map)


def _inside(file: str, index: Path) -> str:
    name = PurePosixPath(file)
    if name.is_absolute() or ".." in name.parts:
        message = f"{index}: {file!r} leads out of the directory"
        refuse(CheckpointFault.INDEX_ESCAPES, message, "do not use this checkpoint unless you trust its source")
    if not name.parts or not file.isprintable():
        refuse(CheckpointFault.BAD_INDEX, f"{index}: {file!a} is no file name")
    return posixpath.normpath(file)


def complete_set(listed: Collection[str], names: Iterable[str], directory: Path) -> None:
    """Without an index the names must not contradict each other: `-00001-of-00003` wants its siblings."""
    if not listed:
        other = sorted(n for n in names if n.endswith(_OTHER_FORMATS))
        found = f"; of other formats, which are not read: {describe(other)}" if other else ""
        refuse(CheckpointFault.NO_WEIGHTS, f"{directory}: no {SUFFIX} file{found}")
    sets: dict[tuple[str, int], set[int]] = {}
    for match in filter(None, map(_SPLIT.fullmatch, listed)):
        sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, total), numbers in sorted(sets.items()):
        missing = total - len(numbers & set(range(1, total + 1))) if total < 1_000_000 else total
        if missing:
            message = f"{directory}: {missing} of the {total} files {stem}-*-of-* are missing, and there is no index"
            refuse(CheckpointFault.INCOMPLETE_DOWNLOAD, message, "finish the download")


def read_small(path: Path, limit: int = MAX_CONFIG_BYTES) -> bytes:
    """A whole small file. Raises CheckpointError: not a file, too large, unreadable."""
    with open_regular(path, path.name) as fd:
        size = os.fstat(fd.fileno()).st_size
        if size > limit:
            refuse(CheckpointFault.UNREADABLE, f"{path}: {size} bytes; at most {limit} are read")
        parts: list[bytes] = []
        left = size
        try:
            # Where a read is a round trip, the pieces of a large index are asked for at once. One call would not do:
            # the kernel cuts it to its read-ahead window, 128 KiB by default.
            for offset in range(0, size, READ_AHEAD_BYTES):
                os.posix_fadvise(fd.fileno(), offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            while left and (part := os.read(fd.fileno(), left)):
                parts.append(part)
                left -= len(part)
        except OSError as e:
            raise CheckpointError(CheckpointFault.UNREADABLE, f"read {path}: {e.strerror}") from e
    data = b"".join(parts)
    if is_lfs_pointer(data):
        refuse(CheckpointFault.LFS_POINTER, f"{path}: a Git LFS pointer, not the file", "fetch the data: git lfs pull")
    return data


def open_regular(path: Path, what: str) -> OwnedFd:
    """Open a file for reading that must be a regular one. Never blocks on a FIFO. Raises CheckpointError."""
    try:
        fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError as e:
        raise CheckpointError(CheckpointFault.MISSING_FILE, f"{what}: no such file") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(CheckpointFault.UNREADABLE, f"open {what}: {_reason(e)}") from e
    mode = os.fstat(fd.fileno()).st_mode
    if not stat.S_ISREG(mode):
        fd.close()
        refuse(CheckpointFault.NOT_A_FILE, f"{what}: {kind(mode)}, not a file")
    return fd


def kind(mode: int) -> str:
    """What a st_mode that is no regular file stands for, for a message."""
    kinds = {
        stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a block device", stat.S_IFCHR: "a character device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something else")


def _reason(e: Exception) -> str:
    return getattr(e, "strerror", None) or str(e)
