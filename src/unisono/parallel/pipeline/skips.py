"""Skip connections: tensors that a model carries round its blocks, in its own variables.

    x = x + block(x)                     the sum is outside the block
    skips.append(x); ...; cat([x, skips.pop()])       a U-Net

Every stage runs the model's full forward, so all make the same calls of torch functions outside the blocks. A result
of such a call is therefore known to all stages by its label: the expression in the caller's code, how often it has
been there before, and the index in what was returned. (Hooks of others, which may not be there in every forward, are
other code, and do not change the labels of the model's.) Blocks are known by their numbers.

The parameter usage of a model notes which labels are read across each boundary (`Reads`); a stage sends their tensors
along with the arguments of the next block, and the next one reads them instead of its own, which have shapes only
(`Calls`).

Python may also see values (`x.mean().item()`, `if (x > 0).any()`), and every later stage runs the code that depends on
them. So where the tensor depends on parameters, a copy of it as it was read travels to all stages after it, under the
label of the call that read it.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from unisono.errors import UsageError
from unisono.parallel.checks.value_reads import reads_values
from unisono.parallel.pipeline.dependence import Dependence, storages_of

Span = tuple[int, ...]  # of an expression: first and last line, first and last column
Call = tuple[str, int, Span, int]  # file, first line of the function, where in it, how often; or ("", block, (), 0)
Label = tuple[Call, int]  # a call, and the index in its flattened result; below 0, of an argument whose value it reads

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_ABOUT = frozenset(
    ("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "ndimension", "get_device")
)  # what asks for the form of a tensor, and for none of its numbers
_WRITING = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
     "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
)  # fmt: skip


@dataclass(frozen=True)
class Skips:
    """What a forward does round its blocks."""

    across: tuple[frozenset[Label], ...] = ()  # for each block: what a stage that begins there must be sent beside it
    writes: bool = False  # whether tensors are written to outside the blocks

    def into(self, block: int) -> frozenset[Label]:
        return self.across[block] if block < len(self.across) else frozenset()


class Calls(TorchFunctionMode):
    """Counts the calls of torch functions outside the blocks of one forward, and keeps the results that are wanted."""

    def __init__(self, wanted: frozenset[Label]) -> None:
        super().__init__()
        self.made: dict[Label, torch.Tensor] = {}
        self.received: dict[Label, torch.Tensor] = {}  # of stages before
        self.replaced: dict[int, torch.Tensor] = {}  # id of a tensor of this stage -> what is read instead
        self.kept: list[Any] = []  # those tensors: a recomputation runs under this mode when the forward is long over
        self.is_inside = False  # a block
        self.require_value: Callable[[torch.Tensor], None] = lambda tensor: None  # before Python sees it
        self._wanted = wanted
        self._counts: Counter[tuple[str, int, Span]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.require_forward(func)
        are_values_read = reads_values(func, args, kwargs)
        if are_values_read:
            self.use((args, kwargs))
        if self.is_inside:
            return func(*args, **kwargs)
        if self.replaced:
            args, kwargs = self.real((tuple(args), kwargs))
        self.read(func, (args, kwargs))
        expression = _expression(sys._getframe(1))
        self._counts[expression] += 1
        call = (*expression, self._counts[expression])
        if are_values_read:
            args, kwargs = self.with_values(call, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        self.label(call, result)
        return result

    def with_values(self, call: Call, arguments: Any) -> Any:
        """The arguments of a call that reads values, with those that stages before have sent."""
        leaves, spec = tree_flatten(arguments)
        for index, leaf in enumerate(leaves):
            label = (call, -1 - index)
            if isinstance(leaf, torch.Tensor) and label in self.received:
                self.made[label] = leaves[index] = self.received[label]
            elif isinstance(leaf, torch.Tensor) and label in self._wanted:
                self.made[label] = _copy(leaf)  # to be sent; the call itself is given the tensor, with its gradient
            elif isinstance(leaf, torch.Tensor):
                self.require_value(leaf)
        return tree_unflatten(leaves, spec)

    def label_block(self, number: int, result: Any) -> None:
        self.label(("", number, (), 0), result)

    def require_forward(self, func: Any) -> None:
        """UsageError where a call computes gradients that a pipeline cannot."""

    def read(self, func: Any, tree: Any) -> None:
        """A call reads these."""

    def use(self, tree: Any) -> None:
        """Python sees the values of these, inside a block or outside; torch need not dispatch an operation for it."""

    def label(self, call: Call, result: Any) -> None:
        """Give the tensors of a result their labels."""
        for index, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor):
                self.keep((call, index), leaf)

    def keep(self, label: Label, tensor: torch.Tensor) -> None:
        if label in self._wanted:
            self.made[label] = tensor

    def real(self, tree: Any) -> Any:
        """The tree with what was received instead of this stage's own."""
        return tree_map(lambda leaf: self.replaced.get(id(leaf), leaf), tree) if self.replaced else tree


