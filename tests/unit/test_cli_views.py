# SPDX-License-Identifier: Apache-2.0
"""What people read: sizes and times, tables that fit the terminal, a miss with every field, what a stop did."""

from __future__ import annotations

import io
import time

import pytest
from daemons import content_of, layout, query
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from wcache.cli import render
from wcache.cli.explaining import Answer, lines
from wcache.cli.ranks import GroupReport, RankReport, last_end, may_connect
from wcache.cli.status import headline, model_name, view
from wcache.cli.stopping import describe
from wcache.cli.waiting import bars
from wcache.config import Scope
from wcache.host import units
from wcache.host.units import Unit
from wcache.model import BackendName, IdentityPolicy, MissReason, Mode, Origin, RankState, ShardState
from wcache.protocol.messages import LeaseInfo, MissInfo, ProgressInfo, RankStatus, ShardInfo, WireDifference

MISS = MissInfo(
    when=time.time(),
    engine="vllm",
    pid=33,
    reason=MissReason.LAYOUT,
    message="not the same",
    differences=(WireDifference("layout.tp_size", 2, 4), WireDifference("checkpoint.content", content_of("a"), None)),
    request=query(),
)


def shard(model: str = "/models/llama", *, leases: int = 0, state: ShardState = ShardState.RESIDENT) -> ShardInfo:
    return ShardInfo(
        fingerprint=content_of(model), content=content_of("c"), generation=1, state=state, origin=Origin.PRELOAD,
        model=model, dtype="bfloat16", engine="safetensors", tensors=2, weight_bytes=3 << 30, segment_bytes=3 << 30,
        segments=2, created=0.0, restored=True, verified=None, layout=layout(),
        problem="" if state is ShardState.RESIDENT else "segment 1 differs",
        leases=tuple(LeaseInfo(name=f"engine-{i}", pid=100 + i, uid=0, since=time.time(), mode=Mode.ZERO_COPY)
                     for i in range(leases)),
    )  # fmt: skip


def status(rank: int = 0, *shards: ShardInfo, **more: object) -> RankStatus:
    fixed = {
        "rank": rank, "state": RankState.READY, "device": "GPU-5a2f7c1e-0d9b-4c67-a1f3-e8b2d4c6f801",
        "backend": BackendName.CUDA, "mode": Mode.ZERO_COPY, "policy": IdentityPolicy.CONTENT, "model": None, "pid": 1,
        "nonce": "n", "version": "0", "since": 0.0, "text": "ready", "shards": shards,
    }  # fmt: skip
    return RankStatus(**(fixed | more))  # type: ignore[arg-type]


def report(*said: RankStatus, **more: object) -> GroupReport:
    ranks = tuple(RankReport(rank=s.rank, state=s.state, ready=s.state is RankState.READY, device=s.device, status=s,
                             problem=s.problem) for s in said)  # fmt: skip
    ready = sum(r.ready for r in ranks)
    return GroupReport(manager=Scope.SYSTEM, model=None, ready=ready, total=len(ranks), ranks=ranks)


def page(shown: GroupReport, width: int) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, emoji=False)
    for part in view(shown, width):
        console.print(part)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@given(st.integers(80, 200), st.text("abc-/", min_size=1, max_size=80), st.integers(0, 3), st.sampled_from(RankState))
def test_tables_fit_every_terminal_of_80_columns_and_more(
    width: int, model: str, leases: int, state: RankState
) -> None:
    shown = report(status(0, shard(model, leases=leases), state=state), status(11, shard(), shard("b")))
    header = next(line for line in page(shown, width) if line.startswith("RANK"))
    assert "ENGINES" in header and len(header) <= width
    assert max(len(line) for line in page(shown, width)) <= width


@given(st.integers(26, 79), st.sampled_from(RankState))
def test_a_narrow_terminal_gets_fewer_columns_but_rank_and_state_whole(width: int, state: RankState) -> None:
    lines = page(report(status(11, shard(leases=1), state=state)), width)
    assert next(line for line in lines if line.startswith("RANK")).split()[:2] == ["RANK", "STATE"]
    assert next(line for line in lines if line.startswith("  11")).split()[:2] == ["11", state]


def test_a_ready_rank_without_its_weights_says_why() -> None:
    text = "ready: 0 shards, 0 B, 0 engines attached; the configured weights were evicted"
    assert "rank 0  the configured weights were evicted" in page(report(status(0, text=text)), 120)
    assert "green" not in headline(report(status(0, text=text)))


def test_a_page_names_shards_engines_and_misses() -> None:
    text = "\n".join(page(report(status(0, shard(leases=1), last_miss=MISS, misses={"layout": 3})), 120))
    assert content_of("/models/llama")[:12] in text and "3.0 GiB" in text and "preload, restored" in text
    assert "engine-0" in text and "100" in text and "zero_copy" in text
    assert "by vllm (pid 33): layout, 3 misses so far" in text
    assert "layout.tp_size: asked 2, resident 4" in text
    assert f"checkpoint.content: asked {content_of('a')[:12]}, resident null" in text


def test_a_quarantined_shard_says_why() -> None:
    text = "\n".join(page(report(status(0, shard(state=ShardState.QUARANTINED))), 120))
    assert "is quarantined: segment 1 differs" in text


