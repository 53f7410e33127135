"""Ranks of a mesh in one process: an op's options run on shards, put together again, against the op on full tensors."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from unisono.graph.capture.trace import Trace
from unisono.graph.placement.assignment import divides, producers
from unisono.graph.program.local_op import LocalOp
from unisono.graph.program.rewrites import REWRITES
from unisono.graph.rules import OpCall, options, target_name, tensors_of
from unisono.graph.rules.option import REPLICATE, Option, output_gradient
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placements, is_partial, local_box
from unisono.mesh.random.state import RandomState

Coordinate = tuple[int, ...]
Shards = dict[Coordinate, torch.Tensor]


def coordinates(mesh: Mesh) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh.shape)))


def lay(tensor: torch.Tensor, placements: Placements, mesh: Mesh) -> Shards:
    """Every rank's shard of a tensor; of a sum in parts, parts that are nothing special."""
    shares = {coordinate: tensor.clone() for coordinate in coordinates(mesh)}
    summed = [axis for axis, placement in enumerate(placements) if is_partial(placement)]
    for axis in summed:
        shares = {
            place: _part(share, place[axis], mesh.shape[axis], hash(tuple(place[a] for a in summed if a < axis)))
            for place, share in shares.items()
        }
    return {coordinate: _sharded(share, placements, mesh, coordinate) for coordinate, share in shares.items()}


def _part(full: torch.Tensor, number: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed % 2**31)
    parts = [torch.randn(full.shape, generator=generator, dtype=torch.float64).to(full.dtype) for _ in range(count - 1)]
    return parts[number] if number < count - 1 else full - sum(parts)


