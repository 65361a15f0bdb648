# SPDX-License-Identifier: Apache-2.0
"""`wcache.cached`: modules of every kind come back exactly, or are refused with a reason; a real daemon beside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import equality
import pytest
import torch
from daemons import Daemon
from torch import nn

import wcache
from wcache.errors import ConfigError, FingerprintError, Miss, TrainingRefused, WcacheError
from wcache.model import MissReason


class Helper:
    """An object of the program that is no module and keeps a tensor."""

    def __init__(self) -> None:
        self.table = torch.zeros(3)


class Scaled(nn.Parameter):
    """A parameter class of the program's own."""


class Everything(nn.Module):
    """Tied, strided, zero-size, scalar, bool, int, fp8, packed 4-bit, bare, in containers, in a helper."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.empty(5, 3).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.empty(()))
        self.special = Scaled(torch.empty(2))
        self.codes = nn.Parameter(torch.empty(4, dtype=torch.int32), requires_grad=False)
        self.eight = nn.Parameter(torch.empty(3, 3, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.four = nn.Parameter(torch.empty(6, dtype=torch.float4_e2m1fn_x2), requires_grad=False)
        self.maybe = nn.Parameter(torch.empty(2))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("absent", None)
        self.bare = torch.zeros(2, dtype=torch.complex64)
        self.alias = self.mask
        self.pair = (torch.zeros(2), [torch.zeros(1)])
        self.by_name = {"cos": torch.zeros(3), 1: torch.zeros(2)}
        self.helper = Helper()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
        self.scale = 1.0
        self.limits: list[Any] = []
        self.compute = torch.float32


def fill(module: Everything) -> None:
    """Values that no factory makes on its own."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in equality.named(module).values():
            if tensor.numel():
                flat = torch.randint(0, 255, (tensor.numel() * tensor.element_size(),), generator=generator)
                values = flat.to(torch.uint8) % (2 if tensor.dtype is torch.bool else 255)
                tensor.copy_(
                    values.view(tensor.dtype).view(tensor.shape) if tensor.dim() else values.view(tensor.dtype)[0]
                )
    module.helper.table.fill_(3)
    module.embed.weight.requires_grad_(False)
    module.maybe = None  # type: ignore[assignment]
    module.late = torch.arange(3)  # type: ignore[assignment]
    module.scale = float("nan")
    module.mode = "processed"  # type: ignore[assignment]
    module.limits = [1, [2.5, None], {"a": True}]
    module.window = (3, [4, "five"], None)  # type: ignore[assignment]
    module.compute = torch.float8_e5m2  # type: ignore[assignment]
    module.layers[0].eval()


@pytest.fixture
def make(daemon: Daemon) -> Callable[..., Any]:
    def make(build: Callable[[], Any] = Everything, **options: Any) -> Any:
        return wcache.cached(build, **{"key": "k", "socket_path": daemon.path, **options})

    return make


def resident(daemon: Daemon) -> int:
    return len(daemon.status().shards)


def test_everything_a_module_can_hold_comes_back_exactly(daemon: Daemon, make: Callable[..., Any]) -> None:
    plain = Everything()
    fill(plain)
    cold = make(load=fill, attributes=["limits"])
    warm = make(load=must_not_run, attributes=["limits"], fallback=False)
    for made in (cold, warm):
        nan, made.scale = made.scale, 0.0
        assert nan != nan
        plain.scale = 0.0
        equality.same(made, plain)
        assert torch.equal(made.helper.table, plain.helper.table)
        assert made.limits == plain.limits
        assert (made.window, made.compute) == (plain.window, plain.compute)
        assert made.maybe is None
    assert warm.alias is warm.mask
    assert resident(daemon) == 1


def must_not_run(module: nn.Module) -> None:
    raise AssertionError("a hit loads nothing")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))


def ones(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)


def nothing(module: nn.Module) -> None:
    pass


def fails(module: nn.Module) -> None:
    raise ZeroDivisionError


def test_another_key_is_another_module(daemon: Daemon, make: Callable[..., Any]) -> None:
    make(linear, key={"name": "a", "version": 1}, load=ones)
    other = make(linear, key={"name": "a", "version": 2}, load=nothing)
    assert not torch.equal(other[0].weight, torch.ones(3, 3))
    assert resident(daemon) == 2


def test_a_factory_that_changed_its_structure_is_not_served_the_old_module(make: Callable[..., Any]) -> None:
    make(linear, load=ones)
    with pytest.raises(Miss) as miss:
        make(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), fallback=False)
    assert miss.value.reason is MissReason.LAYOUT
    assert [d.field for d in miss.value.differences] == ["layout.extra.structure"]


def test_writes_stay_with_the_process_that_makes_them(make: Callable[..., Any]) -> None:
    first, second = make(linear, load=ones), make(linear, load=must_not_run)
    with torch.no_grad():
        first[0].weight.fill_(5)
        second[0].weight.fill_(6)
    third = make(linear, load=must_not_run)
    assert [float(m[0].weight[0, 0].detach()) for m in (first, second, third)] == [5, 6, 1]


def test_parameters_that_are_let_train_only_afterwards_refuse_as_well(make: Callable[..., Any]) -> None:
    for _ in ("cold", "warm"):
        module = make(lambda: linear().requires_grad_(False), load=ones)
        assert not any(p.requires_grad for p in module.parameters())
        module.requires_grad_(True)
        with pytest.raises(TrainingRefused, match="shared"):
            module(torch.ones(1, 3)).sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds on to a graph that failed until its next one


def test_training_shared_parameters_is_refused_aloud(make: Callable[..., Any]) -> None:
    for _ in ("cold", "warm"):
        module = make(linear, load=ones)
        assert all(p.requires_grad for p in module.parameters())
        with pytest.raises(TrainingRefused, match="shared") as refused:
            module(torch.ones(1, 3)).sum().backward()
        assert "copy" in refused.value.hint
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds on to a graph that failed until its next one


def test_a_copy_trains_and_frees_the_cache(daemon: Daemon, make: Callable[..., Any]) -> None:
    make(linear, load=ones)
    module = make(linear, load=must_not_run, mode="copy")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module[0](torch.rand(2, 3)).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(module[0].weight, torch.ones(3, 3))
    assert resident(daemon) == 0


def test_parameters_moved_to_private_memory_train(make: Callable[..., Any]) -> None:
    make(linear, load=ones)
    module = make(linear, load=must_not_run).double()
    module(torch.ones(1, 3).double()).sum().backward()
    assert module[0].weight.grad is not None


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.largest = self.weight.max().item()


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def quantize(module: nn.Module) -> None:
    module[0] = nn.Bilinear(3, 3, 3)  # type: ignore[index]


def sparse(module: nn.Module) -> None:
    module.mask = torch.eye(3).to_sparse()  # type: ignore[assignment]


def wrapper(module: nn.Module) -> None:
    module.odd = torch.ones(2).as_subclass(Subclass)  # type: ignore[assignment]


def graph(module: nn.Module) -> None:
    module.half = module[0].weight / 2  # type: ignore[index, assignment]


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *called: called[2] * 2)


def reclassed(module: nn.Module) -> None:
    module[0].weight = Scaled(module[0].weight.data)  # type: ignore[index]


def helped(module: Everything) -> None:
    module.helper.steps = object()  # type: ignore[attr-defined]


def shortened(module: nn.Module) -> None:
    del module.note


def noted() -> nn.Module:
    module = linear()
    module.note = [1]  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("build", "load", "why"),
    [
        (Reads, None, "does not run on the meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), lambda m: m(torch.ones(1, 2)), "no module that can be described"),
        (linear, hooked, "loading changed _forward_hooks: hooks are not shared"),
        (linear, reclassed, "loading made 0.weight a"),
        (Everything, helped, "the attribute helper keeps a"),
        (noted, shortened, "took the attribute note away"),
        (linear, quantize, "replaced or added module 0"),
        (linear, sparse, "torch.sparse_coo, not strided"),
        (linear, wrapper, "tensor subclass with state of its own"),
        (linear, graph, "part of an autograd graph"),
    ],
)
def test_what_cannot_come_back_exactly_is_refused_and_still_made(
    daemon: Daemon, make: Callable[..., Any], caplog: pytest.LogCaptureFixture, build: Any, load: Any, why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(make(build, load=load), nn.Module)
    assert why in caplog.text
    assert resident(daemon) == 0


def test_modules_of_torch_with_state_in_odd_places_come_back(make: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        odd = nn.ModuleList([nn.LSTM(3, 4, 2), nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))])
        return odd.extend([nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.MultiheadAttention(8, 2)])

    def load(module: nn.Module) -> None:
        with torch.no_grad():
            for i, tensor in enumerate([*module.parameters(), *module.buffers()]):
                tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape) + i)

    plain = build().eval()
    load(plain)
    for action in (load, must_not_run):
        made = make(build, load=action).eval()
        for tensor, theirs in zip(made.state_dict().items(), plain.state_dict().items(), strict=True):
            equality.same_tensor(tensor[1], theirs[1], tensor[0])
        x = torch.ones(1, 2, 3)
        assert torch.equal(made[0](x)[0], plain[0](x)[0])
        assert all(torch.equal(a(x), b(x)) for a, b in zip(made[1:3], plain[1:3], strict=True))


def test_an_attribute_without_a_canonical_form_is_refused(
    daemon: Daemon, make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    make(Everything, load=lambda m: setattr(m, "limits", object()), attributes=["limits"])
    assert "declared attribute limits" in caplog.text
    assert resident(daemon) == 0


def test_a_factory_that_fails_says_so_itself_and_leaves_no_publication(
    daemon: Daemon, make: Callable[..., Any]
) -> None:
    with pytest.raises(ZeroDivisionError):
        make(linear, load=fails)
    assert torch.equal(make(linear, load=ones)[0].weight, torch.ones(3, 3))
    assert resident(daemon) == 1


def test_without_a_daemon_the_module_is_made_and_the_reason_said(
    short_dir: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = wcache.cached(linear, key="k", load=ones, socket_path=short_dir / "none.sock", connect_timeout_s=0.1)
    assert torch.equal(module[0].weight, torch.ones(3, 3))
    assert "Weight cache unusable (no_daemon:" in caplog.text
    with pytest.raises(Miss):
        wcache.cached(linear, key="k", socket_path=short_dir / "none.sock", fallback=False, connect_timeout_s=0.1)


@pytest.mark.parametrize("options", [{"key": {"a": object()}}, {"device": "tpu"}, {"socket_dir": "/tmp"}])
def test_wrong_arguments_are_errors(make: Callable[..., Any], options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, FingerprintError, WcacheError, RuntimeError)):
        make(linear, **options)
