"""The quickstart: 8 ranks, one matmul's strategy is given, those of the other ops are found by propagation.

unisono run -n 8 examples/seeds/003_mindspore/net.py
unisono run -n 8 --backend mpi examples/seeds/003_mindspore/net.py

Rank 0 prints its program: for every op the strategy (`step_parallel_begin` of the document) and the local shapes and
collectives (`execute`). As in the document, every rank's graphs go to saved_graph/rank_N, and its part of the model to
device/N. The losses are those of single.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from quickstart_net import EPOCHS, dataset, momentum
from quickstart_net import Net as PlainNet

import unisono as uni


class Net(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        # The input has 2 shards along the batch and 4 along the width, the weight 4 along its height.
        self.matmul = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))


def train(folder: Path) -> list[float]:
    comm = uni.init()
    program = uni.to_static(
        Net,
        example=next(dataset()),
        mesh=uni.Mesh((2, 4), ("dp", "mp")),
        loss=F.mse_loss,
        optimizer=momentum,
        search="propagate",
        fully_use_devices=True,
        save_graphs=folder / "saved_graph",
    )
    if comm.rank == 0:
        print(program)
    losses = []
    for epoch in range(1, EPOCHS + 1):
        for step, batch in enumerate(dataset(), 1):
            loss = program(batch)
            losses.append(loss.item())
            if comm.rank == 0:
                print(f"epoch: {epoch} step: {step}, loss is {loss.item()}")
    own = folder / "device" / str(comm.rank)
    own.mkdir(parents=True, exist_ok=True)
    torch.save(program.state_dict(local=True), own / "net.pt")
    uni.shutdown()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    train(parser.parse_args().folder)
