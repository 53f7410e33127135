"""The time of a step under a plan.

An op takes the longer of computing and moving its bytes (an OpTimer, at measured efficiencies), and an overhead. Its
backward computes twice as much. Tensor-parallel regions add collectives of activations, which nothing hides; cp and ep
add theirs. So each stage has a forward time f and a backward time b for a microbatch, and

    pp = 1     m (f + b)  +  what of the gradients' travel the last backward does not hide  +  the optimizer
    pp > 1     the schedule, played with those times (`timeline`)  +  the gradients' travel  +  the optimizer

Where more ranks than cores share a node, all of their computing together takes at least its sum over the cores.

`estimate` uses closed forms for the schedule, in microseconds a plan; `simulated` plays it.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plan.cost.collective import group
from unisono.plan.cost.memory import MemoryModel, ModelState
from unisono.plan.cost.op_time import OpTimer, StageCost
from unisono.plan.cost.replicas import Replicas
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import ModelProfile, Segment, Setting, hidden_bytes
from unisono.plan.profile.stages import Stages
from unisono.plan.schedules.schedule import schedule
from unisono.plan.schedules.timeline import Costs, timeline

# Small ops around attention, forward and backward: of a visit of a ring, where queries and keys are sliced and results
# merged.
_OPS_A_VISIT = (33, 46)
_LONG = 4  # microbatches a stage after which a pipeline only repeats itself


@dataclass(frozen=True)
class Duration:
    """Seconds of a step, and what they are made of on the slowest rank."""

    total: float
    compute: float  # ops, recomputation included
    tensor: float  # collectives of tp, cp and ep
    bubble: float  # waiting in the pipeline
    gradients: float  # travel of gradients and parameters that nothing hides
    optimizer: float
    sent: float  # bytes that a rank sends in a step

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total if self.total else 0.0


class TimeModel:
    """Judges plans for one profile on one machine; what segments take is remembered by their setting."""

    def __init__(self, profile: ModelProfile, hardware: Hardware, memory: MemoryModel | None = None) -> None:
        self.profile = profile
        self.hardware = hardware
        self.memory = memory or MemoryModel(profile)
        self._costs: dict[tuple[object, ...], StageCost] = {}
        self.op_timer = OpTimer(hardware, profile.dtype)
        self._bandwidth = self.op_timer.bandwidth
        self._replicas = Replicas(profile, hardware, self.memory)

    # ---- a segment -----------------------------------------------------------------------------------------------

    def cost(self, segment: Segment, plan: Plan) -> StageCost:
        setting = Setting.of(plan, self.profile.batch)
        key = (id(segment), setting, plan.shape, plan.context if plan.cp > 1 else "")
        if key not in self._costs:
            computing = self._computing(segment, setting)
            self._costs[key] = computing.plus(self._communication(segment, plan, setting))
        return self._costs[key]

    def _computing(self, segment: Segment, setting: Setting) -> StageCost:
        total = StageCost()
        is_again = setting.recompute == "full" and segment.in_blocks
        # A repetition ends where the last op that keeps anything would begin: what it keeps is there by then.
        last = max((number for number, work in enumerate(segment.ops) if work.saved), default=0)
        for number, work in enumerate(segment.ops):
            forward, inputs, weights, launch_forward, launch_backward = self.op_timer.op(work, segment, setting)
            again = is_again and number < last
            again = again or (setting.recompute == "attention" and work.is_core)
            if again or (setting.recompute == "selective" and work.is_repeated):
                inputs += forward
                launch_backward += launch_forward
            total = total.plus(
                StageCost(forward, inputs, weights, launch_forward=launch_forward, launch_backward=launch_backward)
            )
        return total

    def _communication(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        cost = StageCost()
        if plan.tp > 1:
            cost = cost.plus(self._regions(segment, plan, setting))
        if plan.cp > 1 and segment.in_blocks:
            cost = cost.plus(self._context(segment, plan, setting))
        if plan.ep > 1 and segment.expert_traffic:
            ranks = group(self.hardware, plan, "ep")
            size = segment.expert_traffic * setting.samples / setting.cp
            once = 2 * ranks.all_to_all(size)
            cost = cost.plus(StageCost(once, once, 0.0, 2 * once, 4 * size))
        return cost

    def _regions(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        ranks = group(self.hardware, plan, "tp")
        each = setting.samples / setting.cp
        if plan.sequence and segment.in_blocks:
            forward = sum(ranks.all_gather(size * each) for size in segment.enters)
            forward += sum(ranks.reduce_scatter(size * each) for size in segment.leaves)
            backward = sum(ranks.reduce_scatter(size * each) for size in segment.enters)
            backward += sum(ranks.all_gather(size * each) for size in segment.leaves)
        else:
            forward = sum(ranks.all_reduce(size * each) for size in segment.leaves)
            backward = sum(ranks.all_reduce(size * each) for size in segment.enters)
        messages = len(segment.enters) + len(segment.leaves)
        again = setting.recompute == "full" and segment.in_blocks
        if again:
            backward += forward * max(messages - 1, 0) / max(messages, 1)  # the last region's end is not repeated
        share = (ranks.ranks - 1) / ranks.ranks
        sent = 2 * share * each * (sum(segment.enters) + sum(segment.leaves))
        copied = self._copying(segment, setting, each)
        moving = StageCost(copied[0], copied[1] + again * copied[0])
        return StageCost(forward, backward, 0.0, forward + backward, sent).plus(moving)

    def _copying(self, segment: Segment, setting: Setting, each: float) -> tuple[float, float]:
        """Messages are copies. Those along the sequence have another order of dims, before and after."""
        if setting.sequence and segment.in_blocks:
            crossing = 2 * each * (sum(segment.enters) + sum(segment.leaves)) * (1 + 1 / setting.tp) / self._bandwidth
            return crossing, crossing
        return 2 * each * sum(segment.leaves) / self._bandwidth, 2 * each * sum(segment.enters) / self._bandwidth

    def _context(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        """Ring: keys and values go round, and in the backward again, and behind them what other ranks add to their
        gradients, whose last hop brings it home; each visit is attended to by itself and merged. Ulysses: two
        all-to-alls each way, one of queries, keys and values and one of outcomes."""
        ranks = group(self.hardware, plan, "cp")
        attentions = sum(work.is_core for work in segment.ops)
        hidden = self.profile.hidden * setting.samples / setting.cp / setting.tp
        if plan.context == "ulysses":
            forward = attentions * (ranks.all_to_all(3 * hidden) + ranks.all_to_all(hidden))
            return StageCost(forward, forward, 0.0, 2 * forward, attentions * 8 * hidden)
        hop = attentions * ranks.exchange(2 * hidden)
        forward, backward = (ranks.ranks - 1) * hop, 2 * (ranks.ranks - 1) * hop
        sent = attentions * 3 * (ranks.ranks - 1) * 2 * hidden
        calls = [attentions * plan.cp * ops * self.hardware.op_overhead for ops in _OPS_A_VISIT]
        around = StageCost(launch_forward=calls[0], launch_backward=calls[1])
        if not self.hardware.asynchronous:
            around = StageCost(calls[0], calls[1])
        return StageCost(forward, backward, 0.0, forward + backward, sent).plus(around)

    # ---- a stage and a step --------------------------------------------------------------------------------------

    def stage_costs(self, plan: Plan, stages: Stages) -> list[StageCost]:
        """Of all stages; those that are alike share one, but for the messages that they begin."""
        kinds, numbers = stages.kinds
        made = []
        for counted in kinds:
            total = StageCost(weights=self._adding(plan, counted))
            for segment, count in counted:
                total = total.plus(self.cost(segment, plan).times(count))
            made.append(total.launched())
        return [made[number] for number in numbers]

    def _adding(self, plan: Plan, counted: tuple[tuple[Segment, int], ...]) -> float:
        """What each microbatch takes, on average, to add its gradients to those of the ones before, which reads two
        and writes one. From its second stage on ZeRO keeps shards only."""
        if plan.microbatches == 1 or plan.zero >= 2:
            return 0.0
        size = sum(segment.gradients * count for segment, count in counted) / plan.tp
        return 3 * size / self._bandwidth * (1 - 1 / plan.microbatches)

    def estimate(self, plan: Plan, stages: Stages) -> Duration:
        """By closed forms."""
        costs = self.stage_costs(plan, stages)
        return self._duration(plan, stages, costs, self._closed(plan, stages, costs))

    def simulated(self, plan: Plan, stages: Stages) -> Duration:
        """By playing the schedule."""
        costs = self.stage_costs(plan, stages)
        if plan.pp == 1:
            return self._duration(plan, stages, costs, self._closed(plan, stages, costs))
        return self._duration(plan, stages, costs, self._played(plan, stages, costs))

    def _duration(self, plan: Plan, stages: Stages, costs: list[StageCost], passing: float) -> Duration:
        per_rank = [StageCost() for _ in range(stages.ranks)]
        for stage, rank in enumerate(stages.placement):
            per_rank[rank] = per_rank[rank].plus(costs[stage])
        slowest = max(range(stages.ranks), key=lambda rank: per_rank[rank].both)
        mine, m = per_rank[slowest], plan.microbatches
        computing, passing = self._in_turns(plan, per_rank, mine, passing)
        state = self.memory._state(plan, stages, slowest)
        travel, hidden, sent = self._replicas.travel(plan, stages, slowest, mine)
        optimizer = self._optimizer(plan, state)
        crossing = 0.0 if plan.pp == 1 else 2 * stages.chunks * m * hidden_bytes(self.profile, self._setting(plan))
        return Duration(
            total=passing + travel - hidden + optimizer,
            compute=computing,
            tensor=m * mine.communication,
            bubble=max(passing - computing - m * mine.communication, 0.0),
            gradients=travel - hidden,
            optimizer=optimizer,
            sent=m * mine.sent + sent + crossing,
        )

    def _in_turns(self, plan: Plan, per_rank: list[StageCost], mine: StageCost, passing: float) -> tuple[float, float]:
        """Seconds that the slowest rank computes, and that all microbatches take to pass: longer than that where ranks
        share cores, each of which is idle only where a pipeline leaves it nothing to do."""
        m, turns = plan.microbatches, self.hardware.turns(plan.world)
        computing = m * (mine.both - mine.communication)
        if turns > 1:
            shared = turns * m * sum(cost.both - cost.communication for cost in per_rank) / len(per_rank)
            computing, passing = max(computing, shared), max(passing, shared + m * mine.communication)
        return computing, passing

    def _setting(self, plan: Plan) -> Setting:
        return Setting.of(plan, self.profile.batch)

    def _transfer(self, plan: Plan) -> float:
        """Of a message between stages."""
        return group(self.hardware, plan, "pp").send(hidden_bytes(self.profile, self._setting(plan)))

    def _closed(self, plan: Plan, stages: Stages, costs: list[StageCost]) -> float:
        m, p = plan.microbatches, plan.pp
        if p == 1:
            return m * sum(cost.both for cost in costs)
        through = sum(cost.both for cost in costs)
        per_rank = [0.0] * p
        for stage, rank in enumerate(stages.placement):
            per_rank[rank] += costs[stage].both
        slowest = max(per_rank)
        travel = 2 * (len(costs) - 1) * self._transfer(plan)
        match plan.schedule:
            case "interleaved":
                return m * slowest + (through - slowest) / stages.chunks + travel / stages.chunks
            case "zb1p":
                gap = (through - slowest) / p * (1 - 2 * sum(q.weights for q in costs) / through)
                return m * slowest + max(gap, 0.0) * p + travel
            case "zbv":
                return m * slowest + travel / 2
            case _:
                return (m - 1) * slowest + through + travel

    def _played(self, plan: Plan, stages: Stages, costs: list[StageCost]) -> float:
        few = min(plan.microbatches, _LONG * plan.pp)
        order = schedule(plan.schedule, plan.pp, few, stages.chunks if stages.chunks > 1 else None)
        first = costs[0].backward  # nobody waits for what its inputs get: all of it is done at once
        actions = Costs(
            forward=[cost.forward for cost in costs],
            backward=[cost.backward for cost in costs],
            inputs=[first, *(cost.inputs for cost in costs[1:])],
            weights=[0.0, *(cost.weights for cost in costs[1:])],
            transfer=self._transfer(plan),
        )
        played = timeline(order, actions)
        slowest = max(played.busy(rank) for rank in range(plan.pp)) / few
        return played.makespan + (plan.microbatches - few) * slowest

    def _optimizer(self, plan: Plan, state: ModelState) -> float:
        """Clipping too: it reads gradients for their norm, and again to scale them."""
        elements = state.sharded if plan.zero else state.elements
        optimizer = self.profile.optimizer
        traffic = optimizer.traffic if plan.zero else optimizer.plain_traffic
        clipping = 3.0 * (state.own_seen if plan.zero else state.gradients) if self.profile.clips else 0.0
        return self.hardware.turns(plan.world) * (elements * traffic + clipping) / self._bandwidth
