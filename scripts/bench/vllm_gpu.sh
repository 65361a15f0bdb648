#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Restart time, tokens, KV cache and GPU memory of vLLM from disk, from `vllm preload` + ipc_cache, and from wcache: one
# run on one GPU, one table. Needs vLLM 0.33 importable, and a checkpoint (MODEL) or a generator of one (MAKE_MODEL).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${PYTHON:=python3}" "${MODEL:=/var/tmp/wcache-bench-model}" "${OUT:=/tmp/wcache-bench}"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p "$OUT"
if ! "$PYTHON" -c 'import importlib.metadata as m; m.version("wcache")' 2>/dev/null; then
    # Not installed here: vLLM finds plugins by their metadata, so give it what pip would.
    info=$OUT/site/wcache-0.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: wcache\nVersion: 0\n' >"$info/METADATA"
    printf '[vllm.general_plugins]\nwcache = wcache.engine.vllm.plugin:register\n' >"$info/entry_points.txt"
    export PYTHONPATH="$PYTHONPATH:$OUT/site"
fi
if [[ ! -e $MODEL/config.json ]]; then
    "$PYTHON" "${MAKE_MODEL:?no checkpoint at $MODEL, and MAKE_MODEL names no script that makes one}" "$MODEL"
fi
exec "$PYTHON" "$here/scripts/bench/vllm_gpu.py" --model "$MODEL" --out "$OUT" "$@"
