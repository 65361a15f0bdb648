# SPDX-License-Identifier: Apache-2.0
"""A process that runs real vLLM engines on command: JSON lines in on stdin, JSON lines out on the given descriptor.

One process serves a whole test, because importing vLLM costs more than an engine. Run as `child.py FD`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import vllm_kernels

PROMPTS = [[5, 6, 7, 100, 200], [9, 8, 7], [300, 12, 44, 2, 18, 77, 501]]


class Log(logging.Handler):
    """Keeps the messages of wcache's loggers for the test to read."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """vLLM collects garbage eight times between start and stop, which is most of their time; `stop` does so once."""
    collect, gc.collect = gc.collect, lambda *_: 0
    try:
        yield
    finally:
        gc.collect = collect


class Child:
    def __init__(self) -> None:
        from vllm.model_executor.models import registry
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        vllm_kernels.emulate()
        registry._run_in_subprocess = lambda look: look()  # it would import vLLM once more for each architecture
        self.log = Log()
        logging.getLogger("wcache").addHandler(self.log)
        self.engines: dict[str, Any] = {}

    def start(self, name: str, model: str, load_format: str = "wcache", extra: Any = None, **options: Any) -> Any:
        from vllm import LLM

        self.log.lines.clear()
        options = {"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20, "dtype": "bfloat16"} | options
        with uncollected():
            self.engines[name] = LLM(
                model, load_format=load_format, model_loader_extra_config=extra or {}, enforce_eager=True, **options
            )
        return {"log": list(self.log.lines), "tokens": self.tokens(name)}

    def names(self) -> Any:
        return list(self.engines)

    def tokens(self, name: str, adapter: str | None = None) -> Any:
        """Greedy answers, or what else the model is for; `adapter`: the directory of a LoRA adapter to answer with."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        engine = self.engines[name]
        if engine.runner_type == "pooling":
            task = next(t for t in ("embed", "classify") if t in engine.supported_tasks)
            return [a.outputs.data.tolist() for a in engine.encode(prompts, pooling_task=task, use_tqdm=False)]
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        answers = engine.generate(prompts, greedy, use_tqdm=False, lora_request=lora)
        return [list(a.outputs[0].token_ids) for a in answers]

    def _in_process(self, name: str) -> bool:
        return hasattr(self.engines[name].llm_engine.model_executor, "driver_worker")

    def _model(self, name: str) -> Any:
        return self.engines[name].llm_engine.model_executor.driver_worker.worker.model_runner.model

    def _draft(self, name: str) -> Any:
        runner = self.engines[name].llm_engine.model_executor.driver_worker.worker.model_runner
        return getattr(getattr(runner, "drafter", None), "model", None)

    def drafted(self, name: str) -> Any:
        """How many tokens the draft proposed so far, and how many of them were right."""
        counted = {m.name: m.value for m in self.engines[name].get_metrics() if hasattr(m, "value")}
        return [counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted")]

    def state(self, name: str, draft: bool = False) -> Any:
        """All that decides the engine's result (see `parity`), and the state dict's keys."""
        from wcache.engine.vllm.parity import portrait

        model = self._draft(name) if draft else self._model(name)
        return {**portrait(model), "keys": sorted(model.state_dict())}

    def holds(self, name: str, draft: bool = False) -> Any:
        """The state of a model's lease, how many tensors the shard has, and how many mappings of shards there are."""
        held = (self._draft(name) if draft else self._model(name)).__dict__.get("_wcache_attachment")
        if held is None:
            return {"lease": None, "tensors": 0, "maps": 0}
        maps = [line for line in open("/proc/self/maps") if "wcache" in line]  # noqa: PTH123, SIM115
        return {"lease": str(held.lease.state), "tensors": len(held.manifest.tensors), "maps": len(maps)}

    def external(self, name: str, extra: Any) -> Any:
        """The bytes of external weights that a loader with these options reports for an engine's configuration."""
        import dataclasses

        from wcache.engine.vllm import session
        from wcache.engine.vllm.loader import WcacheLoader

        made = self.engines[name].llm_engine.vllm_config
        loader = WcacheLoader(dataclasses.replace(made.load_config, model_loader_extra_config=extra))
        counted = loader.get_external_weight_memory(made)
        speculative = made.speculative_config
        for model in (made.model_config, speculative and speculative.draft_model_config):
            outcome = session.kept(model)
            if outcome is not None and outcome.attachment is not None:
                outcome.attachment.close()
        return counted

    def wait_lease(self, name: str, state: str) -> Any:
        from wcache.engine.lease import LeaseState

        return self._model(name).__dict__["_wcache_attachment"].lease.wait(LeaseState(state), 30)

    def stop(self, name: str) -> Any:
        for model in (self._model(name), self._draft(name)) if self._in_process(name) else ():
            held = model.__dict__.pop("_wcache_attachment", None) if model is not None else None
            if held is not None:
                held.close()  # in production the process ends here
        engine = self.engines.pop(name)
        with uncollected():
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        return None

    def layout(self, **arguments: Any) -> Any:
        """The layout key that an engine with these arguments has."""
        from vllm.engine.arg_utils import EngineArgs

        from wcache.engine.vllm.layout import Place, layout_key

        place = Place(**arguments.pop("place", {}))
        environment = arguments.pop("environment", {})
        os.environ.update(environment)
        try:
            made = EngineArgs(**arguments).create_engine_config()
            return layout_key(made, made.model_config, place).fields()
        finally:
            for key in environment:
                del os.environ[key]

    def evaluate(self, code: str) -> Any:
        """Run test code beside the engines; its `result` is the answer."""
        scope: dict[str, Any] = {"child": self}
        exec(code, scope)
        return scope.get("result")


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w")
    child = Child()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(child, command.pop("do"))(**command)}
        except BaseException as e:  # noqa: BLE001 - the test decides what it means
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
