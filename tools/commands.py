"""Runs commands as a shell would, in forks of one process that has imported torch: two seconds less for each.

    stage = Stage()
    end = stage.run("unisono run -n 2 hello.py", folder)      # end.code, end.output

`unisono run` and `vqnetrun` are read by their own parser. Where a job is no more than so many ranks of a script on
this machine, its ranks are forked too, by uni.spawn. Any other that stays on this machine and off MPI is the launcher's
own, but that its agent is forked and not started anew. The rest is started as it stands, and so is what is not ours.

The stage is `python tools/commands.py`. It computes nothing itself, so that all that is forked from it finds no thread
but its own, and answers a line of JSON for each line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
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
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
# What commands use, imported once for all that is forked from here. torch's optimizers load torch._dynamo anyway.
COMMON = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.export", "torch.nn.parallel",
    "torch.export._trace", "torch._functorch.aot_autograd", "torch._export.non_strict_utils",
    "numba", "sklearn.datasets", "unisono.cli", "unisono.nn", "unisono.parallel.apply", "unisono.train.engine",
    "unisono.quantum.layer", "unisono.launch.agent.elastic",
)  # fmt: skip
HARDWARE = ROOT / "tools" / "two_cores.toml"
_HIGHEST = 1 << 20  # of descriptors
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

    def run(self, command: str, folder: Path, limit: float = 400, literally: bool = False) -> End:
        """Run the command in the folder; after `limit` seconds it is ended, with all that it has started.

        literally: by a shell, in interpreters of its own.
        """
        return End(**self._ask(command=command, folder=str(folder), limit=limit, literally=literally))

    def page(self, page: Path) -> dict[str, Any]:
        """Run the blocks of a page of the documentation (`tools/blocks.py`): what `Runs.of` tells of it."""
        return self._ask(page=str(page))

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
    from unisono.launch.worker import process_tree

    for pid in process_tree.descendants(child):
        if not process_tree.descendants(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
    if _ended_within(10, child) is None:
        process_tree.sweep(child)
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
    job = _local_job(words)
    if job is not None:
        return _forked(lambda: _ranks(job) if is_plain(job) else _launched(words))
    return shell(command)


def shell(command: str) -> int:
    return subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode


def job_of(words: Sequence[str]) -> Any:
    """The job (unisono.launch.job.LaunchJob) that `unisono run ...` or `vqnetrun ...` describes."""
    from unisono.compat import vqnetrun
    from unisono.launch import command

    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_options(parser)
    if words[0] != "vqnetrun":
        return command.job_of(parser.parse_args(words[2:]))
    chosen = parser.parse_args(words[1:])
    vqnetrun.settle(chosen)
    return command.job_of(chosen)


def is_plain(job: Any) -> bool:
    """Whether nothing is asked of the job but so many ranks of a script on this machine, over gloo; import names that
    stand for others, which vqnetrun sets, do not count."""
    from unisono.launch import environment
    from unisono.launch.job import SCRIPT

    words = ["unisono", "run", "-n", str(job.world), "--backend", job.backend or "auto", job.program.target]
    bare = job_of([*words, *job.program.args])
    aliased = {name: value for name, value in job.environment.items() if name == environment.AS}
    is_bare = job == dataclasses.replace(bare, environment=bare.environment | aliased)
    return is_bare and job.program.kind == SCRIPT and job.backend in (None, "gloo")


def _local_job(words: Sequence[str]) -> Any:
    """The job of a launcher's command, if it is one of this machine's and not MPI's; one that cannot be read is the
    launcher's to refuse."""
    from unisono.errors import UnisonoError
    from unisono.launch.hosts import LOCAL

    if not words or (words[0] != "vqnetrun" and list(words[:2]) != ["unisono", "run"]):
        return None
    with contextlib.suppress(UnisonoError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
        job = job_of(words)
        return job if {host.name for host in job.hosts} == {LOCAL} and job.backend != "mpi" else None
    return None


def start_agents_with(begin: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Let the launcher of this process start its agents on this machine with `begin`, given Popen's options."""
    from unisono.launch.transport import link

    start_anew = link.start_detached

    def start_detached(
        command: Sequence[str], environment: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        if list(command) != link.agent_command():
            return start_anew(command, environment, stdin)
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return begin(**pipes, bufsize=0, start_new_session=True, env=environment)

    link.start_detached = start_detached


def _launched(words: list[str]) -> int:
    """The launcher's command in this process, its agent in a fork of it."""
    from unisono import cli
    from unisono.compat import vqnetrun
    from unisono.launch.agent import node_agent

    start_agents_with(functools.partial(_Forked, node_agent.main))
    sys.argv = words
    return vqnetrun.main(words[1:]) if words[0] == "vqnetrun" else cli.main(words[1:])


class _Forked(subprocess.Popen[bytes]):
    """A process that runs a function of this one instead of a program; its pipes, signals and exit code are real."""

    def __init__(self, act: Callable[[], int], **options: Any) -> None:
        self._act = act
        super().__init__([act.__module__], **options)

    def _execute_child(self, *given: Any) -> None:
        """Instead of fork and exec."""
        named = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        streams = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = os.fork()
        if not self.pid:
            _become(lambda: self._settled(named["env"], streams))
        self._child_created = True
        for theirs in streams:
            os.close(theirs)
        self._closed_child_pipe_fds = True

    def _settled(self, variables: Mapping[str, str] | None, streams: Sequence[int]) -> int:
        """What exec would do, then the function. Folders that were made before the fork are not its to clean up."""
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, _HIGHEST)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        if variables is not None:
            os.environ.clear()
            os.environ.update(variables)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        return self._act()


def _ranks(job: Any) -> int:
    import unisono as uni
    from unisono.errors import LaunchError
    from unisono.launch import environment
    from unisono.launch.worker import rank_main

    def perform() -> None:
        os.environ[environment.AS] = job.environment.get(environment.AS, "")
        code = rank_main.run(job.program)
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
    runs = _runs_of_pages()
    for line in sys.stdin:
        asked = json.loads(line)
        if "page" in asked:
            answer = runs.of(Path(asked["page"]))
        else:
            act = functools.partial(shell if asked["literally"] else run, asked["command"])
            answer = asdict(alone(act, Path(asked["folder"]), asked["limit"]))
        print(json.dumps(answer), file=answers, flush=True)


def _runs_of_pages() -> Any:
    """Nothing else of this folder can be imported by what is forked from here."""
    sys.path.insert(0, str(ROOT))
    from tools.blocks import Runs

    sys.path.remove(str(ROOT))
    return Runs()


if __name__ == "__main__":
    main()
