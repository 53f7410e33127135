"""How tensors of a traced model lie along an axis whose ranks share the batch: from op to op, as what was cut before.

Ops have the rules of any axis, but nothing is chosen: an op takes what is cut as it is, and what is whole may be cut
for it, which nobody hears. What all who use it cut is made in pieces at once, back to where it comes from.

Views may put a cut dim into one with dims before it. A rank's piece is then no run of that dim, but ops that work row
by row do not mind; so that it is found again when the dims come apart, `rows` counts the pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment, producers
from unisono.graph.option import REPLICATE, Option
from unisono.graph.rules.registry import options, rule_of
from unisono.graph.rules.shape import view
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, is_partial, shard_dim


@dataclass(frozen=True)
class Lies:
    """`rows`: how many pieces the cut dim holds, each of which is cut."""

    placement: Placement = REPLICATE
    rows: int = 1


WHOLE = Lies()


class Walk:
    """What derives from it says how placeholders lie, and where ranks do otherwise than op by op."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.notes: dict[str, str] = {}
        self._lying: dict[tuple[str, int], Lies] = {}

    def options(self) -> dict[str, Option]:
        chosen = {node.name: self._of_node(node) for node in self.trace.graph.nodes}
        for node in reversed(self.trace.graph.nodes):
            if node.op == "call_function" and self.is_made_in_pieces(node):
                chosen[node.name] = self._in_pieces(node, chosen)
        return chosen

    def _in_pieces(self, node: fx.Node, chosen: Mapping[str, Option]) -> Option:
        """The option by which a whole tensor is made as all its users take it, if there is one."""
        option = chosen[node.name]
        uses = [
            chosen[user.name].inputs[number]
            for user in node.users
            for number, (source, _) in enumerate(producers(user))
            if source == node.name
        ]
        if option.splits or len(option.outputs) != 1 or len(set(uses)) != 1 or shard_dim(uses[0]) is None:
            return option
        found = [each for each in _fitting(node, option.inputs) if each.outputs == (uses[0],)]
        return min(found, key=lambda each: sum(a != REPLICATE for a in each.inputs), default=option)

    def _of_node(self, node: fx.Node) -> Option:
        if node.op == "output":
            return options(node)[0]
        if node.op == "placeholder":
            return self._laid(node, self.of_placeholder(node), 1)
        given = [self.taken(node, source, output) for source, output in producers(node)]
        if all(each.placement == REPLICATE for each in given):
            return self._laid(node, options(node)[0], 1)
        option = self.together(node, given)
        if option is not None:
            return self._laid(node, option, 1)
        viewed = self._viewed(node, given)
        if viewed is not None:
            return self._laid(node, *viewed)
        return self._laid(node, self._by_rule(node, given), max(each.rows for each in given))

    def _laid(self, node: fx.Node, option: Option, rows: int) -> Option:
        for number, placement in enumerate(option.outputs):
            is_cut = shard_dim(placement) is not None
            self._lying[node.name, number] = Lies(placement, rows if is_cut else 1)
        return option

    # ---- what differs ----------------------------------------------------------------------------------------------

    def of_placeholder(self, node: fx.Node) -> Option:
        return options(node)[0]

    def taken(self, node: fx.Node, source: str, output: int) -> Lies:
        """How an op takes a tensor."""
        return self._lying[source, output]

    def is_made_in_pieces(self, node: fx.Node) -> bool:
        """Whether ranks that all need a piece of its whole result make that only."""
        return True

    def together(self, node: fx.Node, given: Sequence[Lies]) -> Option | None:
        """The option of an op that ranks do in a way of their own."""
        return None

    def without_rule(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        """Of an op that no rule lets take what is cut."""
        raise UsageError(f"{node.name} cannot be shown")

    # ---- rules -----------------------------------------------------------------------------------------------------

    def _viewed(self, node: fx.Node, given: Sequence[Lies]) -> tuple[Option, int] | None:
        """A view of a tensor that is cut: where the cut dim comes to lie, and how many pieces it then holds."""
        dim = shard_dim(given[0].placement)
        if rule_of(node.target) is not view or dim is None:
            return None
        (source, output), after = producers(node)[0], self.trace.specs[node.name][0].shape
        place, rows = moved_dim(self.trace.specs[source][output].shape, after, dim, given[0].rows)
        more = (REPLICATE,) * (len(given) - 1)
        return Option((given[0].placement, *more), (Shard(place),), "view"), rows

    def _by_rule(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        wanted = [each.placement for each in given]
        found = _fitting(node, wanted)
        if not found:  # sums in parts are summed
            found = _fitting(node, [REPLICATE if is_partial(each) else each for each in wanted])
        if not found:
            return self.without_rule(node, given)
        return min(found, key=lambda option: sum(a != b for a, b in zip(option.inputs, wanted, strict=True)))


def walked(found: Assignment, walks: Mapping[str, Walk], mesh: Mesh) -> Assignment:
    """The assignment of some axes of a mesh, with walks along the others."""
    by_axis = {axis: walk.options() for axis, walk in walks.items()}
    made = {}
    for node in found.trace.graph.nodes:
        known = dict(zip(found.mesh.names, found.options[node.name], strict=True))
        known |= {axis: options_of[node.name] for axis, options_of in by_axis.items()}
        made[node.name] = tuple(known[axis] for axis in mesh.names)
    notes = found.notes | {name: note for walk in walks.values() for name, note in walk.notes.items()}
    joined = Assignment(found.trace, mesh, made, notes, found.uneven)
    joined.check()
    return joined


def _fitting(node: fx.Node, wanted: Sequence[Placement]) -> list[Option]:
    def fits(option: Option) -> bool:
        pairs = zip(option.inputs, wanted, strict=True)
        return all(a == b or (b == REPLICATE and shard_dim(a) is not None) for a, b in pairs)

    return [option for option in options(node) if fits(option)]


def moved_dim(before: Sequence[int], after: Sequence[int], dim: int, rows: int) -> tuple[int, int]:
    """Where a view takes a dim that holds `rows` pieces: its place, and how many pieces the dim there holds."""
    outside = rows * math.prod(before[:dim])
    within = 1
    for place, size in enumerate(after):
        if within * size > outside:
            return place, outside // within
        within *= size
    return len(after) - 1, 1
