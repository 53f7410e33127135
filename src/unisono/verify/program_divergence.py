"""Where a program parts from the plain model: the first op whose piece on some rank is not the part it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.graph.placement.assignment import replicated
from unisono.graph.program.binding import bind
from unisono.graph.program.codegen import generate
from unisono.graph.program.executable import fed
from unisono.graph.program.lowering import Compute, Lowered, lower
from unisono.graph.program.program import Program
from unisono.graph.rules import tensors_of
from unisono.mesh.placement import Partial, Replicate, local_slice
from unisono.mesh.reshard import move

Values = dict[str, Any]


@torch.no_grad()
def program_parting(comm: Communicator, program: Program, batch: tuple[Any, Any], tolerance: float) -> str:
    """Runs the training forward of a batch on pieces and, on every rank, on whole tensors; compares value by value."""
    lowered = program.lowered
    serial = lower(lowered.trace, replicated(lowered.trace, lowered.mesh), lowered.mesh)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    whole = {**program.pieces.whole_tensors(), **dict(zip(fed(lowered), leaves, strict=True))}
    program.random.step = program.steps
    plain = _values(serial, program, whole, is_whole=True)
    mine = _values(lowered, program, whole, is_whole=False)
    found = None
    for order, compute in enumerate(lowered.computes):
        deviation = _deviation(compute, lowered, plain[compute.name], mine[compute.name])
        if found is None and deviation > tolerance:
            found = order, compute.name, deviation
    everyone = [(each, rank) for rank, each in enumerate(comm.all_gather_object(found)) if each is not None]
    if not everyone:
        return "forward values agree: the fault lies in the backward pass, the sums of gradients or the update"
    (_, name, deviation), rank = min(everyone, key=lambda item: item[0][0])
    op = next(op for op in lowered.trace.ops if op.name == name)
    where = " ".join(word for word in (op.path, op.line) if word)
    return f"{name} ({where}) on rank {rank}: deviation {deviation:.2g}"


def _values(lowered: Lowered, program: Program, whole: dict[str, torch.Tensor], is_whole: bool) -> Values:
    """What every op gives on this rank."""
    values: Values = {}

    def noting(name: str, callee: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            values[name] = callee(*args, **kwargs)
            return values[name]

        return note

    callees = bind(lowered, program.random)
    computed = {compute.name for compute in lowered.computes}
    wrapped = {name: noting(name, callee) if name in computed else callee for name, callee in callees.items()}
    names = {**lowered.trace.parameters, **lowered.trace.buffers}
    given = []
    for node, laid in lowered.given.items():
        tensor = lowered.trace.constants[node] if node in lowered.trace.constants else whole[names.get(node, node)]
        if node in lowered.trace.pieces:
            piece = lowered.trace.pieces[node]
            tensor = tensor.narrow(piece.dim, piece.start, piece.length)
        given.append((tensor if is_whole else local_slice(tensor, lowered.mesh, laid.placements)).clone())
    generate(lowered, wrapped)[0](*given)
    for compute in lowered.computes:
        if compute.is_item:
            values[compute.name] = values[compute.inputs[0]][compute.node.args[1]]
    return values


def _deviation(compute: Compute, lowered: Lowered, plain: Any, mine: Any) -> float:
    """How far this rank's pieces are from the parts of the whole, beside the largest value. All ranks call it."""
    worst = 0.0
    for laid, whole, piece in zip(compute.outputs, tensors_of(plain), tensors_of(mine), strict=True):
        summed = tuple(Replicate() if isinstance(p, Partial) else p for p in laid.placements)
        piece = move(piece, lowered.mesh, laid.shape, laid.placements, summed)
        expected = local_slice(whole, lowered.mesh, summed)
        if not piece.numel() or not piece.dtype.is_floating_point:
            worst = max(worst, 0.0 if torch.equal(piece, expected) else float("inf"))
            continue
        scale = max(float(whole.abs().nan_to_num(posinf=0.0).max()), 1e-300)
        gap = (piece - expected).abs().nan_to_num(nan=0.0, posinf=0.0)
        worst = max(worst, float(gap.max()) / scale)
    return worst
