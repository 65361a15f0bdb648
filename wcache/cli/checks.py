# SPDX-License-Identifier: Apache-2.0
"""The checks behind `wcache doctor`. Each looks at one thing and changes nothing; none imports torch or a driver."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata

import msgspec

from wcache import __version__
from wcache.cli.context import Context
from wcache.cli.ranks import STOPPED, RankReport, look, look_at_units, shortfall, way_back
from wcache.config import Config, Loader, Scope
from wcache.errors import CheckpointError, WcacheError
from wcache.host import units
from wcache.host.units import FDSTORE_PRESERVE_VERSION, Unit
from wcache.model import BackendName, RankState
from wcache.weights.checkpoint import open_checkpoint, survey

MIN_SYSTEMD = 250  # the oldest the units are tested with is 252; ListenSequentialPacket, EXTEND_TIMEOUT_USEC, BARRIER
WANTED_FILES = 65536  # LimitNOFILE= of the unit
DRIVER_TIMEOUT_S = 20.0


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    verdict: Verdict
    text: str
    hint: str = ""


def examine(context: Context) -> Iterator[Finding]:
    """Every finding, in the order in which things depend on each other."""
    yield _ok("version", f"wcache {__version__}")
    checks: tuple[Callable[[Context], Iterator[Finding]], ...] = (
        _configuration, _state_dir, _systemd, _units, _ranks, _limits, _driver, _packages,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check(context)
        except WcacheError as e:
            yield _failed(check.__name__.removeprefix("_"), str(e), e.hint)


def _ok(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.OK, text=text)


def _warning(name: str, text: str, hint: str = "") -> Finding:
    return Finding(name=name, verdict=Verdict.WARNING, text=text, hint=hint)


def _failed(name: str, text: str, hint: str = "") -> Finding:
    return Finding(name=name, verdict=Verdict.FAILED, text=text, hint=hint)


def _configuration(context: Context) -> Iterator[Finding]:
    path = context.config_path
    config = context.config
    where = str(path) if path.exists() else f"{path} does not exist: the defaults"
    yield _ok("configuration", f"{where}; ranks {', '.join(map(str, config.ranks))}; backend {config.backend}")
    if config.model is None:
        yield _warning("model", "none is configured: ranks keep what engines publish, nothing is loaded at start")
    else:
        yield _model(config, config.model)


def _model(config: Config, model: str) -> Finding:
    """What `explain` and the loader would say of the directory: its index, and every header."""
    try:
        open_checkpoint(survey(model, revision=config.revision, allow_stale_index=config.allow_stale_index))
    except CheckpointError as e:
        return _failed("model", str(e), e.hint or "model = in wcache.toml")
    return _ok("model", model)


def _state_dir(context: Context) -> Iterator[Finding]:
    """Whether it can be written. Who is not root cannot tell for the system's daemons."""
    if context.manager is Scope.SYSTEM and os.geteuid() != 0:
        return
    path = context.state_dir
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = f"{there} cannot be written" if there.is_dir() else f"{there} is no directory"
        yield _failed("state_dir", f"{path}: {what}: digests cannot be kept", "state_dir = in wcache.toml")


def _systemd(_: Context) -> Iterator[Finding]:
    version = units.version()
    if version is None:
        yield _warning("systemd", "not here: daemons run in the foreground, and their weights end with them")
        return
    if version < MIN_SYSTEMD:
        yield _failed("systemd", f"version {version}; the units need {MIN_SYSTEMD} or newer")
    keeps = "keeps" if version >= FDSTORE_PRESERVE_VERSION else f"cannot keep (that is {FDSTORE_PRESERVE_VERSION})"
    yield _ok("systemd", f"version {version}: fd store over restart; {keeps} weights over stop and start")
    if not any(units.reachable(scope) for scope in Scope):
        yield _warning("manager", "no service manager runs here", "without one: wcache daemon --rank N, one per rank")


def _units(context: Context) -> Iterator[Finding]:
    manager = context.manager
    if manager is None:
        yield _warning("units", "no service manager here has wcache units", "scripts/install puts them in place")
        return
    seen = look_at_units(context, context.config.ranks)
    target = units.show(manager, [units.TARGET])[units.TARGET]
    for unit in (target, *seen.values()):
        yield from _unit(unit)
    if not any(f for unit in seen.values() for f in _unit(unit)):
        yield _ok("units", f"{len(seen)} and {units.TARGET} in the {manager} manager")


