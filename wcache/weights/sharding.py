# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a checkpoint: which tensors it holds, under which names, and from which bytes they are made.

Pure; runs in the loader child (`shard`) and in everything that asks for a shard (`layout_key`). Opens nothing.
Tensor parallelism splits a tensor (`slicing.py`), pipeline stages hold ranges of layers, and with ep_size > 1 the
experts are spread whole, in blocks of neighbours, over the ranks of a stage. All refusals come before any allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wcache.errors import CheckpointError, ConfigError, PlanError, listed
from wcache.model import CheckpointFault, Placement, Sizes, nbytes
from wcache.weights.checkpoint import Checkpoint, TensorEntry
from wcache.weights.expression import choices, config_value, fill, pattern, size
from wcache.weights.fingerprint import LayoutKey
from wcache.weights.header import describe
from wcache.weights.plan import NO_PLAN, Default, Plan, Rule, Split, Stack, Stage, architecture
from wcache.weights.slicing import EVERYTHING, Cut, Piece, cut, is_scale, local_shape, pieces

log = logging.getLogger(__name__)

ENGINE = "safetensors"
LAYOUT_VERSION = "1"  # goes up when the same plan would give other bytes, names or shapes
AUTO = "auto"  # every tensor keeps the dtype it has in the checkpoint
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})  # what `dtype` casts, and may be

_ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor", "rotary_dim",
    "rotary_pct", "rotary_emb_base",
)  # fmt: skip
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor of a shard. `names`: the first is canonical, the others are tied to it. Dense, row-major."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Every tensor of one rank, in the order in which the files hold them. `skipped`: tensors the plan leaves out."""

    tensors: tuple[ShardTensor, ...]
    skipped: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def layout_key(config: Mapping[str, Any], placement: Placement, dtype: str, plan: Plan) -> LayoutKey:
    """The layout of this loader's shards. `dtype`: "auto" (as in the checkpoint) stays "auto": nothing is cast.

    Ranks that hold the same bytes get the same key: without experts neither data nor expert parallelism decides.
    """
    check_dtype(dtype)
    sizes = placement.sizes
    experts = any(_is_positive(config_value(config, key)) for key in _EXPERT_KEYS)
    quantization = config_value(config, "quantization_config")
    length = config_value(config, "max_position_embeddings")
    return LayoutKey(
        engine=ENGINE,
        engine_version=LAYOUT_VERSION,
        architecture=architecture(config),
        dtype=dtype,
        tp_size=sizes.tp,
        tp_rank=placement.tp_rank,
        pp_size=sizes.pp,
        pp_rank=placement.pp_rank,
        dp_size=sizes.dp if experts else 1,
        dp_rank=placement.dp_rank if experts else 0,
        ep_size=sizes.ep if experts else 1,
        ep_rank=placement.ep_rank if experts else 0,
        quantization=dict(quantization) if isinstance(quantization, Mapping) else None,
        rope={k: v for k in _ROPE_KEYS if (v := config_value(config, k)) is not None} or None,
        max_model_len=length if isinstance(length, int) else None,
        revision=None,  # the content says which version it is; a branch's name does not
        plan=plan.digest,
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def check_dtype(dtype: str) -> None:
    """Raises ConfigError for a dtype that weights cannot be cast to."""
    if dtype != AUTO and dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r}: valid are {AUTO}, {', '.join(sorted(FLOATS))}")


def shard(checkpoint: Checkpoint, plan: Plan, placement: Placement, dtype: str = AUTO) -> ShardPlan:
    """What one rank holds. Raises PlanError, ConfigError, or CheckpointError when the model is incomplete."""
    check_dtype(dtype)
    config = checkpoint.survey.config
    sharding = _Sharding(plan, placement, dtype, config)
    sharding.check_known()
    tied = _tied(plan, config, checkpoint.tensors)
    _check_required(sharding, [*checkpoint.tensors, *(alias for aliases in tied.values() for alias in aliases)])
    for entry in sorted(checkpoint.tensors.values(), key=lambda e: (e.file, e.offset)):
        sharding.add(entry, tied.get(entry.name, ()))
    return sharding.finish()


