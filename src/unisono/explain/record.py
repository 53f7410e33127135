"""A recorder: the torch functions and collectives of one training step of a rank, in order.

Ops are recorded as calls of torch functions (`F.linear`, `Tensor.view`), not as the aten ops below them, each with the
module that made the call. Collectives come from the communicators (comm/traffic.py). In the backward, a collective is
attributed to the forward op whose autograd node issued it, or to the parameter whose gradient was accumulated.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.comm import traffic
from unisono.parallel.loss.loss import GlobalLoss
from unisono.parallel.pipeline.message import is_placeholder
from unisono.parallel.pipeline.runtime import Execution
from unisono.parallel.trainer import Trainer
from unisono.plan.schedules.action import Action
from unisono.torch_compat import MODULE_CALL, autograd_node, in_backward, no_torch_function_subclass
from unisono.torch_patches import on_patched_call, patched

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
LOSS = "loss"  # the path of what is computed outside of every module
_UPDATE = (Trainer.update.__code__, torch.optim.Optimizer.step.__code__)
_TRANSFERS = {
    Execution._send_forward.__code__: FORWARD,
    Execution._receive_forward.__code__: FORWARD,
    Execution._send_backward.__code__: BACKWARD,
    Execution._receive_backward.__code__: BACKWARD,
}
# In which a loss is tried on made-up outputs, to see what it counts.
_TRIALS = tuple(each.__code__ for each in (GlobalLoss.prepare, GlobalLoss.learn_shift, GlobalLoss._prove))
_MESSAGES = {"send", "isend", "recv", "irecv"}
_BACKWARD_ACTIONS = ("B", "I", "W")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_EXPLAIN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_UNISONO = os.path.dirname(os.path.dirname(_EXPLAIN)) + os.sep
_LAYERS = os.path.join(_UNISONO, "nn.py")
_COMM = os.path.dirname(os.path.abspath(traffic.__file__)) + os.sep
_SKIPPED = {
    "detach",
    "requires_grad_",
    "size",
    "dim",
    "numel",
    "stride",
    "is_floating_point",
    "data",
    "grad",
    "backward",
}
_OPERATORS = {"__getitem__": "getitem", "__setitem__": "setitem"}


@dataclass(frozen=True)
class TensorType:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordedCall:
    """One call of a torch function in the forward of the first microbatch."""

    name: str  # of its result: "linear_3"
    function: str
    arguments: tuple[str, ...]  # names of tensors, and other values; without those that are the default
    tensors: tuple[bool, ...]  # which arguments are tensors, or hold some
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    path: str  # of the innermost module
    nth: int  # how many calls of this function the module made before
    source: str  # file.py:42, of the model's code
    phase: str
    is_internal: bool  # called by unisono's own code, not by the model's


@dataclass(frozen=True)
class Communication:
    """One collective, or one message to or from a rank."""

    kind: str
    ranks: tuple[int, ...]
    tensor: TensorType | None
    phase: str
    path: str
    caller: str  # unisono's module that issued it: "clip"
    op: int | None  # forward: how many ops were recorded before it; backward: the op whose gradient needs it
    microbatch: int = 0
    parameter: str = ""  # backward: the parameter whose gradient has just been accumulated
    twin: int | None = None  # backward: the forward communication whose autograd function issued it; -1 if not of the
    # first microbatch
    near: str | None = None  # backward: op is the number of ops before, and this the module of the autograd function


@dataclass(frozen=True)
class RecordedPart:
    """The begin of a microbatch, or of a pipeline's action on one."""

    microbatch: int
    action: Action | None


@dataclass
class RankRecord:
    """Ops are those of the first microbatch's forward, and of the update."""

    events: list[RecordedCall | Communication | RecordedPart] = field(default_factory=list)
    recomputed: set[str] = field(default_factory=set)  # names of ops that run again in the backward

    @property
    def ops(self) -> list[RecordedCall]:
        return [each for each in self.events if isinstance(each, RecordedCall)]

    @property
    def communication(self) -> list[Communication]:
        return [each for each in self.events if isinstance(each, Communication)]

    @property
    def order(self) -> str:
        """The actions of a pipeline's rank: F forward, B backward, I and W its halves, with stage and microbatch."""
        actions = [each.action for each in self.events if isinstance(each, RecordedPart)]
        return " ".join(str(action) for action in actions if action is not None)


