"""Selective recomputation: a region's cheap activations are dropped, and computed again when the backward needs them.

While a block runs, a dispatch mode notes how cheap ops (elementwise, casts, copies, norms) compute their results, and
autograd's hooks which tensors are saved. When the block is done, `choose` decides which of these are dropped
(plan/profile/selective.py). For a dropped tensor autograd holds a handle; the backward unpacks it by running the noted
ops again, from tensors that are kept:

    x --float--> xf --pow, mean, rsqrt--> r         saved: xf, r, n, y        kept: x, r, n
                 xf * r --bfloat16--> n             dropped: xf = x.float(), y = weight * n
                 weight * n ------------> y

Single ops run again, and no code of the model: random numbers, collectives, hooks and buffers are not repeated, and
the backward may be done in halves, twice or with create_graph=True. What is computed again is equal bit for bit: the
same kernels run on the same values.

Ops inside a custom autograd.Function are not repeated, since kernels of its own may write to their results. Tensors
that are changed in place, also through `.data`, are known by the ops that write to them, and those that a collective
writes to by its record; what NumPy writes to the memory of a tensor is not seen. Hooks for saved tensors around the
block (torch.autograd.graph.save_on_cpu) get what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from unisono.comm import traffic
from unisono.errors import UsageError
from unisono.plan.profile.selective import Value, choose, is_cast, is_cheap, recomputed_with
from unisono.torch_compat import (
    TorchDispatchMode,
    may_be_compiled,
    no_autocast,
    no_torch_function,
    not_compiled,
    saved_tensors_hooks,
    without_wrapper,
)

_PLAIN = (torch.Tensor, nn.Parameter)
_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Learned:
    """What the first forward of a region has found: which ops and which saved tensors are worth a look.

    Only time depends on it. What is dropped, and how it is computed again, is noted anew in every forward; a forward
    whose ops are others than those of the last is looked at whole, and learned from.
    """

    def __init__(self) -> None:
        self.ops: list[_Seen] = []
        self.is_linked: list[bool] = []  # of each saved tensor, in order

    def learn(self, ops: list[Any], saved: Iterable[_Tensor | None], made: Iterable[_Tensor]) -> None:
        dropped = [value for value in made if value.is_dropped]
        needed = {each.op for value in dropped for each in recomputed_with(value) if isinstance(each, _Tensor)}
        needed |= {value.repeats.op for value in dropped if isinstance(value.repeats, _Tensor)}
        self.ops = [
            _Seen(op, number in needed or _role(op) in _WRITING, without_wrapper(op)) for number, op in enumerate(ops)
        ]
        self.is_linked = [value is not None and (value.is_dropped or value.is_source) for value in saved]


class _Seen(NamedTuple):
    """An op of the forward that was learned from."""

    op: Any
    is_noted: bool
    call: Callable[..., Any]


_NONE = _Seen(None, True, print)  # after the last


def run_selectively(learned: Learned, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), of whose saved tensors the cheap ones are dropped."""
    region = (_RegionAmidCompiled if may_be_compiled() else _Region)(saved_tensors_hooks(), learned)
    hooks = torch.autograd.graph.saved_tensors_hooks(region.pack, _unpack)
    with hooks, traffic.counted(region.see_collective), region:
        return function(*args, **kwargs)


class _View(NamedTuple):
    """A tensor by its memory."""

    value: _Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any

    @classmethod
    def of(cls, value: _Tensor, tensor: torch.Tensor) -> _View:
        return cls(value, tensor.size(), tensor.stride(), tensor.storage_offset())

    def get(self) -> torch.Tensor:
        base = self.value.get()
        if base.storage_offset() == self.offset and base.size() == self.size and base.stride() == self.stride:
            return base
        return base.as_strided(self.size, self.stride, self.offset)


