# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory is surveyed without opening a checkpoint file, and refused for what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wcache.errors import CheckpointError
from wcache.model import CheckpointFault
from wcache.weights import directory
from wcache.weights.checkpoint import Checkpoint, open_checkpoint, survey

F = CheckpointFault
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBED, QUERY, HEAD = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(path: Path, **options) -> Checkpoint:
    return open_checkpoint(survey(path, **options))


def refused(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as e:
        call()
    return e.value


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_a_good_checkpoint_gives_every_tensor_with_its_place(model) -> None:
    checkpoint = load(model.two_files().directory)
    assert sorted(checkpoint.tensors) == sorted([EMBED, QUERY, HEAD])
    assert [f.name for f in checkpoint.survey.files] == [FIRST, SECOND]
    query = checkpoint.tensors[QUERY]
    data = model.path(FIRST).read_bytes()
    assert (query.dtype, query.shape, query.file, query.nbytes) == ("bfloat16", (8, 8), 0, 128)
    assert data.endswith(data[query.offset : query.offset + query.nbytes])
    assert checkpoint.ignored == 0
    assert checkpoint.warnings == ()


def test_a_single_file_needs_no_index(model) -> None:
    checkpoint = load(model.one_file().directory)
    assert checkpoint.survey.weight_map is None
    assert list(checkpoint.tensors) == [EMBED]


def test_several_files_without_an_index_are_taken_if_nothing_is_ambiguous(model) -> None:
    model.two_files().path("model.safetensors.index.json").unlink()
    assert len(load(model.directory).tensors) == 3


def test_a_file_that_the_index_does_not_name_is_ignored_and_not_counted(model) -> None:
    model.two_files().file("consolidated.safetensors", ("tok_embeddings.weight", "BF16", [16, 8], 50))
    checkpoint = load(model.directory)
    assert "tok_embeddings.weight" not in checkpoint.tensors
    assert checkpoint.survey.ignored_files == ("consolidated.safetensors",)
    assert checkpoint.survey.size == sum(model.path(n).stat().st_size for n in (FIRST, SECOND))
    assert "consolidated.safetensors" in checkpoint.warnings[0]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_stale_copy_of_a_tensor_in_another_file_is_ignored_whatever_the_order(model, swapped: bool) -> None:
    right, wrong = (SECOND, FIRST) if swapped else (FIRST, SECOND)
    model.config().file(right, model.embed, model.query)
    model.file(wrong, model.head, (QUERY, "BF16", [8, 8], 77)).index({EMBED: right, QUERY: right, HEAD: wrong})
    checkpoint = load(model.directory)
    assert checkpoint.survey.files[checkpoint.tensors[QUERY].file].name == right
    assert checkpoint.ignored == 1
    assert f"1 in {wrong}" in checkpoint.warnings[0]


def test_an_index_may_lead_into_a_subdirectory(model) -> None:
    model.config().file("part/a.safetensors", model.embed).index({EMBED: "./part//a.safetensors"})
    assert [f.name for f in load(model.directory).survey.files] == ["part/a.safetensors"]


def test_the_only_index_counts_whatever_its_name(model) -> None:
    model.index_name = "model.fp16.safetensors.index.json"
    assert load(model.two_files().directory).survey.index == model.index_name


# --- the index --------------------------------------------------------------------------------------------------------

BAD_INDEXES = {
    "not JSON": "{",
    "a list": "[]",
    "no weight_map": "{}",
    "empty": '{"weight_map": {}}',
    "weight_map a list": '{"weight_map": ["a"]}',
    "file a number": '{"weight_map": {"a": 1}}',
    "no file name": '{"weight_map": {"a": ""}}',
    "the directory": '{"weight_map": {"a": "."}}',
    "NUL": '{"weight_map": {"a": "x\\u0000y"}}',
    "tensor twice": '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "half a surrogate pair": '{"weight_map": {"\\udc00": "x.safetensors"}}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_an_index_that_is_none_is_refused(model, case: str) -> None:
    model.two_files().path(model.index_name).write_text(BAD_INDEXES[case])
    assert refused(lambda: survey(model.directory)).fault is F.BAD_INDEX


def test_several_indexes_of_which_none_is_the_usual_one_are_refused(model) -> None:
    model.two_files()
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        model.path(name).write_bytes(model.path(model.index_name).read_bytes())
    assert survey(model.directory).index == model.index_name
    model.path(model.index_name).unlink()
    assert refused(lambda: survey(model.directory)).fault is F.BAD_INDEX


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "a/../b.safetensors"]
)
def test_an_index_may_not_lead_out_of_the_directory(model, name: str) -> None:
    model.two_files().index({EMBED: name})
    model.again(model.directory.parent).raw("x.safetensors", model.path(FIRST).read_bytes())
    assert refused(lambda: survey(model.directory)).fault is F.INDEX_ESCAPES


