"""What a plan keeps in the memory of a device.

    model state     parameters, gradients and optimizer state of this rank's stages: cut by tp and ep, and by ZeRO over
                    the N replicas (dp x cp)
    activations     what the ops of a block save (from the trace), cut by tp, sp, cp and recomputation, times the
                    microbatches that the schedule keeps alive
    workspace       the largest op of the backward, a block that is computed again, the optimizer's temporaries
    buffers         messages under way: a bucket of gradients, gathered parameters, activations of the tp region

A step has three peaks, of which the highest counts: in the backward, when activations are alive; at its end, when all
gradients are there; and while the optimizer steps. `Hardware.margin` is kept free on top, for fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from unisono.plan.plan import Plan
from unisono.plan.portrait import OptimizerState, Portrait, Segment, Weight
from unisono.plan.setting import Setting, hidden_bytes
from unisono.plan.stages import Stages

BUCKET = 25 * 2**20  # bytes of gradients that travel together


@dataclass(frozen=True)
class Footprint:
    """Bytes on the rank that needs most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    buffers: float
    stage: int = 0  # the pipeline rank that needs it

    @property
    def state(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.activations + self.workspace + self.buffers

    def parts(self) -> dict[str, float]:
        names = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers")
        return {name: getattr(self, name) for name in names}


# ---- model state -----------------------------------------------------------------------------------------------------


def local_shape(weight: Weight, plan: Plan) -> tuple[int, ...]:
    """The largest piece of a parameter on a rank, before ZeRO."""
    shape = list(weight.shape)
    if weight.tp_dim is not None:
        shape[weight.tp_dim] = ceil(shape[weight.tp_dim] / plan.tp)
    if weight.is_expert:
        shape[0] = ceil(shape[0] / plan.ep)
    return tuple(shape)


@dataclass(frozen=True)
class State:
    """Elements on a rank: all of its parameters, and what ZeRO leaves it of them."""

    elements: int
    sharded: int  # the largest share of any rank: rows are dealt, so shares differ by a row of each parameter at most
    itemsize: int

    def bytes(self, plan: Plan, optimizer: OptimizerState) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer state, between steps and with gradients summed."""
        if not plan.zero:
            whole = self.elements * self.itemsize
            return whole, whole, self.elements * optimizer.plain
        held = self.sharded * (optimizer.sharded + optimizer.copy)
        parameters = (self.sharded if plan.zero == 3 else self.elements) * self.itemsize
        gradients = (self.elements if plan.zero == 1 else self.sharded) * self.itemsize
        return parameters, gradients, 0.0 if plan.offload else held


def state_of(weights: Sequence[Weight], plan: Plan) -> State:
    """What a rank holds of these parameters; each name counts once."""
    elements = sharded = 0
    for weight in {weight.name: weight for weight in weights}.values():
        shape = local_shape(weight, plan)
        numel = 1
        for size in shape:
            numel *= size
        replicas = plan.dp * plan.cp // (plan.ep if weight.is_expert else 1)
        elements += numel
        sharded += ceil(shape[0] / replicas) * (numel // shape[0]) if shape and shape[0] else numel
    return State(elements, sharded, weights[0].itemsize if weights else 4)


# ---- activations -----------------------------------------------------------------------------------------------------


def saved_by(portrait: Portrait, segment: Segment, setting: Setting) -> float:
    """What a segment keeps of one microbatch between its forward and its backward."""
    if setting.recompute == "full" and segment.in_blocks:
        return hidden_bytes(portrait, setting)
    return kept_by_ops(portrait, segment, setting, core=setting.recompute != "selective")


def kept_by_ops(portrait: Portrait, segment: Segment, setting: Setting, *, core: bool = True) -> float:
    """The same without recomputation of the whole; `core`: with what attention's core keeps."""
    kept = segment.saved
    outside = setting.outside(segment)
    cut, whole = kept["cut"], kept["whole"]
    if core:
        cut += kept["core_cut"]
        whole += kept["core_whole"]
    gathered = kept["gathered"] / (setting.cp if portrait.keeps_gathered else outside)
    return setting.rows * (cut / setting.tp / setting.cp + whole / outside + gathered)


def workspace_of(portrait: Portrait, segment: Segment, setting: Setting) -> float:
    """What the backward of a segment has beside saved activations and gradients of parameters."""
    cut, whole = segment.widest
    widest = setting.rows * max(cut / setting.tp / setting.cp, whole / setting.outside(segment))
    if setting.recompute == "full" and segment.in_blocks:
        return widest + kept_by_ops(portrait, segment, setting)
    if setting.recompute == "selective":
        core = segment.saved["core_cut"] / setting.tp + segment.saved["core_whole"]
        return widest + setting.rows * core / setting.cp / max(len([w for w in segment.works if w.is_core]), 1)
    return widest


def chunks_alive(schedule: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """The most stages' activations (a stage of a microbatch each) that a rank of a pipeline keeps: closed forms of what
    `plan.activations` counts."""
    match schedule:
        case "1f1b":
            return min(microbatches, ranks - rank)
        case "interleaved" if chunks > 1:
            group = ceil(microbatches / max(1, microbatches // ranks))
            return min(microbatches * chunks, (chunks - 1) * group + 2 * (ranks - 1 - rank) + 1)
        case "interleaved":
            return min(microbatches, ranks - rank)
        case "zb1p":
            return min(microbatches, ranks)
        case "zbv":
            return min(2 * microbatches, 2 * ranks)
        case _:
            return microbatches


# ---- the whole -------------------------------------------------------------------------------------------------------


class MemoryModel:
    """Judges plans for one portrait. A plan takes microseconds: what segments need is remembered by their setting."""

    def __init__(self, portrait: Portrait) -> None:
        self.portrait = portrait
        self._saved: dict[tuple[int, Setting], tuple[float, float]] = {}
        self._states: dict[tuple[object, ...], State] = {}

    def footprint(self, plan: Plan, stages: Stages) -> Footprint:
        """Of the rank that needs most."""
        ranks = stages.telling_ranks
        return max((self.of_rank(plan, stages, rank) for rank in ranks), key=lambda each: each.total)

    def of_rank(self, plan: Plan, stages: Stages, rank: int) -> Footprint:
        """Of a rank of the pipeline. Those of the other axes hold equally much, but for rows that do not divide."""
        setting = Setting.of(plan, self.portrait.batch)
        segments = stages.segments_of(rank)
        state = self._state(plan, stages, rank)
        parameters, gradients, held = state.bytes(plan, self.portrait.optimizer)
        alive, workspace = self._activations(plan, stages, rank, segments, setting)
        whole = float(state.elements * state.itemsize)
        accumulates = plan.microbatches > 1 or plan.pp > 1
        growing = gradients if plan.zero >= 2 else whole if accumulates else 0.0
        backward = Footprint(parameters, growing, held, alive, workspace, self._buffers(plan, state, setting), rank)
        peaks = [backward, self._stepping(plan, state, (parameters, held), rank)]
        if plan.zero < 2:  # when activations are gone and all gradients are there, the last bucket of them leaves
            message = self._bucket(plan, state) * (2 if plan.zero else 1)  # in pieces, and what others send of theirs
            message += message / 2 / (plan.dp * plan.cp) if plan.zero else 0.0
            peaks.append(Footprint(parameters, whole, held, 0.0, 0.0, message, rank))
        return max(peaks, key=lambda each: each.total)

    def _state(self, plan: Plan, stages: Stages, rank: int) -> State:
        key = (plan.tp, plan.ep, plan.dp, plan.cp, stages.starts, stages.placement, rank)
        if key not in self._states:
            total = [0, 0]
            itemsize = 4
            for segment, count in stages.segments_of(rank):
                part = self._segment_state(segment, plan)
                total[0] += part.elements * count
                total[1] += part.sharded * count
                itemsize = part.itemsize
            if stages.holds_both_ends(rank) and self.portrait.tied:
                twice = [w for w in self.portrait.after.weights if w.name in self.portrait.tied]
                part = state_of(twice, plan)
                total = [total[0] - part.elements, total[1] - part.sharded]
            self._states[key] = State(total[0], total[1], itemsize)
        return self._states[key]

    def _segment_state(self, segment: Segment, plan: Plan) -> State:
        key = (id(segment), plan.tp, plan.ep, plan.dp, plan.cp)
        if key not in self._states:
            self._states[key] = state_of(segment.weights, plan)
        return self._states[key]

    def _of_segment(self, segment: Segment, setting: Setting) -> tuple[float, float]:
        key = (id(segment), setting)
        if key not in self._saved:
            self._saved[key] = (
                saved_by(self.portrait, segment, setting), workspace_of(self.portrait, segment, setting)
            )  # fmt: skip
        return self._saved[key]

    def _activations(
        self, plan: Plan, stages: Stages, rank: int, segments: Sequence[tuple[Segment, int]], setting: Setting
    ) -> tuple[float, float]:
        saved = workspace = 0.0
        for segment, count in segments:
            kept, widest = self._of_segment(segment, setting)
            saved += kept * count
            workspace = max(workspace, widest)
        if plan.pp == 1:
            return saved, workspace
        chunks = stages.chunks
        alive = chunks_alive(plan.schedule, plan.pp, plan.microbatches, chunks, rank)
        return saved * alive / chunks, workspace

    def _buffers(self, plan: Plan, state: State, setting: Setting) -> float:
        """Messages that are under way during the backward."""
        between = hidden_bytes(self.portrait, setting)
        whole = between * (setting.tp if setting.sequence else 1)
        size = 2 * whole if plan.tp > 1 else 0.0
        size += 2 * between if plan.pp > 1 else 0.0
        if plan.zero == 2:
            return size + 2 * self._bucket(plan, state)  # gradients that fill one, and its message
        if plan.zero == 3 and plan.dp * plan.cp > 1:
            # Two units are whole, each with the message that it came in; one has gradients, and their message.
            return size + 6 * self._largest_unit * self.portrait.gradient_itemsize / plan.tp + self._root(plan)
        return size

    def _bucket(self, plan: Plan, state: State) -> float:
        if plan.dp * plan.cp == 1:
            return 0.0
        return min(max(BUCKET, self._largest_weight / plan.tp), float(state.elements * state.itemsize))

    def _stepping(self, plan: Plan, state: State, kept: tuple[float, float], rank: int) -> Footprint:
        """While the optimizer steps: gradients as it sees them, its temporaries, and then what ZeRO gathers."""
        optimizer = self.portrait.optimizer
        mine = state.sharded if plan.zero else state.elements
        seen = 4 if plan.zero and optimizer.copy else state.itemsize
        gathered = (state.elements + state.sharded) * state.itemsize if plan.zero in (1, 2) else 0.0
        workspace = max(mine * optimizer.temporary, gathered)
        return Footprint(kept[0], float(mine * seen), kept[1], 0.0, workspace, 0.0, rank)

    @cached_property
    def _largest_unit(self) -> int:
        return max((block.numel for block in self.portrait.blocks), default=0)

    def _root(self, plan: Plan) -> float:
        """What is outside the blocks is whole as long as the model works."""
        both = {w.name: w for end in (self.portrait.before, self.portrait.after) for w in end.weights}
        return state_of(list(both.values()), plan).elements * self.portrait.gradient_itemsize * 2.0

    @cached_property
    def _largest_weight(self) -> float:
        sizes = [w.numel * w.itemsize for segment in set(self.portrait.segments) for w in segment.weights]
        return float(max(sizes, default=0))