def _tied(plan: Plan, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[str, ...]]:
    """Names to add to a checkpoint's tensors.

    As Transformers does it: of two tied names the one that is missing takes the tensor that is there, whichever it is.
    Where the checkpoint has both, the file wins over the configuration: they stay two tensors (Transformers ties
    them only if they turn out to be equal, which no module can tell from two equal ones).
    """
    found: dict[str, tuple[str, ...]] = {}
    for tie in plan.tied:
        if not config_value(config, tie.when) or (tie.name in tensors) == (tie.to in tensors):
            continue
        have, lack = (tie.to, tie.name) if tie.to in tensors else (tie.name, tie.to)
        found[have] = (*found.get(have, ()), lack)
    return found


def _check_required(sharding: _Sharding, names: Iterable[str]) -> None:
    """Every tensor that the architecture needs in each layer, if there is anything to split.

    A rank that holds the whole checkpoint holds whatever it names: an engine whose module needs more is told by the
    structural check. A part of an incomplete model would go unnoticed for longer. Raises CheckpointError naming them.
    """
    missing = []
    names = list(names)
    for text in (one for required in sharding.plan.required for one in choices(required)):
        wanted = pattern(text)
        found = {tuple(sorted(n.items())) for name in names if (n := wanted.match(name)) is not None}
        every = sharding.every(wanted.numbers)
        missing += [fill(text, numbers) for numbers in every if tuple(sorted(numbers.items())) not in found]
    if missing and sharding.placement.sizes == Sizes():
        log.warning("the checkpoint is no complete model: it lacks %s", describe(missing))
        return
    _refuse_missing(missing)


def _refuse_missing(missing: list[str]) -> None:
    if missing:
        raise CheckpointError(CheckpointFault.MISSING_TENSOR, f"the checkpoint lacks {listed(missing, 8, ', ')}")


@dataclass(slots=True)
class _Stacked:
    """The tensors that become `into`: (expert, part) to the tensor and its rule."""

    into: str
    parts: int
    members: dict[tuple[int, int], tuple[TensorEntry, Rule]] = field(default_factory=dict)


