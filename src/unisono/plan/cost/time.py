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
from unisono.plan.cost.memory import MemoryModel, State
from unisono.plan.cost.op_time import OpTimer, StageCost
from unisono.plan.cost.replicas import Replicas
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import ModelProfile, Segment, Setting, hidden_bytes
from unisono.plan.profile.stages import Stages
from unisono.plan.schedules.schedule import SPLIT, schedule
from unisono.plan.schedules.timeline import Costs, timeline

# Of small ops, forward and backward: of a ring's visit, where parts of queries and keys are taken and outcomes merged;
# and of Ulysses, where heads are split, put into messages and out of them. Views count half.
_CALLS_A_VISIT = (33, 46)
_CALLS_OF_ULYSSES = (40, 42)
_PLAIN_CALL = 0.65  # of an op's overhead on CPUs, which is that of modules and autograd: a ring has neither inside
_ENGINE_CALL = 0.15  # ... and what autograd's engine does by itself, without Python, such as adding to a gradient
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
    other: float
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
        self._weights = float(sum(w.numel * w.itemsize for part in profile.segments for w in part.weights))
        self._bandwidth = self.op_timer.bandwidth
        self._replicas = Replicas(profile, hardware, self.memory)
        self._row_rate = hardware.rates.get("rows", hardware.rates.get("reshape", (self._bandwidth, 0.0)))[0]

    # ---- a segment -----------------------------------------------------------------------------------------------

    def cost(self, segment: Segment, plan: Plan) -> StageCost:
        setting = Setting.of(plan, self.profile.batch)
        key = (id(segment), setting, plan.shape, plan.context if plan.cp > 1 else "")
        if key not in self._costs:
            held = self._weights / (plan.tp * plan.pp)
            computing = self._computing(segment, setting, held)
            self._costs[key] = computing.plus(self._communication(segment, plan, setting))
        return self._costs[key]

    def _computing(self, segment: Segment, setting: Setting, held: float) -> StageCost:
        total = StageCost()
        is_again = setting.recompute == "full" and segment.in_blocks
        # A repetition ends where the last op that keeps anything would begin: what it keeps is there by then.
        last = max((place for place, work in enumerate(segment.ops) if work.saved), default=0)
        for place, work in enumerate(segment.ops):
            forward, inputs, weights, launch_forward, launch_backward = self.op_timer.op(work, segment, setting, held)
            again = is_again and place < last
            if again or (setting.recompute == "selective" and work.is_core):
                inputs += forward
                launch_backward += launch_forward
            total = total.plus(
                StageCost(forward, inputs, weights, launch_forward=launch_forward, launch_backward=launch_backward)
            )
        return total.plus(self._repeating(segment, setting))

    def _repeating(self, segment: Segment, setting: Setting) -> StageCost:
        """What computing again takes beside what is computed."""
        if setting.recompute == "none" or not segment.in_blocks:
            return StageCost()
        pieces = 1 if setting.recompute == "full" else sum(work.is_core for work in segment.ops)
        taken = pieces * self.hardware.recompute_overhead
        return StageCost(launch_backward=taken) if self.hardware.asynchronous else StageCost(inputs=taken)

    def _communication(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        cost = StageCost()
        if plan.tp > 1:
            cost = cost.plus(self._regions(segment, plan, setting))
        if plan.cp > 1 and segment.in_blocks:
            cost = cost.plus(self._context(segment, plan, setting))
        if plan.ep > 1 and segment.expert_traffic:
            ranks = group(self.hardware, plan, "ep")
            size = segment.expert_traffic * setting.rows / setting.cp
            once = 2 * ranks.all_to_all(size)
            cost = cost.plus(StageCost(once, once, 0.0, 2 * once, 4 * size))
        return cost

    def _regions(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        ranks = group(self.hardware, plan, "tp")
        each = setting.rows / setting.cp
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
        collectives = StageCost(forward, backward, 0.0, forward + backward, sent)
        return collectives.plus(moving).plus(self._calling(messages, again))

    def _calling(self, messages: int, again: bool = False) -> StageCost:
        """What the host does around messages of activations, forward and as many backward."""
        taken = self.hardware.message_overhead * messages
        if self.hardware.asynchronous:
            return StageCost(launch_forward=taken, launch_backward=taken * (1 + again))
        return StageCost(taken, taken * (1 + again))

    def _copying(self, segment: Segment, setting: Setting, each: float) -> tuple[float, float]:
        """Messages are copies. Those along the sequence have another order of dims, before and after."""
        if setting.sequence and segment.in_blocks:
            crossing = 2 * each * (sum(segment.enters) + sum(segment.leaves)) * (1 + 1 / setting.tp) / self._row_rate
            return crossing, crossing
        return 2 * each * sum(segment.leaves) / self._bandwidth, 2 * each * sum(segment.enters) / self._bandwidth

    def _context(self, segment: Segment, plan: Plan, setting: Setting) -> StageCost:
        """Ring: keys and values go round, and in the backward again, and behind them what other ranks add to their
        gradients, whose last hop brings it home; each visit is attended to by itself and merged. Ulysses: two
        all-to-alls each way, one of queries, keys and values and one of outcomes."""
        ranks = group(self.hardware, plan, "cp")
        attentions = sum(work.is_core for work in segment.ops)
        hidden = self.profile.hidden * setting.rows / setting.cp / setting.tp
        if plan.context == "ulysses":
            # Of a device that its host runs ahead of, four: what is done around the two is not counted there.
            sizes = (hidden,) * 4 if self.hardware.asynchronous else (3 * hidden, hidden)
            forward = attentions * sum(ranks.all_to_all(size) for size in sizes)
            sent = attentions * 8 * hidden
            backward, more = forward, StageCost()
        else:
            hop = attentions * ranks.exchange(2 * hidden)
            forward, backward = (ranks.ranks - 1) * hop, 2 * (ranks.ranks - 1) * hop
            sent = attentions * 3 * (ranks.ranks - 1) * 2 * hidden
            attending = [self.op_timer.ring(work, setting) for work in segment.ops]
            more = StageCost(sum(one.forward for one in attending), sum(one.inputs for one in attending))
        messages = StageCost(forward, backward, 0.0, forward + backward, sent)
        return messages.plus(more).plus(self._visits(plan, segment, hidden))

    def _visits(self, plan: Plan, segment: Segment, hidden: float) -> StageCost:
        """What is called besides attention itself; a ring's first visit takes the place of the plain attention."""
        attentions = sum(work.is_core for work in segment.ops)
        if plan.context == "ulysses":
            if self.hardware.asynchronous:
                return StageCost()
            # Queries, keys, values and outcomes: heads are copied together, and into a message and out of it.
            copied = 4 * hidden * (2 / self._row_rate + 4 / self._bandwidth)
            calls = (count * self.hardware.op_overhead for count in _CALLS_OF_ULYSSES)
            return StageCost(*(attentions * (each + copied) for each in calls))
        forward, backward = (attentions * plan.cp * calls * self.hardware.op_overhead for calls in _CALLS_A_VISIT)
        if self.hardware.asynchronous:
            return StageCost(launch_forward=forward, launch_backward=backward)
        # With dropout there are more of them: no kernel knows which weights to drop, so they are made op by op.
        drops = any(work.kind == "attention_dropout" for work in segment.ops)
        return StageCost(forward, backward) if drops else StageCost(forward * _PLAIN_CALL, backward * _PLAIN_CALL)

    # ---- a stage and a step --------------------------------------------------------------------------------------

    def stage_costs(self, plan: Plan, stages: Stages) -> list[StageCost]:
        """Of all stages; those that are alike share one, but for the messages that they begin."""
        kinds, numbers = stages.kinds
        made = []
        for counted in kinds:
            total = self._around(plan, counted)
            total = total.plus(StageCost(weights=self._adding(plan, counted))).plus(self._halving(plan, counted))
            for segment, count in counted:
                total = total.plus(self.cost(segment, plan).times(count))
            made.append(total.launched())
        if plan.pp == 1 or not self.hardware.post_overhead:
            return [made[number] for number in numbers]
        return [made[number].plus(self._posting(stages, stage)) for stage, number in enumerate(numbers)]

    def _around(self, plan: Plan, counted: tuple[tuple[Segment, int], ...]) -> StageCost:
        """What a microbatch takes of the host at a stage, beside ops and gradients that are sent off. A stage of a
        pipeline finds its way through the model's own forward; the last one has the loss besides, which is most of what
        a microbatch takes without a pipeline."""
        each = self.hardware.microbatch_overhead if plan.microbatches > 1 or plan.pp > 1 else 0.0
        sending = each / 2 + self._sending(plan)
        if self.hardware.asynchronous:
            return StageCost(launch_forward=each / 2, launch_backward=sending)
        forward = each / 2
        if plan.pp > 1 and self.hardware.stage_overhead:
            has_loss = any(segment is self.profile.after for segment, _ in counted)
            forward += self.hardware.stage_overhead + each * has_loss
        return StageCost(forward, sending)

    def _posting(self, stages: Stages, stage: int) -> StageCost:
        """What a rank takes to begin the sends and receives of a stage, one each way for each neighbour elsewhere."""
        beside = [place for place in (stage - 1, stage + 1) if 0 <= place < len(stages.placement)]
        ends = sum(stages.placement[place] != stages.placement[stage] for place in beside)
        return StageCost(ends * self.hardware.post_overhead, ends * self.hardware.post_overhead)

    def _sending(self, plan: Plan) -> float:
        """What a host takes to send a stage's gradients off, for each backward: often, or in the last one only."""
        if plan.dp * plan.cp == 1:
            return 0.0
        often = 1.0 if plan.zero >= 2 else 1 / plan.microbatches
        each = self.hardware.gradient_overhead[plan.zero] * self.profile.tensors
        return (each + self._replicas.buckets(plan) * self.hardware.message_overhead) / plan.pp * often

    def _adding(self, plan: Plan, counted: tuple[tuple[Segment, int], ...]) -> float:
        """What each microbatch takes, on average, to add its gradients to those of the ones before: an op a parameter,
        which reads two and writes one. From its second stage on ZeRO keeps shards only."""
        if plan.microbatches == 1 or plan.zero >= 2:
            return 0.0
        size = sum(segment.numel * count for segment, count in counted) * self.profile.gradient_itemsize / plan.tp
        ops = 0 if self.hardware.asynchronous else sum(len(segment.weights) * count for segment, count in counted)
        added = 3 * size / self._bandwidth + _ENGINE_CALL * ops * self.hardware.op_overhead
        return added * (1 - 1 / plan.microbatches)

    def _halving(self, plan: Plan, counted: tuple[tuple[Segment, int], ...]) -> StageCost:
        """Autograd is started anew for each layer's weights where the schedule tells the halves of a backward apart.
        The first stage waits for no one's inputs, and stays whole."""
        if plan.pp == 1 or plan.schedule not in SPLIT or any(segment is self.profile.before for segment, _ in counted):
            return StageCost()
        layers = sum(count * sum(len(w.shape) > 1 for w in segment.weights) for segment, count in counted)
        taken = self.hardware.split_overhead * layers
        return StageCost(launch_backward=taken) if self.hardware.asynchronous else StageCost(weights=taken)

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
        other = self.hardware.step_overhead
        return Duration(
            total=passing + travel - hidden + optimizer + other,
            compute=computing,
            tensor=m * mine.communication,
            bubble=max(passing - computing - m * mine.communication, 0.0),
            gradients=travel - hidden,
            optimizer=optimizer,
            other=other,
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
        """From a message's having been begun to its being there."""
        travels = group(self.hardware, plan, "pp").send(hidden_bytes(self.profile, self._setting(plan)))
        return max(travels - self.hardware.post_overhead, 0.0)

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

    def _optimizer(self, plan: Plan, state: State) -> float:
        """Clipping too: it reads gradients for their norm, and again to scale them."""
        elements = state.sharded if plan.zero else state.elements
        optimizer = self.profile.optimizer
        rate = self.hardware.optimizer_rate or self._bandwidth
        rate = (optimizer.is_looped and self.hardware.looped_optimizer_rate) or rate
        traffic = optimizer.traffic if plan.zero else optimizer.plain_traffic
        clipping = 3 * elements * state.itemsize / self._bandwidth if self.profile.clips else 0.0
        launching = self.hardware.parameter_overhead[plan.zero] * self.profile.tensors
        if plan.zero in (1, 2):  # results are gathered
            launching += self._replicas.buckets(plan) * self.hardware.message_overhead
        launching /= plan.pp
        updating = self.hardware.turns(plan.world) * (elements * traffic / rate + clipping)
        return max(updating, launching) if self.hardware.asynchronous else updating + launching
