# SPDX-License-Identifier: Apache-2.0
"""`python -m wcache.daemon --rank N [--config PATH]`: what `wcache daemon` and `wcache@N.service` run.

The process boundary: the one place of the daemon that exits. Statuses: 0 stopped, 1 failed, 2 wrong configuration or
usage (systemd does not try again), 4 no such rank.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from wcache import config as configuration
from wcache.config import Scope
from wcache.daemon.service import Service
from wcache.errors import ConfigError, InternalError, NoSuchRank, WcacheError
from wcache.log import set_up

log = logging.getLogger(__name__)

THREAD_STACK_BYTES = 1 << 20  # virtual; a thousand connections must not reserve 8 GiB


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank's daemon until it is told to stop. Returns the exit status."""
    _open_standard_streams()
    parser = argparse.ArgumentParser(prog="wcache daemon", description="Serve one rank (normally run by systemd).")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", type=Path, help="wcache.toml (default: the scope's own)")
    parser.add_argument("--user", action="store_true", help="use the user's directories even as root")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args(argv)
    set_up(debug=options.debug)
    scope = Scope.USER if options.user else configuration.default_scope()
    try:
        return serve(options.rank, scope, options.config)
    except WcacheError as e:
        log.error("rank %d: %s", options.rank, e, exc_info=options.debug)
        if e.hint:
            log.error("hint: %s", e.hint)
        return e.exit_status if isinstance(e, ConfigError | NoSuchRank) else InternalError.exit_status


def serve(rank: int, scope: Scope, config_path: Path | None) -> int:
    """Run the daemon. Raises WcacheError if it cannot start."""
    path = configuration.config_path(scope) if config_path is None else config_path
    config = configuration.load_or_default(scope) if config_path is None else configuration.load(path)
    _raise_descriptor_limit()
    threading.stack_size(THREAD_STACK_BYTES)
    service = Service(config, rank, scope, config_path=path if path.exists() else None)
    gc.freeze()
    return service.run()


def _raise_descriptor_limit() -> None:
    """A descriptor per segment and per connection: take what the hard limit gives."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _open_standard_streams() -> None:
    """A closed stdout or stderr would give its number to a socket, and a library's message to a client."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
