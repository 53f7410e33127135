"""Trainers that ranks of a pool keep between tests, and what is done with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono as uni
from tests.equivalence import tasks
from unisono.comm.communicator import Communicator
from unisono.parallel.full_state import full_shape
from unisono.parallel.layout import layout_of, local_of
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.inventory import named_tensors


class AttentionBlock(nn.Module):
    """Half of a GPT's block: all kinds of shards that the other half has."""

    def __init__(self, full_value: Any) -> None:
        super().__init__()
        self.norm1, self.attention, self.drop = full_value.norm1, full_value.attention, full_value.drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.attention(self.norm1(x)))


def _slim() -> nn.Module:
    made = tasks.GPT(tasks.Config(vocabulary=32, context=16, width=16, heads=4, layers=4, dropout=0.1))
    made.blocks = nn.ModuleList(AttentionBlock(block) for block in made.blocks)
    return made


slim = replace(tasks.gpt, model=_slim, rules={k: v for k, v in tasks.GPT_RULES.items() if ".fc" not in k}, name="slim")

_trainers: dict[tuple[str, str], Trainer] = {}


def trainer_of(task: str, plan: str) -> Trainer:
    """Kept: every test that takes it loads a state into it first, or makes steps from the one it finds."""
    if (task, plan) not in _trainers:
        _trainers[task, plan] = new_trainer(task, plan)
    return _trainers[task, plan]


def new_trainer(task: str, plan: str, **options: Any) -> Trainer:
    found = slim if task == "slim" else getattr(tasks, task)
    return uni.parallelize(
        found.model,
        plan,
        loss=found.loss,
        optimizer=found.optimizer,
        example=found.batch(0),
        rules=found.rules,
        clip=found.clip,
        dtype=torch.float64,
        check="off",  # what is saved and loaded does not depend on it
        **options,
    )


def steps(trainer: Trainer, task: str, first: int, last: int) -> list[float]:
    found = slim if task == "slim" else getattr(tasks, task)
    losses = []
    for number in range(first, last):
        inputs, targets = found.batch(number)
        if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
            inputs = inputs.double()
        losses.append(float(trainer.step((inputs, targets))))
    return losses


def save(comm: Communicator, folder: str, task: str, plan: str, wait: bool) -> int:
    """A step, a checkpoint, and beside it what it must hold and how training went on. The bytes this rank wrote."""
    trainer = new_trainer(task, plan)
    _trainers[task, plan] = trainer
    steps(trainer, task, 0, 1)
    path = Path(folder) / f"{task} {plan}"
    checkpoints = uni.Checkpoints(path)
    torch.save(shards_here(trainer), Path(folder) / f"{task} {plan} {comm.rank}.pt")
    checkpoints.save(trainer, 1, {"position": 7}, {"plan": plan, "weights": torch.arange(3)}, wait=wait)
    losses = steps(trainer, task, 1, 3)  # while it is written
    checkpoints.wait()
    comm.barrier()
    if comm.rank == 0:
        torch.save({"state": joined(path, comm.size, trainer), "losses": losses}, path / "expected.pt")
    comm.barrier()
    return (path / "step-00000001" / f"rank-{comm.rank:05d}.safetensors").stat().st_size


