# SPDX-License-Identifier: Apache-2.0
"""Tests on a real GPU. The test process itself never touches CUDA: children do, so that every byte must come back.

Each test ends with the GPU's memory where it was before, by NVML. Without a GPU nothing here is collected, unless
`-m gpu` asks for it: then a missing GPU is an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from daemons import Daemon, Manager, making

from wcache.host.fds import OwnedFd, close_all, receive, send
from wcache.host.gpu_memory import MIB, measure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHILD_TIMEOUT_S = 120.0  # importing torch takes seconds, a context a fraction of one
FREED_WITHIN_S = 15.0  # memory is returned when the last process is reaped, not when kill returns
SLACK_BYTES = 16 * MIB  # what the driver itself keeps or gives back


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    if "gpu" not in config.option.markexpr and not Path("/dev/nvidiactl").exists():
        here = [item for item in items if HERE in item.path.parents]
        config.hook.pytest_deselected(items=here)
        items[:] = [item for item in items if item not in here]


def environment(**more: str) -> dict[str, str]:
    """For children: this tree and what the tests share can be imported."""
    paths = [str(ROOT), str(ROOT / "tests"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


class Child:
    """A process that plays one role of `child.py`; records of JSON with descriptors go both ways."""

    def __init__(self, role: str, *, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(CHILD_TIMEOUT_S)
        command = [*prefix, sys.executable, str(HERE / "child.py"), role, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment(**(env or {})))

    def ask(self, fds: list[OwnedFd] | None = None, **message: Any) -> dict[str, Any]:
        """Send a record and wait for the answer; an error there is an error here. Descriptors that come are closed."""
        answer, came = self.ask_fds(fds, **message)
        close_all(came)
        return answer

    def ask_fds(self, fds: list[OwnedFd] | None = None, **message: Any) -> tuple[dict[str, Any], list[OwnedFd]]:
        lent = list(fds or [])
        while len(lent) > 100:
            send(self._sock, json.dumps({"more": True}).encode(), lent[:100])
            del lent[:100]
        send(self._sock, json.dumps({**message, "more": False}).encode(), lent)
        came: list[OwnedFd] = []
        while True:
            record, more = receive(self._sock)
            came.extend(more)
            answer = json.loads(record)
            if "error" in answer:
                close_all(came)
                pytest.fail(f"in the child: {answer['error']}")
            if not answer.get("more"):
                return answer, came

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> int:
        """End of file ends a child that is well; its exit status."""
        self._sock.close()
        try:
            return self.process.wait(CHILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@pytest.fixture(scope="session")
def gpus() -> list[str]:
    """UUIDs of the visible GPUs, as CUDA gives them."""
    with Child("devices") as child:
        uuids = child.ask()["uuids"]
    assert uuids, "no GPU is visible"
    return list(uuids)


@pytest.fixture(scope="session")
def gpu(gpus: list[str]) -> str:
    measure(gpus[0])  # NVML makes pipes when it is first asked, and keeps them for the life of the process
    return gpus[0]


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Start children that are closed when the test ends."""
    with ExitStack() as stack:

        def start(role: str, **options: Any) -> Child:
            child = Child(role, **options)
            stack.callback(child.close)
            return child

        yield start


@pytest.fixture
def make_daemon(short_dir: Path, manager: Manager, gpu: str) -> Iterator[Callable[..., Daemon]]:
    """Make (not start) a rank's daemon on the GPU; it is ended after the test."""
    with making(short_dir) as make:

        def on_gpu(**config: object) -> Daemon:
            settings = {"backend": "cuda", "devices": [gpu], **config}
            return make(config=settings, manager=manager, environment=environment())

        yield on_gpu


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running rank without a configured model."""
    return make_daemon().start()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 1.1 GB in two files, with row-parallel weights that are strided in them."""
    import torch
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("llama")
    hidden, inner, layers, vocab = 2048, 5632, 8, 32000
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": layers,
        "vocab_size": vocab, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (hidden // 2, hidden),
            f"{layer}.self_attn.v_proj.weight": (hidden // 2, hidden),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden), f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    torch.manual_seed(0)
    names = sorted(shapes)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in files.items():
        tensors = {n: torch.randint(-9999, 9999, shapes[n], dtype=torch.int16).view(torch.bfloat16) for n in mine}
        save_file({n: t.nan_to_num(0.5) for n, t in tensors.items()}, directory / file)
    weight_map = {name: file for file, mine in files.items() for name in mine}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.fixture(autouse=True)
def memory_comes_back(gpu: str) -> Iterator[int]:
    """Bytes in use on the GPU before the test; afterwards it must be no more."""
    before = measure(gpu).used
    yield before
    deadline = time.monotonic() + FREED_WITHIN_S
    while (used := measure(gpu).used) > before + SLACK_BYTES:
        if time.monotonic() > deadline:
            pytest.fail(f"{(used - before) // MIB} MiB are still in use, by {measure(gpu).holders}")
        time.sleep(0.05)


class Peak:
    """The most memory in use on a GPU while the block runs (bytes)."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.used = 0

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.used = max(self.used, measure(self._uuid).used)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def peak(gpu: str) -> Callable[[], Peak]:
    return lambda: Peak(gpu)
