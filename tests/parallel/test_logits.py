"""Logits in shards: they look like the full tensor, and the loss on them is that of the full tensor, without gathering
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.parallel.apply import parallelize
from unisono.parallel.tensor.logits import LogitsShard, Proof, _shard

Pools = Callable[[str, int], RankPool]
VOCABULARY = 7


def full_and_shard(comm: Communicator) -> tuple[torch.Tensor, LogitsShard]:
    full = torch.randn(3, 4, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = full.tensor_split(comm.size, -1)
    return full, _shard(parts[comm.rank].clone(), comm, [part.shape[-1] for part in parts])


READINGS: list[tuple[Callable[[torch.Tensor], Any], int]] = [  # and how many gathers they take
    (lambda x: x.shape, 0),
    (lambda x: (x.size(), x.size(-1), x.numel(), x.dim(), x.dtype, x.ndim), 0),
    (lambda x: x[:, :-1].shape, 0),
    (lambda x: x[..., 1:, :].flatten(0, 1).shape, 0),
    (lambda x: x.view(-1, VOCABULARY).float().shape, 0),
    (lambda x: x.narrow(0, 1, 2).shape, 0),
    (lambda x: x[:, :-1].flatten(0, 1).argmax(-1), 1),
    (lambda x: x[..., 0], 1),
    (lambda x: x[:, None].shape, 1),
    (lambda x: x.transpose(1, 2), 1),
    (lambda x: x.flatten(), 1),
    (lambda x: x.flatten(1), 1),
    (lambda x: x.log_softmax(-1), 1),
    (lambda x: 2 * x, 1),
    (lambda x: torch.cat([x, 2 * x]), 1),
    (lambda x: x.reshape(3, -1), 1),
]


def check_readings(comm: Communicator) -> None:
    for number, (read, gathers) in enumerate(READINGS):
        full, shard = full_and_shard(comm)
        with traffic.counted() as seen:
            found, expected = read(shard), read(full)
        assert seen.calls["all_gather"] == gathers, (number, seen)
        if isinstance(expected, torch.Tensor):
            assert not isinstance(found, LogitsShard)
            assert torch.equal(found, expected), number
        else:
            assert found == expected, number


def test_a_shard_reads_as_the_full(pools: Pools) -> None:
    pools("gloo", 2).run(check_readings)


class _PastTorch(torch.autograd.Function):
    """Sees tensors as they are, as kernels do that are not torch's own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return logits.as_subclass(torch.Tensor).logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None


def past_torch(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _PastTorch.apply(logits).mean() + F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def check_proof(comm: Communicator) -> None:
    full, shard = full_and_shard(comm)
    targets = torch.tensor([[0, 6, -100, 3]] * 3)
    plain = Proof(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert isinstance(plain.fitting(shard, targets), LogitsShard)
    for reading in (past_torch, lambda logits, targets: logits.data_ptr() + logits.mean()):
        seen = Proof(reading).fitting(shard, targets)
        assert not isinstance(seen, LogitsShard)
        assert torch.equal(seen, full)


def test_a_loss_that_reaches_past_torch_gets_the_full(pools: Pools) -> None:
    pools("gloo", 2).run(check_proof)


def check_training(comm: Communicator) -> None:
    task = tasks.vocabulary
    trainer = parallelize(
        task.model, "tp=2", loss=task.loss, optimizer=task.optimizer, rules=task.rules, example=task.batch(0)
    )
    trainer.step(task.batch(0))  # proves on one sample that pieces will do
    with traffic.counted() as seen:
        trainer.step(task.batch(1))
    assert seen.calls["all_gather"] == 0, seen
    with torch.no_grad():
        logits = trainer.model(task.batch(0)[0])
    assert not isinstance(logits, LogitsShard)  # who calls the model gets plain logits
    assert logits.shape == (9, 16, 31)


def test_training_never_gathers_logits(pools: Pools) -> None:
    pools("gloo", 2).run(check_training)
