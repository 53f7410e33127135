"""What a step leaves behind: nothing that grows. Counted, in objects and keys; benchmarks/load.py measures bytes."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import unisono as uni
from benchmarks import load_program
from tests.ranks import RankPool

THIRD = 120  # steps


class Count(NamedTuple):
    """What this process and the job's store have."""

    objects: Counter[str]  # that Python's collector knows, by type
    blocks: int  # of Python's memory
    keys: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Count:
        """The least of several looks: other threads (the watchdog compares logs) make objects and drop them."""
        looks = []
        for _ in range(5):
            gc.collect()
            names = (sys.intern(type(each).__qualname__) for each in gc.get_objects())  # else new blocks in each count
            kinds = Counter(names)
            descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            looks.append((kinds, sys.getallocatedblocks(), load_program.keys(), descriptors, threads))
            time.sleep(0.1)
        kinds = functools.reduce(operator.and_, (look[0] for look in looks))
        return cls(kinds, *(min(column) for column in list(zip(*looks, strict=True))[1:]))


class Counting(uni.Callback):
    """Counts between two checkpoints, when none is being written."""

    ends_runs = False

    def __init__(self) -> None:
        self.counts: list[Count] = []

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        if info.step in (THIRD - 1, 2 * THIRD - 1, 3 * THIRD - 1):
            engine.comm.barrier()
            self.counts.append(Count.now())
            engine.comm.barrier()  # no rank goes on, and writes to the store, before all have counted


def counted(comm: Any, plan: str, folder: str) -> list[Count]:
    logging.disable()  # ranks are forked from pytest, which keeps what is logged
    try:
        return run_and_count(plan, folder)
    finally:
        logging.disable(logging.NOTSET)


def run_and_count(plan: str, folder: str) -> list[Count]:
    counting = Counting()
    history = load_program.engine(plan).fit(
        load_program.Made(320),
        epochs=10,
        max_steps=3 * THIRD,
        batch_size=8,
        validation=load_program.Made(16),
        evaluate_every=20,
        save=Path(folder) / "run",
        save_every=20,
        callbacks=[counting],
    )
    assert len(history.losses) == 3 * THIRD
    return counting.counts


@pytest.mark.parametrize("plan", ["dp=2,zero=2", "pp=2,microbatches=2", "tp=2"])
def test_a_run_does_not_grow_with_its_steps(plan: str, pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    """What comes once, such as a cache of Python's, is no growth: what grows does so in both of the later thirds."""
    for first, second, third in pools("gloo", 2).run(counted, plan, str(tmp_path)):
        assert first.keys == third.keys
        assert min(second.threads - first.threads, third.threads - second.threads) <= 0
        assert min(second.descriptors - first.descriptors, third.descriptors - second.descriptors) <= 0
        more = (second.objects - first.objects) & (third.objects - second.objects)
        assert all(count < 0.8 * THIRD for count in more.values()), more.most_common(5)  # less than one for each step
        # of the history, a number for each step
        assert min(second.blocks - first.blocks, third.blocks - second.blocks) < 5 * THIRD
