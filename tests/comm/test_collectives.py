from __future__ import annotations

import torch

from unisono.comm.communicator import Communicator


def basic(comm: Communicator) -> list[float]:
    x = torch.full((3,), float(comm.rank + 1))
    comm.all_reduce(x)
    out = [x.tolist()]
    out.append([t.tolist() for t in comm.all_gather(torch.arange(comm.rank + 1), uneven=True)])
    y = comm.reduce_scatter(torch.arange(8.0), sizes=[1, 2, 3, 2])
    out.append(y.tolist())
    z = comm.all_to_all(torch.arange(4) + 10 * comm.rank)
    out.append(z.tolist())
    pair = comm.split([[0, 1], [2, 3]])
    w = torch.tensor([comm.rank], dtype=torch.int16)
    pair.all_reduce(w)
    out.append(w.tolist())
    comm.barrier()
    return out


def test_basic(pools):
    print(pools("gloo", 4).run(basic))
