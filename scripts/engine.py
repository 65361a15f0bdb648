#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small engine: a plain Transformers model on the meta device, filled by wcache, that answers a prompt greedily.

    engine.py MODEL_DIR [--prompt TEXT] [--tokens N] [--no-fallback] [--json]

All that an engine has to do is one call, `wcache.load_into`. `--json` prints what that call cost: its seconds, the
checkpoint files that were opened in it (an audit hook sees every open of this process) and the bytes read meanwhile
(rchar of /proc/self/io; 0 if no checkpoint file was opened, since then none was read).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import wcache

opened: list[str] = []


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("model", type=Path)
    p.add_argument("--prompt", default="The three most important inventions of the last century are")
    p.add_argument("--tokens", type=int, default=24)
    p.add_argument("--no-fallback", action="store_true", help="fail instead of loading from disk")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _ = wcache.load_into, wcache.init_buffers  # imports are not what is measured
    sys.addaudithook(note_open)
    model = skeleton(args.model)
    opened.clear()
    before, start = bytes_read(), time.perf_counter()
    attachment = wcache.load_into(model, args.model, init=wcache.init_buffers, fallback=not args.no_fallback)
    seconds, read = time.perf_counter() - start, bytes_read() - before
    files = sorted(set(opened))
    text = generate(model, args.model, args.prompt, args.tokens)
    report = {
        "seconds": seconds,
        "source": attachment.source,
        "files_opened": files,
        "bytes_read": read if files else 0,
        "timing": attachment.timing,
        "text": text,
    }
    print(json.dumps(report) if args.json else text)
    attachment.close()
    return 0


def skeleton(directory: Path) -> Any:
    """The model without its weights."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def generate(model: Any, directory: Path, prompt: str, tokens: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if path.endswith(".safetensors"):
            opened.append(path)


def bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no rchar")


if __name__ == "__main__":
    sys.exit(main())
