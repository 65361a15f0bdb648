# SPDX-License-Identifier: Apache-2.0
"""The one configuration file, `wcache.toml`: what this host's ranks keep resident and who may use it.

Read by the daemon, the loader child, the CLI and (for defaults only) by engines. `/etc/wcache/wcache.toml` for the
system manager, `$XDG_CONFIG_HOME/wcache/wcache.toml` for a user's; `WCACHE_CONFIG` names another file.
An unknown key is an error that names it and the nearest valid one; nothing is ignored in silence.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from wcache.errors import ConfigError, NoSuchRank
from wcache.model import CPU, DTYPE_BITS, BackendName, IdentityPolicy, Mode, Placement, Sizes

CONNECT_TIMEOUT_S = 5.0
STATE_TIMEOUT_S = 300.0
_VLLM_DTYPES = ("half", "float")  # vLLM's own words for two of them


class Scope(StrEnum):
    """Which service manager, and with it which configuration, runtime and state directories."""

    SYSTEM = "system"
    USER = "user"


class Loader(StrEnum):
    SAFETENSORS = "safetensors"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.tp_size, self.pp_size, self.dp_size, self.ep_size)


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds. `stall_s`: a load without progress for this long is no longer vouched for to systemd."""

    connect_s: float = CONNECT_TIMEOUT_S
    state_s: float = STATE_TIMEOUT_S
    handshake_s: float = 2.0
    stall_s: float = 60.0
    drain_s: float = 60.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key of wcache.toml with its default.

    `model`: checkpoint directory; None: ranks hold what engines publish. `ranks`: the ranks of this host.
    `devices`: one per rank, in the order of `ranks`: "cpu" or a GPU's UUID; empty: "cpu" on the host backend, the
    visible GPU whose position is the rank's on cuda. `plan`: a sharding plan (TOML) for an architecture that has none
    built in. `allowed_uids`/`allowed_gids` may attach; `publish_uids` may also publish; root and the daemon's own
    uid always may. `allow_stale_index`: the safetensors loader ignores an index of other files if those that are here
    are a complete set. `load_slots`: loads that may run at once on this host (0: one per rank). `engine_args`: handed
    to the vllm and transformers loaders as they are.
    """

    model: str | None = None
    revision: str | None = None
    loader: Loader = Loader.SAFETENSORS
    backend: BackendName = BackendName.HOST
    dtype: str = "auto"
    mode: Mode = Mode.ZERO_COPY
    identity: IdentityPolicy = IdentityPolicy.CONTENT
    plan: str | None = None
    ranks: tuple[int, ...] = (0,)
    devices: tuple[str, ...] = ()
    parallel: Parallel = Parallel()
    socket_dir: str | None = None
    state_dir: str | None = None
    allowed_uids: tuple[int, ...] = ()
    allowed_gids: tuple[int, ...] = ()
    publish_uids: tuple[int, ...] = ()
    load_slots: int = 0
    keep_page_cache: bool = True
    allow_stale_index: bool = False
    timeouts: Timeouts = Timeouts()
    engine_args: dict[str, Any] = {}

    def device(self, rank: int) -> str | None:
        """The device of one of this host's ranks; None: the loader picks it (cuda without `devices`)."""
        if rank not in self.ranks:
            raise NoSuchRank(f"rank {rank} is not one of this host's ranks {list(self.ranks)}")
        if self.devices:
            return self.devices[self.ranks.index(rank)]
        return CPU if self.backend is BackendName.HOST else None

    def placement(self, rank: int) -> Placement:
        return Placement(self.parallel.sizes, rank)


def default_scope() -> Scope:
    return Scope.SYSTEM if os.geteuid() == 0 else Scope.USER


def config_path(scope: Scope) -> Path:
    """The file that is read, whether it exists or not."""
    if override := os.environ.get("WCACHE_CONFIG"):
        return Path(override)
    if scope is Scope.SYSTEM:
        return Path("/etc/wcache/wcache.toml")
    return _user_dir("XDG_CONFIG_HOME", ".config") / "wcache" / "wcache.toml"


def runtime_dir(scope: Scope) -> Path:
    """Where sockets live: systemd's %t/wcache."""
    if scope is Scope.SYSTEM:
        return Path("/run/wcache")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "wcache"


def state_dir(scope: Scope) -> Path:
    """Where the digest store lives: systemd's %S/wcache."""
    if override := os.environ.get("WCACHE_STATE_DIR"):
        return Path(override)
    if scope is Scope.SYSTEM:
        return Path("/var/lib/wcache")
    return _user_dir("XDG_STATE_HOME", ".local/state") / "wcache"


def state_dir_of(config: Config, scope: Scope) -> Path:
    """The state directory that a configuration names, else the scope's."""
    return Path(config.state_dir) if config.state_dir is not None else state_dir(scope)


def _user_dir(variable: str, default: str) -> Path:
    if value := os.environ.get(variable):
        return Path(value)
    home = os.environ.get("HOME")
    if not home:
        import pwd

        home = pwd.getpwuid(os.getuid()).pw_dir
    return Path(home) / default


