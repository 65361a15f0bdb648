# SPDX-License-Identifier: Apache-2.0
"""The two small languages of a sharding plan: patterns over tensor names, and sizes in terms of config.json.

Pure. A pattern is literal text but for `{layer}` and `{expert}` (a number, remembered), `{q|k|v}` (one of these words)
and `*` (anything, dots too); it must match the whole name. A size is an integer expression with + - * // and
parentheses over keys of config.json; `a | b` is the first of the two that the configuration has.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wcache.errors import PlanError

_TOKEN = re.compile(r"\{([^{}]*)\}|\*")
NUMBERS = ("layer", "expert")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern; `numbers`: which of `layer` and `expert` it remembers."""

    text: str
    regex: re.Pattern[str]
    numbers: frozenset[str]

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in a name, or None if the name does not match."""
        found = self.regex.fullmatch(name)
        return {k: int(v) for k, v in found.groupdict().items()} if found else None

    def without(self, number: str, name: str) -> str:
        """A name that matches, with one of its numbers as a placeholder again."""
        found = self.regex.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} does not match {self.text}")
        return f"{name[: found.start(number)]}{{{number}}}{name[found.end(number) :]}"


def pattern(text: str) -> Pattern:
    """Compile a pattern. Raises PlanError."""
    regex, position, numbers = "", 0, []
    for token in _TOKEN.finditer(text):
        regex += re.escape(text[position : token.start()])
        position = token.end()
        word = token.group(1)
        if word is None:
            regex += ".*"
        elif word in NUMBERS:
            if word in numbers:
                raise PlanError(f"pattern {text!r} has {{{word}}} twice")
            numbers.append(word)
            regex += rf"(?P<{word}>\d+)"
        elif "|" in word:
            regex += "(?:" + "|".join(re.escape(w) for w in word.split("|")) + ")"
        else:
            raise PlanError(
                f"pattern {text!r}: {{{word}}} is none of {{layer}}, {{expert}} and a choice such as {{q|k|v}}"
            )
    rest = text[position:]
    if "{" in rest or "}" in rest:
        raise PlanError(f"pattern {text!r}: a brace without its partner")
    return Pattern(text, re.compile(regex + re.escape(rest)), frozenset(numbers))


def choices(text: str) -> Iterator[str]:
    """A pattern with every combination of its `{a|b}` words written out."""
    parts = re.split(r"\{([^{}]*\|[^{}]*)\}", text)
    for words in itertools.product(*(p.split("|") for p in parts[1::2])):
        filled = [*words, ""]
        yield "".join(literal + word for literal, word in zip(parts[::2], filled, strict=True))


def fill(text: str, numbers: Mapping[str, int]) -> str:
    """A pattern with its `{layer}` and `{expert}` written out."""
    for name, value in numbers.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def config_value(config: Mapping[str, Any], key: str) -> Any:
    """A key of config.json, else of its `text_config`, else what Transformers derives from others; or None."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        if level.get(key) is not None:
            return level[key]
    if key == "num_key_value_heads":
        return config_value(config, "num_attention_heads")
    if key == "head_dim":
        hidden, heads = config_value(config, "hidden_size"), config_value(config, "num_attention_heads")
        return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None
    return None


def check_size(text: str) -> None:
    """Raises PlanError unless `text` is a size expression."""
    _check_node(_parse(text).body, text)


def size(text: str, config: Mapping[str, Any]) -> int:
    """The value of a size expression, at least 1. Raises PlanError naming the expression and the missing key."""
    value = _value(_parse(text).body, text, config)
    if value is None:
        raise PlanError(f"{text!r}: config.json has no such key")
    if value < 1:
        raise PlanError(f"{text!r} is {value} with this config.json; it must be at least 1")
    return value


def _parse(text: str) -> ast.Expression:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError) as e:
        raise PlanError(f"{text!r} is no size expression: {e}") from e


def _check_node(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.BitOr):
        _check_node(node.left, text)
        _check_node(node.right, text)
    elif not (isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)):
        raise PlanError(f"{text!r}: only whole numbers, keys of config.json, + - * // | and parentheses are allowed")


def _value(node: ast.expr, text: str, config: Mapping[str, Any]) -> int | None:
    _check_node(node, text)
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    if isinstance(node, ast.Name):
        value = config_value(config, node.id)
        if value is not None and type(value) is not int:
            raise PlanError(f"{text!r}: {node.id} in config.json is {value!r}, no whole number")
        return value
    if not isinstance(node, ast.BinOp):
        raise PlanError(f"{text!r} is no size expression")
    left, right = _value(node.left, text, config), _value(node.right, text, config)
    if isinstance(node.op, ast.BitOr):
        return right if left is None else left
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.FloorDiv):
        if right == 0:
            raise PlanError(f"{text!r} divides by 0 with this config.json")
        return left // right
    return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
