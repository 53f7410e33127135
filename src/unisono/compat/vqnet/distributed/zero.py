"""ZeRO, described by VQNet's dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import joined
from unisono.compat.vqnet.distributed.settings import Settings, optimizer_of
from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.tensor.qtensor import plain, wrapped
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.data import batchnorm
from unisono.parallel.data.clip import clip_by_norm
from unisono.parallel.zero.fully_sharded import zero_optimizer
from unisono.plan.plan import AXES, Plan

_NAME = "ZeroModelInitial"
_KEYS = {
    "train_batch_size": "samples of a step",
    "optimizer": "a dictionary of type and params, where none is passed",
    "zero_optimization": "a dictionary of stage",
    "gradient_clipping": "the largest norm of the gradients",
}


class ZeroModelInitial(Module):
    """A model whose optimizer state (stage 1), gradients (2) and parameters (3) are sharded over all ranks.

        model = ZeroModelInitial(args, model, optimizer)
        loss = criterion(labels, model(data)); model.backward(loss); model.step()

    The loss is a mean over samples. Whether ranks are given the same batch, as in VQNet's example, or each a part of
    it, of any size: the step is that of one process with all of them, for a rank counts as much as it has samples.
    (Of the same batch on all ranks, BatchNorm's running variance alone differs a little: it counts samples.)
    All ranks start from rank 0's parameters.
    """

    def __init__(self, args: Mapping[str, Any], model: nn.Module, optimizer: Optimizer | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise UsageError(
                say(
                    f"{_NAME}: the model is a {type(model).__name__}; expected a Module",
                    f"{_NAME}：模型是 {type(model).__name__}；应为 Module",
                )
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                say(
                    f"{_NAME}: {type(model).__name__} has no parameters to train",
                    f"{_NAME}：{type(model).__name__} 没有可训练的参数",
                )
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(
                say(
                    f"{_NAME}: the optimizer is a {_kind(optimizer)}; expected one that was made for the "
                    "model's parameters, or None for that of args",
                    f"{_NAME}：优化器是 {_kind(optimizer)}；应为针对模型参数建立的优化器，或 None（用 args 中的）",
                )
            )
        settings = Settings(f"{_NAME}, args", args, _KEYS)
        settings.count("train_batch_size")
        stage = Settings(
            f"{_NAME}, args, zero_optimization", settings.need("zero_optimization"), {"stage": "1, 2 or 3"}
        ).count("stage")
        if stage > 3:
            raise UsageError(
                say(
                    f"{_NAME}, args, zero_optimization: stage={stage}; expected 1, 2 or 3",
                    f"{_NAME}，args，zero_optimization：stage={stage}；应为 1、2 或 3",
                )
            )
        if optimizer is None:
            make = optimizer_of(f"{_NAME}, args", settings.need("optimizer"))
        else:
            make = _same(optimizer, model)
        self._clip = settings.norm("gradient_clipping")
        self._comm = joined()
        self._mesh = Mesh(Plan(dp=self._comm.size).shape, AXES).connect()
        self._comm.broadcast_parameters(model)
        model.zero_grad()  # what was left by an earlier loop is not of the first step
        batchnorm.convert(model, self._mesh)
        self._zero = zero_optimizer(model, self._mesh, make, stage)
        self.module = model
        self._batch_sizes: dict[bool, set[int]] = {
            True: set(),
            False: set(),
        }  # of forwards since, by whether in training
        self._has_gradients = False

    @property
    def optimizer(self) -> Optimizer:
        return self._zero.optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        if torch.is_grad_enabled():
            self._batch_sizes[self.module.training].add(sizes[0] if sizes else 1)
        return wrapped(self.module(*plain(args), **plain(kwargs)))

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the mean over all ranks' samples."""
        if not any(self._batch_sizes.values()) or self._has_gradients:
            raise UsageError(
                say(
                    f"{_NAME}: call the model, backward(loss) and step() in this order, each once",
                    f"{_NAME}：请依次调用模型、backward(loss) 和 step()，各一次",
                )
            )
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise UsageError(
                say(
                    f"{_NAME}: backward of {loss!r}; expected a loss that was computed from the outputs",
                    f"{_NAME}：backward 的参数为 {loss!r}；应为由输出算出的 loss",
                )
            )
        if loss.numel() != 1:
            raise UsageError(
                say(
                    f"{_NAME}: backward of a loss of shape {tuple(loss.shape)}; expected one number",
                    f"{_NAME}：backward 的 loss 形状为 {tuple(loss.shape)}；应为一个数",
                )
            )
        plain(loss * self._share()).backward()
        self._zero.finish()
        self._batch_sizes, self._has_gradients = {True: set(), False: set()}, True

    def _share(self) -> float:
        """Of all ranks' samples, those that this rank trains on. Where forwards leave that open, all ranks refuse."""
        sizes = self._batch_sizes[True] or self._batch_sizes[False]
        seen = self._comm.all_gather(torch.tensor([min(sizes), max(sizes)], device=self._comm.device))
        counts = torch.stack(seen).cpu().double()
        shares = counts / counts.sum(0)
        if not torch.allclose(shares[:, 0], shares[:, 1]):
            listed = "; ".join(
                say(f"rank {rank} on {int(a)} to {int(b)}", f"{rank} 号进程 {int(a)} 到 {int(b)}")
                for rank, (a, b) in enumerate(counts.tolist())
            )
            raise UsageError(
                say(
                    f"{_NAME}: backward after forwards of different numbers of samples ({listed}); call the "
                    "model under no_grad() where its output is not trained on",
                    f"{_NAME}：backward 之前各次前向的样本数不同（{listed}）；不用于训练的输出请在 no_grad() 下计算",
                )
            )
        return float(shares[self._comm.rank, 0])

    def step(self) -> None:
        """Let the optimizer step, and forget the gradients."""
        if not self._has_gradients:
            raise UsageError(
                say(f"{_NAME}: step() without backward(loss) before it", f"{_NAME}：step() 之前没有 backward(loss)")
            )
        if self._clip is not None:
            clip_by_norm([each for _, each in self._zero.optimized()], self._clip, self._mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for _, each in self._zero.optimized():
            each.grad = None
        self._has_gradients = False


def _kind(given: Any) -> str:
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    return say(f"class, {name}", f"类 {name}") if isinstance(given, type) else name


def _same(optimizer: Optimizer, model: nn.Module) -> Callable[[Any], Optimizer]:
    """Makes the optimizer that is there already; for other parameters, which only a trial has, one of its kind."""
    mine = {id(parameter) for parameter in model.parameters()}

    def make(parameters: Any) -> Optimizer:
        listed = list(parameters)
        if any(id(each) in mine for each in listed):
            return optimizer
        return type(optimizer)(listed, **optimizer.defaults)

    return make
