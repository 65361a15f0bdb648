# SPDX-License-Identifier: Apache-2.0
"""The identity of a checkpoint is its bytes: the same wherever they lie, another for any change, free without."""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wcache.errors import CheckpointError, FingerprintError
from wcache.model import CheckpointFault, IdentityPolicy
from wcache.weights import identity
from wcache.weights.checkpoint import Survey, survey
from wcache.weights.checkpoint_file import open_surveyed
from wcache.weights.digests import DigestStore
from wcache.weights.identity import Identity, combine, digests_of, identify, open_store, recognise, remember

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT, STAT, TRUST = IdentityPolicy.CONTENT, IdentityPolicy.STAT, IdentityPolicy.TRUST


@pytest.fixture(scope="module", autouse=True)
def tracker() -> None:
    """multiprocessing keeps one helper process for as long as this one lives."""
    resource_tracker.ensure_running()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DigestStore]:
    with open_store(tmp_path / "state") as store:
        yield store


@pytest.fixture(autouse=True)
def stamps_count(monkeypatch, tmp_path: Path) -> None:
    """Temporary directories may lie on tmpfs, where stamps say nothing; the tests here are about those that do."""
    if tmp_path.stat().st_dev in identity._Mounts().untracked:
        monkeypatch.setattr(identity, "_UNTRACKED", set())


def content(directory: Path, store: DigestStore, **options) -> str:
    found = identify(survey(directory), store, CONTENT, **options).content
    assert found is not None
    return found


def known(directory: Path, store: DigestStore, policy: IdentityPolicy = CONTENT) -> Identity:
    return recognise(survey(directory), store, policy)


def settle(*paths: Path) -> None:
    """Wait until a digest taken now is trusted: the files' stamps are older than the margin."""
    newest = max(p.stat().st_ctime_ns for p in paths)
    while time.time_ns() - newest < 120_000_000:
        time.sleep(0.01)


def ready(model) -> Path:
    """A good checkpoint whose stamps have settled."""
    model.two_files()
    settle(model.path(FIRST), model.path(SECOND))
    return model.directory


def flip(path: Path, position: int) -> None:
    """Change one byte in place and put mtime back."""
    times = path.stat()
    with path.open("r+b") as f:
        f.seek(position)
        (byte,) = f.read(1)
        f.seek(position)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# --- the same bytes ---------------------------------------------------------------------------------------------------


def test_the_same_bytes_in_another_directory_are_the_same_checkpoint(model, store, tmp_path) -> None:
    first = content(ready(model), store)
    shutil.copytree(model.directory, tmp_path / "copy")
    (tmp_path / "link").symlink_to(model.directory)
    for name in ("hard", "soft"):
        (tmp_path / name).mkdir()
        for path in model.directory.iterdir():
            if name == "hard":
                (tmp_path / name / path.name).hardlink_to(path)
            else:
                (tmp_path / name / path.name).symlink_to(path)
    assert {content(tmp_path / d, store) for d in ("copy", "link", "hard", "soft")} == {first}
    repository = model.hub(COMMIT)
    assert content(repository, store) == first
    assert content(repository, store, deep=True) == first


def test_file_names_are_no_part_of_the_identity(model, store, tmp_path) -> None:
    first = content(ready(model), store)
    other = model.again(tmp_path / "other").config()
    for old, new in ((FIRST, "z.safetensors"), (SECOND, "a.safetensors")):
        other.raw(new, model.path(old).read_bytes())
    weight_map = survey(model.directory).weight_map
    other.index({t: "z.safetensors" if f == FIRST else "a.safetensors" for t, f in weight_map.items()})
    assert content(other.directory, store) == first


def test_touching_every_file_costs_one_hash_and_is_no_miss(model, store) -> None:
    first = content(ready(model), store)
    for name in (FIRST, SECOND):
        os.utime(model.path(name))
    settle(model.path(FIRST), model.path(SECOND))
    assert known(model.directory, store).unknown == (FIRST, SECOND)
    assert content(model.directory, store) == first
    assert known(model.directory, store).content == first
    assert known(model.directory, store).source == "store"


def test_tokenizer_and_generation_settings_are_no_part_of_the_identity(model, store) -> None:
    first = content(ready(model), store)
    for name in ("tokenizer.json", "generation_config.json", "README.md", "extra.safetensors.txt"):
        model.path(name).write_text("{}")
    model.file("consolidated.safetensors", model.embed)
    assert content(model.directory, store) == first


