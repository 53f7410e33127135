"""Markers: the ops by which marks come into a traced graph, and the way out of it to the ops that they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.marks.recorder import MARKER
from unisono.graph.marks.spec import Mark, PendingMark
from unisono.graph.rules.call import OpCall


def take_marks(graph: fx.Graph, notes: Sequence[PendingMark]) -> list[tuple[PendingMark, Mark]]:
    """Takes marker ops out of the graph: a note on a tensor goes to what made it, any other to all that use it."""
    marks: list[tuple[PendingMark, Mark]] = []
    markers = [node for node in graph.nodes if node.target is MARKER]
    for node in markers:
        note = notes[node.args[1]]
        if note.for_tensor:
            marks.append((note, Mark(_source(node).name, 0, note.placement_spec, op=note.op)))
            continue
        _require_use(node, note)
        _stand_in(graph, node, notes)
        for user, number in _uses(node, notes):
            marks.append((note, Mark(user.name, number, note.placement_spec, is_input=True, op=note.op)))
    for node in markers:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return marks


def _stand_in(graph: fx.Graph, marker: fx.Node, notes: Sequence[PendingMark]) -> None:
    """Where what was marked leaves the model, or is marked again, before an op uses it: an op that does nothing, for
    which the mark holds."""
    idle = [user for user in marker.users if user.op == "output" or _differs(user, notes)]
    if idle:
        with graph.inserting_after(marker):
            made = graph.call_function(torch.ops.aten.alias.default, (marker,))
        made.meta = dict(marker.meta)
        for user in idle:
            user.replace_input_with(marker, made)


def _differs(user: fx.Node, notes: Sequence[PendingMark]) -> bool:
    return user.target is MARKER and not notes[int(user.args[1])].for_tensor  # type: ignore[arg-type]


def kept(graph: fx.Graph, notes: Sequence[PendingMark], marks: Sequence[tuple[PendingMark, Mark]]) -> list[Mark]:
    """The marks of what is left in the graph: some of each call of a marked function, and of each tensor."""
    left = {node.name for node in graph.nodes}
    found = [(note, mark) for note, mark in marks if mark.node in left]
    calls = {note.op for note, _ in found if note.op >= 0}
    tensors = {id(note) for note, _ in found}
    for note in notes:
        if note.op not in calls and id(note) not in tensors:
            raise UsageError(
                f"{note.placement_spec}: what was marked is discarded, as no output of the model depends on it, so the "
                "mark would not count; use what the marked function or uni.reshard returned, or remove the mark"
            )
    return [mark for _, mark in found]


def _require_use(marker: fx.Node, note: PendingMark) -> None:
    """What uni.reshard or uni.shard_tensor returned must be used, if the tensor itself is."""
    others = [user for user in _source(marker).users if user.target is not MARKER]
    if not note.for_tensor and note.op < 0 and not marker.users and others:
        raise UsageError(
            f"{note.placement_spec}: what uni.reshard or uni.shard_tensor returned is discarded, while its "
            "argument is used, so the mark would not count; use what it returned"
        )


def _source(marker: Any) -> fx.Node:
    while marker.target is MARKER:
        marker = marker.args[0]
    return marker


def _uses(marker: fx.Node, notes: Sequence[PendingMark]) -> Iterator[tuple[fx.Node, int]]:
    """The ops that use a marked tensor, through markers of what they make of it but not through another placement
    spec."""
    for user in marker.users:
        if user.target is MARKER:
            yield from () if _differs(user, notes) else _uses(user, notes)
            continue
        for number, given in enumerate(OpCall(user).tensors):
            if given is marker:
                yield user, number
