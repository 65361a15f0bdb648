# SPDX-License-Identifier: Apache-2.0
"""Real vLLM over a real daemon: the same tokens and the same state as from disk, and what happens when things die."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

MAPPED = "Mapped {} tensors from the weight cache daemon ({} mode)"


def mapped(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("Mapped ")]


def unusable(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("Weight cache unusable (")]


def zero(checkpoint: Path, tensor: str) -> None:
    """Overwrite one tensor's bytes with zeros in place; the headers stay as they are."""
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    file = checkpoint / index["weight_map"][tensor]
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    data[8 + length + begin : 8 + length + end] = bytes(end - begin)
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe", "mixtral"])
def test_cold_warm_and_copied_engines_are_the_disk_engine(name: str, models: Path, daemons: Any, engines: Any) -> None:
    """Greedy tokens, and names, shapes, dtypes, strides, classes and bytes of every tensor, agree in all starts."""
    daemon, model = daemons(), str(models / name)
    child = engines(daemon)
    seen = {}

    def start(how: str, **extra: Any) -> list[str]:
        began = child("start", name=how, model=model, extra=extra)
        seen[how] = (began["tokens"], child("state", name=how))
        child("stop", name=how)
        return began["log"]

    alone = start("disk", socket_dir="/nowhere")
    assert len(unusable(alone)) == 1 and "(no_daemon: " in unusable(alone)[0]
    cold = start("cold")
    assert len(unusable(cold)) == 1 and "(empty: " in unusable(cold)[0] and not mapped(cold)
    [shard] = daemon.status().shards
    assert shard.origin == "engine" and shard.segment_bytes < shard.weight_bytes * 1.01 + 4096
    warm = start("warm", fallback=False)
    assert mapped(warm) == [MAPPED.format(shard.tensors, "zero_copy")] and not unusable(warm)
    copied = start("copied", fallback=False, mode="copy")
    assert mapped(copied) == [MAPPED.format(shard.tensors, "copy")]
    assert daemon.wait(lambda s: not s.shards).shards == ()
    assert all(seen[how] == seen["disk"] for how in seen)


def test_vllms_own_default_loader_gives_the_same_tokens(models: Path, daemons: Any, engines: Any) -> None:
    """The plain format packs linear weights on a CPU; ours does not: the tokens must not care."""
    daemon, model = daemons(), str(models / "llama")
    child = engines(daemon)
    plain = child("start", name="plain", model=model, load_format="auto")["tokens"]
    child("stop", name="plain")
    assert child("start", name="ours", model=model)["tokens"] == plain


def test_an_engine_serves_on_when_the_daemon_is_killed_and_leases_again_when_it_is_back(
    models: Path, daemons: Any, engines: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    child = engines(daemon)
    before = child("start", name="cold", model=model)["tokens"]
    assert child("start", name="warm", model=model, extra={"fallback": False})["tokens"] == before
    assert daemon.wait(lambda s: s.shards and s.shards[0].leases)
    daemon.kill(signal.SIGKILL)
    assert child("tokens", name="warm") == before
    daemon.start()
    # A daemon in the foreground has no fd store: its successor is empty, and the engine keeps what it has mapped.
    assert child("wait_lease", name="warm", state="gone")
    assert child("tokens", name="warm") == before
    child("stop", name="warm")
    again = child("start", name="again", model=model)
    assert again["tokens"] == before and len(unusable(again["log"])) == 1
    assert len(daemon.status().shards) == 1


def test_a_twin_with_the_same_headers_is_a_miss_and_a_copy_elsewhere_a_hit(
    models: Path, daemons: Any, engines: Any, copy_of: Any
) -> None:
    daemon, model = daemons(), models / "llama"
    twin, copy = copy_of(model, "twin"), copy_of(model, "copy")
    zero(twin, "model.norm.weight")
    child = engines(daemon)
    original = child("start", name="original", model=str(model))["tokens"]
    words = child.failing("start", name="refused", model=str(twin), extra={"fallback": False})
    assert "checkpoint.content" in words or "content" in words
    other = child("start", name="twin", model=str(twin))
    assert "(checkpoint_content: " in unusable(other["log"])[0] and other["tokens"] != original
    same = child("start", name="copy", model=str(copy), extra={"fallback": False})
    assert mapped(same["log"]) and same["tokens"] == original
    assert len(daemon.status().shards) == 2


def test_two_engines_that_start_cold_together_read_the_disk_once(models: Path, daemons: Any, engines: Any) -> None:
    daemon, model = daemons(), str(models / "llama")
    children = [engines(daemon), engines(daemon)]
    for child in children:
        child("evaluate", code="import vllm; result = None")
    answers: list[Any] = [None, None]

    def run(i: int) -> None:
        answers[i] = children[i]("start", name="e", model=model)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(mapped(a["log"])) for a in answers) == [0, 1]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert len(daemon.status().shards) == 1


def test_an_engine_killed_while_it_publishes_leaves_nothing_behind(models: Path, daemons: Any, engines: Any) -> None:
    daemon, model = daemons(), str(models / "llama")
    dying = engines(daemon)
    dying("evaluate", code=DIE_WHILE_PUBLISHING)
    with pytest.raises(AssertionError, match="the engine process ended"):
        dying("start", name="dying", model=model)
    dying.process.wait(30)
    status = daemon.wait(lambda s: s.progress is None)
    assert status.shards == () and status.memory.get("weights", 0) == 0
    child = engines(daemon)
    assert "(empty: " in unusable(child("start", name="next", model=model)["log"])[0]


DIE_WHILE_PUBLISHING = """
import os, signal
from wcache.weights.segment_host import HostSegment
HostSegment.seal = lambda self: os.kill(os.getpid(), signal.SIGKILL)
result = None
"""


def test_what_is_not_shared_falls_back_with_its_reason_and_publishes_nothing(
    models: Path, daemons: Any, engines: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    child = engines(daemon)
    lora = child("start", name="lora", model=model, enable_lora=True)
    assert unusable(lora["log"]) == [
        "Weight cache unusable (unsupported: LoRA wraps the layers); falling back to disk loading"
    ]
    child("stop", name="lora")
    dummy = child("start", name="dummy", model=model, load_format="dummy")
    assert not unusable(dummy["log"])
    child("stop", name="dummy")
    child("start", name="unpublished", model=model, extra={"publish": False})
    assert daemon.status().shards == ()
    assert "LoRA wraps the layers" in child.failing(
        "start", name="l", model=model, enable_lora=True, extra={"fallback": False}
    )
