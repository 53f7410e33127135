"""Models, losses and optimizers that strangers write and that a plan once trained wrong without a word.

Each is a pair of a task and a plan. Under today's plans they are right or refused; the self-check must find each of
them all the same where the refusal or the fix is switched off (`test_self_check.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono as uni

WIDTH = 16


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 4, generator=generator)


def _ids(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (8, 8), generator=generator)
    return ids, ids.roll(-1, 1)


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head, which tp shards by what the blocks show."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(linear) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Language(Net):
    """The same for tokens."""

    def __init__(self, embedding: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH) if embedding is None else embedding
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tokens(ids))


# ---- tp: subclasses, hooks, weights that are used beyond their layer -----------------------------------------------


class ScaledLinear(nn.Linear):
    """Its forward is its own, as of quantised and adapted layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


def _with_hooks() -> nn.Module:
    net = Net()
    for block in net.blocks:
        block.up.register_forward_hook(lambda module, args, output: output - output.mean(-1, keepdim=True))
    return net


class Regularised(Net):
    """A weight that is used beyond its layer."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        penalty = sum(block.up.weight.square().sum() for block in self.blocks)
        return super().forward(x), penalty.expand(len(x))  # type: ignore[union-attr]


def _regularised_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], targets) + 0.01 * outputs[1].mean()


def _with_step_hook(parameters: Any) -> torch.optim.Optimizer:
    """Gradients are normalised, tensor by tensor, before each step."""
    optimizer = _sgd(parameters)

    def normalise(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1e-6

    optimizer.register_step_pre_hook(normalise)
    return optimizer


# ---- dp and microbatches: samples that are not alone ---------------------------------------------------------------


class TimeMajor(Language):
    """Activations are (time, batch, width), as where batch_first is False."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids.t()))
        return Net.forward(self, x).transpose(0, 1)


class TableDropout(Language):
    """Drops rows of a table that has no samples, as DeBERTa does with its relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(8, WIDTH))
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, self.tokens(ids) + self.drop(self.positions))


class Centred(Net):
    """Samples are mixed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Sized(Net):
    """The number of samples is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (x.shape[0] / 8))


class TaskWeights(Net):
    """Outputs that are not per sample: learned weights of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.log_variances


def _weighted_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    predicted, weights = outputs
    return (F.mse_loss(predicted, targets) * (-weights).exp().sum()) + weights.sum()


class OldSpectralNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.spectral_norm(self.head)


# ---- cp: tokens that are mixed -------------------------------------------------------------------------------------


class LargestBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(*3 * (x.unflatten(-1, (2, -1)).transpose(1, 2),), is_causal=True)
        return super().forward(attended.transpose(1, 2).flatten(2)) + x.amax(1, keepdim=True)


class Largest(Language):
    """Tokens are mixed by a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LargestBlock() for _ in range(2))


# ---- caches, ranks and the world -----------------------------------------------------------------------------------


@functools.lru_cache
def _table(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32).cos()


class Cached(Net):
    """A table that a function keeps from its first call, whatever device that was on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * _table(x.shape[-1]).to(x))


class WorldModel(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (dist.get_world_size() if dist.is_initialized() else 1)


def _world_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets) * (dist.get_world_size() if dist.is_initialized() else 1)


def _world_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 * (dist.get_world_size() if dist.is_initialized() else 1))


class RankModel(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (dist.get_rank() if dist.is_initialized() else 0)


def _task(model: Callable[[], nn.Module], **given: Any) -> uni.Task:
    return uni.Task(**{"model": model, "loss": F.mse_loss, "optimizer": _sgd, "batch": _vectors} | given)


def _tokens(model: Callable[[], nn.Module], **given: Any) -> uni.Task:
    return _task(model, **{"loss": _token_loss, "batch": _ids} | given)


def _frequent() -> nn.Module:
    return Language(nn.Embedding(32, WIDTH, scale_grad_by_freq=True))


def _limited() -> nn.Module:
    return Language(nn.Embedding(32, WIDTH, max_norm=1.0))


_RULES = {"*.up": "column", "*.down": "row"}

WRONG: dict[str, tuple[uni.Task, str]] = {
    "linear subclass": (_task(functools.partial(Net, ScaledLinear), rules=_RULES), "tp=2"),
    "forward hooks": (_task(_with_hooks, rules=_RULES), "tp=2"),
    "weights beyond their layer": (_task(Regularised, loss=_regularised_loss), "tp=2"),
    "weights beyond their layer, by rules": (_task(Regularised, loss=_regularised_loss, rules=_RULES), "tp=2"),
    "step hook, tp": (_task(Net, optimizer=_with_step_hook), "tp=2"),
    "step hook, zero": (_task(Net, optimizer=_with_step_hook), "dp=2,zero=1"),
    "time-major dropout": (_tokens(TimeMajor), "dp=2"),
    "table dropout": (_tokens(TableDropout), "dp=2"),
    "mixed samples": (_task(Centred), "dp=2"),
    "batch size": (_task(Sized), "dp=2"),
    "task weights": (_task(TaskWeights, loss=_weighted_loss), "dp=2"),
    "max_norm": (_tokens(_limited), "dp=2"),
    "scale_grad_by_freq": (_tokens(_frequent), "dp=2"),
    "old spectral_norm": (_task(OldSpectralNorm), "microbatches=2"),
    "tokens mixed by a maximum": (_tokens(Largest), "cp=2"),
    "cache": (_task(Cached), "dp=2"),
    "world model": (_task(WorldModel), "dp=2"),
    "world loss": (_task(functools.partial(Net), loss=_world_loss), "dp=2"),
    "world rate": (_task(Net, optimizer=_world_rate), "dp=2"),
    "rank model": (_task(RankModel), "dp=2"),
}
