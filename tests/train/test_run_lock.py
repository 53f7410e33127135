"""Two jobs do not share a run folder, nor a folder of checkpoints: one would go on from the other's."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.train.callbacks import Callback, SaveBest
from unisono.train.checkpoint import folder_lock
from unisono.train.checkpoint.folder_lock import FolderLock
from unisono.train.telemetry.run_folder import RunFolder

HOLDS = """
import sys, time, os
from pathlib import Path
from unisono.train.checkpoint.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if not os.fork():  # such as a worker of a DataLoader
    time.sleep(1000)
print("held", flush=True)
time.sleep(1000)
"""


@contextmanager
def _other_job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_folder_in_use_is_refused_until_its_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_SOON", 0.0)
    folder = tmp_path / "run"
    with _other_job(folder) as process:
        with (
            pytest.raises(UsageError, match=rf"is in use by process {process.pid} on host .*give another folder"),
            RunFolder(folder, 0).held(),
        ):
            pass
        with pytest.raises(UsageError, match=f"is in use by process {process.pid}"):
            FolderLock(folder / "checkpoints")  # of the run folder
        process.kill()  # its child lives on, and does not hold it
        process.wait()
        monkeypatch.setattr(folder_lock, "_SOON", 30.0)
        with RunFolder(folder, 0).held():
            pass
    with RunFolder(folder, 0).held():
        pass


def test_two_parts_of_a_process_share_a_lock(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.release()
    assert second.problem() == ""
    assert _is_refused(tmp_path)
    second.release()
    assert not _is_refused(tmp_path)


@pytest.mark.parametrize("part", ["checkpoints", "best"])
def test_the_folders_of_a_run_have_the_lock_of_the_run(tmp_path: Path, part: str) -> None:
    (tmp_path / part).mkdir()
    run, inner = FolderLock(tmp_path), FolderLock(tmp_path / part)
    assert not (tmp_path / part / "run.lock").exists()
    run.release()
    assert _is_refused(tmp_path)
    inner.release()


def _is_refused(folder: Path) -> bool:
    """Whether a job in another process may not write to the folder."""
    code = "import sys; from pathlib import Path; from unisono.train.checkpoint import folder_lock as f\n"
    code += "f._SOON = 0.0; f.FolderLock(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "is in use by process" in done.stderr, done.stderr
    return done.returncode != 0


def _replaced(folder: Path) -> None:
    """Another job has taken the folder, after somebody had removed the lock."""
    (folder / "run.lock").unlink()
    (folder / "run.lock").write_text("process 17 on host far.example, since now, token 1\n")


def _overwritten(folder: Path) -> None:
    """Another job has taken the folder, where the file system has no locks."""
    (folder / "run.lock").write_text("process 17 on host far.example, since now, token 1\n")


TAKEN = r"was taken over by process 17 on host far\.example, since now, token 1: its run\.lock is no longer"


@pytest.mark.parametrize("taken", [_replaced, _overwritten])
def test_a_lock_that_was_taken_is_noticed(tmp_path: Path, taken: Callable[[Path], None]) -> None:
    lock = FolderLock(tmp_path)
    lock.require()
    taken(tmp_path)
    with pytest.raises(UsageError, match=TAKEN):
        lock.require()


def test_a_lock_that_was_removed_is_made_again(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / "run.lock").unlink()
    lock.require()
    assert _is_refused(tmp_path)


def test_a_folder_that_was_lost_is_not_taken_for_this_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_SOON", 0.0)
    lost = FolderLock(tmp_path)
    (tmp_path / "run.lock").unlink()
    with _other_job(tmp_path) as process:
        with pytest.raises(UsageError, match=f"is in use by process {process.pid}"):
            FolderLock(tmp_path)
        assert f"was taken over by process {process.pid}" in lost.problem()
    monkeypatch.setattr(folder_lock, "_SOON", 30.0)  # its child may take a moment to die, and has the lock too
    assert FolderLock(tmp_path).problem() == ""


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644)])
def test_who_may_take_the_folder_later_is_up_to_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        FolderLock(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.lock").stat().st_mode) == mode


def test_a_file_system_without_lasting_inodes_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_SOON", 0.0)
    looks = iter(range(100))
    monkeypatch.setattr(os.path, "samestat", lambda one, other: next(looks) < 0)
    lock = FolderLock(tmp_path)
    assert lock.problem() == ""


def test_a_lock_outlasts_a_look_at_its_file(tmp_path: Path) -> None:
    """By a backup, or a logger that uploads the run folder."""
    lock = FolderLock(tmp_path)
    assert (tmp_path / "run.lock").read_text()
    assert _is_refused(tmp_path)
    lock.release()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run.lock").symlink_to("mine")
    FolderLock(tmp_path).require()
    assert (tmp_path / "mine").read_text() == "mine"


class Taker(Callback):
    """Has the folder taken before a step is saved."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def on_step(self, engine: Any, info: Any) -> None:
        if info.step == self._step and engine.comm.rank == 0:
            deadline = time.monotonic() + 60
            while not (self._folder / "checkpoints" / "step-00000002").exists():  # it is written beside the steps
                assert time.monotonic() < deadline
                time.sleep(0.02)
            _replaced(self._folder)