class _Tensor(Value):
    """The memory of a tensor of the region, and the op that computes it again."""

    __slots__ = (
        "_args",
        "_func",
        "_index",
        "_kwargs",
        "dtype",
        "op",
        "packed",
        "pending",
        "storage",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, recipe: Any = None) -> None:
        """recipe: the op, its arguments with views instead of tensors, the index of this result of it, the memory of
        its tensors, the bytes that it moves, and what it repeats."""
        if recipe is None:
            super().__init__(storage.nbytes())
            self._func: Any = None
            self._args: Sequence[Any] = ()
            self._kwargs: dict[str, Any] = {}
            self._index: int | None = None
            self.tensor: torch.Tensor | None = tensor
        else:
            self._func, self._args, self._kwargs, self._index, inputs, moved, repeats = recipe
            super().__init__(storage.nbytes(), inputs, moved, repeats=repeats)
            self.tensor = None
        self.op = -1  # its number among the region's
        self.storage = StorageWeakRef(storage)  # so that no other storage is taken for this one
        self.version, self.dtype = tensor._version, tensor.dtype
        self.packed: _Packed | None = None  # instead of the tensor, where other hooks are active
        self.pending = 0  # handles that have not been unpacked

    def settle(self, hooks: _Hooks | None) -> None:
        """At the end of the region: keep the tensor or the way to compute it, not both."""
        if not self.is_kept:
            self.tensor = None
            return
        assert self.tensor is not None
        if not self.tensor.is_leaf:
            self.tensor = self.tensor.detach()  # without the graph, which holds this
        self._func, self._args, self._kwargs, self.inputs, self.repeats = None, (), {}, (), None
        if hooks is not None:  # all of the memory, of which views are made
            flat = self.tensor.detach().as_strided((self.nbytes // self.dtype.itemsize,), (1,), 0)
            self.packed, self.tensor = _Packed(hooks[0](flat), hooks[1]), None

    def get(self) -> torch.Tensor:
        if self.tensor is not None:
            if self._func is None and self.tensor._version != self.version:
                raise _changed_in_place(self.tensor)
            return self.tensor
        if self.packed is not None:
            return self.packed.unpack()
        assert self._func is not None
        args = [_filled(each) for each in self._args]
        kwargs = {name: _filled(each) for name, each in self._kwargs.items()}
        with torch.no_grad(), no_autocast():
            made = self._func(*args, **kwargs)
        found: torch.Tensor = made if self._index is None else made[self._index]
        if self.pending:
            self.tensor = found  # until the last handle is unpacked
        return found

    def unpacked(self) -> None:
        self.pending -= 1
        if self.pending <= 0 and self.is_dropped:
            self.tensor = None


def _the_same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Packed(NamedTuple):
    """What other hooks for saved tensors hold."""

    held: Any
    by: Callable[[Any], torch.Tensor]

    def unpack(self) -> torch.Tensor:
        return self.by(self.held)


class _Handle:
    """What autograd holds of a saved tensor."""

    __slots__ = ("_is_pending", "view")

    def __init__(self, view: _View) -> None:
        self.view = view
        self._is_pending = True
        view.value.pending += 1

    def unpack(self) -> torch.Tensor:
        with no_torch_function():
            found = self.view.get()
        self.done()
        return found

    def done(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self.view.value.unpacked()

    __del__ = done


class _Kept:
    """A saved tensor that has nothing to do with what is dropped."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise _changed_in_place(self.tensor)
        return self.tensor


def _changed_in_place(tensor: torch.Tensor) -> UsageError:
    return UsageError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after the block that "
        "uses it; use recompute=none, or an op that returns a new tensor"
    )


def _unpack(saved: Any) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.unpack()


class _Region(TorchDispatchMode):
    """Notes the cheap ops of a forward and what is saved, and decides at its end."""

    def __init__(self, hooks: _Hooks | None, learned: Learned) -> None:
        super().__init__()
        self._hooks = hooks
        self._learned = learned
        self._is_known = bool(learned.ops) and hooks is None  # so far, the ops are those that were learned from
        self._expected = iter(learned.ops)
        self._ops: list[Any] = []
        self._saved: list[_Tensor | None] = []  # by each tensor that autograd has saved, in order
        self._memory: dict[int, _Tensor] = {}  # by the address of the storage
        self._made: list[_Tensor] = []  # in order
        self._casts: dict[tuple[Any, ...], _Tensor] = {}  # by what was cast, and to what

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds, to keep away from it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled module in the region runs compiled, and saves what its compiler has chosen."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._ops.append(func)
        if self._is_known:
            expected, is_noted, call = next(self._expected, _NONE)
            if expected is not func:
                self._is_known = False
            elif not is_noted:
                return call(*args, **kwargs)
        role = _role(func)
        if role is _Role.COLLECTIVE:
            for leaf in tree_leaves(args):
                self._change(leaf)
        result = func(*args, **kwargs)
        if role is _Role.WRITES:
            self._change_written(func, args, kwargs)
        elif role is _Role.CHEAP and torch.is_grad_enabled():
            with no_torch_function():
                self._note(len(self._ops) - 1, func, args, kwargs, result)
        return result

    def _note(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = [leaf for value in (*args, *kwargs.values()) for leaf in _tensors_in(value)]
        results = list(_tensors_in(result))
        if not results or not all(map(_is_plain, (*given, *results))):
            return
        storages = [tensor.untyped_storage() for tensor in results]
        if {storage._cdata for storage in storages} & {tensor.untyped_storage()._cdata for tensor in given}:
            return  # a view
        if any(tensor.device != results[0].device and tensor.dim() for tensor in given):
            return  # a copy between devices
        inputs = [self._of(tensor) for tensor in given]
        largest = max(storage.nbytes() for storage in storages)
        for tensor, value in zip(given, inputs, strict=True):
            if value.nbytes < largest and value.tensor is None:
                value.tensor = tensor  # a source, perhaps
        viewed = [_View.of(value, tensor) for tensor, value in zip(given, inputs, strict=True)]
        views = iter(viewed)
        stored_args = tuple(_replaced(value, views) for value in args)
        stored_kwargs = {name: _replaced(value, views) for name, value in kwargs.items()}
        moved = sum(tensor.numel() * tensor.itemsize for tensor in (*given, *results))
        for index, (tensor, storage) in enumerate(zip(results, storages, strict=True)):
            place = index if isinstance(result, tuple | list) else None
            earlier = self._casts.get((*viewed, *kwargs.items())) if is_cast(func) else None
            if earlier is None:
                made = _Tensor(tensor, storage, (func, stored_args, stored_kwargs, place, inputs, moved, None))
            else:
                view = _View(earlier, tensor.size(), tensor.stride(), tensor.storage_offset())
                made = _Tensor(tensor, storage, (_the_same, (view,), {}, None, (), 0, earlier))
            made.op = number
            if is_cast(func):
                self._casts.setdefault((*viewed, *kwargs.items()), made)
            self._memory[storage._cdata] = made
            self._made.append(made)

    def see_collective(self, record: traffic.CommRecord) -> None:
        """Collectives write to a tensor without counting it as changed."""
        if record.op in ("all_reduce", "broadcast", "reduce"):
            self._change(record.tensor)

    def _change_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What an op in place has written to; `x.data` has a version counter of its own, and x does not count it."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors_in(args[index] if index < len(args) else kwargs.get(argument.name)):
                    self._change(tensor)

    def _change(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and _is_plain(tensor):
            known = self._memory.pop(tensor.untyped_storage()._cdata, None)
            if known is not None:
                known.is_changed = True

    def _of(self, tensor: torch.Tensor) -> _Tensor:
        """The memory of a tensor as it is now."""
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is not None and known.version == tensor._version and known.dtype is tensor.dtype:
            return known
        if known is not None and known.version != tensor._version:
            known.is_changed = True
        found = self._memory[storage._cdata] = _Tensor(tensor, storage)
        self._made.append(found)
        return found

    def pack(self, tensor: torch.Tensor) -> Any:
        number = len(self._saved)
        self._saved.append(None)
        if self._is_known and number < len(self._learned.is_linked) and not self._learned.is_linked[number]:
            return _Kept(tensor if tensor.is_leaf else tensor.detach())  # without the graph, which holds this
        with no_torch_function():
            if not _is_plain(tensor):
                kept = tensor if tensor.is_leaf else tensor.detach()
                return kept if self._hooks is None else _Packed(self._hooks[0](kept), self._hooks[1])
            value = self._saved[number] = self._of(tensor)
            value.is_saved = True
            if value.tensor is None:
                value.tensor = tensor
            return _Handle(_View.of(value, tensor))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for value in self._made:
            if value.tensor is not None and value.tensor._version != value.version:
                value.is_changed = True
        if error is None:
            choose(self._made)
            if not self._is_known or len(self._ops) != len(self._learned.ops):
                self._learned.learn(self._ops, self._saved, self._made)
        for value in self._made:
            value.settle(self._hooks)
        self._memory, self._made, self._saved, self._casts = {}, [], [], {}


class _Role(Enum):
    """What an op means to a region."""

    CHEAP = 1  # it may run again
    WRITES = 2
    COLLECTIVE = 3
    OTHER = 4


_WRITING = (_Role.WRITES, _Role.COLLECTIVE)


@cache
def _role(op: Any) -> _Role:
    if getattr(op, "namespace", "") == "c10d":
        return _Role.COLLECTIVE
    if op._schema.is_mutable:
        return _Role.WRITES
    return _Role.CHEAP if is_cheap(op) else _Role.OTHER


class _RegionAmidCompiled(_Region):
    """The same where modules may be compiled: torch's compiler does not look into these functions."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)

    pack = not_compiled(_Region.pack)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is known by its memory, shape and strides alone."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _tensors_in(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return ()


def _replaced(value: Any, views: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return next(views)
    if isinstance(value, list | tuple):
        return [next(views) if isinstance(each, torch.Tensor) else each for each in value]
    return value


def _filled(value: Any) -> Any:
    if isinstance(value, _View):
        return value.get()
    if isinstance(value, list):
        return [each.get() if isinstance(each, _View) else each for each in value]
    return value
