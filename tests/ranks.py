"""A pool of ranks that stays up between tests: importing torch once a rank is the expensive part.

    pool.run(function, *args)     # runs function(comm, *args) on every rank; the list of results, or the traceback

Functions travel by name, so they must stand at the top level of a test module.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import multiprocessing
import os
import random
import secrets
import select
import socket
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from tests import mpi_ranks
from unisono.launch.process_threads import use_batch_scheduling
from unisono.launch.worker import process_tree

TIMEOUT = 120  # seconds for one call
GRACE = 20  # seconds for the others, once one has failed: they may wait for it in a collective
MANY_THREADS = 30  # of a rank; a group has three


class RemoteError(AssertionError):
    """A function failed on some ranks; the message holds their tracebacks."""


class RankPool:
    def __init__(self, size: int, backend: str, timeout: float = TIMEOUT) -> None:
        """Ranks are forked from this process; those of the backend mpi belong to an mpiexec. timeout: seconds for one
        call, after which the pool is closed."""
        self.size = size
        self.backend = backend
        self.timeout = timeout
        import_what_ranks_need()
        _compile_random_words()
        gc.collect()
        gc.freeze()  # keeps the ranks from copying pages that the collector would touch
        self._listener = Listener(("127.0.0.1", 0), backlog=size, authkey=secrets.token_bytes(16))
        key = self._listener._authkey  # type: ignore[attr-defined]
        port = self._listener.address[1]
        self._processes: list[Any] = []
        if backend == "mpi":
            self._processes.append(mpi_ranks.start(size, functools.partial(_serve, port, key, backend, {})))
        else:
            store_port = free_port()
            fork = multiprocessing.get_context("fork")
            for rank in range(size):
                rank_info = {"init_method": f"tcp://127.0.0.1:{store_port}", "rank": rank, "world_size": size}
                process = fork.Process(
                    target=_serve_with, args=(os.getpid(), port, key, backend, rank_info), daemon=True
                )
                process.start()
                self._processes.append(process)
        self.closed = False
        self._is_shedding = False
        self._was_used = False
        self._ranks: dict[int, Connection] = {}
        for _ in range(size):
            connection = self._next_to_call()
            self._ranks[connection.recv()] = connection

    def _next_to_call(self) -> Connection:
        door = self._listener._listener._socket  # type: ignore[attr-defined]
        deadline = time.monotonic() + TIMEOUT
        while not select.select([door], [], [], 1)[0]:
            if not all(map(_is_running, self._processes)) or time.monotonic() > deadline:
                self.close()
                raise RemoteError(f"the {self.backend} pool did not start; see what its ranks printed")
        return self._listener.accept()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._settle()
        self._order(function, *args)
        return self._answers()

    def _settle(self) -> None:
        if self._is_shedding:
            self._is_shedding = False
            self._answers()
        self._was_used = True

    def run_each(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any] | None]:
        """As `run`, where ranks may end differently: for each whether it came to a result, and that or its traceback.
        None: it died, or had no answer within the pool's timeout, or within GRACE of the first that had."""
        self._settle()
        self._order(function, *args)
        answers: list[tuple[bool, Any] | None] = [None] * self.size
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        deadline = time.monotonic() + self.timeout
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for connection in ready:
                with contextlib.suppress(EOFError, OSError):
                    answers[waiting[connection]] = connection.recv()  # type: ignore[attr-defined, index]
                del waiting[connection]  # type: ignore[arg-type]
            deadline = min(deadline, time.monotonic() + GRACE)
        if None in answers:
            self.close()
        return answers

    def shed_groups(self) -> None:
        """Let the ranks meet anew if they have made many groups since: gloo's threads wake 100 times a second, all of
        them together take a good part of a core. Returns at once."""
        if self.backend == "gloo" and self._was_used and not self.closed:
            self._order(_meet_anew, free_port())
            self._is_shedding, self._was_used = True, False

    def _order(self, function: Callable[..., Any], *args: Any) -> None:
        for rank in range(self.size):
            self._ranks[rank].send((function, args))

    def _answers(self) -> list[Any]:
        answers: list[tuple[bool, Any]] = []
        for rank in range(self.size):
            try:
                answers.append(self._answer(rank, self.timeout if all(ok for ok, _ in answers) else GRACE))
            except RemoteError as silence:
                raise RemoteError("\n".join([str(silence), *_complaints(answers)])) from None
        if failed := _complaints(answers):
            raise RemoteError("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank: int, patience: float) -> tuple[bool, Any]:
        if not self._ranks[rank].poll(patience):
            self.close()
            raise RemoteError(f"rank {rank} of the {self.backend} pool did not answer within {patience} s")
        try:
            return self._ranks[rank].recv()  # type: ignore[no-any-return]
        except EOFError:
            self.close()
            raise RemoteError(f"rank {rank} of the {self.backend} pool has died") from None

    def close(self) -> None:
        self.closed = True
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):
                connection.send(None)
            connection.close()
        for process in self._processes:
            _end(process)
        self._listener.close()


