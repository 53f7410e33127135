"""Commands that are forked from this process, which has imported torch, instead of started anew.

A Forked is a subprocess.Popen like any other (its pipes, signals and exit code are real) but for its first moment:
where the command would be executed, a function of this process's own modules is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
        """In the place of fork and exec."""
        named = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _settle(named)
            except BaseException:
                os._exit(255)
            become(self._job)
        self._child_created = True
        for theirs, ours in (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread"), ("errwrite", "errread")):
            if named[ours] != -1:  # a pipe
                os.close(named[theirs])
        if getattr(self, "_devnull", None) is not None:
            os.close(self._devnull)  # type: ignore[attr-defined]
        self._closed_child_pipe_fds = True


def _settle(named: Mapping[str, Any]) -> None:
    """What exec would do, and what comes with the options."""
    if named["start_new_session"]:
        os.setsid()
    given = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    above = [os.dup(own if fd == -1 else fd) for own, fd in enumerate(given)]  # so that none is overwritten too early
    for own, fd in enumerate(above):
        os.dup2(fd, own)
    os.closerange(3, _HIGHEST)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    if named["env"] is not None:
        os.environ.clear()
        os.environ.update(named["env"])
    if named["cwd"] is not None:
        os.chdir(named["cwd"])


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
