"""Whole processes forked for one test, run as the interpreter would run them, to their very end."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from unisono.launch.worker import process_tree


@dataclass(frozen=True)
class End:
    """How a process ended: its exit code (minus the signal's number when killed) and what it printed."""

    code: int
    output: str


def run_forked(jobs: list[Callable[[], Any]], folder: Path, timeout: float = 60) -> list[End]:
    """Run each job in a process of its own; one that outlives `timeout` is killed."""
    pids = [_fork(job, folder / f"output.{index}") for index, job in enumerate(jobs)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [End(codes[pid], (folder / f"output.{index}").read_text()) for index, pid in enumerate(pids)]


def _fork(job: Callable[[], Any], output: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        process_tree.die_with_parent(parent)
        with open(output, "w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        become(job)
    return pid


def _dump_no_core() -> None:
    """One that aborts would be there, with its connections, for as long as gigabytes are written. The limit of one byte
    counts for dumps into a program as well, which zero does not."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if most == 0 else 1, most))


def become(job: Callable[[], Any]) -> NoReturn:
    """What a forked process does from here on is the job, on the stdout and stderr that it has, and then it ends."""
    code = 1
    try:
        atexit._clear()
        faulthandler.disable()  # pytest has it write elsewhere
        _dump_no_core()
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        sys.excepthook = sys.__excepthook__
        try:
            job()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
