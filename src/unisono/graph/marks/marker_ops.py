"""Markers: the ops by which marks come into a traced graph, and the way out of it to the ops that they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.marks.recorder import MARKER
from unisono.graph.marks.spec import Mark, Note
from unisono.graph.rules.call import Call


def take_marks(graph: fx.Graph, notes: Sequence[Note]) -> list[tuple[Note, Mark]]:
    """Takes marker ops out of the graph: a note on a tensor goes to what made it, any other to all that use it."""
    marks: list[tuple[Note, Mark]] = []
    markers = [node for node in graph.nodes if node.target is MARKER]
    for node in markers:
        note = notes[node.args[1]]
        if note.lies:
            marks.append((note, Mark(_source(node).name, 0, note.wish, op=note.op)))
            continue
        _require_use(node, note)
        _stand_in(graph, node, notes)
        for user, number in _uses(node, notes):
            marks.append((note, Mark(user.name, number, note.wish, is_input=True, op=note.op)))
    for node in markers:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return marks


def _stand_in(graph: fx.Graph, marker: fx.Node, notes: Sequence[Note]) -> None:
    """Where what was marked leaves the model, or is marked again, before an op uses it: an op that does nothing, for
    which the mark holds."""
    idle = [user for user in marker.users if user.op == "output" or _is_another_wish(user, notes)]
    if idle:
        with graph.inserting_after(marker):
            made = graph.call_function(torch.ops.aten.alias.default, (marker,))
        made.meta = dict(marker.meta)
        for user in idle:
            user.replace_input_with(marker, made)


def _is_another_wish(user: fx.Node, notes: Sequence[Note]) -> bool:
    return user.target is MARKER and not notes[int(user.args[1])].lies  # type: ignore[arg-type]


def kept(graph: fx.Graph, notes: Sequence[Note], marks: Sequence[tuple[Note, Mark]]) -> list[Mark]:
    """The marks of what is left in the graph: some of each call of a marked function, and of each tensor."""
    left = {node.name for node in graph.nodes}
    found = [(note, mark) for note, mark in marks if mark.node in left]
    calls = {note.op for note, _ in found if note.op >= 0}
    tensors = {id(note) for note, _ in found}
    for note in notes:
        if note.op not in calls and id(note) not in tensors:
            raise UsageError(
                f"{note.wish}: what was marked is thrown away, as nothing that the model gives depends on it, so the "
                "mark would not count; use what the marked function or uni.reshard returned, or remove the mark"
            )
    return [mark for _, mark in found]


def _require_use(marker: fx.Node, note: Note) -> None:
    """What uni.reshard or uni.shard_tensor returned must be used, if the tensor itself is."""
    others = [user for user in _source(marker).users if user.target is not MARKER]
    if not note.lies and note.op < 0 and not marker.users and others:
        raise UsageError(
            f"{note.wish}: what uni.reshard or uni.shard_tensor returned was thrown away, while the tensor it was "
            "given is used, so the mark would not count; use what it returned"
        )


def _source(marker: Any) -> fx.Node:
    while marker.target is MARKER:
        marker = marker.args[0]
    return marker


def _uses(marker: fx.Node, notes: Sequence[Note]) -> Iterator[tuple[fx.Node, int]]:
    """The ops that use a marked tensor, through markers of what they make of it but not through another wish."""
    for user in marker.users:
        if user.target is MARKER:
            yield from () if _is_another_wish(user, notes) else _uses(user, notes)
            continue
        for number, given in enumerate(Call(user).tensors):
            if given is marker:
                yield user, number
