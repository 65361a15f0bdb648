# SPDX-License-Identifier: Apache-2.0
"""Whatever a module keeps is carried, or the module is refused: nothing that loading did is lost in silence."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equality
import numpy
import pytest
import torch
from daemons import Daemon
from torch import nn

import wcache
from wcache.engine import snapshot
from wcache.errors import PublishError


class Slots:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.zeros(2)


class Bound:
    def __init__(self) -> None:
        self.table = torch.zeros(2)

    def get(self) -> torch.Tensor:
        return self.table


def closure() -> Callable[[], torch.Tensor]:
    table = torch.zeros(2)
    return lambda: table


def noted(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A factory of modules that keep what `make` makes as `kept`."""

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module.kept = make()
        return module

    return build


def refusal(build: Callable[[], nn.Module], load: Callable[[Any], object]) -> str:
    with torch.device("meta"):
        before = snapshot.skeleton(build())
    module = build()
    load(module)
    with pytest.raises(PublishError) as refused:
        snapshot.take(module, before)
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "holder"),
    [
        (Slots, "Slots"),
        (lambda: {torch.zeros(2)}, "set"),
        (lambda: {(0, 1): torch.zeros(2)}, "dict"),
        (lambda: functools.reduce(lambda inner, _: [inner], range(99), torch.zeros(2)), "list"),
        (lambda: collections.deque([torch.zeros(2)]), "deque"),
        (lambda: types.SimpleNamespace(table=torch.zeros(2)), "dict"),
        (lambda: functools.partial(torch.add, torch.zeros(2)), "tuple"),
        (closure, "cell"),
        (lambda: Bound().get, "Bound"),
        (lambda: torch.zeros(2).untyped_storage(), "Sequential"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_tensor_where_it_cannot_be_put_back_is_refused(make: Callable[[], Any], holder: str) -> None:
    said = refusal(noted(make), nn.Module.eval)
    assert said.startswith("kept keeps a tensor in a ")
    assert said.endswith(f"{holder}, where it cannot be put back")


def change(field: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module.kept, field, value)


def tensor_on_a_parameter(module: Any) -> None:
    module[0].weight.scale = torch.ones(2)


def list_on_a_parameter(module: Any) -> None:
    module[0].weight.steps = [1]


def one_module_twice(module: Any) -> None:
    module[1] = module[0]


def one_tensor_twice(module: Any) -> None:
    module.register_buffer("same", module[0].weight)


@pytest.mark.parametrize(
    ("make", "load", "why"),
    [
        (lambda: numpy.zeros(2), lambda m: m.kept.fill(1), "kept keeps a numpy.ndarray"),
        (numpy.float32, lambda m: setattr(m, "kept", numpy.float32(2)), "kept keeps a numpy.float32"),
        (bytes, lambda m: setattr(m, "kept", b"x"), "kept keeps a builtins.bytes"),
        (bytearray, lambda m: m.kept.append(1), "kept keeps a builtins.bytearray"),
        (collections.deque, lambda m: m.kept.append(1), "kept keeps a collections.deque"),
        (types.SimpleNamespace, change("scale", 2), "kept keeps a types.SimpleNamespace"),
        (torch.Generator, lambda m: m.kept.manual_seed(9), "kept keeps a torch._C.Generator"),
        (int, lambda m: setattr(m, "kept", 2**70), "kept is a number of 71 bits"),
        (int, tensor_on_a_parameter, "0.weight@scale keeps a tensor"),
        (int, list_on_a_parameter, "loading changed 0.weight@steps"),
        (int, one_module_twice, "replaced or added module 1"),
        (int, one_tensor_twice, "same is a buffer here and a parameter elsewhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_change_that_has_no_plain_form_is_refused(
    make: Callable[[], Any], load: Callable[[Any], object], why: str
) -> None:
    assert why in refusal(noted(make), load)


@dataclass(frozen=True)
class Frozen:
    table: torch.Tensor


def build() -> nn.Module:
    module = nn.ModuleDict({"a@b": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    module.frozen = Frozen(torch.zeros(2))
    module.base = nn.Parameter(torch.zeros(6))
    module.view = module.base.data[2:4]
    module.zero, module.gone, module.itself = 0.0, 1, id(module)
    return module


def load(module: Any) -> None:
    with torch.no_grad():
        for i, tensor in enumerate((*module.parameters(), *module.buffers(), module.frozen.table)):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + i)
    linear = module["a@b"]
    linear.note = "in a module with a sign in its name"
    module["norm"].running_mean.note = "on a buffer"
    linear.weight = nn.Parameter(linear._parameters.pop("weight").detach().clone())
    module.zero = -0.0
    del module.gone


def must_not_run(module: nn.Module) -> None:
    raise AssertionError("a hit loads nothing")


def test_what_is_easily_lost_comes_back(daemon: Daemon) -> None:
    plain = build()
    load(plain)
    cold = wcache.cached(build, key="k", load=load, socket_path=daemon.path)
    warm = wcache.cached(build, key="k", load=must_not_run, socket_path=daemon.path, fallback=False)
    for made in (cold, warm):
        assert made.itself == id(made)
        made.itself = plain.itself
        equality.same(made, plain)
        assert list(made.state_dict()) == list(plain.state_dict()) != list(build().state_dict())
        assert torch.equal(made.frozen.table, plain.frozen.table)
        assert made["a@b"].note == plain["a@b"].note
        assert made["norm"].running_mean.note == "on a buffer"
        assert str(made.zero) == "-0.0"
        assert not hasattr(made, "gone")
        with torch.no_grad():
            made.base.fill_(7)
        assert made.view.tolist() == [7, 7]
