"""The console's lines, as a terminal would show them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from unisono.errors import LaunchError
from unisono.launch.console import Console

# What rich's progress bar writes: hide the cursor, rewrite the line, leave it, show the cursor.
BAR = ("\x1b[?25l\r\x1b[2Ktrain   0%", "\r\x1b[2Ktrain  50%", "\r\x1b[2Ktrain 100%\n\x1b[?25h")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The lines that a terminal shows: understands carriage returns, erasing and the cursor's visibility."""
    lines, column = [""], 0
    rest = written.replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    while rest:
        if rest.startswith(("\x1b[K", "\x1b[2K")):
            full = rest.startswith("\x1b[2K")
            lines[-1] = " " * column if full else lines[-1][:column]
            rest = rest[4 if full else 3 :]
            continue
        if rest[0] == "\n":
            lines.append("")
            column = 0
        elif rest[0] == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + rest[0] + lines[-1][column + 1 :]
            column += 1
        rest = rest[1:]
    return lines


def test_a_progress_bar_keeps_its_label_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    console = Console()
    seen = []
    for shard in BAR:
        console.write(0, "out", shard)
        seen.append(screen(terminal.getvalue())[0])
    assert seen == ["[0] train   0%", "[0] train  50%", "[0] train 100%"]
    console.write(1, "out", "beside it\n")
    console.flush()
    assert screen(terminal.getvalue()) == ["[0] train 100%", "[1] beside it", ""]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.1").symlink_to("/dev/full")
    console = Console(str(tmp_path))
    with pytest.raises(LaunchError, match=r"--output-filename: .*/rank\.0 cannot be written: Is a directory"):
        console.write(0, "out", "x")
    with pytest.raises(LaunchError, match=r"/rank\.1 cannot be written: No space left"):
        console.write(1, "out", "x")


def test_elsewhere_only_the_last_state_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    console = Console()
    for shard in BAR:
        console.write(0, "out", shard)
    console.flush()
    assert file.getvalue() == "[0] train 100%\n"


def test_a_quiet_one_shows_why_the_job_failed_and_no_messages(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.message("restart 1 of 2")
    console.write(0, "out", "a line\n")
    console.error("rank 1 failed")
    assert capsys.readouterr() == ("[0] a line\n", "rank 1 failed\n")
