"""FSDP: the data ranks also share what each of them would hold.

Document 004, "FSDP".

unisono run -n 4 examples/seeds/004_overview/fsdp.py

ZeRO's three stages: optimizer state, then gradients, then parameters are sharded over the ranks; torch's name for
the third is FSDP. Printed for each stage: how much of the optimizer's state and of the parameters rank 0 keeps
between steps, and the worst deviation from one device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformer import deviation, one_device, under

import unisono as uni


def share(tensors: Iterable[torch.Tensor], of: int) -> float:
    return sum(tensor.numel() for tensor in tensors) / of


def main() -> None:
    comm = uni.init()
    full = sum(tensor.numel() for tensor in one_device()[1].values())
    for stage in (0, 1, 2, 3):
        trainer = under(f"dp={comm.size}" + (f",zero={stage}" if stage else ""))
        worst = deviation(trainer)
        moments = share((state["exp_avg"] for state in trainer.optimizer.state.values()), full)
        parameters = share((parameter.data for parameter in trainer.model.parameters()), full)
        if comm.rank == 0:
            print(
                f"zero={stage}: {moments:.0%} of the state, {parameters:.0%} of the parameters, deviation {worst:.1e}"
            )
    uni.shutdown()


if __name__ == "__main__":
    main()
