#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small text server over Transformers, its weights from the cache: what a service of one's own looks like.

    server.py MODEL [--port 8000] [--rank 0]
    curl -d '{"prompt": "The capital of France is", "max_new_tokens": 8}' localhost:8000/generate

GET /health answers 200 when the model is there, with where its weights came from. See server.service beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import sdnotify
import torch
import transformers

import wcache.transformers

MAX_BODY_BYTES = 1 << 20
MAX_NEW_TOKENS = 1024


class Service:
    """The model, one request at a time."""

    def __init__(self, model: Path, rank: int) -> None:
        start = time.perf_counter()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.model = wcache.transformers.from_pretrained(model, rank=rank)
        held = wcache.transformers.attachment(self.model)
        self.source = held.source if held is not None else "disk, not shared"
        self.seconds = time.perf_counter() - start
        self._lock = threading.Lock()

    @torch.inference_mode()
    def generate(self, prompt: str, max_new_tokens: int) -> str:
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        with self._lock:
            out = self.model.generate(**inputs, max_new_tokens=min(max_new_tokens, MAX_NEW_TOKENS), do_sample=False)
        return str(self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class Handler(BaseHTTPRequestHandler):
    service: Service

    def do_GET(self) -> None:  # http.server's name
        if self.path != "/health":
            return self.answer(404, {"error": "GET /health, POST /generate"})
        return self.answer(200, {"weights": self.service.source, "seconds": round(self.service.seconds, 3)})

    def do_POST(self) -> None:  # http.server's name
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if self.path != "/generate" or not 0 < length <= MAX_BODY_BYTES:
                return self.answer(404, {"error": "POST /generate with a JSON body"})
            asked = json.loads(self.rfile.read(length))
            prompt, count = str(asked["prompt"]), int(asked.get("max_new_tokens", 32))
        except (ValueError, KeyError, TypeError) as e:
            return self.answer(400, {"error": f"{type(e).__name__}: {e}"})
        return self.answer(200, {"text": self.service.generate(prompt, count)})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logging.info(format, *args)


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("model", type=Path)
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--rank", type=int, default=0)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    Handler.service = Service(args.model, args.rank)
    with ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
        logging.info("ready: weights from %s in %.2f s", Handler.service.source, Handler.service.seconds)
        sdnotify.SystemdNotifier().notify("READY=1")
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
