"""Where sp cuts the sequence, as marks on a trace: hidden states are cut at the first block's entry and joined after
the last one, and what tp's ranks have parts of is summed where their layers end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment, producers
from unisono.graph.lowering import Compute, Lowered, Move, made_of_parameters
from unisono.graph.option import REPLICATE
from unisono.graph.stage import inside
from unisono.graph.trace import Trace
from unisono.graph.wish import Mark, Wish
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, is_partial, shard_dim
from unisono.parallel.sequence import DIM

AXIS = "tp"


@dataclass(frozen=True)
class SequenceMarks:
    """`blocks`: the names of those between whose layers the sequence is cut; none without sp."""

    trace: Trace
    mesh: Mesh
    blocks: Sequence[str] = ()

    def in_the_blocks(self, found: Assignment) -> Iterator[Mark]:
        """Hidden states are whole where they enter, each rank has its tokens until a layer that tp cuts by columns, and
        again after the one that it cuts by rows. `found` tells these layers."""
        of_parameters = made_of_parameters(self.trace)
        home = inside(self.trace, self.blocks)
        gathered: set[str] = set()  # what lies between the two layers
        for op in self.trace.ops:
            sources = [
                (number, source, output)
                for number, (source, output) in enumerate(producers(op.node))
                if source in self.trace.tracked and source not in of_parameters
            ]
            for number, source, output in sources:
                enters, leaves = home.get(source) is None, home[op.name] is None
                if enters and not leaves:
                    self._require_even(source, output)
                    if not self._begins_sum(source, found):
                        yield self._mark(source, output, found.layout(source, output), REPLICATE)
                elif leaves and not enters:
                    yield self._mark_of_input(op.name, number, found, REPLICATE)
            if home[op.name] is None or op.name not in self.trace.tracked:
                continue
            is_between = any(source in gathered for _, source, _ in sources)
            if not is_between and not self._is_cut(op.node, found):
                for number, source, output in sources:
                    if self._is_hidden(source, output):
                        yield self._mark_of_input(op.name, number, found, Shard(DIM))
            elif not self._begins_sum(op.name, found):
                gathered.add(op.name)

    def _is_hidden(self, node: str, output: int) -> bool:
        """Whether it has the samples and the sequence where hidden states have them. What has not, such as tokens in
        one row, follows those that have."""
        return self.trace.specs[node][output].shape[: DIM + 1] == self._hidden

    @cached_property
    def _hidden(self) -> tuple[int, ...]:
        """The samples and the length of what enters the blocks."""
        of_parameters, home = made_of_parameters(self.trace), inside(self.trace, self.blocks)
        for op in self.trace.ops:
            for source, output in producers(op.node):
                is_value = source in self.trace.tracked and source not in of_parameters
                if is_value and home[op.name] is not None and home.get(source) is None:
                    return self.trace.specs[source][output].shape[: DIM + 1]
        return ()

    def _is_cut(self, node: fx.Node, found: Assignment) -> bool:
        """Whether it has a parameter of which ranks of tp have pieces."""
        axis = self.mesh.axis(AXIS)
        parameters = [each for each in producers(node) if each[0] in self.trace.parameters]
        return any(shard_dim(found.layout(*each)[axis]) is not None for each in parameters)

    def _begins_sum(self, name: str, found: Assignment) -> bool:
        """Whether ranks of tp have parts of what it makes, and not of what it is made of."""
        axis = self.mesh.axis(AXIS)
        if any(is_partial(found.layout(*each)[axis]) for each in producers(self.trace.node(name))):
            return False
        return any(is_partial(found.layout(name, output)[axis]) for output in range(len(self.trace.specs[name])))

    def after_layers(self, found: Assignment) -> Iterator[Mark]:
        """Who uses what a layer leaves in parts takes it summed: whole, or under sp, in a block, in pieces."""
        home = inside(self.trace, self.blocks)
        for op in self.trace.ops:
            for number, (source, output) in enumerate(producers(op.node)):
                if not self._begins_sum(source, found):
                    continue
                if home.get(source) is None and home[op.name] is None:
                    yield self._mark_of_input(op.name, number, found, REPLICATE)
                elif self._is_hidden(source, output):
                    yield self._mark_of_input(op.name, number, found, Shard(DIM))

    def checked(self, lowered: Lowered) -> Lowered:
        """Summed before it is cut, where it enters, and cut before it is gathered. In the blocks, ranks gather and
        scatter: a program that does otherwise is not theirs."""
        home = inside(self.trace, self.blocks)
        axis = self.mesh.axis(AXIS)
        made: dict[str, Move | Compute] = {}
        for each in lowered.instructions:
            steps = [each]
            if isinstance(each, Move) and self.blocks:
                if home.get(each.source) is None and is_partial(each.way.before[axis]):
                    steps = [*self._summed_first(each, lowered)]
                elif self._is_taken_whole(each, lowered, home):
                    steps = [*self._cut_first(each, lowered)]
                elif self._leaves_for_columns(each, lowered, home):
                    steps = [*self._gathered_first(each, lowered)]
                else:
                    self._require_halves(each, home)
            made |= {step.name: step for step in steps if step.name not in made}
        return replace(lowered, instructions=list(made.values()))

    def _is_taken_whole(self, move: Move, lowered: Lowered, home: Mapping[str, int | None]) -> bool:
        """Whether hidden states go from outside to layers that tp cuts by columns."""
        way, axis = move.way, self.mesh.axis(AXIS)
        users = [each.name for each in lowered.computes if move.name in each.inputs]
        is_hidden = self._is_hidden(move.source, 0) and home.get(move.source) is None
        is_whole = way.before[axis] == way.after[axis] == REPLICATE and way.gradient_after is not None
        is_summed = is_whole and is_partial(way.gradient_after[axis])  # type: ignore[index]
        return is_hidden and is_summed and any(home.get(user) is not None for user in users)

    def _cut_first(self, move: Move, lowered: Lowered) -> list[Move]:
        """Each rank has its tokens, which the layer gathers; others take them by the same cut."""
        way, axis = move.way, self.mesh.axis(AXIS)
        assert way.gradient_after is not None
        pieces, back = (
            tuple(Shard(DIM) if number == axis else each for number, each in enumerate(placements))
            for placements in (way.after, way.gradient_after)
        )
        cut = replace(way, after=pieces, gradient_after=back)
        known = [each for each in lowered.moves if each.source == move.source and each.way == cut]
        first = known[0] if known else Move(f"{move.source}_cut", move.source, cut)
        lowered.values[first.name] = replace(lowered.values[move.source], placements=pieces)
        return [first, Move(move.name, first.name, replace(way, before=pieces, gradient_before=back))]

    def _leaves_for_columns(self, move: Move, lowered: Lowered, home: Mapping[str, int | None]) -> bool:
        """Whether hidden states are gathered after the last block for a layer that gives back parts of gradients."""
        way, axis = move.way, self.mesh.axis(AXIS)
        users = [each.name for each in lowered.computes if move.name in each.inputs]
        is_gathered = shard_dim(way.before[axis]) == DIM and way.after[axis] == REPLICATE
        is_outside = bool(users) and all(home.get(user) is None for user in users)
        is_summed = way.gradient_after is not None and is_partial(way.gradient_after[axis])
        return home.get(move.source) is not None and is_gathered and is_outside and is_summed

    def _gathered_first(self, move: Move, lowered: Lowered) -> list[Move]:
        """Gradients are summed by the layer, then sharded along the sequence where the last block ends."""
        way, axis = move.way, self.mesh.axis(AXIS)
        assert way.gradient_after is not None
        full = tuple(REPLICATE if number == axis else each for number, each in enumerate(way.gradient_after))
        name = f"{move.source}_gathered"
        lowered.values[name] = replace(lowered.values[move.source], placements=way.after)
        first, second = replace(way, gradient_after=full), replace(way, before=way.after, gradient_before=full)
        return [Move(name, move.source, first), Move(move.name, name, second)]

    def _summed_first(self, move: Move, lowered: Lowered) -> list[Move]:
        way, axis = move.way, self.mesh.axis(AXIS)
        if shard_dim(way.after[axis]) is None:
            return [move]
        whole = tuple(REPLICATE if number == axis else each for number, each in enumerate(way.before))
        name = f"{move.source}_whole"
        lowered.values[name] = replace(lowered.values[move.source], placements=whole)
        first = replace(way, after=whole, gradient_after=way.gradient_before)
        return [Move(name, move.source, first), Move(move.name, name, replace(way, before=whole))]

    def _require_halves(self, move: Move, home: Mapping[str, int | None]) -> None:
        steps = (*move.way.forward_steps(self.mesh), *move.way.backward_steps(self.mesh))
        talking = {step.kind for step in steps if self.mesh.axis(AXIS) in step.axes and step.talks}
        if home.get(move.source) is not None and talking - {"all_gather", "reduce_scatter"}:
            raise UsageError(
                f"sp: how {move.source} is cut along the sequence on its way to the next layer cannot be shown; "
                "use --plan without sp"
            )

    def _mark_of_input(self, node: str, number: int, found: Assignment, placement: Placement) -> Mark:
        return self._mark(node, number, found.wanted(node, number), placement, is_input=True)

    def _mark(self, node: str, number: int, lying: Placements, placement: Placement, *, is_input: bool = False) -> Mark:
        """Along tp; along other axes a tensor lies as it did."""
        placements = tuple(placement if a == AXIS else old for a, old in zip(self.mesh.names, lying, strict=True))
        return Mark(node, number, Wish(self.mesh, placements, line=f"shared by {AXIS}"), is_input)

    def _require_even(self, node: str, output: int) -> None:
        shape, ranks = self.trace.specs[node][output].shape, self.mesh.size(AXIS)
        if len(shape) <= DIM or shape[DIM] % ranks:
            raise UsageError(
                f"sp: what enters {self.blocks[0]} has shape {shape}, whose sequence (dim {DIM}) {AXIS}={ranks} ranks "
                f"cannot share evenly, as a program shows it; give a batch of sequences of a multiple of {ranks}"
            )


def summed_by_blocks(lowered: Lowered, blocks: Sequence[str]) -> Mapping[str, str]:
    """sp: of a parameter in the blocks that no rank has a piece of, each rank's tokens give a part of the gradient.
    Notes on those whose op, as shown, would give all of it."""
    axis = lowered.mesh.axis(AXIS)
    notes = {}
    for node, name in lowered.trace.parameters.items():
        is_inside = any(f"{name}.".startswith(f"{block}.") for block in blocks)
        summed = lowered.summed.get(node, ())
        if node in lowered.given and is_inside and lowered.given[node].placements[axis] == REPLICATE:
            if AXIS not in summed:
                notes[node] = "added to this rank's tokens, after the sum"
            lowered.summed[node] = tuple(each for each in lowered.mesh.names if each in (*summed, AXIS))
    return notes