def shards_here(trainer: Trainer) -> dict[str, Any]:
    """This rank's tensors, each with its elements' indices in the full one, found without the checkpoint's own code."""

    def shard(value: Any, tensor: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or not tensor.ndim:
            return value
        shape = full_shape(tensor)
        places = local_of(torch.arange(shape.numel()).view(shape), layout_of(tensor), trainer.mesh)
        return shape, places, value.detach()

    states = {
        name: {key: shard(value, tensor) for key, value in trainer.optimizer.state.get(tensor, {}).items()}
        for name, tensor in trainer.optimized()
    }
    return {"model": {name: shard(t, t) for name, t in named_tensors(trainer).items()}, "optimizer": states}


def joined(path: Path, ranks: int, trainer: Trainer) -> dict[str, Any]:
    """The full state, from what all ranks have put down."""
    wholes: dict[tuple[str, ...], Any] = {}

    def join(key: tuple[str, ...], shard: Any) -> None:
        if not isinstance(shard, tuple):
            wholes.setdefault(key, shard)
            return
        shape, places, values = shard
        full_value = wholes.setdefault(key, torch.full((shape.numel(),), 7, dtype=values.dtype))
        full_value[places.reshape(-1)] = values.reshape(-1)
        shapes[key] = shape

    shapes: dict[tuple[str, ...], torch.Size] = {}
    for rank in range(ranks):
        theirs = torch.load(path.with_name(f"{path.name} {rank}.pt"), weights_only=False)
        for name, shard in theirs["model"].items():
            join((name,), shard)
        for name, state in theirs["optimizer"].items():
            for key, shard in state.items():
                join((name, key), shard)
    full_value = {key: value.view(shapes[key]) if key in shapes else value for key, value in wholes.items()}
    states: dict[str, Any] = {key[0]: {} for key in full_value}
    for key, value in full_value.items():
        if len(key) == 2:
            states[key[0]][key[1]] = value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trainer.optimizer.param_groups]
    return {
        "model": {key[0]: value for key, value in full_value.items() if len(key) == 1},
        "optimizer": {"state": states, "param_groups": groups},
        "steps": 1,
        "skipped": 0,
    }


def load(comm: Communicator, folder: str, task: str, saved: list[str], plan: str, goes_on: list[str]) -> list[str]:
    """Load each checkpoint under this plan, and go on from some; what was not as it must be."""
    trainer = trainer_of(task, plan)
    faults = []
    for under in saved:
        path = Path(folder) / f"{task} {under}"
        expected = torch.load(path / "expected.pt", weights_only=False)  # ours, and twice as fast
        restored = uni.Checkpoints(path).load(trainer)
        words = (restored.step, restored.data_state, restored.plan, restored.extra, restored.note)
        extra = {"plan": under, "weights": torch.arange(3)}
        awaited = (1, {"position": 7}, str(uni.Plan.parse(under)), extra, "")
        faults += [f"{under} -> {plan}: {fault}" for fault in unequal(words, awaited, "restored")]
        faults += [f"{under} -> {plan}: {fault}" for fault in unequal_here(trainer, expected["state"])]
        if under not in goes_on:
            continue
        losses = steps(trainer, task, 1, 3)
        gap = max(abs(one - other) / abs(other) for one, other in zip(losses, expected["losses"], strict=True))
        if gap > (0 if plan == under else 1e-9):
            faults.append(f"{under} -> {plan}: losses part by {gap:.1e}")
    return faults


def unequal_here(trainer: Trainer, state: dict[str, Any]) -> list[str]:
    """How what this rank has differs from its part of a full state."""
    optimizer = trainer.optimizer
    faults = unequal_shards(trainer, state["model"])
    for name, tensor in trainer.optimized():
        full_value = state["optimizer"]["state"][name]
        shards = {key: _shard(value, tensor, trainer) for key, value in full_value.items()}
        faults += unequal(dict(optimizer.state.get(tensor, {})), shards, f"state of {name}")
    for number, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        saved = {key: value for key, value in state["optimizer"]["param_groups"][number].items() if key != "params"}
        faults += unequal(values, saved, f"group {number}")
    counts = {"steps": trainer.steps, "skipped": trainer.skipped}
    return faults + unequal(counts, {key: state[key] for key in counts}, "trainer")


def unequal_shards(trainer: Trainer, model: dict[str, torch.Tensor]) -> list[str]:
    named = named_tensors(trainer)
    return [
        fault
        for name, tensor in named.items()
        for fault in unequal(tensor.detach(), local_of(model[name], layout_of(tensor), trainer.mesh), name)
    ]


def _shard(value: Any, tensor: torch.Tensor, trainer: Trainer) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == full_shape(tensor) and value.ndim:
        return local_of(value, layout_of(tensor), trainer.mesh)
    return value


def unequal(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two states differ, to the last bit."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{where} differs"]
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return [f"{where} has other keys: {set(one) ^ set(other)}"]
        return [fault for key in one for fault in unequal(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=True)
        return [fault for number, pair in enumerate(pairs) for fault in unequal(*pair, f"{where}.{number}")]
    return [] if type(one) is type(other) and one == other else [f"{where}: {one!r} and {other!r}"]
