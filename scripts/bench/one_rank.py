# SPDX-License-Identifier: Apache-2.0
"""A rank's daemon in the foreground, for benchmarks of a single engine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 30.0


@contextmanager
def daemon(root: Path, *lines: str) -> Iterator[Path]:
    """Rank 0 without a model, below `root`; `lines`: more of its wcache.toml, which is in `root`. Yields its socket."""
    (root / "s").mkdir(mode=0o700)
    socket, config = root / "s" / "rank-0.sock", root / "wcache.toml"
    config.write_text("\n".join([f'socket_dir = "{root / "s"}"', f'state_dir = "{root / "state"}"', *lines, ""]))
    with (root / "daemon.log").open("w") as log:
        command = [sys.executable, "-m", "wcache.daemon", "--rank", "0", "--config", str(config)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not come up:\n{(root / 'daemon.log').read_text()}")
            time.sleep(0.01)
        yield socket
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)
