# SPDX-License-Identifier: Apache-2.0
"""Values that cannot be meant are refused with file and key; empty fingerprints name nothing; failures in one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from wcache import config
from wcache.daemon.loader import unstamped
from wcache.daemon.loading import _headline
from wcache.daemon.state import State
from wcache.errors import ConfigError, NoSuchShard
from wcache.model import CPU

INSTALL = Path(__file__).parents[2] / "scripts/install"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[timeouts]\nstate_s = nan", ["timeouts.state_s", "nan", "positive"]),
        ("[timeouts]\nstall_s = inf", ["timeouts.stall_s", "inf", "finite"]),
        ("load_slots = -1", ["load_slots is -1"]),
        ("allowed_uids = [0, -1]", ["allowed_uids", "-1"]),
        ("allowed_gids = [-2]", ["allowed_gids", "-2"]),
        ("publish_uids = [-1]", ["publish_uids", "-1"]),
        ('dtype = "bflot16"', ["dtype 'bflot16'", "did you mean bfloat16"]),
        ('dtype = ""', ["dtype ''", "auto"]),
        ('dtype = "half"', ["dtype 'half'"]),
        ('model = ""', ["model is empty"]),
        ('model = " "', ["model is empty"]),
        ('revision = ""', ["revision is empty"]),
        ('plan = ""', ["plan is empty"]),
        ('socket_dir = "run"', ["socket_dir 'run'", "absolute"]),
        ('state_dir = ""', ["state_dir ''", "absolute"]),
        ('loader = "vlm"', ["loader is 'vlm'", "safetensors, vllm, transformers"]),
        ('mode = "zerocopy"', ["mode is 'zerocopy'", "zero_copy, copy"]),
        ("identity = 3", ["identity is 3", "content, stat, trust"]),
        ("[parallel]\ntp_size = 0", ["parallel.tp_size is 0"]),
        ("[parallel]\ntp_size = 2\nep_size = 3", ["parallel.ep_size 3 does not divide"]),
        ('plan = "/nowhere/plan.toml"', ["plan /nowhere/plan.toml", "no such file"]),
        ('plan = "mixtrl"', ["plan 'mixtrl'", "mixtral"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_file_and_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "wcache.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        config.load(path)
    assert str(e.value).startswith(f"{path}: ")
    for word in words:
        assert word in str(e.value)


@pytest.mark.parametrize(
    "text",
    [
        'model = "meta-llama/Llama-3.1-8B-Instruct"\nrevision = "main"\ndtype = "bfloat16"',
        'loader = "vllm"\ndtype = "half"',
        "load_slots = 0\nallowed_uids = [0]\nallowed_gids = [0]",
        'plan = "mixtral-experts"',
        'plan = "{here}/plan.toml"',
        'socket_dir = "{here}/s"\nstate_dir = "{here}/t"',
    ],
)
def test_what_is_documented_is_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.toml").touch()
    path = tmp_path / "wcache.toml"
    path.write_text(text.replace("{here}", str(tmp_path)))
    config.load(path)


def test_the_installer_names_the_file_that_does_not_parse(tmp_path: Path) -> None:
    given = tmp_path / "c.toml"
    given.write_text("ranks = [")
    command = [INSTALL, "--destdir", tmp_path / "d", "--wcache", "/bin/true", "--config", given]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("install: /etc/wcache/wcache.toml: ")


def test_an_empty_fingerprint_does_not_mean_every_shard() -> None:
    state = State(model=None, device=CPU, next_generation=1)
    state.restored([], verify=False)
    assert state.evict(None, force=False) == []
    with pytest.raises(NoSuchShard, match="an empty fingerprint"):
        state.evict("", force=True)


END = "the loader ended with exit status 1:\n  "


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("reading\n  b.safetensors: no such file (checkpoint)\n  hint: finish it",
         "b.safetensors: no such file; hint: finish it"),
        ("reading\n  b.safetensors: no such file (checkpoint)", "b.safetensors: no such file"),
        ("no such file (checkpoint)\n  hint: finish it\n  [W] NCCL goes down", "no such file; hint: finish it"),
        ("hint: finish it", "hint: finish it"),
    ],
)  # fmt: skip
def test_a_failed_load_is_told_by_the_loaders_error_not_by_its_hint(words: str, line: str) -> None:
    assert _headline(END + words) == f"Weight load failed: {END.splitlines()[0]} {line}"


def test_the_loaders_own_stamps_are_taken_off() -> None:
    line = "2026-11-30 03:54:47,927 ERROR hint: finish the download"
    assert unstamped(line) == (logging.ERROR, "hint: finish the download")
    assert unstamped("2026-11-30 is a date") == (logging.INFO, "2026-11-30 is a date")
