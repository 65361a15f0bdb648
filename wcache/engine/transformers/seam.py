# SPDX-License-Identifier: Apache-2.0
"""The one place where Transformers' own loading is entered: between a model on the meta device and its weights.

Runs in engines. `from_pretrained` of Transformers 5 builds the skeleton, calls `_load_pretrained_model` and
`_finalize_model_loading`, then sets up generation and quantizer. While a call of ours is under way in this context,
these two go through a `Loading`; everything else, and every other thread, is Transformers as it is.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

LOAD, FINALIZE = "_load_pretrained_model", "_finalize_model_loading"
_EXPECTED = {
    LOAD: ("model", "state_dict", "checkpoint_files", "load_config"),
    FINALIZE: ("model", "load_config", "loading_info"),
}


class Loading(Protocol):
    """What stands in for Transformers' two steps; `original` is the step itself."""

    def load(self, original: Callable[..., Any], model: Any, files: list[str] | None, load_config: Any) -> Any: ...

    def finalize(self, original: Callable[..., Any], model: Any, load_config: Any, loading_info: Any) -> Any: ...


_current: ContextVar[Loading | None] = ContextVar("wcache_loading", default=None)
_lock = threading.Lock()
_originals: dict[str, Any] = {}
_users = 0


def unsupported() -> str | None:
    """Why this version of Transformers cannot be entered, or None."""
    import transformers
    from transformers import PreTrainedModel

    for name, expected in _EXPECTED.items():
        step = _originals.get(name) or inspect.getattr_static(PreTrainedModel, name, None)
        found = tuple(inspect.signature(step.__func__).parameters) if isinstance(step, staticmethod) else ()
        if found[: len(expected)] != expected:
            return f"Transformers {transformers.__version__} loads in a way that is not known here ({name})"
    return None


@contextmanager
def entered(loading: Loading) -> Iterator[None]:
    """While it lasts, Transformers loads through `loading` in this context."""
    _install()
    token = _current.set(loading)
    try:
        yield
    finally:
        _current.reset(token)
        _remove()


def _install() -> None:
    from transformers import PreTrainedModel

    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for name, step in ((LOAD, _load), (FINALIZE, _finalize)):
                _originals[name] = inspect.getattr_static(PreTrainedModel, name)
                setattr(PreTrainedModel, name, staticmethod(step))


def _remove() -> None:
    from transformers import PreTrainedModel

    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name, step in _originals.items():
                setattr(PreTrainedModel, name, step)


def _load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **more: Any) -> Any:
    original, loading = _originals[LOAD].__func__, _current.get()
    if loading is None or state_dict is not None or rest or more:  # another thread's, or an adapter's weights
        return original(model, state_dict, checkpoint_files, load_config, *rest, **more)
    return loading.load(original, model, checkpoint_files, load_config)


def _finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
    original, loading = _originals[FINALIZE].__func__, _current.get()
    if loading is None:
        return original(model, load_config, loading_info)
    return loading.finalize(original, model, load_config, loading_info)
