"""Distributed synchronous SGD by hand: every rank takes its part of the data, gradients are averaged.

Document 001, "分布式训练".

unisono run -n 4 examples/seeds/001_torch/sgd.py

scikit-learn's digits stand in for MNIST. Rank 0 also trains alone, on the samples that all ranks had in each step,
and the parameters must come out the same. Printed: the loss of each epoch, and the worst deviation from one process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uni

EPOCHS, BATCH = 3, 128


def net() -> nn.Module:
    torch.manual_seed(1234)
    layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10), nn.LogSoftmax(1))
    return nn.Sequential(*layers).double()


def loader(part: int, size: int) -> DataLoader:
    """The batches of one part, in an order that does not depend on who asks.

    Without the last, smaller one: the average of averages is that of all samples only where parts are of one size.
    """
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images[:, None] / 16), torch.tensor(digits.target))
    partition = uni.DataPartitioner(data, [1 / size] * size).use(part)
    order = torch.Generator().manual_seed(part)
    return DataLoader(partition, BATCH // size, shuffle=True, generator=order, drop_last=True)


def average_gradients(comm: uni.Communicator, model: nn.Module) -> None:
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad, op="avg")


def train(batches: list[DataLoader], comm: uni.Communicator | None) -> tuple[nn.Module, list[float]]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(EPOCHS):
        total = 0.0
        for parts in zip(*batches, strict=True):
            data, target = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            if comm is not None:
                average_gradients(comm, model)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches[0]))
    return model, losses


def main() -> None:
    comm = uni.init()
    model, losses = train([loader(comm.rank, comm.size)], comm)
    for epoch, loss in enumerate(losses):
        print(f"rank {comm.rank}, epoch {epoch}: {loss:.4f}")
    assert losses[-1] < losses[0]
    if comm.rank == 0:
        alone, _ = train([loader(part, comm.size) for part in range(comm.size)], None)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        deviation = max((mine - one).abs().max().item() for mine, one in pairs)
        print(f"worst deviation from one process: {deviation:.1e}")
        assert deviation < 1e-12
    uni.shutdown()


if __name__ == "__main__":
    main()
