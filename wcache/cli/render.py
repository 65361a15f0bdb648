# SPDX-License-Identifier: Apache-2.0
"""How answers look: JSON documents, tables, times and sizes. The only place that makes rich consoles.

stdout is the answer. A terminal gets colour (NO_COLOR is honoured) and its own width; a pipe gets plain lines that are
never cut or wrapped. rich is imported on first use: `--json` does not pay for it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 4096
GAP = 2
KEPT = ("RANK", "STATE")  # columns that are never cut
_HEX = re.compile(r"[0-9a-f]{32,}")


def document(value: Any) -> None:
    """Print a JSON document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def line_document(value: Any) -> None:
    """Print a JSON document as one line, for a stream of them."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def console(stream: TextIO | None = None) -> Console:
    """A console on stdout, or on `stream`."""
    from rich.console import Console

    file = sys.stdout if stream is None else stream
    return Console(file=file, highlight=False, emoji=False, width=None if file.isatty() else PIPE_WIDTH)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, width: int, right: Sequence[str], flexible: str
) -> Table:
    """A table without lines. `flexible`: the column that gives way (with an ellipsis) where `width` is too narrow;
    where that is not enough, the last columns are left out, but none of KEPT.

    Cells may hold markup; what comes from elsewhere is escaped by the caller.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[Text.from_markup(cell) for cell in row] for row in rows]
    widths = [max([len(h), *(row[i].cell_len for row in cells)]) for i, h in enumerate(headings)]
    shown = _fitting(headings, widths, flexible, width)
    headings, widths = [headings[i] for i in shown], [widths[i] for i in shown]
    spare = width - sum(widths) - GAP * len(headings)
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for heading, wanted in zip(headings, widths, strict=True):
        granted = max(len(heading), wanted + min(0, spare)) if heading == flexible else wanted
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        made.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", width=granted)
    for row in cells:
        made.add_row(*(row[i] for i in shown))
    return made


def _fitting(headings: Sequence[str], widths: Sequence[int], flexible: str, width: int) -> list[int]:
    """The columns that fit, whole but for the flexible one."""
    least = [len(h) if h == flexible else wanted for h, wanted in zip(headings, widths, strict=True)]
    shown = list(range(len(headings)))
    for i in reversed(range(len(headings))):
        if sum(least[j] + GAP for j in shown) > width and headings[i] not in KEPT:
            shown.remove(i)
    return shown


def say(text: str) -> None:
    """One line of what happens, on stderr."""
    print(text, file=sys.stderr, flush=True)


def clock(epoch: float) -> str:
    """Local time: the time of day today, else the date with it."""
    then = time.localtime(epoch)
    today = time.strftime("%Y-%m-%d", then) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def duration(seconds: float) -> str:
    """The two largest units."""
    s = max(0, int(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def ago(epoch: float) -> str:
    return f"{clock(epoch)} ({duration(time.time() - epoch)} ago)"


def short(text: str) -> str:
    """Digests by their first twelve characters, wherever they stand in the text."""
    return _HEX.sub(lambda found: found[0][:12], text)


def value(plain: Any) -> str:
    """A plain value of a fingerprint, for people."""
    if isinstance(plain, str):
        return short(plain)
    return short(msgspec.json.encode(plain).decode())
