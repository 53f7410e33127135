"""Commands that are forked from this process, which has imported torch, instead of started anew.

A Forked is a subprocess.Popen like any other (its pipes, signals and exit code are real) but for its first moment: where
the command would be executed, a function of this process's own modules is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes import become

_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)
_HIGHEST = 1 << 20  # of descriptors


class Forked(subprocess.Popen[Any]):
    def __init__(self, job: Callable[[], Any], **options: Any) -> None:
        """Options as of subprocess.Popen: cwd, env, the three streams, text, start_new_session."""
        self._job = job
        super().__init__([getattr(job, "__name__", "job")], **options)

    def _execute_child(self, *given: Any) -> None:
        """In the place of fork and exec; the order of what is given is that of Python 3.11 to 3.14."""
        cwd, env = given[5], given[6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        in_own_session = given[21]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                streams = [source if source != -1 else own for own, source in enumerate((p2cread, c2pwrite, errwrite))]
                _settle(streams, cwd, env, in_own_session)
            except BaseException:
                os._exit(255)
            become(self._job)
        self._child_created = True
        for fd in {p2cread, c2pwrite, errwrite} - {-1}:
            if fd not in (p2cwrite, c2pread, errread):
                os.close(fd)


def _settle(streams: Sequence[int], cwd: str | Path | None, env: Mapping[str, str] | None, in_own_session: bool) -> None:
    """What exec would do, and what comes with the options."""
    if in_own_session:
        os.setsid()
    above = [os.dup(fd) for fd in streams]  # so that none is overwritten before it is in its place
    for own, fd in enumerate(above):
        os.dup2(fd, own)
    os.closerange(3, _HIGHEST)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)


def command(arguments: Sequence[str], name: str) -> Callable[[], None]:
    """`unisono ARGUMENTS`; its agent on this host is forked in its turn. All of its processes that execute nothing else
    bear the name."""

    def run() -> None:
        from unisono import cli
        from unisono.launch import agent, link

        def start_detached(
            words: Sequence[str], environment: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
        ) -> subprocess.Popen[bytes]:
            if list(words) != link.agent_command():
                return start_anew(words, environment, stdin)
            return Forked(
                _as_agent,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                env=environment,
            )

        def _as_agent() -> None:
            with contextlib.suppress(BrokenPipeError):
                sys.exit(agent.main())

        start_anew = link.start_detached
        link.start_detached = start_detached
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        sys.argv = ["unisono", *arguments]
        sys.exit(cli.main(arguments))

    return run