def _complaints(answers: list[tuple[bool, Any]]) -> list[str]:
    return [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]


def _meet_anew(comm: Any, store_port: int) -> None:
    import torch

    import unisono as uni

    threads = torch.tensor(len(os.listdir("/proc/self/task")))
    if comm.all_reduce(threads, "max").item() > MANY_THREADS:
        uni.shutdown()
        uni.init(comm.backend, init_method=f"tcp://127.0.0.1:{store_port}", rank=comm.rank, world_size=comm.size)


@functools.cache
def import_what_ranks_need() -> None:
    """Once, before ranks are forked: torch imports these at first use, for seconds on each rank."""
    import torch._dynamo
    import torch._export.non_strict_utils
    import torch._functorch.aot_autograd
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.export._trace  # noqa: F401

    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.models.llama.modeling_llama")
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")


@functools.cache
def _compile_random_words() -> None:
    """Before ranks are forked, so that all have them; their bits are those of `philox.torch_words`."""
    import torch

    from unisono.mesh.global_index import Runs
    from unisono.mesh.random import draw

    kernels = draw.cpu_kernels()
    if kernels is not None:
        runs = Runs(torch.zeros(1, dtype=torch.int64), 4)
        for dtype in (torch.float32, torch.float64):
            kernels.noise(draw.PhiloxStream.of("first"), runs, 0, 1.0, dtype)


_MOST_WORKERS = 8
_given: deque[int] = deque(maxlen=500)


def free_port() -> int:
    """A port to listen on. Below those that the system gives to whoever connects, so that nobody takes it meanwhile;
    each of pytest's workers has its own, and one that was just given is not given again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.SystemRandom().randrange(20000 + worker % _MOST_WORKERS, 32000, _MOST_WORKERS)
        if port in _given:
            continue
        _given.append(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _is_running(process: Any) -> bool:
    return process.poll() is None if isinstance(process, subprocess.Popen) else bool(process.is_alive())


def _end(process: Any) -> None:
    """A process of multiprocessing, or an mpiexec, which ends when its ranks have."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        process.terminate()
        process.wait()
    else:
        process.terminate()
        process.join()


def _serve_with(parent: int, *args: Any) -> None:
    process_tree.die_with_parent(parent)
    use_batch_scheduling()
    _serve(*args)
    os._exit(0)


def _serve(port: int, key: bytes, backend: str, rank_info: dict[str, Any]) -> None:
    """What a rank of the pool does all its life: take a function, run it, send back what came of it."""
    import torch

    import unisono as uni
    from unisono.mesh.random import draw

    torch.set_num_threads(1)
    draw.draw_fast()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    comm = uni.init(backend, **rank_info)
    connection = Client(("127.0.0.1", port), authkey=key)
    connection.send(comm.rank)
    while True:
        try:
            order = connection.recv()
        except EOFError:
            order = None
        if order is None:
            return
        function, args = order
        torch.manual_seed(0)  # whatever the tests before, and in whatever order they came, have drawn on some ranks
        try:
            answer = (True, function(comm, *args))
            comm = uni.world()
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except Exception:
            connection.send((False, traceback.format_exc()))
