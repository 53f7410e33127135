"""A training script for batch systems, which may stop it at any time: it saves, and continues where it was.

unisono run -n 2 examples/slurm/train.py --save runs/job --steps 60

The same script runs under `sbatch examples/slurm/train.sbatch` and in the pods of `deploy/kubernetes`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import unisono as uni


def samples(count: int = 512) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    return list(zip(x, (x.square().sum(1) > 15).long(), strict=True))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", default="runs/job", help="folder of checkpoints, which all nodes reach")
    parser.add_argument("--steps", type=int, default=600)
    chosen = parser.parse_args()
    comm = uni.init()
    engine = uni.Engine(model, F.cross_entropy, lambda p: torch.optim.AdamW(p, lr=1e-2), plan=f"dp={comm.size}")
    history = engine.fit(
        samples(),
        epochs=10**6,
        max_steps=chosen.steps,
        batch_size=32,
        save=chosen.save,
        save_every=100,
        resume=True,  # after a requeue, and when a pod is replaced
        progress=False,
    )
    if comm.rank == 0:
        print(f"step {history.step}: {history.stopped or 'done'}")


if __name__ == "__main__":
    main()
