"""What runs again in the backward under `recompute`, and is said again: shown as a line after the ops of each module.

A module runs again up to the last op that keeps something for the backward: what follows it is not needed. So the sum
at the end of its last layer is said again only where a later op keeps something. And what a layer gathers of a tensor
that the module was given is not gathered again: the tensor carries it along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from unisono.errors import UsageError
from unisono.graph.account import account
from unisono.graph.beside import Aside
from unisono.graph.lowering import Compute, Lowered, Move, used_by
from unisono.graph.rules import target_name
from unisono.graph.source import calls_of
from unisono.graph.talk import Talk
from unisono.mesh.placement import is_partial
from unisono.parallel.recompute import recomputed_modules
from unisono.plan.plan import Plan

_CORE = "scaled_dot_product_attention"


def show_recompute(parts: Sequence[Lowered], plan: Plan, model: nn.Module, rank: int) -> None:
    """Write into the programs of a rank's stages what runs again."""
    if plan.recompute == "none":
        return
    if plan.recompute == "selective":
        for part in parts:
            _show_selective(part, plan)
        return
    names = recomputed_modules(model, plan.recompute)
    blocks = recomputed_modules(model, "full") if plan.sequence else []
    for part in parts:
        part.beside.about.append(f"recompute: {_listed(names)} run{'s' * (len(names) == 1)} again in the backward")
        for name in names:
            _show(part, plan, name, name in blocks, rank)


def _show_selective(part: Lowered, plan: Plan) -> None:
    """Within attention, between what ranks say there; a ring has nothing to compute again."""
    if plan.cp > 1 and plan.context == "ring":
        part.beside.about.append("recompute=selective: nothing, as ring attention keeps no weights")
        return
    part.beside.about.append("recompute=selective: what attention computes is computed again in the backward")
    for name in [each.name for each in part.computes if _CORE in target_name(each.node.target)]:
        part.beside.after.setdefault(name, []).insert(0, Aside(f"again_{name}", f"{name} runs again"))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def _show(part: Lowered, plan: Plan, name: str, is_block: bool, rank: int) -> None:
    order = [each.name for each in part.instructions]
    paths = {op.name: op for op in part.trace.ops}
    own = [each.name for each in part.computes if f"{paths[each.name].path}.".startswith(f"{name}.")]
    if not own:
        return
    if any(re.search(r"@\d+$", call) for each in own for call in calls_of(paths[each].node, f"model.{name}")):
        raise UsageError(
            f"plan {plan}: {name} runs several times in a forward, and what it says again in the backward is not "
            f"shown; use --plan {plan.but(recompute='none')}"
        )
    keeping = [each for each in own if paths[each].keeps]
    last = order.index(keeping[-1]) if keeping else -1
    talks = tuple(_again(part, own, last, is_block, rank))
    words = f"recompute({name}): {sum(order.index(each) <= last for each in own)} ops run again"
    part.beside.after.setdefault(own[-1], []).insert(0, Aside(f"again_{name}", words, backward=talks))


def _again(part: Lowered, own: Sequence[str], last: int, is_block: bool, rank: int) -> Iterator[Talk]:
    """What was said in the module's forward up to the last op that is needed. A block also cuts what it is given."""
    cuts = {move.name for move in part.moves}
    order = {each.name: place for place, each in enumerate(part.instructions)}
    lines = {line.name: line for line in account(part, rank).lines}
    inside = set(own)
    for each in part.instructions:
        if isinstance(each, Move) and any(is_partial(placement) for placement in each.way.before):
            is_again = each.source in inside and order[each.source] < last  # where the layer ends that leaves parts
        elif isinstance(each, Move):
            users = [user for user in part.instructions if each.name in used_by(user)]
            is_needed = any(user.name in inside and order[user.name] <= last for user in users)
            given = _given_to_layer(part, each.source, users)
            is_again = is_needed and (given in inside or (is_block and given in cuts))
        else:
            is_again = isinstance(each, Compute) and each.name in inside and order[each.name] <= last
        if is_again:
            yield from (talk for talk in lines[each.name].forward if talk.is_collective)


def _given_to_layer(part: Lowered, source: str, users: Sequence[Move | Compute]) -> str:
    """What the layer that uses a tensor was given, where it has turned it first: that is what carries along what ranks
    gathered."""
    paths = {op.name: op.path for op in part.trace.ops}
    layers = {paths[user.name] for user in users if isinstance(user, Compute)}
    made = {each.name: each for each in part.computes}
    while source in made and {paths[source]} == layers and len(made[source].inputs) == 1:
        source = made[source].inputs[0]
    return source