def _data() -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(32, 3, generator=generator), torch.randint(2, (32,), generator=generator)
    )


def fits(comm: Any, directory: str) -> tuple[str, list[int]]:
    """The error of a `fit` whose folder is taken after step 3, and the steps that it has saved."""
    folder = Path(directory)
    engine = uni.Engine(
        nn.Linear(3, 2), F.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan=f"dp={comm.size}"
    )
    with pytest.raises(UsageError) as raised:
        engine.fit(
            _data(), batch_size=4, save=folder, save_every=2, progress=False, callbacks=[Taker(folder, 3)], max_steps=8
        )
    return str(raised.value), uni.Checkpoints(folder / "checkpoints").steps()


def test_fit_stops_at_the_next_save_on_every_rank(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    answers = pools("gloo", 2).run(fits, str(tmp_path / "run"))
    assert answers[0] == answers[1]
    error, steps = answers[0]
    assert "was taken over by process 17" in error
    assert steps == [2]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def refused(comm: Any, directory: str) -> list[str]:
    """What ranks are told that begin to write to a folder where another job writes: by `fit`, and by `Checkpoints`."""
    folder_lock._SOON = 0.0
    folder, told = Path(directory), []
    engine = uni.Engine(
        nn.Linear(3, 2), F.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan=f"dp={comm.size}"
    )
    with pytest.raises(UsageError) as raised:
        engine.fit(_data(), batch_size=4, save=folder, progress=False, max_steps=1)
    told.append(str(raised.value))
    with pytest.raises(UsageError) as raised:
        uni.Checkpoints(folder).save(engine.ready, 1)
    folder_lock._SOON = 3.0
    return [*told, str(raised.value)]


def test_every_rank_is_told_who_has_the_folder(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    with _other_job(tmp_path) as process:
        answers = pools("gloo", 2).run(refused, str(tmp_path))
    for told in answers:
        assert all(f"is in use by process {process.pid} on host" in each for each in told), told
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_that_has_ended_gives_its_folder_back(tmp_path: Path, fails: bool) -> None:
    """Also while what it was given, or its error, is still there, as in a notebook."""
    engine = uni.Engine(nn.Linear(3, 2), F.cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    best = SaveBest("validation_loss", tmp_path / "best")
    callbacks = [best, *[Failing(3)][: int(fails)]]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        engine.fit(
            _data(),
            batch_size=8,
            validation=_data(),
            evaluate_every=2,
            save=tmp_path,
            progress=False,
            callbacks=callbacks,
        )
    assert (tmp_path / "best" / f"step-{best.best_step:08d}").exists()
    assert not _is_refused(tmp_path)


class Failing(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, engine: Any, info: Any) -> None:
        if info.step == self._step:
            raise RuntimeError("it fails")


def _taken_meanwhile(folder: Path, checkpoints: uni.Checkpoints) -> str:
    _replaced(folder)
    return uni.Checkpoints._lost(checkpoints)


def saves(comm: Any, directory: str) -> list[str]:
    """The errors of saves to a folder that is taken before the save, and before it is published."""
    errors = []
    for when in ("before", "during"):
        folder = Path(directory) / when
        trainer = uni.parallelize(
            nn.Linear(3, 2), f"dp={comm.size}", loss=F.cross_entropy, optimizer=torch.optim.SGD, seed=0
        )
        checkpoints = uni.Checkpoints(folder)
        checkpoints.save(trainer, 1)
        if when == "during":
            checkpoints._lost = functools.partial(_taken_meanwhile, folder, checkpoints)
        elif comm.rank == 0:
            _replaced(folder)
        with pytest.raises(UsageError) as raised:
            checkpoints.save(trainer, 2)
        errors.append(str(raised.value))
        assert checkpoints.steps() == [1]
    return errors


def test_checkpoints_without_fit_hold_their_folder(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    answers = pools("gloo", 2).run(saves, str(tmp_path))
    assert answers[0] == answers[1]
    assert all("was taken over by process 17" in error for error in answers[0])
    for folder in tmp_path.iterdir():
        assert {path.name for path in folder.iterdir()} == {"run.lock", "step-00000001"}


def test_an_empty_record_of_a_run_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    with pytest.warns(UserWarning, match=r"run\.json is empty"):
        assert RunFolder.starts(tmp_path) == []


def test_the_record_of_a_run_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses power could leave an empty run.json."""
    kept, synced = os.fsync, []

    def noted(descriptor: int) -> None:
        kept(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, path.read_text() if path.suffix == ".new" else ""))

    monkeypatch.setattr(os, "fsync", noted)
    RunFolder(tmp_path, 0).open({"plan": "dp=1", "world": 1}, 0)
    assert [text for name, text in synced if name == "run.json.new"] == [(tmp_path / "run.json").read_text()]
