# SPDX-License-Identifier: Apache-2.0
"""wcache keeps a model's sharded, post-processed weights resident outside the engine that uses them.

    import wcache
    attachment = wcache.load_into(module_on_meta, "/models/x")

Importing this module imports neither torch nor anything of the daemon; the functions do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wcache.errors import Miss, StructureError, WcacheError

if TYPE_CHECKING:
    from wcache.engine.attach import attach, load_into, publish
    from wcache.engine.cached import cached
    from wcache.engine.client import Attachment
    from wcache.engine.module import init_buffers

__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "Miss",
    "StructureError",
    "WcacheError",
    "__version__",
    "attach",
    "cached",
    "init_buffers",
    "load_into",
    "publish",
]

_HOMES = {
    "Attachment": "wcache.engine.client",
    "attach": "wcache.engine.attach",
    "cached": "wcache.engine.cached",
    "init_buffers": "wcache.engine.module",
    "load_into": "wcache.engine.attach",
    "publish": "wcache.engine.attach",
}


def __getattr__(name: str) -> Any:
    if name == "transformers":  # a module of ours that needs no import of its own
        return import_module("wcache.transformers")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
