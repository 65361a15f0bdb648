# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: nothing it opened, started or mapped is left when it ends; nothing is skipped in CI.

A test that starts a runtime which keeps things for the life of the process (vLLM, torch's thread pools on first use)
says so: `@pytest.mark.keeps("why")`. Fixtures of a wider scope are set up before the check and are not its business.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, Manager, making

import wcache

SETTLE_S = 5.0  # a closed connection's thread, a killed child: gone at once, but not in the same instant
ROOT = Path(__file__).resolve().parent.parent

# Opened once per process by libraries (random numbers, event loops, terminals); no test owns them.
_PROCESS_WIDE = re.compile(
    r"^(/dev/(u?random|null|tty|pts/|nvidia)|/proc/|/sys/|anon_inode:\[(eventpoll|eventfd|io_uring)\])"
)


@dataclass(frozen=True)
class Held:
    """What this process holds, in a form that two moments can be compared in."""

    descriptors: Counter[str]
    children: Counter[str]
    segments: Counter[str]
    threads: Counter[str]

    def beyond(self, before: Held) -> dict[str, list[str]]:
        """What is held now and was not before."""
        kinds = ("descriptors", "children", "segments", "threads")
        more = {kind: sorted((getattr(self, kind) - getattr(before, kind)).elements()) for kind in kinds}
        return {kind: names for kind, names in more.items() if names}


def held() -> Held:
    children = [f"{child.pid} {_name(child)}" for child in psutil.Process().children(recursive=True)]
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    return Held(Counter(_descriptors()), Counter(children), Counter(_mapped_memfds()), Counter(threads))


def _descriptors() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this listing
            continue
        if not _PROCESS_WIDE.match(target):
            yield target if not target.startswith(("socket:", "pipe:")) else f"{target} (fd {entry.name})"


def _mapped_memfds() -> Iterator[str]:
    """Segments that are still mapped: the memory that matters here, and the one that no allocator keeps for later."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            yield line[line.index("/memfd:") :]


def _name(child: psutil.Process) -> str:
    try:
        return child.name()
    except psutil.NoSuchProcess:
        return "(gone)"


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], object], float, str], None]:
    """Wait for a condition that only time and other processes can bring about; what, for the failure, in words."""

    def wait(condition: Callable[[], object], deadline_s: float, what: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {deadline_s} s")
            time.sleep(0.02)

    return wait


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Open files, sockets, child processes, mapped segments and threads are the same before and after a test."""
    before = held()
    yield
    if request.node.get_closest_marker("keeps") or request.node.stash.get(_failed, False):
        return  # the traceback of a failed test holds its locals; what it left is not the news
    deadline = time.monotonic() + SETTLE_S
    while more := held().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {more}")
        gc.collect()
        time.sleep(0.02)


# --- real daemons -----------------------------------------------------------------------------------------------------


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        yield Path(name)


@pytest.fixture
def manager(short_dir: Path) -> Iterator[Manager]:
    """A notify socket with a fd store."""
    manager = Manager(short_dir / "notify")
    yield manager
    manager.close()


@pytest.fixture
def make_daemon(short_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Make (not start) daemons on one directory; all are ended after the test."""
    with making(short_dir) as make:
        yield make


# --- no skips in CI ---------------------------------------------------------------------------------------------------

_skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failure")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background: children would not hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "keeps(why): leaves descriptors or threads of a runtime to the process")
    if os.environ.get("WCACHE_TEST_WHEEL") and Path(wcache.__file__).is_relative_to(ROOT / "wcache"):
        raise pytest.UsageError(f"the installed wheel was to be tested, but wcache is {wcache.__file__}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and session.config.getoption("--no-skips") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _skipped and config.getoption("--no-skips"):
        terminalreporter.section("skipped, which is a failure here", red=True)
        for nodeid in _skipped:
            terminalreporter.write_line(nodeid)
