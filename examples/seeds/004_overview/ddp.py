"""DDP as unisono writes it: a plain model, a loader, a checkpoint that any plan can go on from.

Document 004, "DDP".

unisono run -n 4 examples/seeds/004_overview/ddp.py

Nothing is wrapped, so nothing has to be unwrapped before saving, and every rank saves its part. The run is broken off
in the middle of an epoch and continued under another plan. Printed: where it broke off, the plans, and the worst
deviation from one process that trained without a break.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from simple import BATCH, EPOCHS, SimpleModel, dataset, deviation

import unisono as uni

BREAK = 7  # steps, of 5 in an epoch


def made(plan: str) -> tuple[uni.Trainer, uni.Loader]:
    trainer = uni.parallelize(
        SimpleModel,
        plan,
        loss=F.binary_cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        dtype=torch.float64,
    )
    return trainer, uni.Loader(dataset(), BATCH, part=trainer.part)


def train(trainer: uni.Trainer, loader: uni.Loader, steps: int) -> None:
    while loader.epoch < EPOCHS:
        for batch in loader:
            trainer.step(batch)
            if trainer.steps == steps:
                return


def main() -> None:
    comm = uni.init()
    checkpoints = uni.Checkpoints("checkpoints")

    trainer, loader = made(f"dp={comm.size}")
    train(trainer, loader, BREAK)
    checkpoints.save(trainer, trainer.steps, loader.state_dict())

    trainer, loader = made(f"dp={comm.size},zero=1")
    restored = checkpoints.load(trainer)
    loader.load_state_dict(restored.data_state)
    train(trainer, loader, steps=-1)

    worst = deviation(trainer.state_dict()["model"])
    if comm.rank == 0:
        print(f"step {restored.step} under {restored.plan}, then to step {trainer.steps} under {trainer.plan}")
        print(f"worst deviation from one process: {worst:.1e}")
    uni.shutdown()


if __name__ == "__main__":
    main()
