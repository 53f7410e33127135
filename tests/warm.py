"""Commands that are forked from a process that has imported torch, instead of started anew: two seconds less for each.

    process = Warm(["unisono", "run", "-n", "2", "hello.py"], env=..., stdout=subprocess.PIPE)

A Warm is a subprocess.Popen like any other (its pipes, signals and exit code are real) but for its first moment: the
process behind the door, `python -m tests.warm`, forks it with the streams that are handed over. That process imports
and does nothing else, so that what is forked finds no thread but its own. The agent of a `unisono run` on this host
knocks there in its turn, and so may those on hosts that are namespaces of this one, through a `stand_in` for python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes import become
from tools.commands import start_agents_with
from unisono.launch.worker import process_tree

DOOR = "UNISONO_TEST_DOOR"  # in the environment of a command: where its agent knocks
_AGENT = ["agent"]
_PR_SET_NAME = 15
_CLONE_NEWUTS = 0x04000000

# A `python` for agents: hands over what it was given and where it runs, and ends as the agent does.
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
assert sys.argv[1:] == ["-P", "-m", "unisono.launch.agent.node_agent"], sys.argv
door = socket.socket(socket.AF_UNIX)
door.connect({door!r})
socket.send_fds(door, [b"+"], [0, 1, 2])
order = {{"words": ["agent"], "name": {name!r}, "env": dict(os.environ), "cwd": os.getcwd(), "session": False}}
door.sendall(json.dumps(order | {{"namespaces_of": os.getpid()}}).encode() + b"\\n")
stream = door.makefile("rb")
stream.readline()  # its number; its streams are its own from here on
for fd in (0, 1, 2):
    os.close(fd)
code = int(stream.readline() or b"1")
os._exit(code if code >= 0 else 128 - code)
"""
_HIGHEST = 1 << 20  # of descriptors


class Warm(subprocess.Popen[Any]):
    """Options as of subprocess.Popen: cwd, env, the three streams, text, start_new_session."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        name: str = "",
        door: str | None = None,
        namespaces_of: int | None = None,
        host: str = "",
        **options: Any,
    ) -> None:
        """All processes of the command that execute nothing else bear the name. It runs in the network of a process of
        that number, or in the network namespace `host`."""
        self._name = name
        self._network = {"namespaces_of": namespaces_of, "host": host}
        self._door = door or _opened_door()
        super().__init__(list(words), **options)

    def _execute_child(self, *given: Any) -> None:
        """Instead of fork and exec."""
        named = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        streams = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        order = {
            "words": named["args"],
            "name": self._name,
            "env": dict(os.environ if named["env"] is None else named["env"]) | {DOOR: self._door},
            "cwd": str(named["cwd"] or os.getcwd()),
            "session": bool(named["start_new_session"]),
            **self._network,
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(self._door)
        socket.send_fds(self._line, [b"+"], [own if fd == -1 else fd for own, fd in enumerate(streams)])
        self._line.sendall(json.dumps(order).encode() + b"\n")
        self.pid = int(_read_line(self._line))
        self._child_created = True
        for theirs, ours in (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread"), ("errwrite", "errread")):
            if named[ours] != -1:  # a pipe
                os.close(named[theirs])
        if getattr(self, "_devnull", None) is not None:
            os.close(self._devnull)  # type: ignore[attr-defined]
        self._closed_child_pipe_fds = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended_within(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._ended_within(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], seconds)[0]:
            self.returncode = int(_read_line(self._line) or -signal.SIGKILL)
            self._line.close()
        return self.returncode


def write_stand_in(path: Path, name: str) -> Path:
    """A program that stands in for python where an agent is to be started; the agent bears the name."""
    path.write_text(STAND_IN.format(python=sys.executable, door=_opened_door(), name=name))
    path.chmod(0o755)
    return path


@functools.cache
def _opened_door() -> str:
    """The socket of a process of this one's, started at the first knock."""
    folder = tempfile.mkdtemp(prefix="warm-")
    door = os.path.join(folder, "door")
    root = str(Path(__file__).resolve().parent.parent)
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "tests.warm", door, str(os.getpid())]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=root, env=variables)
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"

    owner = os.getpid()

    def close() -> None:
        if os.getpid() == owner:  # and not a fork of it that ends as an interpreter does
            process.kill()
            process.wait()
            shutil.rmtree(folder)

    atexit.register(close)
    return door


