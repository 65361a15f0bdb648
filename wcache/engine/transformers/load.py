# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained` of Transformers over a rank's resident weights: same arguments, same model.

Runs in engines. Transformers does all of it, except that a hit puts mapped tensors onto its skeleton where it would
have read them: no checkpoint file is opened. A miss says why, Transformers loads as ever, and the result is published
before the quantizer's post-processing, which runs again on every start. The cache never takes an engine down.
Surprising: `from_pretrained` itself opens a checkpoint file if config.json does not name a dtype.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wcache.config import CONNECT_TIMEOUT_S, STATE_TIMEOUT_S
from wcache.engine import snapshot, together
from wcache.engine.client import Attachment
from wcache.engine.election import Target, claim, look, release_copy, say_mapped, say_missed
from wcache.engine.group import Group
from wcache.engine.options import Where, where
from wcache.engine.parts import is_dtensor
from wcache.engine.publish import Publication
from wcache.engine.restore import restore
from wcache.engine.snapshot import Skeleton
from wcache.engine.tensors import tensors_of
from wcache.engine.training import frozen, guard
from wcache.engine.transformers import ranks, seam
from wcache.engine.transformers.drawn import Drawn, built_at_random, made_values, random_state
from wcache.engine.transformers.request import Request, prepare
from wcache.errors import ConfigError, Miss, PublishError, WcacheError
from wcache.model import IdentityPolicy, MissReason, Mode
from wcache.protocol.messages import Query
from wcache.weights.checkpoint import check_nothing_twice
from wcache.weights.fingerprint import digest

log = logging.getLogger(__name__)

_attachments: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()


def from_pretrained(
    pretrained_model_name_or_path: str | os.PathLike[str],
    *model_args: Any,
    auto_class: str | type = "AutoModelForCausalLM",
    rank: int = 0,
    mode: Mode | str = Mode.ZERO_COPY,
    fallback: bool = True,
    publish: bool = True,
    identity: IdentityPolicy | str = IdentityPolicy.CONTENT,
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """The model that `auto_class.from_pretrained(path, *model_args, **kwargs)` gives, with its weights from the cache.

    `auto_class`: an Auto class of Transformers or a model class, or the name of one. `rank`: the rank that is asked; in
    a tensor parallel engine that of its first process: the others ask those after it, and all attach or none. `mode`
    "copy": private memory, and the cache is freed if nobody else holds it. `fallback` False: a miss raises. `publish`
    False: what was loaded from disk is not offered to the rank. All other arguments are Transformers' own.
    zero_copy parameters are shared: on a CPU what this process writes stays its own (copy on write), on a GPU a write
    faults. Training them raises TrainingRefused at the first gradient; `mode="copy"` is the way out. Buffers are
    private. What Transformers raises is raised; Miss only without `fallback`.
    """
    chosen = class_of(auto_class)

    def place(tp_rank: int) -> Where:
        return where(
            pretrained_model_name_or_path,
            rank + tp_rank,
            socket_dir=socket_dir,
            path=socket_path,
            name=name,
            device=None,
            connect_timeout_s=connect_timeout_s,
            state_timeout_s=state_timeout_s,
        )

    arguments = {**kwargs, **({"*model_args": model_args} if model_args else {})}
    target = Target(place(0), Mode(mode), publish)
    loading = Load(target, place, IdentityPolicy(identity), arguments, fallback=fallback)
    return loading.run(lambda: chosen.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs))


def attachment(model: Any) -> Attachment | None:
    """How this model's weights came here: `source`, `miss`, `timing`, the lease. None: the cache was not involved."""
    return _attachments.get(model)


def class_of(auto_class: str | type) -> Any:
    """The class whose from_pretrained is meant. Raises ConfigError."""
    import transformers

    found = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    if not hasattr(found, "from_pretrained"):
        raise ConfigError(f"auto_class {auto_class!r}: a class with from_pretrained, or the name of one, is expected")
    return found


class AlreadyResident(Exception):
    """Ends a preload that has nothing to do."""


