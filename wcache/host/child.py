# SPDX-License-Identifier: Apache-2.0
"""Run a command that dies with its parent: `python -I -S child.py PARENT_PID COMMAND...`.

Becomes the command (same pid) after PR_SET_PDEATHSIG, which execve keeps (prctl(2)). A program of its own, because
preexec_fn is unsafe in a process with threads. Surprising: the signal comes when the parent's *thread* that started
the child ends, so that thread has to wait for the child. Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def command(argv: Sequence[str]) -> list[str]:
    """`argv` wrapped so that it dies with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):  # the parent ended before the signal was arranged
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
