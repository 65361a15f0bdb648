# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel engines, the preload, and a server: processes as they run in production."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from wcache.engine.vllm.parity import differences

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PARALLEL = "[parallel]\ntp_size = 2\n"


def test_two_tensor_parallel_ranks_attach_together_or_not_at_all(models: Path, daemons: Any, engines: Any) -> None:
    model = str(models / "llama")
    ranks = [daemons(r, "ranks = [0, 1]\n" + PARALLEL) for r in (0, 1)]
    child = engines(ranks[0], VLLM_CPU_OMP_THREADS_BIND="0|1")
    cold = child("start", name="cold", model=model, **TWO)["tokens"]
    child("stop", name="cold")
    shards = [rank.status().shards for rank in ranks]
    assert [[s.layout.tp_rank for s in found] for found in shards] == [[0], [1]]
    assert child.log.read_text().count("Weight cache unusable (empty: ") == 2

    warm = child("start", name="warm", model=model, extra={"fallback": False}, **TWO)["tokens"]
    child("stop", name="warm")
    assert warm == cold
    assert (
        len(re.findall(r"Mapped \d+ tensors from the weight cache daemon \(zero_copy mode\)", child.log.read_text()))
        == 2
    )

    ranks[1].kill()
    ranks[1].start()  # in the foreground nothing keeps its shard
    mixed = child("start", name="mixed", model=model, **TWO)["tokens"]
    child("stop", name="mixed")
    assert mixed == cold
    assert child.log.read_text().count("Mapped ") == 2, "rank 0 had a hit and must not have used it"
    assert [len(rank.status().shards) for rank in ranks] == [1, 1]


def test_what_the_preload_publishes_is_what_an_engine_asks_for(models: Path, daemons: Any, engines: Any) -> None:
    model = models / "qwen3"
    config = f'model = "{model}"\nloader = "vllm"\ndtype = "bfloat16"\n[engine_args]\nmax_model_len = 256\n'
    daemon = daemons(0, config)
    status = daemon.wait(lambda s: s.state == "ready", 120)
    [shard] = status.shards
    assert shard.origin == "preload"
    child = engines(daemon)
    warm = child("start", name="warm", model=str(model), extra={"fallback": False})
    alone = child("start", name="alone", model=str(model), extra={"socket_dir": "/nowhere"})
    assert warm["tokens"] == alone["tokens"]


def test_what_the_ranks_of_a_group_preload_is_what_the_workers_of_an_engine_ask_for(
    models: Path, daemons: Any, engines: Any
) -> None:
    """Workers run with variables of vLLM's own making that a preload does not have."""
    model = str(models / "llama")
    config = f'model = "{model}"\nloader = "vllm"\ndtype = "bfloat16"\nranks = [0, 1]\n'
    ranks = [daemons(r, f"{config}engine_args = {{ max_model_len = 256 }}\n{PARALLEL}") for r in (0, 1)]
    for rank in ranks:
        assert [s.origin for s in rank.wait(lambda s: s.state == "ready", 120).shards] == ["preload"]
    child = engines(ranks[0], VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_OMP_NUM_THREADS_SET_BY_VLLM="1")
    warm = child("start", name="warm", model=model, extra={"fallback": False}, **TWO)["tokens"]
    child("stop", name="warm")
    assert child.log.read_text().count("Mapped ") == 2
    assert child("start", name="alone", model=model, extra={"socket_dir": "/nowhere"}, **TWO)["tokens"] == warm
    child("stop", name="alone")


def test_a_server_answers_over_http_from_mapped_weights(
    models: Path, daemons: Any, engines: Any, tmp_path: Path
) -> None:
    model, daemon = str(models / "llama"), daemons()
    child = engines(daemon)
    child("start", name="cold", model=model)
    child("stop", name="cold")
    log = tmp_path / "server.log"
    command = [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", "18377",
        "--host", "127.0.0.1", "--load-format", "wcache", "--model-loader-extra-config", '{"fallback": false}',
        "--max-model-len", "256", "--enforce-eager", "--dtype", "bfloat16",
    ]  # fmt: skip
    env = {**os.environ, **daemon.env, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        wait_healthy("http://127.0.0.1:18377", server, log)
        body = {"model": model, "prompt": "the weight cache keeps", "max_tokens": 8, "temperature": 0}
        first = complete("http://127.0.0.1:18377", body)
        daemon.kill()
        assert complete("http://127.0.0.1:18377", body) == first != ""
        assert "(zero_copy mode)" in log.read_text()
    finally:
        server.terminate()
        server.wait(60)


def wait_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 150
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)


def complete(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


PORTRAITS = """
from vllm import LLM
from wcache.engine.vllm.parity import portrait
engine = LLM({model!r}, load_format="wcache", model_loader_extra_config={extra}, max_model_len=256, enforce_eager=True,
             kv_cache_memory_bytes=16 << 20, dtype="bfloat16", enable_expert_parallel=True, **{two})
result = engine.collective_rpc(lambda worker: portrait(worker.model_runner.model))
engine.llm_engine.engine_core.shutdown()
"""


def test_expert_parallel_ranks_hold_their_own_experts(models: Path, daemons: Any, engines: Any) -> None:
    """Loaded only: the experts of vLLM's CPU build cannot be run on more than one rank."""
    ranks = [daemons(r, "ranks = [0, 1]\n" + PARALLEL) for r in (0, 1)]
    child = engines(ranks[0], VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    cold, warm = (
        child("evaluate", code=PORTRAITS.format(model=str(models / "qwen3-moe"), extra=extra, two=TWO))
        for extra in ({}, {"fallback": False})
    )
    layouts = [shard.layout for rank in ranks for shard in rank.status().shards]
    assert [(x.tp_rank, x.ep_size, x.ep_rank) for x in layouts] == [(0, 2, 0), (1, 2, 1)]
    assert child.log.read_text().count("Mapped ") == 2
    assert [differences(one, other) for one, other in zip(cold, warm, strict=True)] == [[], []]
    experts = [{k: v for k, v in rank["tensors"].items() if "w13_weight" in k} for rank in cold]
    assert experts[0] and experts[0] != experts[1]
