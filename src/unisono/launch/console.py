"""What the user sees of a job: the ranks' lines after their `[rank]`, one file a rank, the launcher's words.

A line that a rank has not finished, or rewrites with carriage returns (a progress bar), is shown live on a
terminal, and only in its last state elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import BinaryIO, TextIO

from unisono.errors import LaunchError, UsageError
from unisono.launch.wire import bytes_of

_LONGEST = 1 << 20  # a line without end is broken here
_CLEAR_LINE = "\r\x1b[K"
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASING = re.compile(r"^(?:\x1b\[[0-2]?K)+")


class Console:
    """Takes the ranks' output in pieces, writes lines. `mute` silences ranks that fail because one did."""

    def __init__(self, directory: str | None = None, prefix: bool = True) -> None:
        self._partial: dict[tuple[int, str], str] = {}
        self._live: tuple[TextIO, int, str] | None = None  # on the terminal's last line: where, whose, what
        self._muted: set[int] = set()
        self._prefix = prefix
        self._directory = _prepared(directory) if directory else None
        self._files: dict[int, BinaryIO] = {}
        self.is_unread = False  # True when whoever read our output has gone, as `| head` does

    def write(self, rank: int, stream: str, text: str) -> None:
        """A piece of a rank's output. stream is "out" or "err"."""
        self.to_file(rank, text)
        if rank in self._muted:
            return
        target = sys.stderr if stream == "err" else sys.stdout
        *lines, rest = (self._partial.get((rank, stream), "") + text).split("\n")
        if lines and self._live is not None and self._live[1] == rank:
            self._clear_live()
        for line in lines:
            self._line(target, self._labelled(rank, _last_state(line)))
        state = _last_state(rest)
        if _is_visible(state) and target.isatty():
            self._clear_live()
            self._draw_live((target, rank, self._labelled(rank, state)))
        # of a line that is being rewritten only the last state counts, so it need not grow
        rest = "\r" + state if "\r" in rest else rest
        if len(rest) > _LONGEST:
            self._line(target, self._labelled(rank, rest))
            rest = ""
        self._partial[rank, stream] = rest
        self._flush(target)

    def say(self, text: str) -> None:
        """The launcher's own word, on stderr."""
        self._line(sys.stderr, text)
        self._flush(sys.stderr)

    def to_file(self, rank: int, text: str) -> None:
        if self._directory is None:
            return
        path = self._directory / f"rank.{rank}"
        try:
            if rank not in self._files:
                self._files[rank] = path.open("wb", buffering=0)
            self._files[rank].write(bytes_of(text))
        except OSError as error:
            raise LaunchError(f"--output-filename: {path} cannot be written: {error.strerror}") from None

    def mute(self, ranks: set[int]) -> None:
        """Show these no more; their files go on."""
        self._muted |= ranks

    def unmute(self, ranks: set[int]) -> None:
        self._muted -= ranks

    def flush(self) -> None:
        """End unfinished lines."""
        self._clear_live()
        for (rank, stream), rest in self._partial.items():
            state = _last_state(rest)
            if _is_visible(state):
                self._line(sys.stderr if stream == "err" else sys.stdout, self._labelled(rank, state))
        self._partial.clear()
        self._flush(sys.stdout)
        self._flush(sys.stderr)

    def close(self) -> None:
        self.flush()
        for file in self._files.values():
            file.close()

    def _labelled(self, rank: int, text: str) -> str:
        return f"[{rank}] {text}" if self._prefix else text

    def _line(self, target: TextIO, line: str) -> None:
        live = self._live
        self._clear_live()
        self._put(target, line + "\n")
        if live is not None:
            self._flush(target)
            self._draw_live(live)

    def _clear_live(self) -> None:
        if self._live is not None:
            self._put(self._live[0], _CLEAR_LINE)
            self._flush(self._live[0])
            self._live = None

    def _draw_live(self, live: tuple[TextIO, int, str]) -> None:
        self._live = live
        self._put(live[0], live[2])
        self._flush(live[0])

    def _put(self, target: TextIO, text: str) -> None:
        try:
            _write(target, text)
        except BrokenPipeError:
            self._lose(target)

    def _flush(self, target: TextIO) -> None:
        try:
            target.flush()
        except BrokenPipeError:
            self._lose(target)

    def _lose(self, target: TextIO) -> None:
        """Nobody reads target any more: what still comes goes nowhere."""
        self.is_unread = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, target.fileno())
        os.close(null)


def terminal_variables(ranks: int) -> dict[str, str]:
    """What lets programs inside ranks draw for the launcher's terminal; nothing when there is none."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    label = len(f"[{ranks - 1}] ")
    variables = {"COLUMNS": str(max(20, size.columns - label)), "LINES": str(size.lines)}
    variables |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
    if "NO_COLOR" not in os.environ:
        variables["FORCE_COLOR"] = "1"
    return variables


def _last_state(line: str) -> str:
    """What a terminal would show of a line with carriage returns in it.

    What erases the line is left out: the rank's label stands there by then, which it would take along.
    """
    if "\r" not in line:
        return line
    states = (_ERASING.sub("", part) for part in reversed(line.split("\r")))
    return next((state for state in states if state), "")


def _is_visible(text: str) -> bool:
    """Whether it is more than instructions to the terminal, such as to show its cursor again."""
    return bool(_CONTROL.sub("", text))


def _write(target: TextIO, text: str) -> None:
    """Write text that may hold bytes that are no UTF-8, as the bytes they were."""
    try:
        target.write(text)
    except UnicodeEncodeError:
        target.flush()
        binary = getattr(target, "buffer", None)
        if binary is None:
            target.write(text.encode("utf-8", "replace").decode())
        else:
            binary.write(bytes_of(text))
            binary.flush()


def _prepared(directory: str) -> Path:
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-filename {directory!r}: no directory can be made there: {error}") from None
    return path
