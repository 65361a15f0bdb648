# SPDX-License-Identifier: Apache-2.0
"""What it costs to know which checkpoint a directory holds, warm and cold.

    python scripts/bench/identity.py [--files 66] [--delay 0.5] [--gigabytes 4] [--workdir DIR]

Warm: survey + recognise of a checkpoint whose digests are in the store, against reading and hashing every header one
after the other (what weight caches that identify by headers do at each start), on a local disk and on a FUSE mount
where every open and read takes `--delay` seconds. Cold: identify against
`sha256sum` and `openssl dgst`, one process a core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slow_fs import slow_mount

from wcache.model import IdentityPolicy
from wcache.weights.checkpoint import survey
from wcache.weights.digests import DigestStore
from wcache.weights.identity import Identity, identify, open_store, recognise

HEADER_BYTES = 3086  # 66 of them make the 203,664 bytes that were reported from the field
TENSORS_A_FILE = 30
REPEATS = 30
CONTENT, STAT = IdentityPolicy.CONTENT, IdentityPolicy.STAT
Row = tuple[str, str, str, str]


def make_checkpoint(directory: Path, files: int, body_bytes: int) -> Path:
    """A checkpoint of `files` files with real index and headers; each file's bytes are its own."""
    directory.mkdir(parents=True)
    weight_map = {}
    block = os.urandom(1 << 20)
    size = body_bytes // TENSORS_A_FILE
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        header = {}
        for t in range(TENSORS_A_FILE):
            tensor = f"model.layers.{i}.part.{t}.weight"
            header[tensor] = {"dtype": "U8", "shape": [size], "data_offsets": [t * size, (t + 1) * size]}
            weight_map[tensor] = name
        text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER_BYTES)
        with (directory / name).open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            left = size * TENSORS_A_FILE
            while left:
                block = struct.pack("<QQ", i, left) + block[16:]
                left -= f.write(block[:left])
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def hash_headers(directory: Path) -> str:
    """What header-based identities do: open each file, read its length and its header, one after the other."""
    state = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            state.update(f.read(length))
    return state.hexdigest()


def recognised(directory: Path, state: Path, policy: IdentityPolicy) -> Identity:
    """The whole warm path, store opened and closed as at a start."""
    with open_store(state) as store:
        return recognise(survey(directory), store, policy)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def expect(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"the benchmark does not measure what it says: {what}")


def settle() -> None:
    """Files written this instant are not trusted by their stamps, and rightly so."""
    time.sleep(2.5)


def opened(log: Path) -> int:
    """Checkpoint files opened on the slow mount since the last call."""
    count = sum(line.endswith(".safetensors") for line in log.read_text().splitlines())
    log.write_text("")
    return count


def local(directory: Path, state: Path) -> list[Row]:
    with open_store(state) as store:
        identify(survey(directory), store, CONTENT)
    files: list[str] = []
    sys.addaudithook(lambda event, args: files.append(str(args[0])) if event == "open" else None)
    expect(recognised(directory, state, CONTENT).content is not None, "not recognised")
    count = sum(name.endswith(".safetensors") for name in files)
    ours = sorted(timed(lambda: recognised(directory, state, CONTENT)) for _ in range(REPEATS))
    theirs = sorted(timed(lambda: hash_headers(directory)) for _ in range(REPEATS))
    ratio = f"{statistics.median(theirs) / statistics.median(ours):.1f}x"
    return [
        ("local disk, page cache warm: headers, one by one", milliseconds(theirs), "all", "1"),
        ("local disk: recognise (content)", milliseconds(ours), str(count), ratio),
    ]


def milliseconds(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f} ms (best {times[0] * 1e3:.1f})"


