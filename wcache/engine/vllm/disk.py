# SPDX-License-Identifier: Apache-2.0
"""vLLM's own way from disk to a processed model, watched: what it read, and what the model was before its weights.

Runs in a cold engine and in the preload of `loader = "vllm"`. On a CPU the weights of plain linear layers stay where
they are instead of being packed a second time into memory that no parameter shows (oneDNN, AMX kernels): only then can
they be shared, and a cold engine computes bit by bit what a warm one does.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from wcache.engine.vllm import beside
from wcache.engine.vllm.capture import Before


class DiskLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader; `before`, `removed`, `files` and `opened` are filled by `load_model`.

    `removed`: modules that served to load the weights and are gone since. `files`: the checkpoint's, `opened`: any that
    Python code read meanwhile. `on_bytes` is called with the bytes of the checkpoint that have been read so far.
    """

    before: Before | None = None

    def __init__(self, load_config: Any) -> None:
        plain = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        super().__init__(plain)
        self.files: set[Path] = set()
        self.opened: set[str] = set()
        self.removed: list[str] = []
        self.on_bytes: Callable[[int], None] | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        with unpacked_linear(), beside.noted() as self.opened:
            model: nn.Module = super().load_model(*args, **kwargs)
            return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        self.before = Before.of(model)
        super().load_weights(model, model_config)
        self.removed = self.before.removed(model)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        done = 0
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor
            done += tensor.nbytes
            if self.on_bytes is not None:
                self.on_bytes(done)

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_weights(*args, **kwargs)
        self.files |= {Path(f).resolve() for f in prepared[1]}
        return prepared


@contextlib.contextmanager
def unpacked_linear() -> Iterator[None]:
    """While it lasts, vLLM on a CPU multiplies with the weights as they are. Elsewhere: nothing happens."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils as layers

    onednn, sgl, dispatch = ops._supports_onednn, layers.check_cpu_sgl_kernel, layers.dispatch_cpu_unquantized_gemm
    ops._supports_onednn, layers.check_cpu_sgl_kernel = False, _never
    layers.dispatch_cpu_unquantized_gemm = _not_packed_again(dispatch)
    try:
        yield
    finally:
        ops._supports_onednn, layers.check_cpu_sgl_kernel = onednn, sgl
        layers.dispatch_cpu_unquantized_gemm = dispatch


def _not_packed_again(dispatch: Callable[..., None]) -> Callable[..., None]:
    """vLLM's kernels for short convolutions read packed weights; such a one no longer looks like a convolution's."""
    from vllm.model_executor.utils import is_weights_pre_processed

    def once(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not (is_weights_pre_processed() and hasattr(layer, "_cpu_unpacked_conv_weight")):
            dispatch(layer, *args, **kwargs)

    return once


def _never(*_: Any) -> bool:
    return False
