"""State that a model keeps in plain attributes: what a run changes there, and the next one depends on.

A second run, in which attributes are as the first has left them, shows whether its ops differ. A value that is made
once, of nothing that a batch or training changes (a table of angles), is no state: whoever makes it, it is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.capture.export import captured
from unisono.graph.capture.step import ModelWithLoss
from unisono.graph.capture.unsupported import LOST
from unisono.graph.marks.recorder import MARKER
from unisono.graph.marks.recording import recording
from unisono.graph.rules.factory import draws

Captured = torch.export.ExportedProgram


def lost_state(
    step: ModelWithLoss, given: Any, program: Captured, fake: Callable[[Any], Any], marked: bool
) -> list[str]:
    """What a program would lose of it; `program` is the first run, whose graph is left without markers of attributes.

    A tensor that another replaces is state where the ops use it."""
    attributes = step.attributes

    def again(names: Collection[str]) -> Captured | None:
        with contextlib.suppress(UsageError), recording(step.model, marked), attributes.after_a_run(names, fake):
            return captured(step, given)
        return None

    replaced, steady = dict(attributes.replaced), _steady(program.graph, attributes.noted)
    changed = list(attributes.changed)
    lost = []
    if changed:
        second = again(changed)
        once = [name for name in changed if name in steady and name in attributes.settled]
        others = [name for name in changed if name not in once]
        if once and others:
            second = again(others)
        if others and (second is None or _ops(second.graph) != _ops(program.graph)):
            names = ", ".join(f"self.{name}" for name in others)
            lost.append(f"the model changes {names} as it runs, and its ops depend on it{LOST}")
    used = {id(tensor) for tensor in program.constants.values()}
    return lost + [
        f"the model replaces self.{name} as it runs, and its ops depend on it{LOST}"
        for name, tensors in replaced.items()
        if any(id(tensor) in used for tensor in tensors)
    ]


def _steady(graph: fx.Graph, noted: list[str]) -> set[str]:
    """Of the attributes whose tensors are noted in a graph, in order, those that depend on nothing that is given to it
    or is drawn. Takes the notes out."""
    markers = [node for node in graph.nodes if node.target is MARKER and node.args[1] == -1]
    varying = {name for name, marker in zip(noted, markers, strict=True) if _varies(marker)}
    for marker in markers:
        graph.erase_node(marker)
    return set(noted) - varying


def _varies(marker: fx.Node) -> bool:
    stack, seen = [marker], {marker}
    while stack:
        node = stack.pop()
        if (node.op == "placeholder" and "lifted" not in node.name) or (node.op == "call_function" and draws(node)):
            return True
        stack += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return False


def _ops(graph: fx.Graph) -> list[str | None]:
    """The nodes on which something depends."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or _has_effect(node) or any(user in live for user in node.users):
            live.add(node)
    return [node.format_node() for node in graph.nodes if node in live]


def _has_effect(node: fx.Node) -> bool:
    if node.target is MARKER:
        return bool(node.args[1] != -1)
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (schema is None or schema.is_mutable)
