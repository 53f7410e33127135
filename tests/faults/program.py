"""A training job to be disturbed. Arguments: the run's folder, the plan ("dp={ranks}" for however many there are),
what shall happen at which start, the number of steps, and of those between two checkpoints in memory.

At start number i (0 is the first) the i-th of the comma-separated faults happens on the last rank: `forward:S` kills it
inside a forward of step S, `collective:S` between the gradients' computation and their reduction, `saving:S` while the
checkpoint of step S is written; `none` leaves it alone. `stay:S` has the ranks of host node1 wait after step S, for the
test to take that host away; `hold:S` has all ranks wait after step S until they get a signal. The last line tells the
state that was reached, bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono as uni

STEPS = 18
SAVE_EVERY = 5
NEVER = 10**6
PACE = "FAULTS_PACE"  # seconds between steps, in a campaign
NOTES = "FAULTS_NOTES"  # in a campaign, the folder of what it has to know, apart from the run folder and its disk


class Disturbed(uni.Callback):
    def __init__(self, kind: str, step: int, folder: str) -> None:
        self.kind, self.step, self.folder = kind, step, folder

    def on_start(self, engine: uni.Engine, first_step: int, steps: int | None) -> None:
        if engine.comm.rank != engine.comm.size - 1:
            return
        trainer = engine.ready
        if self.kind == "forward":
            module = next(each for each in trainer.model.modules() if isinstance(each, nn.Linear))
            module.register_forward_pre_hook(lambda *_: self._die(trainer.steps + 1))
        if self.kind == "collective":
            parameter = next(each for each in trainer.model.parameters())
            parameter.register_hook(lambda grad: self._die(trainer.steps + 1))

    def on_save(self, engine: uni.Engine, step: int, path: str) -> None:
        if self.kind == "saving" and engine.comm.rank == engine.comm.size - 1:
            self._die(step)

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        if self.kind == "stay" and info.step == self.step and os.environ["UNISONO_HOST"] == "node1":
            signal.pause()
        if self.kind == "hold" and info.step == self.step:
            (Path(self.folder) / f"held.{engine.comm.rank}").touch()
            signal.pause()

    def _die(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Announce(uni.Callback):
    """Leaves this rank's number and how far it is, for those who disturb it from outside."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = folder / f"at.{rank}"

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        beside = self.file.with_suffix(".new" + self.file.suffix)
        beside.write_text(f"{os.getpid()} {info.step}")
        beside.replace(self.file)


class Weather(uni.Callback):
    """In a campaign: does what files in the folder say, which are made and removed at any time."""

    def __init__(self, folder: Path, rank: int, pace: float) -> None:
        self.folder, self.rank, self.pace = folder, rank, pace
        self.offset = 0.0
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._note_warning
        self._fsync, self._time = os.fsync, time.time
        os.fsync = self._slow_fsync
        time.time = lambda: self._time() + self.offset

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        if self.rank == 0:
            with (self.folder / "samples").open("a") as file:
                file.write(f"{os.getpid()} {info.step} {' '.join(map(str, info.ids))}.\n")
        time.sleep(self.pace)
        there = os.listdir(self.folder)
        if "clock" in there:
            self.offset = float((self.folder / "clock").read_text())
        if f"raise.{self.rank}" in there:
            raise RuntimeError("asked to fail")
        taken = []
        while os.path.exists(self.folder / f"leak.{self.rank}"):
            taken.append(b"x" * (4 << 20))

    def _note_warning(self, message: Warning | str, *others: Any, **options: Any) -> None:
        if match := re.match(r"step (\d+) is not logged", str(message)):
            with (self.folder / "unlogged").open("a") as file:
                file.write(f"{match[1]}\n")
        self._show_warning(message, *others, **options)

    def _slow_fsync(self, file: int) -> None:
        if os.path.exists(self.folder / "slow"):
            time.sleep(1)
        self._fsync(file)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(5))
    return list(zip(x, (x.sum(1) > 0).long(), strict=True))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def digest(engine: uni.Engine) -> str:
    """Of parameters and optimizer state, whole."""
    state = engine.ready.state_dict()
    found = hashlib.sha256()
    leaves = torch.utils._pytree.tree_leaves([state["model"], state["optimizer"]])
    for leaf in leaves:
        found.update(leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()[:16]


def trained(
    comm: uni.Communicator, folder: str, plan: str, planned: str, steps: int = STEPS, memory_every: int | None = None
) -> tuple[str, str]:
    """The digest that was reached, and what there is to say. With memory_every, checkpoints are in memory only."""
    kind, _, step = planned.partition(":")
    engine = uni.Engine(
        model,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        plan=plan.format(ranks=comm.size),
        check="off",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5),
    )
    notes = Path(os.environ.get(NOTES, folder))
    callbacks: list[uni.Callback] = [Announce(notes, comm.rank), Disturbed(kind, int(step or 0), folder)]
    if PACE in os.environ:
        callbacks.append(Weather(notes, comm.rank, float(os.environ[PACE])))
    history = engine.fit(
        data(),
        epochs=1000,
        max_steps=steps,
        batch_size=8,
        save=folder,
        save_every=SAVE_EVERY if memory_every is None else NEVER,
        memory_every=memory_every,
        resume=True,
        callbacks=callbacks,
        progress=False,
    )
    reached = digest(engine)
    start = f"start {os.environ.get('UNISONO_ATTEMPT', '0')} from step {history.first_step}: plan {engine.plan}"
    return reached, f"{start}\nstep {history.step} {history.stopped or 'done'}: {reached}"


def main(folder: str, plan: str, faults: str, steps: str = str(STEPS), memory_every: str = "") -> None:
    machine = Path(__file__).resolve().parents[2] / "tools" / "two_cores.toml"
    os.environ.setdefault("UNISONO_HARDWARE", str(machine))  # to plan by, so that nobody measures one meanwhile
    comm = uni.init()
    planned = (faults.split(",") + ["none"] * 100)[int(os.environ.get("UNISONO_ATTEMPT", "0"))]
    _, reported = trained(comm, folder, plan, planned, int(steps), int(memory_every) if memory_every else None)
    if comm.rank == 0:
        print(reported)
    uni.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