def _unit(unit: Unit) -> Iterator[Finding]:
    if not unit.exists:
        yield _failed(unit.name, f"LoadState={unit.load}", "scripts/install, then daemon-reload")
        return
    if unit.stale:
        yield _warning(unit.name, "changed on disk since the manager read it", "systemctl daemon-reload")
    if unit.rank is not None and unit.max_stored_fds == 0:
        hint = "FileDescriptorStoreMax= in the unit; the default is 0"
        yield _failed(unit.name, "its fd store is off: weights end with the daemon", hint)
    if unit.active == "failed":
        yield _failed(unit.name, f"failed ({unit.result})", "wcache logs; wcache start tries again")


def _ranks(context: Context) -> Iterator[Finding]:
    for rank in context.config.ranks:
        path = context.socket(rank)
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            yield _failed(f"rank {rank}", f"{path} is no socket", "it is not ours to remove; move it away")
    for report in look(context, context.config.ranks).ranks:
        name = f"rank {report.rank}"
        if report.ready and report.status is not None:
            lacks = shortfall(report.status)
            yield _warning(name, report.status.text, way_back(context)) if lacks else _ok(name, report.status.text)
            if report.unit is not None and not report.status.fd_store:
                yield _failed(name, "ready, but its weights are not in the fd store", "FileDescriptorStoreMax=")
        elif report.state in ("failed", "unresponsive", "denied", "unreachable"):
            yield _failed(name, f"{report.state}: {report.problem}", "wcache logs")
        else:
            text = f"{report.state}{': ' if report.problem else ''}{report.problem}"
            yield _warning(name, text, _way_to_ready(context, report))


def _way_to_ready(context: Context, report: RankReport) -> str:
    """What to do about a rank that is not ready, but has not failed."""
    if report.state == RankState.DRAINING:
        return way_back(context)
    if context.manager is not None:
        return "wcache start"
    return f"wcache daemon --rank {report.rank}" if report.state == STOPPED else "wcache status --watch"


def _limits(context: Context) -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{'unlimited' if files == resource.RLIM_INFINITY else files} open files for engines started from here"
    if files != resource.RLIM_INFINITY and files < WANTED_FILES:
        yield _warning("open files", text, f"ulimit -n {WANTED_FILES}; an engine takes one per 2 GiB segment")
    else:
        yield _ok("open files", text)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if context.config.backend is BackendName.CUDA and locked != resource.RLIM_INFINITY:
        text = f"{locked >> 20} MiB for a daemon started from here; staging buffers are pinned"
        yield _warning("locked memory", text, "LimitMEMLOCK=infinity (the unit has it), or ulimit -l unlimited")


def _driver(context: Context) -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        if context.config.backend is BackendName.CUDA:
            yield _failed("driver", 'backend = "cuda", but there is no nvidia-smi here')
        return
    command = [program, "--query-gpu=uuid,persistence_mode,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        yield _failed("driver", f"nvidia-smi: {e}")
        return
    if done.returncode != 0:
        yield _failed("driver", f"nvidia-smi: {(done.stdout or done.stderr).strip().splitlines()[:1]}")
        return
    for line in done.stdout.splitlines():
        yield _gpu(*[part.strip() for part in line.split(",")])


def _gpu(uuid: str, persistence: str, version: str) -> Finding:
    if persistence == "Enabled":
        return _ok(uuid, f"driver {version}, persistence mode on")
    hint = "nvidia-persistenced, or nvidia-smi -pm 1"
    return _warning(uuid, f"driver {version}, persistence mode off: memory no process holds may be dropped", hint)


def _packages(context: Context) -> Iterator[Finding]:
    wanted = {"torch": True, "vllm": context.config.loader is Loader.VLLM}
    wanted |= {"transformers": context.config.loader is Loader.TRANSFORMERS}
    wanted |= {"cuda-bindings": context.config.backend is BackendName.CUDA}
    for name, needed in wanted.items():
        version = _version(name)
        if version is not None:
            yield _ok(name, version)
        elif needed:
            yield _failed(
                name, "not installed, but the configuration needs it", "pip install 'wcache[cuda,vllm,transformers]'"
            )
    if (rival := _version("vllm-ipc-cache")) is not None:
        text = f"{rival} is installed: it silently replaces vLLM's built-in `ipc_cache` load format"
        yield _warning("vllm-ipc-cache", text, "pip uninstall vllm-ipc-cache, or VLLM_PLUGINS without it")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
