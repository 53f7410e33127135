"""Console: the output of a job. Lines of ranks with the prefix `[rank]`, one file a rank, messages of the launcher.

An unfinished line, or one that is rewritten with carriage returns (a progress bar), is shown live on a terminal, and
only in its last state elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import BinaryIO, TextIO

from unisono.errors import LaunchError, UsageError
from unisono.launch.transport.wire import bytes_of

_LONGEST = 1 << 20  # characters of a line before it is broken
_CLEAR_LINE = "\r\x1b[K"
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERASING = re.compile(r"^(?:\x1b\[[0-2]?K)+")


class Console:
    """Receives output of ranks in chunks and writes lines. `mute` hides ranks that fail because another one did. quiet:
    messages are not shown."""

    def __init__(self, directory: str | None = None, quiet: bool = False) -> None:
        self._quiet = quiet
        self._partial: dict[tuple[int, str], str] = {}
        self._live: tuple[TextIO, int, str] | None = None  # the terminal's last line: stream, rank, text
        self._muted: set[int] = set()
        self._directory = _prepared(directory) if directory else None
        self._files: dict[int, BinaryIO] = {}
        self.is_unread = False  # True after the reader of our output has closed it, as `| head` does
        self.lost: set[TextIO] = set()  # streams that could not be written, as on a full disk

    def write(self, rank: int, stream: str, text: str) -> None:
        """Write a chunk of a rank's output. stream is "out" or "err"."""
        self.to_file(rank, text)
        if rank in self._muted:
            return
        target = sys.stderr if stream == "err" else sys.stdout
        *lines, rest = (self._partial.get((rank, stream), "") + text).split("\n")
        if lines and self._live is not None and self._live[1] == rank:
            self._clear_live()
        for line in lines:
            self._line(target, _labelled(rank, _last_state(line)))
        state = _last_state(rest)
        if _is_visible(state) and target.isatty():
            self._clear_live()
            self._draw_live((target, rank, _labelled(rank, state)))
        # of a line that is being rewritten, keep only the last state
        rest = "\r" + state if "\r" in rest else rest
        if len(rest) > _LONGEST:
            self._line(target, _labelled(rank, rest))
            rest = ""
        self._partial[rank, stream] = rest
        self._flush(target)

    def message(self, text: str) -> None:
        """Write a message of the launcher on stderr."""
        if not self._quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Write why the job failed on stderr."""
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
        """Hide these ranks; their files are still written."""
        self._muted |= ranks

    def unmute(self, ranks: set[int]) -> None:
        self._muted -= ranks

    def flush(self) -> None:
        """Write unfinished lines."""
        self._clear_live()
        for (rank, stream), rest in self._partial.items():
            state = _last_state(rest)
            if _is_visible(state):
                self._line(sys.stderr if stream == "err" else sys.stdout, _labelled(rank, state))
        self._partial.clear()
        self._flush(sys.stdout)
        self._flush(sys.stderr)

    def close(self) -> None:
        self.flush()
        for file in self._files.values():
            file.close()

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
            self._stop_writing(target)
        except OSError as error:
            self._lose(target, error)

    def _flush(self, target: TextIO) -> None:
        try:
            target.flush()
        except BrokenPipeError:
            self._stop_writing(target)
        except OSError as error:
            self._lose(target, error)

    def _stop_writing(self, target: TextIO) -> None:
        """The reader of target has closed it."""
        self.is_unread = True
        discard(target)

    def _lose(self, target: TextIO, error: OSError) -> None:
        """A job continues without its output, which is written again when that is possible."""
        if target in self.lost:
            return
        self.lost.add(target)
        if target is sys.stdout:
            self.message(
                f"the output of ranks cannot be written: {error.strerror}; the job continues, and lines are lost until "
                "there is room"
            )


def discard(target: TextIO) -> None:
    """Write to nowhere from now on, also what is buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, target.fileno())
    os.close(null)


def terminal_variables(ranks: int) -> dict[str, str]:
    """Variables by which programs in ranks format for the launcher's terminal; none without a terminal."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    label = len(f"[{ranks - 1}] ")
    variables = {"COLUMNS": str(max(20, size.columns - label)), "LINES": str(size.lines)}
    variables |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
    if "NO_COLOR" not in os.environ:
        variables["FORCE_COLOR"] = "1"
    return variables


def _labelled(rank: int, text: str) -> str:
    return f"[{rank}] {text}"


def _last_state(line: str) -> str:
    """The text that a terminal would show of a line with carriage returns.

    Sequences that erase the line are removed: they would erase the prefix as well.
    """
    if "\r" not in line:
        return line
    states = (_ERASING.sub("", part) for part in reversed(line.split("\r")))
    return next((state for state in states if state), "")


def _is_visible(text: str) -> bool:
    """Whether it is more than control sequences, such as showing the cursor."""
    return bool(_CONTROL.sub("", text))


def _write(target: TextIO, text: str) -> None:
    """Write text with surrogate escapes as the original bytes."""
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
