# SPDX-License-Identifier: Apache-2.0
"""The unit files as text: what systemd's own check says, and what it does not see (a unit that hides the GPUs)."""

from __future__ import annotations

import importlib.resources
import subprocess
from pathlib import Path

import pytest

import wcache

REPO = Path(__file__).resolve().parents[2]
INSTALL = REPO / "scripts" / "install"
PACKAGED = Path(str(importlib.resources.files(wcache))) / "units"
UNITS = PACKAGED if PACKAGED.is_dir() else REPO / "units"

# Directives with which daemon or loader children cannot see a GPU, compile, or meet their peers.
HIDES_GPUS = ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock")
BREAKS_JITS = ("MemoryDenyWriteExecute", "SystemCallFilter", "SystemCallArchitectures", "NoExecPaths")
HIDES_PEERS = ("PrivateTmp", "PrivateNetwork", "PrivateIPC", "IPAddressDeny", "ProtectProc", "RestrictNamespaces")
# In a user manager these imply a user namespace, where engines of other users lose their identity.
NEEDS_MOUNT_NAMESPACE = ("ProtectSystem", "ProtectHome", "PrivateMounts", "ReadOnlyPaths", "InaccessiblePaths",
                         "ProtectKernelTunables", "ProtectControlGroups", "ProtectKernelLogs", "BindPaths")  # fmt: skip
NEEDS_PRIVILEGES = ("User", "Group", "CapabilityBoundingSet", "AmbientCapabilities", "DynamicUser", "OOMScoreAdjust")


