"""The layers that a plan's tp cuts by rules, as marks on a trace: so `explain` shows what ranks do under the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.option import REPLICATE
from unisono.graph.strategy import placements_of_marks
from unisono.graph.trace import Trace
from unisono.graph.wish import Mark, Wish
from unisono.mesh.mesh import Mesh
from unisono.parallel.cut_dims import CutDim, cut_dims
from unisono.parallel.sequence import full_sequence_modules, require_sound_blocks
from unisono.parallel.task import Task
from unisono.parallel.tensor import deriving_once, fitting_rules, require_shareable
from unisono.parallel.tokenwise import require_tokenwise
from unisono.simulate.sketch import require_tried, to_try_out
from unisono.train.layer_marks import LayerMarks, kinds_of_weights

AXIS = "tp"


@dataclass
class RuleMarks:
    """One for every parameter; `notes`, by placeholder, say where a cut cannot be shown."""

    marks: Sequence[Mark]
    notes: dict[str, str]
    layers: LayerMarks
    blocks: Sequence[str] = ()  # between whose layers sp cuts the sequence
    uneven: frozenset[int] = frozenset()  # lengths of dims that ranks cannot share evenly

    @classmethod
    @deriving_once()
    def of(
        cls, task: Task, model: nn.Module, example: tuple[Any, Any], traced: Trace, mesh: Mesh, sequence: bool
    ) -> RuleMarks:
        """UsageError where so many ranks cannot share the model. The trace must be unpacked."""
        tp = mesh.size(AXIS)
        tried = to_try_out(task, model)
        if task.rules is None:
            require_tried(tried, AXIS)
        styles = require_shareable(tried, tp, fitting_rules(tried, tp, task.rules, example))
        blocks: list[str] = []
        if sequence:
            found = require_sound_blocks(tried, styles)
            require_tokenwise(tried, example, "sp", styles)
            if full := full_sequence_modules(found, styles):
                raise UsageError(
                    f"sp: {full[0]} runs on the full sequence, which a program cannot show; use --plan without sp"
                )
            blocks = [found.name(number) for number in range(len(found.modules))]
        cuts, kinds = cut_dims(tried, styles), kinds_of_weights(tried, styles)
        marks, notes, shown, uneven = [], {}, {}, set()
        for node, name in traced.parameters.items():
            cut = cuts.get(name)
            if cut is not None and (note := _unshown(traced, node, cut, tp)):
                notes[node], cut = note, None
            if cut is not None and traced.specs[node][0].shape[cut.dim] % tp:
                uneven.add(traced.specs[node][0].shape[cut.dim])
            if cut is not None and name in kinds:
                shown[node] = kinds[name]
            placements = [Shard(cut.dim) if cut and axis == AXIS else REPLICATE for axis in mesh.names]
            marks.append(Mark(node, 0, Wish(mesh, tuple(placements), line=f"cut by {AXIS}")))
        return cls(marks, notes, LayerMarks(traced, mesh, shown, blocks), blocks, frozenset(uneven))


def is_marked(traced: Trace, mesh: Mesh, name: str = AXIS) -> bool:
    """Whether the user's own marks say what lies along an axis."""
    axis = mesh.axis(name)
    return any(placements[axis] != REPLICATE for placements in placements_of_marks(traced, mesh, traced.marks).values())


def _unshown(traced: Trace, node: str, cut: CutDim, tp: int) -> str:
    length = traced.specs[node][0].shape[cut.dim]
    if cut.is_packed and node not in traced.pieces:
        return f"{AXIS} cuts each of its parts, but the graph does not show where they come apart: shown whole"
    if cut.is_packed and length % tp:
        return f"{AXIS}={tp} cuts the {length} of its parts unevenly, which a program does not: shown whole"
    return ""
