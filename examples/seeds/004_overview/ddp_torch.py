"""The document's DDP program: torch's wrapper, a sampler, a checkpoint by rank 0.

Document 004, "DDP".

unisono run -n 4 examples/seeds/004_overview/ddp_torch.py

What changes: uni.init() instead of a backend, a device and --local_rank; and a sampler whose batches are the same for
any number of ranks. Half of the epochs are trained, saved, loaded and continued. Printed: the loss of each epoch on
rank 0, and the worst deviation from one process that trained without a break.
"""

from __future__ import annotations

from pathlib import Path

import torch
from simple import BATCH, EPOCHS, SimpleModel, dataset, deviation
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import unisono as uni

CHECKPOINT = Path("simple.ckpt")


def train(comm: uni.Communicator, epochs: range) -> nn.Module:
    data = dataset()
    sampler = uni.DistributedBatchSampler(len(data), BATCH)  # BATCH is that of all ranks together
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(0)
    model = SimpleModel().double()
    if comm.rank == 0 and epochs.start > 0:  # DDP tells the others
        model.load_state_dict(torch.load(CHECKPOINT))
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy(ddp(x), label)
            loss.backward()
            optimizer.step()
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    if comm.rank == 0:
        torch.save(ddp.module.state_dict(), CHECKPOINT)
    comm.barrier()
    return model


def main() -> None:
    comm = uni.init()
    train(comm, range(EPOCHS // 2))
    model = train(comm, range(EPOCHS // 2, EPOCHS))
    if comm.rank == 0:
        print(f"worst deviation from one process: {deviation(model.state_dict()):.1e}")
    uni.shutdown()


if __name__ == "__main__":
    main()
