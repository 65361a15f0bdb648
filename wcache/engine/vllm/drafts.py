# SPDX-License-Identifier: Apache-2.0
"""Draft models of speculative decoding: which one an engine loads, what decides its shard, what it borrows.

Runs in vLLM's workers. A draft has a shard of its own beside the target's: its own directory says which bytes, its
layout key carries its role. vLLM loads it with a configuration that it derives from the engine's own; the key is made
of the latter alone, so that what is counted before the load is what is attached.
After the load vLLM gives the target's embeddings and lm_head to a draft that has none. Until then placeholders stand
there which nobody ever filled: they are left out of the shard (`aside`). A head that brings its own, or a copy of the
target's, is shared as it is; vLLM lets go of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from wcache.engine.plain import plain

# Methods whose draft vLLM loads through a model loader, and which have been tried; see tests/vllm/test_drafts.py.
SHARED = frozenset({"draft_model", "eagle", "eagle3", "mtp"})

# Methods that note while loading what the checkpoint had: where a flag is false the target's module takes the place.
_FLAGGED = frozenset({"eagle", "eagle3"})
_PLACES = {"has_own_embed_tokens": "model.embed_tokens", "has_own_lm_head": "lm_head"}

_CHOICES = ("method", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "parallel_drafting",
            "draft_tensor_parallel_size", "use_heterogeneous_vocab", "draft_lm_head_quantization")  # fmt: skip


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether this is the draft; methods without a model of their own (n-grams) name the target's configuration."""
    speculative = vllm_config.speculative_config
    return (
        speculative is not None
        and model_config is speculative.draft_model_config
        and model_config is not speculative.target_model_config
    )


def draft_of(vllm_config: Any) -> Any:
    """The configuration of the draft that this engine will load after its target, or None."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in SHARED:
        return None
    found = speculative.draft_model_config
    return found if is_draft(vllm_config, found) else None


def load_config_of(vllm_config: Any) -> Any:
    """What the draft is loaded with."""
    speculative = vllm_config.speculative_config
    own = getattr(speculative, "draft_load_config", None)
    # a model that drafts alone is loaded like the target, whatever is said
    return vllm_config.load_config if own is None or speculative.method == "draft_model" else own


def derived(vllm_config: Any) -> tuple[Any, str]:
    """What vLLM loads the draft with: a configuration made from the engine's own, and a prefix of its layers' names."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    alone = vllm_config.speculative_config.method == "draft_model"
    kind: Any = DraftModelProposer if alone else EagleProposer
    proposer = kind.__new__(kind)  # of all that it is, only the configuration is asked for
    proposer.vllm_config, proposer.speculative_config = vllm_config, vllm_config.speculative_config
    return proposer._create_draft_vllm_config(), "draft_model" if alone else ""


def engine_config(vllm_config: Any, model_config: Any) -> Any:
    """The engine's own configuration, whichever one a model is loaded with."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    if current is None or not is_draft(vllm_config, model_config):
        return vllm_config
    return current if current.speculative_config is vllm_config.speculative_config else vllm_config


def quantization_of(vllm_config: Any, model_config: Any) -> Any:
    """The quantization configuration that a model is built with, or None."""
    if not is_draft(vllm_config, model_config):
        return vllm_config.quant_config
    if model_config.quantization is None:
        return None
    return type(vllm_config).get_quantization_config(model_config, vllm_config.load_config)


def facts(vllm_config: Any, model_config: Any) -> dict[str, Any] | None:
    """What decides a draft's weights besides itself; None for the target."""
    if not is_draft(vllm_config, model_config):
        return None
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    chosen = {name: getattr(speculative, name, None) for name in _CHOICES}
    return {
        **{k: str(v) for k, v in chosen.items() if v not in (None, False)},
        "target": {
            "architectures": list(target.architectures),
            "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": target.quantization,
            "hidden_size": target.get_hidden_size(),
            "layers": target.get_total_num_hidden_layers(),
            "vocabulary": target.get_vocab_size(),
            "hf_overrides": plain(target.hf_overrides, "extra.draft.target.hf_overrides"),
        },
    }


@contextmanager
def aside(
    model: nn.Module, vllm_config: Any, model_config: Any, known: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """While it lasts, a draft is without the modules that vLLM will take from the target; other models are whole.

    `known`: the flags that were set while the weights were loaded, where that happened elsewhere.
    """
    taken = _borrowed(model, vllm_config, model_config, known or {})
    for owner, leaf, _ in taken:
        del owner._modules[leaf]
    try:
        yield
    finally:
        for owner, leaf, module in taken:
            owner._modules[leaf] = module


def _borrowed(
    model: nn.Module, vllm_config: Any, model_config: Any, known: Mapping[str, Any]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Owner, name and module where the target's will stand, unless what it holds is also the draft's own."""
    if not is_draft(vllm_config, model_config) or vllm_config.speculative_config.method not in _FLAGGED:
        return []
    flags = {flag: bool(known.get(flag, getattr(model, flag, True))) for flag in _PLACES}
    if model_config.get_hidden_size() != vllm_config.speculative_config.target_model_config.get_hidden_size():
        flags["has_own_embed_tokens"] = True  # the target's do not fit
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {flag: modules[path] for flag, path in _PLACES.items() if path in modules}
    own = {id(p) for flag, module in found.items() if flags[flag] for p in module.parameters()}
    borrowed = [flag for flag, m in found.items() if not flags[flag] and not own & {id(p) for p in m.parameters()}]
    split = [(flag, *_PLACES[flag].rpartition(".")) for flag in borrowed]
    return [(modules[prefix], leaf, found[flag]) for flag, prefix, _, leaf in split]
