"""What saving costs a training run: how long `save` holds up a step, waiting for the disk and not.

    python benchmarks/checkpoint.py [--ranks 2] [--width 1024 | --demo] [--folder DIR] [--json OUT]

Each rank holds a stack of linear layers with Adam, or the model of examples/demo.py. `wait=True` writes files and
checksums and syncs them before it returns; `wait=False` copies to host memory and returns. The ratio of the two medians
is what counts: the machine's disk cancels out. Steps that run beside the writing are timed too, against steps with
nothing to write. What a save costs in all is the difference between ten steps with one and ten without; and the CPU
time of the thread that trains, in `save` and `wait`, and of the one that writes, which other load on the machine hardly
changes. "restore from memory" is what a restarted rank does with `fit(save="memory")`: it finds, checks and loads the
newest checkpoint of /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from unisono.launch import environment
from unisono.train.checkpoint.in_memory import MemoryCheckpoints
from unisono.train.checkpoint.saving import Saving

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, Config

STEPS = 10  # beside which a checkpoint is written
EVERY = 100  # steps between checkpoints, over which their cost is spread
RESTORE = 2.0  # seconds that a restore from memory may take


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measured(width: int, layers: int, folder: str, rounds: int, is_demo: bool) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    comm = uni.init("gloo")
    generator = torch.Generator().manual_seed(0)
    if is_demo:
        tokens = torch.randint(256, (32, Config().context + 1), generator=generator)
        batch = tokens[:, :-1], tokens[:, 1:]
    else:
        batch = torch.randn(16 * comm.size, width, generator=generator), torch.zeros(16 * comm.size, width)
    trainer = uni.parallelize(
        (lambda: GPT(Config()))
        if is_demo
        else (lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))),
        uni.Plan(dp=comm.size),
        loss=next_token_loss if is_demo else F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    )
    writing = thread_times()
    checkpoints = uni.Checkpoints(folder, keep=1)
    os.environ[environment.MEMORY] = environment.memory_folder(Path(folder).name)
    memory = MemoryCheckpoints()
    trainer.step(batch)
    checkpoints.save(trainer, 0, wait=False)  # the first allocates the memory that later ones reuse
    checkpoints.wait()
    names = (
        "wait",
        "aside",
        "step",
        "step beside",
        "load",
        "memory",
        "restore",
        "ten",
        "ten, one saved",
        "cpu",
        "cpu of a save",
    )
    times: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        comm.barrier()
        start = time.perf_counter()
        work(*args, **options)
        times[name].append(time.perf_counter() - start)

    def ten() -> None:
        for _ in range(STEPS):
            trainer.step(batch)

    def ten_and_a_save(number: int) -> None:
        began = time.thread_time()
        checkpoints.save(trainer, number, wait=False)
        spent = time.thread_time() - began
        ten()
        began = time.thread_time()
        checkpoints.wait()
        spent += time.thread_time() - began
        for thread in threading.enumerate():
            if thread.name.startswith("unisono save"):  # it has written, and is about to end
                thread.join()
        times["cpu of a save"].append(spent + writing[-1])

    for number in range(1, rounds + 1):
        began = time.process_time()
        timed("ten", ten)
        times["cpu"].append(time.process_time() - began)
        timed("ten, one saved", ten_and_a_save, number)
    for number in range(rounds + 1, 2 * rounds + 1):
        timed("step", trainer.step, batch)
        timed("wait", checkpoints.save, trainer, 2 * number)
        timed("aside", checkpoints.save, trainer, 2 * number + 1, wait=False)
        timed("step beside", trainer.step, batch)
        checkpoints.wait()
        timed("memory", memory.save, trainer, number)
        timed("restore", memory.load, trainer)
    timed("load", checkpoints.load, trainer)
    comm.barrier()
    shutil.rmtree(os.environ[environment.MEMORY], ignore_errors=True)
    gathered = comm.gather_object({name: statistics.median(values) for name, values in times.items()})
    if gathered is None:
        return None
    state = 3 * sum(parameter.nbytes for parameter in trainer.model.parameters())
    return {"bytes": state, **{name: max(theirs[name] for theirs in gathered) for name in times}}


def thread_times() -> list[float]:
    """Filled with the CPU seconds of each thread that writes a checkpoint from now on."""
    times: list[float] = []
    run = Saving._run

    def timed(self: Saving) -> None:
        began = time.thread_time()
        run(self)
        times.append(time.thread_time() - began)

    Saving._run = timed  # type: ignore[method-assign]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--demo", action="store_true", help="the model and the batches of examples/demo.py")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = uni.spawn(
            measured, options.ranks, "gloo", (options.width, options.layers, folder, options.rounds, options.demo)
        )[0]
    share = found["aside"] / found["wait"]
    print(f"state of {found['bytes'] / 1e6:.0f} MB on {options.ranks} ranks, median of {options.rounds}")
    print(f"save, waiting        {found['wait'] * 1e3:8.1f} ms")
    print(f"save, not waiting    {found['aside'] * 1e3:8.1f} ms   {share:.1%} of it")
    print(f"a step               {found['step'] * 1e3:8.1f} ms")
    print(f"a step beside it     {found['step beside'] * 1e3:8.1f} ms")
    print(f"check and load       {found['load'] * 1e3:8.1f} ms")
    print(f"save in memory       {found['memory'] * 1e3:8.1f} ms")
    verdict = "under" if found["restore"] < RESTORE else "NOT under"
    print(f"restore from memory  {found['restore'] * 1e3:8.1f} ms   {verdict} {RESTORE:g} s")
    extra, step = found["ten, one saved"] - found["ten"], found["ten"] / STEPS
    print(f"in all, a checkpoint every {EVERY} steps takes {extra / EVERY / step:.1%} of their time")
    share_of_cpu = found["cpu of a save"] / EVERY / (found["cpu"] / STEPS)
    print(f"and {share_of_cpu:.2%} of their CPU time: {found['cpu of a save'] * 1e3:.0f} ms")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "share": share, **found}, indent=1))


if __name__ == "__main__":
    main()