def test_a_missing_file_is_an_unfinished_download_and_every_one_is_named(model) -> None:
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    model.config().file(names[0], model.embed).index({f"t{i}": name for i, name in enumerate(names)})
    error = refused(lambda: survey(model.directory))
    assert error.fault is F.INCOMPLETE_DOWNLOAD
    assert "3 of the 4 files" in str(error)
    assert all(name in str(error) for name in names[1:])


def test_an_index_of_another_build_is_stale_and_may_be_ignored_on_request(model) -> None:
    model.two_files().index({EMBED: "model-00001-of-00009.safetensors", HEAD: "model-00009-of-00009.safetensors"})
    assert refused(lambda: survey(model.directory)).fault is F.STALE_INDEX
    checkpoint = load(model.directory, allow_stale_index=True)
    assert len(checkpoint.tensors) == 3
    assert checkpoint.survey.index is None
    assert "stale" in checkpoint.warnings[0]


def test_a_stale_index_cannot_be_ignored_if_the_files_are_no_complete_set(model) -> None:
    model.two_files().index({EMBED: "other.safetensors"}).path(SECOND).unlink()
    error = refused(lambda: survey(model.directory, allow_stale_index=True))
    assert error.fault is F.INCOMPLETE_DOWNLOAD


def test_an_index_without_any_file_is_neither_stale_nor_no_model(model) -> None:
    model.two_files()
    for name in (FIRST, SECOND):
        model.path(name).unlink()
    assert refused(lambda: survey(model.directory)).fault is F.MISSING_FILE


def test_tensors_that_are_not_where_the_index_says_are_all_named(model) -> None:
    wanted = {EMBED: FIRST, QUERY: SECOND, HEAD: SECOND, "model.norm.weight": SECOND}
    error = refused(lambda: load(model.two_files().index(wanted).directory))
    assert error.fault is F.MISSING_TENSOR
    assert "'model.norm.weight'" in str(error)
    assert repr(QUERY) in str(error)


# --- without an index -------------------------------------------------------------------------------------------------


def test_two_tensors_of_one_name_and_nobody_to_decide_are_refused_with_both_files(model) -> None:
    model.config().file(FIRST, model.embed, model.query).file(SECOND, model.head, (QUERY, "BF16", [8, 8], 77))
    error = refused(lambda: load(model.directory))
    assert error.fault is F.DUPLICATE_TENSOR
    assert FIRST in str(error)
    assert SECOND in str(error)


def test_a_split_that_lacks_a_part_is_an_unfinished_download(model) -> None:
    model.config().file("model-00001-of-00003.safetensors", model.embed)
    error = refused(lambda: survey(model.directory))
    assert error.fault is F.INCOMPLETE_DOWNLOAD
    assert "2 of the 3" in str(error)


def test_a_directory_without_weights_says_what_else_is_there(model) -> None:
    error = refused(lambda: survey(model.config().raw("pytorch_model.bin", b"x").directory))
    assert error.fault is F.NO_WEIGHTS
    assert "pytorch_model.bin" in str(error)


