# SPDX-License-Identifier: Apache-2.0
"""The loader child of a rank: `python -m wcache.engine.loader --rank N --socket PATH --spec DIGEST [--config PATH]`.

Started by the daemon, publishes over the rank's socket like any engine, and ends, taking torch and CUDA with it. What
is resident already is not loaded again: files whose stamps moved are hashed first if there is anything they could be.
The last line on stderr says what went wrong; the exit status is the error's.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wcache import config as configuration
from wcache.config import Config, Loader
from wcache.engine import cold
from wcache.engine.publish import Publication, begin
from wcache.engine.request import Request, prepare
from wcache.errors import ConfigError, LoaderError, WcacheError
from wcache.log import set_up
from wcache.model import Origin
from wcache.protocol.connection import Connection, connect
from wcache.protocol.messages import Explain, Explained, Progress, ProgressInfo
from wcache.weights.digests import DigestStore
from wcache.weights.identity import open_store
from wcache.weights.spec import preload_spec

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="wcache-loader", description="Load one rank's shard (run by its daemon).")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--spec", help="digest of the preload configuration, as the daemon computed it")
    parser.add_argument("--config", type=Path)
    options = parser.parse_args(argv)
    set_up()
    try:
        config = (
            configuration.load(options.config)
            if options.config is not None
            else configuration.load_or_default(configuration.default_scope())
        )
        run(config, options.rank, options.socket, options.spec or preload_spec(config, options.rank))
    except WcacheError as e:
        log.error("%s (%s)", e, e.code)  # the daemon tells a lack of memory by the code
        if e.hint:
            log.error("hint: %s", e.hint)
        return e.exit_status
    return 0


def run(config: Config, rank: int, socket: Path, spec: str) -> None:
    """Make the configured shard resident. Raises WcacheError."""
    if config.model is None:
        raise ConfigError("no model is configured: there is nothing to load")
    if config.loader is not Loader.SAFETENSORS:
        _engine_loader(config.loader)(config, rank, socket, spec)
        return
    with open_store(configuration.state_dir_of(config, configuration.default_scope())) as store:
        request = prepare(
            config.model,
            config.placement(rank),
            store,
            dtype=config.dtype,
            plan=config.plan,
            revision=config.revision,
            policy=config.identity,
            allow_stale_index=config.allow_stale_index,
        )
        for warning in request.survey.warnings:
            log.warning("%s", warning)
        if request.content is None:
            request = _hashed_first(request, store, socket)
        publication = begin(
            request.query(),
            socket,
            origin=Origin.PRELOAD,
            bytes_total=request.survey.size // (config.parallel.tp_size * config.parallel.pp_size),
            spec=spec,
            name="loader",
            device=device_of(config, rank),
            wait_s=config.timeouts.state_s,
            connect_timeout_s=config.timeouts.connect_s,
        )
        if publication is None:
            log.info("already resident: nothing to read")
            return
        with publication:
            _publish(publication, request, store, config)


def _publish(publication: Publication, request: Request, store: DigestStore, config: Config) -> None:
    report = Report("load", publication.progress)
    backend = publication.backend
    loaded = cold.read(request, store, backend, progress=report, keep_page_cache=config.keep_page_cache)
    try:
        report.last()
        publication.commit(
            backend,
            loaded.fds,
            loaded.specs,
            loaded.storages,
            loaded.tensors,
            content=loaded.content,
            attach=False,
        )
    finally:
        loaded.close()
    log.info("published %d tensors, %d bytes read", len(loaded.tensors), loaded.bytes_read)


def _hashed_first(request: Request, store: DigestStore, socket: Path) -> Request:
    """Files that moved may still hold what is resident: hash them before anything is loaded a second time."""
    with connect(socket, role="loader", name="loader") as connection:
        answer = connection.ask(Explain(query=request.query()), Explained)
        if answer.hit is None and not answer.weight_bytes:
            return request  # nothing is resident that it could be: it is hashed while it is loaded
        report = Report("identify", lambda info: _tell(connection, info))
        return request.identified(store, lambda done, total: report(bytes_done=done, bytes_total=total))


def _tell(connection: Connection, info: ProgressInfo) -> None:
    connection.send(Progress(progress=info))


def device_of(config: Config, rank: int) -> str:
    """The rank's device: as configured, else the visible GPU whose position is the rank's on this host."""
    device = config.device(rank)
    if device is not None:
        return device
    from wcache.weights.segment_cuda import visible_device

    return visible_device(config.ranks.index(rank))


def _engine_loader(loader: Loader) -> Callable[[Config, int, Path, str], None]:
    """The loader of an engine integration. Raises LoaderError where the engine is not installed."""
    try:
        if loader is Loader.VLLM:
            from wcache.engine.vllm.preload import run as vllm_run

            return vllm_run
        from wcache.engine.transformers.preload import run as transformers_run

        return transformers_run
    except ImportError as e:
        raise LoaderError(
            f'loader = "{loader}" needs {e.name}, which is not installed', hint=f"pip install wcache[{loader}]"
        ) from e


class Report:
    """Tells the rank how far a phase is, a few times a second at most. Callable as `load`'s progress callback."""

    def __init__(self, phase: str, send: Callable[[ProgressInfo], None]) -> None:
        self._phase = phase
        self._send = send
        self._start = time.monotonic()
        self._sent = 0.0
        self._info = ProgressInfo(phase=phase)

    def __call__(self, *, bytes_done: int = 0, bytes_total: int = 0, files_done: int = 0, files_total: int = 0) -> None:
        now = time.monotonic()
        self._info = ProgressInfo(
            phase=self._phase,
            bytes_done=bytes_done,
            bytes_total=bytes_total,
            files_done=files_done,
            files_total=files_total,
            bytes_per_s=bytes_done / max(now - self._start, 1e-3),
        )
        if now - self._sent >= REPORT_EVERY_S:
            self._sent = now
            self._send(self._info)

    def last(self) -> None:
        """Send the latest state, however recent the one before."""
        self._send(self._info)


if __name__ == "__main__":
    sys.exit(main())
