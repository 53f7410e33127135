"""The contestants of overhead.py: one GPT, trained by unisono, by raw torch, by DeepSpeed and by Accelerate.

Every one is a function that takes a freshly built model and gives a `Contestant`, whose `step` trains on one global
batch. They all start from the same weights, see the same batches and use torch's own AdamW.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unisono as uni

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Config:
    vocabulary: int = 1024
    context: int = 128
    width: int = 256
    heads: int = 8
    layers: int = 4
    batch: int = 8
    microbatches: int = 4
    fused: bool = False  # AdamW told to step all of its tensors at once, for every contestant


class Attention(nn.Module):
    """Queries, keys and values are layers of their own, because torch's ColwiseParallel cannot cut a joint one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: Config, device: torch.device | str = "cpu") -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(device)


def batch(config: Config, number: int, device: torch.device | str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(config.vocabulary, (config.batch, config.context + 1), generator=generator).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=config.fused or None)


@dataclass
class Contestant:
    step: Callable[[Batch], torch.Tensor | None]
    # Of what the loss on a rank is: the full batch, its share (then the ranks' mean is the full batch's), the last
    # rank's.
    loss_is: Literal["whole", "share", "last"]


Make = Callable[[Config], Contestant]


# ---- unisono ---------------------------------------------------------------------------------------------------------

RULES = {"*.q": "column", "*.k": "column", "*.v": "column", "*.out": "row", "*.fc1": "column", "*.fc2": "row"}


def unisono(plan: str) -> Make:
    def make(config: Config) -> Contestant:
        rules = RULES if "tp" in plan else None
        trainer = uni.parallelize(
            build(config), plan, loss=loss, optimizer=optimizer(config), example=batch(config, 0), rules=rules
        )
        return Contestant(trainer.step, "whole")

    return make


# ---- torch -----------------------------------------------------------------------------------------------------------


def share_of(full: Batch) -> Batch:
    """This rank's rows."""
    rows = len(full[0]) // dist.get_world_size()
    mine = slice(rows * dist.get_rank(), rows * (dist.get_rank() + 1))
    return full[0][mine], full[1][mine]


def plain_step(
    model: nn.Module,
    stepping: torch.optim.Optimizer,
    sharded: Callable[[Batch], Batch] = lambda full: full,
    loss: Callable[..., torch.Tensor] = loss,
) -> Callable[[Batch], torch.Tensor]:
    """The loop that everybody writes."""

    def step(full: Batch) -> torch.Tensor:
        inputs, targets = sharded(full)
        stepping.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        stepping.step()
        return value.detach()

    return step


def torch_ddp(config: Config) -> Contestant:
    model = nn.parallel.DistributedDataParallel(build(config), gradient_as_bucket_view=True)
    return Contestant(plain_step(model, optimizer(config)(model.parameters()), share_of), "share")


def torch_fully_shard(config: Config) -> Contestant:
    from torch.distributed.fsdp import fully_shard

    model = build(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contestant(plain_step(model, optimizer(config)(model.parameters()), share_of), "share")


def torch_ddp_compiled(config: Config) -> Contestant:
    built = compiled(build(config))
    model = nn.parallel.DistributedDataParallel(built, gradient_as_bucket_view=True)
    step = plain_step(model, optimizer(config)(model.parameters()), share_of, torch.compile(loss))
    return Contestant(step, "share")


def torch_fully_shard_compiled(config: Config) -> Contestant:
    from torch.distributed.fsdp import fully_shard

    model = compiled(build(config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = plain_step(model, optimizer(config)(model.parameters()), share_of, torch.compile(loss))
    return Contestant(step, "share")


def compiled(model: GPT) -> GPT:
    """Block by block, as torchtitan does."""
    for block in model.blocks:
        block.compile()
    model.norm.compile()
    return model


def torch_parallelize_module(config: Config) -> Contestant:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "fc1")}
        rows = {name: RowwiseParallel() for name in ("attention.out", "fc2")}
        parallelize_module(block, mesh, {**columns, **rows})
    return Contestant(plain_step(model, optimizer(config)(model.parameters())), "whole")


class _Half(nn.Module):
    """The first or the second half of the GPT's blocks, with what comes before or after them."""

    def __init__(self, full: GPT, is_first: bool) -> None:
        super().__init__()
        middle = len(full.blocks) // 2
        self.is_first = is_first
        self.blocks = full.blocks[:middle] if is_first else full.blocks[middle:]
        if is_first:
            self.tokens, self.positions = full.tokens, full.positions
        else:
            self.norm, self.head = full.norm, full.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.is_first else self.head(self.norm(x))


def torch_schedule_1f1b(config: Config) -> Contestant:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    is_first = dist.get_rank() == 0
    model = _Half(build(config), is_first)
    stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, config.microbatches, loss_fn=loss)
    stepping = optimizer(config)(model.parameters())

    def step(full: Batch) -> torch.Tensor | None:
        stepping.zero_grad()
        losses: list[torch.Tensor] = []
        if is_first:
            schedule.step(full[0])
        else:
            schedule.step(target=full[1], losses=losses)
        stepping.step()
        return torch.stack([part.detach() for part in losses]).mean() if losses else None

    return Contestant(step, "last")


