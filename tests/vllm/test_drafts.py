# SPDX-License-Identifier: Apache-2.0
"""Draft models: a shard of their own beside the target's, the same proposals from disk, cold, warm and copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MAPPED = "Mapped {} tensors from the weight cache daemon (zero_copy mode)"

# method: the target, the draft's directory (None: in the target's checkpoint), tokens to propose
METHODS = {
    "draft_model": ("llama", "draft", 3),
    "eagle": ("llama", "eagle", 2),
    "eagle3": ("llama", "eagle3", 2),
    "mtp": ("ernie", None, 1),
}


def speculative(models: Path, method: str, **more: Any) -> dict[str, Any]:
    _, draft, count = METHODS[method]
    where = {} if draft is None else {"model": str(models / draft)}
    return {"method": method, "num_speculative_tokens": count, **where, **more}


class Starts:
    """Engines with a draft, one after the other, and what each of them had."""

    def __init__(self, child: Any, model: Path, config: dict[str, Any]) -> None:
        self.child, self.seen = child, {}
        self.options = {"model": str(model), "speculative_config": config, "disable_log_stats": False}

    def __call__(self, how: str, extra: dict[str, Any], *, stop: bool = True) -> list[str]:
        began = self.child("start", name=how, extra=extra, **self.options)
        states = [self.child("state", name=how, draft=draft) for draft in (False, True)]
        self.seen[how] = (began["tokens"], states, self.child("drafted", name=how))
        if stop:
            self.child("stop", name=how)
        return [line for line in began["log"] if line.startswith(("Mapped ", "Weight cache unusable ("))]


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_has_its_own_shard_and_proposes_the_same_from_disk_cold_warm_and_copied(
    method: str, models: Path, daemons: Any, child: Any
) -> None:
    """Tokens, proposals and all tensors agree, those that vLLM takes from the target after the load among them."""
    daemon = daemons()
    start = Starts(child, models / METHODS[method][0], speculative(models, method))
    assert ["(no_daemon: " in line for line in start("disk", daemon.extra(socket_dir="/nowhere"))] == [True, True]
    target, draft = start("cold", daemon.extra())
    assert "(empty: " in target and ("(checkpoint_layout: " in draft or "(layout: " in draft)
    shards = {s.layout.role: s for s in daemon.status().shards}
    assert set(shards) == {"target", "draft"}
    assert (shards["draft"].content == shards["target"].content) is (method == "mtp")
    said = start("warm", daemon.extra(fallback=False), stop=False)
    held = [child("holds", name="warm", draft=draft) for draft in (False, True)]
    assert said == [MAPPED.format(h["tensors"]) for h in held] and {h["lease"] for h in held} == {"held"}
    assert [len(s.leases) for s in daemon.status().shards] == [1, 1]
    child("stop", name="warm")
    assert start("copied", daemon.extra(fallback=False, mode="copy"))
    assert daemon.wait(lambda s: not s.shards).shards == ()
    assert all(start.seen[how] == start.seen["disk"] for how in start.seen)
    proposed, _ = start.seen["disk"][2]
    assert proposed > 0
