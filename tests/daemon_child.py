# SPDX-License-Identifier: Apache-2.0
"""Becomes a daemon the way systemd starts one: `daemon_child.py JSON`, descriptors at 3 and up, LISTEN_PID set.

`passed`: inherited descriptors in order, with `names`. `loader`: a loader command line instead of the real one, which
only Service's own parameter can set, so that the process then runs Service itself instead of `python -m wcache.daemon`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    order = json.loads(sys.argv[1])
    passed: list[int] = order["passed"]
    if passed:
        high = [_move(fd, 500 + i) for i, fd in enumerate(passed)]
        for i, fd in enumerate(high):
            os.dup2(fd, 3 + i, inheritable=True)
            os.close(fd)
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(passed))}
        if order["names"] is not None:
            os.environ["LISTEN_FDNAMES"] = ":".join(order["names"])
    if order["watchdog_usec"]:
        os.environ |= {"WATCHDOG_PID": str(os.getpid()), "WATCHDOG_USEC": str(order["watchdog_usec"])}
    if order["loader"] is None:
        command = [sys.executable, "-m", "wcache.daemon", "--rank", str(order["rank"]), "--config", order["config"]]
        os.execv(sys.executable, command)
    run(order)


def _move(fd: int, to: int) -> int:
    os.dup2(fd, to, inheritable=True)
    os.close(fd)
    return to


def run(order: dict[str, object]) -> None:
    from wcache import config as configuration
    from wcache.config import Scope
    from wcache.daemon.service import Service
    from wcache.log import set_up

    set_up()
    path = Path(str(order["config"]))
    loader = order["loader"]
    assert isinstance(loader, list)
    service = Service(
        configuration.load(path), int(str(order["rank"])), Scope.USER, config_path=path, loader_command=loader
    )
    sys.exit(service.run())


if __name__ == "__main__":
    main()
