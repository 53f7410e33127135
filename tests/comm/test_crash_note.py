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
    assert crash_note.fate(json.dumps([host, ended.pid, note.name])) == "have died; last began barrier #3 at train.py:7"
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


def test_no_other_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to the store must not make a rank read the user's files into it."""
    folder = tmp_path / "temporary"
    (folder / "unisono-job").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    secret = tmp_path / "secret"
    secret.write_text("token\n")
    (folder / "unisono-rank-1-link").symlink_to(secret)
    (folder / "unisono-elsewhere").symlink_to(tmp_path)
    (tmp_path / "0.last").write_text("token\n")
    os.link(secret, folder / "unisono-rank-1-hard")
    os.mkfifo(folder / "unisono-job" / "0.last")
    host = json.loads(crash_note.address_of())[0]
    names = ["/proc/self/environ", str(secret), "../secret", "unisono-rank-1-link", "unisono-rank-1-hard", "."]
    names += ["unisono-elsewhere/0.last", "unisono-job/0.last", "unisono-job/../../secret", "unisono-rank-1-link\n"]
    for name in names:
        assert crash_note.fate(json.dumps([host, os.getpid(), name])) == "do not answer (busy in native code)"
    for odd in ("", "[]", "[1, 2, 3]", json.dumps([host, "1", ""]), json.dumps([host, 1, None])):
        assert crash_note.fate(odd) is None


def test_the_note_of_a_launched_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    record = Path(tempfile.mkdtemp(prefix="unisono-")) / "0.3.json"
    monkeypatch.setenv(environment.FAILURE_FILE, str(record))
    note = CrashNote()
    note.path.write_bytes(b"barrier #3 at train.py:7\n")
    assert crash_note.fate(note.address()) == "do not answer (busy in native code); last began barrier #3 at train.py:7"
