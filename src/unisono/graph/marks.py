"""Marks: what the user says about how some tensors and ops lie on a mesh. The rest is inferred (see `propagate`).

    weight = uni.shard_tensor(weight, mesh, [uni.Replicate(), uni.Shard(1)])    # a tensor
    uni.mark(model, "layers.0.mlp.up.weight", mesh, [uni.Replicate(), uni.Shard(0)])
    uni.mark(model, "layers.6", mesh.at(pp=1))                                  # a stage: from here on, on those ranks
    matmul = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))              # an op: pieces a dim, input by input
    y = uni.shard_op(torch.matmul, mesh, inputs=[[...], None], outputs=[[...]])(x, weight)
    y = uni.reshard(y, mesh, [uni.Shard(0), uni.Replicate()])                   # from here on

A mark counts in every trace of a model that runs into it; run without a trace, a marked function is the function. What
`shard` and `shard_op` return must be called: if it is dropped without, the next trace is an error.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm import world as worlds
from unisono.errors import UsageError
from unisono.mesh import reshard as moves
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, checked

Strategy = tuple[int, ...]


@dataclass(frozen=True)
class Wish:
    """How a tensor is to lie: by placements on a mesh, or (`pieces`) by how many pieces each dim is cut into."""

    mesh: Mesh | None = None
    placements: Placements | None = None
    pieces: Strategy | None = None
    line: str = ""  # where it was made

    def __str__(self) -> str:
        said = f"{self.placements} on {self.mesh}" if self.pieces is None else f"strategy {self.pieces}"
        return f"{said} (marked at {self.line})" if self.line else said


@dataclass(frozen=True)
class Mark:
    """A wish for a node of a graph: for its output of that number, or, where `is_input`, for its tensor input."""

    node: str
    number: int
    wish: Wish
    is_input: bool = False
    op: int = -1  # marks of one call of a marked function have the same number


# ---- tensors ----------------------------------------------------------------------------------------------------

_tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_modules: weakref.WeakKeyDictionary[nn.Module, dict[str, Wish]] = weakref.WeakKeyDictionary()
_stages: weakref.WeakKeyDictionary[nn.Module, dict[str, Wish]] = weakref.WeakKeyDictionary()


def shard_tensor(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The tensor, marked. Where the mesh's ranks are running, a DTensor of which each rank keeps its part."""
    wish = Wish(mesh, checked(placements, mesh, tensor.dim()), line=_caller())
    recording = recorder()
    if recording is not None:
        return tensor if recording.is_parameter(tensor, wish) else _noted(tensor, Note(wish))
    if not isinstance(tensor, DTensor):
        _tensors[tensor] = wish
        tensor.untyped_storage()._unisono_wish = (tensor.shape, wish)  # type: ignore[attr-defined]
    if not worlds.is_initialized():
        return tensor
    return moves.shard_tensor(tensor, mesh, placements)


