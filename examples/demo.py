"""Four ranks train a small GPT on the sources of Python's own standard library; one of them is killed on the way.

unisono run -n 4 --max-restarts 1 examples/demo.py

The plan is searched for. At step 80 of 140 one rank kills itself: the launcher starts all of them again, the engine
goes on from the last checkpoint, and the result is that of a run that nobody disturbed. Any `-n` gives the same losses
(up to rounding).
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Config, complete
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono as uni


def library_text(size: int = 2_000_000) -> torch.Tensor:
    """The beginning of Python's standard library, as bytes."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Shards of a text, and the bytes that follow each of theirs."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.pieces = text[: (len(text) - 1) // length * length].view(-1, length)
        self.nexts = text[1 : 1 + self.pieces.numel()].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pieces[number], self.nexts[number]


class Accident(uni.Callback):
    """Kills one rank, once: what a crash, a preemption or a cable does to real jobs."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        is_first_start = os.environ.get("UNISONO_ATTEMPT", "0") == "0"
        if is_first_start and engine.comm.size > 1 and engine.comm.rank == 1 and info.step == self.step:
            print(f"step {self.step}: this rank kills itself, as a crash or a preemption would", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(steps: int, folder: Path) -> None:
    comm = uni.init()
    config = Config()
    engine = uni.Engine(
        lambda: GPT(config),
        loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps),
        plan="auto",
    )
    engine.fit(
        Windows(library_text(), config.context),
        batch_size=32,
        max_steps=steps,
        save=folder,
        save_every=max(1, steps * 3 // 14),
        callbacks=[Accident(steps * 4 // 7)],
    )
    weights = folder / "gpt.safetensors"
    uni.export_weights(engine.ready, weights)
    if comm.rank == 0:
        plain = GPT(config)
        uni.import_weights(plain, weights)
        print(f"what it has learned of Python in {steps} steps (letters and indents, hardly words), on one process:")
        print(complete(plain, b"def ", 160))
    uni.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--save", type=Path, default=Path("runs/demo"))
    chosen = parser.parse_args()
    main(chosen.steps, chosen.save)
