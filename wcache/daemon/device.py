# SPDX-License-Identifier: Apache-2.0
"""A GPU's device node, held open so that the driver keeps its state while only descriptors of memory are left.

Runs in the daemon; opening `/dev/nvidiaN` makes no CUDA context. nvidia-persistenced does the same for a whole host.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from wcache.host.fds import OwnedFd

log = logging.getLogger(__name__)

_GPUS = Path("/proc/driver/nvidia/gpus")


def open_device(uuid: str, gpus: Path = _GPUS) -> OwnedFd | None:
    """The node of the GPU with this UUID, opened; None if it cannot be found or opened, which is worth a warning."""
    minor = _minor(uuid, gpus)
    if minor is None:
        log.warning("no device node known for %s: is nvidia-persistenced running?", uuid)
        return None
    try:
        return OwnedFd(os.open(f"/dev/nvidia{minor}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as e:
        log.warning("open /dev/nvidia%d: %s", minor, e.strerror)
        return None


def _minor(uuid: str, gpus: Path) -> int | None:
    """From /proc/driver/nvidia/gpus/*/information; a MIG instance is on a GPU whose UUID it does not tell."""
    if not gpus.is_dir():
        return None
    for information in sorted(gpus.glob("*/information")):
        values = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in values.items()}
        if fields.get("GPU UUID") == uuid and fields.get("Device Minor", "").isdigit():
            return int(fields["Device Minor"])
    return None
