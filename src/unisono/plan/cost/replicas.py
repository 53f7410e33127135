"""What gradients and parameters take on their way between replicas: messages, and the copies into them and out of them.

stage 0   gradients are copied into a message, summed in it, and stay there
stage 1   shards of gradients into a message; after the optimizer's step this rank's shard of the parameters into
          another, and all ranks' shards out of it
stage 2   the same, but gradients in every backward
stage 3   a block at a time, for its forward and for its backward: this rank's shard into a message, all shards out of
          it; after its backward, shards of gradients into a message. Memory is freed after each use, so what is
          copied goes to memory that is new
"""

from __future__ import annotations

from dataclasses import replace

from unisono.plan.cost.collective import Group, group
from unisono.plan.cost.memory import MemoryModel, ModelState
from unisono.plan.cost.op_time import StageCost
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import COPIES, REPLICAS, Plan
from unisono.plan.profile.model_profile import ModelProfile
from unisono.plan.profile.stages import Stages

_READ_AND_WRITTEN = 2.0  # bytes for one that is copied


class Replicas:
    """The dp x cp ranks that have the same parameters, under any plan for one profile on one machine."""

    def __init__(self, profile: ModelProfile, hardware: Hardware, memory: MemoryModel) -> None:
        self.profile = profile
        self.hardware = hardware
        self.memory = memory
        self._bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency

    def travel(self, plan: Plan, stages: Stages, rank: int, mine: StageCost) -> tuple[float, float, float]:
        """Of a rank of the pipeline: seconds that gradients and parameters travel, what of it the backward hides, and
        bytes sent."""
        ranks = group(self.hardware, plan, *(axis for axis in REPLICAS if axis != COPIES))
        copies = group(self.hardware, plan, COPIES)
        tied = self._tied(plan)
        if ranks.ranks == 1:
            return tied, 0.0, 0.0
        state = self.memory._state(plan, stages, rank)
        m, share = plan.microbatches, (ranks.ranks - 1) / ranks.ranks
        travel, sent = self._messages(plan, stages, rank, ranks)
        if copies.ranks > 1:  # what a rank has summed within its group is summed over the groups
            often = m if plan.zero >= 2 else 1
            travel += often * copies.all_reduce(state.sent / ranks.ranks)
            sent += often * 2 * state.sent / ranks.ranks
        room = self.hardware.overlap * (
            mine.both * m if plan.zero == 3 else mine.backward * (m if plan.zero == 2 else 1)
        )
        after = (
            ranks.all_gather(state.gathered) if plan.zero in (1, 2) else 0.0
        )  # the optimizer's results, when all is over
        hides = plan.pp == 1 or plan.zero >= 2
        hidden = min(travel - after, room) * (self.hardware.overlap > 0) if hides else 0.0
        return travel + tied + self._copying(plan, state, ranks.ranks), hidden, sent * share

    def _messages(self, plan: Plan, stages: Stages, rank: int, ranks: Group) -> tuple[float, float]:
        """Seconds of them, and their bytes."""
        state, m = self.memory._state(plan, stages, rank), plan.microbatches
        if plan.zero == 0:
            return ranks.all_reduce(state.sent), 2 * state.sent
        if plan.zero == 3:
            seconds = sum(
                count * (2 * ranks.all_gather(gathered) + ranks.reduce_scatter(gradients))
                for gathered, gradients, count in self._units(plan, stages, rank)
            )
            return m * seconds, m * (2 * state.gathered + state.sent)
        scatters = m if plan.zero == 2 else 1
        travel = scatters * ranks.reduce_scatter(state.sent) + ranks.all_gather(state.gathered)
        return travel, scatters * state.sent + state.gathered

    def _units(self, plan: Plan, stages: Stages, rank: int) -> list[tuple[float, float, int]]:
        """Bytes of parameters and of gradients of each block of a rank, with how many are alike, and of what it has
        outside of them: of a pipeline's, each end by itself."""
        blocks: list[tuple[float, float, int]] = []
        ends: list[tuple[float, float, int]] = []
        for segment, count in stages.segments_of(rank):
            state = self.memory._segment_state(segment, plan)
            (blocks if segment.in_blocks else ends).append((float(state.gathered), float(state.sent), count))
        if plan.pp > 1:
            return [*blocks, *ends]
        state = self.memory._state(plan, stages, rank)
        gathered = state.gathered - sum(unit * count for unit, _, count in blocks)
        gradients = state.sent - sum(unit * count for _, unit, count in blocks)
        return [*blocks, (max(gathered, 0.0), max(gradients, 0.0), 1)]

    def _copying(self, plan: Plan, state: ModelState, ranks: int) -> float:
        """Seconds of copies into messages and out of them, and of adding what the microbatches' messages bring."""
        turns, m = self.hardware.turns(plan.world), plan.microbatches
        once = _READ_AND_WRITTEN * state.sent
        if plan.zero == 0:
            return turns * once / self._bandwidth
        # This rank's shard into a message, all shards out of one.
        gathered = _READ_AND_WRITTEN * state.gathered * (1 / ranks + 1)
        added = 3 * state.gradients / ranks * (m - 1) if plan.zero > 1 else 0.0
        if plan.zero == 3:
            copied = m * (2 * gathered + once)
        else:
            copied = (m if plan.zero == 2 else 1) * once + gathered
        return turns * (copied + added) / self._bandwidth

    def _tied(self, plan: Plan) -> float:
        if plan.pp == 1 or not self.profile.tied:
            return 0.0
        size = sum(w.numel * w.sent for w in self.profile.before.weights if w.name in self.profile.tied)
        return replace(group(self.hardware, plan, "pp"), ranks=2).all_reduce(size / plan.tp)
