# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU: an attached engine of each kind of model is the one from disk, and nothing can write into it.

One run of `scripts/bench/vllm_methods.py`, in which each engine has a process of its own. Needs vLLM with CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMIT_S = 480

# case: a tiny checkpoint of make_model.py, and the format that quantize_model.py gives it or what drafts for it
CASES = {
    "dense": ("wide", ""), "moe": ("wide-moe", ""), "mla": ("deepseek", ""),
    "draft_model": ("llama", "+draft_model=draft"), "eagle": ("llama", "+eagle=eagle"),
    "eagle3": ("llama", "+eagle3=eagle3"), "mtp": ("ernie", "+mtp"),
    "moe-fp8": ("wide-moe", "fp8"), "moe-fp8-block": ("wide-moe", "fp8-block"),
    **{name: ("wide", name) for name in (
        "fp8", "fp8-static", "fp8-block", "fp8-channel", "int8", "packed-int4", "packed-int4-128", "awq", "awq-128",
        "gptq", "gptq-128", "modelopt-fp8", "nvfp4",
    )},
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the benchmark found for each case."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    root = tmp_path_factory.mktemp("models")
    names = {source for source, _ in CASES.values()} | {"draft", "eagle", "eagle3"}
    python("make_model.py", "tiny", str(root), *sorted(names))
    models = {}
    for source in ("wide", "wide-moe"):
        formats = [how for name, how in CASES.values() if name == source and how]
        python("quantize_model.py", str(root / source), str(root / f"{source}-in"), *formats)
    for case, (source, how) in CASES.items():
        method, _, draft = how.partition("=")
        quantized = how and not how.startswith("+")
        models[case] = str(root / f"{source}-in" / how if quantized else root / source) + (
            f"{method}={root / draft}" if draft else how if not quantized else ""
        )
    found = root / "rows.json"
    python("bench/vllm_methods.py", "--jobs", "5", "--json", str(found), *models.values(), ok=(0, 1))
    answer = json.loads(found.read_text())
    by_model = {row["model"]: row for row in answer["rows"]}
    return {case: by_model[model] for case, model in models.items()}


def python(script: str, *arguments: str, ok: tuple[int, ...] = (0,)) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPTS / script), *arguments]
    paths = os.pathsep.join([str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode in ok, script


@pytest.mark.timeout(LIMIT_S + 120)
@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, rows: dict[str, Any]) -> None:
    """Names, kinds, classes, dtypes, shapes, strides, bytes, every attribute, greedy tokens; and writes are refused."""
    row = rows[case]
    assert row["shared"], row["cells"]
    assert row["wrong"] == []