def test_memory_of_a_device_is_accounted_for_where_the_rank_knows_it() -> None:
    memory = {"weights": 3 << 30, "engines": 1 << 30, "used": 4 << 30, "total": 8 << 30}
    text = "\n".join(page(report(status(0, shard(), memory=memory)), 120))
    assert "memory: 4.0 GiB of 8.0 GiB in use: weights 3.0 GiB, engines 1.0 GiB" in text
    lost = {**memory, "no_process": 2 << 30, "missing": 1 << 30}
    text = " ".join(page(report(status(0, shard(), memory=lost)), 200))
    assert "nvidia-smi shows 2.0 GiB of it under no process" in text
    assert "1.0 GiB of resident shards cannot be on the GPU any more" in text


def test_names_from_outside_are_not_taken_for_markup() -> None:
    text = "\n".join(page(report(status(0, shard("/models/[red]x"), problem="[bold]")), 120))
    assert "[red]x" in text
    assert "[bold]" in text


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = render.console()
    for part in view(report(status(0, shard("m" * 300))), console.width):
        console.print(part)
    assert "m" * 300 in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "name"),
    [("/models/llama/", "llama"), ("/hub/models--org--name/snapshots/abc", "org/name"), ("llama", "llama"), ("/", "/")],
)
def test_a_model_is_called_by_its_directory_or_repository(path: str, name: str) -> None:
    assert model_name(path) == name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7384, "2 h 3 min"), (90000, "1 d 1 h"), (-1, "0 s")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_digests_are_shortened_wherever_they_stand() -> None:
    assert render.short(f"shard {content_of('a')} of rank 1") == f"shard {content_of('a')[:12]} of rank 1"


def test_loading_ranks_get_a_bar_and_their_numbers_once() -> None:
    progress = ProgressInfo(phase="load", bytes_done=31, bytes_total=100)
    said = status(0, state=RankState.LOADING, text="loading 31 %, 12/66 files, 1.9 GB/s", progress=progress)
    out = io.StringIO()
    Console(file=out, width=80).print(bars(report(said)))
    assert "31 %, 12/66 files, 1.9 GB/s" in out.getvalue()
    assert out.getvalue().count("loading") == 1


def test_a_miss_is_explained_with_what_a_cold_start_costs() -> None:
    answer = Answer(
        rank=1, model="/m", content=None, hit=None, reason=MissReason.LAYOUT, message="m", read_bytes=1 << 30,
        hash_bytes=2 << 30, memory_bytes=3 << 30, differences=(WireDifference("layout.dtype", "float16", "auto"),),
    )  # fmt: skip
    assert list(lines([answer])) == [
        "rank 1: miss: layout",
        "        layout.dtype: asked float16, resident auto",
        "        the checkpoint's content is not known without reading it (leave --no-hash out)",
        "        a cold start reads 1.0 GiB (and 2.0 GiB hashed) and needs 3.0 GiB of memory",
    ]


# --- units ------------------------------------------------------------------------------------------------------------


def unit(name: str = "wcache@0.service", active: str = "active", sub: str = "running", **more: object) -> Unit:
    return Unit(name, "loaded", active, sub, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("service", "socket", "may"),
    [
        ("active/running", "active", True), ("activating/start", "active", True), ("reloading/reload", "active", True),
        ("inactive/dead", "active", False), ("failed/failed", "active", False), ("deactivating/stop", "active", False),
        ("activating/auto-restart", "active", False), ("inactive/dead", "inactive", True),
        ("inactive/dead", "failed", True),
    ],
)  # fmt: skip
def test_only_a_rank_that_serves_or_has_no_socket_unit_is_connected_to(service: str, socket: str, may: bool) -> None:
    active, _, sub = service.partition("/")
    seen = {u.name: u for u in (unit(active=active, sub=sub), unit(units.socket_unit(0), active=socket))}
    assert may_connect(seen, 0) is may
    assert may_connect({}, 0)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"result": "signal", "exit_code": 2, "exit_status": 9}, "killed by SIGKILL"),
        ({"result": "timeout"}, "took too long"),
        ({"result": "watchdog", "exit_code": 3, "exit_status": 6}, "killed by SIGABRT"),
        ({"result": "exit-code", "exit_code": 1, "exit_status": 2}, "exited with status 2"),
    ],
)
def test_the_end_of_a_daemon_is_told_in_words(facts: dict[str, object], words: str) -> None:
    assert last_end(unit(active="failed", **facts)) == words


def test_a_stop_says_what_is_freed_and_who_still_maps_it() -> None:
    before = report(status(0, shard(leases=1)), status(1, shard()))
    said = list(describe(before, {}))
    assert said[0] == "rank 0: stopped; 0 B freed, 3.0 GiB still mapped"
    assert "engine-0 (pid 100) goes on serving from 3.0 GiB" in said[1]
    assert said[2] == "rank 1: stopped; 3.0 GiB freed"


def test_a_stop_of_a_rank_that_did_not_answer_claims_nothing() -> None:
    silent = RankReport(rank=0, state="unresponsive", ready=False, device="cpu")
    said = list(describe(GroupReport(manager=None, model=None, ready=0, total=1, ranks=(silent,)), {}))
    assert said == ["rank 0: stopped; it was unresponsive, so it is not known what it held and what is freed"]


def test_a_stop_says_what_the_fd_store_keeps_and_how_to_free_it() -> None:
    kept = {"wcache@0.service": unit(active="inactive", sub="dead-resources-pinned", stored_fds=3)}
    said = list(describe(report(status(0, shard())), kept))
    assert said[0] == "rank 0: stopped; 3.0 GiB stays in memory for the next start"
    assert said[1].endswith("systemctl clean --what=fdstore wcache@0.service")
