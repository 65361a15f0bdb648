# SPDX-License-Identifier: Apache-2.0
"""wcache.toml: everything in it is checked, nothing is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from wcache import config
from wcache.config import Config, Scope
from wcache.errors import ConfigError, NoSuchRank
from wcache.model import BackendName, IdentityPolicy, Mode


def test_a_full_file_is_read_into_typed_values() -> None:
    c = config.parse(
        'model = "/m"\nbackend = "cuda"\nmode = "copy"\nidentity = "stat"\nranks = [0, 1]\n'
        'devices = ["GPU-a", "MIG-b"]\n[parallel]\ntp_size = 2\n[timeouts]\nconnect_s = 2\n',
        "t",
    )
    assert (c.model, c.backend, c.mode, c.identity) == ("/m", BackendName.CUDA, Mode.COPY, IdentityPolicy.STAT)
    assert c.device(1) == "MIG-b"
    assert c.placement(1).tp_rank == 1
    assert c.timeouts.connect_s == 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('modle = "/m"', ["t:", "modle", "did you mean", "model"]),
        ("[parallel]\ntp_sise = 2", ["parallel.tp_sise", "parallel.tp_size"]),
        ("qqqq = 1", ["qqqq", "valid:", "socket_dir"]),
        ('backend = "tpu"', ["backend", "tpu"]),
        ("ranks = [0, 0]", ["twice"]),
        ("ranks = [0, 1]", ["rank 1", "1 ranks"]),
        ('devices = ["cpu", "cpu"]', ["2 devices for 1 ranks"]),
        ('backend = "cuda"\ndevices = ["0"]', ["'0'", "UUID"]),
        ('devices = ["GPU-x"]', ["GPU-x", "host"]),
        ("[parallel]\ntp_size = 0", ["tp_size is 0"]),
        ("[parallel]\ntp_size = 2\nep_size = 3\n", ["ep_size 3"]),
        ("[timeouts]\nconnect_s = 0", ["connect_s", "positive"]),
        ('loader = "vllm"\nplan = "p.toml"', ["plan", "safetensors"]),
        ("model = ", ["t:"]),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_reason(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        config.parse(text, "t")
    for word in words:
        assert word in str(e.value)
    assert e.value.exit_status == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        config.load(tmp_path / "none.toml")


def test_a_host_without_a_file_gets_the_defaults_but_a_named_file_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("WCACHE_CONFIG", raising=False)
    assert config.load_or_default(Scope.USER) == Config()
    monkeypatch.setenv("WCACHE_CONFIG", str(tmp_path / "x.toml"))
    with pytest.raises(ConfigError):
        config.load_or_default(Scope.USER)


def test_a_rank_of_another_host_is_no_rank_of_ours() -> None:
    with pytest.raises(NoSuchRank, match="rank 3"):
        Config().device(3)


def test_user_directories_are_found_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "WCACHE_CONFIG", "WCACHE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert config.config_path(Scope.USER).is_absolute()
    assert config.state_dir(Scope.USER).is_absolute()