def load(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError naming the file, the key and the nearest valid one."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="scripts/install puts one in place") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: {e}") from e
    config = parse(text, str(path))
    _check_plan(config, str(path))
    return config


def load_or_default(scope: Scope) -> Config:
    """The scope's configuration, or the defaults if it has no file. A file named by WCACHE_CONFIG must exist."""
    path = config_path(scope)
    if not path.exists() and "WCACHE_CONFIG" not in os.environ:
        return Config()
    return load(path)


def parse(text: str, name: str) -> Config:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"{name}: {e}") from e
    _refuse_unknown(document, Config, name, "")
    try:
        config = msgspec.convert(document, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{name}: {e}") from e
    _check(config, name)
    _check_values(config, name)
    return config


def _refuse_unknown(document: dict[str, Any], struct: type[msgspec.Struct], name: str, prefix: str) -> None:
    fields = {f.name: f.type for f in msgspec.structs.fields(struct)}
    for key, value in document.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=2, cutoff=0.5)
            meant = f"; did you mean {' or '.join(prefix + n for n in near)}?" if near else f"; valid: {sorted(fields)}"
            raise ConfigError(f"{name}: unknown key {prefix}{key}{meant}")
        nested = fields[key]
        if isinstance(nested, type) and issubclass(nested, msgspec.Struct) and isinstance(value, dict):
            _refuse_unknown(value, nested, name, f"{prefix}{key}.")
        if isinstance(nested, type) and issubclass(nested, StrEnum) and value not in list(nested):
            raise ConfigError(f"{name}: {prefix}{key} is {value!r}; valid: {', '.join(nested)}")


def _check(config: Config, name: str) -> None:
    try:
        sizes = config.parallel.sizes
    except ConfigError as e:
        raise ConfigError(f"{name}: parallel.{e}") from None
    if len(set(config.ranks)) != len(config.ranks):
        raise ConfigError(f"{name}: ranks {list(config.ranks)} name a rank twice")
    for rank in config.ranks:
        if not 0 <= rank < sizes.world:
            raise ConfigError(f"{name}: rank {rank} is outside the group of {sizes.world} ranks (parallel sizes)")
    if config.devices and len(config.devices) != len(config.ranks):
        raise ConfigError(f"{name}: {len(config.devices)} devices for {len(config.ranks)} ranks")
    for device in config.devices:
        if config.backend is BackendName.CUDA and not device.startswith(("GPU-", "MIG-")):
            raise ConfigError(f"{name}: device {device!r} is no GPU UUID", hint="nvidia-smi -L prints them")
        if config.backend is BackendName.HOST and device != CPU:
            raise ConfigError(f"{name}: device {device!r} on the host backend; it must be {CPU!r}")
    if config.loader is not Loader.SAFETENSORS and config.plan is not None:
        raise ConfigError(f"{name}: plan is for the safetensors loader; this one is {config.loader}")
    for field in msgspec.structs.fields(Timeouts):
        seconds = getattr(config.timeouts, field.name)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"{name}: timeouts.{field.name} is {seconds:g}; it must be positive and finite")


def _check_values(config: Config, name: str) -> None:
    """Each key for itself."""
    for key in ("model", "revision", "plan"):
        value = getattr(config, key)
        if value is not None and not value.strip():
            raise ConfigError(f"{name}: {key} is empty", hint="leave the key out for none")
    for key in ("socket_dir", "state_dir"):
        value = getattr(config, key)
        if value is not None and not Path(value).is_absolute():
            raise ConfigError(f"{name}: {key} {value!r} is not an absolute path")
    for key in ("allowed_uids", "allowed_gids", "publish_uids"):
        if wrong := [number for number in getattr(config, key) if number < 0]:
            raise ConfigError(f"{name}: {key} has {wrong[0]}; an id is 0 or more")
    if config.load_slots < 0:
        raise ConfigError(f"{name}: load_slots is {config.load_slots}; it must be 0 (no limit) or more")
    known = ["auto", *DTYPE_BITS, *(_VLLM_DTYPES if config.loader is Loader.VLLM else ())]
    if config.dtype not in known:
        near = difflib.get_close_matches(config.dtype, known, n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}?" if near else f"valid: {', '.join(known)}"
        raise ConfigError(f"{name}: dtype {config.dtype!r} is unknown; {meant}")


def _check_plan(config: Config, name: str) -> None:
    """Is there such a plan? Whether it parses and fits is the loader's to say; a relative path is its to find."""
    if config.plan is None:
        return
    path = Path(config.plan)
    if path.is_absolute():
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{name}: plan {path}: no such file") from None
        except OSError:  # not ours to read: an engine of another user looks here as well
            return
    elif len(path.parts) == 1 and not path.suffix and not path.exists():
        plans = sorted(p.stem for p in Path(__file__).with_name("weights").joinpath("plans").glob("*.toml"))
        if config.plan not in plans:
            raise ConfigError(f"{name}: plan {config.plan!r} is neither a file nor one of {', '.join(plans)}")
