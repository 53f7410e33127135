"""The search for the fastest plan that fits.

    minimise    seconds(plan)                       over dp x tp x pp x cp x ep, ZeRO, sp, recomputation,
    subject to  bytes(plan) <= usable memory        microbatches, schedule, chunks and stage boundaries
                dp tp pp cp = devices               (TimeModel, MemoryModel, `Search.shapes`)
                the model and the job allow it      (`allows`, given by the caller)

The full space is searched, but for what cannot win: within one shape, recomputation only adds time, so the least of it
that fits is taken; ZeRO 2 and 3 add messages to ZeRO 1, so they are tried where 1 does not fit. A plan costs some
microseconds, because segments are weighed once for each setting and schedules have closed forms. The best are then
played action by action, and ranked by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf

from unisono.errors import UsageError
from unisono.plan.cost.memory import Footprint, MemoryModel
from unisono.plan.cost.time import Duration, TimeModel
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import RECOMPUTE, Plan
from unisono.plan.profile.model_profile import ModelProfile, Segment
from unisono.plan.profile.stages import Stages
from unisono.plan.schedules.schedule import SPLIT
from unisono.plan.search.neighbours import neighbours
from unisono.plan.search.partition import Partitioner, chunks_of

Allows = Callable[[Plan], str | None]  # why the job cannot run under a plan; None where it can
FINALISTS = 24
WITHIN = 1.1  # times the fastest plan so far: what takes longer than that is not looked at closely
TIE = 0.005  # share of a step by which plans differ that are called as fast
_TELLING = 0.002  # share of a step that boundaries must save to be written down
_FEWEST_TOKENS = 128  # of a sequence on a rank, where more than two share it


@dataclass(frozen=True)
class Candidate:
    """A plan with what it needs and takes."""

    plan: Plan
    footprint: Footprint
    fits: bool
    duration: Duration

    @property
    def seconds(self) -> float:
        return self.duration.total


@dataclass
class Result:
    """The best plans, the best first, and how many were looked at."""

    candidates: list[Candidate]
    considered: int
    fitting: int

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


@dataclass
class Search:
    """Judges plans of one job on `world` devices of a machine."""

    profile: ModelProfile
    world: int
    hardware: Hardware
    allows: Allows = lambda plan: None
    memory: MemoryModel = field(init=False)
    time: TimeModel = field(init=False)
    partitioner: Partitioner = field(init=False)
    _played: dict[Plan, Candidate] = field(default_factory=dict)
    _refusals: dict[Plan, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hardware = self.hardware.with_devices(self.world)
        self.memory = MemoryModel(self.profile, self.hardware.library_memory)
        self.time = TimeModel(self.profile, self.hardware, self.memory)
        self.partitioner = Partitioner(self.profile, self.time)

    def run(self, top: int = 10, within: float = WITHIN) -> Result:
        """The `top` fastest plans that fit; UsageError where none does, with what would. within: times the fastest,
        beyond which plans may be left out."""
        found: list[tuple[float, Plan]] = []
        considered = 0
        smallest: tuple[float, Plan] | None = None
        fastest = inf
        for scheduled in self.scheduled():
            if self._at_least(scheduled) > within * fastest:
                considered += 1
                continue
            for plan, needs in self._least_saving(scheduled):
                considered += 1
                if needs <= self.hardware.usable_memory:
                    seconds = self.time.estimate(plan, self.partitioner.evened(plan)).total
                    fastest = min(fastest, seconds)
                    found.append((seconds, plan))
                elif smallest is None or needs < smallest[0]:
                    smallest = (needs, plan)
        if not found:
            raise UsageError(self._nothing_fits(considered, smallest))
        found.sort(key=lambda each: each[0])
        finalists = [self.settled(plan) for _, plan in found[: max(FINALISTS, 2 * top)]]
        finalists.sort(key=lambda each: (each.seconds, each.footprint.total))
        finalists = [*self._climbed(finalists[0]), *finalists]
        return Result(finalists[:top], considered, len(found))

    def _climbed(self, best: Candidate) -> list[Candidate]:
        """Plans that a change or a few make faster than the best of those that were walked, the fastest first. None
        has more of ZeRO for it: by how little that gains where messages hide, figures cannot tell."""
        found: list[Candidate] = []
        while True:
            allowed = [self.allowed(plans) for _, plans in neighbours(best.plan, self.world, self.profile)]
            made = [self.settled(*plans) for plans in allowed if plans and plans[0].zero <= max(best.plan.zero, 1)]
            faster = [each for each in made if each.fits and each.seconds < best.seconds * (1 - TIE)]
            if not faster:
                return found
            best = min(faster, key=lambda each: each.seconds)
            found.insert(0, best)

    # ---- one plan ------------------------------------------------------------------------------------------------

    def judged(self, plan: Plan, *, played: bool = False) -> Candidate:
        """What a plan needs and takes, whether it fits or not."""
        if played and plan in self._played:
            return self._played[plan]
        stages = self.stages(plan)
        footprint = self.memory.footprint(plan, stages)
        duration = (self.time.simulated if played else self.time.estimate)(plan, stages)
        made = Candidate(plan, footprint, footprint.total <= self.hardware.usable_memory, duration)
        if played:
            self._played[plan] = made
        return made

    def settled(self, *plans: Plan) -> Candidate:
        """The fastest of plans without boundaries that fits, else the smallest: as it is, or with boundaries for stages
        that take equally long, if these pay."""
        quick = [self._well_split(plan) for plan in plans]
        fitting = min((each for each in quick if each.fits), key=lambda each: each.seconds, default=None)
        best = fitting or min(quick, key=lambda each: each.footprint.total)
        return self.judged(best.plan, played=True)

    def _well_split(self, plan: Plan) -> Candidate:
        plain = self.judged(plan)
        starts = self.partitioner.evened(plan).starts
        if plan.pp == 1 or starts == self.stages(plan).starts:
            return plain
        evened = self.judged(plan.but(boundaries=starts))
        pays = evened.seconds < plain.seconds * (1 - _TELLING) if plain.fits == evened.fits else evened.fits
        return evened if pays else plain

    def _at_least(self, plan: Plan) -> float:
        """Seconds that no way to save memory can get below: all ranks compute all the time, but for the bubble."""
        ends = self.time.cost(self.profile.before, plan).both + self.time.cost(self.profile.after, plan).both
        blocks = sum(self.time.cost(block, plan).both * count for block, count in self._kinds)
        each = (ends + blocks) / plan.pp
        waits = 0.0 if plan.schedule in SPLIT else (plan.pp - 1) / chunks_of(plan)
        return (plan.microbatches + waits) * each

    @cached_property
    def _kinds(self) -> list[tuple[Segment, int]]:
        return list(Counter(self.profile.blocks).items())

    def _needs(self, plan: Plan) -> float:
        return self.memory.footprint(plan, self.partitioner.evened(plan)).total

    def stages(self, plan: Plan) -> Stages:
        """Where the pipeline is split, as the plan will run."""
        return self.partitioner.as_run(plan)

    def allowed(self, plans: list[Plan]) -> list[Plan]:
        return [plan for plan in plans if self.refusal(plan) is None]

    def refusal(self, plan: Plan) -> str | None:
        """Why the job cannot run under the plan, whatever memory there is."""
        blocks = len(self.profile.blocks)
        if plan.pp * chunks_of(plan) > blocks and plan.pp > 1:
            has = f"{blocks} blocks" if blocks else "no blocks to split between"
            return f"it makes {plan.pp * chunks_of(plan)} stages, but the model has {has}"
        if plan.pp > 1 and self.profile.has_bare_blocks and not self.stages(plan).all_hold_parameters:
            return "a rank of the pipeline would hold no parameters"
        if plan.dp * plan.microbatches > self.profile.batch:
            parts = " x ".join(f"{name}={getattr(plan, name)}" for name in ("dp", "microbatches"))
            return f"{parts} splits the batch in {plan.dp * plan.microbatches}, but it has {self.profile.batch} samples"
        if (plan.sequence or plan.cp > 1) and self.profile.length == 1:
            return "between blocks there are no sequences to share"
        if plan.ep > 1 and not self.profile.has_experts:
            return "the model has no experts"
        if plan.recompute != "none" and not self.profile.recomputes:
            return "no list of repeated blocks to recompute"
        # What the job allows depends on less than the whole plan: it is asked once for each of these.
        kept = {"zero": min(plan.zero, 1), "dp": plan.dp if plan.ep > 1 else 1}
        asked = plan.but(**kept, shard=0, boundaries=(), recompute="none")
        if asked not in self._refusals:
            self._refusals[asked] = self.allows(asked)
        return self._refusals[asked]

    # ---- the space -----------------------------------------------------------------------------------------------

    def scheduled(self) -> Iterator[Plan]:
        """Every plan, but for how it saves memory."""
        for shape in self.shapes():
            for plan in self._scheduled(shape):
                if self.refusal(plan) is None:
                    yield plan

    def shapes(self) -> Iterator[Plan]:
        """Every way to multiply the axes to the number of devices."""
        for tp in _divisors(self.world):
            if tp > 1 and self.refusal(Plan(tp=tp)) is not None:
                continue
            for pp in _divisors(self.world // tp):
                if pp > max(len(self.profile.blocks), 1):
                    break
                for cp in _divisors(self.world // tp // pp):
                    dp = self.world // tp // pp // cp
                    if dp > self.profile.batch or not self._can_share_sequences(cp):
                        continue
                    yield from self._with_experts(Plan(dp=dp, tp=tp, pp=pp, cp=cp))

    def _can_share_sequences(self, cp: int) -> bool:
        return cp == 1 or (cp == 2 and self.profile.length >= 4) or self.profile.length // cp >= _FEWEST_TOKENS

    def _with_experts(self, plan: Plan) -> Iterator[Plan]:
        yield plan
        if self.profile.has_experts:
            for ep in _divisors(plan.dp)[1:]:
                if ep <= self.profile.expert_count and self.profile.expert_count % ep == 0:
                    yield plan.but(ep=ep)

    def _scheduled(self, plan: Plan) -> Iterator[Plan]:
        """With every number of microbatches, sp, kind of cp, and order of the pipeline that could pay."""
        for m in self._microbatches(plan):
            for variant in self._variants(plan.but(microbatches=m)):
                yield variant
                if plan.pp > 1 and m > 1:
                    yield from self._orders(variant)

    def _variants(self, plan: Plan) -> list[Plan]:
        """With the quicker kind of cp, and with sp, which needs less memory; without only where that is quicker."""
        if plan.cp > 1:
            other = plan.but(context="ulysses")
            if self.refusal(other) is None and self._at_least(other) < self._at_least(plan):
                plan = other
        if plan.tp == 1 or self.profile.length < plan.tp:
            return [plan]
        shared = plan.but(sequence=True)
        if self.refusal(shared) is not None:
            return [plan]
        return [shared] if self._at_least(shared) <= self._at_least(plan) else [plan, shared]

    def _microbatches(self, plan: Plan) -> list[int]:
        """Numbers whose microbatches have a whole number of samples; few where the pipeline would only wait."""
        samples = ceil(self.profile.batch / plan.dp)
        counts = [m for m in _divisors(samples) if samples // m <= 64 or m == 1]
        if plan.pp == 1:
            return counts
        return [m for m in counts if m >= plan.pp / 2 or m == counts[-1]]

    def _orders(self, plan: Plan) -> Iterator[Plan]:
        blocks = len(self.profile.blocks)
        yield plan.but(schedule="zb1p")
        if 2 * plan.pp <= blocks:
            yield plan.but(schedule="zbv", chunks=2)
        for chunks in (2, 3, 4, 6, 8, 12):
            if chunks * plan.pp <= blocks and plan.microbatches >= plan.pp:
                yield plan.but(schedule="interleaved", chunks=chunks)

    def _least_saving(self, plan: Plan) -> Iterator[tuple[Plan, float]]:
        """The plan with each stage of ZeRO and the least recomputation that fits, and the bytes that each needs."""
        zeros = [0, 1, 2, 3] if plan.dp * plan.cp > 1 and self.refusal(plan.but(zero=1)) is None else [0]
        again = (
            [each for each in RECOMPUTE if each != "attention" or self.profile.has_scores]
            if self.profile.blocks and self.profile.recomputes
            else ["none"]
        )
        if plan.schedule in SPLIT:  # a backward that runs modules again is not done in halves, nor that of ZeRO 3
            zeros, again = zeros[:3], [each for each in again if each in ("none", "selective")]
        smallest = plan.but(zero=zeros[-1], recompute=again[-1])
        needs = self._needs(smallest)
        if needs > self.hardware.usable_memory:
            yield smallest, needs
            return
        for zero in zeros:
            for recompute in again:
                tried = plan.but(zero=zero, recompute=recompute)
                needs = self._needs(tried)
                yield tried, needs
                if needs <= self.hardware.usable_memory:
                    if zero >= 1 and recompute == "none":
                        return
                    break

    def _nothing_fits(self, considered: int, smallest: tuple[float, Plan] | None) -> str:
        if smallest is None:
            return (
                f"no plan for {self.world} devices can run {self.profile.name} with a batch of "
                f"{self.profile.batch}; use another number of devices, or a larger batch"
            )
        return (
            f"none of {considered} plans for {self.world} devices fits {self.profile.name}: the smallest, "
            f"{smallest[1]}, {self.hardware.short_of(smallest[0], 1)}; use more devices or "
            f"{'ones with more memory' if self.hardware.limit is None else 'a higher limit'}"
        )


def choose(profile: ModelProfile, world: int, hardware: Hardware, allows: Allows = lambda plan: None) -> Plan:
    """The fastest plan that fits."""
    return Search(profile, world, hardware, allows).run(top=1).best.plan


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