@dataclass(slots=True)
class Load:
    """One call of from_pretrained. `place`: which rank is asked, by this process's place in a tensor parallel group."""

    target: Target
    place: Callable[[int], Where]
    policy: IdentityPolicy
    arguments: Mapping[str, Any]
    fallback: bool
    on_publication: Callable[[Publication], None] | None = None
    held: Attachment | None = None
    miss: Miss | None = None
    failed: WcacheError | None = None  # why nothing was published
    _request: Request | None = None
    _config: dict[str, Any] = field(default_factory=dict)
    _before: Skeleton | None = None
    _publication: Publication | None = None
    _seen: list[Any] = field(default_factory=list)
    _random: list[Any] = field(default_factory=random_state)

    def run(self, call: Callable[[], Any]) -> Any:
        """Let Transformers load. Raises Miss without `fallback`, and whatever Transformers raises."""
        why = seam.unsupported()
        if why is not None:
            self._missed(Miss(MissReason.UNSUPPORTED, why))
            return call()
        try:
            with seam.entered(self):
                made = call()
        finally:
            if self._publication is not None:
                self._publication.abort("Transformers failed to load the model")
        if not self._seen:
            self._missed(Miss(MissReason.UNSUPPORTED, "this class does not load through Transformers' own loader"))
        return made

    # --- Transformers' two steps -------------------------------------------------------------------------------------

    def load(self, original: Callable[..., Any], model: Any, files: list[str] | None, load_config: Any) -> Any:
        if self._seen:
            self._second(model)
            return original(model, None, files, load_config)
        self._seen.append(model)
        files = files and [str(Path(f).parent.resolve() / Path(f).name) for f in files]  # a link may be switched
        self._config = model.config.to_dict()
        try:
            info = self._from_cache(model, files, load_config)
            if info is not None:
                return info, None
        except AlreadyResident:
            raise
        except WcacheError as e:
            self._missed(e if isinstance(e, Miss) else Miss(MissReason.UNSUPPORTED, str(e), hint=e.hint))
        except Exception as e:  # whatever a model nobody has seen makes of us, Transformers can still load it
            log.debug("asking the cache failed", exc_info=True)
            self._missed(Miss(MissReason.UNSUPPORTED, f"{type(e).__name__}: {e}"))
        return original(model, None, files, load_config)

    def finalize(self, original: Callable[..., Any], model: Any, load_config: Any, loading_info: Any) -> Any:
        if not self._seen or model is not self._seen[0]:
            return original(model, load_config, loading_info)
        if self.miss is None and self.held is not None:
            return loading_info  # taken as it was after this step
        publication = self._publication
        if publication is None:
            return original(model, load_config, loading_info)
        with Drawn() as drawn:
            info = original(model, load_config, loading_info)
        self._publication = None
        try:
            _refuse_invented(info, drawn.names(model))
            self._publish(publication, model, load_config, info)
        except BaseException as e:  # a failed publication costs the next start, not this one
            publication.abort(f"{type(e).__name__}: {e}")
            if not isinstance(e, Exception):
                raise
            self.failed = e if isinstance(e, WcacheError) else PublishError(f"{type(e).__name__}: {e}")
            self.failed.__traceback__ = None  # whoever keeps the log would keep the model with it
            log.warning("this start was not published: %s", self.failed)
        return info

    def _second(self, model: Any) -> None:
        miss = Miss(MissReason.UNSUPPORTED, f"{type(model).__name__} is a second model that this call loads")
        if not self.fallback:
            raise miss
        say_missed(miss)

    # --- the cache ---------------------------------------------------------------------------------------------------

    def _from_cache(self, model: Any, files: list[str] | None, load_config: Any) -> Any:
        """Loading info after a hit. None: Transformers has to load, and may be about to publish."""
        group = ranks.group_of(model, load_config)
        request = together.on_all(lambda: self._prepare(model, files, load_config, group), group)
        self.target = replace(self.target, where=replace(self.place(group.rank), device=request.device))
        if self.target.spec is not None:
            _check_spread(model, group)
            self._claim(request)
            return None

        def ask(query: Query) -> Attachment | Miss:
            return look(query, self.target)

        self._request, found = together.attach(request, ask, group)
        if isinstance(found, Miss):
            if not self.fallback:
                raise found
            found, self._publication = together.elect(self._request, self.target, found, ask, group)
        if isinstance(found, Miss):
            self._missed(found)
            return None
        return self._bind(model, load_config, found, group)

    def _prepare(self, model: Any, files: list[str] | None, load_config: Any, group: Group) -> Request:
        built = snapshot.skeleton(model)
        self._before = replace(built, structure=digest([built.structure, made_values(model)]))
        random = built_at_random(model, self._random)
        if random is not None:
            raise Miss(MissReason.UNSUPPORTED, f"{random} was made while random numbers were drawn")
        return prepare(model, files, load_config, self._before, self.arguments, self.policy, group)

    def _claim(self, request: Request) -> None:
        """A rank's own preload attaches nothing, since an attach would wait for the preload. Raises AlreadyResident."""
        self._request = request.proven()
        self._publication = claim(self._request.query, self.target, request.size, wait_s=self.target.where.left_s)
        if self._publication is None:
            raise AlreadyResident
        if self.on_publication is not None:
            self.on_publication(self._publication)

    def _bind(self, model: Any, load_config: Any, held: Attachment, group: Group) -> Any:
        from transformers.utils.loading_report import LoadStateDictInfo

        def ready() -> tuple[Callable[[], None], list[Any], int]:
            assert self._before is not None
            tensors, copied = tensors_of(held.manifest, held.mapping, copy=held.mode is Mode.COPY)
            used = [load_config.weight_mapping[i] for i in held.manifest.extra.get("conversions", ())]
            return restore(model, self._before, held.manifest, tensors), used, copied

        try:
            put, used, copied = together.on_all(ready, group)
            put()
        except BaseException:
            held.close()
            raise
        _untie(model)
        model._weight_conversions = used  # save_pretrained turns them round
        say_mapped(held)
        log.debug("%.1f MiB are private copies", copied / 2**20)
        if held.mode is Mode.COPY:
            release_copy(held)
        else:
            guard(model)
        self.held = _attachments[model] = held
        unexpected = set(held.manifest.extra.get("unexpected_keys", ()))
        return LoadStateDictInfo(set(), unexpected, set(), [], {}, set())

    def _missed(self, miss: Miss) -> None:
        self.miss = miss
        if not self.fallback:
            raise miss
        say_missed(miss)

    def _publish(self, publication: Publication, model: Any, load_config: Any, info: Any) -> None:
        """Publish what Transformers loaded; its parameters move onto the shared memory."""
        assert self._before is not None and self._request is not None
        if model.config.to_dict() != self._config:
            raise PublishError("loading changed the model's configuration: the next start would have another one")
        check_nothing_twice(self._request.survey)
        taken = snapshot.take(model, self._before, known=("_weight_conversions",), skip_meta=True)
        with frozen(model):
            held = publication.write(
                taken.entries,
                repoint=True,
                attributes=taken.attributes,
                extra={
                    **taken.extra,
                    "unexpected_keys": sorted(info.unexpected_keys),
                    "conversions": _conversions(model, load_config),
                },
                last=self._request.check_unchanged,  # tensors may lie in the mapped files until they are copied
            )
        guard(model)
        held.miss = self.miss
        self.held = _attachments[model] = held


