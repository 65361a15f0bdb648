# SPDX-License-Identifier: Apache-2.0
"""A sharding plan: which part of every checkpoint tensor a rank holds, and under which name.

Pure but for reading TOML; runs in the loader child, in engines (for the layout key) and in `wcache explain`.
Plans for the Llama family are packaged in `weights/plans/`; any other architecture takes a TOML file of the same form
(`plans/README.md` describes it). The first rule whose pattern matches a tensor decides about it, and only that one;
a plan that `extends` another puts its own rules first.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from wcache.errors import PlanError
from wcache.weights.expression import Pattern, check_size, pattern
from wcache.weights.fingerprint import digest

NO_PLAN = "whole"  # the plan of an architecture without one: everything as it is in the checkpoint


class Split(StrEnum):
    """What tensor parallelism does to a tensor.

    `COLUMN`: even parts along dim 0. `ROW`: along dim 1. `VOCAB`: as column, over the vocabulary. `KV`: as column, over
    the key/value heads, which are replicated where there are more ranks than heads. `FUSED`: a tensor made of parts,
    each of them split. `REPLICATE`: every rank has it whole. `WHOLE`: has it whole if there is nothing to split
    (all parallel sizes are 1), is refused otherwise. `SKIP`: not loaded at all.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    KV = "kv"
    FUSED = "fused"
    REPLICATE = "replicate"
    WHOLE = "whole"
    SKIP = "skip"


class Stage(StrEnum):
    """Which pipeline stages hold a tensor that belongs to no layer."""

    FIRST = "first"
    LAST = "last"
    ALL = "all"


class Default(StrEnum):
    """What becomes of a tensor that no rule matches."""

    REFUSE = "refuse"
    WHOLE = "whole"
    REPLICATE = "replicate"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part of a fused tensor: its `size` along the dim; `heads` as in a rule; `kv`: replicate heads if too few."""

    size: str
    heads: str | None = None
    kv: bool = False


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tensors of all experts become one, `into`, with the expert as a new first dim.

    `part` of `parts`: several tensors of an expert lie behind each other along the expert's own dim 0.
    """

    into: str
    part: int = 0
    parts: int = 1


class RuleText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"split": "kind"}):
    """A `[[rule]]` as it is written.

    `heads`: into how many indivisible units the dim falls. `rename`: the name in the module where it is not the
    checkpoint's. `cast`: false for a tensor that keeps its dtype whatever the loader is asked for.
    """

    tensor: str
    split: Split
    dim: int | None = None
    heads: str | None = None
    parts: tuple[Part, ...] = ()
    stage: Stage = Stage.ALL
    stack: Stack | None = None
    rename: str | None = None
    cast: bool = True


class Tie(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`name` and `to` are one tensor if config.json's key `when` is true and the checkpoint has only one of them."""

    name: str
    to: str
    when: str = "tie_word_embeddings"


class PlanText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan file as it is written."""

    architectures: tuple[str, ...] = ()
    extends: str | None = None
    default: Default | None = None
    layers: str | None = None
    experts: str | None = None
    required: tuple[str, ...] | None = None
    tied: tuple[Tie, ...] = ()
    rule: tuple[RuleText, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: Pattern
    text: RuleText

    @property
    def dim(self) -> int:
        if self.text.dim is not None:
            return self.text.dim
        return 1 if self.text.split is Split.ROW else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Rules in order, and what holds for the model as a whole.

    `layers`, `experts`: size expressions of their numbers. `required`: patterns that must be there for every layer.
    """

    name: str
    rules: tuple[Rule, ...]
    default: Default
    layers: str
    experts: str
    required: tuple[str, ...]
    tied: tuple[Tie, ...]

    @property
    def digest(self) -> str:
        """Hex SHA-256 over everything that decides about bytes: not the name, nor what is required."""
        return digest(
            {
                "rules": [msgspec.to_builtins(rule.text) for rule in self.rules],
                "default": str(self.default),
                "layers": self.layers,
                "experts": self.experts,
                "tied": [msgspec.to_builtins(tie) for tie in self.tied],
            }
        )

    def rule_for(self, name: str) -> tuple[Rule | None, dict[str, int]]:
        """The rule that decides about a tensor, with the layer and expert in its name; None: the default decides."""
        for rule in self.rules:
            numbers = rule.pattern.match(name)
            if numbers is not None:
                return rule, numbers
        return None, {}


def plan_for(config: Mapping[str, Any], plan_path: Path | None) -> Plan:
    """The plan of a checkpoint: the given file, or (a bare word) the packaged plan of that name, or the built-in one.

    An architecture without a plan gets the plan "whole", which works as long as there is nothing to split.
    Raises PlanError.
    """
    if plan_path is not None:
        if plan_path.suffix == "" and len(plan_path.parts) == 1 and plan_path.name in packaged():
            return _build(plan_path.name, packaged()[plan_path.name])
        return _build(str(plan_path), _read(plan_path))
    for name, text in packaged().items():
        if architecture(config) in text.architectures:
            return _build(name, text)
    return _build(NO_PLAN, packaged()[NO_PLAN])


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture that config.json names, else its model type, else "unknown"."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else "unknown"


@functools.cache
def packaged() -> dict[str, PlanText]:
    """The plans in the package by name."""
    folder = resources.files("wcache.weights") / "plans"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): parse(f.read_text(), f.name) for f in files}