# ---- others ----------------------------------------------------------------------------------------------------------


def accelerate(config: Config) -> Contestant:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = build(config)
    model, stepping = accelerator.prepare(model, optimizer(config)(model.parameters()))

    def step(full: Batch) -> torch.Tensor:
        inputs, targets = share_of(full)
        stepping.zero_grad()
        value = loss(model(inputs), targets)
        accelerator.backward(value)
        stepping.step()
        return value.detach()

    return Contestant(step, "share")


def deepspeed(stage: int) -> Make:
    def make(config: Config) -> Contestant:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed as ds

        ds.utils.logger.setLevel("ERROR")
        model = build(config)
        settings = {
            "train_batch_size": config.batch,
            "train_micro_batch_size_per_gpu": config.batch // dist.get_world_size(),
            "zero_allow_untested_optimizer": True,
            # The memory-efficient linear layer would replace F.linear for all contestants in the process.
            "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        }
        with contextlib.redirect_stdout(io.StringIO()):
            engine, *_ = ds.initialize(
                model=model, optimizer=optimizer(config)(model.parameters()), config=settings, dist_init_required=False
            )

        def step(full: Batch) -> torch.Tensor:
            inputs, targets = share_of(full)
            value = loss(engine(inputs), targets)
            engine.backward(value)
            engine.step()
            return value.detach()

        return Contestant(step, "share")

    return make


def groups(config: Config) -> dict[str, dict[str, Make]]:
    """Who is compared with whom; unisono first, then raw torch where it has an equivalent, then the others."""
    pipeline = f"pp=2,microbatches={config.microbatches}"
    return {
        "dp": {"unisono dp=2": unisono("dp=2"), "torch DDP": torch_ddp, "Accelerate": accelerate},
        "zero1": {"unisono dp=2,zero=1": unisono("dp=2,zero=1"), "DeepSpeed ZeRO-1": deepspeed(1)},
        "zero2": {"unisono dp=2,zero=2": unisono("dp=2,zero=2"), "DeepSpeed ZeRO-2": deepspeed(2)},
        "zero3": {
            "unisono dp=2,zero=3": unisono("dp=2,zero=3"),
            "torch fully_shard": torch_fully_shard,
            "DeepSpeed ZeRO-3": deepspeed(3),
        },
        "dp-compile": {"unisono dp=2,compile": unisono("dp=2,compile"), "torch DDP, compiled": torch_ddp_compiled},
        "zero3-compile": {
            "unisono dp=2,zero=3,compile": unisono("dp=2,zero=3,compile"),
            "torch fully_shard, compiled": torch_fully_shard_compiled,
        },
        "tp": {"unisono tp=2": unisono("tp=2"), "torch parallelize_module": torch_parallelize_module},
        "pp": {f"unisono {pipeline}": unisono(pipeline), "torch Schedule1F1B": torch_schedule_1f1b},
    }


def missing(name: str) -> str | None:
    """The package that a contestant needs and that is not installed."""
    package = name.split()[0].lower()
    if package in ("deepspeed", "accelerate") and importlib.util.find_spec(package) is None:
        return package
    return None


def single(device: torch.device, config: Config) -> dict[str, Contestant]:
    """One rank: unisono in a world of one against the plain loop."""
    model = build(config, device)
    twin = copy.deepcopy(model)
    trainer = uni.parallelize(model, "dp=1", loss=loss, optimizer=optimizer(config))
    return {
        "unisono dp=1": Contestant(trainer.step, "whole"),
        "plain loop": Contestant(plain_step(twin, optimizer(config)(twin.parameters())), "whole"),
    }
