# SPDX-License-Identifier: Apache-2.0
"""What the children of gpu.py do, one role a process: `gpu_workers.py ROLE JSON`. One line of JSON out per step.

Each role is a generator; between two steps it waits for a line on stdin. Contexts and imports are made before the
clock starts, for wcache and for whatever it is measured against alike.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import publisher

from wcache.host.cuda import open_driver
from wcache.weights.segment_cuda import CudaBackend

GB = 1e9
Steps = Iterator[dict[str, Any]]


def warm_torch() -> Any:
    """torch with a context and whatever it loads lazily for a copy."""
    import torch

    torch.zeros(8, device="cuda").cpu()
    torch.cuda.synchronize()
    return torch


def devices() -> Steps:
    infos = open_driver().devices()
    yield {"uuids": [i.uuid for i in infos], "names": [i.name for i in infos]}


def publish(socket: str, gpu: str, name: str, total: int, count: int) -> Steps:
    start = time.perf_counter()
    publisher.publish(Path(socket), gpu, name, publisher.equal_sizes(total, count))
    yield {"seconds": time.perf_counter() - start}


def attach(socket: str, gpu: str, name: str, again: int = 3) -> Steps:
    """From connect to the last tensor usable; the first attach of a process, then the best of `again` more."""
    torch = warm_torch()
    from wcache.engine.client import attach_shard

    start = time.perf_counter()
    open_driver()
    driver = time.perf_counter() - start

    def once() -> tuple[float, Any]:
        begin = time.perf_counter()
        held = attach_shard(publisher.query(name), Path(socket), device=gpu, name="bench")
        tensors = held.tensors
        last = tensors[next(reversed(tensors))]
        assert int(last[-1:].view(torch.uint8)[0].cpu()) == publisher.filling(len(tensors) - 1)
        return time.perf_counter() - begin, held

    first, held = once()
    timing = dict(held.timing)
    held.close()
    best = []
    for _ in range(again):
        took, held = once()
        best.append(took)
        held.close()
    _, held = once()
    yield {"first": first, "best": min(best), "timing": timing, "driver": driver, "tensors": len(held.tensors)}
    wrong = sum(
        int(t[:1].view(torch.uint8)[0].cpu()) != publisher.filling(i) for i, t in enumerate(held.tensors.values())
    )
    yield {"wrong": wrong}


def legacy_import(connection: Any) -> None:
    """The other process of `legacy`: torch's own CUDA IPC, through torch.multiprocessing."""
    torch = warm_torch()
    connection.send("ready")
    for _ in range(2):
        connection.recv()
        begin = time.perf_counter()
        connection.send("go")
        tensors = connection.recv()
        byte = int(tensors[-1][-1:].view(torch.uint8)[0].cpu())
        took = time.perf_counter() - begin
        connection.send((took, byte))
        connection.recv()
        del tensors
        torch.cuda.ipc_collect()


def legacy(total: int, count: int) -> Steps:
    """An exporter as today's daemons are: a process with a context that holds the tensors."""
    torch = warm_torch()
    import torch.multiprocessing as multiprocessing

    size = publisher.equal_sizes(total, count)[0]
    tensors = [torch.full((size // 2,), i + 1, dtype=torch.int16, device="cuda") for i in range(count)]
    torch.cuda.synchronize()
    yield {"exporting": count * size}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=legacy_import, args=(theirs,))
    process.start()
    ours.recv()
    times = []
    for _ in range(2):
        ours.send("begin")
        ours.recv()
        ours.send(tensors)
        took, byte = ours.recv()
        assert byte == count % 256
        times.append(took)
        if len(times) == 1:
            yield {"first": took}
        ours.send("next")
    process.join()
    yield {"best": min(times)}


def context(torch_too: bool) -> Steps:
    """A process with a context and nothing else."""
    if torch_too:
        warm_torch()
    else:
        (info,) = open_driver().devices()[:1]
        CudaBackend(info.uuid)
    yield {}


def pcie() -> Steps:
    """Page-locked host memory to the device, and device to device."""
    torch = warm_torch()
    host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)

    def rate(work: Callable[[], Any]) -> float:
        best = 1e9
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        return (2 << 30) / GB / best

    yield {
        "h2d": rate(lambda: device.copy_(host, non_blocking=True)),
        "pageable": rate(lambda: device.copy_(torch.empty(2 << 30, dtype=torch.uint8).fill_(1))),
        "d2d": rate(lambda: other.copy_(device)),
    }


def disk(directory: str, threads: int) -> Steps:
    """Reading the files into memory and doing nothing with them."""
    files = sorted(Path(directory).glob("*.safetensors"))
    step = 16 << 20
    tasks = [(f, o) for f in files for o in range(0, f.stat().st_size, step)]
    fds = {f: os.open(f, os.O_RDONLY) for f in files}
    rooms = [mmap.mmap(-1, step) for _ in range(threads)]
    for room in rooms:
        room.write(bytes(step))

    def read(i: int) -> int:
        return sum(os.preadv(fds[f], [rooms[i]], o) for f, o in tasks[i::threads])

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(threads)))
    yield {"rate": total / GB / (time.perf_counter() - begin)}


