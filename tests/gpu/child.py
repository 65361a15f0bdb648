# SPDX-License-Identifier: Apache-2.0
"""What a child of the GPU tests does: `child.py ROLE SOCKET`. Each request of the test is one call of the role.

An exception becomes the answer {"error": ...}; end of file ends the process.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import publisher
import wcd1

from wcache.errors import ConnectionClosed, WcacheError
from wcache.host.cuda import open_driver
from wcache.host.fds import OwnedFd, close_all, receive, send
from wcache.protocol.connection import connect
from wcache.protocol.messages import Attach
from wcache.weights import digest_cuda
from wcache.weights import manifest as manifests
from wcache.weights.segment import Access
from wcache.weights.segment_cuda import CudaBackend, DeviceMemory

Answer = tuple[dict[str, Any], list[OwnedFd]]
kept: dict[str, Any] = {}  # what lives from one request to the next


def host_bytes(backend: CudaBackend, address: int, size: int) -> bytes:
    room = ctypes.create_string_buffer(size)
    backend.gpu.copy_out(ctypes.addressof(room), address, size, 0, "the test")
    backend.gpu.synchronize("the test")
    return room.raw


def put(backend: CudaBackend, address: int, data: bytes) -> None:
    room = ctypes.create_string_buffer(data, len(data))
    backend.gpu.copy_in(address, ctypes.addressof(room), len(data), 0, "the test")
    backend.gpu.synchronize("the test")


def devices(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    return {"uuids": [info.uuid for info in open_driver().devices()]}, []


def exporter(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Segment `i` is full of the byte i + 1 (modulo 256)."""
    backend = CudaBackend(request["gpu"])
    made, digests = [], []
    for i, size in enumerate(request["sizes"]):
        segment = backend.create(f"s{i}", size)
        backend.gpu.fill(segment.memory().address, (i + 1) % 256, size, 0, "the test")
        digests.append(segment.digest())
        if i == 0:
            tail = host_bytes(backend, segment.memory().address + size, segment.aligned_size - size)
            if any(tail):
                raise ValueError("the padding is not zero")
        made.append(segment.seal())
    return {"digests": digests, "granularity": backend.granularity}, made