def test_files_without_a_tensor_are_no_weights(model) -> None:
    assert refused(lambda: load(model.config().file("model.safetensors").directory)).fault is F.NO_WEIGHTS


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fault", "words"),
    [
        (lambda p: os.truncate(p, p.stat().st_size - 16), F.TRUNCATED, "16 of 384"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0" * 16), F.TRAILING_BYTES, "16 trailing"),
        (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 3\n"), F.LFS_POINTER, "LFS"),
        (lambda p: p.write_bytes(b""), F.EMPTY_FILE, "0 bytes"),
        (lambda p: p.write_bytes(b"\xff" * 8 + b"{}"), F.HEADER_TOO_LARGE, "18446744073709551615"),
    ],
    ids=["truncated", "trailing", "lfs", "empty", "huge"],
)
def test_a_damaged_file_is_named_with_what_is_wrong(model, change, fault, words) -> None:
    change(model.two_files().path(FIRST))
    error = refused(lambda: load(model.directory))
    assert error.fault is fault
    assert words in str(error)
    assert FIRST in str(error)


def test_every_bad_file_is_listed_in_one_message(model) -> None:
    model.two_files().raw(FIRST, b"version https://git-lfs.github.com/spec/v1\n").raw(SECOND, b"short")
    error = refused(lambda: load(model.directory))
    assert error.fault is F.LFS_POINTER
    assert "2 checkpoint files are unusable" in str(error)
    assert FIRST in str(error)
    assert f"{SECOND}: 5 bytes" in str(error)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("replace", [replace_by_fifo, replace_by_directory, replace_by_device])
@pytest.mark.parametrize("name", [FIRST, "config.json", "model.safetensors.index.json"])
def test_what_is_no_file_is_refused_and_nothing_waits_for_it(model, replace, name: str) -> None:
    replace(model.two_files().path(name))
    error = refused(lambda: survey(model.directory))
    assert error.fault is F.NOT_A_FILE
    assert name in str(error)


def test_a_file_that_turns_into_a_fifo_after_the_survey_is_refused(model) -> None:
    found = survey(model.two_files().directory)
    replace_by_fifo(model.path(FIRST))
    assert refused(lambda: open_checkpoint(found)).fault is F.NOT_A_FILE


def test_a_file_that_changed_since_the_survey_is_refused(model) -> None:
    found = survey(model.two_files().directory)
    data = bytearray(model.path(FIRST).read_bytes())
    data[-1] ^= 1
    times = model.path(FIRST).stat()
    model.raw(FIRST, data)
    os.utime(model.path(FIRST), ns=(times.st_atime_ns, times.st_mtime_ns))
    assert refused(lambda: open_checkpoint(found)).fault is F.CHANGED_WHILE_READING


def test_files_that_may_not_be_read_are_unreadable_each_by_name(model, monkeypatch) -> None:
    def deny(path, *args, **kwargs):
        if str(path).endswith(".safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    real = os.open
    found = survey(model.two_files().directory)
    monkeypatch.setattr(os, "open", deny)
    error = refused(lambda: open_checkpoint(found))
    assert error.fault is F.UNREADABLE
    assert FIRST in str(error)
    assert SECOND in str(error)


def test_a_symlink_that_leads_in_circles_is_unreadable(model) -> None:
    model.config().path("model.safetensors").symlink_to("model.safetensors")
    assert refused(lambda: survey(model.directory)).fault is F.UNREADABLE


# --- configuration ----------------------------------------------------------------------------------------------------


def test_a_directory_without_config_json_is_refused(model) -> None:
    model.two_files().path("config.json").unlink()
    assert refused(lambda: survey(model.directory)).fault is F.NO_CONFIG


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\xff"])
def test_a_config_json_that_is_no_object_is_refused(model, text: str) -> None:
    model.two_files().path("config.json").write_text(text, encoding="latin-1")
    assert refused(lambda: survey(model.directory)).fault is F.BAD_CONFIG


def test_a_directory_that_is_none_is_refused(model) -> None:
    assert refused(lambda: survey(model.directory / "absent")).fault is F.NO_DIRECTORY
    assert refused(lambda: survey(model.config().path("config.json"))).fault is F.NO_DIRECTORY


def test_configuration_that_decides_how_bytes_are_used_is_digested_and_other_is_not(model) -> None:
    model.two_files()
    for name in ("quantize_config.json", "hf_quant_config.json", "quant_config.json", "generation_config.json"):
        model.path(name).write_text("{}")
    model.path("tokenizer.json").write_text("{}")
    model.path("modeling_x.py").write_text("")
    digested = {"config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json"}
    assert survey(model.directory).config_digests.keys() == digested
    model.config(auto_map={"AutoModel": "modeling_x.X"})
    assert survey(model.directory).config_digests.keys() == digested | {"modeling_x.py"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_small_file_that_git_lfs_keeps_elsewhere_is_said_to_be_so(model, name: str) -> None:
    model.two_files().path(name).write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    assert refused(lambda: survey(model.directory)).fault is F.LFS_POINTER


def test_model_code_that_config_json_does_not_refer_to_may_be_missing(model) -> None:
    model.two_files().path("modeling_x.py").symlink_to("nowhere")
    assert load(model.directory).survey.config_digests.keys() == {"config.json"}
    model.config(auto_map={})
    assert refused(lambda: survey(model.directory)).fault is F.MISSING_FILE


# --- hub caches -------------------------------------------------------------------------------------------------------


def test_a_hub_cache_is_read_through_its_symlinks_and_its_blobs_name_their_digest(model) -> None:
    repository = model.two_files().hub(COMMIT)
    found = survey(repository / "snapshots" / COMMIT)
    assert found.commit == COMMIT
    assert [f.blob for f in found.files] == [f.path.resolve().name for f in found.files]
    assert len(open_checkpoint(found).tensors) == 3


def test_a_hub_repository_stands_for_the_snapshot_of_its_revision(model) -> None:
    repository = model.two_files().hub(COMMIT)
    assert survey(repository).commit == COMMIT
    assert survey(repository, revision=COMMIT).directory == repository / "snapshots" / COMMIT
    (repository / "refs" / "pr").mkdir()
    (repository / "refs" / "pr" / "1").write_text(COMMIT + "\n")
    assert survey(repository, revision="pr/1").commit == COMMIT


@pytest.mark.parametrize("revision", ["main", "absent", "../x", "", "/etc"])
def test_a_revision_whose_snapshot_is_not_there_is_its_own_fault(model, revision: str) -> None:
    repository = model.two_files().hub(COMMIT)
    (repository / "refs" / "main").write_text("f" * 40)
    error = refused(lambda: survey(repository, revision=revision))
    assert error.fault is F.UNKNOWN_SNAPSHOT
    if revision == "main":
        assert "f" * 40 in str(error)
        assert COMMIT in str(error)


@pytest.mark.parametrize("content", [b"", b"../../..", b"\xff\xfe", b"a/b"])
def test_a_ref_that_names_no_commit_is_refused(model, content: bytes) -> None:
    repository = model.two_files().hub(COMMIT)
    (repository / "refs" / "main").write_bytes(content)
    assert refused(lambda: survey(repository)).fault is F.UNKNOWN_SNAPSHOT


def test_a_snapshot_that_is_not_there_is_an_unknown_snapshot(model) -> None:
    repository = model.two_files().hub(COMMIT)
    assert refused(lambda: survey(repository / "snapshots" / "absent")).fault is F.UNKNOWN_SNAPSHOT


def test_a_link_to_a_blob_that_is_gone_says_so(model) -> None:
    snapshot = model.two_files().hub(COMMIT) / "snapshots" / COMMIT
    (snapshot / FIRST).resolve().unlink()
    error = refused(lambda: survey(snapshot))
    assert error.fault is F.INCOMPLETE_DOWNLOAD
    assert "blobs/" in str(error)
    (snapshot / SECOND).resolve().unlink()
    assert refused(lambda: survey(snapshot)).fault is F.MISSING_FILE


# --- what it costs ----------------------------------------------------------------------------------------------------

TRACED = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("open", "os.open") else None)
from wcache.weights.checkpoint import survey
found = survey(sys.argv[1])
print(json.dumps([[p for p in opened if p.endswith(".safetensors")], "torch" in sys.modules, len(found.files)]))
"""


def test_a_survey_opens_no_checkpoint_file_and_imports_no_torch(model) -> None:
    command = [sys.executable, "-c", TRACED, str(model.two_files().directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], False, 2]


def test_a_config_beyond_its_limit_is_not_read(model, monkeypatch) -> None:
    model.two_files().path("config.json").write_text("{}" + " " * 100)
    with pytest.raises(CheckpointError, match="at most 10"):
        directory.read_small(model.path("config.json"), 10)