# --- other bytes ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), name=st.sampled_from([FIRST, SECOND]))
def test_one_flipped_byte_anywhere_with_mtime_put_back_is_another_checkpoint(model, store, share, name) -> None:
    first = content(ready(model), store)
    flip(model.path(name), int(share * model.path(name).stat().st_size))
    assert known(model.directory, store).content is None
    assert content(model.directory, store) != first


def test_a_byte_changed_right_after_hashing_is_noticed(model, store) -> None:
    for _ in range(20):
        model.two_files()
        first = content(model.directory, store)
        flip(model.path(FIRST), -1 + model.path(FIRST).stat().st_size)
        assert content(model.directory, store) != first


def test_a_file_replaced_under_its_name_is_noticed(model, store) -> None:
    first = content(ready(model), store)
    times = model.path(SECOND).stat()
    model.raw("new", model.path(SECOND).read_bytes()[:-1] + b"\0")
    os.utime(model.path("new"), ns=(times.st_atime_ns, times.st_mtime_ns))
    model.path("new").replace(model.path(SECOND))
    assert content(model.directory, store) != first


@pytest.mark.parametrize("before", ["clean", "dirty"])
def test_a_store_through_a_mapping_made_earlier_is_noticed(model, store, before: str) -> None:
    ready(model)
    with model.path(FIRST).open("r+b") as f, mmap.mmap(f.fileno(), 0) as mapping:
        if before == "dirty":
            mapping[-2] ^= 1
            settle(model.path(FIRST))
        first = content(model.directory, store)
        assert known(model.directory, store).content == first
        mapping[-1] ^= 1
        assert known(model.directory, store).content is None
        assert content(model.directory, store) != first


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs to look at")
def test_nothing_on_tmpfs_is_recognised_by_its_stamp(model, store, monkeypatch) -> None:
    monkeypatch.setattr(identity, "_UNTRACKED", {"tmpfs"})
    directory = Path("/dev/shm") / f"wcache-test-{os.getpid()}"
    shutil.copytree(model.two_files().directory, directory)
    try:
        settle(directory / FIRST)
        with (directory / FIRST).open("r+b") as f, mmap.mmap(f.fileno(), 0) as mapping:
            first = content(directory, store)
            stamp = (directory / FIRST).stat()
            mapping[-1] ^= 1
            assert (directory / FIRST).stat().st_ctime_ns == stamp.st_ctime_ns
            assert known(directory, store).content is None
            assert content(directory, store) != first
            assert known(directory, store, STAT).content is not None  # which is what that policy says
    finally:
        shutil.rmtree(directory)


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "hf_quant_config.json"])
def test_configuration_that_decides_how_bytes_are_used_is_part_of_the_identity(model, store, name) -> None:
    first = content(ready(model), store)
    model.path(name).write_text(json.dumps({"bits": 4}))
    four = content(model.directory, store)
    model.path(name).write_text(json.dumps({"bits": 8}))
    assert len({first, four, content(model.directory, store)}) == 3


def test_an_index_that_takes_a_tensor_from_another_file_makes_another_checkpoint(model, store) -> None:
    names = {model.embed[0]: FIRST, model.query[0]: FIRST, model.head[0]: SECOND}
    model.config().file(FIRST, model.embed, model.query).file(SECOND, model.head, model.query).index(names)
    first = content(model.directory, store)
    model.index({**names, model.query[0]: SECOND})
    assert content(model.directory, store) != first


def test_an_identity_needs_the_digest_of_every_file(model) -> None:
    with pytest.raises(FingerprintError, match=SECOND):
        combine(survey(model.two_files().directory), {FIRST: "a" * 64})


# --- for free ---------------------------------------------------------------------------------------------------------

TRACED = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "os.open") else None)
from pathlib import Path
from wcache.model import IdentityPolicy
from wcache.weights.checkpoint import survey
from wcache.weights.identity import open_store, recognise
with open_store(Path(sys.argv[2])) as store:
    found = recognise(survey(sys.argv[1]), store, IdentityPolicy(sys.argv[3]))
