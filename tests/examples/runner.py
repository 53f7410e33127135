"""Runs an example by the command that its docstring tells the reader, on real ranks.

    ran = run_example("seeds/001_torch/ring.py")        # or with more words: run_example(path, "--steps", "3")
    ran.ranks[1]                                        # what rank 1 printed

Commands run on a stage that all tests of a process share (`tools/commands.py`), or with `literally=True` as a shell
runs them. Any that does not end well is an AssertionError with all that was printed, tracebacks of ranks included.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import mpi_ranks
from tools.blocks import blocks_of, commands_of, pages
from tools.commands import COMMON, End, Stage

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STARTERS = ("unisono", "vqnetrun", "python", "mpiexec")
TIMEOUT = 400.0


class NoCommandError(AssertionError):
    """The docstring of an example does not say how to run it."""


@dataclass(frozen=True)
class Ran:
    """What a command printed: all of it, and by rank (a command that starts no ranks counts as rank 0)."""

    text: str
    ranks: list[str]


def commands(path: str | Path) -> list[list[str]]:
    """The commands in an example's docstring: the lines that start with a program and name the example's file."""
    full = EXAMPLES / path
    name = full.relative_to(ROOT).as_posix()
    lines = (ast.get_docstring(ast.parse(full.read_text())) or "").splitlines()
    words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines if _is_command(line)]
    found = [each for each in words if any(word.partition(":")[0] == name for word in each)]
    if not found:
        raise NoCommandError(
            f"the docstring of {name} has no command; expected a line like `unisono run -n 4 {name}` that starts with "
            f"{', '.join(STARTERS)}"
        )
    return found


def examples_in(folder: str) -> list[str]:
    """The examples directly in a folder of examples/ that have a command, by their paths in examples/."""
    found = sorted((EXAMPLES / folder).glob("*.py"))
    return [path.relative_to(EXAMPLES).as_posix() for path in found if not is_part(path)]


def printed_in(folder: str) -> list[tuple[str, int]]:
    """Every command that examples directly in a folder of examples/ print: the example's path, and the number of it.

    A test file that asks for a folder's runs them all; `test_every_example.py` looks for a folder that none asks for.
    """
    return [(path, number) for path in examples_in(folder) for number in range(len(commands(path)))]


def run_by_a_page(words: Sequence[str]) -> bool:
    """Whether a block of README or docs runs that command, perhaps with more words after it or another -n."""
    return any(each[: len(words)] == _without_ranks(words) for each in _run_by_pages())


@functools.cache
def _run_by_pages() -> set[tuple[str, ...]]:
    blocks = [block for page in pages() for block in blocks_of(page) if block.runs and block.language != "python"]
    return {_without_ranks(shlex.split(line, comments=True)) for block in blocks for line in commands_of(block)}


def _without_ranks(words: Sequence[str]) -> tuple[str, ...]:
    return tuple("N" if before == "-n" else word for before, word in zip(["", *words], words, strict=False))


def is_part(path: Path) -> bool:
    """Whether a file of examples/ is there for others beside it to import, and runs by none of its own."""
    text = path.read_text()
    beside = [other.read_text() for other in path.parent.glob("*.py") if other != path]
    is_imported = any(f"from {path.stem} import" in other or f"import {path.stem}\n" in other for other in beside)
    return is_imported and "__main__" not in text and not any(map(_is_command, text.splitlines()))


def run_example(path: str, *more: str, number: int = 0, literally: bool = False) -> Ran:
    """Run the example's command (the first, or its `number`-th) with `more` words after it, in a folder of its own."""
    words = [*commands(path)[number], *more]
    with tempfile.TemporaryDirectory(prefix="example-") as folder:
        (Path(folder) / "examples").symlink_to(EXAMPLES)
        return run_command(words, Path(folder), literally)


def run_command(words: Sequence[str], folder: Path, literally: bool = False) -> Ran:
    """Run a command in that folder. literally: in interpreters of its own, as a shell does it."""
    if words[0] == "mpiexec":
        return run_mpiexec(shlex.join(words), _ranks(words), folder)
    end = stage().run(shlex.join(words), folder, TIMEOUT, literally)
    _require_success(shlex.join(words), end)
    if "run" not in words[:2] and words[0] != "vqnetrun":
        return Ran(end.output, [end.output])
    return Ran(end.output, [_of_rank(end.output, rank) for rank in range(_ranks(words))])


def run_mpiexec(command: str, size: int, folder: Path) -> Ran:
    """Run a shell command whose mpiexec starts `python FILE ...` on ranks; these are forked from this process."""
    if not mpi_ranks.MPIEXEC.exists():
        pytest.skip(f"no mpiexec at {mpi_ranks.MPIEXEC}; run make setup")
    for name in COMMON:  # once here, and not by each rank
        importlib.import_module(name)
    done = mpi_ranks.run_shell(command, size, _run_script, folder, TIMEOUT)
    _require_success(command, End(done.returncode, done.stdout + done.stderr))
    return Ran(done.stdout, [done.stdout])


@functools.cache
def stage() -> Stage:
    """Where the commands of all tests of this process run."""
    made = Stage()
    atexit.register(made.close)
    return made


def _is_command(line: str) -> bool:
    return line.strip().removeprefix("$ ").partition(" ")[0] in STARTERS


def _run_script(words: list[str]) -> None:
    """As a fresh interpreter: nothing of the tests' own can be imported, and no example has been."""
    sys.path[:] = [each for each in sys.path if each and Path(each).resolve() not in (ROOT, EXAMPLES)]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


def _ranks(words: Sequence[str]) -> int:
    for option in ("-n", "-np"):
        if option in words:
            return int(words[words.index(option) + 1])
    raise NoCommandError(f"{shlex.join(words)} does not say how many ranks; expected -n N")


def _of_rank(output: str, rank: int) -> str:
    mark = f"[{rank}] "
    return "".join(line.removeprefix(mark) for line in output.splitlines(keepends=True) if line.startswith(mark))


def _require_success(command: str, end: End) -> None:
    if end.code == 0:
        return
    why = f"did not end within {TIMEOUT:g} s and was aborted" if end.code is None else f"ended with {end.code}"
    lines = [line for line in end.output.splitlines() if "Extension modules: " not in line]  # faulthandler's, 5 KB each
    raise AssertionError("\n".join([f"{command} {why}:", *lines, f"(the output of: {command}, which {why})"]))
