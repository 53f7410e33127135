"""Tensor parallelism: one matrix on several ranks, sharded by columns and by rows.

Document 004, "TP".

unisono run -n 4 examples/seeds/004_overview/tp.py

Sharded by columns, each rank computes some of the outputs; by rows, each takes some of the inputs and the results are
summed. One after the other (Megatron's MLP) they need a single sum. Then a whole transformer, where unisono finds the
pairs itself. Printed: the worst deviation of outputs and gradients from one device, for each.
"""

from __future__ import annotations

import torch
from torch import nn
from transformer import deviation, under

import unisono as uni


def full_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).double()


def layer_by_layer(comm: uni.Communicator, x: torch.Tensor) -> dict[str, float]:
    """Each of the two alone, against the plain layer."""
    plain = full_mlp()
    column = uni.nn.ColumnParallelLinear.from_linear(plain[0], comm, gather_output=True)
    row = uni.nn.RowParallelLinear.from_linear(plain[2], comm)
    wide = plain[0](x).detach()
    mine = wide.chunk(comm.size, dim=-1)[comm.rank]
    return {
        "by columns": (column(x) - plain[0](x)).abs().max().item(),
        "by rows": (row(mine) - plain[2](wide)).abs().max().item(),
    }


def pair(comm: uni.Communicator, x: torch.Tensor) -> float:
    """Columns, then rows: outputs, and the gradients of both sharded matrices put together."""
    plain, sharded = full_mlp(), full_mlp()
    sharded[0] = uni.nn.ColumnParallelLinear.from_linear(sharded[0], comm)
    sharded[2] = uni.nn.RowParallelLinear.from_linear(sharded[2], comm)
    outputs, wanted = sharded(x), plain(x)
    outputs.square().sum().backward()
    wanted.square().sum().backward()
    up = torch.cat(comm.all_gather(sharded[0].weight.grad), dim=0)  # torch stores weights transposed
    down = torch.cat(comm.all_gather(sharded[2].weight.grad), dim=1)
    pairs = [(outputs, wanted), (up, plain[0].weight.grad), (down, plain[2].weight.grad)]
    return max((have - want).abs().max().item() for have, want in pairs)


def main() -> None:
    comm = uni.init()
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    worst = {**layer_by_layer(comm, x), "columns, then rows": pair(comm, x), "transformer": deviation(under("tp=4,sp"))}
    for name, value in worst.items():
        if comm.rank == 0:
            print(f"{name}: deviation {value:.1e}")
        assert value < 1e-9
    uni.shutdown()


if __name__ == "__main__":
    main()