@dataclass
class _Seen:
    made: int  # the segment
    read: int = -1  # the last one that reads it outside blocks
    given: int = -1  # the last block that is given it


def _expression(frame: FrameType) -> tuple[str, int, Span]:
    """Where the code that is not torch's is, on whose behalf torch is called."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_TORCH):
        caller = caller.f_back
    caller = caller or frame
    return caller.f_code.co_filename, caller.f_code.co_firstlineno, _span(caller.f_code, caller.f_lasti)


@functools.lru_cache(maxsize=4096)
def _span(code: CodeType, instruction: int) -> Span:
    """Of the expression that an instruction is part of. The interpreter may, once a function is warm, make a call by
    another one of the expression's instructions."""
    span = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,))
    return (instruction,) if None in span else tuple(each for each in span if each is not None)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


_TORCH = os.path.dirname(torch.__file__)


class Reads(Calls):
    """Of a full forward: the labels that are read in later segments than they were made in."""

    def __init__(self, flow: Dependence, touched: Callable[[StorageWeakRef], None]) -> None:
        """`flow`: what depends on parameters. `touched` is called with memory whose values are read."""
        super().__init__(frozenset())
        self.segment = 0
        self._flow, self._touched = flow, touched
        self._writes = False
        self._labels: dict[int, tuple[weakref.ref[torch.Tensor], Label]] = {}
        self._seen: dict[Label, _Seen] = {}

    def keep(self, label: Label, tensor: torch.Tensor) -> None:
        known = self._label_of(tensor)
        if known is None:
            self._labels[id(tensor)] = (weakref.ref(tensor), label)
            self._seen[label] = _Seen(self.segment)

    def require_forward(self, func: Any) -> None:
        if func in _GRADIENTS and not (self.is_inside and torch.is_grad_enabled()):
            raise UsageError(
                "the model takes gradients in its forward pass (torch.autograd.grad), which a pipeline cannot: they "
                "lead through blocks of other stages; take them inside a block, within torch.enable_grad(), or use pp=1"
            )

    def read(self, func: Any, tree: Any) -> None:
        name = getattr(func, "__name__", "")
        if name not in _ABOUT and name != "__get__":
            self.read_tensors(tree)
        self._writes |= name in _WRITING or (name.endswith("_") and not name.endswith("__"))

    def use(self, tree: Any) -> None:
        for storage in storages_of(tree):
            self._touched(storage)

    def with_values(self, call: Call, arguments: Any) -> Any:
        for index, leaf in enumerate(tree_leaves(arguments)):
            if isinstance(leaf, torch.Tensor) and leaf in self._flow:
                self._seen[call, -1 - index] = _Seen(self.segment, read=sys.maxsize)
        return arguments

    def read_tensors(self, tree: Any) -> None:
        for label in map(self._label_of, tree_leaves(tree)):
            if label is not None:
                self._seen[label].read = self.segment

    def enter_block(self, number: int, arguments: Any) -> None:
        self.segment, self.is_inside = number, True
        for label in map(self._label_of, tree_leaves(arguments)):
            if label is not None:
                self._seen[label].given = number

    def leave_block(self, result: Any) -> None:
        self.is_inside = False
        self.label_block(self.segment, result)

    def skips(self, blocks: int) -> Skips:
        """Of a forward over so many blocks."""

        def into(block: int) -> frozenset[Label]:
            seen = self._seen.items()
            return frozenset(
                label for label, each in seen if each.made < block and (each.read >= block or each.given > block)
            )

        return Skips(tuple(map(into, range(blocks))), self._writes)

    def _label_of(self, leaf: Any) -> Label | None:
        refer, label = self._labels.get(id(leaf), (None, None))
        return label if refer is not None and refer() is leaf else None
