# SPDX-License-Identifier: Apache-2.0
"""Declared attributes come back as they were or are refused; what else `load_into` promises: gradients, buffers."""

from __future__ import annotations

import datetime
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
import torch
from daemons import Daemon
from torch import nn

import wcache
from wcache.errors import Miss, PublishError, TrainingRefused
from wcache.weights.fingerprint import LayoutKey

LAYOUT = LayoutKey(engine="own", engine_version="1", architecture="Linear", dtype="float32")
CARRIED = [
    (1, ("a", [2.5, None])),
    torch.Size([2, 3]),
    torch.float16,
    b"bytes",
    {"limits": (1, 2), "dict": {"tuple": [1]}},
    {1: "a", None: True},
]


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
REFUSED = [{1, 2}, bytearray(b"x"), datetime.datetime(2020, 1, 1), object(), 2**70, "\ud800", [torch.ones(1)], ENDLESS]


@pytest.fixture
def checkpoint(short_dir: Path) -> Path:
    return tiny.save("llama-tied", short_dir / "model")


def exactly(a: Any, b: Any) -> bool:
    """Equal, and of the same types in any depth."""
    return type(a) is type(b) and repr(a) == repr(b)


def linear(value: Any) -> Any:
    module: Any = nn.Linear(2, 2).requires_grad_(False)
    module.value = value
    return module


@pytest.mark.parametrize("value", CARRIED, ids=repr)
def test_a_declared_attribute_comes_back_exactly(daemon: Daemon, checkpoint: Path, value: Any) -> None:
    options: dict[str, Any] = {"layout": LAYOUT, "socket_path": daemon.path}
    written = wcache.publish(linear(value), checkpoint, attributes=["value"], **options)
    assert written is not None
    with torch.device("meta"):
        other: Any = nn.Linear(2, 2)
    with written, wcache.load_into(other, checkpoint, **options):
        assert exactly(other.value, value)


@pytest.mark.parametrize("value", CARRIED, ids=repr)
def test_a_cached_modules_declared_attribute_comes_back_exactly(daemon: Daemon, value: Any) -> None:
    def load(module: Any) -> None:
        module.value = value

    options: dict[str, Any] = {"key": "k", "attributes": ["value"], "socket_path": daemon.path}
    wcache.cached(lambda: nn.Linear(2, 2), load=load, **options)
    warm: Any = wcache.cached(lambda: nn.Linear(2, 2), load=lambda _: None, fallback=False, **options)
    assert exactly(warm.value, value)


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_what_would_not_come_back_is_refused_by_name(
    daemon: Daemon, checkpoint: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def load(module: Any) -> None:
        module.value = value

    with pytest.raises(PublishError, match="attribute value "):
        wcache.publish(linear(value), checkpoint, attributes=["value"], layout=LAYOUT, socket_path=daemon.path)
    with caplog.at_level(logging.WARNING):
        wcache.cached(lambda: nn.Linear(2, 2), load=load, key="k", attributes=["value"], socket_path=daemon.path)
    assert re.search(r"this start was not published: (declared attribute )?value\b", caplog.text)
    assert daemon.status().shards == ()


def loss(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(tiny.input_ids(), labels=tiny.input_ids()).loss
    return found


def test_no_gradient_reaches_parameters_that_load_into_put_on_shared_memory(daemon: Daemon, checkpoint: Path) -> None:
    for source in ("disk", "cache"):
        model, held = tiny.engine(checkpoint, socket_path=daemon.path)
        with held:
            assert held.source == source
            assert not any(p.requires_grad for p in model.parameters())
            model.requires_grad_(True)
            with pytest.raises(TrainingRefused):
                loss(model).backward()  # type: ignore[no-untyped-call]
            model.double().zero_grad()  # on memory of its own now
            loss(model).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("options", [{"mode": "copy"}, {"publish": False}], ids=str)
def test_private_parameters_may_be_trained(daemon: Daemon, checkpoint: Path, options: dict[str, Any]) -> None:
    model, held = tiny.engine(checkpoint, socket_path=daemon.path, **options)
    with held:
        model.requires_grad_(True)
        loss(model).backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for p in model.parameters())


def test_buffers_are_computed_in_inference_mode_too(daemon: Daemon, checkpoint: Path) -> None:
    expected, first = tiny.engine(checkpoint, socket_path=daemon.path)
    with first, torch.inference_mode():
        model, held = tiny.engine(checkpoint, socket_path=daemon.path, fallback=False)
        with held:
            buffers = dict(model.named_buffers())
            assert all(torch.equal(buffers[name], theirs) for name, theirs in expected.named_buffers())
            assert torch.equal(loss(model), loss(expected))


def test_a_buffer_that_nobody_computes_is_noticed_in_inference_mode(daemon: Daemon, checkpoint: Path) -> None:
    with torch.inference_mode():
        model = tiny.skeleton(checkpoint)
        model.register_buffer("forgotten", torch.empty(2, device="meta"), persistent=False)
        with pytest.raises(wcache.WcacheError, match="forgotten: still on the meta device"):
            wcache.load_into(model, checkpoint, init=wcache.init_buffers, socket_path=daemon.path)


def test_a_socket_path_that_is_too_long_is_said_so(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Miss, match="AF_UNIX path too long"):
        wcache.attach(checkpoint, socket_path=tmp_path / ("x" * 120), fallback=False)
