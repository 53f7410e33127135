"""Where layers that tp cuts give or take whole tensors, as marks on a trace; and whether a program's ranks talk where
these layers do, and nowhere else.

A layer gathers what it gives (column_gather) or cuts what it is given (row_split) because its rule says so, also where
it would be cheaper not to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

from torch import nn

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment, producers
from unisono.graph.lowering import Compute, Lowered, Move, made_of_parameters, used_by
from unisono.graph.option import REPLICATE
from unisono.graph.stage import inside
from unisono.graph.trace import Trace
from unisono.graph.wish import Mark, Wish
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, is_partial, shard_dim
from unisono.parallel.rules import Styles
from unisono.parallel.tensor import heads_of

AXIS = "tp"
GATHERS, SPLITS, IN_PIECES = "column_gather", "row_split", "vocab_head"


def kinds_of_weights(model: nn.Module, styles: Styles) -> dict[str, str]:
    """By a weight's name: what its layer does with whole tensors. Heads that make logits leave them in pieces."""
    modules = dict(model.named_modules(remove_duplicate=False))
    heads = heads_of(model, styles, modules)
    kinds: dict[int, str] = {}
    for name, style in styles.items():
        if style.kind in (GATHERS, SPLITS, IN_PIECES, "logits"):
            weight = modules[name].weight
            kinds[id(weight)] = IN_PIECES if modules[name] in heads else style.kind
    named = model.named_parameters(remove_duplicate=False)
    return {name: kinds[id(parameter)] for name, parameter in named if id(parameter) in kinds}


@dataclass(frozen=True)
class LayerMarks:
    """`kinds`: by the placeholder of a weight that is cut. `blocks`: those in which sp cuts the sequence, whose talk is
    another matter (sequence_marks)."""

    trace: Trace
    mesh: Mesh
    kinds: Mapping[str, str] = field(default_factory=dict)
    blocks: Sequence[str] = ()

    def marks(self, found: Assignment) -> Iterator[Mark]:
        for name, kind in self._layers.items():
            if kind == GATHERS:
                for user in self.trace.node(name).users:
                    numbers = [i for i, (source, _) in enumerate(producers(user)) if source == name]
                    for number in numbers if user.op == "call_function" else ():
                        yield self._whole(user.name, number, found.wanted(user.name, number), is_input=True)
            elif kind == SPLITS:
                source, output = producers(self.trace.node(name))[0]
                if source in self._cut_ops(found):
                    raise UsageError(
                        f"--plan: {source} and {name} are layers that {AXIS} cuts, one straight after the other, and "
                        "the second takes a whole tensor: what ranks say between them cannot be shown; rules that cut "
                        "the first by columns and the second by rows need no talk there"
                    )
                yield self._whole(source, output, found.layout(source, output))

    @cached_property
    def _layers(self) -> dict[str, str]:
        """The ops that use these weights, as they are or turned, and what kind of layer each is."""
        of_parameters = made_of_parameters(self.trace)
        found: dict[str, str] = {}
        for weight, kind in self.kinds.items():
            near = list(self.trace.node(weight).users)
            while near:
                op = near.pop()
                if op.name in of_parameters:
                    near += op.users
                elif "embedding" not in str(op.target):
                    found[op.name] = kind
        return found

    def _cut_ops(self, found: Assignment) -> set[str]:
        axis = self.mesh.axis(AXIS)
        return {
            op.name
            for op in self.trace.ops
            for each in producers(op.node)
            if each[0] in self.trace.parameters and shard_dim(found.layout(*each)[axis]) is not None
        }

    def _whole(self, node: str, number: int, lying: Placements, *, is_input: bool = False) -> Mark:
        placements = tuple(REPLICATE if name == AXIS else old for name, old in zip(self.mesh.names, lying, strict=True))
        return Mark(node, number, Wish(self.mesh, placements, line=f"whole for {AXIS}"), is_input)

    # ---- what ranks do not say -----------------------------------------------------------------------------------

    def checked(self, lowered: Lowered) -> Lowered:
        """UsageError where ranks of tp would talk otherwise than their layers do: the program would not be theirs."""
        home = inside(self.trace, self.blocks)
        users: dict[str, list[str]] = {}
        for each in lowered.instructions:
            for name in used_by(each):
                users.setdefault(name, []).append(each.name)
        made: list[Move | Compute] = []
        for each in lowered.instructions:
            near = [each.name, *users.get(each.name, [])] + ([each.source] if isinstance(each, Move) else [])
            if isinstance(each, Move) and all(home.get(name) is None for name in near):
                self._require_theirs(each, users.get(each.name, []))
                made += self._gathered_first(each, lowered)
            else:
                made.append(each)
        return replace(lowered, instructions=made)

    def _require_theirs(self, move: Move, users: Sequence[str]) -> None:
        way, axis = move.way, self.mesh.axis(AXIS)
        there = any(step.talks and axis in step.axes for step in way.forward_steps(self.mesh))
        back = any(step.talks and axis in step.axes for step in way.backward_steps(self.mesh))
        is_joined = is_partial(way.before[axis]) or move.source in self._gathered
        if there and not (is_joined and way.after[axis] == REPLICATE):
            self._refuse(move, "on its way to what uses it")
        if back and way.gradient_after is not None and way.gradient_before is not None:
            is_sum = is_partial(way.gradient_after[axis])
            is_of_pieces = all(self._layers.get(user) == SPLITS for user in users)
            if not is_sum and not is_of_pieces:
                self._refuse(move, "of its gradient")

    @cached_property
    def _gathered(self) -> set[str]:
        """What layers gather, and logits in pieces, which who looks at them gathers."""
        found = set(self._layers) - {name for name, kind in self._layers.items() if kind == SPLITS}
        for op in self.trace.ops:
            if any(self._layers.get(name, IN_PIECES) == IN_PIECES and name in found for name, _ in producers(op.node)):
                found.add(op.name)
        return found

    def _gathered_first(self, move: Move, lowered: Lowered) -> list[Move]:
        """A layer cuts its gradient after ranks have summed it, where the next one gives back parts."""
        way, axis = move.way, self.mesh.axis(AXIS)
        if self._layers.get(move.source) != GATHERS or way.gradient_after is None:
            return [move]
        if not is_partial(way.gradient_after[axis]):
            return [move]
        whole = tuple(REPLICATE if number == axis else each for number, each in enumerate(way.gradient_after))
        name = f"{move.source}_whole"
        lowered.values[name] = replace(lowered.values[move.source], placements=way.after)
        first, second = replace(way, gradient_after=whole), replace(way, before=way.after, gradient_before=whole)
        return [Move(name, move.source, first), Move(move.name, name, second)]

    def _refuse(self, move: Move, where: str) -> NoReturn:
        op = next((each for each in self.trace.ops if each.name == move.source), None)
        at = f" ({' '.join(filter(None, (op.path, op.line)))})" if op is not None else ""
        lies, wanted = (each[self.mesh.axis(AXIS)] for each in (move.way.before, move.way.after))
        raise UsageError(
            f"--plan: ranks talk where layers that {AXIS} cuts begin and end, and to give what the model gives they "
            f"would have to talk about {move.source}{at} {where} ({lies} to {wanted}), so their program cannot be "
            "shown; unisono verify tells whether the model can be cut so, and other rules may cut it otherwise"
        )