def directives(name: str) -> dict[str, list[str]]:
    """Every directive of a unit file with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if "=" in line and not line.startswith(("#", ";", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", ["wcache@.service", "wcache-system.conf", "wcache-keep.conf"])
def test_no_directive_hides_a_gpu_breaks_a_jit_or_hides_a_peer(name: str) -> None:
    assert not set(directives(name)) & {*HIDES_GPUS, *BREAKS_JITS, *HIDES_PEERS}


def test_the_service_itself_asks_for_nothing_that_a_user_manager_cannot_give() -> None:
    assert not set(directives("wcache@.service")) & {*NEEDS_MOUNT_NAMESPACE, *NEEDS_PRIVILEGES}


def test_home_directories_stay_readable_for_checkpoints() -> None:
    assert directives("wcache-system.conf")["ProtectHome"] == ["read-only"]


def test_the_fd_store_is_on_and_a_plain_stop_empties_it() -> None:
    service = directives("wcache@.service")
    assert int(service["FileDescriptorStoreMax"][0]) >= 1000
    assert "FileDescriptorStorePreserve" not in service
    assert directives("wcache-keep.conf") == {"FileDescriptorStorePreserve": ["yes"]}


def test_the_socket_is_private_from_its_first_moment_and_removed_on_stop() -> None:
    socket = directives("wcache@.socket")
    assert socket["SocketMode"] == ["0600"]
    assert socket["RemoveOnStop"] == ["yes"]
    assert socket["ListenSequentialPacket"] == ["%t/wcache/rank-%i.sock"]


def test_every_cache_of_a_loader_has_a_place_without_a_home() -> None:
    variables = " ".join(directives("wcache@.service")["Environment"] + directives("wcache-system.conf")["Environment"])
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"):
        assert f"{name}=%C/wcache" in variables


@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/someone/.config")
    install("--destdir", tmp_path, "--wcache", "/bin/true", *(["--user"] if scope == "user" else []))
    there = tmp_path / ("etc/systemd/system" if scope == "system" else "home/someone/.config/systemd/user")
    units = [there / name for name in ("wcache.target", "wcache.slice", "wcache@0.service", "wcache@0.socket")]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- scripts/install --------------------------------------------------------------------------------------------------


def install(*arguments: str | Path) -> str:
    done = subprocess.run([INSTALL, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def tree(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_symlink() or p.is_file()}


def test_install_puts_units_configuration_and_enablement_in_place(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("ranks = [2, 3]\n[parallel]\ntp_size = 4\n")
    install("--destdir", tmp_path / "d", "--wcache", "/opt/wcache/bin/wcache", "--config", config)
    units = tmp_path / "d/etc/systemd/system"
    assert tree(tmp_path / "d") == {
        "etc/wcache/wcache.toml",
        "etc/systemd/system/wcache@.service",
        "etc/systemd/system/wcache@.service.d/10-system.conf",
        "etc/systemd/system/wcache@.socket",
        "etc/systemd/system/wcache.target",
        "etc/systemd/system/wcache.slice",
        "etc/systemd/system/default.target.wants/wcache.target",
        "etc/systemd/system/wcache.target.wants/wcache@2.service",
        "etc/systemd/system/wcache.target.wants/wcache@3.service",
    }
    assert "ExecStart=/opt/wcache/bin/wcache daemon --rank %i\n" in (units / "wcache@.service").read_text()
    assert "@WCACHE@" not in (units / "wcache@.service").read_text()
    link = units / "wcache.target.wants/wcache@2.service"
    assert str(link.readlink()) == "/etc/systemd/system/wcache@.service"


def test_install_again_keeps_the_configuration_and_follows_its_ranks(tmp_path: Path) -> None:
    install("--destdir", tmp_path, "--wcache", "/bin/true")
    config = tmp_path / "etc/wcache/wcache.toml"
    config.write_text("ranks = [1]\n[parallel]\ntp_size = 2\n")
    said = install("--destdir", tmp_path, "--wcache", "/bin/true")
    assert config.read_text().startswith("ranks = [1]")
    assert f"keep    {config}" in said
    wants = tmp_path / "etc/systemd/system/wcache.target.wants"
    assert [p.name for p in wants.iterdir()] == ["wcache@1.service"]


def test_uninstall_takes_out_what_install_put_in_but_no_configuration_and_no_drop_in_of_the_operator(
    tmp_path: Path,
) -> None:
    install("--destdir", tmp_path, "--wcache", "/bin/true", "--keep-over-stop")
    mine = tmp_path / "etc/systemd/system/wcache@.service.d/99-mine.conf"
    mine.write_text("[Service]\nTimeoutStartSec=10min\n")
    install("--destdir", tmp_path, "--uninstall")
    kept = {"etc/wcache/wcache.toml", "etc/systemd/system/wcache@.service.d/99-mine.conf"}
    assert tree(tmp_path) == kept


def test_a_dry_run_says_the_same_and_does_nothing(tmp_path: Path) -> None:
    said = install("--destdir", tmp_path, "--wcache", "/bin/true", "--dry-run")
    assert f"write   {tmp_path}/etc/systemd/system/wcache@.service\n" in said
    assert not tree(tmp_path)


def test_the_default_configuration_is_valid_as_it_is_and_with_every_key_uncommented(tmp_path: Path) -> None:
    from wcache.config import Config, parse

    install("--destdir", tmp_path, "--wcache", "/bin/true")
    text = (tmp_path / "etc/wcache/wcache.toml").read_text()
    assert parse(text, "default") == Config()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith(("# ", "ranks"))]
    keys = "\n".join(line for line in lines if line.startswith("[") or " = " in line.partition("#")[0])
    parsed = parse(keys.replace('plan = "/etc/wcache/plan.toml"', ""), "uncommented")
    assert parsed.model == "/srv/models/Llama-3.1-8B-Instruct"
    assert {*Config.__struct_fields__} - {"socket_dir", "state_dir"} <= {
        word for line in lines for word in line.replace("[", " ").replace("]", " ").split()
    }


@pytest.mark.parametrize("bad", ["ranks = [-1]", "ranks = 3", "ranks = ["])
def test_a_configuration_without_usable_ranks_is_refused_before_anything_is_enabled(tmp_path: Path, bad: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(bad)
    command = [INSTALL, "--destdir", tmp_path / "d", "--wcache", "/bin/true", "--config", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("install: ")
    assert "wcache.target.wants" not in str(tree(tmp_path / "d"))


@pytest.mark.parametrize("path", ["wcache", "/opt/my programs/wcache", "/opt/100%/wcache"])
def test_a_program_path_that_a_unit_cannot_hold_is_refused(tmp_path: Path, path: str) -> None:
    command = [INSTALL, "--destdir", tmp_path, "--wcache", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, tree(tmp_path)) == (1, set())