shards = [p for p in opened if p.endswith(".safetensors") or "/blobs/" in p]
print(json.dumps([found.content, shards, "torch" in sys.modules]))
"""


@pytest.mark.parametrize("policy", list(IdentityPolicy))
def test_a_known_checkpoint_is_recognised_by_another_process_without_opening_a_file(model, store, policy) -> None:
    first = content(ready(model), store)
    command = [sys.executable, "-c", TRACED, str(model.directory), str(store.path.parent), policy]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [first, [], False]


def test_any_file_is_hashed_once_and_again_when_it_changes(store, tmp_path, monkeypatch) -> None:
    paths = {"tokenizer": tmp_path / "tokenizer.json", "codec/empty": tmp_path / "empty"}
    paths["tokenizer"].write_bytes(bytes(range(256)))
    paths["codec/empty"].touch()
    settle(*paths.values())
    hashed: list[str] = []
    hash_file = identity.hash_file
    monkeypatch.setattr(identity, "hash_file", lambda file, *rest: hashed.append(file.name) or hash_file(file, *rest))

    def right() -> bool:
        wanted = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
        return digests_of(paths, store) == wanted

    assert right() and right() and sorted(hashed) == sorted(paths)
    flip(paths["tokenizer"], 7)
    assert right() and hashed[2:] == ["tokenizer"]
    paths["codec/empty"].unlink()
    with pytest.raises(FileNotFoundError):
        digests_of(paths, store)


def test_digests_computed_while_loading_are_remembered(model, store) -> None:
    found = survey(ready(model))
    started = time.time()
    digests = identify(found, open_store(store.path.parent / "other"), CONTENT).digests
    remember(found, digests, store, started)
    assert recognise(found, store, CONTENT).content == combine(found, digests)
    assert recognise(found, store, STAT).content == combine(found, digests)


def test_digests_of_a_file_that_changed_while_it_was_loaded_are_refused(model, store) -> None:
    found = survey(ready(model))
    with open_surveyed(found.files[0], hashed=True):
        flip(model.path(FIRST), 0)
    with pytest.raises(CheckpointError) as e:
        remember(found, {FIRST: "a" * 64}, store, time.time())
    assert e.value.fault is CheckpointFault.CHANGED_WHILE_READING
    with pytest.raises(CheckpointError, match="changed after it was surveyed"):
        open_surveyed(found.files[0], hashed=True)
    assert recognise(survey(model.directory), store, CONTENT).unknown == (FIRST, SECOND)


def test_a_deleted_or_ruined_store_costs_one_hash(model, store) -> None:
    first = content(ready(model), store)
    store.path.unlink()
    assert content(model.directory, store) == first
    with open_store(store.path.parent) as again:
        assert content(model.directory, again) == first
        store.path.write_bytes(b"garbage" * 1000)
        assert content(model.directory, again) == first
        assert known(model.directory, again).content == first


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_a_clock_that_jumps_leads_to_no_wrong_identity(model, store, monkeypatch, jump_s: int) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    first = content(ready(model), store)
    flip(model.path(FIRST), 5)
    changed = content(model.directory, store)
    monkeypatch.undo()
    assert changed != first
    assert content(model.directory, store) == changed
    flip(model.path(FIRST), 5)
    assert content(model.directory, store) == first


# --- hub caches -------------------------------------------------------------------------------------------------------


def test_a_hub_cache_is_recognised_by_the_names_of_its_blobs(model, store) -> None:
    repository = model.two_files().hub(COMMIT)
    found = known(repository, store)
    assert (found.source, found.claimed) == ("blob", (FIRST, SECOND))
    assert found.content == content(model.directory, store)


def test_a_blob_that_changes_under_its_name_is_hashed(model, store) -> None:
    repository = model.two_files().hub(COMMIT)
    first = known(repository, store).content
    flip((repository / "snapshots" / COMMIT / FIRST).resolve(), 100)
    assert known(repository, store).unknown == (FIRST,)
    assert content(repository, store) != first


def test_a_deep_check_believes_no_name(model, store, caplog) -> None:
    repository = model.two_files().hub(COMMIT)
    blob = (repository / "snapshots" / COMMIT / FIRST).resolve()
    flip(blob, 100)
    settle(blob)
    claimed = known(repository, store).content
    found = identify(survey(repository), store, CONTENT, deep=True)
    assert found.refuted == (FIRST,)
    assert found.content != claimed
    assert FIRST in caplog.text
    assert known(repository, store).content == found.content


# --- policies ---------------------------------------------------------------------------------------------------------


def renumbered(found: Survey) -> Survey:
    """The survey after a remount that hands out other inode numbers and rounds the times."""
    from dataclasses import replace

    files = tuple(
        replace(f, stamp=replace(f.stamp, inode=f.stamp.inode + 1000, mtime_ns=f.stamp.mtime_ns + 82, ctime_ns=0))
        for f in found.files
    )
    return replace(found, files=files)


def test_the_stat_policy_survives_other_inode_numbers_and_rounded_times(model, store) -> None:
    first = content(ready(model), store)
    remounted = renumbered(survey(model.directory))
    assert recognise(remounted, store, CONTENT).content is None
    for policy in (STAT, TRUST):
        found = recognise(remounted, store, policy)
        assert (found.content, found.source, found.policy) == (first, "stat", policy)


def test_on_a_mount_that_renumbers_files_a_stamp_counts_only_with_its_path(model, store, monkeypatch) -> None:
    first = content(ready(model), store)
    device = model.path(FIRST).stat().st_dev

    class Renumbering(identity._Mounts):
        def __init__(self) -> None:
            super().__init__()
            self.renumbered.add(device)

    monkeypatch.setattr(identity, "_Mounts", Renumbering)
    assert known(model.directory, store).content == first
    model.directory.rename(model.directory.with_name("moved"))
    assert known(model.directory.with_name("moved"), store).content is None


# --- hashing ----------------------------------------------------------------------------------------------------------


def test_progress_counts_every_byte_once(model, store, monkeypatch) -> None:
    monkeypatch.setattr(identity, "BUFFER_BYTES", 64)
    calls: list[tuple[int, int]] = []
    found = survey(ready(model))
    identify(found, store, CONTENT, progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (found.size, found.size)


def test_a_file_that_changes_while_it_is_hashed_is_refused(model, store, monkeypatch) -> None:
    def change(done: int, total: int) -> None:
        flip(model.path(FIRST), 0)

    with pytest.raises(CheckpointError) as e:
        identify(survey(ready(model)), store, CONTENT, progress=change, threads=1)
    assert e.value.fault is CheckpointFault.CHANGED_WHILE_READING


def test_a_link_made_while_a_file_is_hashed_only_costs_a_second_try(model, store, tmp_path) -> None:
    first = content(ready(model), store, deep=True)
    made = []

    def link(done: int, total: int) -> None:
        if not made:
            made.append(1)
            (tmp_path / "link").hardlink_to(model.path(FIRST))

    assert content(model.directory, store, deep=True, progress=link, threads=1) == first


def test_a_file_that_is_gone_is_an_error_of_the_checkpoint(model, store) -> None:
    found = survey(ready(model))
    model.path(SECOND).unlink()
    with pytest.raises(CheckpointError) as e:
        identify(found, store, CONTENT)
    assert e.value.fault is CheckpointFault.MISSING_FILE


def test_a_failing_progress_callback_ends_the_hashing(model, store) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        identify(survey(ready(model)), store, CONTENT, progress=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("wcache-hash")]


def rank(directory: Path, state: Path, start, answers) -> None:
    hashed = []
    real = identity.hash_file

    def counted(file, *args):
        hashed.append(file.name)
        return real(file, *args)

    identity.hash_file = counted
    start.wait()
    with open_store(state) as store:
        answers.put((identify(survey(directory), store, CONTENT).content, hashed))


def test_four_ranks_that_start_at_once_hash_each_file_once(model, store) -> None:
    names = [f"part{i}.safetensors" for i in range(8)]
    model.config()
    for i, name in enumerate(names):
        model.file(name, (f"t{i}", "F32", [256, 1024], i))
    settle(*(model.path(n) for n in names))
    context = multiprocessing.get_context("fork")
    start, answers = context.Event(), context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(model.directory, store.path.parent, start, answers)) for _ in range(4)]
    for process in ranks:
        process.start()
    start.set()
    found = [answers.get() for _ in ranks]
    for process in ranks:
        process.join(30)
        process.close()
    answers.close()
    assert len({content for content, _ in found}) == 1
    assert sorted(name for _, hashed in found for name in hashed) == names
