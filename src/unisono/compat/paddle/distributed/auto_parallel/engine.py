"""Engine: trains under the plan that marks and a Strategy make; by default all ranks are data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from unisono.compat.language import say
from unisono.compat.paddle.distributed.auto_parallel.find_marks import mesh_of_marks
from unisono.compat.paddle.distributed.auto_parallel.strategy import Strategy
from unisono.compat.paddle.distributed.binding import bind_optimizer
from unisono.compat.paddle.distributed.environment import comm
from unisono.compat.paddle.distributed.fleet.strategy import schedule_named
from unisono.compat.paddle.distributed.mesh import ProcessMesh
from unisono.compat.paddle.io import BatchSampler, DataLoader, DistributedBatchSampler
from unisono.compat.paddle.methods import with_methods
from unisono.compat.paddle.metric import Accuracy, is_correct
from unisono.compat.paddle.nn.layer import Layer, freeze_stopped
from unisono.compat.paddle.optimizer import Optimizer, require_all_of
from unisono.compat.paddle.static.program import InputSpec, Program, recorded
from unisono.compat.paddle.static.variable import metas_of
from unisono.compat.paddle.tensor import plain
from unisono.errors import UsageError
from unisono.graph.marks.api import applied
from unisono.parallel.meta.meta_tensors import meta_copy
from unisono.parallel.static.marked import apply_marks
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.verify.self_check import parallelize


class Engine:
    """Engine(model, loss, optimizer, metrics, strategy=strategy); `run` trains on a batch, `dataloader` reads them."""

    def __init__(
        self,
        model: Layer,
        loss: Any = None,
        optimizer: Optimizer | None = None,
        metrics: Any = None,
        cluster: Any = None,
        strategy: Strategy | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module) or not callable(loss) or not isinstance(optimizer, Optimizer):
            raise UsageError(
                say(
                    "Engine(model, loss, optimizer): as in Paddle, give a layer, a loss such as "
                    "paddle.nn.CrossEntropyLoss() and an optimizer of paddle.optimizer",
                    "Engine(model, loss, optimizer)：与飞桨相同，请给出层、paddle.nn.CrossEntropyLoss() 等 loss，"
                    "以及 paddle.optimizer 的优化器",
                )
            )
        self._model, self._loss, self._optimizer = model, loss, optimizer
        self._metrics = [] if metrics is None else list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        for each in self._metrics:
            if not isinstance(each, Accuracy):
                raise UsageError(
                    say(
                        f"Engine(metrics={type(each).__name__}): Paddle takes any metric; here paddle.metric.Accuracy, "
                        "and uni.Engine(metrics=...) takes others",
                        f"Engine(metrics={type(each).__name__})：飞桨接受任何指标；这里为 paddle.metric.Accuracy，"
                        "其它指标请用 uni.Engine(metrics=...)",
                    )
                )
        self._strategy = strategy or Strategy()
        self._specs: tuple[list[InputSpec], list[InputSpec]] = ([], [])
        self._mesh: ProcessMesh | None = None
        self._looked = False
        self.trainer: Trainer | None = None  # made with the first batch
        self._whole: Any = None  # the model without values, once the plan has sharded it
        comm()

    # ---- before training ---------------------------------------------------------------------------------------------

    def prepare(
        self,
        inputs_spec: Any = None,
        labels_spec: Any = None,
        inputs: Any = None,
        labels: Any = None,
        main_program: Any = None,
        startup_program: Any = None,
        mode: str | None = None,
    ) -> None:
        """Look for marks, on inputs of these specs. The plan itself is applied with the first batch."""
        self._specs = _listed(inputs_spec), _listed(labels_spec)
        if self._specs[0]:
            self._find_marks([metas_of(spec.shape, spec.dtype)[0] for spec in self._specs[0]])

    def _find_marks(self, inputs: Sequence[torch.Tensor]) -> None:
        if not self._looked:
            self._looked = True
            self._mesh = mesh_of_marks(self._model, inputs[0] if len(inputs) == 1 else tuple(inputs))

    def dataloader(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Any = None,
        num_workers: int = 0,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        sample_split: int = 1,
        mode: str | None = None,
        **options: Any,
    ) -> DataLoader:
        """Batches of which batch_size is the global size. Without marks each rank reads its part of them, with marks
        all of them."""
        ranks = comm().size
        if self._mesh is None and batch_size % ranks:
            raise UsageError(
                say(
                    f"Engine.dataloader(batch_size={batch_size}) on {ranks} data ranks: Paddle asserts that they "
                    "divide it; "
                    f"give a multiple of {ranks}",
                    f"Engine.dataloader(batch_size={batch_size})，而数据并行有 {ranks} 个进程：飞桨断言其能整除；"
                    "请给出 "
                    f"{ranks} 的倍数",
                )
            )
        if self._mesh is not None:
            sampler = BatchSampler(dataset, None, shuffle, batch_size, drop_last)
        else:
            sampler = DistributedBatchSampler(dataset, batch_size // ranks, ranks, comm().rank, shuffle, drop_last)
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)

    def _trainer(self, batch: tuple[Any, Any]) -> Trainer:
        if self.trainer is None:
            self._find_marks([leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, torch.Tensor)])
            freeze_stopped(self._model)
            require_all_of(self._model, self._optimizer)
            self._whole = meta_copy(self._model)
            self.trainer = self._made(batch)
            bind_optimizer(self._optimizer, self.trainer, by_trainer=True)
        return self.trainer

    def _made(self, batch: tuple[Any, Any]) -> Trainer:
        ranks, strategy, loss = comm().size, self._strategy, self._loss
        zero, pipeline = strategy.zero(ranks), strategy.pipeline
        job: dict[str, Any] = {"loss": with_methods(loss)}
        job |= {"optimizer": self._optimizer.make, "example": batch}
        if self._mesh is None:
            if pipeline.enable:
                raise UsageError(
                    say(
                        "strategy.pipeline.enable without a mark in the forward: Paddle would train all layers on "
                        "every "
                        "rank; mark the first layer of each stage with shard_op(layer, mesh[1])",
                        "开启了 strategy.pipeline，而 forward 中没有标记：飞桨会在每个进程上训练全部层；请用 "
                        "shard_op(layer, mesh[1]) 标记各阶段的第一层",
                    )
                )
            plan = Plan(dp=ranks, zero=zero, shard=strategy.shard(ranks))
            return parallelize(self._model, plan, batch="local", **job)
        if pipeline.enable:
            job |= {"microbatches": pipeline.accumulate_steps, "schedule": schedule_named(pipeline.schedule_mode)}
        return apply_marks(self._model, mesh=self._mesh.inner, zero=zero, **job)

    # ---- training ----------------------------------------------------------------------------------------------------

    def run(
        self, data: Any = None, feed: Any = None, fetch_list: Any = None, mode: str | None = None
    ) -> dict[str, Any]:
        """A step on a batch of `dataloader`: (inputs, labels).

        Returns, on every rank, "loss" of the global batch and the metrics of it (acc_top1, ...). Of a pipeline "loss"
        has an entry for each microbatch, whose mean is that of the batch, as Paddle's has on the last stage.
        """
        if mode not in (None, "train"):
            raise UsageError(
                say(
                    f"Engine.run(mode={mode!r}): Paddle also evaluates with it; here use uni.Engine, which has "
                    "evaluate "
                    "and predict",
                    f"Engine.run(mode={mode!r})：飞桨还可用它评估；这里请用有 evaluate 和 predict 的 uni.Engine",
                )
            )
        batch = self._pair(data)
        trainer = self._trainer(batch)
        with _Watched(trainer, self._metrics) as watched:
            loss = trainer.step(batch)
        return watched.results(loss)

    def _pair(self, data: Any) -> tuple[Any, Any]:
        if not isinstance(data, list | tuple) or len(data) < 2:
            raise UsageError(
                say(
                    f"Engine.run({type(data).__name__}): as in Paddle, give a batch of engine.dataloader, (inputs, "
                    "labels)",
                    f"Engine.run({type(data).__name__})：与飞桨相同，请给出 engine.dataloader 的一个批 (inputs, "
                    "labels)",
                )
            )
        given = list(plain(data))
        count = len(self._specs[0]) or len(given) - 1
        inputs, labels = given[:count], given[count:]
        return inputs[0] if len(inputs) == 1 else tuple(inputs), labels[0] if len(labels) == 1 else tuple(labels)

    # ---- programs ----------------------------------------------------------------------------------------------------

    @property
    def serial_main_program(self) -> Program:
        """The program of one device, recorded from the specs of `prepare`."""
        if not self._specs[0] or not self._specs[1]:
            raise UsageError(
                say(
                    "Engine.serial_main_program before prepare(inputs_spec=, labels_spec=), from which Paddle makes it "
                    "too",
                    "在 prepare(inputs_spec=, labels_spec=) 之前读取 Engine.serial_main_program；飞桨也由它们生成程序",
                )
            )
        with applied():
            return recorded(self._whole or self._model, self._loss, self._optimizer, *self._specs)

    @property
    def serial_startup_program(self) -> Program:
        """Empty: layers draw their parameters when they are made."""
        return Program()

    startup_program = serial_startup_program

    @property
    def main_program(self) -> Program:
        """The ops of one device; how ranks share them is `engine.trainer.plan`, and `unisono explain` shows it."""
        return self.serial_main_program


def _listed(spec: Any) -> list[InputSpec]:
    return [] if spec is None else list(spec) if isinstance(spec, list | tuple) else [spec]


class _Watched:
    """Sees the outputs and losses of a step's microbatches, where a rank computes them, and has them on all."""

    def __init__(self, trainer: Trainer, metrics: list[Accuracy]) -> None:
        self._trainer, self._metrics = trainer, metrics
        self._topk = [k for each in metrics for k in each.topk]
        self._correct = torch.zeros(1 + len(self._topk), dtype=torch.float64)  # of how many samples first
        self._losses = torch.zeros(trainer.plan.microbatches, dtype=torch.float64)

    def __enter__(self) -> _Watched:
        self._trainer.on_loss = self._add
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.on_loss = None

    def _add(self, number: int, outputs: Any, targets: Any, loss: torch.Tensor) -> None:
        if self._trainer.mesh.index("tp"):  # all tp ranks of a data rank have the same outputs
            return
        self._losses[number] += loss.to("cpu", torch.float64)
        if self._topk:
            rights = [is_correct(outputs.detach(), targets, k).sum().item() for k in self._topk]
            self._correct += torch.tensor([len(outputs), *rights], dtype=torch.float64)

    def results(self, loss: torch.Tensor) -> dict[str, Any]:
        """Every rank calls it."""
        plan, ranks = self._trainer.plan, self._trainer.mesh.comm()
        found: dict[str, Any] = {"loss": loss.detach().cpu().numpy()}
        sums = ranks.all_reduce(torch.cat([self._losses, self._correct]).to(ranks.device)).cpu()
        if plan.pp > 1:
            found["loss"] = (sums[: plan.microbatches] * plan.microbatches).to(loss.dtype).numpy()
        samples, *rights = sums[plan.microbatches :].tolist()
        names = [name for each in self._metrics for name in each.name()]
        return found | {name: np.float32(right / samples) for name, right in zip(names, rights, strict=True)}