def importer(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Map and look: first and last byte, digests, and how long mapping took (seconds)."""
    if "uid" in request:  # another user may not be able to read this checkout: import everything first
        import cuda.bindings.driver  # noqa: F401

        digest_cuda.image()
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    backend = CudaBackend(request["gpu"])
    start = time.perf_counter()
    mapping = backend.map(fds, request["sizes"], Access(request.get("access", "r")))
    took = time.perf_counter() - start
    found = [mapping.memory(i) for i in range(len(request["sizes"]))]
    ends = [[host_bytes(backend, m.address + at, 1)[0] for at in (0, m.size - 1)] for m in found]
    digests = [mapping.digest(i) for i in range(len(found))]
    contiguous = all(b.address - a.address == backend.aligned(a.size) for a, b in itertools.pairwise(found))
    kept["mapping"], kept["backend"] = mapping, backend
    return {"ends": ends, "digests": digests, "seconds": took, "uid": os.getuid(), "contiguous": contiguous}, []


def refused(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Mapping must fail; how."""
    try:
        CudaBackend(request["gpu"]).map(fds, request["sizes"])
    except WcacheError as e:
        return {"code": e.code, "message": str(e)}, []
    return {"code": "", "message": "it was mapped"}, []


def reader(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Keeps a mapping through torch; every request sums it anew."""
    import torch

    from wcache.engine.tensors import bytes_tensor

    if fds:
        backend = CudaBackend(request["gpu"])
        kept["mapping"] = backend.map(fds, request["sizes"])
        memory = kept["mapping"].memory(0)
        kept["tensor"] = bytes_tensor(memory, 0, memory.size)
    total = int(kept["tensor"].to(torch.int64).sum())
    torch.cuda.empty_cache()
    return {"sum": total, "digest": kept["mapping"].digest(0)}, []


def stray_writer(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """A kernel writes to read-only memory; what this process hears of it, and that it is broken afterwards."""
    import torch

    from wcache.engine.tensors import bytes_tensor

    mapping = CudaBackend(request["gpu"]).map(fds, request["sizes"])
    said = []
    for target in (bytes_tensor(mapping.memory(0), 0, 1024), None):
        try:
            (torch.zeros(4, device="cuda") if target is None else target).add_(1)
            torch.cuda.synchronize()
            said.append("")
        except RuntimeError as e:  # torch.AcceleratorError is one
            said.append(str(e).splitlines()[0])
    return {"said": said}, []


def writes(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """With access "rw" a kernel writes; the driver's own copies too."""
    import torch

    from wcache.engine.tensors import bytes_tensor

    backend = CudaBackend(request["gpu"])
    mapping = backend.map(fds, request["sizes"], Access.READ_WRITE)
    bytes_tensor(mapping.memory(0), 0, 1024).add_(1)
    torch.cuda.synchronize()
    put(backend, mapping.memory(0).address + 1024, b"\x07")
    return {"head": list(host_bytes(backend, mapping.memory(0).address, 1025))[1022:]}, []


def digester(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """The kernel against the reference, and how it takes damage. Answers what was wrong."""
    backend, wrong = CudaBackend(request["gpu"]), []
    random.seed(1)
    sizes = [0, 1, 7, 8, 15, 16, 17, 255, 4096, 65535, 65536, 65537, (1 << 20) + 3, (32 << 20) + 9]
    for size in sizes:
        segment = backend.create("s", size)
        data = random.randbytes(size)
        if size:
            put(backend, segment.memory().address, data)
        if segment.digest() != wcd1.digest(data):
            wrong.append(f"{size} bytes: {segment.digest()}, not {wcd1.digest(data)}")
        if size > 4096:
            wrong.extend(_damage(backend, segment.memory(), data))
        segment.close()
    return {"wrong": wrong, "sizes": len(sizes)}, []


def _damage(backend: CudaBackend, memory: DeviceMemory, data: bytes) -> list[str]:
    """Each kind of damage must change the digest, to what the reference says; undoing it brings it back."""
    whole = backend.digest(memory.address, memory.size, "s")
    last = memory.size - 1
    damages = {
        "first bit": (0, bytes([data[0] ^ 1])),
        "last bit": (last, bytes([data[last] ^ 0x80])),
        "two words swapped": (64, data[72:80] + data[64:72]),
        "two pages swapped": (0, data[2048:4096] + data[:2048]),
        "a block zeroed": (1024, bytes(512)),
        "a block moved by a byte": (512, data[511:1023]),
    }
    wrong = []
    for name, (offset, bad) in damages.items():
        put(backend, memory.address + offset, bad)
        damaged = data[:offset] + bad + data[offset + len(bad) :]
        found = backend.digest(memory.address, memory.size, "s")
        if found == whole or found != wcd1.digest(damaged):
            wrong.append(f"{name} in {memory.size} bytes: {found}")
        put(backend, memory.address + offset, data[offset : offset + len(bad)])
    if backend.digest(memory.address, memory.size, "s") != whole:
        wrong.append(f"{memory.size} bytes: undone damage still shows")
    return wrong


def loader(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Load one rank's shard and compare every tensor with slices of what safetensors reads."""
    from safetensors import safe_open

    from wcache.engine.tensors import bytes_tensor, view
    from wcache.model import Placement, Sizes
    from wcache.weights.checkpoint import open_checkpoint, survey
    from wcache.weights.load import load
    from wcache.weights.plan import plan_for
    from wcache.weights.sharding import shard

    backend = CudaBackend(request["gpu"])
    checkpoint = open_checkpoint(survey(Path(request["directory"])))
    placement = Placement(Sizes(tp=request["tp"]), request["rank"])
    plan = shard(checkpoint, plan_for(checkpoint.survey.config, None), placement, request["dtype"])
    start = time.perf_counter()
    filled = load(checkpoint, plan, backend, hash_files=[f.name for f in checkpoint.survey.files])
    took = time.perf_counter() - start
    mapping = backend.map(made := filled.seal(), [s.size for s in filled.specs])
    if request.get("only_load"):
        return {"seconds": took, "weights": sum(s.aligned_size for s in filled.specs)}, made
    wrong, seen = [], 0
    bases = [bytes_tensor(mapping.memory(s.segment), s.offset, s.size) for s in filled.storages]
    for file in checkpoint.survey.files:
        with safe_open(file.path, "pt") as source:
            names = set(source.keys())
            for spec in filled.tensors:
                for name in names & set(spec.names):
                    seen += 1
                    got = view(bases[spec.storage], spec).cpu()
                    want = _slice(source.get_tensor(name), name, tuple(got.shape), request["rank"]).to(got.dtype)
                    if not got.equal(want):
                        wrong.append(name)
    digests = [mapping.digest(i) for i in range(len(filled.specs))] == [s.digest for s in filled.specs]
    return {"wrong": wrong, "seen": seen, "tensors": len(filled.tensors), "digests": digests, "seconds": took}, made


def _slice(whole: Any, name: str, shape: tuple[int, ...], rank: int) -> Any:
    """This rank's part, by what the names of a Llama say and no plan of ours."""
    if tuple(whole.shape) == shape:
        return whole
    dim = 1 if ("o_proj" in name or "down_proj" in name) else 0
    return whole.narrow(dim, rank * shape[dim], shape[dim])


def publish(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Publish a synthetic shard to a rank."""
    where, gpu = Path(request["socket"]), request["gpu"]

    def before_commit() -> None:
        if request.get("die_before_commit"):
            os.kill(os.getpid(), signal.SIGKILL)

    committed = publisher.publish(where, gpu, request["name"], request["sizes"], before_commit=before_commit)
    return {"fingerprint": committed.fingerprint, "generation": committed.generation}, []


def attach(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """Attach, map, and look at the first and last byte of every tensor. Keeps lease and mapping; asked again without
    a socket it looks again. `spoil`: write one byte, which only `access="rw"` allows."""
    if "socket" in request:
        connection = connect(Path(request["socket"]), role="engine", name="attacher", device=request["gpu"])
        try:
            _, manifest_fd, came = connection.attach(Attach(query=publisher.query(request["name"])))
        except WcacheError as e:
            connection.close()
            return {"refused": e.code, "message": str(e), **e.data}, []
        with manifest_fd:
            manifest = manifests.decode(os.pread(manifest_fd.fileno(), os.fstat(manifest_fd.fileno()).st_size, 0))
        backend = CudaBackend(request["gpu"])
        mapping = backend.map(came, [s.size for s in manifest.segments], Access(request.get("access", "r")))
        close_all(came)
        kept.update(connection=connection, manifest=manifest, backend=backend, mapping=mapping)
    backend, mapping, manifest = kept["backend"], kept["mapping"], kept["manifest"]
    wrong = []
    for i, storage in enumerate(manifest.storages):
        address = mapping.memory(storage.segment).address + storage.offset
        ends = {host_bytes(backend, address + at, 1)[0] for at in (0, storage.size - 1)}
        if ends != {publisher.filling(i)}:
            wrong.append(i)
    if request.get("spoil"):
        put(backend, mapping.memory(0).address + 5, b"\xff")
    return {"wrong": wrong, "tensors": len(manifest.tensors), "daemon": not kept["connection"].ended()}, []


def engine(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """A PyTorch engine: `how` is "attach" (options go to wcache.attach), "publish" (live parameters), or "look"."""
    import torch
    from safetensors.torch import load_file

    import wcache

    directory, socket_dir = Path(request["directory"]), request["socket_dir"]
    start = time.perf_counter()
    held: wcache.Attachment | None = None
    if request["how"] == "attach":
        held = wcache.attach(directory, socket_dir=socket_dir, **request["options"])
        kept["tensors"] = dict(held.tensors)
    elif request["how"] == "publish":
        live = {k: v for f in sorted(directory.glob("*.safetensors")) for k, v in load_file(f, device="cuda").items()}
        kept["tensors"] = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in live.items()}
        del live
        held = wcache.publish(kept["tensors"], directory, socket_dir=socket_dir, repoint=True)
    took = time.perf_counter() - start
    kept.setdefault("held", held)
    tensors = kept["tensors"]
    wrong = []
    for file in sorted(directory.glob("*.safetensors")):
        wrong += [name for name, want in load_file(file).items() if not tensors[name].cpu().equal(want)]
    torch.cuda.empty_cache()
    said = {} if held is None else {"source": held.source, "mode": str(held.mode), "timing": held.timing}
    storages = {t.untyped_storage().data_ptr() for t in tensors.values()}
    on_gpu = all(t.is_cuda for t in tensors.values())
    return {"wrong": wrong, "own": len(storages) == len(tensors), "on_gpu": on_gpu, "seconds": took, **said}, []


def modules(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """`wcache.cached` on the GPU, made and mapped: a module that keeps tensors on the host, one that keeps a parameter.

    Says which tensors are elsewhere or otherwise once they are mapped, and why the second was not shared.
    """
    import equality
    import torch
    from torch import nn

    import wcache
    from wcache.errors import Miss

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
            self.register_buffer("lengths", torch.zeros(3, dtype=torch.int64, device="cpu"))
            self.scale = torch.zeros((), device="cpu")
            self.tables = {"host": torch.zeros(0, device="cpu"), "here": torch.zeros(2)}
            self.made_by_loading: Any = None

    class Away(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, device="cpu"))

    def load(module: nn.Module) -> None:
        if isinstance(module, Spread):
            module.made_by_loading = torch.ones(2, device="cpu")
        for i, tensor in enumerate(equality.named(module).values()):
            tensor.detach().copy_(torch.arange(tensor.numel(), device="cpu").add(i).reshape(tensor.shape))

    where = {"socket_path": request["socket"], "device": "cuda:0"}
    first = wcache.cached(Spread, key="spread", load=load, **where)
    second = wcache.cached(Spread, key="spread", load=load, fallback=False, **where)
    equality.same(first, second)
    places = {name.partition(" ")[2].split(" ")[0]: str(t.device) for name, t in equality.named(second).items()}
    wcache.cached(Away, key="away", load=load, **where)
    try:
        wcache.cached(Away, key="away", load=load, fallback=False, **where)
        away = "shared"
    except Miss as e:
        away = str(e.reason)
    return {"places": places, "away": away}, []


def pretrained(request: dict[str, Any], fds: list[OwnedFd]) -> Answer:
    """A Transformers model on the GPU, from disk without wcache, published, and mapped: all the same, or an error."""
    import equality
    import tiny_checkpoints as tiny
    import transformers

    import wcache.transformers

    name, options = request["name"], {"device_map": "cuda:0"}
    directory = tiny.save(name, Path(request["directory"]))
    auto = getattr(transformers, tiny.MODELS[name][2])
    plain = auto.from_pretrained(directory, **options)
    sources, tokens = [], []
    for fallback in (True, False):
        model = wcache.transformers.from_pretrained(
            directory, auto_class=auto, socket_path=request["socket"], fallback=fallback, **options
        )
        equality.same(model, plain)
        held = wcache.transformers.attachment(model)
        sources.append(held.source if held is not None else "private")
        tokens.append(model.generate(tiny.input_ids().to("cuda:0"), max_new_tokens=8, do_sample=False).tolist())
    return {"sources": sources, "same_tokens": tokens[0] == tokens[1]}, []


_ROLES = (
    devices, exporter, importer, refused, reader, stray_writer, writes, digester, loader, publish, attach, engine,
    modules, pretrained,
)  # fmt: skip
ROLES: dict[str, Callable[[dict[str, Any], list[OwnedFd]], Answer]] = {role.__name__: role for role in _ROLES}


def main() -> None:
    role, sock = ROLES[sys.argv[1]], socket.socket(fileno=int(sys.argv[2]))
    fds: list[OwnedFd] = []
    while True:
        try:
            record, came = receive(sock)
        except ConnectionClosed:
            return
        fds.extend(came)
        request = json.loads(record)
        if request["more"]:
            continue
        try:
            answer, out = role(request, fds)
        except Exception:  # noqa: BLE001 - the process boundary: the test fails with it
            answer, out = {"error": traceback.format_exc()[-6000:]}, []
        fds = []
        while len(out) > 100:
            send(sock, json.dumps({"more": True}).encode(), out[:100])
            del out[:100]
        send(sock, json.dumps(answer).encode(), out)


if __name__ == "__main__":
    main()
