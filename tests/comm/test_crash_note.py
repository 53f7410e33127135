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

from unisono.comm.watchdog import crash_note
from unisono.comm.watchdog.crash_note import CrashNote
from unisono.launch import environment


def test_a_rank_of_another_job_keeps_the_note_of_one_that_has_just_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(environment.FAILURE_FILE, raising=False)
    ended = subprocess.Popen(["true"])
    ended.wait()
    note = tmp_path / f"unisono-rank-{ended.pid}-x"
    note.write_text("barrier #3 at train.py:7\n")
    another = CrashNote()
    CrashNote().discard()
    host = json.loads(another.address())[0]
    assert crash_note.fate(json.dumps([host, ended.pid, str(note)])) == "have died; last began barrier #3 at train.py:7"
    os.utime(note, (0, time.time() - 4000))
    CrashNote().discard()
    assert not note.exists()
    assert another.path.exists()
    another.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_halted_is_reported_as_such() -> None:
    """It neither answers nor has died."""
    asleep = subprocess.Popen(["sleep", "1000"])
    try:
        host, _, path = json.loads(crash_note.address_of())
        address = json.dumps([host, asleep.pid, path])
        assert crash_note.fate(address) == "do not answer (busy in native code)"
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        assert crash_note.fate(address) == "have been stopped (by SIGSTOP, or in a debugger)"
    finally:
        asleep.kill()
        asleep.wait()
