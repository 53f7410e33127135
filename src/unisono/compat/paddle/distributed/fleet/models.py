"""fleet's verbs: init, distributed_model and distributed_optimizer. A strategy is a plan; a model is bound to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.paddle.distributed.binding import PlanBinding, bind_optimizer, optimizer_for
from unisono.compat.paddle.distributed.environment import Degrees, comm, state
from unisono.compat.paddle.distributed.fleet.meta_parallel import PipelineLayer, rules_of
from unisono.compat.paddle.distributed.fleet.strategy import DistributedStrategy
from unisono.compat.paddle.methods import with_methods
from unisono.compat.paddle.nn.layer import Layer
from unisono.compat.paddle.optimizer import Optimizer
from unisono.compat.paddle.tensor import Tensor, plain, wrapped
from unisono.errors import UsageError
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.verify.self_check import parallelize


def init(
    role_maker: Any = None, is_collective: bool = False, strategy: DistributedStrategy | None = None, **kwargs: Any
) -> None:
    """Join the job's ranks and divide them as the strategy says; without one, all are data ranks."""
    if not is_collective:
        raise UsageError(
            say(
                "fleet.init(is_collective=False) starts a parameter server in Paddle; here ranks communicate with each "
                "other: fleet.init(is_collective=True)",
                "飞桨的 fleet.init(is_collective=False) 启动参数服务器；这里各进程直接通信："
                "fleet.init(is_collective=True)",
            )
        )
    state.strategy = strategy or DistributedStrategy()
    state.degrees = state.strategy.degrees(comm().size)


def worker_index() -> int:
    return comm().rank


def worker_num() -> int:
    return comm().size


def _degrees() -> Degrees:
    if state.degrees is None:
        raise UsageError(
            say(
                "fleet.distributed_model before fleet.init: as in Paddle, call fleet.init(is_collective=True, "
                "strategy=...)",
                "在 fleet.init 之前调用了 fleet.distributed_model：与飞桨相同，请先调用 "
                "fleet.init(is_collective=True, strategy=...)",
            )
        )
    return state.degrees


def distributed_model(model: nn.Module) -> Layer:
    """The model under the strategy's plan. Ranks give their own samples; those along mp and pp the same ones."""
    degrees = _degrees()
    if isinstance(model, PipelineLayer):
        return PipelineParallel(model, degrees)
    if degrees.pp > 1:
        raise UsageError(
            say(
                f"pp_degree={degrees.pp} with a {type(model).__name__}: as in Paddle, a pipeline is a PipelineLayer; "
                "or "
                "mark its stages with shard_op(layer, mesh[1])",
                f"pp_degree={degrees.pp}，而模型是 {type(model).__name__}：与飞桨相同，流水线须用 PipelineLayer；"
                "或用 shard_op(layer, mesh[1]) 标记各阶段",
            )
        )
    shard = degrees.sharding if degrees.dp > 1 and degrees.sharding > 1 else 0
    rules = rules_of(model)
    if degrees.mp > 1 and not rules:
        raise UsageError(
            say(
                f"mp_degree={degrees.mp}, but {type(model).__name__} has no layer of fleet.meta_parallel: in Paddle "
                "all mp "
                "ranks would compute the same; use ColumnParallelLinear and RowParallelLinear, or uni.Plan(tp=...), "
                "which finds the layers itself",
                f"mp_degree={degrees.mp}，而 {type(model).__name__} 中没有 fleet.meta_parallel 的层：飞桨的各 mp "
                "进程会做"
                "相同的计算；请用 ColumnParallelLinear 和 RowParallelLinear，或用能自行找到这些层的 uni.Plan(tp=...)",
            )
        )
    return DataParallel(
        model,
        Plan(dp=degrees.data, tp=degrees.mp, zero=int(degrees.sharding > 1), shard=shard),
        rules if degrees.mp > 1 else None,
    )


def distributed_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None = None) -> Optimizer:
    """The optimizer itself: the plan of its model finds it by its parameters."""
    return optimizer


