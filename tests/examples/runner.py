"""Runs an example by the command that its docstring tells the reader, on real ranks, forked where that is the same.

    ran = run_example("seeds/001_torch/ring.py")        # or with more words: run_example(path, "--steps", "3")
    ran.ranks[1]                                        # what rank 1 printed

Any command that does not end well is an AssertionError with all that was printed, tracebacks of ranks included.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import unisono
from tests import mpi_ranks
from tests.processes import End, run_forked
from unisono import cli

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STARTERS = ("unisono", "vqnetrun", "python", "mpiexec")
TIMEOUT = 150.0
# What examples import, or torch for them: once here, and not by each of their ranks.
COMMON = ("torch._dynamo", "torch.distributed.checkpoint", "torch.nn.parallel", "sklearn.datasets", "unisono.nn")


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


def is_part(path: Path) -> bool:
    """Whether a file of examples/ is there for others beside it to import, and runs by none of its own."""
    text = path.read_text()
    beside = [other.read_text() for other in path.parent.glob("*.py") if other != path]
    is_imported = any(f"from {path.stem} import" in other or f"import {path.stem}\n" in other for other in beside)
    return is_imported and "__main__" not in text and not any(map(_is_command, text.splitlines()))


def run_example(path: str, *more: str, number: int = 0, timeout: float = TIMEOUT) -> Ran:
    """Run the example's command (the first, or its `number`-th) with `more` words after it, in a folder of its own."""
    words = [*commands(path)[number], *more]
    with tempfile.TemporaryDirectory(prefix="example-") as folder:
        (Path(folder) / "examples").symlink_to(EXAMPLES)
        return run_command(words, Path(folder), timeout)


def run_command(words: Sequence[str], folder: Path, timeout: float = TIMEOUT) -> Ran:
    """Run a command as a shell in that folder would."""
    _import_what_is_common()
    if words[0] == "mpiexec":
        return _run_mpiexec(words, folder, timeout)
    job = functools.partial(_in_folder, folder, functools.partial(_start, list(words)))
    with tempfile.TemporaryDirectory(prefix="output-") as output:
        (end,) = run_forked([job], Path(output), timeout)
    _require_success(words, end)
    if "run" not in words[:2] and words[0] != "vqnetrun":
        return Ran(end.output, [end.output])
    return Ran(end.output, [_of_rank(end.output, rank) for rank in range(_ranks(words))])


@functools.cache
def _import_what_is_common() -> None:
    for name in COMMON:
        importlib.import_module(name)
    for name in unisono.__all__:
        getattr(unisono, name)


def _is_command(line: str) -> bool:
    return line.strip().removeprefix("$ ").partition(" ")[0] in STARTERS


def _start(words: list[str]) -> None:
    if words[0] == "python":
        _run_python(words[1:])
    main: Callable[[list[str]], int] = cli.main
    if words[0] == "vqnetrun":
        main = importlib.import_module("unisono.compat.vqnetrun").main
    sys.argv = words
    sys.exit(main(words[1:]))


def _run_python(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
    sys.exit(0)


def _in_folder(folder: Path, job: Callable[[], object]) -> None:
    """As a fresh process there: nothing of the tests' own can be imported, and no example has been."""
    os.chdir(folder)
    sys.path[:] = [each for each in sys.path if each and Path(each).resolve() not in (ROOT, EXAMPLES)]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(EXAMPLES)):
            del sys.modules[name]
    job()


def _run_mpiexec(words: Sequence[str], folder: Path, timeout: float) -> Ran:
    if not mpi_ranks.MPIEXEC.exists():
        pytest.skip(f"no mpiexec at {mpi_ranks.MPIEXEC}; run make setup")
    size = _ranks(words)
    program = list(words[words.index("python") + 1 :])
    with tempfile.TemporaryDirectory(prefix="output-") as output:
        job = functools.partial(_in_folder, folder, functools.partial(_run_mpi_rank, Path(output), program))
        done = mpi_ranks.run(size, job, timeout)
        files = [Path(output) / f"rank.{rank}" for rank in range(size)]
        ranks = [file.read_text() if file.exists() else "" for file in files]
    text = "".join(ranks)
    _require_success(words, End(done.returncode, text + done.stdout + done.stderr))
    return Ran(text, ranks)


def _run_mpi_rank(output: Path, program: list[str]) -> None:
    sink = os.open(output / f"rank.{os.environ['PMI_RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")


def _ranks(words: Sequence[str]) -> int:
    for option in ("-n", "-np"):
        if option in words:
            return int(words[words.index(option) + 1])
    raise NoCommandError(f"{shlex.join(words)} does not say how many ranks; expected -n N")


def _of_rank(output: str, rank: int) -> str:
    mark = f"[{rank}] "
    return "".join(line.removeprefix(mark) for line in output.splitlines(keepends=True) if line.startswith(mark))


def _require_success(words: Sequence[str], end: End) -> None:
    if end.code != 0:
        raise AssertionError(f"{shlex.join(words)} ended with {end.code}:\n{end.output}")
