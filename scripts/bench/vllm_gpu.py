# SPDX-License-Identifier: Apache-2.0
"""Side by side on one GPU: `vllm serve` from disk, from `vllm preload` + ipc_cache, and from wcache. Prints one table.

The rank's daemon runs in the foreground (no systemd: its fd store is not part of this). Every start is the same
command but for its load format; greedy tokens must be equal in all of them, KV caches within one block. Parameters are
mapped read-only, so a write into one during load, profiling, capture or decode would have ended the engine: that the
tokens come is the audit, and the loader says how much memory is private. Phases are cut at the moments log lines come.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

PORT, HEALTH_PORT = 18100, 18200
START_DEADLINE_S = 240.0
PROMPTS = ["w5 w6 w7 w1000 w20000", "w17 w3 w900"]
MARKS = {
    "imported": "Initializing a V1 LLM engine|non-default args",
    "engine": "world_size=|Initializing a V1 LLM engine",
    "loading": "Starting to load model|Loading model from scratch",
    "loaded": "Model loading took",
    "initialised": "init engine",
}


@dataclass
class Start:
    """One start of a server. Times are seconds since its command was run."""

    name: str
    marks: dict[str, float] = field(default_factory=dict)
    healthy: float = 0.0
    tokens: list[str] = field(default_factory=list)
    kv_tokens: int = 0
    model_s: float = 0.0
    init_s: float = 0.0
    gpu_mib: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        loading, loaded = self.marks.get("loading", 0.0), self.marks.get("loaded", 0.0)
        after = self.healthy - self.marks.get("initialised", self.healthy)
        cells = [self.healthy, loading, loaded - loading, self.model_s, self.init_s, after]
        return [self.name, *(f"{c:.2f}" for c in cells), f"{self.kv_tokens:,}", f"{self.gpu_mib:,}"]


class Process:
    """A child whose output goes to a file and, line by line, to `on_line`."""

    def __init__(self, command: list[str], log: Path, on_line=lambda _: None) -> None:
        self.log = log
        self.child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(on_line,), daemon=True)
        self._reader.start()

    def _read(self, on_line) -> None:
        assert self.child.stdout is not None
        with self.log.open("w") as f:
            for line in self.child.stdout:
                f.write(line)
                f.flush()
                on_line(line)

    def stop(self, number: int = signal.SIGINT) -> None:
        for n in (number, signal.SIGKILL):
            try:
                os.killpg(self.child.pid, n)
            except ProcessLookupError:
                break
            try:
                self.child.wait(15)
            except subprocess.TimeoutExpired:
                continue
        try:
            os.killpg(self.child.pid, signal.SIGKILL)  # workers outlive their parent at times
        except ProcessLookupError:
            pass
        self.child.wait()
        self._reader.join(5)


def fetch(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def wait_healthy(port: int, process: Process) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            fetch(f"http://127.0.0.1:{port}/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.child.poll() is not None:
                break
            time.sleep(0.05)
    tail = "".join(process.log.read_text().splitlines(keepends=True)[-40:])
    raise SystemExit(f"no /health on port {port}; the last lines of {process.log}:\n{tail}")


def gpu_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.common = ["--max-model-len", "2048", "--gpu-memory-utilization", "0.5", *args.extra]
        self.starts: list[Start] = []

    def serve(self, name: str, *options: str, keep: bool = False, model: str | None = None) -> tuple[Start, Process]:
        model = model or self.args.model
        start, began = Start(name), time.monotonic()

        def on_line(line: str) -> None:
            for mark, pattern in MARKS.items():
                if mark not in start.marks and re.search(pattern, line):
                    start.marks[mark] = time.monotonic() - began
            self._note(start, line)

        command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(PORT), *self.common, *options]
        process = Process(command, self.out / f"{name}.log", on_line)
        wait_healthy(PORT, process)
        start.healthy = time.monotonic() - began
        start.tokens = self.ask(model)
        start.gpu_mib = gpu_mib()
        self.starts.append(start)
        print(f"## {name}: healthy after {start.healthy:.1f} s; {'; '.join(start.notes)}", flush=True)
        if not keep:
            process.stop()
        return start, process

    @staticmethod
    def _note(start: Start, line: str) -> None:
        if m := re.search(r"Model loading took .*? and ([\d.]+) seconds", line):
            start.model_s = float(m[1])
        if m := re.search(r"init engine .*? took ([\d.]+) s", line):
            start.init_s = float(m[1])
        if m := re.search(r"GPU KV cache size: ([\d,]+) tokens", line):
            start.kv_tokens = int(m[1].replace(",", ""))
        if m := re.search(r"(Mapped \d+ tensors.*|wcache: .*|published .*|Weight cache unusable.*)", line):
            start.notes.append(m[1].strip())

    def ask(self, model: str) -> list[str]:
        body = {"model": model, "prompt": "", "max_tokens": 16, "temperature": 0}
        answers = [fetch(f"http://127.0.0.1:{PORT}/v1/completions", body | {"prompt": p}) for p in PROMPTS]
        return [json.loads(a)["choices"][0]["text"] for a in answers]

    def wcache(self) -> None:
        """Cold + publish, warm zero_copy, daemon killed while serving, and (a new daemon) warm copy."""
        daemon = self.daemon("daemon")
        self.serve("wcache-cold", "--load-format", "wcache")
        print(f"publisher gone: {gpu_mib()} MiB in use", flush=True)
        self.serve("wcache-warm", "--load-format", "wcache", "--model-loader-extra-config", '{"fallback": false}')
        if self.args.compile:
            self.common = [c for c in self.common if c != "--enforce-eager"]
            self.serve("wcache-warm-compile", "--load-format", "wcache")
            self.common.append("--enforce-eager")
        start, server = self.serve(
            "wcache-copy", "--load-format", "wcache", "--model-loader-extra-config", '{"mode": "copy"}', keep=True
        )
        os.kill(daemon.child.pid, signal.SIGKILL)
        daemon.child.wait()
        again = self.ask(self.args.model)
        print(f"daemon killed -9 while serving: tokens {'equal' if again == start.tokens else 'DIFFERENT'}", flush=True)
        server.stop()
        print(f"all gone: {gpu_mib()} MiB in use", flush=True)

    def daemon(self, name: str) -> Process:
        sockets = self.out / "sockets"
        sockets.mkdir(mode=0o700, exist_ok=True)
        config = self.out / "wcache.toml"
        config.write_text(f'backend = "cuda"\nsocket_dir = "{sockets}"\nstate_dir = "{self.out / "state"}"\n')
        os.environ.update(WCACHE_CONFIG=str(config), WCACHE_STATE_DIR=str(self.out / "state"))
        command = [sys.executable, "-m", "wcache.daemon", "--rank", "0", "--config", str(config)]
        process = Process(command, self.out / f"{name}.log")
        deadline = time.monotonic() + 30
        while not (sockets / "rank-0.sock").exists():
            if process.child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon did not come up:\n{process.log.read_text()}")
            time.sleep(0.05)
        return process

    def ipc_cache(self) -> None:
        health = ["--weight-cache-health-host", "127.0.0.1", "--weight-cache-health-port", str(HEALTH_PORT)]
        began = time.monotonic()
        command = ["vllm", "preload", "--model", self.args.model, *health, *self.common]
        preload = Process(command, self.out / "preload.log")
        wait_healthy(HEALTH_PORT, preload)
        print(f"## vllm preload: ready after {time.monotonic() - began:.1f} s, {gpu_mib()} MiB in use", flush=True)
        self.serve("ipc_cache", "--load-format", "ipc_cache")
        preload.stop()

    def table(self) -> bool:
        head = [
            "start",
            "healthy s",
            "until load s",
            "load s",
            "model s",
            "init s",
            "after init s",
            "KV tokens",
            "GPU MiB",
        ]
        rows = [head, *(s.row() for s in self.starts)]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        for row in rows:
            print(
                "| "
                + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
                + " |"
            )
        equal = all(s.tokens == self.starts[0].tokens for s in self.starts)
        print(f"tokens: {'equal in all starts' if equal else {s.name: s.tokens for s in self.starts}}")
        return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", default="/tmp/wcache-bench")
    parser.add_argument("--steps", default="disk,wcache,ipc_cache")
    parser.add_argument("--compile", action="store_true", help="one more warm start, with compilation and CUDA graphs")
    parser.add_argument("--extra", nargs="*", default=["--enforce-eager"])
    bench = Bench(parser.parse_args())
    steps = {"disk": lambda: bench.serve("disk"), "wcache": bench.wcache, "ipc_cache": bench.ipc_cache}
    for step in bench.args.steps.split(","):
        steps[step]()
    return 0 if bench.table() else 1


if __name__ == "__main__":
    sys.exit(main())
