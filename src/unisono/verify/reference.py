"""The reference of a proof: what one device computes, in a process that is no rank of any job.

A rank would be a poor reference: what a task reads of its surroundings (the world size, a cache that the run under the
plan has filled) would be the same in both runs, and so be taken for right. The process is forked before the rank joins
its world, computes while the ranks start and train, and leaves each record in a file. Ranks wait for the file, not in a
collective, so a slow reference is never taken for a hang.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from unisono.comm.rendezvous.solo import alone
from unisono.errors import LaunchError, UnisonoError
from unisono.launch.worker import process_tree
from unisono.verify.run_errors import RunError
from unisono.verify.training_record import TrainingRecord

_PAUSE = 0.01  # seconds between looks for a file
Compute = Callable[[float, float], TrainingRecord]  # rounding, noise -> the plain model's record


class ReferenceProcess:
    """Records of the plain model by the size of gradients that count as rounding, and of noise in gradients, for all
    ranks of a machine."""

    def __init__(self, folder: Path, compute: Compute) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._compute = compute
        self._process: int | None = None

    def start(self) -> None:
        """Fork the process, which begins with the record without rounding. By one rank, before it joins its world."""
        self._request(0.0, 0.0)
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child does without
            self._process = os.fork()
        if self._process == 0:
            try:
                process_tree.die_with_parent(parent)
                self._serve()
            finally:
                os._exit(1)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
            self._process = None

    def wait(self, rounding: float = 0.0, noise: float = 0.0) -> None:
        """Until the record is there to be read."""
        self._request(rounding, noise)
        self._wait(rounding, noise)

    def record(self, rounding: float = 0.0, noise: float = 0.0) -> TrainingRecord:
        """Waits for it. OneDeviceError or UsageError, on every rank that asks, where the plain model fails."""
        self.wait(rounding, noise)
        found = self._read(rounding, noise)
        if isinstance(found, RunError):
            raise found.as_error()
        return found

    def failure(self, within: float) -> UnisonoError | None:
        """How the plain model fails, if that is known in so many seconds."""
        with contextlib.suppress(TimeoutError):
            self._wait(0.0, 0.0, within)
            found = self._read(0.0, 0.0)
            if isinstance(found, RunError):
                return found.as_error()
        return None

    def _request(self, rounding: float, noise: float) -> None:
        with contextlib.suppress(FileExistsError):
            self._path(rounding, noise, "wanted").touch(exist_ok=False)  # else it would touch what a link points to

    def _wait(self, rounding: float, noise: float, within: float = float("inf")) -> None:
        path, deadline = self._path(rounding, noise, "record"), time.monotonic() + within
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError
            self._require_process()
            time.sleep(_PAUSE)

    def _read(self, rounding: float, noise: float) -> TrainingRecord | RunError:
        found: TrainingRecord | RunError = pickle.loads(self._path(rounding, noise, "record").read_bytes())
        return found

    def _require_process(self) -> None:
        if self._process is None:
            return  # another rank's
        pid, status = os.waitpid(self._process, os.WNOHANG)
        if pid:
            self._process = None
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise LaunchError(f"the process that trains the plain model on one device {how} before it was done")

    def _path(self, rounding: float, noise: float, suffix: str) -> Path:
        return self._folder / f"reference-{rounding!r}_{noise!r}.{suffix}"

    def _serve(self) -> None:
        while True:
            for wanted in self._folder.glob("reference-*.wanted"):
                path = wanted.with_suffix(".record")
                if not path.exists():
                    sizes = wanted.name.removeprefix("reference-").removesuffix(".wanted").split("_")
                    aside = path.with_suffix(".part")
                    aside.write_bytes(pickle.dumps(self._computed(*map(float, sizes))))
                    aside.rename(path)
            time.sleep(_PAUSE)

    def _computed(self, rounding: float, noise: float) -> TrainingRecord | RunError:
        try:
            with alone():
                return self._compute(rounding, noise)
        except Exception as error:
            return RunError.of(error)