def _check_spread(model: Any, group: Group) -> None:
    """Without a plan Transformers would put the whole model on each rank."""
    if group.size > 1 and not any(is_dtensor(p) for p in model.parameters()):
        raise Miss(
            MissReason.UNSUPPORTED, f"{type(model).__name__} has no tp_plan to spread it over {group.size} ranks"
        )


def _refuse_invented(info: Any, drawn: list[str]) -> None:
    """Weights that are not in the checkpoint are random: the next start would have others.

    `drawn`: tensors that hold random numbers, whether or not Transformers says so.
    """
    invented = sorted(info.missing_and_mismatched()) or drawn
    if invented:
        more = f" and {len(invented) - 1} more are" if len(invented) > 1 else " is"
        raise PublishError(
            f"{invented[0]}{more} not in the checkpoint: Transformers made them up",
            hint="train and save the model first, or load the class that the checkpoint was saved from",
        )
    if info.error_msgs or info.conversion_errors:
        raise PublishError("Transformers could not load everything")


def _conversions(model: Any, load_config: Any) -> list[int]:
    """Which of the conversions from checkpoint to model were used: save_pretrained turns them round."""
    mapping, used = load_config.weight_mapping or [], getattr(model, "_weight_conversions", [])
    found = [i for i, one in enumerate(mapping) if any(one is other for other in used)]
    if len(found) != len(used):
        raise PublishError("Transformers converted the checkpoint in a way that is not known here")
    return found


def _untie(model: Any) -> None:
    """Names that Transformers would have tied, but found with different values, are no longer said to be tied."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source):
            del tied[target]
