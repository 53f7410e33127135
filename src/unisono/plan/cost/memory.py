"""Memory of a device under a plan.

    model state     parameters, gradients and optimizer state of this rank's stages: sharded by tp, ep and by ZeRO over
                    the N replicas (dp x cp)
    activations     what the ops of a block save (from the trace), divided by tp, sp, cp and recomputation, times the
                    microbatches that the schedule keeps alive
    workspace       the segment whose backward runs: activations saved or recomputed, gradients of activations, copies;
                    or the optimizer's temporaries
    buffers         messages under way: buckets of gradients, gathered parameters; what libraries keep for themselves

The backward frees activations as gradients come: the highest of its moments counts, or the optimizer's step.
`Hardware.margin` is kept free on top, for fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from unisono.mesh.bucket import BUCKET_BYTES
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import (
    ModelProfile,
    OpCost,
    OptimizerState,
    Segment,
    Setting,
    Weight,
    hidden_bytes,
)
from unisono.plan.profile.stages import Stages


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
    """The largest shard of a parameter on a rank, before ZeRO."""
    shape = list(weight.shape)
    if weight.tp_dim is not None:
        shape[weight.tp_dim] = ceil(shape[weight.tp_dim] / plan.tp)
    if weight.is_expert:
        shape[0] = ceil(shape[0] / plan.ep)
    return tuple(shape)


def local_elements(weights: Sequence[Weight], plan: Plan) -> int:
    """Of the largest shards on a rank, before ZeRO; each name counts once."""
    return sum(prod(local_shape(weight, plan)) for weight in {weight.name: weight for weight in weights}.values())


class ModelState(NamedTuple):
    """What a rank holds of parameters that are trained. Those that are not have neither gradients nor state, and ZeRO
    does not shard them. Amounts are bytes, but for elements; `own_` is this rank's shard under ZeRO: the largest of any
    rank, as shards of a parameter differ by one of its rows at most."""

    elements: int = 0
    sharded: int = 0  # elements of this rank's shard
    parameters: int = 0
    gathered: int = 0  # parameters as ZeRO holds and gathers them
    gradients: int = 0
    sent: int = 0  # gradients in messages
    masters: int = 0  # copies that the optimizer updates, without ZeRO
    own_parameters: int = 0
    own_gradients: int = 0
    own_seen: int = 0  # gradients as the optimizer has them
    own_masters: int = 0
    frozen: int = 0

    def plus(self, other: ModelState, count: int = 1) -> ModelState:
        return ModelState(*(mine + count * theirs for mine, theirs in zip(self, other, strict=True)))

    def bytes(self, plan: Plan, optimizer: OptimizerState) -> tuple[float, float, float]:
        """Parameters, gradients and optimizer state, between steps and with gradients summed."""
        if not plan.zero:
            return self.parameters + self.frozen, self.gradients, self.elements * optimizer.plain + self.masters
        held = self.sharded * optimizer.sharded + self.own_masters
        parameters = self.own_parameters if plan.zero == 3 else self.gathered
        gradients = self.gradients if plan.zero == 1 else self.own_gradients
        return parameters + self.frozen, gradients, 0.0 if plan.offload else held


def state_of(weights: Sequence[Weight], plan: Plan) -> ModelState:
    """What a rank holds of these parameters; each name counts once."""
    total = ModelState()
    for weight in {weight.name: weight for weight in weights}.values():
        shape = local_shape(weight, plan)
        numel = prod(shape)
        if weight.is_frozen:
            total = total.plus(ModelState(frozen=numel * weight.itemsize))
            continue
        replicas = plan.dp // plan.copies * plan.cp // (plan.ep if weight.is_expert else 1)
        own = ceil(shape[0] / replicas) * (numel // shape[0]) if shape and shape[0] else numel
        total = total.plus(
            ModelState(
                elements=numel,
                sharded=own,
                parameters=numel * weight.itemsize,
                gathered=numel * weight.gathered_itemsize,
                gradients=numel * weight.gradient,
                sent=numel * weight.sent,
                masters=numel * weight.master,
                own_parameters=own * weight.gathered_itemsize,
                own_gradients=own * weight.gradient,
                own_seen=own * (weight.zero_master or weight.gradient),
                own_masters=own * weight.zero_master,
            )
        )
    return total


# ---- activations -----------------------------------------------------------------------------------------------------


def saved_by(profile: ModelProfile, segment: Segment, setting: Setting) -> float:
    """What a segment keeps of one microbatch between its forward and its backward."""
    if setting.recompute == "full" and segment.in_blocks:
        return hidden_bytes(profile, setting)
    kept = segment.saved
    outside = setting.outside(segment)
    sharded, replicated, gathered = kept["sharded"], kept["replicated"], kept["gathered"]
    if setting.recompute != "attention":
        sharded += kept["core_sharded"]
        replicated += kept["core_replicated"]
    if setting.tp > 1:
        sharded += kept["under_tp"]
    if _is_selective(segment, setting):
        sharded -= segment.freed["sharded"]
        replicated -= segment.freed["replicated"]
        gathered -= segment.freed["gathered"] if _drops_gathered(setting) else 0.0
    gathered /= setting.cp if profile.keeps_gathered else outside
    copies = sum(setting.copied(work) for work in segment.ops)
    return copies + setting.samples * (sharded / setting.tp / setting.cp + replicated / outside + gathered)


def _is_selective(segment: Segment, setting: Setting) -> bool:
    return setting.recompute == "selective" and segment.in_blocks


def _drops_gathered(setting: Setting) -> bool:
    """With sp a collective gives what a column-parallel layer is given, and these are not repeated."""
    return not setting.sequence or setting.tp == 1


def high_water(profile: ModelProfile, segment: Segment, setting: Setting) -> float:
    """The most that the backward of a segment has, what the segment has saved included: as its ops run backward, from
    the last to the first, they free what they have saved, and hold gradients."""
    kept = highest = 0.0
    for work in segment.ops:
        kept += _kept_by_op(profile, segment, work, setting)
        again = 0.0  # what is computed again
        if setting.recompute == "attention":
            again = work.core_saved / setting.cp / (setting.tp if work.is_sharded else 1)
        elif _is_selective(segment, setting):
            again = _dropped_by_op(profile, segment, work, setting)
        highest = max(highest, kept + again * setting.samples + _held_by_op(segment, work, setting))
    return highest


def _kept_by_op(profile: ModelProfile, segment: Segment, work: OpCost, setting: Setting) -> float:
    saved = work.saved - (work.core_saved if setting.recompute == "attention" else 0.0)
    kept = saved / _divisor(profile, segment, work.saved_is, setting)
    if _is_selective(segment, setting):
        kept -= _dropped_by_op(profile, segment, work, setting)
        where = "sharded" if work.is_sharded else "replicated"
        kept += work.kept_instead / _divisor(profile, segment, where, setting)
    if setting.tp > 1:
        kept += work.tp_saved / setting.tp / setting.cp
    return setting.samples * kept + setting.copied(work)


def _dropped_by_op(profile: ModelProfile, segment: Segment, work: OpCost, setting: Setting) -> float:
    """By selective recomputation, of one sample."""
    if work.saved_is == "gathered" and not _drops_gathered(setting):
        return 0.0
    return work.dropped / _divisor(profile, segment, work.saved_is, setting)


def _divisor(profile: ModelProfile, segment: Segment, saved_is: str, setting: Setting) -> float:
    """What divides that which is kept: sharded, replicated or gathered."""
    if saved_is == "sharded":
        return setting.tp * setting.cp
    if saved_is == "gathered" and profile.keeps_gathered:
        return setting.cp
    return setting.outside(segment)


def _held_by_op(segment: Segment, work: OpCost, setting: Setting) -> float:
    """Gradients of activations and of the op's parameters, temporaries, and copies that are sent."""
    inside, outside = setting.tp * setting.cp, setting.outside(segment)
    temporary = work.tp_temporary if setting.tp > 1 and work.tp_saved else work.temporary
    held = (
        work.held_sharded / inside
        + work.held_replicated / outside
        + temporary / (inside if work.is_sharded else outside)
    )
    copies = 0.0
    if setting.tp > 1 and work.role in ("column", "gather", "row"):
        # With sp a gradient is full here, and in another order of its dims for the message; else where a region
        # begins its sum is made in a copy.
        shares_sequence = setting.sequence and segment.in_blocks
        copies = 2.0 if shares_sequence else 0.0 if work.role == "row" else 1.0
    gradients = setting.copied(work) and work.gradients if work.weight_copy else work.gradients
    is_sharded = work.role or (work.weight_copy and work.is_sharded)
    return setting.samples * (held + copies * work.crossing / setting.cp) + gradients / (
        setting.tp if is_sharded else 1
    )


