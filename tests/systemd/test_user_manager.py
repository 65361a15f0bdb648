# SPDX-License-Identifier: Apache-2.0
"""The same units in a user's service manager, of a user without any privileges."""

from __future__ import annotations

import pytest
from private_systemd import Manager

from wcache.model import RankState

pytestmark = pytest.mark.systemd


def test_a_users_rank_loads_survives_its_daemon_and_is_found_by_the_command_line(user: Manager) -> None:
    user.cli("start")
    assert user.show("wcache@0.service", "ActiveState") == "active"
    status = user.status(0)
    assert status.state is RankState.READY
    assert "1 of 1 rank ready" in user.cli("status").stdout
    with user.engine(0) as before:
        user.kill(0)
        assert user.status(0).shards[0].restored
        with user.engine(0) as after:
            assert after.inodes == before.inodes
    user.cli("restart-group")
    assert user.status(0).shards[0].restored
    inode = before.inodes[0]
    assert user.host.holders(inode)
    user.cli("stop")
    assert not user.host.holders(inode)
    assert not user.socket(0).exists()


def test_a_users_daemon_keeps_its_files_with_the_user(user: Manager) -> None:
    user.cli("start")
    home = f"/run/home/{user.uid}"
    assert user.host.path(f"{home}/.local/state/wcache").is_dir()
    assert user.host.path(f"{home}/.cache/wcache").is_dir()
    assert not list(user.host.path("/run").glob("wcache/*"))


def test_uninstall_refuses_while_ranks_run_and_leaves_only_configuration_after(user: Manager) -> None:
    install = (*user.installer, "--user", "--uninstall")
    user.systemctl("start", "wcache@0.socket")
    refused = user.run(*install, check=False)
    assert refused.returncode == 1
    assert "wcache@0.socket still run" in refused.stderr
    user.systemctl("stop", "wcache@0.socket")
    user.run(*install, "--reload")
    left = user.run("find", user.units.parent.parent, "-type", "f", "-o", "-type", "l").stdout.split()
    assert left == [str(user.config)]