def reshard(tensor: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The tensor as it lies under `placements`; in a trace, a mark for all that use what is returned. Where no ranks
    are running it is whole and stays so."""
    if recorder() is not None:
        return _noted(tensor, Note(Wish(mesh, checked(placements, mesh, tensor.dim()), line=_caller())))
    if not worlds.is_initialized():
        checked(placements, mesh, tensor.dim())
        return tensor
    return moves.reshard(tensor, mesh, placements)


def mark(module: nn.Module, name: str, mesh: Mesh, placements: Sequence[Placement] | None = None) -> None:
    """Marks a parameter or buffer of a module by its name, such as "layers.0.mlp.up.weight"; or, without placements,
    one of its modules: it and all that runs after it are on the ranks of `mesh`, such as mesh.at(pp=1)."""
    if placements is None:
        _mark_stage(module, name, mesh)
        return
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    if name not in held:
        close = [known for known in held if known.rpartition(".")[2] == name.rpartition(".")[2]] or list(held)
        raise UsageError(
            f"the module has no parameter or buffer {name!r}; expected a name such as {', '.join(close[:5])}"
        )
    wish = Wish(mesh, checked(placements, mesh, held[name].dim()), line=_caller())
    marked = _modules.setdefault(module, {})
    earlier = marked.setdefault(name, wish)
    if earlier.mesh == mesh and earlier.placements != wish.placements:
        raise UsageError(f"{name} is marked twice: {earlier} and {wish}; remove one, or build the model anew")
    marked[name] = wish


def _mark_stage(module: nn.Module, name: str, mesh: Mesh) -> None:
    names = [known for known, _ in module.named_modules() if known]
    if name in {known for known, _ in (*module.named_parameters(), *module.named_buffers())}:
        raise UsageError(f"{name} is marked without placements; give one an axis of the mesh")
    if name not in names:
        raise UsageError(
            f"the module has no module {name!r} to mark as a stage's first; its modules are {', '.join(names[:12])}"
            f"{', ...' if len(names) > 12 else ''} (a parameter's mark has placements)"
        )
    _stages.setdefault(module, {})[name] = Wish(mesh, line=_caller())


def stages_for(model: nn.Module) -> dict[str, Wish]:
    """The modules that are marked as the first of a stage, by name; each wish has the mesh of the stage's ranks."""
    found: dict[str, Wish] = {}
    for prefix, module in model.named_modules():
        for name, wish in _stages.get(module, {}).items():
            found[f"{prefix}.{name}".lstrip(".")] = wish
    return found


def wishes_for(model: nn.Module) -> dict[str, Wish]:
    """What is marked among a model's parameters and buffers, by name. A name's own mark goes before its tensor's."""
    found: dict[str, Wish] = {}
    for listed in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in listed:
            if (wish := wish_of(tensor)) is not None:
                found[name] = wish
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, wish in _modules.get(module, {}).items():
            found[f"{prefix}.{name}".lstrip(".")] = wish
    return found


def wish_of(tensor: torch.Tensor) -> Wish | None:
    """How a tensor is marked, or lies on a mesh already."""
    if isinstance(tensor, DTensor):
        return Wish(Mesh.of(tensor.device_mesh), tuple(tensor.placements))
    return _tensors[tensor] if tensor in _tensors else _wish_of_memory(tensor)


def _wish_of_memory(tensor: torch.Tensor) -> Wish | None:
    """The mark of a tensor that a parameter was made from: nn.Parameter(uni.shard_tensor(values, ...)) has its memory,
    but is another tensor."""
    shape, wish = getattr(tensor.untyped_storage(), "_unisono_wish", (None, None))
    return wish if shape == tensor.shape else None


# ---- ops --------------------------------------------------------------------------------------------------------

_dropped: list[str] = []  # marked functions that were thrown away before anything called them


class Sharded:
    """A function whose tensors are marked. Called, it is the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Wish | None],
        outputs: Sequence[Wish | None],
        stage: Wish | None = None,
    ) -> None:
        """stage: where a module begins a stage, the mesh of its ranks."""
        self.function = function
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.stage = stage
        self.called = False
        self.line = next((wish.line for wish in (*self.inputs, *self.outputs, stage) if wish is not None), "")

    def __repr__(self) -> str:
        return f"{getattr(self.function, '__name__', self.function)} marked at {self.line}"

    def __del__(self) -> None:
        if not getattr(self, "called", True):
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
        given = self._each((args, kwargs), self.inputs, "input", lambda t, w: _noted(t, Note(w, op=number)))
        results = self.function(*given[0], **given[1])
        return self._each(results, self.outputs, "output", lambda t, w: _noted(t, Note(w, lies=True, op=number)))

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Tensors that are on a mesh are brought to lie as marked; others are whole, and nothing has to be done."""
        given = self._each((args, kwargs), self.inputs, "input", _moved)
        return self._each(self.function(*given[0], **given[1]), self.outputs, "output", _moved)

    def _each(
        self, tree: Any, wishes: tuple[Wish | None, ...], what: str, do: Callable[[torch.Tensor, Wish], torch.Tensor]
    ) -> Any:
        leaves, spec = pytree.tree_flatten(tree)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if wishes and len(wishes) != len(places):
            raise UsageError(f"{self!r} names {len(wishes)} {what}s, but was called with {len(places)} tensors")
        for place, wish in zip(places, wishes, strict=False):
            if wish is not None:
                _require_fit(self, wish, leaves[place], what)
                leaves[place] = do(leaves[place], wish)
        return pytree.tree_unflatten(leaves, spec)


def _moved(tensor: torch.Tensor, wish: Wish) -> torch.Tensor:
    if isinstance(tensor, DTensor) and wish.mesh is not None and wish.placements is not None:
        return moves.reshard(tensor, wish.mesh, wish.placements)
    return tensor


def _require_fit(function: Sharded, wish: Wish, tensor: torch.Tensor, what: str) -> None:
    shape = tuple(tensor.shape)
    if wish.pieces is None:
        assert wish.mesh is not None
        assert wish.placements is not None
        checked(wish.placements, wish.mesh, tensor.dim())
    elif len(wish.pieces) != len(shape):
        raise UsageError(
            f"{function!r}: strategy {wish.pieces} has {len(wish.pieces)} numbers for an {what} of shape {shape}; "
            "expected one a dim"
        )
    elif any(size % count for size, count in zip(shape, wish.pieces, strict=True)):
        raise UsageError(f"{function!r}: strategy {wish.pieces} does not divide the {what} of shape {shape}")


def shard(
    function: Callable[..., Any],
    in_strategy: Sequence[Strategy | None],
    out_strategy: Sequence[Strategy | None] | None = None,
) -> Sharded:
    """The function, marked: into how many pieces each dim of each of its tensors is cut. None leaves a tensor open."""
    given = _strategies("in_strategy", in_strategy), _strategies("out_strategy", out_strategy or ())
    if not any(wish is not None for wish in (*given[0], *given[1])):
        raise UsageError(
            f"shard({getattr(function, '__name__', function)}) says nothing: give in_strategy a tuple for a tensor, "
            "such as ((2, 4), (4, 1)); None leaves a tensor open"
        )
    return Sharded(function, *given)


def _strategies(name: str, given: Sequence[Strategy | None]) -> list[Wish | None]:
    if not isinstance(given, tuple | list) or any(not isinstance(item, tuple | list | None) for item in given):
        raise UsageError(f"{name} is {given!r}; expected a tuple of tuples such as ((2, 4), (4, 1)), one a tensor")
    for item in given:
        if item is not None and any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in item):
            raise UsageError(f"{name} has {item!r}; expected whole numbers of at least 1, one a dim")
    return [None if item is None else Wish(pieces=tuple(item), line=_caller()) for item in given]


