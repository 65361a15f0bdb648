# SPDX-License-Identifier: Apache-2.0
"""`wcache.cached`: any PyTorch module made once, and mapped by every later process that asks with the same key.

Runs in engines. The factory runs on the meta device first, which costs nothing and gives the skeleton; on a hit the
resident tensors are put onto it, on a miss the factory runs for real (then `load`, if there is one) and the result is
published. The key is the caller's promise: the same key means the same values, whatever else is different in structure
is noticed. A factory that cannot run on the meta device is not shared, and says so.
Surprising: a miss runs the factory twice. What the first run did to the process (random numbers, warnings, results that
functions remember) is undone; a count that a class keeps of its objects is not.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from wcache.config import CONNECT_TIMEOUT_S, STATE_TIMEOUT_S
from wcache.engine import reach, snapshot, state
from wcache.engine.client import Attachment
from wcache.engine.election import Target, claim, elect, look, release_copy, say_mapped, say_missed
from wcache.engine.options import device_option, where
from wcache.engine.publish import Publication
from wcache.engine.restore import restore
from wcache.engine.snapshot import Skeleton
from wcache.engine.tensors import dtype_name, tensors_of
from wcache.engine.training import frozen, guard
from wcache.errors import Miss, StructureError
from wcache.model import MissReason, Mode
from wcache.protocol.messages import Query
from wcache.weights.fingerprint import LayoutKey, canonical_json, digest

log = logging.getLogger(__name__)

ENGINE = "module"

Module = TypeVar("Module", bound=nn.Module)


def cached(
    build: Callable[[], Module],
    *,
    key: str | Mapping[str, Any],
    load: Callable[[Module], object] | None = None,
    attributes: Collection[str] = (),
    device: str | torch.device = "cpu",
    rank: int = 0,
    mode: Mode | str = Mode.ZERO_COPY,
    fallback: bool = True,
    publish: bool = True,
    socket_dir: str | os.PathLike[str] | None = None,
    socket_path: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    state_timeout_s: float = STATE_TIMEOUT_S,
    name: str | None = None,
) -> Module:
    """The module that `build()`, then `load(module)`, makes; from the cache if it has been made before under `key`.

    `build` makes the module with all of its submodules, and reads nothing: a hit runs it on the meta device. `load`
    reads and processes weights; only a miss runs it. `key`: text or plain values that say which weights these are
    (name, version, options). Parameters, buffers, bare tensors and plain attributes of any depth that differ from the
    skeleton come back; `attributes` ("block.limits") names those that must. What cannot come back (hooks that loading
    registers, modules it replaces, tensors in sets, slots or closures) is said, and not shared.
    `device`: where the module lives.
    zero_copy parameters are shared: on a CPU what this process writes stays its own, on a GPU a write faults, a
    gradient raises TrainingRefused; `mode="copy"` is the way out. Buffers and bare tensors are private.
    What `build` and `load` raise is raised; Miss only without `fallback`.
    """
    home = torch.device(device)
    asked = where(
        "module",
        rank,
        socket_dir=socket_dir,
        path=socket_path,
        name=name or f"{getattr(build, '__qualname__', 'module')} pid {os.getpid()}",
        device=device_option(device),
        connect_timeout_s=connect_timeout_s,
        state_timeout_s=state_timeout_s,
    )
    call = _Cached(build, load, dict(key) if isinstance(key, Mapping) else key, attributes, home)
    made: Module = call.get(Target(asked, Mode(mode), publish), fallback=fallback)
    return made


@dataclass(slots=True)
class _Cached:
    """One call of `cached`."""

    build: Callable[[], Any]
    load: Callable[[Any], object] | None
    key: str | dict[str, Any]
    attributes: Collection[str]
    device: torch.device

    def get(self, target: Target, *, fallback: bool) -> Any:
        # A key without canonical form is the caller's error.
        content = digest({"cached": snapshot.FORM, "key": self.key})
        publication: Publication | None = None
        before: Skeleton | None = None
        module: Any = None
        try:
            module, before = self._skeleton()
            query = Query(layout=_layout(module, before), model=self._name(), content=content)
            found = look(query, target)
            if isinstance(found, Miss):
                if not fallback:
                    raise found
                size = sum(t.nbytes for _, _, t in state.registered(module))
                found, publication = elect(
                    found, target, lambda: claim(query, target, size), lambda: look(query, target)
                )
            if isinstance(found, Attachment):
                return _bind(module, before, found)
            say_missed(found)
        except Exception as e:  # whatever a module nobody has seen makes of us, it can still be made
            if not fallback:
                raise
            log.debug("asking the cache failed", exc_info=True)
            say_missed(e if isinstance(e, Miss) else Miss(MissReason.STRUCTURE, f"{type(e).__name__}: {e}"))
        return self._make(publication, module, before)

    def _skeleton(self) -> tuple[Any, Skeleton]:
        module: Any = None
        holder: str | None = None
        with _rehearsal():
            try:
                with _on_meta():
                    module = self.build()
                found = list(state.places(module, snapshot.holds))
                holder = reach.left_behind(module, [s for s in found if isinstance(s.tensor, torch.Tensor)])
                state.note_device(found, torch.empty(0, device=self.device).device)
                before = snapshot.skeleton(module)
            except Exception as e:
                what = "the factory does not run on the meta device"
                if module is not None:
                    what = f"{type(module).__name__} is no module that can be described"
                why = f"{what}: {type(e).__name__}: {e}"
                raise Miss(MissReason.UNSUPPORTED, why, hint="what reads or computes values belongs into load=") from e
        if holder is not None:
            raise Miss(MissReason.UNSUPPORTED, f"the factory leaves a tensor outside of the module, in a {holder}")
        return module, before

    def _name(self) -> str:
        return self.key if isinstance(self.key, str) else canonical_json(self.key)

    def _make(self, publication: Publication | None, rehearsed: Any, before: Skeleton | None) -> Any:
        """Run the factory for real, and publish what it made if we may. `rehearsed`: what it made on meta."""
        try:
            with self.device:
                module = self._new(rehearsed)
                if self.load is not None:
                    self.load(module)
        except BaseException as e:
            if publication is not None:
                publication.abort(f"{type(e).__name__}: {e}")
            raise
        if publication is not None and before is not None:
            try:
                self._publish(publication, module, before)
            except BaseException as e:  # costs the next start, not this one, whatever the module is made of
                publication.abort(f"{type(e).__name__}: {e}")
                if not isinstance(e, Exception):
                    raise
                log.warning("this start was not published: %s", str(e))  # the error would keep the module alive
        return module

    def _new(self, rehearsed: Any) -> Any:
        """What the factory makes now, of tensors that are not `rehearsed`."""
        module = self.build()
        if rehearsed is None or not (again := _remembered(module, rehearsed)):
            return module
        reach.forget(rehearsed, again)
        module = self.build()
        if _remembered(module, rehearsed):
            raise StructureError(
                "the factory remembers tensors of its run on the meta device, where they have no values",
                hint="a factory of wcache.cached makes its tensors anew, or takes them from functools.cache",
            )
        return module

    def _publish(self, publication: Publication, module: Any, before: Skeleton) -> None:
        taken = snapshot.take(module, before, declared=self.attributes)
        with frozen(module):
            publication.write(taken.entries, repoint=True, attributes=taken.attributes, extra=taken.extra)
        guard(module)


@contextmanager
def _rehearsal() -> Iterator[None]:
    """What a factory does to the process while it runs on the meta device, before it runs for real, is undone.

    Random numbers are drawn again, warnings given again, results that functions remember made again.
    """
    numpy = sys.modules.get("numpy")
    python, theirs = random.getstate(), numpy and numpy.random.get_state()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    collects = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        with torch.random.fork_rng(gpus), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collects:
            gc.enable()
        random.setstate(python)
        if numpy:
            numpy.random.set_state(theirs)


@contextmanager
def _on_meta() -> Iterator[None]:
    try:
        with torch.device("meta"):
            yield
    finally:
        reach.forget_results()


def _remembered(module: nn.Module, rehearsed: nn.Module) -> dict[int, torch.Tensor]:
    """Tensors of a factory's run on the meta device that it gave out again."""
    old = {id(t) for t in _tensors(rehearsed) if t.is_meta} if module is not rehearsed else ()
    return {id(t): t for t in _tensors(module) if id(t) in old}


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for _, _, tensor in state.registered(module))
    yield from (spot.tensor for spot in state.bare(module, snapshot.holds))


def _layout(module: nn.Module, before: Skeleton) -> LayoutKey:
    dtypes = sorted({dtype_name(t.dtype) for _, _, t in state.registered(module)})
    return LayoutKey(
        engine=ENGINE,
        engine_version=str(snapshot.FORM),
        architecture=f"{type(module).__module__}.{type(module).__qualname__}",
        dtype=",".join(dtypes) or "none",
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda or torch.version.hip,
        extra={"structure": before.structure},
    )


def _bind(module: Any, before: Skeleton, held: Attachment) -> Any:
    try:
        tensors, _ = tensors_of(held.manifest, held.mapping, copy=held.mode is Mode.COPY)
        restore(module, before, held.manifest, tensors)()
        left = [s.path for s in state.bare(module, snapshot.holds) if s.tensor.is_meta]
        if left:
            raise StructureError(f"left without memory: {', '.join(left)}", left)
    except BaseException:
        held.close()
        raise
    say_mapped(held)
    if held.mode is Mode.COPY:
        release_copy(held)
    else:
        guard(module)
    return module
