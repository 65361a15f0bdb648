# SPDX-License-Identifier: Apache-2.0
"""The `wcache` program: the Typer application and its one exception boundary.

Verbs live in files by noun and are registered here. stdout carries the answer and nothing else; an error is one line,
then one `hint:` line, on stderr, and the exit status is the error class's; a traceback only with `--debug`.
Global options may stand before or after the verb.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from wcache.cli import checkpoint, daemon, doctor, group, logs, shards, status
from wcache.cli.context import Context
from wcache.config import Scope
from wcache.errors import CheckpointError, NoSuchShard, WcacheError
from wcache.model import CheckpointFault

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_FLAGS = ("--user", "--system", "--debug")
_CONFIG = "--config"
_NO_MODEL = (CheckpointFault.NO_DIRECTORY, CheckpointFault.UNKNOWN_SNAPSHOT)


def _absent_stays_none(parameter: Any) -> None:
    """An option that was not given needs no conversion; typer (0.26 on) would import pydantic for it, 0.1 s."""
    convert, callback = parameter.process_value, parameter.callback

    def process_value(ctx: Any, value: Any) -> Any:
        if value is not None or parameter.required or parameter.multiple or parameter.nargs != 1:
            return convert(ctx, value)
        return None if callback is None else callback(ctx, parameter, None)

    if "process_value" not in vars(parameter):
        parameter.process_value = process_value


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            _absent_stays_none(parameter)
        return parameters


class _Group(TyperGroup):
    """Moves global options to the front, so that `wcache status --user` is `wcache --user status`."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            _absent_stays_none(parameter)
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, globals_first(args))


def globals_first(args: Sequence[str]) -> list[str]:
    front: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in _FLAGS or word.startswith(f"{_CONFIG}="):
            front.append(word)
        elif word == _CONFIG:
            front += [word, *(value for value in [next(words, None)] if value is not None)]
        else:
            rest.append(word)
    return front + rest


app = typer.Typer(
    name="wcache",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Global options may also follow the command. Exit status: 0 ok, 1 failed, 2 usage, 3 not ready, 4 no such.",
)


def _print_version(asked: bool | None) -> None:
    if asked:
        daemon.version()
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    user: Annotated[bool, typer.Option("--user", help="The user's service manager and configuration.")] = False,
    system: Annotated[bool, typer.Option("--system", help="The system's. Default: whichever has the units.")] = False,
    config: Annotated[Path | None, typer.Option(_CONFIG, metavar="FILE", help="Another wcache.toml.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="A traceback with every error.")] = False,
    version: Annotated[  # noqa: ARG001  its callback answers
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keeps model weights resident outside the engine, so that a restarted engine maps them instead of reading them."""
    if user and system:
        raise typer.BadParameter("--user and --system exclude each other")
    scope = Scope.USER if user else Scope.SYSTEM if system else None
    ctx.obj = Context(asked_scope=scope, asked_config=config, debug=debug)


_VERBS: dict[str, Callable[..., None]] = {
    "status": status.status,
    "start": group.start,
    "stop": group.stop,
    "restart-group": group.restart_group,
    "clean": group.clean,
    "explain": checkpoint.explain,
    "fingerprint": checkpoint.fingerprint,
    "verify": shards.verify,
    "evict": shards.evict,
    "drain": shards.drain,
    "logs": logs.logs,
    "doctor": doctor.doctor,
    "daemon": daemon.daemon,
    "version": daemon.version,
}
for _name, _verb in _VERBS.items():
    app.command(_name, cls=_Verb)(_verb)


def run(argv: Sequence[str]) -> int:
    """One invocation; returns its exit status."""
    debug = "--debug" in argv
    try:
        status = app(list(argv), prog_name="wcache", standalone_mode=False)
        sys.stdout.flush()
    except WcacheError as e:
        return _fail(str(e), e.hint, _status(e), debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", "", INTERRUPTED, debug=False)
    except BrokenPipeError:  # whoever read our answer has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as e:  # noqa: BLE001  the boundary: usage errors of the parser, and defects of ours
        return _unexpected(e, debug)
    return status if isinstance(status, int) else 0


def _status(error: WcacheError) -> int:
    """The error class's exit status; a checkpoint that is not there at all is a model that there is not."""
    if isinstance(error, CheckpointError) and error.fault in _NO_MODEL:
        return NoSuchShard.exit_status
    return error.exit_status


def _unexpected(error: Exception, debug: bool) -> int:
    """A usage error (typer brings its own copy of click in some versions, so it is known by what it has), or a bug."""
    status, text = getattr(error, "exit_code", None), getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text() if text else error, file=sys.stderr)
        return 2
    if isinstance(status, int) and text is not None:
        context = getattr(error, "ctx", None)
        path = "wcache" if context is None else context.command_path
        return _fail(text(), f"{path} --help", status, debug=False)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", "", 1, debug)
    return _fail(f"{type(error).__name__}: {error}", "this is a defect; --debug shows where", 1, debug)


def _fail(message: str, hint: str, status: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"wcache: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return status


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))
