# SPDX-License-Identifier: Apache-2.0
"""Verbs about a checkpoint directory: `wcache fingerprint`, `wcache explain`. They need no daemon and no GPU.

The last line of `wcache fingerprint` on stdout is the content identity, for scripts; progress goes to stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wcache.cli import context as contexts
from wcache.cli import render
from wcache.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from wcache.weights.checkpoint import Survey
    from wcache.weights.identity import Identity

ModelArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint directory, or a hub cache's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The document instead of lines.")]


def fingerprint(
    ctx: typer.Context,
    directory: ModelArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Hash every file; believe no store and no file name.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", metavar="REV", help="Of a hub cache.")] = None,
    allow_stale_index: Annotated[
        bool, typer.Option("--allow-stale-index", help="Ignore an index of other files, if those here are complete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The content identity of a checkpoint.

    It is the last line of stdout. Checks every header; reads only files that are not known yet.
    """
    from wcache.cli.hashing import meter
    from wcache.weights.checkpoint import open_checkpoint, survey
    from wcache.weights.identity import identify, open_store

    context = contexts.of(ctx)
    stale = allow_stale_index or context.config.allow_stale_index
    found = survey(directory, revision=revision, allow_stale_index=stale)
    open_checkpoint(found)
    with open_store(context.state_dir) as store, meter(found) as progress:
        identity = identify(found, store, context.config.identity, deep=deep, progress=progress)
    if as_json:
        render.document(_document(found, identity))
    else:
        _print(found, identity)
    if identity.refuted:
        raise IntegrityError(
            f"the bytes are not what was believed of them: {', '.join(identity.refuted)}",
            hint="the identity above is that of the bytes as they are; the download may be damaged",
        )


def _print(found: Survey, identity: Identity) -> None:
    for warning in found.warnings:
        render.say(f"warning: {warning}")
    for file in found.files:
        print(f"{identity.digests[file.name]}  {file.name}")
    for name, digest in found.config_digests.items():
        print(f"{digest}  {name}")
    print(identity.content)


def _document(found: Survey, identity: Identity) -> dict[str, object]:
    return {
        "directory": str(found.directory),
        "content": identity.content,
        "source": identity.source,
        "policy": identity.policy,
        "files": [{"name": f.name, "size": f.stamp.size, "sha256": identity.digests[f.name]} for f in found.files],
        "config": found.config_digests,
        "refuted": identity.refuted,
        "warnings": found.warnings,
    }


def explain(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[DIR]", help="Default: the configured model.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, metavar="N", help="Only this rank.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Ask again what an engine last missed.")] = False,
    tp: Annotated[int | None, typer.Option("--tp", min=1, metavar="N", help="Tensor parallel size.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", min=1, metavar="N", help="Pipeline parallel size.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", min=1, metavar="N", help="Data parallel size.")] = None,
    ep: Annotated[int | None, typer.Option("--ep", min=1, metavar="N", help="Expert parallel size.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="As in wcache.toml.")] = None,
    quantization: Annotated[
        str | None, typer.Option(metavar="METHOD|JSON", help="Instead of the checkpoint's.")
    ] = None,
    no_hash: Annotated[bool, typer.Option("--no-hash", help="Read no weights, even if content is unknown.")] = False,
    methods: Annotated[
        bool, typer.Option("--methods", help="Which quantization methods vLLM engines can share.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Would an engine hit, and if not, why?

    Per rank: the fields that differ with both values, what would be read, and the memory it would need.
    """
    from wcache.cli import explaining

    if methods:
        _print_methods(as_json)
        return
    context = contexts.of(ctx)
    if last:
        found = explaining.last(context, rank)
    else:
        name = context.config.model if model is None else model
        if name is None:
            raise ConfigError("no model is configured", hint="wcache explain DIR")
        asked = explaining.Options(name, tp, pp, dp, ep, dtype, quantization, hash_unknown=not no_hash)
        found = explaining.explain(context, asked, rank)
    if as_json:
        render.document(found)
    else:
        for line in explaining.lines(found):
            print(line)


def _print_methods(as_json: bool) -> None:
    from wcache.engine.vllm.methods import TABLE, VERSIONS

    if as_json:
        render.document({"vllm": VERSIONS, "methods": TABLE})
        return
    width = max(len(row.what) for row in TABLE)
    print(f"vLLM {VERSIONS}; a method that is not listed falls back, unless vLLM declares a pre-processed mode for it")
    for row in TABLE:
        names = " ".join(filter(None, (row.method, row.scheme, row.kernel)))
        print(f"{row.what:{width}}  {row.way:10}  {row.why or row.test}" + (f"  ({names})" if names else ""))