@dataclass(slots=True)
class _Sharding:
    """The state of one `shard` call."""

    plan: Plan
    placement: Placement
    dtype: str
    config: Mapping[str, Any]
    tensors: list[ShardTensor | _Stacked] = field(default_factory=list)
    stacks: dict[str, _Stacked] = field(default_factory=dict)
    experts_seen: dict[str, set[int]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    _sizes: dict[str, int] = field(default_factory=dict)

    def check_known(self) -> None:
        if self.plan.name == NO_PLAN and self.splits:
            raise PlanError(
                f"{architecture(self.config)} has no built-in sharding plan; without one it loads on one rank only",
                hint='describe its tensors in a TOML plan and name it in wcache.toml: plan = "/path/to/plan.toml"',
            )

    @property
    def splits(self) -> bool:
        sizes = self.placement.sizes
        return (sizes.tp, sizes.pp, sizes.ep) != (1, 1, 1)

    def size(self, text: str) -> int:
        if text not in self._sizes:
            self._sizes[text] = size(text, self.config)
        return self._sizes[text]

    def every(self, kinds: frozenset[str]) -> Iterable[dict[str, int]]:
        """Every combination of numbers that a pattern of these kinds must be there for."""
        combinations: list[dict[str, int]] = [{}]
        for kind, text in (("layer", self.plan.layers), ("expert", self.plan.experts)):
            if kind in kinds:
                combinations = [{**c, kind: i} for c in combinations for i in range(self.size(text))]
        return combinations

    def add(self, entry: TensorEntry, aliases: Iterable[str]) -> None:
        """Take this rank's part of one checkpoint tensor, under each of its names that lives on this rank."""
        names: list[str] = []
        decisive: Rule | None = None
        for name in (entry.name, *aliases):
            rule, numbers = self.plan.rule_for(name)
            if rule is not None and rule.text.split is Split.SKIP:
                self.skipped.append(name)
                continue
            self._check_numbers(name, rule, numbers)
            if not self._is_here(name, rule, numbers):
                continue
            if rule is not None and rule.text.stack is not None:
                self._stack(entry, rule, rule.text.stack, numbers)
                return
            if names and _way(rule) != _way(decisive):
                raise PlanError(f"{names[0]} and {name} are tied, but plan {self.plan.name} splits them differently")
            decisive = rule
            names.append(fill(rule.text.rename, numbers) if rule is not None and rule.text.rename else name)
        if names:
            self._take(entry, decisive, tuple(names))

    def _check_numbers(self, name: str, rule: Rule | None, numbers: Mapping[str, int]) -> None:
        for kind, text in (("layer", self.plan.layers), ("expert", self.plan.experts)):
            if kind in numbers and numbers[kind] >= self.size(text):
                raise PlanError(f"{name}: {kind} {numbers[kind]}, but config.json has {text} = {self.size(text)}")
        if rule is not None and "expert" in numbers:
            self.experts_seen.setdefault(rule.pattern.without("expert", name), set()).add(numbers["expert"])

    def _is_here(self, name: str, rule: Rule | None, numbers: Mapping[str, int]) -> bool:
        """Does this rank hold (a part of) the tensor? Raises PlanError for one that nobody can place."""
        if rule is None or rule.text.split is Split.WHOLE:
            self._check_unplaced(name, rule)
            return True
        sizes, placement = self.placement.sizes, self.placement
        if "layer" in numbers:
            if numbers["layer"] not in self._layers():
                return False
        elif (rule.text.stage is Stage.FIRST and placement.pp_rank != 0) or (
            rule.text.stage is Stage.LAST and placement.pp_rank != sizes.pp - 1
        ):
            return False
        return "expert" not in numbers or numbers["expert"] in self._experts(name)

    def _check_unplaced(self, name: str, rule: Rule | None) -> None:
        if rule is None and self.plan.default is Default.REPLICATE:
            return
        if rule is None and self.plan.default is Default.REFUSE:
            raise PlanError(f"{name} matches no rule of plan {self.plan.name}, which has no default")
        if self.splits:
            sizes = self.placement.sizes
            why = "matches no rule" if rule is None else "is taken whole by a rule"
            raise PlanError(
                f"{name} {why} of plan {self.plan.name}; with tp_size {sizes.tp}, pp_size {sizes.pp}, ep_size"
                f" {sizes.ep} nobody knows which rank has what of it",
                hint=f"a TOML plan with extends = {self.plan.name!r} can add a rule for it",
            )

    def _layers(self) -> range:
        """This stage's layers: even blocks, the first stages one more where they do not divide."""
        layers, stages, stage = self.size(self.plan.layers), self.placement.sizes.pp, self.placement.pp_rank
        if layers < stages:
            raise PlanError(f"pp_size {stages} for a model of {layers} layers")
        each, rest = divmod(layers, stages)
        start = stage * each + min(stage, rest)
        return range(start, start + each + (stage < rest))

    def _experts(self, name: str) -> range:
        """This rank's experts: blocks of neighbours over ep."""
        experts, ranks = self.size(self.plan.experts), self.placement.sizes.ep
        if experts % ranks:
            raise PlanError(f"{name}: {experts} experts do not divide by ep_size {ranks}")
        each = experts // ranks
        return range(self.placement.ep_rank * each, (self.placement.ep_rank + 1) * each)

    def _cut(self, entry: TensorEntry, rule: Rule | None) -> Cut:
        if rule is None or rule.text.split is Split.WHOLE:
            return EVERYTHING
        if "expert" in rule.pattern.numbers and self.placement.sizes.ep > 1:
            return EVERYTHING  # experts are spread over the ranks instead of being split
        return cut(entry, rule, self.placement.sizes.tp, self.placement.tp_rank, self.config)

    def _dtype(self, entry: TensorEntry, rule: Rule | None) -> str:
        fixed = rule is not None and not rule.text.cast
        if self.dtype == AUTO or entry.dtype not in FLOATS or fixed or is_scale(entry.name):
            return entry.dtype
        if config_value(self.config, "quantization_config") is not None and entry.name.endswith(("scales", "zeros")):
            return entry.dtype
        return self.dtype

    def _take(self, entry: TensorEntry, rule: Rule | None, names: tuple[str, ...]) -> None:
        what, dtype = self._cut(entry, rule), self._dtype(entry, rule)
        shape = local_shape(entry, what)
        self.tensors.append(ShardTensor(names, dtype, shape, tuple(pieces(entry, what, dtype))))

    def _stack(self, entry: TensorEntry, rule: Rule, stack: Stack, numbers: Mapping[str, int]) -> None:
        into = fill(stack.into, numbers)
        if into not in self.stacks:
            self.stacks[into] = _Stacked(into, stack.parts)
            self.tensors.append(self.stacks[into])
        members, key = self.stacks[into].members, (numbers["expert"], stack.part)
        if stack.parts != self.stacks[into].parts or key in members:
            raise PlanError(f"plan {self.plan.name}: {entry.name} has no part of its own in {into}")
        members[key] = (entry, rule)

    def finish(self) -> ShardPlan:
        self._check_experts()
        done = [t if isinstance(t, ShardTensor) else self._stacked(t) for t in self.tensors]
        seen: set[str] = set()
        for name in (n for t in done for n in t.names):
            if name in seen:
                raise PlanError(f"plan {self.plan.name} gives two tensors the name {name}")
            seen.add(name)
        return ShardPlan(tuple(done), tuple(self.skipped))

    def _check_experts(self) -> None:
        """What one expert has, each of them has, whichever rank it is on."""
        for template, seen in self.experts_seen.items():
            lacking = set(range(self.size(self.plan.experts))) - seen
            _refuse_missing([fill(template, {"expert": i}) for i in sorted(lacking)])

    def _stacked(self, stacked: _Stacked) -> ShardTensor:
        """[experts of this rank, parts * rows of one, ...]: every member lies in one run of the result."""
        into, parts = stacked.into, stacked.parts
        experts = sorted({expert for expert, _ in stacked.members})
        first, rule = stacked.members[min(stacked.members)]
        shape, dtype = local_shape(first, self._cut(first, rule)), self._dtype(first, rule)
        if not shape:
            raise PlanError(f"{first.name} is a single number; it cannot become a part of {into}")
        member_bytes, found, missing = nbytes(dtype, shape), [], []
        for row, (expert, part) in enumerate((e, p) for e in experts for p in range(parts)):
            if (expert, part) not in stacked.members:
                missing.append(f"part {part} of expert {expert} in {into}")
                continue
            entry, rule = stacked.members[expert, part]
            what = self._cut(entry, rule)
            if local_shape(entry, what) != shape or entry.dtype != first.dtype:
                raise PlanError(
                    f"{entry.name} ({entry.dtype} {list(entry.shape)}) and {first.name} ({first.dtype}"
                    f" {list(first.shape)}) cannot both be parts of {into}"
                )
            found += pieces(entry, what, dtype, row * member_bytes)
        _refuse_missing(missing)
        return ShardTensor((into,), dtype, (len(experts), parts * shape[0], *shape[1:]), tuple(found))


def _way(rule: Rule | None) -> tuple[Any, ...]:
    """In what two rules must agree for tied tensors to be one."""
    return () if rule is None else (rule.text.split, rule.dim, rule.text.heads, rule.text.cast)