def load_wcache(directory: str, gpu: str, hashed: bool) -> Steps:
    """Into segments, digested, ready to publish."""
    from wcache.model import Placement, Sizes
    from wcache.weights.checkpoint import open_checkpoint, survey
    from wcache.weights.load import load
    from wcache.weights.plan import plan_for
    from wcache.weights.sharding import shard

    backend = CudaBackend(gpu)
    free, _ = backend.gpu.free_and_total()
    yield {"ready": True}
    begin = time.perf_counter()
    checkpoint = open_checkpoint(survey(Path(directory)))
    plan = shard(checkpoint, plan_for(checkpoint.survey.config, None), Placement(Sizes(), 0), "auto")
    lowest = free

    def look(**_: int) -> None:
        nonlocal lowest
        lowest = min(lowest, backend.gpu.free_and_total()[0])

    names = [f.name for f in checkpoint.survey.files] if hashed else []
    filled = load(checkpoint, plan, backend, hash_files=names, progress=look)
    took = time.perf_counter() - begin
    size = sum(s.size for s in filled.specs)
    extra = free - lowest - sum(s.aligned_size for s in filled.specs)
    filled.close()
    yield {"seconds": took, "rate": size / GB / took, "extra": extra}


def load_safetensors(directory: str) -> Steps:
    torch = warm_torch()
    from safetensors.torch import load_file

    yield {"ready": True}
    begin = time.perf_counter()
    tensors = [load_file(f, device="cuda") for f in sorted(Path(directory).glob("*.safetensors"))]
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    size = sum(t.nbytes for part in tensors for t in part.values())
    yield {"seconds": took, "rate": size / GB / took}


def load_fastsafetensors(directory: str) -> Steps:
    torch = warm_torch()
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    yield {"ready": True}
    begin = time.perf_counter()
    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True)
    loader.add_filenames({0: [str(f) for f in sorted(Path(directory).glob("*.safetensors"))]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    size = sum(t.nbytes for t in tensors.values())
    yield {"seconds": took, "rate": size / GB / took}


def digests(socket: str, gpu: str, name: str) -> Steps:
    """The digest of a resident shard against a plain read of the same bytes by torch."""
    torch = warm_torch()
    from wcache.engine.client import attach_shard
    from wcache.engine.tensors import bytes_tensor

    held = attach_shard(publisher.query(name), Path(socket), device=gpu, name="bench")
    sizes = [s.size for s in held.manifest.segments]
    views = [bytes_tensor(held.mapping.memory(i), 0, n // 8 * 8).view(torch.int64) for i, n in enumerate(sizes)]

    def rate(work: Callable[[int], Any]) -> float:
        work(0)
        torch.cuda.synchronize()
        best = 1e9
        for _ in range(2):
            begin = time.perf_counter()
            for i in range(len(sizes)):
                work(i)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begin)
        return sum(sizes) / GB / best

    yield {"digest": rate(held.mapping.digest), "sum": rate(lambda i: views[i].sum())}


def clone(socket: str, gpu: str, name: str) -> Steps:
    """Copy mode: every storage cloned."""
    torch = warm_torch()
    from wcache.engine import tensors as wrapping
    from wcache.engine.client import attach_shard

    held = attach_shard(publisher.query(name), Path(socket), device=gpu, name="bench")
    begin = time.perf_counter()
    mine = wrapping.copy(held.manifest, held.mapping)
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    yield {"rate": sum(t.nbytes for t in mine.values()) / GB / took, "seconds": took}


def publish_live(socket: str, gpu: str, name: str, total: int, count: int) -> Steps:
    """A live engine's own parameters become the shared ones."""
    torch = warm_torch()
    from wcache.engine.entries import state_entries
    from wcache.engine.publish import begin

    size = publisher.equal_sizes(total, count)[0]
    make = lambda: torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    state = {f"layer.{i}.weight": torch.nn.Parameter(make(), requires_grad=False) for i in range(count)}
    yield {"bytes": size * count}
    start = time.perf_counter()
    publication = begin(publisher.query(name), Path(socket), device=gpu, name="bench")
    assert publication is not None
    held = publication.write(state_entries(state), repoint=True)
    took = time.perf_counter() - start
    yield {"seconds": took, "rate": size * count / GB / took}
    held.close()


def stray(socket: str, gpu: str, name: str) -> Steps:
    """A kernel writes to what it may only read."""
    torch = warm_torch()
    from wcache.engine.client import attach_shard

    held = attach_shard(publisher.query(name), Path(socket), device=gpu, name="stray")
    tensor = next(iter(held.tensors.values()))
    said = "the write went through"
    try:
        tensor.fill_(0)
        torch.cuda.synchronize()
    except RuntimeError as e:
        said = str(e).splitlines()[0]
    yield {"said": said}


def main() -> None:
    steps: Steps = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    for step in steps:
        print(json.dumps(step), flush=True)
        if not sys.stdin.readline():
            break
    os._exit(0)  # a context that a stray write has broken cannot be torn down in order


if __name__ == "__main__":
    main()