class RankRecorder(TorchFunctionMode):
    """Records in its `with` block; `step` records a step of a trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.record = RankRecord()
        self._paths = {module: name for name, module in model.named_modules()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._counts: dict[str, int] = {}
        self._last = ("", "")  # phase and function of the last op
        self._calls: dict[tuple[str, str, bool], int] = {}
        self._nodes: dict[Any, dict[str, Any]] = {}  # autograd nodes: fields of what they communicate
        self._redone: dict[tuple[str, str], int] = {}
        self._off_stage: dict[int, weakref.ref[torch.Tensor]] = {}  # made of placeholders of other pipeline stages
        self._ops = self._messages = 0  # that were recorded
        self._microbatch = 0
        self._has_stages = False
        self._action = ""  # of a pipeline, the last to begin

    @contextlib.contextmanager
    def step(self, trainer: Trainer) -> Iterator[RankRecord]:
        """The trainer's step in the block is recorded."""
        trainer.on_microbatch = self._begin
        self._has_stages = trainer.pipeline is not None
        try:
            observers = traffic.counted(self._communicated), self._autograd_functions(), on_patched_call(self._patched)
            with observers[0], observers[1], observers[2], self:
                yield self.record
        finally:
            trainer.on_microbatch = None
            self.forget()

    @contextlib.contextmanager
    def _autograd_functions(self) -> Iterator[None]:
        """In the block, the nodes of autograd functions are known by what they communicate, or by their module."""
        plain = vars(torch.autograd.Function)["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._messages
            outcome = plain.__get__(None, cls)(*args, **kwargs)
            with no_torch_function_subclass():
                node = next((leaf.grad_fn for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)), None)
            if node is not None and node not in self._nodes:
                where = _caller(self._paths, in_comm=True)
                if self._microbatch:
                    self._nodes[node] = {"op": None, "twin": -1}
                elif self._messages > before:
                    self._nodes[node] = {"op": None, "twin": before}
                elif where is not None:
                    self._nodes[node] = {"op": self._ops, "near": where.path}
            return outcome

        with patched(torch.autograd.Function, "apply", classmethod(apply), why="explain records autograd functions"):
            yield

    def forget(self) -> None:
        """Let go of tensors and autograd nodes."""
        self._names.clear()
        self._nodes.clear()
        self._off_stage.clear()

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """What a tensor is called in the arguments of later ops."""
        self._names[id(tensor)] = (weakref.ref(tensor), name)

    def _begin(self, microbatch: int, action: Action | None) -> None:
        self._microbatch = microbatch
        self._action = "" if action is None else action.kind
        self.record.events.append(RecordedPart(microbatch, action))

    def _patched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outcome: Any) -> None:
        """A call of a torch function that unisono computes in ops of its own."""
        if not self._microbatch:
            with no_torch_function_subclass():
                given = [TensorType.of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
                self.call(func, args, kwargs, given, outcome, is_patched=True)

    # ---- ops -------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._microbatch:
            return func(*args, **kwargs)
        with no_torch_function_subclass():  # a subclass would take part in what is asked here
            given = [TensorType.of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        outcome = func(*args, **kwargs)
        with no_torch_function_subclass():
            self.call(func, args, kwargs, given, outcome)
        return outcome

    def call(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[TensorType],
        outcome: Any,
        is_patched: bool = False,
    ) -> None:
        """Record a call, unless it is none of the model's first forward."""
        made = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
        name = _word(func)
        if not name or name in _SKIPPED:
            return
        where = _caller(self._paths)
        if is_patched and where is not None:
            where = replace(where, is_internal=False)
        if where is None or (not made and where.phase != UPDATE):
            return
        if where.phase == BACKWARD:
            self._note_recomputed(where.path, name)
            return
        if where.phase == UPDATE and self._last == (UPDATE, name):
            return  # the same op for one parameter after the other
        if any(map(self._is_off_stage, tree_leaves((args, kwargs)))):
            self._off_stage.update((id(tensor), weakref.ref(tensor)) for tensor in made)
            return
        self._last = (where.phase, name)
        key = (where.path, name, where.is_internal)
        nth = self._calls[key] = self._calls.get(key, -1) + 1
        result = self._fresh(name)
        named = _without_defaults(func, kwargs)
        words = [*map(self._word_of, args), *(f"{key}={self._word_of(value)}" for key, value in named.items())]
        are_tensors = tuple(
            any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)) for value in (*args, *named.values())
        )
        outputs = tuple(map(TensorType.of, made))
        for index, tensor in enumerate(made):
            self.name(tensor, result if len(made) == 1 else f"{result}[{index}]")
            self._own_nodes(tensor.grad_fn, self._ops)
        self.record.events.append(
            RecordedCall(
                result, name, tuple(words), are_tensors, tuple(given), outputs,
                where.path, nth, where.source, where.phase, where.is_internal,
            )
        )  # fmt: skip
        self._ops += 1

    def _note_recomputed(self, path: str, name: str) -> None:
        key = (path, name)
        if path != LOSS:
            self._redone[key] = self._redone.get(key, -1) + 1
            for op in self.record.ops:
                if (op.path, op.function, op.nth) == (*key, self._redone[key]):
                    self.record.recomputed.add(op.name)

    def _own_nodes(self, node: Any, number: int) -> None:
        """Autograd nodes that came with an op: its own, and those before it that no op owns."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node is None or node in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._nodes[node] = {"op": number}
            pending += [before for before, _ in node.next_functions]

    def _is_off_stage(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        held = self._off_stage.get(id(value))
        return (held is not None and held() is value) or (is_placeholder(value) and self._has_stages)

    def _fresh(self, function: str) -> str:
        count = self._counts[function] = self._counts.get(function, -1) + 1
        return f"{function}_{count}" if count else function

    def _word_of(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._name_of(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._word_of, value))}]"
        if isinstance(value, slice):
            ends = ("" if each is None else str(each) for each in (value.start, value.stop))
            return ":".join(ends)
        return "..." if value is Ellipsis else str(value)

    def _name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) in self._parameters:
            return self._parameters[id(tensor)]
        held = self._names.get(id(tensor))
        if held is not None and held[0]() is tensor:
            return held[1]
        return "tensor"

    # ---- collectives -----------------------------------------------------------------------------------------------

    def _communicated(self, each: traffic.CommRecord) -> None:
        if len(each.ranks) == 1 and each.op not in _MESSAGES:
            return  # a group of this rank alone
        where = _caller(self._paths, in_comm=True)
        assert where is not None
        if where.phase == FORWARD and self._action in _BACKWARD_ACTIONS and where.transfer != FORWARD:
            where = replace(where, phase=BACKWARD)
        fields: dict[str, Any] = {"op": self._ops if where.phase == FORWARD else None}
        if where.phase == BACKWARD:
            node = autograd_node()
            variable = getattr(node, "variable", None)
            fields |= self._nodes.get(node, {})
            fields["parameter"] = "" if variable is None else self._parameters.get(id(variable), "")
        microbatch = self._microbatch if where.microbatch is None else where.microbatch
        tensor = None if each.tensor is None else TensorType.of(each.tensor)
        kind = each.op.removeprefix("i").removesuffix("_into")  # isend, irecv, all_gather_into
        made = Communication(
            kind, each.ranks, tensor, where.phase, where.path, where.caller, microbatch=microbatch, **fields
        )
        self.record.events.append(made)
        self._messages += 1


@dataclass(frozen=True)
class _CallSite:
    phase: str
    path: str
    source: str
    is_internal: bool
    caller: str
    transfer: str  # forward or backward, where a pipeline sends or receives
    microbatch: int | None  # of the transfer


def _caller(paths: dict[nn.Module, str], in_comm: bool = False) -> _CallSite | None:
    """Who calls a torch function; None for what a communicator computes, and for trials of the loss."""
    path: str | None = None
    source = ""
    is_internal: bool | None = None
    caller, transfer = "", ""
    microbatch: int | None = None
    phase = BACKWARD if in_backward() else FORWARD
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if code is MODULE_CALL:
            path = paths.get(frame.f_locals["self"]) if path is None else path
        elif code in _UPDATE:
            phase = UPDATE
        elif code in _TRANSFERS:
            transfer = phase = _TRANSFERS[code]
            microbatch = frame.f_locals["action"].microbatch
        elif (file.startswith(_COMM) or code in _TRIALS) and not in_comm:
            return None
        if not file.startswith(_TORCH) and not file.startswith(_EXPLAIN):
            is_ours = file.startswith(_UNISONO) and file != _LAYERS
            if is_ours and not caller and not file.startswith(_COMM):
                caller = os.path.basename(file).removesuffix(".py")
            is_internal = is_ours if is_internal is None else is_internal
            if not is_ours and not source and "importlib" not in file:
                source = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return _CallSite(phase, LOSS if path is None else path, source, bool(is_internal), caller, transfer, microbatch)


def _word(func: Any) -> str:
    """add for Tensor.add, Tensor.__add__ and Tensor.__radd__; empty for attributes."""
    name = getattr(func, "__name__", "")
    if name in _OPERATORS:
        return _OPERATORS[name]
    if name in ("__get__", "__set__", "__delete__"):
        return ""
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        for prefix in ("r", "i"):
            if plain.startswith(prefix) and hasattr(torch, plain[1:]) and not hasattr(torch, plain):
                plain = plain[1:]
        return plain
    return name.lstrip("_")


def _without_defaults(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        defaults = {name: each.default for name, each in inspect.signature(func).parameters.items()}
    except (TypeError, ValueError):
        return kwargs
    return {
        name: value
        for name, value in kwargs.items()
        if isinstance(value, torch.Tensor) or name not in defaults or value != defaults[name]
    }
