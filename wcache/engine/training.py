# SPDX-License-Identifier: Apache-2.0
"""No training on shared memory: refused aloud, never detached in silence.

Runs in engines. A shared parameter keeps `requires_grad` as the engine has it, and raises where a gradient arrives;
one that has been moved to private memory may be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from wcache.engine.parts import address
from wcache.errors import TrainingRefused


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While it lasts, no parameter requires grad, so that they can be moved onto shared memory."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def guard(model: nn.Module) -> None:
    """Let a gradient that arrives at a shared parameter raise TrainingRefused; parameters moved elsewhere may train.

    A parameter that requires none is guarded as well, and still requires none: somebody may let it, later.
    """
    for name, parameter in model.named_parameters():
        wanted = parameter.requires_grad
        if parameter.numel() and (wanted or _may_require_grad(parameter)):
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_refusal(name, address(parameter)))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(wanted)


def _may_require_grad(parameter: nn.Parameter) -> bool:
    able = parameter.is_floating_point() or parameter.is_complex()
    return able and type(parameter) is nn.Parameter and not parameter.is_inference()


def _refusal(name: str, shared: int) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        if address(parameter) != shared:
            return
        parameter.grad = None
        raise TrainingRefused(f"a gradient for {name}, which stands on weights shared with the cache and other engines")

    return refuse
