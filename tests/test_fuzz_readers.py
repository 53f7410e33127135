"""Whatever is in a file, its reader reads it or refuses it in a sentence (tools/fuzz_readers.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READERS = {"manifest", "safetensors", "state", "hardware", "plan", "hosts", "qasm", "run", "flight", "data"}


def fuzzed(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "tools/fuzz_readers.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return run.stdout


def test_damaged_and_hostile_files_are_read_or_refused() -> None:
    lines = fuzzed("--inputs", "100").splitlines()
    assert {line.partition(":")[0] for line in lines} == READERS
    assert all(": 100 inputs, 0 faults" in line for line in lines)


@pytest.mark.thorough
def test_of_ten_thousand_too() -> None:
    lines = fuzzed("--inputs", "10000").splitlines()
    assert len(lines) == len(READERS)


@pytest.mark.thorough
def test_planted_faults_are_found() -> None:
    assert "that were missed: none of 6" in fuzzed("--self-check")
