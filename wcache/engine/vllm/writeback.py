# SPDX-License-Identifier: Apache-2.0
"""What a cold engine, or the preload, gives to its rank after vLLM has loaded and processed the weights.

The engine's own parameters are moved onto the published segments, tensor by tensor, so that one copy remains; all
else (buffers, bare tensors) is copied and stays the engine's. Nothing is published that could not be vouched for: a
checkpoint that changed meanwhile, files that its identity does not cover, methods that hide their weights.
An engine never fails because of its publication: it says why, and serves from its own memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from wcache.engine.client import Attachment
from wcache.engine.publish import Publication
from wcache.engine.vllm import beside, capture, census, methods
from wcache.engine.vllm.disk import DiskLoader
from wcache.engine.vllm.request import Request
from wcache.engine.vllm.skeleton import Preview
from wcache.errors import PublishError, WcacheError
from wcache.weights.checkpoint import check_nothing_twice

log = logging.getLogger(__name__)


@contextmanager
def abandoned_on_error(publication: Publication | None) -> Iterator[None]:
    """Whoever waits for the publication learns at once that it will not come."""
    try:
        yield
    except BaseException as e:
        if publication is not None:
            publication.abort(f"loading failed: {type(e).__name__}: {e}")
        raise


def publish(
    model: nn.Module, disk: DiskLoader, publication: Publication, request: Request, preview: Preview | None
) -> Attachment:
    """Publish a processed model; returns this process's own lease on it.

    `preview`: what the engines that attach it will start from, and so what is not mentioned to them.
    Raises PublishError for a model that must not be shared, and what the rank answers.
    """
    before = disk.before
    start = preview.facts if preview is not None else before.facts if before is not None else {}
    changed = census.changes(start, census.facts(model))
    why = _objection(model, disk, request, start, changed)
    if why is not None or before is None:
        publication.abort(why or "unknown")
        raise PublishError(why or "unknown")
    _not_trained(model)
    return publication.write(
        capture.entries(model),
        repoint=True,
        attributes=changed,
        extra={
            "methods": before.methods,
            "consumed": before.consumed(model),
            "reshaped": before.reshaped(model),
            "bare": before.bare,
            "absent": capture.on_meta(model),
            "removed": disk.removed,
            "beside": beside.digests(request.survey, disk.opened),
        },
        model=request.query.model,
        last=request.check_unchanged,
    )


def _not_trained(model: nn.Module) -> None:
    """Some of vLLM's layers leave it on; nobody trains here, and shared memory is read-only."""
    model.requires_grad_(False)
    for spot in capture.bare(model):
        if spot.tensor.is_leaf:
            spot.tensor.requires_grad_(False)


def _objection(
    model: nn.Module, disk: DiskLoader, request: Request, start: census.Facts, changed: census.Facts
) -> str | None:
    """Why the processed model must not be shared, or None."""
    if disk.before is None:
        return "vLLM did not load the weights through its default loader"
    why = methods.unshareable(model)
    if why is not None:
        return why
    otherwise = census.unrestorable(census.changes(start, disk.before.facts))
    if otherwise is not None:
        return f"vLLM builds this model otherwise without its weights: {otherwise}"
    made = census.unrestorable(changed, methods.rebuilt(model))
    if made is not None:
        return f"post-processing made what cannot be put back: {made}"
    hidden = [path for path, tensor in capture.hidden(model).items() if not tensor.is_meta]
    if hidden:
        return f"{hidden[0]} is a tensor where it cannot be put back"
    known = tuple(f"{name}." for name in methods.rebuilt(model))  # whose kernels drop what they do not use
    emptied = [name for name in disk.before.emptied(model) if not name.startswith(known)]
    if emptied:
        return f"post-processing moved {emptied[0]} and {len(emptied) - 1} more out of sight"
    covered = {f.path.resolve() for f in request.survey.files}
    strangers = sorted(str(f) for f in disk.files - covered)
    if strangers:
        return f"vLLM also read {strangers[0]}, which the checkpoint's identity does not cover"
    try:
        check_nothing_twice(request.survey)
    except WcacheError as e:
        return str(e)
    return None
