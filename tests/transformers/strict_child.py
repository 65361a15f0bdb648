# SPDX-License-Identifier: Apache-2.0
"""An engine in which every warning is an error: strict_child.py DIRECTORY SOCKET. Run with python -W error.

Transformers itself, without us, loads the model under that rule as well, so that whatever warns is ours.
"""

from __future__ import annotations

import sys

import torch
import transformers
from torch import nn

import wcache
import wcache.transformers


def load(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


assert sys.warnoptions == ["error"]
plain = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
for expected in ("disk", "cache"):
    model = wcache.transformers.from_pretrained(sys.argv[1], socket_path=sys.argv[2])
    held = wcache.transformers.attachment(model)
    assert held is not None and held.source == expected, held
    ids = torch.tensor([[5, 9, 17, 33]])
    assert torch.equal(model(ids).logits, plain(ids).logits)
copy = wcache.transformers.from_pretrained(sys.argv[1], socket_path=sys.argv[2], mode="copy", fallback=False)
for _ in ("cold", "warm"):
    module = wcache.cached(build, key="k", load=load, socket_path=sys.argv[2])
    assert torch.equal(module[0].weight, torch.ones(4, 4))
wcache.cached(build, key="k", socket_path=sys.argv[2], mode="copy", fallback=False)
print("no warnings")