def slow(directory: Path, state: Path, mountpoint: Path, delay_s: float) -> list[Row]:
    """First mount: headers, and the digests taken. Second mount: recognised, with other inode numbers."""
    log = mountpoint.with_name("opens.log")
    log.touch()
    with slow_mount(directory, mountpoint, delay_s, log):
        theirs = timed(lambda: hash_headers(mountpoint))
        rows = [("slow mount: headers, one by one", f"{theirs:.2f} s", str(opened(log)), "1")]
        with open_store(state) as store:
            found = survey(mountpoint)
            identify(found, store, CONTENT, threads=len(found.files))
        opened(log)
        took = timed(lambda: recognised(mountpoint, state, CONTENT))
        expect(recognised(mountpoint, state, CONTENT).content is not None, "not recognised on the same mount")
        rows.append(("slow mount, same mount: recognise (content)", f"{took:.2f} s", *result(log, theirs, took)))
    # Names are looked up in another order now, so that the mount numbers its files differently.
    with slow_mount(directory, mountpoint, delay_s, log):
        for path in sorted(mountpoint.iterdir(), reverse=True):
            path.stat()
        unknown = recognised(mountpoint, state, CONTENT).unknown
        expect(len(unknown) > 0, "inode numbers survived the remount")
        opened(log)
        took = timed(lambda: recognised(mountpoint, state, STAT))
        expect(recognised(mountpoint, state, STAT).content is not None, "not recognised after the remount")
        rows.append(("slow mount, mounted anew: recognise (stat)", f"{took:.2f} s", *result(log, theirs, took)))
        rows.append(("slow mount, mounted anew: content would hash", f"{len(unknown)} files", "-", "-"))
    return rows


def result(log: Path, theirs: float, ours: float) -> tuple[str, str]:
    return str(opened(log)), f"{theirs / ours:.0f}x"


def forget_pages(directory: Path) -> None:
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cold(directory: Path, state: Path) -> list[Row]:
    """Best of three each, taken in turns."""
    size = survey(directory).size
    cores = len(os.sched_getaffinity(0))
    names = "\0".join(str(p) for p in sorted(directory.glob("*.safetensors")))

    def each(*command: str) -> Callable[[], object]:
        """The command for every file, one process a core."""
        line = ["xargs", "-0", "-n", "1", "-P", str(cores), *command]
        return lambda: subprocess.run(line, input=names, text=True, check=True, stdout=subprocess.DEVNULL)

    def ours() -> None:
        with DigestStore(state / f"{time.time_ns()}.sqlite") as store:
            identify(survey(directory), store, CONTENT)

    rows = []
    for name, prepare in (("page cache", lambda: None), ("disk", lambda: forget_pages(directory))):
        # coreutils without libcrypto does not use the processor's SHA instructions; OpenSSL does, as hashlib does.
        works = {"sha256sum": each("sha256sum"), "openssl dgst": each("openssl", "dgst", "-sha256"), "identify": ours}
        best = dict.fromkeys(works, float("inf"))
        ours()
        for _ in range(3):
            for what, work in works.items():
                prepare()
                best[what] = min(best[what], timed(work))
        for what, took in best.items():
            rate = f"{size / took / 1e9:.2f} GB/s"
            rows.append((f"cold from {name}, {cores} cores: {what}", rate, "all", f"{best['sha256sum'] / took:.2f}x"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=66)
    parser.add_argument("--delay", type=float, default=0.5)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--workdir", type=Path, help="on the disk to measure; a temporary directory by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.workdir) as temporary:
        work = Path(temporary)
        small = make_checkpoint(work / "small", options.files, 90_000)
        large = make_checkpoint(work / "large", options.files, int(options.gigabytes * 1e9 / options.files))
        settle()
        rows = [
            *local(small, work / "state"),
            *slow(small, work / "slow-state", work / "mount", options.delay),
            *cold(large, work / "cold-state"),
        ]
    date = time.strftime("%Y-%m-%d")
    print(f"{date}: {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, {options.files} files, ", end="")
    print(
        f"{options.files * HEADER_BYTES:,} header bytes, {options.delay} s an open and a read on the slow mount, ",
        end="",
    )
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print("| what | time or rate | files opened | ratio |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