class DataParallel(Layer):
    """A model under a plan, called as the model is. By default every rank is a data rank."""

    def __init__(self, layers: nn.Module, plan: Plan | None = None, rules: dict[str, str] | None = None) -> None:
        super().__init__()
        self._layers = layers
        plan = Plan(dp=comm().size) if plan is None else plan
        if isinstance(layers, Layer):
            layers.binding = PlanBinding(layers, plan, rules)
        self._bound = PlanBinding(layers, plan, rules) if not isinstance(layers, Layer) else layers.binding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return wrapped(self._bound.call(*plain((args, kwargs))))

    @property
    def trainer(self) -> Trainer | None:
        """unisono's trainer of the model, once it has been called."""
        return self._bound.trainer

    def clear_gradients(self) -> None:
        self._bound.clear_gradients()
        if self._bound.trainer is None:
            self._layers.zero_grad()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All parameters, in full; every rank calls it."""
        trainer = self._bound.trainer
        return self._layers.state_dict() if trainer is None else trainer.state_dict()["model"]

    def set_state_dict(self, state_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        """Parameters in full, as state_dict gives them; every rank calls it."""
        _load(self._bound.trainer, self._layers, plain(state_dict))

    set_dict = load_dict = set_state_dict


class PipelineParallel(Layer):
    """A PipelineLayer under the strategy's plan; trained with train_batch."""

    def __init__(self, layers: PipelineLayer, degrees: Degrees) -> None:
        super().__init__()
        if layers.num_stages != degrees.pp:
            raise UsageError(
                say(
                    f"PipelineLayer(num_stages={layers.num_stages}) with pp_degree={degrees.pp}: Paddle needs them "
                    "to be "
                    "equal too",
                    f"PipelineLayer(num_stages={layers.num_stages})，而 pp_degree={degrees.pp}：飞桨同样要求两者相等",
                )
            )
        if layers.loss_fn is None:
            raise UsageError(
                say(
                    "PipelineLayer without loss_fn, which train_batch computes on the last stage in Paddle too; give "
                    "loss_fn=paddle.nn.CrossEntropyLoss()",
                    "PipelineLayer 没有 loss_fn，飞桨的 train_batch 也在最后一个阶段计算它；请给出 "
                    "loss_fn=paddle.nn.CrossEntropyLoss()",
                )
            )
        self._layers, self._degrees = layers, degrees
        self.trainer: Trainer | None = None  # made with the first batch

    @property
    def _plan(self) -> Plan:
        pipeline = state.strategy.pipeline_configs
        is_staged = self._degrees.pp > 1
        return Plan(
            pp=self._degrees.pp,
            dp=self._degrees.data,
            tp=self._degrees.mp,
            zero=int(self._degrees.sharding > 1),
            microbatches=pipeline["accumulate_steps"],
            schedule=state.strategy.schedule if is_staged else "1f1b",
            boundaries=self._layers.boundaries if is_staged else (),
        )

    def train_batch(self, data: Any, optimizer: Optimizer, lr_scheduler: Any = None, scaler: Any = None) -> Tensor:
        """A step on this data rank's (inputs, labels), in microbatches; the loss of the whole batch, on every rank."""
        inputs, labels = plain(tuple(data))
        _require_batch_size(inputs, state.strategy.pipeline_configs)
        if self.trainer is None:
            found = optimizer_for(self._layers.run_function)
            loss = self._layers.loss_fn
            self.trainer = parallelize(
                self._layers.run_function,
                self._plan,
                loss=with_methods(loss),
                optimizer=found.make,
                example=(inputs, labels),
                rules=rules_of(self._layers.run_function) or None,
                batch="local",
            )
            bind_optimizer(found, self.trainer, by_trainer=True)
        return self.trainer.step((inputs, labels)).as_subclass(Tensor)

    @torch.no_grad()
    def eval_batch(self, data: Any, compute_loss: bool = True) -> Any:
        if self.trainer is None or not compute_loss:
            raise UsageError(
                say(
                    "eval_batch: call train_batch first, and with compute_loss=True; Paddle also returns outputs here",
                    "eval_batch：请先调用 train_batch，并设 compute_loss=True；飞桨在此还可以返回输出",
                )
            )
        return self.trainer.evaluate(plain(tuple(data))).as_subclass(Tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            say(
                "a pipeline is called; as in Paddle, train it with model.train_batch([inputs, labels], optimizer)",
                "直接调用了流水线模型；与飞桨相同，请用 model.train_batch([inputs, labels], optimizer) 训练",
            )
        )

    def clear_gradients(self) -> None:
        if self.trainer is not None:
            self.trainer.zero_grad()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All parameters of all stages, in full; every rank calls it."""
        return self._layers.run_function.state_dict() if self.trainer is None else self.trainer.state_dict()["model"]

    def set_state_dict(self, state_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        _load(self.trainer, self._layers.run_function, plain(state_dict))

    set_dict = load_dict = set_state_dict


def _load(trainer: Trainer | None, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    if trainer is None:
        model.load_state_dict(state)
    else:
        trainer.load_state_dict({**trainer.state_dict(), "model": state})


def _require_batch_size(inputs: Any, pipeline: dict[str, Any]) -> None:
    given = next(leaf.shape[0] for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    steps, size = pipeline["accumulate_steps"], pipeline["micro_batch_size"]
    if steps * size != given:
        raise UsageError(
            say(
                f"train_batch of {given} samples with accumulate_steps={steps} and micro_batch_size={size}: Paddle "
                "needs "
                f"their product to be the batch too; set pipeline_configs so that it is {given}",
                f"train_batch 收到 {given} 个样本，而 accumulate_steps={steps}、micro_batch_size={size}："
                "飞桨同样要求两者之积"
                f"等于批大小；请把 pipeline_configs 设为乘积等于 {given}",
            )
        )
