"""The agents of the MPI ranks of one host, forked from one process that has imported torch.

mpiexec starts this program for each rank. It stands in for the rank's agent: it hands over what mpiexec gave it (its
environment, streams, folder, CPUs and MPICH's line to its process manager), passes signals on, and ends as the agent
ends. The first stand-in of a host starts the preloaded process, which forks an agent for each (`serve`); an agent forks
its rank as everywhere. They meet at a socket in the folder of the job's secret, which is closed to other users. Where
that cannot be, the stand-in is the agent itself.

Note: who outlives whom. The preloaded process ends when the agents that it expects have ended, and what they left below
it with it. If it is killed, its agents are, and the stand-ins end; if a stand-in is killed, its agent is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from unisono.launch import environment

_LINE = "PMI_FD"  # MPICH: the number of a rank's descriptor to the process manager
_COUNTS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # ranks on this host
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_IDLE = 30.0  # seconds without an agent after which no other is expected
_PATIENCE = 30.0  # seconds for the first stand-in to listen; for another to say what it was given


def main() -> int:
    code = _as_forked_agent()
    if code is None:
        from unisono.launch.agent import node_agent

        return node_agent.main()
    if code < 0:
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# ---- the stand-in ----------------------------------------------------------------------------------------------------


def _as_forked_agent() -> int | None:
    """How the agent that was forked for this process ended; None where none could be."""
    count = next((int(os.environ[name]) for name in _COUNTS if name in os.environ), 1)
    if count == 1 or environment.CONNECT not in os.environ or not hasattr(os, "pidfd_open"):
        return None
    agents: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if not agents:
            os._exit(128 + signum)
        with contextlib.suppress(ProcessLookupError):
            os.kill(agents[0], signum)

    before = [signal.signal(signum, forward) for signum in _SIGNALS]
    with socket.socket(socket.AF_UNIX) as line:
        try:
            _reach(line, _path(), count)
            _hand_over(line)
            answer = _read_line(line)
        except OSError:
            answer = b""
        if answer:
            agents.append(int(answer))
            with contextlib.suppress(ConnectionError):
                return int(_read_line(line) or 1)
            return 1
    for signum, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(signum, handler)
    return None


def _path() -> str:
    secret_file, port, _ = os.environ[environment.CONNECT].rsplit(" ", 2)
    return os.path.join(os.path.dirname(secret_file), f"agents-{port}-{socket.gethostname()}")


def _reach(line: socket.socket, path: str, count: int) -> None:
    """Connect to the preloaded process; start it if this is the first stand-in here."""
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(path)
            is_first = True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            is_first = False
        if is_first:
            door.listen(count)
            _start(door, path, count)
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return line.connect(path)
        except ConnectionRefusedError:  # the first has not come to listen yet
            if is_first or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _start(door: socket.socket, path: str, count: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    streams = [(os.POSIX_SPAWN_DUP2, source, fd) for fd, source in enumerate((door.fileno(), null, null))]
    words = [sys.executable, "-P", "-m", "unisono.launch.agent.preloaded", path, str(count), str(os.getpid())]
    os.posix_spawn(sys.executable, words, os.environ, file_actions=streams, setsid=True)
    os.close(null)


def _hand_over(line: socket.socket) -> None:
    own = [0, 1, 2, int(os.environ[_LINE])] if _LINE in os.environ else [0, 1, 2]
    order = {"environment": dict(os.environ), "folder": os.getcwd(), "cpus": list(os.sched_getaffinity(0))}
    socket.send_fds(line, [b"+"], own)
    line.sendall(json.dumps(order).encode() + b"\n")


def _read_line(line: socket.socket) -> bytes:
    """b"" where the other end has gone first."""
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(1 << 16)
        if not part:
            return b""
        text += part
    return text


# ---- the preloaded process -------------------------------------------------------------------------------------------


def serve(path: str, expected: int, starter: int) -> None:
    """Fork an agent for each of the stand-ins that connect to the socket, which is this process's stdin."""
    from unisono.launch.worker import process_tree

    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what mpiexec gave to the process that started this one
    process_tree.die_with_parent(starter)  # until there are agents to look after
    process_tree.adopt_orphans()
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"  # no thread may run when ranks are forked
    door = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    import gc

    import torch.distributed  # noqa: F401

    import unisono.launch.agent.node_agent  # noqa: F401
    from unisono.launch.worker import preload

    if os.environ.get(environment.PRELOAD):
        preload.load()
    gc.collect()
    gc.freeze()  # ranks do not copy the pages that the collector would write to
    process_tree.outlive_parent()
    _Agents(door, path, expected).serve()
    process_tree.sweep(os.getpid())


class _Agents:
    def __init__(self, door: socket.socket, path: str, expected: int) -> None:
        self._door = door
        self._path = path
        self._expected = expected
        self._agents: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process, and by the socket's
        self._poll = select.poll()
        self._poll.register(door, select.POLLIN)

    def serve(self) -> None:
        since = time.monotonic()
        while self._agents or self._may_come(since):
            for fd, _ in self._poll.poll(1000):
                if fd == self._door.fileno():
                    self._admit()
                elif fd in self._agents:
                    pid, line = self._agents[fd]
                    if fd == line.fileno():  # the stand-in has ended first
                        self._poll.unregister(fd)
                        os.kill(pid, signal.SIGKILL)
                    else:
                        self._end(fd)
                since = time.monotonic()

    def _may_come(self, since: float) -> bool:
        return self._expected > 0 and os.path.exists(self._path) and time.monotonic() - since < _IDLE

    def _admit(self) -> None:
        line, _ = self._door.accept()
        self._expected -= 1
        line.settimeout(_PATIENCE)
        given: list[int] = []
        try:
            _, given, _, _ = socket.recv_fds(line, 1, 4)
            text = _read_line(line)
            if text:
                self._fork(json.loads(text), given, line)
        except OSError:
            line.close()
        for fd in given:
            os.close(fd)

    def _fork(self, order: Mapping[str, Any], given: Sequence[int], line: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            close = set(self._agents) | {self._door.fileno(), line.fileno(), *given[:3]}
            _be_agent(order, given, close, parent)
        handle = os.pidfd_open(pid)
        for fd in (handle, line.fileno()):
            self._agents[fd] = pid, line
            self._poll.register(fd, select.POLLIN)
        with contextlib.suppress(OSError):
            line.sendall(f"{pid}\n".encode())

    def _end(self, handle: int) -> None:
        pid, line = self._agents.pop(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del self._agents[line.fileno()]
        with contextlib.suppress(KeyError):
            self._poll.unregister(line)
        self._poll.unregister(handle)
        os.close(handle)
        with contextlib.suppress(OSError), line:
            line.sendall(f"{code}\n".encode())


def _be_agent(order: Mapping[str, Any], given: Sequence[int], close: set[int], parent: int) -> None:
    """Be what the stand-in would have been; does not return."""
    import traceback

    from unisono.launch.agent import node_agent
    from unisono.launch.worker import process_tree

    code = 1
    try:
        process_tree.die_with_parent(parent)
        for own, fd in enumerate(given[:3]):
            os.dup2(fd, own)
        for fd in close:
            os.close(fd)
        os.environ.clear()
        os.environ.update(order["environment"])
        if _LINE in os.environ:
            os.set_inheritable(given[3], True)
            os.environ[_LINE] = str(given[3])
        os.chdir(order["folder"])
        os.sched_setaffinity(0, order["cpus"])
        code = node_agent.main()
    except SystemExit as ending:
        print(ending, file=sys.stderr)
    except BrokenPipeError:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        with contextlib.suppress(BrokenPipeError):
            sys.exit(main())