def chunks_alive(schedule: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """The most stages' activations (a stage of a microbatch each) that a rank of a pipeline keeps: closed forms of what
    `plan.schedules.activations` counts."""
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


# ---- the model -------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """A point of the backward: what is saved by then for what is still to come, the most that the segment at hand has,
    and the bytes of the parameters' gradients that are there already. At the first of them the loss is at hand."""

    waiting: float
    at_hand: float
    done: int


class MemoryModel:
    """Judges plans for one profile. A plan takes microseconds: what segments need is remembered by their setting."""

    def __init__(self, profile: ModelProfile, library: float = 0.0) -> None:
        """`library`: bytes that the device's libraries keep for themselves."""
        self.profile = profile
        self.library = library
        self._saved: dict[tuple[int, Setting], tuple[float, float]] = {}
        self._states: dict[tuple[object, ...], ModelState] = {}
        self._moments: dict[Setting, list[Moment]] = {}

    def footprint(self, plan: Plan, stages: Stages) -> Footprint:
        """Of the rank that needs most."""
        ranks = stages.critical_ranks
        return max((self.of_rank(plan, stages, rank) for rank in ranks), key=lambda each: each.total)

    def of_rank(self, plan: Plan, stages: Stages, rank: int) -> Footprint:
        """Of a rank of the pipeline. Those of the other axes hold as much, but for uneven shards."""
        setting = Setting.of(plan, self.profile.batch)
        state = self._state(plan, stages, rank)
        parameters, _, held = state.bytes(plan, self.profile.optimizer)
        peaks = [self._stepping(plan, state, (parameters, held), rank)]
        if plan.pp > 1:
            alive, workspace = self._activations(plan, stages, rank, setting)
            growing, buffers = self._gradients(plan, state, 0, is_first=False)
            buffers += 2 * hidden_bytes(self.profile, setting) + self.library
            peaks.append(Footprint(parameters, growing, held, alive, workspace, buffers, rank))
        else:
            end = Moment(0.0, 0.0, state.gradients)
            for number, moment in enumerate([*self._backward(plan, setting), end]):
                growing, buffers = self._gradients(plan, state, moment.done, is_first=number == 0)
                buffers += self.library
                peaks.append(Footprint(parameters, growing, held, moment.waiting, moment.at_hand, buffers, rank))
        return max(peaks, key=lambda each: each.total)

    def _backward(self, plan: Plan, setting: Setting) -> list[Moment]:
        """Of the full model, from its end: what comes after the blocks, of each kind of blocks the last, the first
        block, and what comes before."""
        if setting not in self._moments:
            segments = self.profile.segments
            sizes = [self._segment_state(segment, plan).gradients for segment in segments]
            saved = [self._of_segment(segment, setting)[0] for segment in segments]
            numbers = {segment: number for number, segment in enumerate(segments)}
            seen = sorted({*numbers.values(), 0, min(1, len(segments) - 1)}, reverse=True)
            before = [0.0, *accumulate(saved)]
            after = [0, *accumulate(reversed(sizes))]
            self._moments[setting] = [
                Moment(before[n], self._of_segment(segments[n], setting)[1], after[len(segments) - 1 - n]) for n in seen
            ]
        return self._moments[setting]

    def _gradients(self, plan: Plan, state: ModelState, done: int, *, is_first: bool) -> tuple[float, float]:
        """Gradients of parameters when `done` bytes of them have left in messages, and the messages.

        Without ZeRO messages become the gradients, and their memory stays for those of the next step. ZeRO keeps one of
        them; from its second stage on two are under way while one is filled.
        """
        full, sent = float(state.gradients), float(done)
        replicas = plan.dp // plan.copies * plan.cp
        accumulates = plan.microbatches > 1 or plan.pp > 1
        left = full - sent if accumulates else 0.0  # of microbatches before the last
        if replicas == 1:
            return (full if accumulates else sent), 0.0
        bucket = self._bucket(plan, state)
        if plan.zero == 0:
            return full + left, 0.0
        if plan.zero == 1:
            return left + sent, bucket + sent / replicas
        arrived = state.own_seen * (1.0 if accumulates or not full else sent / full)
        if plan.zero == 2:
            return arrived, bucket if is_first else min(3 * bucket, max(full, bucket))
        unit, root = self._largest_unit(plan), self._root(plan)
        if is_first:
            return arrived, root.gathered + max(unit.gathered, root.gradients)
        # Two units are gathered, or being gathered; one has gradients; of those before it up to two are under way.
        under_way = min(2.0 * unit.sent, max(sent - root.gradients, 0.0))
        return arrived, root.gathered + root.gradients + 2 * unit.gathered + unit.gradients + under_way

    def _state(self, plan: Plan, stages: Stages, rank: int) -> ModelState:
        key = (plan.tp, plan.ep, plan.dp, plan.copies, plan.cp, stages.starts, stages.placement, rank)
        if key not in self._states:
            parts = [(self._segment_state(segment, plan), count) for segment, count in stages.segments_of(rank)]
            if stages.holds_both_ends(rank) and self.profile.tied:
                twice = [w for w in self.profile.after.weights if w.name in self.profile.tied]
                parts.append((state_of(twice, plan), -1))
            total = ModelState()
            for part, count in parts:
                total = total.plus(part, count)
            self._states[key] = total
        return self._states[key]

    def _segment_state(self, segment: Segment, plan: Plan) -> ModelState:
        key = (id(segment), plan.tp, plan.ep, plan.dp, plan.copies, plan.cp)
        if key not in self._states:
            self._states[key] = state_of(segment.weights, plan)
        return self._states[key]

    def _of_segment(self, segment: Segment, setting: Setting) -> tuple[float, float]:
        """What a segment keeps of a microbatch, and the most that it has in its backward."""
        key = (id(segment), setting)
        if key not in self._saved:
            self._saved[key] = (
                saved_by(self.profile, segment, setting), high_water(self.profile, segment, setting)
            )  # fmt: skip
        return self._saved[key]

    def _activations(self, plan: Plan, stages: Stages, rank: int, setting: Setting) -> tuple[float, float]:
        """Of a rank of a pipeline: what its microbatches keep, and what the backward of one has beside that."""
        saved = workspace = 0.0
        for segment, count in stages.segments_of(rank):
            kept, highest = self._of_segment(segment, setting)
            saved += kept * count
            workspace = max(workspace, highest - kept)
        alive = chunks_alive(plan.schedule, plan.pp, plan.microbatches, stages.chunks, rank)
        return saved * alive / stages.chunks, workspace

    def _bucket(self, plan: Plan, state: ModelState) -> float:
        if plan.dp * plan.cp == 1:
            return 0.0
        return min(max(BUCKET_BYTES, self._largest_weight / plan.tp), float(state.sent))

    def _stepping(self, plan: Plan, state: ModelState, kept: tuple[float, float], rank: int) -> Footprint:
        """While the optimizer steps: gradients as it sees them, its temporaries, and then what ZeRO gathers."""
        optimizer = self.profile.optimizer
        mine, seen = (state.sharded, state.own_seen) if plan.zero else (state.elements, state.gradients)
        gathered = float(state.gathered + state.own_parameters) if plan.zero in (1, 2) else 0.0
        message = self._bucket(plan, state) if plan.zero in (1, 2) else 0.0  # which the first that is gathered takes
        workspace = max(min(mine, optimizer.at_once) * optimizer.temporary + message, gathered)
        return Footprint(kept[0], float(seen), kept[1], 0.0, workspace, self.library, rank)

    def _largest_unit(self, plan: Plan) -> ModelState:
        units = (self._segment_state(block, plan) for block in self._kinds_of_blocks)
        return max(units, key=lambda unit: unit.elements, default=ModelState())

    @cached_property
    def _kinds_of_blocks(self) -> tuple[Segment, ...]:
        return tuple(set(self.profile.blocks))

    def _root(self, plan: Plan) -> ModelState:
        """What is outside the blocks is gathered as long as the model works."""
        key = ("root", plan.tp, plan.ep, plan.dp, plan.copies, plan.cp)
        if key not in self._states:
            both = {w.name: w for end in (self.profile.before, self.profile.after) for w in end.weights}
            self._states[key] = state_of(list(both.values()), plan)
        return self._states[key]

    @cached_property
    def _largest_weight(self) -> float:
        weights = [w for segment in set(self.profile.segments) for w in segment.weights if not w.is_frozen]
        return float(max((w.numel * w.sent for w in weights), default=0))