def _read_line(line: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        shard = line.recv(65536)
        if not shard:
            return b""
        text += shard
    return text


# ---- behind the door -------------------------------------------------------------------------------------------------


def serve(path: str) -> None:
    door = socket.socket(socket.AF_UNIX)
    door.bind(path)
    door.listen(16)
    print("open", flush=True)
    poll = select.poll()
    poll.register(door, select.POLLIN)
    lines: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process: its number, who asked for it
    while True:
        for fd, _ in poll.poll():
            if fd == door.fileno():
                pid, line = _admit(door)
                handle = os.pidfd_open(pid)
                lines[handle] = pid, line
                poll.register(handle, select.POLLIN)
            else:
                poll.unregister(fd)
                os.close(fd)
                pid, line = lines.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), line:
                    line.sendall(f"{code}\n".encode())


def _admit(door: socket.socket) -> tuple[int, socket.socket]:
    line, _ = door.accept()
    _, streams, _, _ = socket.recv_fds(line, 1, 3)
    order = json.loads(_read_line(line))
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            process_tree.die_with_parent(parent)
            _settle(order, streams)
        except BaseException:
            os._exit(255)
        become(_job(order))
    for fd in streams:
        os.close(fd)
    with contextlib.suppress(OSError):
        line.sendall(f"{pid}\n".encode())
    return pid, line


def _settle(order: Mapping[str, Any], streams: Sequence[int]) -> None:
    """What exec would do, and what comes with the options."""
    if order["session"]:
        os.setsid()
    for own, fd in enumerate(streams):  # all above 2
        os.dup2(fd, own)
    os.closerange(3, _HIGHEST)
    _enter(order.get("namespaces_of"), order.get("host"))
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # it may be named there
    os.chdir(order["cwd"])
    sys.path[:] = [each for each in sys.path if each and each != os.path.dirname(os.path.dirname(__file__))]
    if order["name"]:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, order["name"].encode(), 0, 0, 0)


def _enter(namespaces_of: int | None, host: str | None) -> None:
    """The network, and the host's name, of another process, or of a namespace that bears it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in [f"/proc/{namespaces_of}/ns/{kind}" for kind in ("net", "uts") if namespaces_of] + (
        [f"/run/netns/{host}"] if host else []
    ):
        fd = os.open(path, os.O_RDONLY)
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns {path}")
        os.close(fd)
    if host:
        if libc.unshare(_CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(host)


def _job(order: Mapping[str, Any]) -> Callable[[], None]:
    return _agent if order["words"] == _AGENT else functools.partial(_command, order["words"], order["name"])


def _agent() -> None:
    from unisono.launch.agent import node_agent

    with contextlib.suppress(BrokenPipeError):
        sys.exit(node_agent.main())


def _command(words: Sequence[str], name: str) -> None:
    from unisono import cli

    door = os.environ[DOOR]
    start_agents_with(functools.partial(Warm, _AGENT, name=name, door=door, namespaces_of=os.getpid()))
    sys.argv = list(words)
    sys.exit(cli.main(words[1:]))


def main(path: str, parent: str) -> None:
    process_tree.die_with_parent(int(parent))
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch.export._trace  # noqa: F401

    import unisono.train.engine  # noqa: F401  with the above, what an engine that plans needs: 3 s in each job

    assert len(os.listdir("/proc/self/task")) == 1, "what is forked from here must find no thread but its own"
    serve(path)


if __name__ == "__main__":
    sys.modules["tests.warm"] = sys.modules["__main__"]
    main(*sys.argv[1:])
