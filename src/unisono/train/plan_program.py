"""The program of a rank under a plan: what `explain --plan` shows.

One part for each of the rank's stages: the ops of the traced model as tp cuts them (rule_marks, sequence_marks), dp
(data_cuts), ep (experts_shown) and cp (context_cuts), and beside them what no op cuts (experts_said, context_said,
norms_said, lookups_shown, zero_shown, recompute_shown, closing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment
from unisono.graph.beside import Beside
from unisono.graph.finding import find, follow
from unisono.graph.lowering import Lowered, Move, lower
from unisono.graph.stage import ANYWHERE, Staging, block_of_ops, blocks_using
from unisono.graph.trace import Trace, trace
from unisono.mesh.mesh import Mesh
from unisono.parallel.apply import order_of, refuse_what_cannot_be_right
from unisono.parallel.context import are_of_sequences
from unisono.parallel.expert import require_experts
from unisono.parallel.pipeline.rehearsal import rehearse
from unisono.parallel.pipeline.split import require_stages
from unisono.parallel.share import rows_of, shares
from unisono.parallel.task import Task
from unisono.parallel.tokenwise import require_tokenwise
from unisono.plan.balance import balanced, checked
from unisono.plan.plan import AXES, REPLICAS, Plan
from unisono.simulate.sketch import to_try_out, without_memory
from unisono.train.closing import closing, replica_sums
from unisono.train.context_cuts import AXIS as CP
from unisono.train.context_cuts import ContextCuts, blocks_of
from unisono.train.context_said import show_context
from unisono.train.data_cuts import DataCuts
from unisono.train.experts_said import show_experts
from unisono.train.experts_shown import AXIS as EP
from unisono.train.experts_shown import ExpertCuts, mixtures_as_ops, require_shared_tokens, require_spreadable
from unisono.train.held_model import require_used
from unisono.train.key_heads import key_heads
from unisono.train.layer_marks import LayerMarks
from unisono.train.lookups_shown import show_lookups
from unisono.train.norms_said import show_norms
from unisono.train.recompute_shown import show_recompute
from unisono.train.rule_marks import AXIS, RuleMarks, is_marked
from unisono.train.sequence_marks import SequenceMarks, summed_by_blocks
from unisono.train.walk import Walk, walked
from unisono.train.zero_shown import with_zero

_ALWAYS = ("pp", "dp", "tp")  # axes of which a rank's place is told, though nothing lies along them


class PlanProgram:
    """A task under a plan; a model that can be built on meta takes no memory."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self.plan = plan
        self.task = task
        self.model = without_memory(task)
        refuse_what_cannot_be_right(plan, self.model)
        sizes = {name: size for name, size in zip(AXES, plan.shape, strict=True) if size > 1 or name in _ALWAYS}
        self.whole = Mesh.describe(list(sizes.values()), list(sizes))
        require_experts(self.model, self.whole)
        self._traces: dict[bool, Trace] = {}
        self._lowered: dict[Mesh, Lowered] = {}
        self._notes: Mapping[str, str] = {}  # on placeholders
        self.example = self._microbatch(task.batch(0))
        if plan.pp > 1:
            rehearse(self.model, order_of(plan), self.example[0])

    def _microbatch(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The rows of all dp ranks in the first microbatch."""
        parts = self.plan.dp * self.plan.microbatches
        if self.task.batch_dim != 0:
            raise UsageError(f"batch_dim={self.task.batch_dim!r}: programs are shown of batches with samples first")
        if rows_of(batch) % parts:
            raise UsageError(
                f"plan {self.plan}: the batch has {rows_of(batch)} samples for {self.plan.dp} data ranks x "
                f"{self.plan.microbatches} microbatches; a program is shown of equal shares, so give a batch of a "
                f"multiple of {parts}"
            )
        first: tuple[Any, Any] = shares(batch, self.plan.microbatches)[0].batch
        return first

    @cached_property
    def _key_heads(self) -> list[int]:
        return key_heads(self.model, self.example[0])

    def about(self, part: Lowered) -> str:
        stage = f", stage {part.stage} of {order_of(self.plan).stages}" if self.plan.pp > 1 else ""
        several = f", one of {self.plan.microbatches} microbatches" if self.plan.microbatches > 1 else ""
        return f"plan {self.plan}{stage}{several}"

    def parts(self, rank: int) -> list[Lowered]:
        """What the rank does with one microbatch: a program for each stage that it holds, in the forward's order."""
        mesh = self._mesh_of_stage(self.whole.index("pp", rank=rank))
        if mesh not in self._lowered:
            self._lowered[mesh] = self._lower(mesh)
        lowered = self._lowered[mesh]
        names: list[str] = []
        parts = [lowered]
        if self.plan.pp > 1:
            require_used(lowered.trace, self.plan)
            blocks = require_stages(self.model, order_of(self.plan))
            names = [blocks.name(number) for number in range(len(blocks.modules))]
            parts = self._stages(lowered, names, rank)
        if self.plan.zero:
            parts = with_zero(self.task, self.plan, parts, names, rank)
        else:
            parts = [replace(part, beside=Beside(sums=[])) for part in parts]
            parts[-1].beside.sums = replica_sums(self.model, parts, rank)
        for part in parts:
            part.beside.notes |= self._notes
            if self.plan.offload:
                part.beside.about.append("offload: the optimizer and its rows are in host memory")
            if self.plan.sequence and part.stage:
                part.beside.about.append("sp: not shown is how ranks tell each other the lengths of their pieces")
        if self.plan.pp > 1 and self.plan.tp > 1:
            show_lookups(parts, lowered, names, rank)
        show_experts(parts, rank)
        show_norms(parts, rank)
        if self.plan.cp > 1:
            show_context(parts, self.plan, self._key_heads, rank)
        show_recompute(parts, self.plan, self.model, rank)
        parts[-1].beside.closing = closing(parts, self.whole, self.task.clip, rank)
        return parts

    def _stages(self, lowered: Lowered, blocks: Sequence[str], rank: int) -> list[Lowered]:
        order, place = order_of(self.plan), self.whole.index("pp", rank=rank)
        block_of = block_of_ops(lowered.trace, blocks)
        starts = self._starts(lowered, block_of, len(blocks), order.stages, rank)
        stage_of = {op: ANYWHERE if b == ANYWHERE else _stage(b, starts) for op, b in block_of.items()}
        staging = Staging(stage_of, order.placement, self.whole, " ".join(map(str, order.actions[place])))
        return [staging.part(lowered, stage) for stage in order.stages_of(place)]

    def _starts(
        self, lowered: Lowered, block_of: Mapping[str, int], count: int, stages: int, rank: int
    ) -> Sequence[int]:
        """The first block of each stage; as ranks balance them, by the parameters that one of them holds."""
        if self.plan.boundaries:
            return checked(self.plan.boundaries, count, stages)
        costs = [0.0] * count
        for name, used in blocks_using(lowered.trace, block_of).items():
            for block in used - {ANYWHERE}:
                costs[block] += math.prod(lowered.given[name].local(lowered.mesh, rank))
        return balanced(costs, stages)

    def _mesh_of_stage(self, place: int) -> Mesh:
        """The axes along which tensors are split; those of one rank are left out, unless all are."""
        ranks = self.whole.at(pp=place).ranks
        names = [name for name in self.whole.names if name != "pp" and self.whole.size(name) > 1] or ["dp"]
        sizes = {name: self.whole.size(name) for name in names}
        return Mesh.describe(list(sizes.values()), list(sizes), ranks)

    def _traced(self, *, unpacked: bool) -> Trace:
        if unpacked not in self._traces:
            with mixtures_as_ops():
                traced = trace(self.model, self.example, self.task.loss, unpacked=unpacked, apart=True)
            self._traces[unpacked] = traced
        return self._traces[unpacked]

    def _lower(self, mesh: Mesh) -> Lowered:
        """The layers that tp cuts under a plan, unless the user's marks use that axis, and the experts that ep does."""
        traced = self._traced(unpacked=AXIS in mesh.names)
        require_spreadable(self.model, traced, mesh)
        others = _without(mesh, self._walked(traced, mesh))
        if AXIS not in mesh.names or is_marked(traced, others):
            if self.plan.sequence:
                raise UsageError(f"plan {self.plan}: sp goes with layers that tp cuts by rules, and marks use {AXIS}")
            return self._lowered_on(mesh, find(self._traced(unpacked=False), others))
        rules = RuleMarks.of(self.task, self.model, self.example, traced, others, self.plan.sequence)
        sequence = SequenceMarks(traced, others, rules.blocks)
        marks = list(rules.marks)
        found = follow(traced, others, marks, rules.uneven)
        if self.plan.sequence:
            marks += sequence.in_the_blocks(found)
            found = follow(traced, others, marks, rules.uneven)
        found = follow(
            traced, others, [*marks, *rules.layers.marks(found), *sequence.after_layers(found)], rules.uneven
        )
        found.notes |= rules.notes
        checks = (SequenceMarks(traced, mesh, rules.blocks), replace(rules.layers, mesh=mesh))
        lowered = self._lowered_on(mesh, found, checks)
        self._notes = summed_by_blocks(lowered, rules.blocks)
        return lowered

    def _walked(self, traced: Trace, mesh: Mesh) -> list[str]:
        """The axes along which ranks share the batch, unless the user's marks use them."""
        return [axis for axis in mesh.names if axis in REPLICAS and not is_marked(traced, mesh, axis)]

    def _lowered_on(self, mesh: Mesh, found: Assignment, checks: Sequence[SequenceMarks | LayerMarks] = ()) -> Lowered:
        """On the whole mesh, of which the assignment knows the axes that do not share the batch."""
        walks: dict[str, Walk] = {}
        for axis in (name for name in mesh.names if name not in found.mesh.names):
            if axis == CP:
                walks[axis] = self._context(found.trace, mesh)
            else:
                walks[axis] = ExpertCuts(found.trace) if axis == EP else DataCuts(found.trace)
        assignment = walked(found, walks, mesh)
        require_shared_tokens(assignment)
        lowered = _plain(lower(found.trace, assignment, mesh, parted=list(walks)))
        for each in checks:
            lowered = each.checked(lowered)
        context = walks.get(CP)
        return context.checked(lowered) if isinstance(context, ContextCuts) else lowered

    def _context(self, traced: Trace, mesh: Mesh) -> ContextCuts:
        require_tokenwise(to_try_out(self.task, self.model), self.example, CP)
        of_sequences = are_of_sequences(*self.example)
        return ContextCuts(traced, mesh, blocks_of(self.model), of_sequences, self.plan.sequence)


def _without(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh without some axes; one of a single rank, where there are no others."""
    if not axes:
        return mesh
    sizes = {name: mesh.size(name) for name in mesh.names if name not in axes} or {"one": 1}
    return Mesh.describe(list(sizes.values()), list(sizes))


def _plain(lowered: Lowered) -> Lowered:
    """A layer's ranks talk among themselves, though others might share the work."""
    made = [
        replace(each, way=replace(each.way, is_plain=True)) if isinstance(each, Move) else each
        for each in lowered.instructions
    ]
    return replace(lowered, instructions=made)


def _stage(block: int, starts: Sequence[int]) -> int:
    return sum(start <= block for start in starts) - 1
