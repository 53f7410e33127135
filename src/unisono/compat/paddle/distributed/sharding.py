"""paddle.distributed.sharding: group_sharded_parallel, which is ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.paddle.distributed.environment import comm
from unisono.compat.paddle.distributed.fleet.models import DataParallel
from unisono.compat.paddle.optimizer import Optimizer
from unisono.compat.paddle.paddle_names import missing_names
from unisono.errors import UsageError
from unisono.plan.plan import Plan

LEVELS = {"os": 1, "os_g": 2, "p_g_os": 3}


def group_sharded_parallel(
    model: Any,
    optimizer: Optimizer,
    level: str,
    scaler: Any = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Any = None,
) -> tuple[DataParallel, Optimizer, Any]:
    """The model and the optimizer with the optimizer's state ("os"), gradients too ("os_g") or parameters too
    ("p_g_os") shared among ranks. offload: the state is in the host's memory. Sizes of buffers are unisono's own."""
    if level not in LEVELS:
        raise UsageError(
            say(
                f"group_sharded_parallel(level={level!r}): as in Paddle, one of {', '.join(map(repr, LEVELS))}",
                f"group_sharded_parallel(level={level!r})：与飞桨相同，应为 {', '.join(map(repr, LEVELS))} 之一",
            )
        )
    ranks = comm().size
    if group is not None and group.nranks != ranks:
        raise UsageError(
            say(
                f"group_sharded_parallel over {list(group.ranks)} of {ranks} ranks: Paddle would train the others "
                "apart; "
                "here the group has all ranks; uni.Plan(dp=..., shard=..., zero=...) shards within parts of them",
                f"group_sharded_parallel 只在 {ranks} 个进程中的 {list(group.ranks)} 上切分：飞桨的其它进程会各自训练；"
                "这里的组须包含全部进程；在部分进程内切分请用 uni.Plan(dp=..., shard=..., zero=...)",
            )
        )
    if scaler is not None or dp_group is not None or exclude_layer is not None:
        raise UsageError(
            say(
                "group_sharded_parallel(scaler=, dp_group=, exclude_layer=): Paddle takes them; here half precision is "
                'uni.parallelize(precision="bf16"), and more groups are a uni.Plan',
                "group_sharded_parallel(scaler=, dp_group=, exclude_layer=)：飞桨支持；这里半精度请用 "
                'uni.parallelize(precision="bf16")，更多的组请用 uni.Plan',
            )
        )
    wrapped = DataParallel(model, Plan(dp=ranks, zero=LEVELS[level], offload=offload))
    return wrapped, optimizer, scaler


def save_group_sharded_model(model: DataParallel, output: str, optimizer: Optimizer | None = None) -> None:
    """Write the full parameters and the full state of the optimizer into a folder; every rank calls it."""
    trainer = model.trainer
    state = {"model": model.state_dict()} if trainer is None else trainer.state_dict()
    if comm().rank == 0:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state["model"], folder / "model.pdmodel")
        if optimizer is not None and "optimizer" in state:
            torch.save(state["optimizer"], folder / "model.pdopt")
    comm().barrier()


__getattr__ = missing_names(__name__)
