"""What pipelines keep for their backward, in bytes: 1F1B against F-then-B."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.parallel.apply import parallelize


class Kept:
    """The bytes that autograd keeps; `most` is their peak."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Held:
        return Held(tensor, self)


class Held:
    def __init__(self, tensor: torch.Tensor, kept: Kept) -> None:
        self.tensor, self.kept = tensor, kept
        kept.now += tensor.numel() * tensor.element_size()
        kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        self.kept.now -= self.tensor.numel() * self.tensor.element_size()


def peak(comm: Communicator, name: str) -> int:
    task = tasks.mlp2
    trainer = parallelize(
        task.model,
        f"pp=4,microbatches=4,schedule={name}",
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
    )
    trainer.step(task.batch(0))  # the first step also watches what travels
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
        trainer.step(task.batch(1))
    return kept.most


def test_1f1b_keeps_three_eighths_less_than_f_then_b(pools: Callable[[str, int], RankPool]) -> None:
    """Four stages, four microbatches: 4, 3, 2 and 1 of them alive, not 4 on all; 37.5% less, as facts.json has it."""
    pool = pools("gloo", 4)
    kept, all_kept = pool.run(peak, "1f1b"), pool.run(peak, "f-then-b")
    shares = [mine / full for mine, full in zip(kept, all_kept, strict=True)]
    assert shares == [1, 0.75, 0.5, 0.25]
    assert 1 - sum(shares) / 4 == 0.375
