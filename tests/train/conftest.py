"""What tests of files share: a real disk that is small."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB, mounted for this test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    gc.collect()  # of what failed, with the lock on the folder
    subprocess.run(["umount", str(folder)], check=True)
