"""What a dead rank began last can be read until those who wait for it have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from unisono.comm import blackbox
from unisono.comm.blackbox import BlackBox
from unisono.launch import environment


def test_a_rank_of_another_job_leaves_the_box_of_one_that_has_just_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(environment.FAILURE_FILE, raising=False)
    ended = subprocess.Popen(["true"])
    ended.wait()
    box = tmp_path / f"unisono-rank-{ended.pid}-x"
    box.write_text("barrier #3 at train.py:7\n")
    another = BlackBox()
    BlackBox().discard()
    host = json.loads(another.address())[0]
    assert blackbox.fate(json.dumps([host, ended.pid, str(box)])) == "have died; last began barrier #3 at train.py:7"
    BlackBox().discard()  # has it noted that the rank is dead
    os.utime(box, (0, time.time() - 3600))
    BlackBox().discard()
    assert not box.exists()
    assert another.path.exists()
    another.discard()
    assert list(tmp_path.iterdir()) == []


def test_of_a_rank_that_is_halted_that_is_told() -> None:
    """It neither answers nor has died."""
    asleep = subprocess.Popen(["sleep", "1000"])
    try:
        host, _, path = json.loads(blackbox.address_of())
        address = json.dumps([host, asleep.pid, path])
        assert blackbox.fate(address) == "do not answer (busy in native code)"
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        assert blackbox.fate(address) == "have been stopped (by SIGSTOP, or in a debugger)"
    finally:
        asleep.kill()
        asleep.wait()
