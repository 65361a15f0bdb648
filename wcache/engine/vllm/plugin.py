# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: makes `--load-format wcache` known to vLLM.

vLLM calls `register` in the API server, the engine core, every worker and a registry subprocess, perhaps more than
once; an exception here would abort its start, so none leaves. The format's name is taken only if nobody has it.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

LOAD_FORMAT = "wcache"


def register() -> None:
    """Register the load format if its name is free. Idempotent; never raises."""
    try:
        _register()
    except Exception as e:  # noqa: BLE001 - vLLM must start without us, whatever its version lacks
        log.warning(
            "wcache could not register the load format %r with this vLLM: %s: %s", LOAD_FORMAT, type(e).__name__, e
        )


def _register() -> None:
    from vllm.model_executor import model_loader

    taken = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(LOAD_FORMAT)
    if taken is None:
        from wcache.engine.vllm.loader import WcacheLoader

        model_loader.register_model_loader(LOAD_FORMAT)(WcacheLoader)
    elif taken.__module__.partition(".")[0] != "wcache":
        log.warning(
            "load format %r is taken by %s.%s; wcache leaves it alone",
            LOAD_FORMAT,
            taken.__module__,
            taken.__qualname__,
        )


_borrowed: list[logging.Handler] = []


def share_handlers() -> None:
    """Let our log lines appear where vLLM's do: its configuration, which comes late, covers the logger "vllm" only."""
    ours, theirs = logging.getLogger("wcache"), logging.getLogger("vllm")
    if not theirs.handlers:
        return
    for handler in _borrowed:
        ours.removeHandler(handler)
    _borrowed[:] = theirs.handlers
    for handler in _borrowed:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
