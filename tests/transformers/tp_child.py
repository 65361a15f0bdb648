# SPDX-License-Identifier: Apache-2.0
"""One rank of a tensor parallel engine of Transformers: tp_child.py RANK WORLD RENDEZVOUS DIRECTORY SOCKET_DIR STARTS.

Loads the model without the cache, then once with each options of STARTS (JSON), and compares all of it with the first,
bit for bit. Prints where each start had its weights from, whether it could be trained, and digests of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import equality
import tiny_checkpoints as tiny
import torch
import transformers
from torch import distributed
from transformers.distributed import DistributedConfig

import wcache
from wcache.errors import TrainingRefused


def local(model: torch.nn.Module) -> dict[str, Any]:
    """Every tensor by name, a DTensor as its local part, and how it is placed."""
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if hasattr(tensor, "_local_tensor"):
            found[f"{name} placed"] = (
                type(tensor),
                tensor.placements,
                tensor.device_mesh,
                tensor.shape,
                tensor.stride(),
            )
            found[f"{name} grad"] = (tensor.requires_grad, type(tensor._local_tensor))
            tensor = tensor._local_tensor
        found[name] = tensor
    return found


def same(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    a, b = local(mine), local(theirs)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            equality.same_tensor(value, b[name], name)
        else:
            assert value == b[name], name
    assert equality.plain(mine) == equality.plain(theirs)
    assert equality.ties(equality.named(mine)) == equality.ties(equality.named(theirs))


def digests(model: torch.nn.Module) -> dict[str, str]:
    tensors = {n: t for n, t in local(model).items() if isinstance(t, torch.Tensor)}
    return {n: hashlib.sha256(equality.raw(t).numpy().tobytes()).hexdigest() for n, t in tensors.items()}


def answer(model: Any) -> list[float]:
    with torch.no_grad():
        return [float(x) for x in model(tiny.input_ids()).logits.float().flatten()[:64]]


def main() -> None:
    rank, world, rendezvous, directory, sockets = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)

    def spread() -> dict[str, Any]:
        return {"distributed_config": DistributedConfig(tp_size=world, tp_plan="auto")}

    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, **spread())
    starts = []
    for options in json.loads(sys.argv[6]):
        train = options.pop("train", False)
        model = wcache.transformers.from_pretrained(directory, socket_dir=Path(sockets), **options, **spread())
        same(model, plain)
        assert answer(model) == answer(plain)
        held = wcache.transformers.attachment(model)
        starts.append({"source": held.source if held is not None else "private", "trained": train and trained(model)})
        distributed.barrier()
    print(json.dumps({"starts": starts, "digests": digests(plain)}))
    distributed.destroy_process_group()


def trained(model: Any) -> bool:
    try:
        model(tiny.input_ids(), labels=tiny.input_ids()).loss.backward()
    except TrainingRefused:
        return False
    return True


if __name__ == "__main__":
    main()
