# SPDX-License-Identifier: Apache-2.0
"""The command line against real daemons in the foreground: what it shows, what it does, and what it never waits for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from daemons import Daemon, Manager, commit, make, publish, query

from wcache import config as configuration
from wcache.cli.context import Context
from wcache.cli.group import verdict
from wcache.cli.main import run
from wcache.cli.ranks import GroupReport
from wcache.errors import Miss, NotReady
from wcache.host import units
from wcache.host.fds import close_all
from wcache.host.lock import BoundSocket, lock_path, take_lock
from wcache.model import Origin
from wcache.protocol.connection import Connection, socket_path
from wcache.protocol.messages import Attach, Granted, PublishBegin
from wcache.weights.spec import preload_spec

LOADER = Path(__file__).parent.parent / "loader_child.py"

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager of this machine, and whatever it runs, is not this test's business."""
    monkeypatch.setattr(units, "reachable", lambda _: False)


@pytest.fixture
def group(make_daemon: Callable[..., Daemon]) -> tuple[Daemon, Daemon]:
    """Two ranks of one group, running."""
    shared = {"ranks": [0, 1], "parallel": {"tp_size": 2}}
    return make_daemon(rank=0, config=shared).start(), make_daemon(rank=1, config=shared).start()


@pytest.fixture
def say(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a verb on the daemons' configuration: exit status, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([*argv, "--config", str(short_dir / "wcache.toml")])
        return status, *capsys.readouterr()

    return call


@contextmanager
def engine(daemon: Daemon, name: str = "an engine", **fields: object) -> Iterator[Connection]:
    """A connection that published a shard and holds a lease on it."""
    asked = query("a", tp_rank=daemon.rank, **fields)
    with daemon.connect("engine", name) as connection:
        if not daemon.status().shards:
            publish(connection, asked, rank=daemon.rank)
        _, manifest, fds = connection.attach(Attach(query=asked))
        close_all([manifest, *fds])
        yield connection


def started(daemon: Daemon, *argv: str, **options: object) -> subprocess.Popen[str]:
    """The program itself, beside this process."""
    command = [sys.executable, "-m", "wcache", *argv, "--config", str(daemon.directory / "wcache.toml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_shows_shards_engines_and_the_last_miss(group: tuple[Daemon, Daemon], say: Said) -> None:
    with engine(group[0]), group[1].connect("engine", "another") as other:
        with pytest.raises(Miss):
            other.attach(Attach(query=query("b")))
        status, out, err = say("status")
    assert (status, err) == (0, "")
    assert out.startswith("2 of 2 ranks ready")
    assert group[0].status().shards[0].fingerprint[:12] in out
    assert f"an engine  {os.getpid()}" in out
    assert f"by another (pid {os.getpid()}): empty" in out


def test_the_json_of_status_is_what_the_rank_itself_says(group: tuple[Daemon, Daemon], say: Said) -> None:
    with engine(group[1]):
        status, out, _ = say("status", "--json")
        report = msgspec.json.decode(out, type=GroupReport)
        themselves = group[1].status()
    assert status == 0
    said = report.ranks[1].status
    assert said is not None
    assert msgspec.structs.replace(said, rss=0) == msgspec.structs.replace(themselves, rss=0)


def test_a_hung_rank_is_unresponsive_and_does_not_hold_up_the_others(group: tuple[Daemon, Daemon], say: Said) -> None:
    os.kill(group[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    status, out, _ = say("status", "--json")
    report = msgspec.json.decode(out, type=GroupReport)
    assert time.monotonic() - began < 5.0
    assert status == 3
    assert [(r.state, r.ready) for r in report.ranks] == [("ready", True), ("unresponsive", False)]


def test_a_rank_that_is_loading_says_so_and_is_not_ready(make_daemon: Callable[..., Daemon], say: Said) -> None:
    loader = [sys.executable, "-c", "import time; time.sleep(600)"]
    make_daemon(config={"model": "/nowhere"}, loader=loader).start()
    status, out, _ = say("status")
    assert status == 3
    assert "0 of 1 rank ready" in out and "loading" in out


def test_a_foreign_socket_at_the_path_is_told_as_such(group: tuple[Daemon, Daemon], say: Said, short_dir: Path) -> None:
    group[1].stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(str(group[1].path))
        stranger.listen()
        _, out, _ = say("status", "1")
    assert "not a wcache socket" in out
    group[1].path.unlink()


def test_a_watch_that_is_no_terminal_prints_changes_and_ends_well(group: tuple[Daemon, Daemon]) -> None:
    with started(group[0], "status", "--watch", "--json") as process:
        assert process.stdout is not None
        first = msgspec.json.decode(process.stdout.readline(), type=GroupReport)
        group[1].stop()
        states = [r.state for r in first.ranks]
        while "stopped" not in states:
            states = [r.state for r in msgspec.json.decode(process.stdout.readline(), type=GroupReport).ranks]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert first.ready == 2
    assert process.returncode == 0


def test_a_reader_that_has_seen_enough_gets_no_traceback(group: tuple[Daemon, Daemon]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "wcache", "status", "--config", str(group[0].directory / "wcache.toml")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""


# --- verify, evict, drain, explain ------------------------------------------------------------------------------------


def test_verify_says_for_every_shard_that_it_is_intact(group: tuple[Daemon, Daemon], say: Said) -> None:
    with engine(group[0]):
        status, out, err = say("verify")
    assert (status, err) == (0, "")
    name = group[0].status().shards[0].fingerprint[:12]
    assert f"rank 0: shard {name} intact" in out and "rank 1: nothing is resident" in out


def test_verify_ends_with_1_where_bytes_differ(group: tuple[Daemon, Daemon], say: Said) -> None:
    asked = query("a")
    manifest, fds = make(asked, spoil=True)
    with group[0].connect("engine", "liar") as connection:
        begin = PublishBegin(query=asked, origin=Origin.ENGINE, bytes_total=manifest.segment_bytes)
        connection.ask(begin, Granted)
        commit(connection, manifest, fds)
        status, out, _ = say("verify", "0")
    assert status == 1
    assert "DAMAGED, quarantined" in out
    assert "is quarantined" in say("status")[1]


def test_evict_is_refused_while_engines_are_attached_and_names_them(group: tuple[Daemon, Daemon], say: Said) -> None:
    with engine(group[0]):
        status, out, err = say("evict", "--rank", "0")
        assert status == 1 and out == ""
        assert err.startswith("wcache: ") and "an engine" in err and "hint: " in err
        status, out, _ = say("evict", "--rank", "0", "--force")
    assert status == 0
    assert ": 0 B freed, " in out and " still mapped\n" in out
    assert f"an engine (pid {os.getpid()}) goes on serving from " in out
    assert group[0].status().shards == ()


def test_evict_takes_a_shard_by_its_first_characters_wherever_it_is(group: tuple[Daemon, Daemon], say: Said) -> None:
    with group[1].connect("engine") as connection:
        publish(connection, query("a"), rank=1)
    name = group[1].status().shards[0].fingerprint
    status, out, err = say("evict", name[:8])
    assert (status, err) == (0, "")
    assert out.startswith(f"rank 1: {name[:12]}: ")
    assert say("evict", name[:8])[0] == 4


def test_drain_waits_for_engines_and_says_who_is_left(group: tuple[Daemon, Daemon], say: Said) -> None:
    with engine(group[0]):
        status, _, err = say("drain", "0", "--deadline", "0.2")
        assert status == 1
        assert "an engine" in err
    status, out, _ = say("drain", "0", "--deadline", "10")
    assert status == 0
    assert "1 shard freed" in out
    status, _, err = say("drain", "0")
    assert status == 1 and "draining already" in err and "hint: end the rank's wcache daemon" in err


def test_the_last_miss_of_an_engine_can_be_asked_again(group: tuple[Daemon, Daemon], say: Said) -> None:
    assert say("explain", "--last")[0] == 3
    with engine(group[0]), group[0].connect("engine", "vllm") as other:
        with pytest.raises(Miss):
            other.attach(Attach(query=query("a", tp_size=4)))
        status, out, _ = say("explain", "--last")
        assert status == 0
        assert "vllm missed" in out and "layout.tp_size: asked 4, resident 1" in out
        publish(other, query("a", tp_size=4))
    assert "rank 0: hit: shard " in say("explain", "--last")[1]


# --- life -------------------------------------------------------------------------------------------------------------


def test_the_daemon_verb_becomes_the_daemon_under_the_same_pid(
    short_dir: Path, wait_until: Callable[..., None]
) -> None:
    config = short_dir / "wcache.toml"
    config.write_text(f'socket_dir = "{short_dir}/run"\nstate_dir = "{short_dir}/state"\n')
    command = [sys.executable, "-m", "wcache", "daemon", "--rank", "0", "--config", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        path = socket_path(short_dir / "run", 0)
        wait_until(path.exists, 20.0, "the daemon listens")
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert words[1:4] == ["-P", "-m", "wcache.daemon"]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "pydantic" not in maps and "torch" not in maps
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_an_inherited_socket_reaches_the_daemon(short_dir: Path) -> None:
    config = short_dir / "wcache.toml"
    config.write_text(f'socket_dir = "{short_dir}/run"\nstate_dir = "{short_dir}/state"\n')
    (short_dir / "run").mkdir()
    path = socket_path(short_dir / "run", 0)
    script = (
        "import os, sys; pid = str(os.getpid());"
        "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': pid, 'LISTEN_FDNAMES': 'control'};"
        "fd = int(sys.argv[1]); os.dup2(fd, 3);"
        "os.execv(sys.executable, [sys.executable, '-m', 'wcache', 'daemon', '--rank', '0', '--config', sys.argv[2]])"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(16)
        inode = path.stat().st_ino
        command = [sys.executable, "-c", script, str(listener.fileno()), str(config)]
        with subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.PIPE) as process:
            daemon = Daemon(short_dir, process=process)  # type: ignore[arg-type]
            daemon.wait_answer()
            assert path.stat().st_ino == inode
            process.terminate()
            process.communicate(timeout=20)
    assert process.returncode == 0


def test_clean_removes_what_a_killed_daemon_left_and_nothing_of_a_living_one(
    group: tuple[Daemon, Daemon], say: Said
) -> None:
    group[1].kill()
    status, out, err = say("clean")
    assert status == 1  # a living daemon is in the way of cleaning its own socket
    assert "rank 1: stale socket removed" in out
    assert "rank 0: " in err and "another daemon holds" in err
    assert group[0].path.exists() and not group[1].path.exists()
    assert group[0].status().rank == 0


def test_clean_leaves_a_file_that_is_no_socket_alone(group: tuple[Daemon, Daemon], say: Said) -> None:
    group[1].stop()
    group[1].path.write_text("mine")
    status, _, err = say("clean")
    assert status != 0 and "is no socket" in err
    assert group[1].path.read_text() == "mine"


def test_clean_also_finds_sockets_of_ranks_that_are_configured_no_more(
    group: tuple[Daemon, Daemon], say: Said, short_dir: Path
) -> None:
    path = socket_path(short_dir / "run", 7)
    with take_lock(path) as lock:
        BoundSocket(path, lock).close(unlink=False)
    assert "rank 7: stale socket removed" in say("clean")[1]
    assert lock_path(path).exists()


def preloaded(make_daemon: Callable[..., Daemon], manager: Manager, how: str = "good") -> Daemon:
    """A rank that holds its configured weights. `how`: a shell's word for what its loader does."""
    daemon = make_daemon(manager=manager, config={"model": "/models/preload", "identity": "trust"})
    spec = preload_spec(configuration.parse('model = "/models/preload"\nidentity = "trust"\n', "test"), 0)
    script = f'exec "$0" "$1" "$2" "$3" "{how}" preload'
    daemon.loader = ["/bin/sh", "-c", script, sys.executable, str(LOADER), str(daemon.path), spec]
    daemon.start()
    manager.wait_told("READY=1")
    return daemon


def test_restart_group_reload_without_units_asks_the_daemons_themselves(
    make_daemon: Callable[..., Daemon], manager: Manager, say: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LOADER.parent))
    daemon = preloaded(make_daemon, manager)
    before = daemon.status()
    status, out, err = say("restart-group", "--reload")
    assert status == 0
    assert "rank 0: ready: 1 shard" in out and "all ready after" in err
    after = daemon.status()
    assert after.nonce == before.nonce
    assert after.shards[0].generation > before.shards[0].generation


def verdict_of(short_dir: Path) -> None:
    """What `start` says at its end; there are no units here that it could start."""
    verdict(Context(asked_config=short_dir / "wcache.toml"), (0,), time.monotonic())


def test_evicted_weights_are_not_called_resident(
    make_daemon: Callable[..., Daemon], manager: Manager, say: Said, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LOADER.parent))
    preloaded(make_daemon, manager)
    assert say("evict")[0] == 0
    assert "rank 0  the configured weights were evicted" in say("status")[1]
    with pytest.raises(NotReady, match="rank 0: the configured weights were evicted") as raised:
        verdict_of(short_dir)
    assert "wcache restart-group --reload" in raised.value.hint
    assert say("restart-group", "--reload")[0] == 0


def test_a_drained_rank_is_told_the_way_back_and_it_works(
    make_daemon: Callable[..., Daemon], manager: Manager, say: Said, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LOADER.parent))
    preloaded(make_daemon, manager)
    assert say("drain")[0] == 0
    assert "hint: wcache restart-group --reload" in say("drain")[2]
    assert "hint: wcache restart-group --reload" in say("doctor")[1]
    with pytest.raises(NotReady, match="rank 0 is draining") as raised:
        verdict_of(short_dir)
    assert "wcache restart-group --reload" in raised.value.hint
    assert say("restart-group", "--reload")[0] == 0


def test_an_older_shard_in_place_of_the_configured_one_is_no_success(
    make_daemon: Callable[..., Daemon], manager: Manager, say: Said, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LOADER.parent))
    daemon = preloaded(make_daemon, manager, how=f"$(cat {short_dir}/how 2>/dev/null || echo good)")
    (short_dir / "how").write_text("crash")
    with engine_of_the_configured_weights(daemon):
        status, _, err = say("restart-group", "--reload")
    assert status == 3
    assert "wcache: rank 0: " in err and "is cursed" in err and "serving the older shard" in err
    assert "all ready" not in err


@contextmanager
def engine_of_the_configured_weights(daemon: Daemon) -> Iterator[None]:
    """A lease keeps the old shard while it is loaded anew."""
    with daemon.connect("engine", "an engine") as connection:
        _, manifest, fds = connection.attach(Attach(query=query("preload")))
        close_all([manifest, *fds])
        yield