def shard_op(
    function: Callable[..., Any],
    mesh: Mesh,
    inputs: Sequence[Sequence[Placement] | None] = (),
    outputs: Sequence[Sequence[Placement] | None] = (),
) -> Sharded:
    """The function, marked: how each of its tensors lies on the mesh. None leaves a tensor open.

    Without inputs and outputs, a module: it and all that runs after it are a stage, on the ranks of `mesh`, such as
    mesh.at(pp=1)."""
    if not inputs and not outputs:
        if not isinstance(function, nn.Module):
            raise UsageError(
                f"shard_op({getattr(function, '__name__', function)}) says nothing of inputs or outputs; give "
                "placements, or a module that begins a stage"
            )
        return Sharded(function, (), (), Wish(mesh, line=_caller()))

    def wishes(given: Sequence[Sequence[Placement] | None]) -> list[Wish | None]:
        for placements in given:
            if placements is not None:
                checked(placements, mesh, 16)  # the tensors' own dims are checked when they come
        return [None if p is None else Wish(mesh, tuple(p), line=_caller()) for p in given]

    return Sharded(function, wishes(inputs), wishes(outputs))


# ---- while a model is traced ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """A wish that is on its way into the graph. lies: for the tensor itself; otherwise for those that use it."""

    wish: Wish
    lies: bool = False
    op: int = -1


class Recorder:
    """The notes of one trace, by their number in the graph's marker ops."""

    def __init__(self, model: nn.Module) -> None:
        self.notes: list[Note] = []
        self.wishes: dict[str, Wish] = {}  # for parameters, made while the model ran
        self.stages: dict[str, Wish] = {}  # for modules that begin a stage
        self.called: set[int] = set()
        self._model = model
        self._ops = 0

    def is_parameter(self, tensor: torch.Tensor, wish: Wish) -> bool:
        """A mark on a parameter holds for the parameter, whether or not the model uses what the mark returned."""
        name = next((name for name, parameter in self._model.named_parameters() if parameter is tensor), None)
        if name is not None:
            self.wishes[name] = wish
        return name is not None

    def note_stage(self, module: Any, wish: Wish) -> None:
        name = next((name for name, known in self._model.named_modules() if known is module), None)
        if name is None:
            raise UsageError(f"a stage is marked at {wish.line} with a module that is none of the model's")
        self.stages[name] = wish

    def next_op(self) -> int:
        self._ops += 1
        return self._ops


_recorders: list[Recorder] = []


def recorder() -> Recorder | None:
    return _recorders[-1] if _recorders else None


def _require_none_dropped() -> None:
    dropped = list(dict.fromkeys(_dropped))
    _dropped.clear()
    if dropped:
        raise UsageError(
            f"{'; '.join(dropped)}: what uni.shard or uni.shard_op returned was thrown away and never called, so the "
            "mark would not count; keep it and call it in the function's place"
        )


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Marks made in the block go into the graph; UsageError where some would not count."""
    _require_none_dropped()
    recording = Recorder(model)
    _recorders.append(recording)
    try:
        yield recording
    finally:
        _recorders.pop()
    _require_none_dropped()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            for kept in pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]:
                if isinstance(kept, Sharded) and id(kept) not in recording.called:
                    where = f"{name}.{attribute}".lstrip(".")
                    raise UsageError(
                        f"{where} ({kept!r}) was not called, so its marks would not count; call it, or remove it"
                    )


@contextlib.contextmanager
def dry_run(copy: nn.Module) -> Iterator[Recorder]:
    """Records the marks of a copy of a model that runs in the block, if it can; the copy is thrown away, and its marks
    need not have counted."""
    recording = Recorder(copy)
    _recorders.append(recording)
    try:
        yield recording
    except UsageError:
        raise
    except Exception:
        recording.stages.clear()
    finally:
        _recorders.pop()
        for module in copy.modules():
            for value in vars(module).values():
                if isinstance(value, Sharded):
                    value.called = True


@torch.library.custom_op("unisono::mark", mutates_args=())
def _mark_op(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.clone()


@_mark_op.register_fake
def _(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(tensor)


MARKER = torch.ops.unisono.mark.default


def _noted(tensor: torch.Tensor, note: Note) -> torch.Tensor:
    recording = recorder()
    assert recording is not None
    recording.notes.append(note)
    return MARKER(tensor, len(recording.notes) - 1)


def _caller() -> str:
    """The line outside unisono that is running."""
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
