"""The program on disk after each pass, a folder a rank: what came of the trace, of placement, of sharding, of moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unisono.graph.program.codegen import generate
from unisono.graph.program.lowering import Lowered
from unisono.graph.render.listing import listing_of
from unisono.graph.render.text import as_text
from unisono.graph.rules import target_name


def save(lowered: Lowered, folder: Path, ranks: Iterable[int]) -> None:
    """Write DIR/rank_R/0_trace.txt to 4_collectives.txt for these ranks, and the Python function that they run."""
    passes = {
        "0_trace": "\n".join(_traced(lowered)),
        "1_marks": "\n".join(_marked(lowered)),
        "2_propagation": "\n".join(_propagated(lowered)),
    }
    source = generate(lowered, _Nothing())[1]
    for rank in ranks:
        index = folder / f"rank_{rank}"
        index.mkdir(parents=True, exist_ok=True)
        mine = {"3_local": "\n".join(_local(lowered, rank)), "4_collectives": as_text(listing_of(lowered, rank))}
        for name, text in (passes | mine).items():
            (index / f"{name}.txt").write_text(text + "\n")
        (index / "5_program.py").write_text(source)


class _Nothing(dict[str, Any]):
    """Stands for functions where only the text is wanted."""

    def __missing__(self, name: str) -> Any:
        return None


def _traced(lowered: Lowered) -> Iterator[str]:
    for op in lowered.trace.ops:
        made = " ".join(f"{spec.dtype}{list(spec.shape)}".removeprefix("torch.") for spec in op.outputs)
        yield f"{op.name} = {target_name(op.target)}({', '.join(op.inputs)}) -> {made}"
        yield f"    {op.flops} flops, {op.bytes_moved} bytes moved, {op.saved} bytes saved   {op.path}  {op.line}"


def _marked(lowered: Lowered) -> Iterator[str]:
    trace, notes = lowered.trace, lowered.assignment.notes
    for mark in trace.marks:
        yield f"{mark.node}, {'input' if mark.is_input else 'output'} {mark.number}: {mark.placement_spec}"
    if not trace.marks:
        yield "no marks"
    for name, note in notes.items():
        yield f"note on {name}: {note}"


def _propagated(lowered: Lowered) -> Iterator[str]:
    for line in listing_of(lowered, int(lowered.mesh.ranks.min())).lines:
        if line.serial:
            yield f"{line.serial}   strategy {line.strategy}   {line.placements}"


def _local(lowered: Lowered, rank: int) -> Iterator[str]:
    for line in listing_of(lowered, rank).lines:
        if line.serial:
            yield f"{line.serial}   {line.local_shapes}"
