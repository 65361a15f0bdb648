# SPDX-License-Identifier: Apache-2.0
"""`wcache fingerprint` and `wcache explain` on real checkpoints, with and without real ranks that hold them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import tiny_checkpoints as tiny
from daemons import Daemon

from wcache.cli.checks import Finding
from wcache.cli.explaining import Answer
from wcache.cli.main import run
from wcache.host import units

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_split("llama-untied", tmp_path_factory.mktemp("models") / "llama-untied")


@pytest.fixture
def checkpoint(llama: Path, tmp_path: Path) -> Path:
    """A copy of its own; old enough that a stamp says something."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(llama, copy)
    for file in copy.iterdir():
        os.utime(file, (1e9, 1e9))
    return copy


@pytest.fixture
def truncated(checkpoint: Path) -> Path:
    """A checkpoint whose first file lacks its last byte."""
    file = min(checkpoint.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    return checkpoint


@pytest.fixture
def say(short_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    """Run a verb on this test's configuration: exit status, stdout, stderr."""
    monkeypatch.setattr(units, "reachable", lambda _: False)
    path = short_dir / "wcache.toml"

    path.write_text(f'socket_dir = "{short_dir}/run"\nstate_dir = "{short_dir}/state"\n')

    def call(*argv: str, config: Path = path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*argv, "--config", str(config)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def group(llama: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """Two ranks that hold their halves of the checkpoint, read by the real loader."""
    config = {"model": str(llama), "ranks": [0, 1], "parallel": {"tp_size": 2}}
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        made = (Daemon(Path(name), rank=0, config=config), Daemon(Path(name), rank=1, config=config))
        try:
            for daemon in made:
                daemon.start()
            for daemon in made:
                daemon.wait_status(lambda status: status.state == "ready", "ready", 90.0)
            yield made
        finally:
            for daemon in made:
                daemon.close()


@pytest.fixture
def ask(group: tuple[Daemon, Daemon], say: Said) -> Said:
    """Run a verb on the group's configuration."""

    def call(*argv: str) -> tuple[int, str, str]:
        return say(*argv, config=group[0].directory / "wcache.toml")

    return call


def answers(out: str) -> list[Answer]:
    return msgspec.json.decode(out, type=list[Answer])


# --- fingerprint ------------------------------------------------------------------------------------------------------


def test_the_last_line_is_the_content_and_the_others_are_what_sha256sum_says(checkpoint: Path, say: Said) -> None:
    status, out, err = say("fingerprint", str(checkpoint))
    *files, content = out.splitlines()
    assert (status, err) == (0, "")
    assert len(content) == 64
    for line in files:
        digest, name = line.split("  ")
        if name.endswith(".safetensors"):
            assert digest == hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()


def test_another_directory_has_the_same_identity_and_a_twin_another(llama: Path, tmp_path: Path, say: Said) -> None:
    shutil.copytree(llama, tmp_path / "copy")
    tiny.twin(llama, tmp_path / "twin", "model.norm.weight")
    first, copy, twin = (
        say("fingerprint", str(d))[1].split()[-1] for d in (llama, tmp_path / "copy", tmp_path / "twin")
    )
    assert first == copy != twin


def test_deep_believes_no_name_and_ends_with_1_where_it_was_wrong(llama: Path, tmp_path: Path, say: Said) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("c" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in llama.iterdir():
        if file.suffix == ".safetensors":
            blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(blob)
        else:
            shutil.copy(file, snapshot)
    damaged = min(blobs.iterdir())
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    expected = say("fingerprint", str(llama))[1].split()[-1]
    assert say("fingerprint", str(snapshot))[1].split()[-1] == expected  # the name of a hub cache's blob is believed
    status, out, err = say("fingerprint", str(snapshot), "--deep")
    assert status == 1
    assert out.split()[-1] != expected
    assert "not what was believed" in err and "hint: " in err


def test_a_bad_checkpoint_is_one_line_with_its_reason(tmp_path: Path, say: Said) -> None:
    status, out, err = say("fingerprint", str(tmp_path / "nowhere"))
    assert (status, out) == (4, "")
    assert "no such directory" in err
    assert say("explain", str(tmp_path / "nowhere"))[0] == 4


def test_a_truncated_file_has_no_identity(truncated: Path, say: Said) -> None:
    status, out, err = say("fingerprint", str(truncated))
    assert (status, out) == (1, "")
    assert err == say("explain", str(truncated))[2] and min(truncated.glob("*.safetensors")).name in err


# --- doctor -----------------------------------------------------------------------------------------------------------


def findings(say: Said, short_dir: Path, **settings: object) -> dict[str, Finding]:
    """What doctor finds with this configuration, by name."""
    config = {"socket_dir": f"{short_dir}/run", "state_dir": f"{short_dir}/state", **settings}
    path = short_dir / "doctor.toml"
    path.write_text("".join(f'{key} = "{value}"\n' for key, value in config.items()))
    found = msgspec.json.decode(say("doctor", "--json", config=path)[1], type=list[Finding])
    return {finding.name: finding for finding in found}


def test_doctor_looks_into_the_model(truncated: Path, llama: Path, say: Said, short_dir: Path) -> None:
    assert findings(say, short_dir, model=llama)["model"].verdict == "ok"
    assert findings(say, short_dir, model="/etc")["model"].verdict == "failed"
    model = findings(say, short_dir, model=truncated)["model"]
    assert model.verdict == "failed" and min(truncated.glob("*.safetensors")).name in model.text


def test_doctor_finds_a_state_dir_that_cannot_be_written(say: Said, short_dir: Path) -> None:
    assert "state_dir" not in findings(say, short_dir)
    (short_dir / "file").touch()
    assert findings(say, short_dir, state_dir=short_dir / "file" / "state")["state_dir"].verdict == "failed"


def test_doctor_names_no_unit_where_there_are_none(say: Said, short_dir: Path) -> None:
    assert findings(say, short_dir)["rank 0"].hint == "wcache daemon --rank 0"


# --- explain ----------------------------------------------------------------------------------------------------------


def test_without_daemons_every_rank_is_a_miss_with_its_cost(llama: Path, say: Said) -> None:
    status, out, _ = say("explain", str(llama), "--tp", "2", "--json")
    assert status == 0
    found = answers(out)
    assert [(a.rank, a.hit, a.reason) for a in found] == [(0, None, "no_daemon"), (1, None, "no_daemon")]
    size = sum(t.nbytes for t in tiny.tensors_of(llama).values())
    for answer in found:
        assert answer.read_bytes is not None and answer.memory_bytes is not None
        assert size / 2 <= answer.read_bytes < 0.6 * size
        assert answer.read_bytes <= answer.memory_bytes < answer.read_bytes + 16384


def test_the_configured_model_is_a_hit_on_every_rank(group: tuple[Daemon, Daemon], ask: Said) -> None:
    status, out, err = ask("explain")
    assert (status, err) == (0, "")
    for rank, daemon in enumerate(group):
        assert f"rank {rank}: hit: shard {daemon.status().shards[0].fingerprint[:12]}" in out
        assert daemon.status().last_miss is None


def test_the_same_bytes_elsewhere_hit_and_a_twin_misses_on_its_content(llama: Path, tmp_path: Path, ask: Said) -> None:
    shutil.copytree(llama, tmp_path / "copy")
    assert all(a.hit is not None for a in answers(ask("explain", str(tmp_path / "copy"), "--json")[1]))
    twin = tiny.twin(llama, tmp_path / "twin", "model.norm.weight")
    for answer in answers(ask("explain", str(twin), "--json")[1]):
        assert answer.reason == "checkpoint_content"
        assert [d.field for d in answer.differences] == ["checkpoint.content"]


@pytest.mark.parametrize(
    ("options", "field", "asked"),
    [
        (["--tp", "1"], "layout.tp_size", 1),
        (["--dtype", "float16"], "layout.dtype", "float16"),
        (["--quantization", "fp8"], "layout.quantization.quant_method", "fp8"),
        (["--quantization", '{"quant_method": "awq", "bits": 4}'], "layout.quantization.bits", 4),
    ],
)
def test_an_option_that_differs_is_named_with_both_values(
    ask: Said, options: list[str], field: str, asked: object
) -> None:
    answer = answers(ask("explain", *options, "--json")[1])[0]
    assert (answer.hit, answer.reason) == (None, "layout")
    assert asked in [d.asked for d in answer.differences if d.field == field]
    assert answer.read_bytes is not None and answer.read_bytes > 0


def test_a_rank_outside_the_group_has_status_4(ask: Said) -> None:
    status, _, err = ask("explain", "--rank", "7")
    assert status == 4 and "rank 7 is not one of the group's 2 ranks" in err


def test_a_dimension_that_does_not_divide_is_told(llama: Path, say: Said) -> None:
    out = say("explain", str(llama), "--tp", "3")[1]
    assert "does not divide by tp_size 3" in out


def test_unknown_content_is_not_read_where_that_is_not_wanted(llama: Path, say: Said) -> None:
    answer = answers(say("explain", str(llama), "--no-hash", "--json")[1])[0]
    assert answer.content is None
    assert answer.hash_bytes == sum(file.stat().st_size for file in llama.glob("*.safetensors"))


def test_without_a_model_explain_says_what_to_give(say: Said) -> None:
    status, _, err = say("explain")
    assert status == 2
    assert "hint: wcache explain DIR" in err
