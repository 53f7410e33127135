"""A training step that leaves no trace: what it changes is put back, bit for bit.

    with generators_kept():
        state = TrainerSnapshot(trainer)
        trainer.step(batch)
        state.restore()              # parameters, buffers, optimizer state, counters: as before the step

The state of a module is its parameters, its buffers and its plain attributes (a step counter, a cache of the last
hidden state); that of a trainer also what its optimizer, its loss scaler and its random numbers remember.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.parallel.pipeline.off_stage import is_off_stage
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.zero import ShardedOptimizer

_OWN = frozenset({"_parameters", "_buffers", "_modules"})  # attributes of nn.Module that are restored as tensors
_CONTAINERS = (list, dict, set)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """In the block, torch, Python and numpy draw random numbers that nobody misses afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


class ModelSnapshot:
    """The values of a module's tensors and plain attributes."""

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """tensors: the parameters to keep; by default all of the model's."""
        self._model = model
        parameters = list(model.parameters()) if tensors is None else list(tensors)
        held = {id(tensor): tensor for tensor in (*parameters, *model.buffers())}
        self._values = [(tensor, tensor.detach().clone()) for tensor in held.values()]
        self._by_id = {id(tensor): value for tensor, value in self._values}
        self._trained = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]
        self._attributes = [
            (module, _attributes(module), module.training) for module in model.modules() if not _is_ours(module)
        ]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._by_id

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor held when the state was taken, or when `begin_from` was called for it."""
        return self._by_id[id(tensor)]

    def begin_from(self, tensors: Iterable[torch.Tensor]) -> None:
        """A step begins from what these hold now; `restore` still puts back what they held before."""
        self._by_id.update({id(tensor): tensor.detach().clone() for tensor in tensors if tensor in self})

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self._values:
            tensor.copy_(value)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for parameter, is_trained, gradient in self._trained:
            parameter.requires_grad_(is_trained)
            parameter.grad = gradient
        for module, attributes, is_training in self._attributes:
            _restore_attributes(module, attributes)
            module.training = is_training


def _is_ours(module: nn.Module) -> bool:
    """Layers of unisono learn the form of their messages in the first step, with objects that are no modules; and
    off-stage modules get their placeholders then."""
    return type(module).__module__.startswith("unisono.") or is_off_stage(module)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of its contents where they can change in place."""
    return {key: (value, _contents(value)) for key, value in vars(module).items() if key not in _OWN}


def _is_meta(value: Any) -> bool:
    """An off-stage buffer, before it is moved to where the stage computes."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _contents(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf:
        return value.detach().clone()
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _restore_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    now = vars(module)
    for key in [key for key in now if key not in before and key not in _OWN]:
        del now[key]
    for key, (value, contents) in before.items():
        if _is_meta(value):
            continue
        now[key] = value
        if contents is None:
            continue
        if isinstance(value, torch.Tensor):
            value.copy_(contents)
        elif isinstance(value, list):
            value[:] = contents
        else:
            value.clear()
            value.update(contents)


class TrainerSnapshot:
    """A trainer between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        zero = trainer.replicas if isinstance(trainer.replicas, ShardedOptimizer) else None
        self.zero = zero
        gathered = set(zero.shards) if zero is not None and zero.stage == 3 else set()  # no values between two steps
        replicated = [p for name, p in trainer.model.named_parameters() if name not in gathered]
        self.model = ModelSnapshot(trainer.model, [*replicated, *(tensor for _, tensor in trainer.optimized())])
        self._optimizer = OptimizerSnapshot(trainer.optimizer)
        self._counters = (trainer.steps, trainer.skipped, trainer.norm)
        self._scaler = None if trainer.scaler is None else trainer.scaler.state_dict()

    def restore(self) -> None:
        """Every rank calls it: sharded parameters are published again."""
        trainer = self._trainer
        trainer.zero_grad()
        trainer.loss.settle()
        self.model.restore()
        trainer.replicas.publish()
        self._optimizer.restore()
        trainer.steps, trainer.skipped, trainer.norm = self._counters
        trainer.random.step = trainer.steps
        if trainer.scaler is not None and self._scaler is not None:
            trainer.scaler.load_state_dict(self._scaler)


class OptimizerSnapshot:
    """What an optimizer remembers: its states, the numbers of its groups, and its own plain attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._numbers = {
            key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float | str | None)
        }

    def restore(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in [key for key in group if key != "params" and key not in before]:
                del group[key]
            group.update(before)
        vars(self._optimizer).update(self._numbers)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each) for each in value)
    return copy.copy(value)
