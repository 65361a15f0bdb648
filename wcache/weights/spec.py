# SPDX-License-Identifier: Apache-2.0
"""The digest of a preload configuration: what besides the checkpoint decides the shard that a rank's loader makes.

Written into the manifest by the loader, compared by a restarted daemon: same spec and same content means that what
was restored is what would be loaded. Versions are read from package metadata; nothing is imported.
"""

from __future__ import annotations

import hashlib
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from wcache.config import Config, Loader
from wcache.errors import ConfigError, FingerprintError
from wcache.weights.fingerprint import digest

_PACKAGES = {
    Loader.SAFETENSORS: ("wcache",),
    Loader.TRANSFORMERS: ("wcache", "torch", "transformers"),
    Loader.VLLM: ("wcache", "torch", "vllm"),
}
# Where vLLM keeps files and what it reports; they decide no tensor.
_NO_LAYOUT = ("_ROOT", "_DIR", "_PATH", "_LOGGING_LEVEL", "_USAGE_STATS", "_HOST_IP", "_PORT")


def preload_spec(config: Config, rank: int) -> str:
    """Hex SHA-256. Raises ConfigError for a plan that cannot be read or an engine argument without canonical form."""
    try:
        return digest(
            {
                "loader": str(config.loader),
                "backend": str(config.backend),
                "device": config.device(rank),
                "rank": rank,
                "dtype": config.dtype,
                "revision": config.revision,
                "parallel": {name: getattr(config.parallel, name) for name in config.parallel.__struct_fields__},
                "plan": _plan(config),
                "engine_args": config.engine_args,
                "versions": {name: _version(name) for name in _PACKAGES[config.loader]},
                "environment": _environment(config.loader),
            }
        )
    except FingerprintError as e:
        raise ConfigError(f"engine_args: {e}") from e


def _plan(config: Config) -> str | None:
    if config.plan is None:
        return None
    try:
        return hashlib.sha256(Path(config.plan).read_bytes()).hexdigest()
    except OSError as e:
        raise ConfigError(f"plan {config.plan}: {e.strerror}") from e


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment(loader: Loader) -> dict[str, Any]:
    if loader is not Loader.VLLM:
        return {}
    return {k: v for k, v in os.environ.items() if k.startswith("VLLM_") and not k.endswith(_NO_LAYOUT)}
