# SPDX-License-Identifier: Apache-2.0
"""Whatever a module keeps is carried, or the module is refused: nothing that loading did is lost in silence."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import functools
import random
import re
import types
import warnings
import weakref
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
from wcache.errors import PublishError, StructureError


class Slots:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.zeros(2)


class Bound:
    def __init__(self) -> None:
        self.table = torch.zeros(2)

    def get(self) -> torch.Tensor:
        return self.table


class Marked(torch.Tensor):
    """A class of tensors with nothing of its own."""


class Slotted(nn.Linear):
    """A module that keeps something in a slot."""

    __slots__ = ("table",)


def slotted(kept: Any) -> Slotted:
    module = Slotted(2, 2)
    module.table = kept
    return module


def closure(kept: Any) -> Callable[[], Any]:
    return lambda: kept


def default(kept: Any) -> Callable[[], Any]:
    return lambda value=kept: value


def noted(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A factory of modules that keep what `make` makes as `kept`."""

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module.kept = module.twin = make()
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
        (lambda: closure(torch.zeros(2)), "cell"),
        (lambda: Bound().get, "Bound"),
        (lambda: torch.zeros(2).untyped_storage(), "Sequential"),
        (lambda: closure(nn.Linear(2, 2)), "dict"),
        (lambda: functools.partial(nn.BatchNorm1d(2).eval), "dict"),
        (lambda: {nn.Linear(2, 2)}, "dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_tensor_where_it_cannot_be_put_back_is_refused(make: Callable[[], Any], holder: str) -> None:
    said = refusal(noted(make), nn.Module.eval)
    assert said.startswith("kept keeps a tensor in a ")
    assert said.endswith(f"{holder}, where it cannot be put back")


def with_closure(module: nn.Linear) -> None:
    module.get = closure(module.weight)


def with_hook(module: nn.Linear) -> None:
    other = nn.Linear(2, 2)
    module.register_forward_hook(lambda *called: other(called[2]))


def with_weak_dictionary(module: nn.Linear) -> None:
    module.known = weakref.WeakValueDictionary(weight=module.weight)


def with_another_tensor(module: nn.Linear) -> None:
    module.weight.other = module.bias


@pytest.mark.parametrize(
    ("add", "path"),
    [
        (with_closure, "get"),
        (with_hook, "_forward_hooks"),
        (with_weak_dictionary, "known"),
        (with_another_tensor, "weight@other"),
        (None, "table"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_tensor_that_something_else_refers_to_as_well_is_refused(add: Any, path: str) -> None:
    def build() -> nn.Module:
        module = slotted(torch.zeros(2) if add is None else None)
        if add is not None:
            add(module)
        return module

    assert refusal(build, nn.Module.eval).startswith(f"{path} keeps a tensor in a ")


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


KEPT = torch.ones(1)  # by nobody but this file


class Permissive:
    """Says yes to whatever name it is asked for."""

    def __getattr__(self, name: str) -> None:
        return None


def becomes(value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, "kept", value)


def one_list_twice(module: Any) -> None:
    module.kept = module.other = [1]


def other_child(module: Any) -> None:
    vars(module)["kept"] = module[0]


def with_inference(module: Any) -> None:
    with torch.inference_mode():
        module.kept = torch.ones(2)


def with_gradient(module: Any) -> None:
    module[0](torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("make", "load", "why"),
    [
        (lambda: numpy.zeros(2), lambda m: m.kept.fill(1), "kept keeps a numpy.ndarray"),
        (numpy.float32, lambda m: setattr(m, "kept", numpy.float32(2)), "kept keeps a numpy.float32"),
        (bytearray, lambda m: m.kept.append(1), "kept keeps a builtins.bytearray"),
        (collections.deque, lambda m: m.kept.append(1), "kept keeps a collections.deque"),
        (types.SimpleNamespace, change("scale", 2), "kept keeps a types.SimpleNamespace"),
        (torch.Generator, lambda m: m.kept.manual_seed(9), "kept keeps a torch._C.Generator"),
        (int, lambda m: setattr(m, "kept", 2**70), "kept is a number of 71 bits"),
        (int, tensor_on_a_parameter, "0.weight@scale keeps a tensor"),
        (int, list_on_a_parameter, "loading changed 0.weight@steps"),
        (int, one_module_twice, "replaced or added module 1"),
        (int, one_tensor_twice, "same is a buffer here and a parameter elsewhere"),
        (lambda: closure(1), becomes(closure(2)), "kept keeps a builtins.function"),
        (lambda: default(1), becomes(default(2)), "kept keeps a builtins.function"),
        (lambda: lambda: 1, becomes(lambda: 2), "kept keeps a builtins.function"),
        (lambda: {1}.union, becomes({2}.union), "kept keeps a builtins.builtin_function_or_method"),
        (lambda: datetime.date(2000, 1, 1), becomes(datetime.date(2000, 1, 2)), "kept keeps a datetime.date"),
        (lambda: decimal.Decimal("1.1"), becomes(decimal.Decimal("1.10")), "kept keeps a decimal.Decimal"),
        (lambda: re.compile("a"), becomes(re.compile("b")), "kept keeps a re.Pattern"),
        (lambda: array.array("i", [1]), lambda m: m.kept.append(2), "kept keeps a array.array"),
        (lambda: types.MappingProxyType({1: 1}), becomes(types.MappingProxyType({1: 2})), "keeps a builtins.mapping"),
        (lambda: numpy.random.default_rng(1), lambda m: m.kept.random(), "keeps a numpy.random"),
        (lambda: random.Random(1), lambda m: m.kept.random(), "kept keeps a random.Random"),
        (lambda: torch.channels_last, becomes(torch.contiguous_format), "kept keeps a torch.memory_format"),
        (lambda: Permissive(), lambda m: vars(m.kept).update(scale=2), "kept keeps a "),
        (lambda: [nn.BatchNorm1d(2, affine=False)], lambda m: m.kept[0].eval(), "kept keeps a torch.nn.modules.batch"),
        (lambda: [torch.ones(1), torch.ones(1, device="cpu")], lambda m: m.kept.pop(), "took the tensor kept.1 away"),
        (lambda: torch.ones(1, device="cpu"), lambda m: delattr(m, "kept"), "took the tensor kept away"),
        (
            lambda: {1: torch.ones(1)},
            lambda m: m.kept.update({2: torch.ones(1)}),
            "kept.2: the module has no such place",
        ),
        (lambda: torch.ones(1), lambda m: setattr(m.kept, "note", 1), "loading changed kept@note"),
        (
            lambda: torch.ones(1),
            becomes(torch.ones(1).as_subclass(Marked)),
            "loading made kept a tests",
        ),
        (int, other_child, "kept keeps a torch.nn.modules.linear.Linear"),
        (int, with_inference, "kept was made in inference mode"),
        (int, with_gradient, "0.weight has a gradient"),
        (int, lambda m: m[0].weight.register_hook(torch.neg), "0.weight has hooks of its own"),
        (int, lambda m: setattr(m, "a.b", 1), "loading changed a.b, which has a dot in its name"),
        (int, lambda m: setattr(m, "kept", id(m[0].weight)), "kept is an address of this process"),
        (int, lambda m: setattr(m, "kept", m[0].weight.data_ptr()), "kept is an address of this process"),
        (list, one_list_twice, "loading changed kept, which is other as well"),
        (list, lambda m: m.twin.append(1), "loading changed kept, which is twin as well"),
        (lambda: (torch.ones(1),), becomes((torch.ones(1), torch.ones(1))), "kept.1: the module has no such place"),
        (lambda: torch.ops.aten.relu, becomes(torch.ops.aten.neg), "kept keeps a torch._ops.OpOverloadPacket"),
        (lambda: weakref.ref(KEPT), nn.Module.eval, "kept refers to a tensor that the module does not keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_change_that_has_no_plain_form_is_refused(
    make: Callable[[], Any], load: Callable[[Any], object], why: str
) -> None:
    assert why in refusal(noted(make), load)


def test_a_hook_in_the_place_of_another_is_refused() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.hook = module.register_forward_hook(torch.add)
        return module

    def load(module: Any) -> None:
        module.hook.remove()
        module.hook = module.register_forward_hook(torch.sub)

    assert "loading changed _forward_hooks" in refusal(build, load)


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


class Pair(tuple[Any, ...]):
    """A tuple that is not made of one argument."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


@dataclass(frozen=True)
class Note:
    device: torch.device


class Odd(nn.Module):
    """Keeps tensors, and what belongs to them, in every place that can be filled again."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2)
        self.weight = nn.Parameter(torch.zeros(2))
        self.weak = weakref.ref(self.weight)
        self.references = {"weight": (weakref.ref(self.weight),)}
        self.device = self.weight.device
        self.options = {"device": self.weight.device, "dtype": self.weight.dtype, "all": (1, [self.weight.device])}
        self.note = Note(self.weight.device)
        self.shape = self.weight.size()
        self.frozen = [nn.Parameter(torch.zeros(2), requires_grad=False)]
        self.teacher = [nn.BatchNorm1d(2).requires_grad_(False)]
        self.register_buffer("fixed", nn.Parameter(torch.zeros(2), requires_grad=False))
        self.register_buffer("marked", torch.zeros(2).as_subclass(Marked))
        self.bare = torch.zeros(2).as_subclass(Marked)
        self.bare.note = "on a bare tensor"  # type: ignore[attr-defined]
        self.listed = torch.zeros(2)
        self.listed.note = ["on a bare tensor"]  # type: ignore[attr-defined]
        self.pair = Pair(torch.zeros(1), "text")
        self.twice = (torch.zeros(3, device="cpu"),)
        self.again = self.twice
        self.grown = [torch.zeros(1)]
        self.named = {"first": torch.zeros(1)}
        self.children_too = nn.Sequential(nn.Identity(), nn.ReLU())


def load_odd(module: Any) -> None:
    hanging = (module.frozen[0], module.bare, module.pair[0], module.twice[0], module.grown[0], module.named["first"])
    with torch.no_grad():
        found = (*module.parameters(), *module.buffers(), *module.teacher[0].parameters(), *hanging)
        for i, tensor in enumerate(found):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + i)
    module.grown += [torch.full((3,), 4.0), module.weight, torch.full((2,), 5.0)]
    module.named |= {"second": torch.full((3,), 4.0), "weight": module.weight, "third": torch.full((2,), 5.0)}
    module.register_parameter("none", None)
    module.register_buffer("later", None, persistent=False)
    module.children_too._modules["0"] = module.children_too._modules.pop("0")
    module.children_too.add_module("absent", None)


def contents(module: Any) -> dict[str, Any]:
    """What `equality` does not see, in a form that can be compared."""
    hanging = {
        "frozen": module.frozen[0], "fixed": module.fixed, "marked": module.marked, "bare": module.bare,
        "teacher": module.teacher[0].weight, "pair": module.pair[0], "twice": module.twice[0], "listed": module.listed,
    }  # fmt: skip
    return {
        **{name: (type(tensor), tensor.tolist(), vars(tensor)) for name, tensor in hanging.items()},
        "statistics": module.teacher[0].running_mean.tolist(),
        "weak": [reference() is module.weight for reference in (module.weak, *module.references["weight"])],
        "lstm": [r() is t for r, t in zip(module.lstm._flat_weight_refs, module.lstm.parameters(), strict=True)],
        "noted": (module.device, module.options, module.note, module.shape),
        "types": (type(module.pair), module.pair[1], module.again[0] is module.twice[0]),
        "grown": [(t.tolist(), t is module.weight) for t in module.grown],
        "named": [(name, t.tolist(), t is module.weight) for name, t in module.named.items()],
        "registries": [(list(m._parameters), list(m._buffers), list(m._modules)) for m in module.modules()],
        "non-persistent": module._non_persistent_buffers_set,
    }


def test_whatever_hangs_in_a_place_that_can_be_filled_comes_back(daemon: Daemon) -> None:
    plain = Odd()
    load_odd(plain)
    for action in (load_odd, must_not_run):
        made = wcache.cached(Odd, key="k", load=action, socket_path=daemon.path, fallback=action is load_odd)
        equality.same(made, plain)
        assert contents(made) == contents(plain)


def drawn() -> nn.Module:
    module = nn.Linear(2, 2)
    module.order = torch.randperm(9, device="cpu")  # type: ignore[assignment]
    module.scale = random.random() + numpy.random.random()
    return module


def test_a_factory_draws_the_random_numbers_that_it_draws_alone(daemon: Daemon) -> None:
    def seeded(make: Callable[[], Any]) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        return make()

    plain = seeded(drawn)
    for _ in ("cold", "warm"):
        equality.same(seeded(lambda: wcache.cached(drawn, key="k", socket_path=daemon.path)), plain)
    assert len(daemon.status().shards) == 1


def test_what_a_factory_warns_of_it_warns_of_once(daemon: Daemon) -> None:
    def build() -> nn.Module:
        warnings.warn("an old module", UserWarning, stacklevel=1)
        module = nn.Linear(2, 2)
        module.load_state_dict({"weight": torch.ones(2, 2, device="cpu"), "bias": torch.ones(2, device="cpu")})
        return module

    with pytest.warns(UserWarning) as warned:
        wcache.cached(build, key="k", socket_path=daemon.path)
    assert [str(w.message) for w in warned] == ["an old module"]
    warm = wcache.cached(build, key="k", socket_path=daemon.path, fallback=False)
    assert torch.equal(warm.weight, torch.ones(2, 2))


@functools.lru_cache(maxsize=2)
def table(size: int) -> list[torch.Tensor]:
    return [torch.arange(size)]


def test_what_a_function_remembers_is_not_of_the_meta_device(daemon: Daemon) -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("table", table(3)[0])
        return module

    for _ in ("cold", "warm"):
        table.cache_clear()
        made = wcache.cached(build, key="k", load=lambda m: nn.init.zeros_(m.weight), socket_path=daemon.path)
        assert made.table.tolist() == table(3)[0].tolist() == [0, 1, 2]
    assert len(daemon.status().shards) == 1


TABLES: dict[int, torch.Tensor] = {}


class Cached(nn.Module):
    """Keeps tensors in its class and beside it."""

    tables: dict[int, torch.Tensor] = {}

    def __init__(self, tables: dict[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.forward(torch.zeros(3), tables)

    def forward(self, x: torch.Tensor, tables: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        known = self.tables if tables is None else tables
        if 3 not in known:
            known[3] = torch.arange(3)
        return x + known[3]


class InItsClass(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        type(self).table = torch.arange(3)


@pytest.mark.parametrize("build", [Cached, lambda: Cached(TABLES), InItsClass], ids=["class", "global", "attribute"])
def test_a_factory_that_leaves_tensors_elsewhere_is_not_shared(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, build: Callable[[], nn.Module]
) -> None:
    TABLES.clear()
    Cached.tables.clear()
    made: Any = wcache.cached(build, key="k", socket_path=daemon.path)
    assert "the factory leaves a tensor outside of the module, in a " in caplog.text
    found = [*TABLES.values(), *Cached.tables.values(), *([made.table] if build is InItsClass else [])]
    assert [t.tolist() for t in found] == [[0, 1, 2]]
    assert not daemon.status().shards


def test_a_factory_that_gives_out_what_it_made_on_the_meta_device_is_an_error(daemon: Daemon) -> None:
    kept: list[torch.Tensor] = []

    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        kept.extend([] if kept else [torch.arange(3)])
        module.register_buffer("table", kept[0])
        return module

    with pytest.raises(StructureError, match="the factory remembers tensors of its run on the meta device"):
        wcache.cached(build, key="k", socket_path=daemon.path)
    assert not daemon.status().shards
