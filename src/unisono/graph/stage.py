"""The part of a program that one stage of a pipeline runs, with what it gets from the stage before and hands on.

Ops belong to the stage of the block that they run in, those between two blocks to the stage of the first of them. What
is made of inputs alone, outside of blocks, is made on every stage that uses it, for all of them have the inputs; what
depends on parameters travels, through all stages up to the last that uses it. A tensor that is still in parts, or cut
otherwise than the next stage wants it, is moved before it travels; a gradient is summed before it travels back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.errors import UsageError
from unisono.graph.lowering import Lowered, Move, Post, used_by
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import is_partial

ANYWHERE = -1  # the place of an op that depends on inputs only


def block_of_ops(trace: Trace, blocks: Sequence[str]) -> dict[str, int]:
    """By op: the number of the block after whose beginning it runs, or ANYWHERE."""
    of_parameters = _depends_on(trace, set(trace.parameters))
    home = inside(trace, blocks)
    found, current = {}, 0
    for op in trace.ops:
        own = home[op.name]
        if own is not None and own < current:
            raise UsageError(
                f"{op.name} ({op.path} {op.line}) runs in block {blocks[own]} after block {blocks[current]} has "
                "begun; a pipeline runs blocks one after the other, each once"
            )
        current = current if own is None else own
        found[op.name] = current if own is not None or op.name in of_parameters else ANYWHERE
    return found


def inside(trace: Trace, blocks: Sequence[str]) -> dict[str, int | None]:
    """By op: the number of the block that it runs in."""

    def block(path: str) -> int | None:
        return next((number for number, name in enumerate(blocks) if f"{path}.".startswith(f"{name}.")), None)

    return {op.name: block(op.path) for op in trace.ops}


def _depends_on(trace: Trace, sources: set[str]) -> set[str]:
    found = set(sources)
    for node in trace.graph.nodes:
        if any(used.name in found for used in node.all_input_nodes):
            found.add(node.name)
    return found


def blocks_using(trace: Trace, block_of: Mapping[str, int]) -> dict[str, set[int]]:
    """By placeholder of a parameter: the blocks whose ops use it, those that follow a block among its own."""
    return {
        name: {block_of[user.name] for user in trace.node(name).users if user.op == "call_function"}
        for name in trace.parameters
    }


@dataclass(frozen=True)
class Staging:
    """What runs on which stage: `stage_of` an op, the place of each stage's rank along the pipeline, and the mesh of
    the whole plan."""

    stage_of: Mapping[str, int]
    placement: Sequence[int]
    whole: Mesh
    order: str = ""  # of all that a rank does in a step

    def part(self, lowered: Lowered, stage: int) -> Lowered:
        """What a rank of this stage does; the program must be lowered for the mesh of its ranks."""
        homes = self._homes(lowered)
        uses = _last_uses(lowered, homes, len(self.placement) - 1)
        kept = _kept(lowered, homes, stage)
        made = replace(
            lowered,
            instructions=[each for each in lowered.instructions if each.name in kept],
            received=self._posts(lowered, homes, uses, stage, is_sent=False),
            sent=self._posts(lowered, homes, uses, stage, is_sent=True),
            stage=stage,
            whole=self.whole,
            order=self.order,
        )
        needed = {name for each in made.instructions for name in used_by(each)}
        made.given = {name: laid for name, laid in lowered.given.items() if name in needed}
        made.summed = {name: axes for name, axes in lowered.summed.items() if name in needed}
        made.tied = {name: places for name in made.given if (places := self._others(lowered, homes, name, stage))}
        made.outputs = lowered.outputs if stage == len(self.placement) - 1 else []
        made.changed = {name: value for name, value in lowered.changed.items() if value in kept}
        return made

    def _others(self, lowered: Lowered, homes: Mapping[str, int], name: str, stage: int) -> tuple[int, ...]:
        """The places of the pipeline, other than this stage's, whose stages use a parameter too."""
        if name not in lowered.trace.parameters:
            return ()
        stages = {homes[each.name] for each in lowered.instructions if name in used_by(each)} - {ANYWHERE}
        return tuple(sorted({self.placement[each] for each in stages} - {self.placement[stage]}))

    def _homes(self, lowered: Lowered) -> dict[str, int]:
        """The stage of every instruction. A move that sums in the forward is made where its tensor was; another, where
        it is used; and one of what all stages have, wherever it is used."""
        homes = {each.name: self.stage_of[each.name] for each in lowered.computes}
        everywhere = {name for name in lowered.given if name not in lowered.trace.parameters}
        for each in reversed(lowered.instructions):
            if isinstance(each, Move):
                users = [homes[other.name] for other in lowered.instructions if each.name in used_by(other)]
                homes[each.name] = min((user for user in users if user != ANYWHERE), default=ANYWHERE)
        for each in lowered.instructions:
            sums = isinstance(each, Move) and any(is_partial(placement) for placement in each.way.before)
            if isinstance(each, Move) and sums and homes.get(each.source, ANYWHERE) != ANYWHERE:
                homes[each.name] = homes[each.source]
            elif isinstance(each, Move) and (each.source in everywhere or homes.get(each.source) == ANYWHERE):
                homes[each.name] = ANYWHERE
        return homes

    def _posts(
        self, lowered: Lowered, homes: Mapping[str, int], uses: Mapping[str, int], stage: int, *, is_sent: bool
    ) -> list[Post]:
        first, other = (stage, stage + 1) if is_sent else (stage - 1, stage - 1)
        if not 0 <= other < len(self.placement):
            return []
        sources = {move.name: move.source for move in lowered.moves}
        place = self.placement[other]
        return [
            Post(name, lowered.values[name], is_sent, _has_gradient(lowered, name, sources), place, self.whole)
            for name, home in homes.items()
            if home != ANYWHERE and home <= first < uses.get(name, -1)
        ]


def _has_gradient(lowered: Lowered, name: str, sources: Mapping[str, str]) -> bool:
    while name in sources:
        name = sources[name]
    return name in lowered.trace.tracked


def _last_uses(lowered: Lowered, homes: Mapping[str, int], last: int) -> dict[str, int]:
    """By value: the last stage that uses it."""
    found = {name: last for name in lowered.outputs if name is not None}
    for each in lowered.instructions:
        for name in used_by(each):
            found[name] = max(found.get(name, -1), homes[each.name])
    return found


def _kept(lowered: Lowered, homes: Mapping[str, int], stage: int) -> set[str]:
    """The stage's own instructions, and those made of inputs that they need."""
    kept: set[str] = set()
    needed: set[str] = set()
    for each in reversed(lowered.instructions):
        is_own = homes[each.name] == stage
        if is_own or (homes[each.name] == ANYWHERE and each.name in needed):
            kept.add(each.name)
            needed.update(used_by(each))
    return kept
