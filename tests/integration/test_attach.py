# SPDX-License-Identifier: Apache-2.0
"""The client library against a real daemon: hits, misses, cold starts, copies, twins, the daemon's death."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_checkpoints as tiny
import torch
from daemons import Daemon, Manager
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wcache
from wcache.engine import attach as attaching
from wcache.engine.client import attach_shard
from wcache.engine.lease import LeaseState, held
from wcache.errors import CheckpointError, Miss, StructureError
from wcache.model import CheckpointFault, MissReason, Mode, Origin
from wcache.protocol.messages import Granted, PublishBegin
from wcache.weights.fingerprint import LayoutKey

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        directory = root / kind
        return directory if directory.exists() else tiny.save_split(kind, directory)

    return get


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    """Engine and daemon share a digest store of this test's own, and no configuration of the host."""
    monkeypatch.setenv("WCACHE_STATE_DIR", str(short_dir / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("WCACHE_CONFIG", raising=False)


@pytest.fixture
def preloaded(
    make_daemon: Callable[..., Daemon], manager: Manager, checkpoints: Callable[[str], Path]
) -> Callable[[str], tuple[Daemon, Path]]:
    """A rank with a real checkpoint resident, loaded by the real loader child."""

    def start(kind: str) -> tuple[Daemon, Path]:
        directory = checkpoints(kind)
        daemon = make_daemon(manager=manager, config={"model": str(directory)}).start()
        manager.wait_told("READY=1", 60)
        return daemon, directory

    return start


@pytest.fixture(autouse=True)
def _nothing_attached() -> Iterator[None]:
    yield
    gc.collect()
    deadline = threading.Event()
    for _ in range(100):
        if held() == 0:
            break
        deadline.wait(0.02)
    assert held() == 0


@pytest.mark.parametrize("kind", ["llama-untied", "llama-tied", "qwen3", "qwen3-moe", "mixtral"])
def test_a_cached_model_has_the_bytes_and_the_greedy_tokens_of_a_disk_load(
    preloaded: Callable[[str], tuple[Daemon, Path]], kind: str
) -> None:
    daemon, directory = preloaded(kind)
    model, attachment = tiny.engine(directory, socket_dir=daemon.socket_dir, fallback=False)
    assert attachment.source == "cache"
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert tiny.greedy(model) == tiny.greedy(plain)
    attachment.close()


def test_tied_weights_share_memory_and_are_counted_once(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-tied")
    model, attachment = tiny.engine(directory, socket_dir=daemon.socket_dir, fallback=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    unique = {t.data_ptr(): t.nbytes for t in attachment.tensors.values()}
    assert daemon.status().shards[0].weight_bytes == sum(unique.values())
    attachment.close()


def test_a_twin_with_the_same_headers_is_a_miss_on_content(
    preloaded: Callable[[str], tuple[Daemon, Path]], tmp_path: Path
) -> None:
    daemon, directory = preloaded("llama-untied")
    other = tiny.twin(directory, tmp_path / "twin", "model.norm.weight")
    with pytest.raises(Miss) as e:
        wcache.attach(other, socket_dir=daemon.socket_dir, fallback=False)
    assert e.value.reason is MissReason.CONTENT
    assert [d.field for d in e.value.differences] == ["checkpoint.content"]
    miss = daemon.status().last_miss
    assert miss is not None
    assert miss.reason is MissReason.CONTENT


def test_the_same_bytes_elsewhere_are_a_hit(preloaded: Callable[[str], tuple[Daemon, Path]], tmp_path: Path) -> None:
    daemon, directory = preloaded("llama-untied")
    copy, link = tmp_path / "copy", tmp_path / "link"
    shutil.copytree(directory, copy)
    link.symlink_to(directory)
    for path in (copy, link):
        with wcache.attach(path, socket_dir=daemon.socket_dir, fallback=False) as attachment:
            assert attachment.source == "cache"


WRONG: dict[str, Any] = {
    "engine": "x", "engine_version": "0", "architecture": "X", "dtype": "float16", "tp_size": 2, "tp_rank": 1,
    "pp_size": 2, "pp_rank": 1, "dp_size": 2, "dp_rank": 1, "ep_size": 2, "ep_rank": 1, "role": "draft",
    "quantization": {"bits": 4}, "rope": {"rope_theta": 1.0}, "max_model_len": 7, "kv_cache_dtype": "fp8",
    "revision": "r", "plan": "p", "kernel_backends": {"a": "b"}, "device_capability": "9.0", "torch_version": "0",
    "cuda_version": "0", "environment": {"A": "b"}, "extra": {"a": 1},
}  # fmt: skip


def test_every_wrong_field_is_a_miss_that_names_it(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")
    assert WRONG.keys() == set(LayoutKey.__struct_fields__)
    with attaching.host_store() as store:
        query = attaching.prepare(str(directory), None, store).query()
    for field, value in WRONG.items():
        layout = msgspec.structs.replace(query.layout, **{field: value})
        with pytest.raises(Miss) as e:
            attach_shard(msgspec.structs.replace(query, layout=layout), daemon.path)
        assert e.value.reason is MissReason.LAYOUT
        assert all(d.field.startswith(f"layout.{field}") for d in e.value.differences), field
    with pytest.raises(Miss) as e:
        attach_shard(msgspec.structs.replace(query, content="0" * 64), daemon.path)
    assert e.value.reason is MissReason.CONTENT


def test_a_stale_index_is_refused_or_ignored_aloud_by_loader_and_engine_alike(
    make_daemon: Callable[..., Daemon], manager: Manager, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoints("llama-untied"), tmp_path / "stale"))
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-", "other-"))
    tiny.settle(directory)
    with pytest.raises(CheckpointError, match="is stale") as refused:
        wcache.attach(directory, socket_path="/nowhere")
    assert refused.value.fault is CheckpointFault.STALE_INDEX and "allow_stale_index" in str(refused.value.hint)
    config = {"model": str(directory), "allow_stale_index": True}
    daemon = make_daemon(manager=manager, config=config).start()
    manager.wait_told("READY=1", 60)
    assert "is stale: none of its" in daemon.log
    with wcache.attach(directory, socket_path=daemon.path, allow_stale_index=True, fallback=False) as held:
        assert all(torch.equal(held.tensors[n], t) for n, t in tiny.tensors_of(checkpoints("llama-untied")).items())


def test_a_cold_engine_loads_from_disk_and_the_next_one_hits(
    daemon: Daemon, checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoints("llama-untied")
    caplog.set_level(logging.INFO, "wcache")
    first = wcache.attach(directory, socket_dir=daemon.socket_dir)
    assert first.source == "disk"
    assert first.miss is not None
    assert first.miss.reason is MissReason.EMPTY
    assert "Weight cache unusable (empty: nothing is resident); falling back to disk loading" in caplog.messages
    assert [len(s.leases) for s in daemon.status().shards] == [1]
    second = wcache.attach(directory, socket_dir=daemon.socket_dir)
    assert second.source == "cache"
    count = len(tiny.tensors_of(directory))
    assert f"Mapped {count} tensors from the weight cache daemon (zero_copy mode)" in caplog.messages
    assert all(torch.equal(first.tensors[n], second.tensors[n]) for n in first.tensors)
    first.close()
    second.close()


def test_two_cold_engines_read_the_disk_once(daemon: Daemon, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("qwen3")
    found: list[wcache.Attachment] = []
    threads = [
        threading.Thread(target=lambda: found.append(wcache.attach(directory, socket_dir=daemon.socket_dir)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.source for a in found) == ["cache", "cache", "cache", "disk"]
    assert len(daemon.status().shards) == 1
    for attachment in found:
        attachment.close()


def test_a_writer_that_takes_too_long_is_not_waited_for(daemon: Daemon, checkpoints: Callable[[str], Path]) -> None:
    """state_timeout_s is the deadline for everything: then the disk serves, and nothing is published twice."""
    directory = checkpoints("llama-untied")
    with attaching.host_store() as store:
        query = attaching.prepare(str(directory), None, store).query()
    with daemon.connect(role="engine", name="slow writer") as writer:
        writer.ask(PublishBegin(query=query, origin=Origin.ENGINE, bytes_total=1), Granted)
        start = time.monotonic()
        with wcache.attach(directory, socket_dir=daemon.socket_dir, state_timeout_s=0.5) as attachment:
            assert 0.5 <= time.monotonic() - start < 10
            assert attachment.source == "disk"
            assert attachment.lease is None
            assert attachment.miss is not None
            assert attachment.miss.reason is MissReason.DEADLINE
        assert daemon.status().shards == ()


def test_without_a_daemon_the_disk_serves_and_without_fallback_the_miss_is_raised(
    checkpoints: Callable[[str], Path], short_dir: Path
) -> None:
    directory = checkpoints("llama-untied")
    with wcache.attach(directory, socket_dir=short_dir) as attachment:
        assert attachment.source == "disk"
        assert attachment.lease is None
        expected = tiny.tensors_of(directory)
        assert all(torch.equal(attachment.tensors[n], expected[n]) for n in expected)
    with pytest.raises(Miss) as e:
        wcache.attach(directory, socket_dir=short_dir, fallback=False)
    assert e.value.reason is MissReason.NO_DAEMON


def test_copy_mode_takes_private_memory_and_frees_the_cache_only_when_nobody_else_holds_it(
    preloaded: Callable[[str], tuple[Daemon, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    daemon, directory = preloaded("llama-untied")
    caplog.set_level(logging.INFO, "wcache")
    other = wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False)
    copy = wcache.attach(directory, socket_dir=daemon.socket_dir, mode="copy", fallback=False)
    assert "(copy mode)" in " ".join(caplog.messages)
    assert "kept: 1 other engines hold it" in " ".join(caplog.messages)
    assert len(daemon.status().shards) == 1
    other.close()
    daemon.wait_status(lambda s: not s.shards[0].leases, "no lease")
    again = wcache.attach(directory, socket_dir=daemon.socket_dir, mode="copy", fallback=False)
    assert daemon.status().shards == ()
    expected = tiny.tensors_of(directory)
    for attachment in (copy, again):
        assert all(torch.equal(attachment.tensors[n], expected[n]) for n in expected)
        attachment.close()


def test_a_stray_write_stays_with_its_engine(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")
    one = wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False)
    two = wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False)
    before = two.tensors["model.norm.weight"].clone()
    one.tensors["model.norm.weight"].fill_(7)
    assert torch.equal(two.tensors["model.norm.weight"], before)
    with wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False) as three:
        assert torch.equal(three.tensors["model.norm.weight"], before)
    one.close()
    two.close()


def test_an_engine_keeps_its_weights_when_the_daemon_dies_and_its_lease_comes_back(
    preloaded: Callable[[str], tuple[Daemon, Path]],
) -> None:
    daemon, directory = preloaded("llama-untied")
    model, attachment = tiny.engine(directory, socket_dir=daemon.socket_dir, fallback=False)
    expected = tiny.greedy(model)
    assert attachment.lease is not None
    daemon.kill()
    assert attachment.lease.wait(LeaseState.LOST, 5)
    assert tiny.greedy(model) == expected
    daemon.start()
    assert attachment.lease.wait(LeaseState.HELD, 20)
    (shard,) = daemon.status().shards
    assert shard.restored
    assert [lease.pid for lease in shard.leases] == [os.getpid()]
    attachment.close()


def test_the_lease_ends_with_the_last_tensor(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")
    tensor = wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False).tensors["model.norm.weight"]
    gc.collect()
    assert len(daemon.status().shards[0].leases) == 1
    del tensor
    gc.collect()
    daemon.wait_status(lambda s: not s.shards[0].leases, "no lease")


def test_many_attaches_leave_nothing_behind(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")

    def cycle(times: int) -> None:
        for _ in range(times):
            with wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False) as attachment:
                assert len(attachment.tensors) > 10

    def held_now() -> tuple[int, int, int]:
        fds = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (os.getpid(), daemon.pid)]
        return fds[0], fds[1], threading.active_count()

    cycle(20)
    daemon.wait_status(lambda s: not s.shards[0].leases, "no lease")
    before = held_now()
    cycle(200)
    daemon.wait_status(lambda s: not s.shards[0].leases and held_now() <= before, "as before")


def test_a_module_that_differs_is_refused_with_every_difference(
    preloaded: Callable[[str], tuple[Daemon, Path]],
) -> None:
    daemon, directory = preloaded("llama-untied")
    model = tiny.skeleton(directory)
    model.model.norm = torch.nn.LayerNorm(31, device="meta", dtype=torch.float32)
    with pytest.raises(StructureError) as e:
        wcache.load_into(model, directory, socket_dir=daemon.socket_dir, init=wcache.init_buffers)
    text = " ".join(e.value.differences)
    assert "model.norm.weight: shape (31,) in the module, (32,) in the shard" in text
    assert "model.norm.weight: torch.float32 in the module, torch.bfloat16 in the shard" in text
    assert "model.norm.bias: in the module, not in the shard" in text
    assert all(p.is_meta for p in model.parameters()), "nothing was bound"


def test_a_buffer_that_nobody_computes_is_an_error_that_names_it(
    preloaded: Callable[[str], tuple[Daemon, Path]],
) -> None:
    daemon, directory = preloaded("llama-untied")
    with pytest.raises(StructureError, match="inv_freq: would stay on the meta device"):
        wcache.load_into(tiny.skeleton(directory), directory, socket_dir=daemon.socket_dir)


def test_touched_files_are_hashed_once_and_then_hit(
    preloaded: Callable[[str], tuple[Daemon, Path]], tmp_path: Path
) -> None:
    daemon, directory = preloaded("llama-untied")
    for path in directory.glob("*.safetensors"):
        os.utime(path)
    with wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False) as attachment:
        assert attachment.source == "cache"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_an_engine_publishes_comes_back_exactly(
    daemon: Daemon, checkpoints: Callable[[str], Path], data: Any
) -> None:
    directory = checkpoints("llama-untied")
    state = _state(data)
    written = wcache.publish(state, directory, socket_dir=daemon.socket_dir, layout=OWN_LAYOUT)
    assert written is not None
    with wcache.attach(directory, socket_dir=daemon.socket_dir, layout=OWN_LAYOUT) as attachment:
        assert attachment.source == "cache"
        mine = attachment.tensors
        assert mine.keys() == state.keys()
        for name, tensor in state.items():
            assert (mine[name].dtype, mine[name].shape, mine[name].stride()) == (
                tensor.dtype, tensor.shape, tensor.stride(),
            )  # fmt: skip
            assert _bytes(mine[name]) == _bytes(tensor)
        for a in state:
            for b in state:
                shared = state[a].untyped_storage().data_ptr() == state[b].untyped_storage().data_ptr()
                if state[a].numel() and state[b].numel() and a.startswith("base") and b.startswith("base"):
                    assert (mine[a].untyped_storage().data_ptr() == mine[b].untyped_storage().data_ptr()) == shared
    written.close()
    daemon.wait_status(lambda s: not s.shards[0].leases, "no lease")
    with daemon.connect(role="admin") as connection:
        from wcache.protocol.messages import Evict, Evicted

        connection.ask(Evict(), Evicted)


OWN_LAYOUT = LayoutKey(engine="test", engine_version="1", architecture="any", dtype="any")
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64]


def _state(data: Any) -> dict[str, torch.Tensor]:
    """Tensors with odd dtypes, strides, views of one another, ties, no elements, no dims."""
    state: dict[str, torch.Tensor] = {}
    for i in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        base = (torch.rand(shape) * 100).to(dtype)
        state[f"tensor{i}"] = base.t() if len(shape) == 2 and data.draw(st.booleans()) else base
    base = torch.rand(8, 6)
    state["base"] = base
    state["base.rows"] = base[2:5]
    state["base.columns"] = base[:, ::2]
    state["tied"] = state["tensor0"]
    return state


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_a_live_module_moves_onto_the_published_memory(daemon: Daemon, checkpoints: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    directory = checkpoints("llama-tied")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).requires_grad_(False)
    before = tiny.greedy(model)
    old = model.model.norm.weight.data_ptr()
    attachment = wcache.publish(model, directory, socket_dir=daemon.socket_dir, repoint=True)
    assert attachment is not None
    assert model.model.norm.weight.data_ptr() != old
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tiny.greedy(model) == before
    other, held_too = tiny.engine(directory, socket_dir=daemon.socket_dir, fallback=False)
    assert tiny.greedy(other) == before
    held_too.close()
    attachment.close()


def test_other_weights_are_not_published_under_a_checkpoints_name(
    daemon: Daemon, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Random weights, another model's, trained ones, a wrong shape, a missing tensor: refused, nothing is resident."""
    directory = checkpoints("llama-untied")
    right = tiny.tensors_of(directory)
    other = tiny.tensors_of(tiny.save_split("llama-untied", tmp_path / "other", seed=5))
    trained = {**right, "model.norm.weight": right["model.norm.weight"] + 1}
    wrong_shape = {**right, "model.norm.weight": torch.ones(31, dtype=torch.bfloat16)}
    missing = {n: t for n, t in right.items() if n != "model.norm.weight"}
    for state, text in (
        (other, "other bytes than in the checkpoint"),
        (trained, "model.norm.weight: other bytes"),
        (wrong_shape, "model.norm.weight: shape"),
        (missing, "model.norm.weight: in the checkpoint, not in what is to be published"),
        ({**right, "extra": torch.ones(3)}, "extra: not in the checkpoint"),
        ({**right, "lm_head.weight": right["lm_head.weight"].float()}, "lm_head.weight: float32, bfloat16"),
    ):
        with pytest.raises(wcache.WcacheError, match=text):
            wcache.publish(state, directory, socket_dir=daemon.socket_dir)
    assert daemon.status().shards == ()
    held_here = wcache.publish(right, directory, socket_dir=daemon.socket_dir)
    assert held_here is not None
    held_here.close()
    with wcache.attach(directory, socket_dir=daemon.socket_dir, fallback=False) as attachment:
        assert attachment.source == "cache"


def test_an_engines_own_layout_brings_back_buffers_and_declared_attributes(
    daemon: Daemon, checkpoints: Callable[[str], Path]
) -> None:
    directory = checkpoints("llama-untied")
    module = _WithState().requires_grad_(False)
    module.inner.scale = 0.125
    written = wcache.publish(
        module, directory, socket_dir=daemon.socket_dir, layout=OWN_LAYOUT, attributes=["inner.scale", "table"]
    )
    with torch.device("meta"):
        other = _WithState()
    attachment = wcache.load_into(other, directory, socket_dir=daemon.socket_dir, layout=OWN_LAYOUT)
    x = torch.rand(2, 4)
    assert torch.equal(other(x), module(x))
    assert other.state_dict().keys() == module.state_dict().keys()
    assert other.inner.scale == 0.125
    assert other.mask.data_ptr() not in {t.data_ptr() for t in attachment.tensors.values()}, "a buffer is private"
    assert written is not None
    written.close()
    attachment.close()


class _WithState(torch.nn.Module):
    """A parameter, a non-persistent buffer, a bare tensor and a plain value that decide the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.inner.scale = 1.0
        self.register_buffer("mask", torch.rand(4), persistent=False)
        self.table = torch.rand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.inner.scale * self.mask + self.table


def test_shared_weights_are_not_for_training(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")
    options: dict[str, Any] = {"socket_dir": daemon.socket_dir, "fallback": False, "requires_grad": True}
    with pytest.raises(StructureError, match="cannot be trained"):
        tiny.engine(directory, **options)
    model, attachment = tiny.engine(directory, mode="copy", **options)
    assert all(p.requires_grad for p in model.parameters())
    attachment.close()


def test_the_phases_of_an_attach_sum_to_its_total(preloaded: Callable[[str], tuple[Daemon, Path]]) -> None:
    daemon, directory = preloaded("llama-untied")
    _, attachment = tiny.engine(directory, socket_dir=daemon.socket_dir, fallback=False)
    phases = dict(attachment.timing)
    assert phases.pop("total") == pytest.approx(sum(phases.values()))
    assert phases.keys() == {"identify", "connect", "verify", "map", "bind"}
    attachment.close()


def test_meta_tensors_cannot_be_published(daemon: Daemon, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("llama-untied")
    with pytest.raises(wcache.WcacheError, match="meta device"):
        wcache.publish({"x": torch.empty(3, device="meta")}, directory, socket_dir=daemon.socket_dir)
    assert daemon.status().shards == ()


def test_a_mode_that_does_not_exist_is_refused(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="zero"):
        wcache.attach(checkpoints("llama-untied"), mode="zero")
    assert Mode("copy") is Mode.COPY
