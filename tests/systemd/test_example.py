# SPDX-License-Identifier: Apache-2.0
"""The example server under its own unit: it starts after the cache, and `systemctl restart` is warm."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from private_systemd import REPO, Manager, config

pytestmark = pytest.mark.systemd

EXAMPLES = REPO / "scripts" / "examples"
UNIT = "server.service"
PROMPT, COUNT = "The capital of France", 8
MAPPED = re.compile(r"Mapped \d+ tensors from the weight cache daemon \(zero_copy mode\)")


@dataclass
class Server:
    """The example, installed as its unit file says, but for its paths."""

    manager: Manager
    port: int

    def logged(self) -> str:
        """What it logged since this was asked last."""
        path = self.manager.host.directory / "log" / f"{UNIT}.log"
        text = path.read_text()
        path.write_text("")
        return text

    def weights(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as answer:
            return str(json.load(answer)["weights"])

    def text(self) -> str:
        body = json.dumps({"prompt": PROMPT, "max_new_tokens": COUNT}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/generate", body, timeout=30) as answer:
            return str(json.load(answer)["text"])


@pytest.fixture
def server(group: Manager, llama: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} {EXAMPLES / 'server.py'} {llama} --port {port}"
    unit = (EXAMPLES / UNIT).read_text()
    changed = re.sub(r"^ExecStart=.*$", f"ExecStart={command}", unit, flags=re.MULTILINE)
    assert changed != unit
    group.write(group.units / UNIT, changed)
    group.systemctl("daemon-reload")
    yield Server(group, port)
    group.systemctl("stop", UNIT, check=False)
    print((group.host.directory / "log" / f"{UNIT}.log").read_text())
    group.run("rm", group.units / UNIT)
    group.systemctl("daemon-reload")


@pytest.fixture(scope="module")
def expected(llama: Path) -> str:
    """What plain Transformers says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_restart_of_the_server_maps_what_its_first_start_published(server: Server, expected: str) -> None:
    server.manager.install("ranks = [0]\n")
    server.manager.systemctl("start", UNIT)
    assert "Weight cache unusable (empty: nothing is resident); falling back to disk loading" in server.logged()
    assert (server.weights(), server.text()) == ("disk", expected)
    server.manager.systemctl("restart", UNIT)
    assert MAPPED.search(server.logged())
    assert (server.weights(), server.text()) == ("cache", expected)
    assert [lease.name for lease in server.manager.status(0).shards[0].leases]


def test_with_a_preload_the_first_start_is_warm_because_it_waits_for_the_target(
    server: Server, llama: Path, expected: str
) -> None:
    server.manager.install(config(llama, loader='"transformers"'))
    server.manager.systemctl("start", UNIT)
    ready = server.manager.number("wcache@0.service", "ActiveEnterTimestampMonotonic")
    assert 0 < ready <= server.manager.number(UNIT, "ExecMainStartTimestampMonotonic")
    log = server.logged()
    assert MAPPED.search(log) and "unusable" not in log
    assert (server.weights(), server.text()) == ("cache", expected)
