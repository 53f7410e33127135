"""Ranks of a real mpiexec that are forked from this process, which has imported torch already.

mpiexec starts a small program for each rank. That program hands over what it was given (its environment, its stdout
and stderr, with MPICH its line to the process manager) and the rank is forked: it joins MPI as any rank of mpiexec
does. The small program ends as the rank ends, and when mpiexec kills it, the rank is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.processes import become
from unisono.launch.worker import process_tree

MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"  # MPICH's
LINE = "PMI_FD"  # the variable in which MPICH's mpiexec tells a rank its line to it

STAND_IN = f"""
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
line = int(os.environ.get("{LINE}", "-1"))
socket.send_fds(door, [b"+"], [1, 2] if line < 0 else [1, 2, line])
door.sendall(json.dumps(dict(os.environ)).encode() + b"\\n")
code = int(door.recv(16) or b"1")
if code == 0 and line >= 0:  # MPICH takes its leave in the C library's exit, which a forked process must not call
    os.write(line, b"cmd=finalize\\n")
    os.read(line, 1024)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


# A `python` for commands that call mpiexec themselves: what it was given, and where, goes with the rank's environment.
PYTHON = f"""#!{sys.executable} -IS
import json, os, sys
os.environ["MPI_RANKS_WORDS"] = json.dumps([os.getcwd(), *sys.argv[1:]])
sys.argv[1:] = [os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "door")]
{STAND_IN}"""


def start(
    size: int, job: Callable[[], Any], mpiexec: Sequence[str] = (str(MPIEXEC),), **options: Any
) -> subprocess.Popen[str]:
    """The mpiexec of `size` ranks, each of which runs `job`; options as of subprocess.Popen."""
    folder = _open_door(size, job)
    words = [*mpiexec, "-n", str(size), sys.executable, "-I", "-S", "-c", STAND_IN, str(folder / "door")]
    return subprocess.Popen(words, text=True, **options)


def run(
    size: int, job: Callable[[], Any], timeout: float = 240, mpiexec: Sequence[str] = (str(MPIEXEC),), **options: Any
) -> subprocess.CompletedProcess[str]:
    """mpiexec's exit code, and what it and its ranks printed."""
    return _awaited(start(size, job, mpiexec, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options), timeout)


def run_shell(
    command: str, size: int, job: Callable[[list[str]], Any], folder: Path, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a folder that has mpiexec start `python WORDS` on `size` ranks, which do job(WORDS)."""
    own = _open_door(size, functools.partial(_with_words, job))
    (own / "bin").mkdir()
    (own / "bin" / "python").write_text(PYTHON)
    (own / "bin" / "python").chmod(0o755)
    env = os.environ | {"PATH": os.pathsep.join([str(own / "bin"), str(MPIEXEC.parent), os.environ["PATH"]])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return _awaited(subprocess.Popen(["bash", "-c", command], cwd=folder, env=env, **pipes), timeout)


def _with_words(job: Callable[[list[str]], Any]) -> None:
    directory, *words = json.loads(os.environ.pop("MPI_RANKS_WORDS"))
    os.chdir(directory)
    job(words)


def _awaited(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _open_door(size: int, job: Callable[[], Any]) -> Path:
    """A folder with the socket `door`, behind which a rank is forked for each of `size` that knock."""
    assert "mpi4py.MPI" not in sys.modules, "ranks must not be forked from a process that has initialised MPI"
    folder = Path(tempfile.mkdtemp(prefix="mpi-ranks-"))
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folder / "door"))
    door.listen(size)
    parent = os.getpid()
    if os.fork() == 0:
        process_tree.die_with_parent(parent)
        _look_after(door, size, job, folder)
    door.close()
    return folder


@dataclass(frozen=True)
class Rank:
    pid: int
    stand_in: socket.socket


def _look_after(door: socket.socket, size: int, job: Callable[[], Any], folder: Path) -> NoReturn:
    """A process between the tests and the ranks: it forks them, tells how they ended, and kills those who should."""
    try:
        poll = select.poll()
        poll.register(door, select.POLLIN)
        ranks: dict[int, Rank] = {}  # by each of their descriptors
        to_come = size
        while to_come or ranks:
            for fd, _ in poll.poll():
                if fd == door.fileno():
                    rank = _admit(door, job)
                    to_come -= 1
                    for each in (os.pidfd_open(rank.pid), rank.stand_in.fileno()):
                        ranks[each] = rank
                        poll.register(each, select.POLLIN)
                elif fd in ranks and fd == ranks[fd].stand_in.fileno():
                    os.kill(ranks[fd].pid, signal.SIGKILL)
                    poll.unregister(fd)
                elif fd in ranks:
                    rank = ranks[fd]
                    for each in [each for each, whose in ranks.items() if whose is rank]:
                        del ranks[each]
                        with contextlib.suppress(KeyError):
                            poll.unregister(each)
                    os.close(fd)
                    _tell_end(rank)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _admit(door: socket.socket, job: Callable[[], Any]) -> Rank:
    stand_in, _ = door.accept()
    _, (stdout, stderr, *line), _, _ = socket.recv_fds(stand_in, 1, 3)
    text = b""
    while not text.endswith(b"\n"):
        shard = stand_in.recv(65536)
        assert shard, "a stand-in has ended early"
        text += shard
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        process_tree.die_with_parent(parent)
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(json.loads(text) | ({LINE: str(line[0])} if line else {}))
        stand_in.close()
        door.close()
        become(functools.partial(_run_and_finalize, job))
    for fd in (stdout, stderr, *line):
        os.close(fd)
    return Rank(pid, stand_in)


def _run_and_finalize(job: Callable[[], Any]) -> None:
    job()
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:  # as mpi4py does at the end of an interpreter, which this process never reaches
        sys.modules["mpi4py.MPI"].Finalize()


def _tell_end(rank: Rank) -> None:
    _, status = os.waitpid(rank.pid, 0)
    with contextlib.suppress(OSError), rank.stand_in:
        rank.stand_in.sendall(str(os.waitstatus_to_exitcode(status)).encode())
