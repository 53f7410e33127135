"""An optimizer that a framework, or its user, has made for the plain model; made again for the model under a plan.

template = OptimizerTemplate(optimizer, model)                          # before the plan is applied
trainer = parallelize(model, plan, optimizer=template.make, ...)
template.full_state(trainer)                                            # as optimizer.state_dict() of one process
template.load(trainer, state)                                           # such a state, of one process or any plan
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.parallel.full_state import full_optimizer, load_full_state
from unisono.parallel.trainer import Trainer


class OptimizerTemplate:
    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        """optimizer: one that has not stepped yet, of parameters of the model."""
        self._optimizer = optimizer
        named = list(model.named_parameters())
        positions = {id(parameter): position for position, (_, parameter) in enumerate(named)}
        if any(id(each) not in positions for group in optimizer.param_groups for each in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} was made with parameters that are not those of {type(model).__name__}; "
                "expected one of the parameters of the model under the plan"
            )
        self._groups = [[positions[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._names = [[named[position][0] for position in group] for group in self._groups]

    def make(self, parameters: Any) -> Optimizer:
        """The same optimizer, with the same groups, of the parameters of a model that is built alike."""
        given = list(parameters)
        made: Optimizer = object.__new__(type(self._optimizer))
        kept = {name: value for name, value in vars(self._optimizer).items() if name != "step"}  # a scheduler's patch
        made.__dict__.update({name: value.copy() if isinstance(value, dict) else value for name, value in kept.items()})
        made.state.clear()
        is_trial = len(given) <= max(itertools.chain([-1], *self._groups))  # on a few tensors, of an unknown optimizer
        chosen = [given] if is_trial else [[given[position] for position in group] for group in self._groups]
        made.param_groups = [
            {**group, "params": each} for group, each in zip(self._optimizer.param_groups, chosen, strict=False)
        ]
        return made

    def full_state(self, trainer: Trainer) -> dict[str, Any]:
        """The state of the full optimizer in the format of torch, by numbers of parameters; every rank calls it."""
        state = full_optimizer(trainer.optimizer, dict(trainer.optimized()), trainer.mesh)
        numbers = {name: number for number, name in enumerate(itertools.chain(*self._names))}
        groups = [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], self._names, strict=True)
        ]
        states = {numbers[name]: each for name, each in state["state"].items() if name in numbers and each}
        return {"state": states, "param_groups": groups}

    def load(self, trainer: Trainer, state: dict[str, Any]) -> None:
        names = list(itertools.chain(*self._names))
        optimized = dict(trainer.optimized())
        states: dict[str, Any] = {name: {} for name in optimized}
        states |= {names[number]: each for number, each in state["state"].items()}
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in state["param_groups"]]
        load_full_state(trainer.optimizer, optimized.items(), trainer.mesh, {"state": states, "param_groups": groups})


def follow(scheduler: Any, optimizer: Optimizer) -> None:
    """Have a scheduler that was made for the plain optimizer set the learning rates of another one."""
    for each in (scheduler, *getattr(scheduler, "_schedulers", ())):
        each.optimizer = optimizer
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer.step = _noting_its_calls(optimizer)  # type: ignore[method-assign]


def _noting_its_calls(optimizer: Optimizer) -> Any:
    """optimizer.step as torch's schedulers wrap it, to warn where they are stepped first."""
    step, reference = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return noted
