"""Bindings: what a layer's calls, its backward and its optimizer do under a plan.

PlanBinding     a plan, by fleet or group_sharded_parallel: ranks give their own samples
MarkBinding     the plan that the marks of a forward make: ranks give the same global batch
PipelineLoop    a loop over a pipeline by marks, whose loss is recorded until its backward runs

A binding makes the trainer when the layer is first called: by then the program has made its optimizer.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.paddle.distributed.mesh import ProcessMesh
from unisono.compat.paddle.nn.layer import freeze_stopped, on_marks
from unisono.compat.paddle.optimizer import SGD, Optimizer, optimizer_of, require_all_of
from unisono.compat.paddle.static.program import Program
from unisono.compat.paddle.static.variable import PROBES, Variable
from unisono.errors import UsageError
from unisono.graph.marks.api import applied
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.static.marked import apply_marks, stages_on
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.verify.self_check import parallelize


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments as a batch's inputs."""
    if args and kwargs:
        raise UsageError(
            say(
                "a layer under a plan is called with positional and named arguments, which Paddle takes; here give "
                "all of "
                "them by position, or all by name",
                "并行的层同时收到按位置和按名字的参数，飞桨允许这样；这里请全部按位置或全部按名字给出",
            )
        )
    return kwargs or (args[0] if len(args) == 1 else args)


def unknown_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """In the place of a loss that the program computes itself."""
    first = next(leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return first.float().mean()


class Binding(abc.ABC):
    """What bindings have in common."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.trainer: Trainer | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.trainer is None:
            optimizer = optimizer_for(self.layer)
            self.trainer = self._made(inputs_of(args, kwargs), optimizer)
            bind_optimizer(optimizer, self.trainer)
        self._require_as_it_was()
        return self.trainer.model(*args, **kwargs)

    @abc.abstractmethod
    def _made(self, inputs: Any, optimizer: Optimizer) -> Trainer: ...

    def _require_as_it_was(self) -> None:
        for name, parameter in self.layer.named_parameters():
            if vars(parameter).get("stop_gradient") == parameter.requires_grad:
                raise UsageError(
                    say(
                        f"stop_gradient of {name} was changed after the first step: Paddle follows, but the plan was "
                        "made "
                        "for the parameters that were trained then; set it before the first call of the model",
                        f"在第一步之后修改了 {name} 的 stop_gradient：飞桨会随之改变，"
                        "而并行方案已按当时训练的参数建立；"
                        "请在第一次调用模型之前设置",
                    )
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:  # noqa: B027
        """A copy of a layer is not under its plan."""

    def clear_gradients(self) -> None:
        if self.trainer is not None:
            self.trainer.zero_grad()


def optimizer_for(layer: nn.Module) -> Optimizer:
    """The program's optimizer of a layer; one that changes nothing where there is none."""
    freeze_stopped(layer)
    found = optimizer_of(layer)
    return SGD(0.0, list(layer.parameters())) if found is None else require_all_of(layer, found)


def bind_optimizer(optimizer: Optimizer, trainer: Trainer, *, by_trainer: bool = False) -> None:
    """The program's optimizer becomes the trainer's. by_trainer: gradients come from trainer.backward, and the trainer
    makes the update."""
    optimizer.bind(trainer, trainer.update if by_trainer else trainer.optimizer.step, trainer.zero_grad)


class PlanBinding(Binding):
    def __init__(self, layer: nn.Module, plan: Plan, rules: dict[str, str] | None = None) -> None:
        super().__init__(layer)
        self.plan, self.rules = plan, rules

    def _made(self, inputs: Any, optimizer: Optimizer) -> Trainer:
        return parallelize(
            self.layer,
            self.plan,
            loss=unknown_loss,
            optimizer=optimizer.make,
            rules=self.rules,
            batch="local",
            check="off",  # a loop of the program's own shows no batch that could be proved
        )


class MarkBinding(Binding):
    def __init__(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        super().__init__(layer)
        self.mesh = mesh
        self._loop: PipelineLoop | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.trainer is None and self._loop is None:
            inputs = inputs_of(args, kwargs)
            if stages_on(self.layer, self.mesh.inner, inputs) is not None:
                self._loop = PipelineLoop(self.layer, self.mesh)
        if self._loop is not None:
            return self._loop.call(inputs_of(args, kwargs))
        return super().call(args, kwargs)

    def _made(self, inputs: Any, optimizer: Optimizer) -> Trainer:
        return apply_marks(
            self.layer,
            mesh=self.mesh.inner,
            loss=unknown_loss,
            optimizer=optimizer.make,
            example=(inputs, None),
        )

    def clear_gradients(self) -> None:
        if self._loop is not None:
            self._loop.clear_gradients()
        else:
            super().clear_gradients()


class PipelineLoop:
    """out = model(x); loss = f(out, y); loss.backward(); optimizer.step(), where the model is a pipeline by marks.

    The outputs are on the last stage, and nowhere before all have computed. So a call returns a variable, what is
    computed from it is recorded, and `backward` runs the pipeline with that as the loss. Then all ranks have its value.
    """

    def __init__(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        self._layer, self._mesh = layer, mesh
        self._shape_model = meta_copy(layer)
        self._trainer: Trainer | None = None
        self._program = Program()
        self._inputs: Any = None
        self._loss: Variable | None = None
        self._recorded: list[torch.Tensor] = []  # the tensors that the program's loss was recorded with

    def call(self, inputs: Any) -> Any:
        with applied(), torch.no_grad(), torch.device("meta"):
            meta = call(self._shape_model, to_meta(inputs))
        if not isinstance(meta, torch.Tensor):
            raise UsageError(
                say(
                    "a pipeline by marks returns several values, which Paddle passes on; here its forward returns one "
                    "tensor",
                    "按标记切分的流水线返回了多个值，飞桨允许；这里 forward 须返回一个张量",
                )
            )
        self._inputs, self._program = inputs, Program()
        self._program.on_backward = self._backward
        return self._program.data("outputs", (meta,) * len(PROBES))

    def _backward(self, loss: Variable) -> None:
        self._loss, self._recorded = loss, self._program.captured()
        batch = (self._inputs, tuple(self._recorded))
        if self._trainer is None:
            optimizer = optimizer_for(self._layer)
            self._trainer = apply_marks(
                self._layer,
                mesh=self._mesh.inner,
                loss=self._run_loss,
                optimizer=optimizer.make,
                example=batch,
            )
            bind_optimizer(optimizer, self._trainer, by_trainer=True)
        value = self._trainer.backward(batch)
        for each in self._program.variables.values():
            if each is loss or _is_same_number(self._program, each, loss):
                each.value = value

    def _run_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        instead = {id(old): new for old, new in zip(self._recorded, targets, strict=True)}
        assert self._loss is not None
        return self._program.run({self._program.variables["outputs"]: outputs}, instead)[self._loss]

    def clear_gradients(self) -> None:
        if self._trainer is not None:
            self._trainer.zero_grad()


def _is_same_number(program: Program, variable: Variable, loss: Variable) -> bool:
    """Whether a variable is a scalar of which the loss is the mean: paddle.mean(loss) of what is a mean already."""
    if variable.metas[0].dim():
        return False
    return any(op.type == "mean" and op.args[0] is variable and op.outputs is loss for op in program.ops)


on_marks.append(MarkBinding)
