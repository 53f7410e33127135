"""Finding an assignment for a trace: by the search that was asked for, from the user's marks and the batch."""

from __future__ import annotations

from collections.abc import Callable

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark
from unisono.graph.placement.assignment import Assignment, producers
from unisono.graph.placement.dp import dynamic
from unisono.graph.placement.ilp import exact
from unisono.graph.placement.propagate import propagate
from unisono.graph.placement.recursive import recursive
from unisono.graph.placement.strategy import batch_marks, placements_of_marks
from unisono.graph.rules.option import REPLICATE
from unisono.graph.rules.registry import rule_of, target_name
from unisono.mesh.mesh import Mesh

BATCH_AXIS = "dp"

Search = Callable[[Trace, Mesh, list[Mark], bool, float | None], Assignment]


def _propagated(
    trace: Trace, mesh: Mesh, marks: list[Mark], fully_use_devices: bool, memory: float | None
) -> Assignment:
    if memory is not None:
        raise UsageError("memory= is a limit to search under, but search='propagate' follows the marks; use 'exact'")
    return propagate(trace, mesh, marks, fully_use_devices=fully_use_devices)


def _dynamic(trace: Trace, mesh: Mesh, marks: list[Mark], fully_use_devices: bool, memory: float | None) -> Assignment:
    return dynamic(trace, mesh, marks, fully_use_devices=fully_use_devices, memory=memory)


def _exact(trace: Trace, mesh: Mesh, marks: list[Mark], fully_use_devices: bool, memory: float | None) -> Assignment:
    return exact(trace, mesh, marks, fully_use_devices=fully_use_devices, memory=memory)


def _recursive(
    trace: Trace, mesh: Mesh, marks: list[Mark], fully_use_devices: bool, memory: float | None
) -> Assignment:
    if memory is not None:
        raise UsageError(
            "memory= is a limit to search under, but search='recursive' decides once and does not come back to what it "
            "decided; use 'exact' or 'dynamic'"
        )
    return recursive(trace, mesh, marks, fully_use_devices=fully_use_devices)


# A search takes the trace, the mesh, marks besides those of the trace, whether devices are to be used fully, and how
# many bytes a rank may hold.
SEARCHES: dict[str, Search] = {
    "propagate": _propagated,
    "recursive": _recursive,
    "dynamic": _dynamic,
    "exact": _exact,
}
OTHER_NAMES = {  # MindSpore's
    "sharding_propagation": "propagate",
    "recursive_programming": "recursive",
    "dynamic_programming": "dynamic",
}


def find(
    trace: Trace,
    mesh: Mesh,
    search: str = "propagate",
    fully_use_devices: bool = False,
    memory: float | None = None,
) -> Assignment:
    """An assignment that keeps all marks. An axis called dp shares the batch, unless the user's marks use it."""
    search = OTHER_NAMES.get(search, search)
    if search not in SEARCHES:
        raise UsageError(f"search={search!r}; expected one of {', '.join(SEARCHES)}")
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool) and memory > 0
    if memory is not None and not is_number:
        raise UsageError(f"memory={memory!r}; expected how many bytes a rank may hold, such as 2**30")
    return _noted(SEARCHES[search](trace, mesh, _batch(trace, mesh), fully_use_devices, memory))


def _noted(found: Assignment) -> Assignment:
    found.check()
    found.notes |= _fallbacks(found.trace)
    for name, note in _marks_apart(found).items():
        found.notes[name] = f"{found.notes[name]}; {note}" if name in found.notes else note
    return found


def _fallbacks(trace: Trace) -> dict[str, str]:
    return {
        node.name: f"no rule for {target_name(node.target)}: every rank does all of it"
        for node in trace.graph.nodes
        if node.op == "call_function" and rule_of(node.target) is None
    }


def _marks_apart(found: Assignment) -> dict[str, str]:
    """Ops that are marked to take a tensor in another placement than its own mark. Both marks hold, at the price of a
    move in every step that a reader should know of."""
    placement_specs = {(mark.node, mark.is_input, mark.number): mark.placement_spec for mark in found.trace.marks}
    notes: dict[str, str] = {}
    for (name, is_input, number), placement_spec in placement_specs.items():
        if not is_input:
            continue
        source, output = producers(found.trace.node(name))[number]
        current = placement_specs.get((source, False, output))
        if current is not None and found.layout(source, output) != found.wanted(name, number):
            text = f"{source} is placed as {current}, and used here as {placement_spec}: redistributed in every step"
            notes[name] = f"{notes[name]}; {text}" if name in notes else text
    return notes


def _batch(trace: Trace, mesh: Mesh) -> list[Mark]:
    if BATCH_AXIS not in mesh.names or mesh.size(BATCH_AXIS) == 1:
        return []
    axis = mesh.axis(BATCH_AXIS)
    marked = placements_of_marks(trace, mesh, trace.marks)
    if any(placements[axis] != REPLICATE for placements in marked.values()):
        return []
    taken = {(mark.node, mark.number) for mark in trace.marks if not mark.is_input}
    marks = [mark for mark in batch_marks(trace, mesh, BATCH_AXIS) if (mark.node, mark.number) not in taken]
    return [mark for mark in marks if _is_sharded(trace, mesh, mark)]


def _is_sharded(trace: Trace, mesh: Mesh, mark: Mark) -> bool:
    """Whether a given tensor has a row a sample; a batch of samples that ranks cannot share evenly is refused."""
    samples = trace.specs[trace.inputs[0]][0].shape[0] if trace.inputs and trace.specs[trace.inputs[0]][0].shape else 0
    given = trace.specs[mark.node][0].shape[0]
    if given != samples:
        return False
    ranks = mesh.size(BATCH_AXIS)
    if given % ranks:
        raise UsageError(
            f"the example has {given} samples, which {BATCH_AXIS}={ranks} cannot share evenly; "
            f"expected a multiple of {ranks} (give the axis another name to keep the batch unsharded)"
        )
    return True
