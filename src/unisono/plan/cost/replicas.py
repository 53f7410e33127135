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
from unisono.plan.cost.memory import MemoryModel
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
        size = state.elements * state.itemsize
        m, share = plan.microbatches, (ranks.ranks - 1) / ranks.ranks
        travel, sent = self._messages(plan, stages, rank, ranks)
        if copies.ranks > 1:  # what a rank has summed within its group is summed over the groups
            often = m if plan.zero >= 2 else 1
            travel += often * copies.all_reduce(size / ranks.ranks)
            sent += often * 2 * size / ranks.ranks
        room = self.hardware.overlap * (
            mine.both * m if plan.zero == 3 else mine.backward * (m if plan.zero == 2 else 1)
        )
        after = ranks.all_gather(size) if plan.zero in (1, 2) else 0.0  # the optimizer's results, when all is over
        hides = plan.pp == 1 or plan.zero >= 2
        hidden = min(travel - after, room) * (self.hardware.overlap > 0) if hides else 0.0
        return travel + tied + self._copying(plan, size, ranks.ranks), hidden, sent * share

    def _messages(self, plan: Plan, stages: Stages, rank: int, ranks: Group) -> tuple[float, float]:
        """Seconds of them, and their bytes."""
        state, m = self.memory._state(plan, stages, rank), plan.microbatches
        size = state.elements * state.itemsize
        if plan.zero == 0:
            return ranks.all_reduce(size), 2 * size
        if plan.zero == 3:
            seconds = sum(
                count * (2 * ranks.all_gather(unit) + ranks.reduce_scatter(unit))
                for unit, count in self._units(plan, stages, rank)
            )
            return m * seconds, 3 * m * size
        scatters = m if plan.zero == 2 else 1
        return scatters * ranks.reduce_scatter(size) + ranks.all_gather(size), (scatters + 1) * size

    def _units(self, plan: Plan, stages: Stages, rank: int) -> list[tuple[float, int]]:
        """Bytes of each block of a rank, with how many are alike, and of what it has outside of them: of a pipeline's,
        each end by itself."""
        blocks: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        for segment, count in stages.segments_of(rank):
            state = self.memory._segment_state(segment, plan)
            (blocks if segment.in_blocks else ends).append((float(state.elements * state.itemsize), count))
        if plan.pp > 1:
            return [*blocks, *ends]
        state = self.memory._state(plan, stages, rank)
        root = state.elements * state.itemsize - sum(unit * count for unit, count in blocks)
        return [*blocks, (max(root, 0.0), 1)]

    def _copying(self, plan: Plan, size: float, ranks: int) -> float:
        """Seconds of copies into messages and out of them, and of adding what the microbatches' messages bring."""
        turns, m = self.hardware.turns(plan.world), plan.microbatches
        once = _READ_AND_WRITTEN * size
        if plan.zero == 0:
            return turns * once / self._bandwidth
        gathered = once / ranks + once  # this rank's shard into a message, all shards out of one
        added = 3 * size / ranks * (m - 1) if plan.zero > 1 else 0.0
        if plan.zero == 3:
            copied = m * (2 * gathered + once)
        else:
            copied = (m if plan.zero == 2 else 1) * once + gathered
        return turns * (copied + added) / self._bandwidth

    def _tied(self, plan: Plan) -> float:
        if plan.pp == 1 or not self.profile.tied:
            return 0.0
        size = sum(w.numel * w.itemsize for w in self.profile.before.weights if w.name in self.profile.tied)
        return replace(group(self.hardware, plan, "pp"), ranks=2).all_reduce(size / plan.tp)
