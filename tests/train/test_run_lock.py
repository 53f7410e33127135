"""Two jobs do not share a run folder: one would go on from the other's checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.train.telemetry import run_folder
from unisono.train.telemetry.run_folder import RunFolder

HOLDS = """
import sys, time, os
from unisono.train.telemetry.run_folder import RunFolder
with RunFolder(sys.argv[1], 0).held():
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
    monkeypatch.setattr(run_folder, "_SOON", 0.0)
    folder = tmp_path / "run"
    with _other_job(folder) as process:
        with (
            pytest.raises(UsageError, match=rf"is in use by process {process.pid} on host .*give another folder"),
            RunFolder(folder, 0).held(),
        ):
            pass
        with RunFolder(folder, 1).held():  # rank 0 alone holds it
            pass
        process.kill()  # its child lives on, and does not hold it
        process.wait()
        monkeypatch.setattr(run_folder, "_SOON", 30.0)
        with RunFolder(folder, 0).held():
            pass
    with RunFolder(folder, 0).held():
        pass


def test_an_empty_record_of_a_run_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    with pytest.warns(UserWarning, match=r"run\.json is empty"):
        assert RunFolder.starts(tmp_path) == []
