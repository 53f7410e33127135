"""What the ranks of benchmarks/load.py run, by name: ranks, job, steps or dataset, then a folder and other words.

What they measure they write into the folder, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import unisono as uni

MANY_LOOKS = 10  # of a long run


@dataclass(frozen=True)
class Usage:
    """Memory of a process in bytes, as the kernel counts it."""

    rss: int  # all pages that it has mapped
    pss: int  # of a page that n processes share, the n-th part
    uss: int  # its own pages
    peak: int = 0  # the most that rss was, since the process began

    @classmethod
    def of(cls, pid: int | str = "self") -> Usage:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        private = kib["Private_Clean"] + kib["Private_Dirty"]
        return cls(kib["Rss"] << 10, kib["Pss"] << 10, private << 10)

    @classmethod
    def own(cls) -> Usage:
        now = cls.of()
        return cls(now.rss, now.pss, now.uss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


def write(folder: Path, name: str, **values: Any) -> None:
    with (folder / name).open("a") as file:
        file.write(json.dumps(values) + "\n")


# ---- 64 ranks start, reduce and end ----------------------------------------------------------------------------------


def ranks(folder: Path) -> None:
    comm = uni.init()
    x = torch.full((256,), float(comm.rank))
    comm.all_reduce(x)
    met = time.time()
    assert bool((x == comm.size * (comm.size - 1) / 2).all()), x
    write(folder, f"met.{comm.rank}", time=met, pid=os.getpid(), parent=os.getppid())
    while not (folder / "measured").exists():
        time.sleep(0.2)
    comm.all_reduce(x, "max")
    uni.shutdown()


# ---- a short job -----------------------------------------------------------------------------------------------------


def job(folder: Path, how: str) -> None:
    """It `ends`, `fails` on its last rank, or on all (`all-fail`), or `stays` until it is ended from outside."""
    comm = uni.init()
    x = torch.ones(8)
    comm.all_reduce(x)
    assert x[0] == comm.size
    if comm.rank == 0:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        (folder / "segments").write_text("\n".join(each for each in mapped if each.startswith("/dev/shm/")))
    if how == "all-fail" or (how == "fails" and comm.rank == comm.size - 1):
        raise RuntimeError("asked to fail")
    if how == "stays":
        (folder / f"stays.{comm.rank}").touch()
        time.sleep(600)
    uni.shutdown()


def summed(given: float) -> float:
    """What every rank of a spawn runs."""
    comm = uni.init()
    return float(comm.all_reduce(torch.full((4,), given))[0])


# ---- a long run ------------------------------------------------------------------------------------------------------


class Made(Dataset[Any]):
    """Samples that are made when they are read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        x = torch.full((16,), float(number % 97) / 97)
        return x, number % 4


def looking(folder: Path, every: int) -> uni.Callback:
    """Every so many steps: the memory of this rank and, on the first, of the agent and the launcher; blocks of Python's
    memory; keys in the job's store. (A list of all objects would be of the size that is looked for.) A class of this
    module would bring the Engine, 75 MiB, into every rank of every load."""

    class Look(uni.Callback):
        ends_runs = False

        def on_step(self, engine: uni.Engine, info: Any) -> None:
            if info.step % every:
                return
            rank = engine.comm.rank
            others = {name: asdict(Usage.of(pid)) for name, pid in launchers().items()} if rank == 0 else {}
            write(
                folder,
                f"looks.{rank}",
                step=info.step,
                time=time.time(),
                own=asdict(Usage.own()),
                others=others,
                blocks=sys.getallocatedblocks(),
                keys=keys(),
            )

    return Look()


def launchers() -> dict[str, int]:
    """The processes above this one that belong to the job, by name."""
    found, pid = [], os.getppid()
    while pid > 1:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"unisono" not in b" ".join(words):
            break
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return dict(zip(("launcher", "agent", "below the agent"), reversed(found), strict=False))


def keys() -> int:
    """How many keys the job's store has."""
    return dist.distributed_c10d._get_default_store().num_keys()


def engine(plan: str) -> uni.Engine:
    return uni.Engine(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        metrics=["accuracy"],
        plan=plan,
    )


def steps(folder: Path, plan: str, wanted: str) -> None:
    """With what users have: progress, a log, checkpoints, evaluations, the history."""
    count = int(wanted)
    history = engine(plan).fit(
        Made(800),
        epochs=1 + count // 100,
        max_steps=count,
        batch_size=8,
        validation=Made(16),
        evaluate_every=max(count // 50, 1),
        save=folder / "run",
        save_every=max(count // 50, 1),
        callbacks=[looking(folder, max(count // MANY_LOOKS, 1))],
    )
    assert len(history.losses) == count


def dataset(folder: Path, samples: str) -> None:
    """200 steps and, of a checkpoint in the middle of the epoch, 50 more."""
    data = Made(int(samples))
    for until, resume in ((200, False), (250, True)):
        trained = engine("dp=" + os.environ["WORLD_SIZE"])
        trained.fit(
            data, max_steps=until, batch_size=32, save=folder / "run", save_every=100, resume=resume, progress=False
        )
    write(folder, f"own.{trained.comm.rank}", **asdict(Usage.own()))


PROGRAMS: dict[str, Callable[..., None]] = {"ranks": ranks, "job": job, "steps": steps, "dataset": dataset}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
