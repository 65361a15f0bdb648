# SPDX-License-Identifier: Apache-2.0
"""What `--model-loader-extra-config` may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from wcache.engine.vllm.options import Options, parse
from wcache.errors import ConfigError
from wcache.model import IdentityPolicy, Mode


@pytest.fixture(autouse=True)
def no_host_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This machine's own wcache.toml does not matter here; returns the one that does."""
    path = tmp_path / "wcache.toml"
    path.write_text("")
    monkeypatch.setenv("WCACHE_CONFIG", str(path))
    return path


def test_nothing_said_means_the_documented_defaults() -> None:
    assert parse({}) == Options(
        mode=Mode.ZERO_COPY, fallback=True, publish=True, connect_timeout_s=5.0, state_timeout_s=300.0
    )


def test_an_unknown_key_is_refused_and_the_nearest_one_named() -> None:
    with pytest.raises(ConfigError, match="unknown key 'fallbak'; did you mean fallback"):
        parse({"fallbak": False})


@pytest.mark.parametrize(
    "extra",
    [
        {"mode": "zero-copy"},
        {"fallback": "yes"},
        {"connect_timeout_s": 0},
        {"state_timeout_s": -1},
        {"identity": "name"},
        {"socket_dir": "/a", "socket_path": "/b"},
        ["mode"],
    ],
)
def test_a_wrong_value_is_refused(extra: object) -> None:
    with pytest.raises(ConfigError, match="model-loader-extra-config"):
        parse(extra)


def test_the_hosts_configuration_gives_defaults_and_the_engine_may_differ(no_host_config: Path) -> None:
    no_host_config.write_text('socket_dir = "/run/x"\nidentity = "stat"\nmode = "copy"\n')
    said = parse({"mode": "zero_copy"})
    assert (said.mode, said.identity, said.socket(3)) == (
        Mode.ZERO_COPY,
        IdentityPolicy.STAT,
        Path("/run/x/rank-3.sock"),
    )


def test_a_socket_path_names_the_rank_itself() -> None:
    assert parse({"socket_path": "/run/x/other.sock"}).socket(7) == Path("/run/x/other.sock")
