"""What is removed of the folders that jobs leave, and what stays."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.launch.transport import job_folder

PREFIX = "unisono-test-"


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"{job_folder.SEGMENT}{secrets.token_hex(8)}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def _abandoned() -> Path:
    """A folder whose process was killed."""
    folder, lock = job_folder.make(PREFIX)
    os.close(lock)
    return folder


def _remove_abandoned() -> None:
    job_folder.remove_abandoned(f"{PREFIX}*")


def test_an_abandoned_folder_is_removed_and_one_in_use_is_not() -> None:
    folder, (other, lock) = _abandoned(), job_folder.make(PREFIX)
    _remove_abandoned()
    assert (folder.exists(), other.exists()) == (False, True)
    with pytest.raises(BlockingIOError):  # so that systemd-tmpfiles leaves out that of a job of many days
        fcntl.flock(os.open(other, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(lock)


def test_a_folder_of_another_host_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its lock is not seen here, where hosts share a file system that keeps locks to each of them."""
    there = tmp_path / "boot"
    there.write_text("another")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(job_folder, "_BOOT", there)
        folder = _abandoned()
    _remove_abandoned()
    assert folder.exists()


def test_memory_goes_with_the_folder_that_names_it_and_no_other_file(segment: Path, tmp_path: Path) -> None:
    folder = _abandoned()
    other = tmp_path / "other"
    other.touch()
    job_folder.note_shared_memory(folder, [str(segment), str(other), f"{job_folder.SEGMENT}/../../{other}"])
    _remove_abandoned()
    assert (folder.exists(), segment.exists(), other.exists()) == (False, False, True)


def test_a_full_disk_ends_no_job(tmp_path: Path) -> None:
    job_folder.note_shared_memory(tmp_path / "removed", ["/dev/shm/any"])