def _read(path: Path) -> PlanText:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise PlanError(f"plan {path}: {e}", hint=f"packaged plans: {', '.join(packaged())}") from e
    return parse(text, str(path))


def parse(text: str, name: str) -> PlanText:
    """Read a plan's TOML. Raises PlanError naming file and key, for an unknown key the nearest valid one too."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise PlanError(f"{name}: {e}") from e
    _refuse_unknown(document, PlanText, name, "")
    try:
        return msgspec.convert(document, PlanText)
    except msgspec.ValidationError as e:
        raise PlanError(f"{name}: {e}") from e


_NESTED: dict[str, type[msgspec.Struct]] = {"rule": RuleText, "tied": Tie, "parts": Part, "stack": Stack}


def _refuse_unknown(document: Mapping[str, Any], struct: type[msgspec.Struct], name: str, prefix: str) -> None:
    valid = {field.encode_name for field in msgspec.structs.fields(struct)}
    for key, value in document.items():
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
            meant = f"; did you mean {prefix}{near[0]}?" if near else f"; valid are {', '.join(sorted(valid))}"
            raise PlanError(f"{name}: unknown key {prefix}{key}{meant}")
        for i, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, dict) and key in _NESTED:
                inner = f"{prefix}{key}[{i}]." if isinstance(value, list) else f"{prefix}{key}."
                _refuse_unknown(item, _NESTED[key], name, inner)


def _build(name: str, text: PlanText) -> Plan:
    """A plan from its text and those of the plans that it extends: rules and ties add up, the nearest value wins."""
    chain = [text]
    while (base := chain[-1].extends) is not None:
        if base not in packaged():
            raise PlanError(f"plan {name} extends {base!r}; packaged plans: {', '.join(packaged())}")
        if packaged()[base] in chain:
            raise PlanError(f"plan {name} extends itself by way of {base!r}")
        chain.append(packaged()[base])
    rules = [Rule(pattern(rule.tensor), rule) for t in chain for rule in t.rule]
    for rule in rules:
        _check_rule(name, rule)
    required = next((t.required for t in chain if t.required is not None), ())
    for r in required:
        pattern(r)
    return Plan(
        name=name,
        rules=tuple(rules),
        default=next((t.default for t in chain if t.default is not None), Default.REFUSE),
        layers=_size(name, next((t.layers for t in chain if t.layers is not None), "num_hidden_layers")),
        experts=_size(name, next((t.experts for t in chain if t.experts is not None), "num_experts")),
        required=required,
        tied=tuple(tie for t in chain for tie in t.tied),
    )


def _size(name: str, text: str) -> str:
    try:
        check_size(text)
    except PlanError as e:
        raise PlanError(f"plan {name}: {e}") from e
    return text


def _check_rule(name: str, rule: Rule) -> None:
    text, where = rule.text, f"plan {name}: rule {rule.text.tensor!r}"
    if (text.split is Split.FUSED) != bool(text.parts):
        raise PlanError(f"{where}: parts belong to a fused rule, and a fused rule has parts")
    if text.heads is not None and text.split not in (Split.COLUMN, Split.ROW, Split.KV):
        raise PlanError(f"{where}: heads do not apply to kind {text.split}")
    if rule.dim < 0:
        raise PlanError(f"{where}: dim {rule.dim} is negative")
    if "layer" in rule.pattern.numbers and text.stage is not Stage.ALL:
        raise PlanError(f"{where}: a tensor of a layer goes with its layer; stage does not apply")
    for size in [text.heads, *[s for part in text.parts for s in (part.size, part.heads)]]:
        if size is not None:
            _size(f"{name}: rule {text.tensor!r}", size)
    if text.rename is not None:
        _check_target(f"{where}: rename", rule, text.rename)
        if text.stack is not None:
            raise PlanError(f"{where}: rename and stack exclude each other")
    if text.stack is not None:
        _check_stack(where, rule, text.stack)


def _check_target(where: str, rule: Rule, target: str) -> None:
    if pattern(target).numbers - rule.pattern.numbers or "*" in target or "|" in target:
        raise PlanError(f"{where} {target!r} must be one name once the rule's {{layer}} and {{expert}} are known")


def _check_stack(where: str, rule: Rule, stack: Stack) -> None:
    _check_target(f"{where}: stack.into", rule, stack.into)
    if "expert" not in rule.pattern.numbers or "{expert}" in stack.into:
        raise PlanError(f"{where}: stack collects over {{expert}}: the tensor has it, `into` has not")
    if rule.text.split in (Split.WHOLE, Split.SKIP):
        raise PlanError(f"{where}: kind {rule.text.split} cannot be stacked")
    if not 0 <= stack.part < stack.parts:
        raise PlanError(f"{where}: part {stack.part} of {stack.parts} parts")
