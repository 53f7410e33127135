"""What stages of a pipeline say before their first block though nobody needs it.

A stage runs the model's own forward from its beginning. What stands before the blocks belongs to the first stage, and
the others run it on parameters that they do not have, without talking. But a rank that holds such a parameter, for a
stage before or because it is tied to one of its own, looks it up once more, and the ranks of tp sum what they find.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from unisono.graph.account import account
from unisono.graph.beside import Aside
from unisono.graph.lowering import Lowered, Move
from unisono.graph.stage import inside


def show_lookups(parts: Sequence[Lowered], lowered: Lowered, blocks: Sequence[str], rank: int) -> None:
    """`lowered`: the program of all stages."""
    home = inside(lowered.trace, blocks)
    before = {op.name for op in takewhile(lambda op: home[op.name] is None, lowered.trace.ops)}
    lines = {line.name: line for line in account(lowered, rank).lines}
    inputs = {each.name: each.inputs for each in lowered.computes}
    here = {name for part in parts for name in part.given if name in part.trace.parameters}
    for part in parts:
        for move in lowered.instructions if part.stage else ():
            if not isinstance(move, Move) or move.source not in before:
                continue
            held = [name for name in inputs[move.source] if name in here]
            said = tuple(talk for talk in lines[move.name].forward if talk.is_collective)
            if held and said:
                name = part.trace.parameters[held[0]]
                aside = Aside(f"again_{move.source}", f"{move.source}: {name} is looked up for nothing", forward=said)
                first = part.received[0].name if part.received else part.instructions[0].name
                part.beside.before.setdefault(first, []).insert(0, aside)
