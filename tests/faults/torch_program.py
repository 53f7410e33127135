"""The training job of program.py as plain torch: DDP, and a checkpoint by torch.save every few steps, for torchrun.

Arguments: the folder of checkpoints, the number of steps. The model and the data are those of program.py, which would
import unisono.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 5
BATCH = 8


def main(folder: Path, steps: int, notes: Path, pace: float) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(5))
    y = (x.sum(1) > 0).long()
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, steps + 1):
        mine = torch.randperm(50, generator=torch.Generator().manual_seed(step))[:BATCH][rank::ranks]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "checkpoint.new")
            (folder / "checkpoint.new").replace(saved)
        beside = notes / f"at.new.{rank}"
        beside.write_text(f"{os.getpid()} {step}")
        beside.replace(notes / f"at.{rank}")
        time.sleep(pace)
        if (notes / f"raise.{rank}").exists():
            raise RuntimeError("asked to fail")
    if rank == 0:
        print(f"step {steps} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(os.environ["FAULTS_NOTES"]), float(os.environ["FAULTS_PACE"]))
