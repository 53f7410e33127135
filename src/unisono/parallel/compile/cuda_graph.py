"""A training step on one GPU as a CUDA graph: captured once, and replayed for every batch of the same shapes.

A small model keeps a GPU waiting: launching a kernel takes the host longer than the GPU needs to run it. A CUDA graph
launches the forward, the backward, clipping and the optimizer's step at once.

    parallelize(model, "dp=1", ..., cudagraph=True)

The first steps run eagerly, on a side stream, as torch asks for; then one is captured. A batch is copied into the
buffers that the graph reads. Batches of other shapes, as the last one of an epoch, run eagerly.

A replay runs no Python. So what the host decides anew in every step is refused or, where it changes between steps, has
the step captured again: see `_Recorded`. Learning rates alone are tensors in the graph, because schedulers change them
in every step; in `optimizer.param_groups` they stay numbers. Random numbers depend on the number of the step, which is
the host's: it writes what becomes of it into a table before each replay, and kernels read that, so that dropout masks
are those of eager steps (mesh/random/step_keys.py).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from unisono.errors import UsageError
from unisono.mesh.optimizers import is_unisonos
from unisono.mesh.random.state import RandomState
from unisono.mesh.random.step_keys import StepKeys
from unisono.parallel.precision import Precision
from unisono.plan.plan import Plan

WARM_UP = 3  # steps that run eagerly before one is captured
MOST_CAPTURES = 5  # of a step whose settings change; then it runs eagerly

Step = Callable[[tuple[Any, Any]], tuple[torch.Tensor, torch.Tensor | None]]


class GraphedStep:
    """Runs `step(batch)`, which returns the loss and the gradients' norm, from a CUDA graph where it can.

    random: of the numbers that the step draws.
    """

    def __init__(self, step: Step, model: nn.Module, optimizer: Optimizer, random: RandomState) -> None:
        self._step = step
        self._model = model
        self._optimizer = optimizer
        self._keys = StepKeys(random, torch.device("cuda", torch.cuda.current_device()))
        self._side = torch.cuda.Stream()
        self._shapes: Any = None  # of the batches that are counted, and then captured
        self._seen = 0
        self._captures = 0
        self._captured: _Captured | None = None

    def __call__(self, batch: tuple[Any, Any], number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """number: of the step."""
        leaves, structure = tree_flatten(batch)
        shapes = (structure, [_shape_of(leaf) for leaf in leaves])
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes or self._captures > MOST_CAPTURES:
            with self._capturable():
                return self._step(batch)
        if self._seen < WARM_UP:
            self._seen += 1
            return self._warmed_up(batch, number)
        if self._captured is None or not self._captured.recorded.holds(self._model, self._optimizer):
            self.forget()
            self._captures += 1
            if self._captures > MOST_CAPTURES:
                _warn(f"settings of the model or the optimizer have changed {MOST_CAPTURES} times since step {WARM_UP}")
                return self(batch, number)
            try:
                self._captured = self._capture(leaves, structure, number)
            except UsageError:
                raise
            except Exception as error:
                self._captures = MOST_CAPTURES + 1
                _warn(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                return self(batch, number)
        self._keys.write(number)
        return self._captured.replay(leaves, self._optimizer)

    def forget(self) -> None:
        """What was captured is void: parameters or the optimizer's state may be in other memory."""
        self._captured = None

    def _warmed_up(self, batch: tuple[Any, Any], number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        _require_no_hooks(self._model, self._optimizer)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side), self._capturable(), self._keys.used(number):
            out = self._step(batch)
        torch.cuda.current_stream().wait_stream(self._side)
        return out

    def _capture(self, leaves: list[Any], structure: Any, number: int) -> _Captured:
        _require_no_hooks(self._model, self._optimizer)
        held = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        recorded = _Recorded.of(self._model, self._optimizer)
        graph = torch.cuda.CUDAGraph()
        # Other threads, as those that load batches, may go on using the GPU.
        capture = torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local")
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            with self._capturable(), _rates_as_tensors(self._optimizer) as rates, capture, self._keys.used(number):
                loss, norm = self._step(tree_unflatten(held, structure))
        except BaseException:
            generator.graphsafe_set_state(before)  # a capture that fails leaves it as if it went on
            raise
        changed = recorded.changed_attribute()
        if changed is not None:
            raise UsageError(
                f"cudagraph=True, but the model's forward changes {changed}, a number of Python, which a replayed step "
                "would not; make it a buffer, as self.register_buffer(..., torch.zeros(())), or leave cudagraph out"
            )
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        return _Captured(graph, held, loss, norm, gradients, rates, recorded)

    @contextlib.contextmanager
    def _capturable(self) -> Iterator[None]:
        """In the block, the optimizer keeps what it counts on the GPU, and reads nothing of it."""
        before = [dict(group) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif group.get("fused") is None and group.get("foreach") is None:
                group["fused"] = True  # of SGD, the one that takes a rate from a tensor
        for parameter, state in self._optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.device != parameter.device:
                state["step"] = step.to(parameter.device)
        try:
            yield
        finally:
            for group, settings in zip(self._optimizer.param_groups, before, strict=True):
                group.update({key: settings[key] for key in ("capturable", "fused") if key in settings})


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    held: list[Any]  # the leaves of the batch that the graph reads
    loss: torch.Tensor
    norm: torch.Tensor | None
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]
    rates: list[torch.Tensor]
    recorded: _Recorded

    def replay(self, leaves: list[Any], optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor | None]:
        for mine, leaf in zip(self.held, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                mine.copy_(leaf, non_blocking=True)
        for rate, group in zip(self.rates, optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return self.loss.clone(), None if self.norm is None else self.norm.clone()


@contextlib.contextmanager
def _rates_as_tensors(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    """In the block, learning rates are tensors on the GPU, one a group."""
    before = [group["lr"] for group in optimizer.param_groups]
    rates = []
    for group in optimizer.param_groups:
        first = group["params"][0]
        is_double = first.dtype == torch.float64 and not group.get("fused")
        rates.append(torch.tensor(float(group["lr"]), device=first.device, dtype=torch.float64 if is_double else None))
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        yield rates
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr


class _Recorded(NamedTuple):
    """What a captured step has read on the host. Where it is another now, the step must be captured again."""

    memory: list[tuple[int, bool]]  # of parameters and buffers: where they are, and whether they are trained
    attributes: list[tuple[str, dict[str, Any], dict[str, Any]]]  # of modules: name, __dict__, numbers and flags in it
    groups: list[dict[str, Any]]
    state: Any  # of the optimizer, which replaces it when it loads one

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> _Recorded:
        attributes = [
            (name, vars(module), {key: each for key, each in vars(module).items() if isinstance(each, _PLAIN)})
            for name, module in model.named_modules()
        ]
        return cls(_memory(model), attributes, _settings(optimizer), optimizer.state)

    def holds(self, model: nn.Module, optimizer: Optimizer) -> bool:
        return (
            self.state is optimizer.state
            and self.groups == _settings(optimizer)
            and self.memory == _memory(model)
            and self.changed_attribute() is None
        )

    def changed_attribute(self) -> str | None:
        for name, now, before in self.attributes:
            for key, value in before.items():
                if now.get(key, _GONE) != value:
                    return f"{name}.{key}".strip(".")
        return None


_PLAIN = (bool, int, float, str)
_GONE = object()


def _memory(model: nn.Module) -> list[tuple[int, bool]]:
    tensors = (*model.parameters(), *model.buffers())
    return [(tensor.data_ptr(), tensor.requires_grad) for tensor in tensors]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        groups.append({**settings, "parameters": [id(parameter) for parameter in group["params"]]})
    return groups


def _shape_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _warn(reason: str) -> None:
    warnings.warn(f"cudagraph=True: steps run eagerly from now on, because {reason}", UserWarning, stacklevel=2)


# ---- what cannot be captured -----------------------------------------------------------------------------------------


_WITHOUT = "; leave cudagraph out, or use"


def require_capturable_plan(plan: Plan) -> None:
    """UsageError for a plan whose step cannot be a CUDA graph."""
    if plan.world > 1 or plan.microbatches > 1 or plan.zero:
        raise UsageError(
            f"cudagraph=True captures the step of one rank, without microbatches and ZeRO, but the plan is {plan}"
            f"{_WITHOUT} dp=1"
        )


def require_capturable(plan: Plan, model: nn.Module, precision: Precision) -> None:
    """The same, also for a model and a precision."""
    require_capturable_plan(plan)
    without = _WITHOUT
    if precision.name == "fp16":
        raise UsageError(f'cudagraph=True captures steps that are never skipped, but precision="fp16"{without} bf16')
    if precision.master is None:
        raise UsageError(f"cudagraph=True with master=none, whose rounding depends on the step{without} master=fp32")
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        raise UsageError(f"cudagraph=True with master weights of half-precision parameters{without} float32 parameters")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cuda"}:
        raise UsageError(
            f"cudagraph=True with a model on {', '.join(sorted(devices)) or 'no device'}{without} a CUDA device"
        )


def require_capturable_optimizer(optimizer: Optimizer) -> None:
    """UsageError for one that reads on the host what it has counted on the GPU."""
    if type(optimizer) is not torch.optim.SGD and "capturable" not in optimizer.defaults:
        raise UsageError(
            f"cudagraph=True with {type(optimizer).__name__}, which has no capturable= option; use AdamW or SGD, or "
            "leave cudagraph out"
        )


def _require_no_hooks(model: nn.Module, optimizer: Optimizer) -> None:
    """A user's hooks would run in the captured step, and never again."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [
        (f"module {name or type(module).__name__}", hook)
        for name, module in model.named_modules()
        for kind in kinds
        for hook in getattr(module, kind).values()
    ]
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooked += [(f"parameter {name}", hook) for hook in (getattr(parameter, kind, None) or {}).values()]
    for held in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        hooked += [("the optimizer", hook) for hook in held.values()]
    owner = next((owner for owner, hook in hooked if not is_unisonos(hook)), None)
    if owner is not None:
        raise UsageError(
            f"cudagraph=True, but {owner} has a hook, which a replayed step would not call; remove it, or leave "
            "cudagraph out"
        )
