# SPDX-License-Identifier: Apache-2.0
"""Real vLLM over a real daemon: the same tokens and the same state as from disk, and what happens when things die."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import zero
from vllm_lines import MAPPED, mapped, unusable

from wcache.engine.vllm.parity import differences


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe", "mixtral", "smollm2"])
def test_cold_warm_and_copied_engines_are_the_disk_engine(name: str, models: Path, daemons: Any, child: Any) -> None:
    """Greedy tokens, and names, shapes, dtypes, strides, classes and bytes of every tensor, agree in all starts."""
    daemon, model = daemons(), str(models / name)
    seen = {}

    def start(how: str, **extra: Any) -> list[str]:
        began = child("start", name=how, model=model, extra=daemon.extra(**extra))
        seen[how] = (began["tokens"], child("state", name=how))
        child("stop", name=how)
        return list(began["log"])

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
    tokens, disk = seen.pop("disk")
    for how, (other, state) in seen.items():
        assert differences(disk, state) == [] and state["keys"] == disk["keys"], how
        assert other == tokens, how


def test_an_engine_serves_on_when_the_daemon_is_killed_and_publishes_to_its_empty_successor(
    models: Path, daemons: Any, child: Any
) -> None:
    """Tokens are those of vLLM's own default loader all the time, though that one packs linear weights on a CPU."""
    daemon, model = daemons(), str(models / "llama")
    before = child("start", name="plain", model=model, load_format="auto")["tokens"]
    child("start", name="cold", model=model, extra=daemon.extra())
    warm = child("start", name="warm", model=model, extra=daemon.extra(fallback=False))
    assert warm["tokens"] == before and len(mapped(warm["log"])) == 1
    assert len(daemon.status().shards[0].leases) == 2, "the engine that published holds a lease like the other"
    daemon.kill(signal.SIGKILL)
    assert child("tokens", name="warm") == before
    daemon.start()
    # A daemon in the foreground has no fd store: its successor is empty, and the engines keep what they have mapped.
    assert child("wait_lease", name="warm", state="gone")
    assert child("tokens", name="warm") == child("tokens", name="cold") == before
    again = child("start", name="again", model=model, extra=daemon.extra())
    assert again["tokens"] == before and "(empty: " in unusable(again["log"])[0]
    assert len(daemon.status().shards) == 1


def test_a_twin_with_the_same_headers_is_a_miss_and_a_copy_elsewhere_a_hit(
    models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    daemon, model = daemons(), models / "llama"
    twin, copy = copy_of(model, "twin"), copy_of(model, "copy")
    zero(twin, "model.norm.weight")
    original = child("start", name="original", model=str(model), extra=daemon.extra())["tokens"]
    words = child.failing("start", name="refused", model=str(twin), extra=daemon.extra(fallback=False))
    assert "Miss: " in words and "content" in words
    other = child("start", name="twin", model=str(twin), extra=daemon.extra())
    assert "(checkpoint_content: " in unusable(other["log"])[0] and other["tokens"] != original
    same = child("start", name="copy", model=str(copy), extra=daemon.extra(fallback=False))
    assert mapped(same["log"]) and same["tokens"] == original
    assert len(daemon.status().shards) == 2


@pytest.mark.parametrize("identity", ["content", "trust"])
def test_an_unknown_checkpoint_is_hashed_once_and_only_where_a_rank_could_use_that(
    identity: str, models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    daemon, model = daemons(), str(copy_of(models / "llama", "new"))

    def start(how: str, **extra: Any) -> list[str]:
        return list(child("start", name=how, model=model, extra=daemon.extra(identity=identity, **extra))["log"])

    logs = [start("alone", socket_dir="/nowhere"), start("cold"), start("warm", fallback=False)]
    assert [len([line for line in log if line.startswith("hashing ")]) for log in logs] == [0, 1, 0]
    assert [len(mapped(log)) for log in logs] == [0, 0, 1]


def test_two_engines_that_start_cold_together_read_the_disk_once(
    models: Path, daemons: Any, child: Any, engines: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    children = [child, engines()]
    answers: list[Any] = [None, None]

    def run(i: int) -> None:
        answers[i] = children[i]("start", name="e", model=model, extra=daemon.extra())

    children[1]("names")  # its imports are done
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
    dying = engines()
    dying("evaluate", code=DIE_WHILE_PUBLISHING)
    with pytest.raises(AssertionError, match="the engine process ended"):
        dying("start", name="dying", model=model, extra=daemon.extra())
    status = daemon.wait(lambda _: "ended before its commit; nothing remains" in daemon.log.read_text())
    assert status.shards == () and status.memory.get("weights", 0) == 0


DIE_WHILE_PUBLISHING = """
import os, signal
from wcache.weights.segment_host import HostSegment
HostSegment.seal = lambda self: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_published(
    models: Path, daemons: Any, child: Any, copy_of: Any
) -> None:
    daemon, model = daemons(), copy_of(models / "llama", "moving")
    child("evaluate", code=CHANGE_WHILE_LOADING.format(config=model / "config.json"))
    began = child("start", name="moving", model=str(model), extra=daemon.extra())
    assert any("changed while it was being loaded" in line for line in began["log"])
    assert daemon.status().shards == ()


CHANGE_WHILE_LOADING = """
import os
from wcache.engine.vllm.disk import DiskLoader
original = DiskLoader.load_weights
def load_weights(self, model, model_config):
    original(self, model, model_config)
    with open("{config}", "a") as f:
        f.write(" ")
    DiskLoader.load_weights = original
DiskLoader.load_weights = load_weights
"""


def test_a_shard_that_lacks_a_tensor_is_refused_by_name_and_the_engine_starts_from_disk(
    models: Path, daemons: Any, child: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    child("evaluate", code=LOSE_ONE_TENSOR)
    before = child("start", name="publisher", model=model, extra=daemon.extra())["tokens"]
    began = child("start", name="reader", model=model, extra=daemon.extra())
    assert "(structure: model and shard do not agree: model.norm.weight: not in the shard" in unusable(began["log"])[0]
    assert began["tokens"] == before and not mapped(began["log"])


LOSE_ONE_TENSOR = """
from wcache.engine.vllm import capture
original = capture.entries
def entries(model):
    capture.entries = original
    return [e for e in original(model) if "model.norm.weight" not in e.names]
capture.entries = entries
"""


def test_dummy_weights_and_starts_that_shall_not_publish_leave_the_cache_as_it_was(
    models: Path, daemons: Any, child: Any
) -> None:
    daemon, model = daemons(), str(models / "llama")
    dummy = child("start", name="dummy", model=model, load_format="dummy")
    assert not unusable(dummy["log"])
    child("start", name="unpublished", model=model, extra=daemon.extra(publish=False))
    assert daemon.status().shards == ()


def test_external_memory_is_that_of_exactly_the_shard_that_will_be_attached(
    models: Path, daemons: Any, child: Any
) -> None:
    """vLLM asks another loader object, before it measures free memory; a miss and a shared copy count nothing."""
    daemon, model = daemons(), str(models / "llama")
    child("start", name="cold", model=model, extra=daemon.extra())
    size = daemon.status().shards[0].segment_bytes

    def asked(**extra: Any) -> int:
        return int(child("external", name="cold", extra=daemon.extra(**extra)))

    assert asked() == size
    assert asked(socket_dir="/nowhere") == 0
    assert asked(mode="copy") == 0, "the engine that published holds it too: a copy would not free it"
    child("stop", name="cold")
    child("start", name="cold", model=model, extra=daemon.extra(socket_dir="/nowhere"))
    assert asked(mode="copy") == size, "nobody else holds it: once it is copied the shard goes"
