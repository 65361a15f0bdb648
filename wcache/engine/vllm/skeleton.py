# SPDX-License-Identifier: Apache-2.0
"""A vLLM model without its weights' memory, built by vLLM itself, and what can be told from it.

Runs in the engine, on the warm path and before a publication. What vLLM allocates stays on the meta device; what it
computes is computed where the model will stand: positions, slopes, expert maps, whatever a constructor looks at. A
device that a module notes is the one where its weights will be.
Surprising: building a model leaves traces outside it (in vLLM's configuration, where constructors also note what they
found out, and in its cache of rotary embeddings), which `skeleton` takes back if the model is not used after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wcache.engine import state
from wcache.engine.vllm import census, methods
from wcache.errors import Miss, WcacheError
from wcache.model import MissReason

_EMPTY = frozenset({torch.empty, torch.empty_strided, torch.Tensor.new_empty})
_FILLED = frozenset({torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_LIKE = frozenset({torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like,
                   torch.randn_like})  # fmt: skip
_MOVE = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu})
_CONFIGURATIONS = ("vllm.config", "vllm.transformers_utils", "vllm.model_executor.layers.quantization", "transformers.",
                   "transformers_modules.")  # fmt: skip
_SMALL_BYTES = 64 << 10  # of a constant that a constructor may compute with; a larger one is a weight to be filled


@contextmanager
def skeleton(vllm_config: Any, model_config: Any, prefix: str = "") -> Iterator[nn.Module]:
    """The model without memory. If the block fails, vLLM is as it was before the model was built.

    Raises Miss(unsupported) if vLLM cannot build the model so.
    """
    from vllm.utils.torch_utils import set_default_torch_dtype

    with _traces_taken_back(vllm_config, model_config), set_default_torch_dtype(model_config.dtype):
        yield _built(vllm_config, model_config, prefix)


def _built(vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model

    device = torch.device(vllm_config.device_config.device)
    try:
        with device, _NoMemory():
            model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        state.note_device(list(state.places(model, census.holds)), torch.empty(0, device=device).device)
        return model
    except Exception as e:  # whatever vLLM makes of tensors without memory, a real load may still work
        raise Miss(
            MissReason.UNSUPPORTED, f"vLLM cannot build this model without its weights: {type(e).__name__}: {e}"
        ) from e


class _NoMemory(TorchFunctionMode):
    """What is allocated to be filled has no memory; what is computed has."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _MOVE and args[0].is_meta:
            return _moved(func, *args, **given)
        if func in _LIKE and args and args[0].is_meta:
            return func(*args, **{**given, "device": "meta"})
        if given.get("device") is None:
            if func in _EMPTY:
                return func(*args, **{**given, "device": "meta"})
            if func in _FILLED:
                made = func(*args, **{**given, "device": "meta"})
                return made if made.nbytes > _SMALL_BYTES else func(*args, **given)
        return func(*args, **given)


def _moved(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A tensor without memory is wherever it is wanted, in the dtype that is wanted."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1] if func is torch.Tensor.to else None
    return tensor if dtype is None else tensor.to(dtype)


@dataclass(frozen=True, slots=True)
class Preview:
    """What an engine that attaches will start from. `why`: the model cannot be shared, as far as that tells."""

    why: str | None
    facts: census.Facts


def preview(vllm_config: Any, model_config: Any, prefix: str = "") -> Preview:
    """Look at a skeleton, which is thrown away again."""
    try:
        with skeleton(vllm_config, model_config, prefix) as model:
            raise _Seen(Preview(methods.unshareable(model), census.facts(model)))
    except _Seen as seen:
        return seen.preview
    except WcacheError as e:
        return Preview(str(e), {})


class _Seen(Exception):
    """Leaves `skeleton` as a failure does, so that vLLM is as it was."""

    def __init__(self, preview: Preview) -> None:
        super().__init__()
        self.preview = preview


@contextmanager
def _traces_taken_back(*configurations: Any) -> Iterator[None]:
    before = [(c, c.copy()) for c in _containers([*configurations, _rotary_cache()])]
    try:
        yield
    except BaseException:
        for container, content in before:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        raise


def _containers(found: list[Any]) -> Iterator[Any]:
    """Every dict, list and set that configurations consist of, the attributes of their objects among them."""
    seen: set[int] = set()
    while found:
        value = found.pop()
        if type(value).__module__.startswith(_CONFIGURATIONS) and hasattr(value, "__dict__"):
            value = vars(value)
        if id(value) in seen or not isinstance(value, dict | list | set):
            continue
        seen.add(id(value))
        yield value
        found += value.values() if isinstance(value, dict) else value


def _rotary_cache() -> Any:
    from vllm.model_executor.layers import rotary_embedding

    return getattr(rotary_embedding, "_ROPE_DICT", None)
