"""A profile of a training job: all that the planner looks at, so that a plan is judged without touching the model.

A model is a row of segments: what it does before its blocks, each block, and what it does after them, loss included.
Blocks that are alike share one Segment object. Amounts are those of one sample; they grow with the samples, but for
what is read of parameters. Every amount knows what divides it:

    sharded     inside a tensor-parallel region: divided by tp
    replicated  outside: every tp rank has it all, or with sp a tp-th of the sequence
    gathered    the input of a column-parallel layer: outside, but under sp unisono keeps it gathered for the backward

and everything inside blocks is divided by cp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

from unisono.plan.plan import Plan


@dataclass(frozen=True)
class OpCost:
    """One op: what it costs forward for one sample."""

    name: str
    kind: str  # matmul, attention, memory (what bounds it), or view
    flops: float = 0.0
    moved: float = 0.0  # bytes of activations read and written
    moved_back: float = 0.0  # ... by the backward, beyond what mirrors the forward
    weights: float = 0.0  # bytes of parameters read
    outputs: float = 0.0  # bytes
    saved: float = 0.0  # bytes kept for the backward
    is_sharded: bool = False  # the tp ranks share the work
    saved_is: str = "replicated"  # sharded, replicated or gathered
    is_core: bool = False  # of attention's core, which recompute=attention runs again
    core_saved: float = 0.0  # of `saved`, what recompute=attention drops
    is_repeated: bool = False  # run again under recompute=selective
    dropped: float = 0.0  # of `saved`, what recompute=selective drops
    kept_instead: float = 0.0  # bytes that recompute=selective keeps to compute this op's result from
    is_expert: bool = False
    calls: int = 1  # kernels that it stands for
    held_sharded: float = 0.0  # bytes of activations' gradients that are alive in its backward, of what tp shards
    held_replicated: float = 0.0  # ... and of what it does not
    temporary: float = 0.0  # bytes beside those, in its backward
    parameters: int = 0  # that it works with
    gradients: float = 0.0  # bytes of parameters' gradients that its backward makes, not of one sample but in all
    role: str = ""  # column, row or vocab: a layer that tp shards
    crossing: float = 0.0  # bytes of what enters a region here, or leaves it
    tp_saved: float = 0.0  # bytes more that are kept where tp shards it
    tp_temporary: float = 0.0  # instead of `temporary`, where tp shards it
    weight_copy: float = 0.0  # bytes of a parameter in the dtype of autocast, not of one sample but in all
    is_gathered: bool = False  # that copy is not made where ZeRO gathers the parameter in its dtype


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    tp_dim: int | None = None  # the dim that tp shards
    is_expert: bool = False  # ep shards dim 0
    gathers: bool = False  # where tp shards a layer by its outputs: whether these are gathered at once
    is_frozen: bool = False  # not trained: it has no gradient
    gradient_itemsize: int = 0  # 0: that of the parameter
    zero_itemsize: int = 0  # of the parameter under ZeRO, which may hold and gather it in half; 0: its own
    sent_itemsize: int = 0  # of a gradient in a message; 0: its own
    master: int = 0  # bytes an element of the copy that the optimizer updates, without ZeRO
    zero_master: int = 0  # ... of this rank's shard, under ZeRO

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def gradient(self) -> int:
        """Bytes of an element's gradient."""
        return self.gradient_itemsize or self.itemsize

    @property
    def sent(self) -> int:
        return self.sent_itemsize or self.gradient

    @property
    def gathered_itemsize(self) -> int:
        return self.zero_itemsize or self.itemsize


@dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of the model that stays together. `enters` and `leaves`: bytes, for one sample, of the activations that
    tp ranks sum in the backward, where a region begins, and in the forward, where one ends."""

    ops: tuple[OpCost, ...]
    weights: tuple[Weight, ...]
    enters: tuple[float, ...] = ()
    leaves: tuple[float, ...] = ()
    expert_traffic: float = 0.0  # bytes a sample that go to experts and come back, forward
    in_blocks: bool = True

    @cached_property
    def saved(self) -> dict[str, float]:
        """Bytes kept for one sample: sharded, replicated, gathered; core_sharded, core_replicated, which
        recompute=attention frees; and what is kept in addition under tp."""
        kinds = ("sharded", "replicated", "gathered", "core_sharded", "core_replicated", "under_tp")
        kept = dict.fromkeys(kinds, 0.0)
        for work in self.ops:
            kept["under_tp"] += work.tp_saved
            kept[work.saved_is] += work.saved - work.core_saved
            kept["core_sharded" if work.is_sharded else "core_replicated"] += work.core_saved
        return kept

    @cached_property
    def freed(self) -> dict[str, float]:
        """Of these, bytes that recompute=selective frees, less what it keeps instead."""
        freed = dict.fromkeys(("sharded", "replicated", "gathered"), 0.0)
        for work in self.ops:
            freed[work.saved_is] += work.dropped
            freed["sharded" if work.is_sharded else "replicated"] -= work.kept_instead
        return freed

    @cached_property
    def numel(self) -> int:
        """Of the parameters that are trained."""
        return sum(weight.numel for weight in self.weights if not weight.is_frozen)

    @cached_property
    def gradients(self) -> int:
        """Bytes of their gradients."""
        return sum(weight.numel * weight.gradient for weight in self.weights if not weight.is_frozen)


@dataclass(frozen=True)
class OptimizerState:
    """Bytes that the optimizer keeps for an element, beside copies that it updates (Weight.master)."""

    plain: float = 8.0  # on the parameter itself
    sharded: float = 8.0  # on what ZeRO gives it
    temporary: float = 4.0  # while it steps, an element
    at_once: float = inf  # elements that it updates together
    traffic: float = 28.0  # bytes read and written in a step, an element of what ZeRO gives it
    plain_traffic: float = 28.0  # ... of the parameter itself


@dataclass(frozen=True, eq=False)
class ModelProfile:
    """A job of `batch` samples a step."""

    name: str
    batch: int
    before: Segment
    blocks: tuple[Segment, ...]
    after: Segment
    hidden: float  # bytes of one sample's activations between blocks
    dtype: str  # in which it computes
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    length: int = 1  # of a sequence: what cp and sp divide
    tied: tuple[str, ...] = ()  # parameters used before and after the blocks: held by both ends of a pipeline
    clips: bool = False  # whether gradients are scaled by their norm
    has_experts: bool = False
    expert_count: int = 0
    recomputes: bool = True  # whether the blocks are such as recomputation repeats: of one class
    keeps_gathered: bool = True  # under sp: Megatron gathers again in the backward, unisono keeps

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return (self.before, *self.blocks, self.after)

    @cached_property
    def _ends(self) -> tuple[Weight, ...]:
        """Outside the blocks, each name once."""
        return tuple({weight.name: weight for end in (self.before, self.after) for weight in end.weights}.values())

    @cached_property
    def has_scores(self) -> bool:
        """Whether attention keeps matrices of queries by keys, which recompute=attention frees."""
        return any(work.is_core and work.kind != "attention" for block in set(self.blocks) for work in block.ops)

    @cached_property
    def has_bare_blocks(self) -> bool:
        """Whether blocks are without parameters."""
        return not all(block.weights for block in set(self.blocks))

    @cached_property
    def parameters(self) -> int:
        """Elements of those that are trained."""
        return sum(w.numel for w in self._ends if not w.is_frozen) + sum(block.numel for block in self.blocks)

    @cached_property
    def frozen(self) -> int:
        """Elements of those that are not."""
        weights = (*self._ends, *(weight for block in self.blocks for weight in block.weights))
        return sum(weight.numel for weight in weights if weight.is_frozen)

    @cached_property
    def flops(self) -> float:
        """Of a forward on one sample."""
        return sum(work.flops for segment in self.segments for work in segment.ops)


# ---- under a plan ----------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """How a segment is divided: equal settings have equal memory and time."""

    samples: float  # of a microbatch on a rank
    tp: int
    cp: int
    ep: int
    sequence: bool
    recompute: str
    zero: bool = False  # parameters are held as ZeRO gathers them

    @classmethod
    def of(cls, plan: Plan, batch: int) -> Setting:
        recompute = plan.recompute if isinstance(plan.recompute, str) else "none"
        return cls(
            batch / plan.dp / plan.microbatches, plan.tp, plan.cp, plan.ep, plan.sequence, recompute, plan.zero > 0
        )

    def copied(self, work: OpCost) -> float:
        """Bytes of a rank's copy of a weight for autocast."""
        if work.is_gathered and self.zero:
            return 0.0
        return work.weight_copy / (self.tp if work.is_sharded else 1)

    def outside(self, segment: Segment) -> float:
        """What divides a sample's activations outside tensor-parallel regions."""
        if not segment.in_blocks:
            return self.cp
        return self.cp * (self.tp if self.sequence else 1)


def hidden_bytes(profile: ModelProfile, setting: Setting) -> float:
    """Of a microbatch's activations between two blocks, on one rank."""
    return profile.hidden * setting.samples / setting.cp / (setting.tp if setting.sequence else 1)
