"""Jobs one after the other leave nothing: benchmarks/load.py runs hundreds, in namespaces of their own."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest

import unisono as uni
from benchmarks import load_program
from benchmarks.load import own_state, own_state_beside
from tests.launch.harness import Run
from unisono.errors import LaunchError
from unisono.launch.transport import mpiexec

PROGRAM = load_program.__file__


def test_a_process_has_as_much_open_after_many_spawns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def twice() -> None:
        assert uni.spawn(load_program.summed, 2, "gloo", (3.0,)) == [6.0, 6.0]
        with pytest.raises(LaunchError, match="TypeError"):
            uni.spawn(load_program.summed, 2, "gloo", ("no number",))
        gc.collect()

    twice()  # what is opened once in a process
    before = own_state()
    for _ in range(3):
        twice()
    after = own_state_beside(before)
    assert all(after[name] <= before[name] for name in after), (before, after)
    assert os.listdir(tmp_path) == []


def test_jobs_in_a_row_leave_nothing(tmp_path: Path) -> None:
    temporary, folder = tmp_path / "temporary", tmp_path / "folder"
    temporary.mkdir()
    folder.mkdir()
    kinds = [("ends", 0), ("fails", 1), ("all-fail", 1)]
    jobs = [(backend, how, code) for how, code in kinds for backend in ("gloo", "mpi")]
    for number, (backend, how, code) in enumerate(jobs):
        words = ["run", "-n", "2", "--backend", backend, PROGRAM, "job", str(folder), how]
        done = Run(words, tmp_path, {"TMPDIR": str(temporary)}).finish()  # which finds no process of it afterwards
        assert done.returncode == code, done.stdout + done.stderr
        assert os.listdir(temporary) == [], f"after job {number}, {backend} {how}"
        segments = Path(folder / "segments").read_text().split() if backend == "mpi" else []
        assert segments or backend == "gloo" or mpiexec.find().flavour != "MPICH"
        assert not any(map(os.path.exists, segments)), f"after job {number}, {backend} {how}"
