# SPDX-License-Identifier: Apache-2.0
"""`--load-format wcache`: vLLM's model loader over a rank's resident weights.

A hit maps the weights and reads nothing of the checkpoint; a miss says why, loads the way vLLM does without us, and
publishes the result from the engine, so that the next start is a hit. Whatever goes wrong with the cache, the engine
starts from disk, unless `fallback` is off; it never serves a tensor that nobody can vouch for.
Surprising: vLLM makes one loader to ask for external memory and another to load; see `session`.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from wcache.engine.client import as_miss
from wcache.engine.election import say_mapped, say_missed
from wcache.engine.publish import Publication
from wcache.engine.vllm import beside, bind, drafts, guard, methods, options, session, writeback
from wcache.engine.vllm.disk import DiskLoader, unpacked_linear
from wcache.engine.vllm.group import Group
from wcache.engine.vllm.plugin import share_handlers
from wcache.engine.vllm.session import Outcome
from wcache.engine.vllm.skeleton import preview, skeleton
from wcache.errors import Miss, StructureError, WcacheError
from wcache.model import MissReason, Mode

log = logging.getLogger(__name__)


class WcacheLoader(BaseModelLoader):  # type: ignore[misc]
    """Registered under the load format `wcache`. Raises ConfigError for options that are not known."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        share_handlers()
        self.options = options.parse(load_config.model_loader_extra_config or {})

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of exactly the shards that `load_model` will attach, the draft's included; 0 for a miss."""
        # vLLM has just collected garbage, will do so several times while it loads and profiles, and freezes the heap
        # when it has started: done now, those collections need not walk what its imports made, 0.4 s each time.
        gc.freeze()
        counted = _count(vllm_config, vllm_config.model_config, self.options)
        draft, how = drafts.draft_of(vllm_config), drafts.load_config_of(vllm_config)
        if draft is not None and how.load_format == self.load_config.load_format:
            counted += _count(vllm_config, draft, options.parse(how.model_loader_extra_config or {}))
        return counted

    def download_model(self, model_config: Any) -> None:
        DiskLoader(self.load_config).download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """From disk into a model that stands. Raises Miss if its weights are shared."""
        guard.refuse(model, "load_weights")
        DiskLoader(self.load_config).load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, for a reload. Raises Miss if the model's weights are shared."""
        guard.refuse(model, "reload_weights")
        return DiskLoader(self.load_config).get_all_weights(model_config, model)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        outcome = session.kept(model_config)
        if outcome is None:
            outcome = session.look(vllm_config, model_config, self.options)
        model = self._attached(outcome, vllm_config, model_config, prefix)
        if model is None:
            self._look_closer(outcome, vllm_config, model_config, prefix)
            self._refuse_to_fall_back(outcome)
            model = self._from_disk(outcome, vllm_config, model_config, prefix)
        return model.eval()

    def _attached(self, outcome: Outcome, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module | None:
        """The model over the attached shard on every rank, or None on every rank."""
        if outcome.attachment is None:
            return None
        model: nn.Module | None = None
        try:
            model = self._bind(outcome, vllm_config, model_config, prefix)
        except WcacheError as e:
            outcome.drop(e)
        except Exception as e:  # whatever vLLM's own code makes of a skeleton, the disk is still there
            log.debug("binding failed", exc_info=True)
            outcome.drop(StructureError(f"vLLM does not take the shared weights: {type(e).__name__}: {e}"))
        bound = [ok for [ok] in Group.world().gather([int(model is not None)])]
        if model is not None and not all(bound):
            outcome.drop(Miss(MissReason.STRUCTURE, f"rank {bound.index(0)} of this engine could not bind its shard"))
            model = None
        if model is None:
            outcome.request = None  # what is resident under this key does not fit: there is nothing to publish
        return model

    def _bind(self, outcome: Outcome, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.model_executor.utils import weights_already_processed

        held = outcome.attachment
        assert held is not None and outcome.request is not None
        manifest, clock = held.manifest, Clock(outcome.seconds)
        other = beside.differing(outcome.request.survey.directory, manifest.extra.get("beside", {}))
        if other is not None:
            raise Miss(MissReason.CONTENT, f"the model reads {other} as well, which differs from where it was loaded")
        target = torch.device(self.load_config.device or vllm_config.device_config.device)
        with skeleton(vllm_config, model_config, prefix) as model, ExitStack() as unwind:
            clock.lap("skeleton")
            why = methods.unshareable(model)
            if why is not None:
                raise Miss(MissReason.UNSUPPORTED, why)
            bind.check(model, manifest)
            unwind.enter_context(drafts.aside(model, vllm_config, model_config, manifest.attributes))
            tensors, private = bind.tensors_of(manifest, held.mapping, copy=self.options.mode is Mode.COPY)
            late = bind.bind(model, manifest, tensors)
            clock.lap("bind")
            with unpacked_linear(), methods.not_run(methods.rebuilt(model)), weights_already_processed():
                process_weights_after_loading(model, model_config, target)
            clock.lap("post-process")
            bind.complete(model, manifest, tensors, late)
            clock.lap("check")
        guard.reload_to(model, target)
        self._settle(model, outcome, private)
        return model

    def _settle(self, model: nn.Module, outcome: Outcome, private: int) -> None:
        """Keep the lease as long as the model lives, or give the shard back after copying it."""
        held = outcome.attachment
        assert held is not None
        if self.options.mode is Mode.COPY:
            held.release(evict=True)
        else:
            model.__dict__[guard.ATTACHMENT] = held
        guard.install(model)
        say_mapped(held)
        spent = ", ".join(f"{name} {s * 1000:.1f} ms" for name, s in outcome.seconds.items())
        log.info("wcache: %s; %.1f MiB of private copies", spent, private / (1 << 20))

    def _look_closer(self, outcome: Outcome, vllm_config: Any, model_config: Any, prefix: str) -> None:
        """A model that cannot be shared is the reason on every rank, and nobody shall wait for its publication."""
        if outcome.request is None:
            return
        why = None
        if session.may_publish(outcome, self.options) or drafts.quantization_of(vllm_config, model_config) is not None:
            outcome.preview = preview(vllm_config, model_config, prefix)
            why = outcome.preview.why
        fine = [ok for [ok] in Group.world().gather([int(why is None)])]
        if not all(fine):
            said = why or f"rank {fine.index(0)} of this engine cannot share its part; its log says more"
            outcome.request, outcome.error = None, Miss(MissReason.UNSUPPORTED, said)

    def _refuse_to_fall_back(self, outcome: Outcome) -> None:
        assert outcome.error is not None
        if not self.options.fallback:
            raise outcome.error
        say_missed(as_miss(outcome.error))

    def _from_disk(self, outcome: Outcome, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
        """vLLM's own load, then the publication for the next start; or what another engine published meanwhile."""
        publication = session.elect(outcome, self.options)
        if publication is None and outcome.attachment is not None:
            model = self._attached(outcome, vllm_config, model_config, prefix)
            if model is not None:
                return model
        with writeback.abandoned_on_error(publication):
            disk = DiskLoader(self.load_config)
            model = disk.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            guard.install(model)
        if publication is not None:
            with drafts.aside(model, vllm_config, model_config):
                self._publish(model, disk, publication, outcome)
        return model

    @staticmethod
    def _publish(model: nn.Module, disk: DiskLoader, publication: Publication, outcome: Outcome) -> None:
        assert outcome.request is not None
        start = time.perf_counter()
        try:
            model.__dict__[guard.ATTACHMENT] = writeback.publish(
                model, disk, publication, outcome.request, outcome.preview
            )
        except WcacheError as e:
            log.warning("wcache: not published: %s", e)
            return
        except Exception:  # an engine that has its weights serves, whatever became of their publication
            log.exception("wcache: not published")
            return
        log.info("wcache: published for the next start in %.2f s", time.perf_counter() - start)


def _count(vllm_config: Any, model_config: Any, wanted: options.Options) -> int:
    outcome = session.look(vllm_config, model_config, wanted)
    session.keep(model_config, outcome)
    return session.external_bytes(outcome, wanted)


class Clock:
    """Writes what each phase took into a dict (seconds)."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name], self._last = now - self._last, now
