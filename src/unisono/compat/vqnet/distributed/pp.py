"""A pipeline over ranks, described by VQNet's dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.utils.data import Dataset

from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import joined
from unisono.compat.vqnet.distributed.settings import Settings, optimizer_of
from unisono.compat.vqnet.tensor.qtensor import plain
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.plan.plan import Plan
from unisono.train.data.loader import Loader

_NAME = "PipelineParallelTrainingWrapper"
_KEYS = {
    "train_batch_size": "samples of a step, on all ranks together",
    "train_micro_batch_size_per_gpu": "samples of a microbatch",
    "pipeline_parallel_size": "stages",
    "optimizer": "a dictionary of type and params",
    "loss": "called as loss(target, output)",
    "steps": "batches of a train_batch(); by default those of an epoch",
    "seed": "of the data's order and of dropout; by default 0",
    "gradient_clipping": "the largest norm of the gradients",
    "backend": "mpi | nccl | gloo",
    "epochs": "for the program's own use",
    "local_rank": "for the program's own use",
}


class PipelineParallelTrainingWrapper:
    """Trains a list of layers as a pipeline (1F1B), to the same parameters as one process would.

    Ranks beyond `pipeline_parallel_size` make further pipelines that share the batch. `train_batch()` trains `steps`
    batches and goes on in the dataset where the last call ended; `loss_dict` holds the loss of each step, by its number
    from 1. A layer may be any function. All ranks start from rank 0's parameters.
    """

    def __init__(self, args: Mapping[str, Any], join_layers: Sequence[Callable[[Any], Any]], trainset: Any) -> None:
        settings = Settings(f"{_NAME}, args", args, _KEYS)
        optimizer = optimizer_of(f"{_NAME}, args", settings.need("optimizer"))
        loss = _with_output_first(settings.need("loss"))
        batch, seed = settings.count("train_batch_size"), settings.count("seed", 0, least=0)
        model = nn.Sequential(*[_layer(number, each) for number, each in enumerate(_listed(join_layers))])
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                say(f"{_NAME}: join_layers have no parameters to train", f"{_NAME}：join_layers 中没有可训练的参数")
            )
        clip = settings.norm("gradient_clipping")
        micro, stages = settings.count("train_micro_batch_size_per_gpu"), settings.count("pipeline_parallel_size")
        comm = joined(settings.get("backend"))
        self.plan = _plan(comm.size, stages, batch, micro)
        self._data = _Plain(trainset)
        example = next(iter(self._loader(batch, seed, (0, 1), comm.device))).batch
        self.trainer = parallelize(
            model.to(comm.device), self.plan, loss=loss, optimizer=optimizer, example=example, clip=clip, seed=seed
        )
        self.loader = self._loader(batch, seed, self.trainer.part, comm.device)
        self.steps = settings.count("steps", len(self.loader))
        self.loss_dict: dict[int, float] = {}
        self._batches = self._endless()

    def _loader(self, batch: int, seed: int, part: tuple[int, int], device: torch.device) -> Loader:
        return Loader(self._data, batch, part=part, seed=seed, drop_last=True, device=device)

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train_batch(self) -> float:
        """Train `steps` batches; the loss of the last."""
        for _ in range(self.steps):
            loss = float(self.trainer.step(next(self._batches)))
            self.loss_dict[self.trainer.steps] = loss
        return loss


def _plan(ranks: int, stages: int, batch: int, micro: int) -> Plan:
    if ranks % stages:
        raise UsageError(
            say(
                f"{_NAME}, args: pipeline_parallel_size={stages} does not divide the {ranks} ranks that are running",
                f"{_NAME}，args：pipeline_parallel_size={stages} 不能整除正在运行的 {ranks} 个进程",
            )
        )
    replicas = ranks // stages
    if batch % (micro * replicas):
        raise UsageError(
            say(
                f"{_NAME}, args: train_batch_size={batch} is no multiple of train_micro_batch_size_per_gpu="
                f"{micro} times {replicas} pipelines",
                f"{_NAME}，args：train_batch_size={batch} 不是 train_micro_batch_size_per_gpu={micro} 乘以 "
                f"{replicas} 条流水线的倍数",
            )
        )
    return Plan(dp=replicas, pp=stages, microbatches=batch // (micro * replicas))


class _Function(nn.Module):
    """A layer that is a plain function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def _listed(layers: Any) -> list[Any]:
    if not hasattr(layers, "__iter__") or not (listed := list(layers)):
        raise UsageError(
            say(
                f"{_NAME}: join_layers is {layers!r}; expected a list of layers",
                f"{_NAME}：join_layers 为 {layers!r}；应为层的列表",
            )
        )
    return listed


def _layer(number: int, given: Any) -> nn.Module:
    if not callable(given):
        raise UsageError(
            say(
                f"{_NAME}: layer {number} is a {type(given).__name__}; expected a module or a function",
                f"{_NAME}：第 {number} 层是 {type(given).__name__}；应为模块或函数",
            )
        )
    return given if isinstance(given, nn.Module) else _Function(given)


def _with_output_first(loss: Any) -> Callable[[Any, Any], torch.Tensor]:
    if not callable(loss) or isinstance(loss, type):
        given = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
        raise UsageError(
            say(
                f"{_NAME}, args: loss is {given}; expected a loss such as CrossEntropyLoss()",
                f"{_NAME}，args：loss 为 {given}；应为 CrossEntropyLoss() 等 loss",
            )
        )
    if isinstance(loss, _Loss) or getattr(loss, "__module__", "") == "torch.nn.functional":
        return loss  # torch's own take the output first already

    def output_first(output: Any, target: Any) -> torch.Tensor:
        return loss(target, output)

    output_first.__name__ = f"{getattr(loss, '__name__', type(loss).__name__)}(target, output)"
    return output_first


class _Plain(Dataset[Any]):
    """A dataset of torch's own tensors."""

    def __init__(self, data: Any) -> None:
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise UsageError(
                say(
                    f"{_NAME}: a trainset of type {type(data).__name__}; expected one with a length and "
                    "numbered samples",
                    f"{_NAME}：trainset 的类型为 {type(data).__name__}；应有长度，且样本可按编号读取",
                )
            )
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return plain(self.data[index])