def _sharded(tensor: torch.Tensor, placements: Placements, mesh: Mesh, coordinate: Coordinate) -> torch.Tensor:
    sizes, offsets = local_box(tensor.shape, mesh, placements, coordinate)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def assemble(shards: Shards, placements: Placements, shape: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """The full tensor of shards with these placements; an AssertionError where ranks that should hold the same do
    not."""
    any_shard = next(iter(shards.values()))
    full = torch.zeros(tuple(shape), dtype=any_shard.dtype)
    summed = [axis for axis, placement in enumerate(placements) if is_partial(placement)]
    copied = [axis for axis, placement in enumerate(placements) if placement == REPLICATE]
    for coordinate, shard in shards.items():
        sizes, offsets = local_box(shape, mesh, placements, coordinate)
        assert tuple(shard.shape) == sizes, f"a piece of {tuple(shard.shape)} where {sizes} was expected"
        first = tuple(0 if axis in copied else place for axis, place in enumerate(coordinate))
        torch.testing.assert_close(shard, shards[first], **tolerance([shard]))
        if first == coordinate:
            place = full
            for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
                place = place.narrow(dim, offset, size)
            place.copy_(place + shard if summed else shard)
    return full


class Talker:
    """All ranks' collectives: threads meet and each takes the sum or the largest of what they brought."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.brought: dict[Any, dict[Coordinate, torch.Tensor]] = defaultdict(dict)
        self.turns: Counter[Any] = Counter()
        self.change = threading.Condition()

    def of(self, coordinate: Coordinate) -> Any:
        def collective(tensor: torch.Tensor, op: str, axes: tuple[int, ...]) -> torch.Tensor:
            rest = tuple(-1 if axis in axes else place for axis, place in enumerate(coordinate))
            with self.change:
                meeting = (axes, rest, self.turns[coordinate, axes])
                self.turns[coordinate, axes] += 1
                self.brought[meeting][coordinate] = tensor.detach()
                self.change.notify_all()
                count = torch.Size([self.mesh.shape[axis] for axis in axes]).numel()
                assert self.change.wait_for(lambda: len(self.brought[meeting]) == count, timeout=60), "ranks disagree"
                tensors = torch.stack([self.brought[meeting][key] for key in sorted(self.brought[meeting])])
            return tensors.sum(0) if op == "sum" else tensors.amax(0)

        return collective


def run_shards(node: fx.Node, chosen: Sequence[Option], given: list[Shards], mesh: Mesh, state: RandomState) -> Any:
    """The op on every rank: {coordinate: tuple of its outputs}."""
    inputs = tuple(tuple(option.inputs[i] for option in chosen) for i in range(len(given)))
    count = len(chosen[0].outputs)
    outputs = tuple(tuple(option.outputs[i] for option in chosen) for i in range(count))
    local = next((option.local for option in chosen if option.local), None)
    talker = Talker(mesh)

    def run(coordinate: Coordinate) -> tuple[torch.Tensor, ...]:
        mine = iter([shards[coordinate] for shards in given])
        tensors = set(OpCall(node).tensors)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(mine) if n in tensors else n)
        if local is None:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            place = LocalOp(node, mesh, coordinate, inputs, outputs, talker.of(coordinate), state)
            result = REWRITES[local](place, *args, **kwargs)
        return tensors_of(result)

    if local is None:
        return {coordinate: run(coordinate) for coordinate in coordinates(mesh)}
    with ThreadPoolExecutor(mesh.size()) as pool:
        return dict(zip(coordinates(mesh), pool.map(run, coordinates(mesh)), strict=True))


class _Full(NamedTuple):
    """The op on full tensors: what it takes and gives, and gradients for some seeds."""

    learns: list[bool]
    results: tuple[torch.Tensor, ...]
    tracked: list[int]  # results that have gradients
    seeds: list[torch.Tensor]
    gradients: dict[int, torch.Tensor]  # by the number of the tensor that learns


_full: dict[tuple[fx.Node, str | None], _Full] = {}  # of the op that was looked at last


def _reference(node: fx.Node, chosen: Sequence[Option], values: Sequence[torch.Tensor]) -> _Full:
    local = next((option.local for option in chosen if option.local), None)
    if (node, local) not in _full:
        if not any(key[0] is node for key in _full):
            _full.clear()
        _full[node, local] = _run_alone(node, local, values)
    return _full[node, local]


def _run_alone(node: fx.Node, local: str | None, values: Sequence[torch.Tensor]) -> _Full:
    """On one rank; also a rewrite is the op there."""
    single, place = Mesh.describe((1,), ("one",)), (0,)
    learns = [value.is_floating_point() and not _is_class_weight(node, i) for i, value in enumerate(values)]
    leaves = [v.detach().clone().requires_grad_(learn) for v, learn in zip(values, learns, strict=True)]
    option = replace(options(node)[0], local=local)
    results = run_shards(node, (option,), [{place: leaf} for leaf in leaves], single, RandomState(seed=3))[place]
    if options(node)[0].local is None:
        close = tolerance([*values, *results])
        for mine, plain in zip(results, run_full(node, leaves), strict=True):
            torch.testing.assert_close(mine, plain, **close)
    tracked = [i for i, result in enumerate(results) if result.requires_grad]
    seeds = [torch.randn(result.shape, dtype=torch.float64).to(result.dtype) for result in results]
    numbers = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    given = [leaves[i] for i in numbers]
    found: Sequence[torch.Tensor | None] = ()
    if tracked:
        found = torch.autograd.grad(
            [results[i] for i in tracked], given, [seeds[i] for i in tracked], allow_unused=True
        )
    gradients = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(numbers, found, strict=False)}
    return _Full(learns, tuple(result.detach() for result in results), tracked, seeds, gradients)


def check_option(node: fx.Node, chosen: Sequence[Option], values: Sequence[torch.Tensor], mesh: Mesh) -> None:
    """Outputs and gradients of the op on shards are those of the op on full tensors."""
    full = _reference(node, chosen, values)
    close = tolerance([*values, *full.results])
    given = [lay(v, tuple(o.inputs[i] for o in chosen), mesh) for i, v in enumerate(values)]
    for shards, learn in zip(given, full.learns, strict=True):
        for shard in shards.values():
            shard.requires_grad_(learn)
    results = run_shards(node, chosen, given, mesh, RandomState(seed=3))
    for i, expected in enumerate(full.results):
        placements = tuple(option.outputs[i] for option in chosen)
        made = assemble({c: r[i].detach() for c, r in results.items()}, placements, expected.shape, mesh)
        torch.testing.assert_close(made, expected, **close)
    if full.tracked:
        _check_gradients(close, chosen, full, given, results, mesh)


def _is_class_weight(node: fx.Node, i: int) -> bool:
    """Of a loss, for which torch has no gradient."""
    return "loss" in target_name(node.target) and OpCall(node).names[i] == "weight"


def _check_gradients(
    close: dict[str, Any],
    chosen: Sequence[Option],
    full: _Full,
    given: list[Shards],
    results: Any,
    mesh: Mesh,
) -> None:
    placed = {i: lay(full.seeds[i], tuple(output_gradient(o.outputs[i]) for o in chosen), mesh) for i in full.tracked}
    numbers = list(full.gradients)

    def backward(coordinate: Coordinate) -> list[torch.Tensor]:
        own = [i for i in full.tracked if results[coordinate][i].requires_grad]
        shards = [given[n][coordinate] for n in numbers]
        if not own:
            return [torch.zeros_like(shard) for shard in shards]
        seeded = [placed[i][coordinate] for i in own]
        found = torch.autograd.grad([results[coordinate][i] for i in own], shards, seeded, allow_unused=True)
        return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(shards, found, strict=True)]

    if any(option.local for option in chosen):  # a backward may communicate too
        with ThreadPoolExecutor(mesh.size()) as pool:
            grads = dict(zip(coordinates(mesh), pool.map(backward, coordinates(mesh)), strict=True))
    else:
        grads = {coordinate: backward(coordinate) for coordinate in coordinates(mesh)}
    for k, number in enumerate(numbers):
        reference = full.gradients[number]
        placements = tuple(option.gradient(number) for option in chosen)
        made = assemble({c: grads[c][k] for c in grads}, placements, reference.shape, mesh)
        torch.testing.assert_close(made, reference, **close)


def run_full(node: fx.Node, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    mine = iter(leaves)
    tensors = set(OpCall(node).tensors)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(mine) if n in tensors else n)
    return tensors_of(node.target(*args, **kwargs))  # type: ignore[operator]


def tolerance(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """By the coarsest of some tensors."""
    single = any(tensor.dtype == torch.float32 for tensor in tensors)
    return {"rtol": 2e-4 if single else 1e-9, "atol": 2e-4 if single else 1e-9, "equal_nan": True}


def run_graph(
    trace: Trace, values: dict[str, torch.Tensor], state: RandomState
) -> Iterator[tuple[fx.Node, list[torch.Tensor]]]:
    """Every op of a trace with the (whole) tensors that reach it, from the placeholders' values."""
    known: dict[tuple[str, int], torch.Tensor] = {(name, 0): value for name, value in values.items()}
    mesh = Mesh.describe((1,), ("one",))
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        given = [known[source] for source in producers(node)]
        yield node, given
        if target_name(node.target) == "getitem":
            results: Any = (given[0],)
        else:
            shards = [{(0,): value} for value in given]
            results = run_shards(node, [options(node)[0]], shards, mesh, state)[(0,)]
        known.update({(node.name, i): result.detach() for i, result in enumerate(results)})


def fits(node: fx.Node, chosen: Sequence[Option], values: Sequence[torch.Tensor], mesh: Mesh) -> bool:
    for i, value in enumerate(values):
        if not divides(tuple(value.shape), tuple(option.inputs[i] for option in chosen), mesh.shape):
            return False
    for i, result in enumerate(OpCall(node).results):
        if not divides(tuple(result.shape), tuple(option.outputs[i] for option in chosen), mesh.shape):
            return False
    return True
