"""The part of a forward that depends on the labels, recorded and replayed (see model_loss.py).

While a forward is recorded, labels are meta tensors: they have shape and dtype, and every function of them gives one
more such tensor and a step of the program. Functions of other tensors run as always; those that a step takes are its
`leaves`. A step keeps the Python numbers that it was called with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    tree_leaves,
    tree_map,
)

from unisono.errors import UsageError

_NODE = "_unisono_step"
_DEVICES = {torch.Tensor.cpu, torch.Tensor.cuda}
_READS = {  # give a Python value of the tensor's numbers
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.__bool__,
    torch.Tensor.__array__,
    torch.equal,
    torch.Tensor.equal,
    torch.allclose,
    torch.Tensor.allclose,
    torch.Tensor.__contains__,
}
_device_of = torch.Tensor.device.__get__
_is_meta = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_is_cuda = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LossRef:
    """A tensor of a program: label, leaf or outcome of a step, by number; `item` of an outcome of several."""

    kind: str
    index: int
    item: int | None = None


@dataclass(frozen=True)
class LossStep:
    function: Callable[..., Any]
    args: Any  # with a LossRef instead of every tensor
    kwargs: Any

    @property
    def form(self) -> tuple[Any, ...]:
        """What is the same wherever the model runs."""
        plain = tree_map(lambda leaf: None if isinstance(leaf, torch.device) else leaf, (self.args, self.kwargs))
        return self.function, plain


class LossValues:
    """The tensors of a program: what each LossRef stands for."""

    def __init__(
        self, steps: Sequence[LossStep], labels: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> None:
        if any(_writes(step.function) for step in steps):
            labels, leaves = [label.clone() for label in labels], [leaf.clone() for leaf in leaves]
        found: list[Any] = []
        self._known = {"label": labels, "leaf": leaves, "step": found}
        for step in steps:
            args, kwargs = self.of((step.args, step.kwargs))
            found.append(step.function(*args, **kwargs))

    def of(self, tree: Any) -> Any:
        """The tree with a tensor instead of every LossRef."""
        return tree_map(lambda leaf: self._of(leaf) if isinstance(leaf, LossRef) else leaf, tree)

    def _of(self, ref: LossRef) -> Any:
        value = self._known[ref.kind][ref.index]
        return value if ref.item is None else value[ref.item]


def _writes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )


class LossRecorder(TorchFunctionMode):
    """While active, functions of the labels' stand-ins are recorded, and not computed."""

    def __init__(self, labels: Sequence[torch.Tensor], shown: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`shown` gives the part of a label that the model has outputs for."""
        super().__init__()
        self._labels = list(labels)
        self.steps: list[LossStep] = []
        self.leaves: list[torch.Tensor] = []
        self._known: dict[int, LossRef] = {}  # by id of a leaf
        self.stand_ins = [_noted(_form(shown(label)), LossRef("label", number)) for number, label in enumerate(labels)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((tuple(args), kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(ref_of, tensors)):
            return func(*args, **kwargs)
        if func in _READS:
            raise UsageError(
                f"the model reads values of its labels in Python ({func.__name__}), which cannot be known for a full "
                "batch from a part of it; compute the loss from the model's outputs: loss(outputs, targets)"
            )
        if func in (_device_of, _is_meta, _is_cuda):
            return func(self._labels[0])
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            return func(*self.real(tuple(args)), **self.real(kwargs))
        return self._recorded(func, tuple(args), kwargs)

    def _recorded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args and _writes(func) and isinstance(args[0], torch.Tensor) else None
        if target is not None and ref_of(target) is None:
            _noted(target, self._leaf(target.detach().clone()))
        step = LossStep(func, *tree_map(self._ref, (args, kwargs)))
        form_args, form_kwargs = tree_map(_on_meta, (args, kwargs))
        if func in _DEVICES:
            outcome: Any = form_args[0].detach()
        else:
            outcome = func(*form_args, **form_kwargs)
        if target is not None:
            self.steps.append(step)
            return target
        if isinstance(outcome, torch.Tensor):
            self.steps.append(step)
            return _noted(_apart(outcome, form_args), LossRef("step", len(self.steps) - 1))
        if isinstance(outcome, tuple | list) and any(isinstance(each, torch.Tensor) for each in outcome):
            self.steps.append(step)
            number = len(self.steps) - 1
            for item, each in enumerate(outcome):
                _noted(each, LossRef("step", number, item))
        return outcome

    def real(self, tree: Any) -> Any:
        """The same tree, with what the recorded tensors in it would be."""
        refs = with_refs(tree)
        if not any(isinstance(leaf, LossRef) for leaf in tree_leaves(refs)):
            return tree
        return LossValues(self.steps, self._labels, self.leaves).of(refs)

    def _ref(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return ref_of(leaf) or self._leaf(leaf)

    def _leaf(self, tensor: torch.Tensor) -> LossRef:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = LossRef("leaf", len(self.leaves))
            self.leaves.append(tensor)
        return self._known[id(tensor)]

    @contextlib.contextmanager
    def layers_given_values(self, model: nn.Module) -> Iterator[None]:
        """In the block, layers that have parameters of their own get the labels themselves."""

        def enter(module: nn.Module, args: Any) -> Any:
            return self.real(args) if module is not model and module._parameters else None

        hook = register_module_forward_pre_hook(enter)
        try:
            yield
        finally:
            hook.remove()


@dataclass
class LossProgram:
    """What some of the recorded tensors, with a LossRef each in `outputs`, are computed by."""

    steps: list[LossStep]
    leaves: list[torch.Tensor]
    outputs: Any

    @classmethod
    def for_outputs(cls, recorder: LossRecorder, outputs: Any) -> LossProgram:
        """Of all that was recorded, what the outputs need."""
        steps, outputs = recorder.steps, with_refs(outputs)
        needed = _needed(steps, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, LossRef)])
        number_of = {
            "step": {old: new for new, old in enumerate(sorted(ref.index for ref in needed if ref.kind == "step"))},
            "leaf": {old: new for new, old in enumerate(sorted({ref.index for ref in needed if ref.kind == "leaf"}))},
        }

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, LossRef) or leaf.kind == "label":
                return leaf
            return replace(leaf, index=number_of[leaf.kind][leaf.index])

        kept = [steps[old] for old in number_of["step"]]
        return cls(
            [LossStep(step.function, *tree_map(moved, (step.args, step.kwargs))) for step in kept],
            [recorder.leaves[old] for old in number_of["leaf"]],
            tree_map(moved, outputs),
        )


def _needed(steps: Sequence[LossStep], outputs: Sequence[LossRef]) -> set[LossRef]:
    """The tensors that the outputs are computed from, and the steps that write to the memory of one of them."""
    needed: set[LossRef] = set()
    pending = list(outputs)
    while pending:
        ref = replace(pending.pop(), item=None)
        if ref not in needed:
            needed.add(ref)
            pending += _refs_in(steps[ref.index]) if ref.kind == "step" else []
        if not pending:
            memory = {_memory(steps, each) for each in needed}
            for number, step in enumerate(steps):
                writer = LossRef("step", number)
                if _writes(step.function) and writer not in needed and _memory(steps, step.args[0]) in memory:
                    pending.append(writer)
    return needed


def _memory(steps: Sequence[LossStep], ref: LossRef) -> LossRef:
    """The tensor whose memory this one may be a view of."""
    ref = replace(ref, item=None)
    while ref.kind == "step":
        step = steps[ref.index]
        name = getattr(step.function, "__name__", "")
        first = step.args[0] if step.args else None
        if not isinstance(first, LossRef) or name.startswith("new_") or name.endswith("_like") or name == "clone":
            return ref
        ref = replace(first, item=None)
    return ref


def _refs_in(step: LossStep) -> list[LossRef]:
    return [leaf for leaf in tree_leaves((step.args, step.kwargs)) if isinstance(leaf, LossRef)]


def ref_of(tensor: torch.Tensor) -> LossRef | None:
    return getattr(tensor, _NODE, None)


def with_refs(tree: Any) -> Any:
    """The tree with a LossRef instead of every recorded tensor."""
    return tree_map(lambda leaf: (ref_of(leaf) or leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _noted(tensor: torch.Tensor, ref: LossRef) -> torch.Tensor:
    setattr(tensor, _NODE, ref)
    return tensor


def _apart(outcome: torch.Tensor, given: Any) -> torch.Tensor:
    """The outcome as an object of its own: contiguous() and to() may hand back what they were given."""
    return outcome.view_as(outcome) if any(outcome is leaf for leaf in tree_leaves(given)) else outcome


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape (of the full tensor, for logits in shards), dtype and need of a gradient."""
    with torch.no_grad():
        if type(tensor) in (torch.Tensor, nn.Parameter):
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        else:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.is_meta else _form(leaf)
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf
