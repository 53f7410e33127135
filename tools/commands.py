"""Runs commands as a shell would, in forks of one process that has imported torch: two seconds less for each.

    stage = Stage()
    end = stage.run("unisono run -n 2 hello.py", folder)      # end.code, end.output

`unisono run` and `vqnetrun` are read by their own parser. Where a job is no more than so many ranks of a script on
this machine, its ranks are forked too, by uni.spawn; any other is started as it stands, and so is what is not ours.

The stage is `python tools/commands.py`. It computes nothing itself, so that all that is forked from it finds no thread
but its own, and answers a line of JSON for each line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
# What commands use, imported once for all that is forked from here. torch's optimizers load torch._dynamo anyway.
COMMON = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.export", "torch.nn.parallel",
    "numba", "sklearn.datasets", "unisono.cli", "unisono.nn", "unisono.parallel.apply", "unisono.train.engine",
    "unisono.quantum.layer",
)  # fmt: skip
HARDWARE = ROOT / "tools" / "two_cores.toml"
_SHELL = re.compile(r"[|&;<>`*?$(){}~]")
_INTO_A_FILE = re.compile(r"(unisono [^|&;<>`*?$(){}~]+) > ([\w.]+)")


@dataclass(frozen=True)
class End:
    """How a command ended: its exit code (None: it was not done in time) and what it printed."""

    code: int | None
    output: str


class Stage:
    """A process from which commands are forked; started at the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: str, folder: Path, limit: float = 150, literally: bool = False) -> End:
        """Run the command in the folder; after `limit` seconds it is ended, with all that it has started.

        literally: by a shell, in interpreters of its own.
        """
        return End(**self._ask(command=command, folder=str(folder), limit=limit, literally=literally))

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            words = [sys.executable, str(Path(__file__))]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the stage of tools/commands.py ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


# ---- on the stage ----------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make this process one from which commands are forked: with their imports and their environment.

    An engine that plans finds the machine described, and does not measure it: 1.4 s a rank, each time.
    """
    os.environ.setdefault("UNISONO_HARDWARE", str(HARDWARE))
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    sys.path[0] = str(ROOT / "src")
    for name in COMMON:
        importlib.import_module(name)


def alone(act: Callable[[], int], folder: Path, limit: float) -> End:
    """Run act in a fork that is in `folder` and leads a group of its own; what it gives is the exit code."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.chdir(folder)
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            _become(act)
        code = _ended_within(limit, child)
        if code is None:
            _end(child)
        output.seek(0)
        return End(code, output.read().decode("utf-8", "replace"))


def _ended_within(limit: float, child: int) -> int | None:
    """The child's exit code, once it has ended; None after `limit` seconds."""
    until, pause = time.monotonic() + limit, 0.002
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)
    return None


def _end(child: int) -> None:
    """End a child and all below it. Ranks come first: aborted, they print where they are, which is what one wants to
    know, and those who wait for them may end by themselves and tell it."""
    from unisono.launch import proctree

    for pid in proctree.descendants(child):
        if not proctree.descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
    if _ended_within(10, child) is None:
        proctree.sweep(child)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it may have ended meanwhile
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def run(command: str) -> int:
    """The exit code of a command that is run here, on this process's own output."""
    bare = command.split(" #")[0].strip()
    into = _INTO_A_FILE.fullmatch(bare)
    if into:
        return _forked(lambda: _written(into[2], lambda: _unisono(shlex.split(into[1]))))
    words = [] if _SHELL.search(bare) else shlex.split(bare)
    if words[:1] == ["python"] and words[1:] and words[1].endswith(".py"):
        return _forked(lambda: _script(words[1:]))
    if words[:1] == ["unisono"] and words[1:2] != ["run"]:
        return _forked(lambda: _unisono(words))
    job = _plain_job(words)
    if job is not None:
        return _forked(lambda: _ranks(job))
    return shell(command)


def shell(command: str) -> int:
    return subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode


def job_of(words: Sequence[str]) -> Any:
    """The job (unisono.launch.job.Job) that `unisono run ...` or `vqnetrun ...` describes."""
    from unisono.launch import command

    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_options(parser)
    return command.job_of(parser.parse_args(words[1:] if words[0] == "vqnetrun" else words[2:]))


def is_plain(job: Any) -> bool:
    """Whether nothing is asked of the job but so many ranks of a script on this machine, over gloo."""
    from unisono.launch.job import SCRIPT

    bare = ["unisono", "run", "-n", str(job.world), "--backend", job.backend or "auto", job.program.target]
    is_bare = job == job_of([*bare, *job.program.args])
    return is_bare and job.program.kind == SCRIPT and job.backend in (None, "gloo")


def _plain_job(words: Sequence[str]) -> Any:
    """The job of a launcher's command, if it is a plain one; one that cannot be read is the launcher's to refuse."""
    from unisono.errors import UnisonoError

    if not words or (words[0] != "vqnetrun" and list(words[:2]) != ["unisono", "run"]):
        return None
    with contextlib.suppress(UnisonoError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
        job = job_of(words)
        return job if is_plain(job) else None
    return None


def _ranks(job: Any) -> int:
    import unisono as uni
    from unisono.errors import LaunchError
    from unisono.launch import rank

    def perform() -> None:
        code = rank.run(job.program)
        if code:
            sys.exit(code)

    try:
        uni.spawn(perform, job.world, job.backend)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _unisono(words: list[str]) -> int:
    from unisono import cli

    sys.argv = words
    return cli.main(words[1:])


def _written(path: str, act: Callable[[], int]) -> int:
    """What act gives; what it prints goes to the file."""
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
    return act()


def _script(words: list[str]) -> int:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _forked(act: Callable[[], int]) -> int:
    """What act gives, run in a fork of this process."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become(act)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(act: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        code = act()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    prepare()
    for line in sys.stdin:
        asked = json.loads(line)
        act = functools.partial(shell if asked["literally"] else run, asked["command"])
        end = alone(act, Path(asked["folder"]), asked["limit"])
        print(json.dumps(asdict(end)), file=answers, flush=True)


if __name__ == "__main__":
    main()
