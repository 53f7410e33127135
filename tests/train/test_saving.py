"""Saving on several ranks: one that fails, one that is killed, and shards that no rank should have had."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as uni
from tests.equivalence import tasks
from tests.ranks import RankPool, free_port
from tests.train import stores
from unisono.comm.communicator import Communicator
from unisono.errors import CheckpointError
from unisono.train.checkpoint.inventory import collect


def failing_rank(comm: Communicator, folder: str) -> list[str]:
    """Rank 2 may not write files of more than a few bytes: what every rank raises, saving at once and aside."""
    trainer = stores.trainer_of("slim", "dp=4,zero=3")
    checkpoints = uni.Checkpoints(folder)
    checkpoints.save(trainer, 1)
    reported = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for wait in (True, False):
        if comm.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            checkpoints.save(trainer, 2, wait=wait)
            checkpoints.wait()
        except CheckpointError as error:
            reported.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]
    comm.barrier()
    checkpoints.save(trainer, 3, wait=False)
    assert checkpoints.load(trainer).step == 3
    return reported


def test_a_rank_that_cannot_write_is_named_on_every_rank(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    answers = pools("gloo", 4).run(failing_rank, str(tmp_path))
    for reported in answers:
        assert reported == answers[0]
        assert len(reported) == 2
        assert all("step 2 was not saved" in text and "rank 2: File too large" in text for text in reported), reported
        assert all("earlier checkpoints are intact" in text for text in reported)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "step-00000001", "step-00000003"]


def written_once(comm: Communicator, plan: str) -> tuple[int, int, int]:
    """Bytes that this rank writes, that it holds, and of the full state."""
    trainer = stores.trainer_of("slim", plan)
    if not trainer.optimizer.state:
        stores.steps(trainer, "slim", 0, 1)
    inventory = collect(trainer)
    kept = [entry for entry in inventory.entries if not entry.name.startswith("random.")]
    written = sum(entry.tensor[chunk.slices].nbytes for entry in kept for chunk in entry.written)
    state = trainer.state_dict()
    full = sum(tensor.nbytes for tensor in state["model"].values())
    full += sum(
        value.nbytes
        for entry in state["optimizer"]["state"].values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    return written, sum(entry.tensor.nbytes for entry in kept), full


@pytest.mark.parametrize("plan", ["dp=4,zero=3", "tp=2,pp=2,microbatches=4"])
def test_together_ranks_write_everything_once(pools: Callable[[str, int], RankPool], plan: str) -> None:
    answers = pools("gloo", 4).run(written_once, plan)
    assert sum(written for written, _, _ in answers) == answers[0][2]
    for written, held, full in answers:
        assert written <= held < 0.55 * full  # nobody holds, or writes, much more than a share


def exported(comm: Communicator, folder: str, plan: str) -> list[str]:
    """Weights out of a sharded Hugging Face model, into a plain one, and back under this plan."""
    from safetensors.torch import load_file

    trainer = stores.new_trainer("llama", plan)
    expected = trainer.state_dict()["model"]
    path = Path(folder) / f"{plan}.safetensors"
    uni.export_weights(trainer, path)
    plain = tasks.llama.model().double()
    plain.load_state_dict(load_file(path), strict=True)  # its own names, all of them
    faults = []
    for name, parameter in plain.named_parameters():
        faults += stores.unequal(parameter.detach(), expected[name], name)
    for parameter in (*trainer.model.parameters(), *dict(trainer.optimized()).values()):
        parameter.detach().zero_()
    assert stores.unequal_shards(trainer, expected)
    uni.import_weights(trainer, path)
    return faults + stores.unequal_shards(trainer, expected)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("plan", ["tp=2", "dp=2,tp=2,zero=1", "dp=2,pp=2,microbatches=4,zero=3"])
def test_hugging_face_weights(pools: Callable[[str, int], RankPool], tmp_path: Path, plan: str) -> None:
    faults = pools("gloo", uni.Plan.parse(plan).world).run(exported, str(tmp_path), plan)
    assert not any(faults), faults


def save_for_ever(rank: int, ranks: int, port: int, folder: str, done: Any) -> None:
    uni.init("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    trainer = stores.new_trainer("mlp", "dp=2,zero=1")
    checkpoints = uni.Checkpoints(folder, keep=2)
    if checkpoints.newest_good() is not None:
        checkpoints.load(trainer)
    while True:
        stores.steps(trainer, "mlp", trainer.steps, trainer.steps + 1)
        checkpoints.save(trainer, trainer.steps, trainer.steps, wait=trainer.steps % 2 == 0)
        if rank == 0:
            published = checkpoints.steps()
            done.value = published[-1] if published else 0


def test_killed_while_saving(tmp_path: Path) -> None:
    """What has been published stays, whole, whenever a rank dies; the next job goes on from it."""
    fork = multiprocessing.get_context("fork")
    chance = random.Random(11)
    last = 0
    for _ in range(3):
        done = fork.RawValue("q", 0)  # without a lock, which a killed rank would keep
        port = free_port()
        ranks = [fork.Process(target=save_for_ever, args=(rank, 2, port, str(tmp_path), done)) for rank in range(2)]
        for process in ranks:
            process.start()
        until = time.monotonic() + 60
        while done.value <= last and time.monotonic() < until:
            time.sleep(0.01)
        assert done.value > last, "nothing was saved"
        time.sleep(chance.uniform(0, 0.2))
        victims = [process.pid for process in ranks]
        chance.shuffle(victims)
        for pid in victims:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        found = uni.Checkpoints(tmp_path).newest_good()
        assert found is not None
        assert found.note == ""  # also the newest is whole
        assert found.step >= done.value
        last = found.step
