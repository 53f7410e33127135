"""Functions whose tensors are marked.

    matmul = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))              # shards a dim, input by input
    y = uni.shard_op(torch.matmul, mesh, inputs=[[...], None], outputs=[[...]])(x, weight)

Run without a trace, a marked function is the function. What `shard` and `shard_op` return must be called: if it is
thrown away without, the next trace is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from unisono.errors import UsageError
from unisono.graph.capture.source import Maker, calling_line
from unisono.graph.marks.recorder import noted, recorder
from unisono.graph.marks.spec import PendingMark, PlacementSpec, Strategy
from unisono.mesh import reshard as moves
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, checked

_dropped: list[str] = []  # marked functions that were thrown away before anything called them


def require_none_dropped() -> None:
    dropped = list(dict.fromkeys(_dropped))
    _dropped.clear()
    if dropped:
        raise UsageError(
            f"{'; '.join(dropped)}: what uni.shard or uni.shard_op returned was thrown away and never called, so the "
            "mark would not count; keep it and call it instead of the function"
        )


class Sharded:
    """A function whose tensors are marked. Called, it is the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[PlacementSpec | None],
        outputs: Sequence[PlacementSpec | None],
        stage: PlacementSpec | None = None,
    ) -> None:
        """stage: where a module begins a stage, the mesh of its ranks."""
        self.function = function
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.stage = stage
        self.called = False
        self._maker = Maker()
        self.line = next(
            (
                placement_spec.line
                for placement_spec in (*self.inputs, *self.outputs, stage)
                if placement_spec is not None
            ),
            "",
        )

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)} marked at {self.line}"

    def __del__(self) -> None:
        if not getattr(self, "called", True) and self._maker.is_at_work():
            _dropped.append(repr(self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        recording = recorder()
        if recording is None:
            return self._run(args, kwargs)
        recording.called.add(id(self))
        if self.stage is not None:
            recording.note_stage(self.function, self.stage)
        number = recording.next_op()
        given = self._each((args, kwargs), self.inputs, "input", lambda t, w: noted(t, PendingMark(w, op=number)))
        results = self.function(*given[0], **given[1])
        return self._each(
            results, self.outputs, "output", lambda t, w: noted(t, PendingMark(w, for_tensor=True, op=number))
        )

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Tensors that are on a mesh are redistributed as marked; others are full tensors and stay as they
        are."""
        given = self._each((args, kwargs), self.inputs, "input", _moved)
        return self._each(self.function(*given[0], **given[1]), self.outputs, "output", _moved)

    def _each(
        self,
        tree: Any,
        placement_specs: tuple[PlacementSpec | None, ...],
        what: str,
        do: Callable[[torch.Tensor, PlacementSpec], torch.Tensor],
    ) -> Any:
        leaves, spec = pytree.tree_flatten(tree)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if placement_specs and len(placement_specs) != len(indices):
            raise UsageError(
                f"{self!r} names {len(placement_specs)} {what}s, but was called with {len(indices)} tensors"
            )
        for index, placement_spec in zip(indices, placement_specs, strict=False):
            if placement_spec is not None:
                _require_fit(self, placement_spec, leaves[index], what)
                leaves[index] = do(leaves[index], placement_spec)
        return pytree.tree_unflatten(leaves, spec)


def _moved(tensor: torch.Tensor, placement_spec: PlacementSpec) -> torch.Tensor:
    if isinstance(tensor, DTensor) and placement_spec.mesh is not None and placement_spec.placements is not None:
        return moves.reshard(tensor, placement_spec.mesh, placement_spec.placements)
    return tensor


def _require_fit(function: Sharded, placement_spec: PlacementSpec, tensor: torch.Tensor, what: str) -> None:
    shape = tuple(tensor.shape)
    if placement_spec.shard_counts is None:
        assert placement_spec.mesh is not None
        assert placement_spec.placements is not None
        checked(placement_spec.placements, placement_spec.mesh, tensor.dim())
    elif len(counts := placement_spec.shard_counts) != len(shape):
        raise UsageError(
            f"{function!r}: strategy {counts} has {len(counts)} numbers for an {what} of shape {shape}; "
            "expected one a dim"
        )
    elif any(size % count for size, count in zip(shape, placement_spec.shard_counts, strict=True)):
        raise UsageError(
            f"{function!r}: strategy {placement_spec.shard_counts} does not divide the {what} of shape {shape}"
        )


def shard(
    function: Callable[..., Any],
    in_strategy: Sequence[Strategy | None],
    out_strategy: Sequence[Strategy | None] | None = None,
) -> Sharded:
    """The function, marked: the number of shards along each dim of each of its tensors.

    Args:
        function: Of torch, or a module.
        in_strategy: Of each input; None leaves a tensor open.
        out_strategy: Of each output.
    """
    _require_function("shard", function)
    given = _strategies("in_strategy", in_strategy), _strategies("out_strategy", out_strategy or ())
    if not any(placement_spec is not None for placement_spec in (*given[0], *given[1])):
        raise UsageError(
            f"shard({getattr(function, '__name__', function)}) has no strategy: give in_strategy a tuple for a tensor, "
            "such as ((2, 4), (4, 1)); None leaves a tensor open"
        )
    return Sharded(function, *given)


def _require_function(word: str, given: object) -> None:
    if not callable(given):
        raise UsageError(f"{word}({given!r:.80}): expected a function or a module, such as torch.matmul")


def _strategies(name: str, given: Sequence[Strategy | None]) -> list[PlacementSpec | None]:
    if not isinstance(given, tuple | list) or any(not isinstance(item, tuple | list | None) for item in given):
        raise UsageError(f"{name} is {given!r}; expected a tuple of tuples such as ((2, 4), (4, 1)), one a tensor")
    for item in given:
        if item is not None and any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in item):
            raise UsageError(f"{name} has {item!r}; expected whole numbers of at least 1, one a dim")
    return [None if item is None else PlacementSpec(shard_counts=tuple(item), line=calling_line()) for item in given]


def shard_op(
    function: Callable[..., Any],
    mesh: Mesh,
    inputs: Sequence[Sequence[Placement] | None] = (),
    outputs: Sequence[Sequence[Placement] | None] = (),
) -> Sharded:
    """The function, marked: how each of its tensors is placed on the mesh.

    Without inputs and outputs, a module: it and all that runs after it are a stage, on the ranks of `mesh`, such as
    mesh.at(pp=1).

    Args:
        function: Of torch, or a module.
        mesh: On which tensors are placed.
        inputs: Placements of each input; None leaves a tensor open.
        outputs: Placements of each output.
    """
    _require_function("shard_op", function)
    if not inputs and not outputs:
        if not isinstance(function, nn.Module):
            raise UsageError(
                f"shard_op({getattr(function, '__name__', function)}) has no placements of inputs or outputs; give "
                "placements, or a module that begins a stage"
            )
        return Sharded(function, (), (), PlacementSpec(mesh, line=calling_line()))

    def placement_specs(given: Sequence[Sequence[Placement] | None]) -> list[PlacementSpec | None]:
        for placements in given:
            if placements is not None:
                checked(placements, mesh, 16)  # the tensors' own dims are checked when they come
        return [None if p is None else PlacementSpec(mesh, tuple(p), line=calling_line()) for p in given]

    return Sharded(function, placement_specs(inputs), placement_specs(outputs))
