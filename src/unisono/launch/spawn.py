"""spawn(): run a function on ranks forked from this process, for notebooks and tests."""

from __future__ import annotations

import atexit
import base64
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from unisono.errors import LaunchError, UsageError
from unisono.launch import environment, launcher
from unisono.launch.console import Console
from unisono.launch.hosts import LOCAL, Host, Placement
from unisono.launch.job import CALL, Entrypoint, LaunchJob, default_start_timeout
from unisono.launch.outcome import verdict
from unisono.launch.outcome.monitor import Interrupted
from unisono.launch.process_threads import release_openmp_threads, run_openmp_serially
from unisono.launch.store import program_rendezvous
from unisono.launch.store import secret as job_secret
from unisono.launch.store.server import StoreServer
from unisono.launch.transport import network
from unisono.launch.worker import rank_main
from unisono.launch.worker.pool import WorkerPool

_BACKENDS = (None, "gloo", "nccl", "mpi")


def spawn(
    fn: Callable[..., Any],
    n: int,
    backend: str | None = None,
    args: Sequence[Any] = (),
    timeout: float | None = None,
) -> list[Any]:
    """Run fn(*args) on n ranks of this machine.

    The ranks are forked, so fn may be a lambda or a notebook's function, and each computes with one thread.

    Args:
        fn: What every rank calls.
        n: How many ranks.
        backend: "gloo", "nccl" or "mpi"; with "mpi" ranks are fresh processes under mpiexec, and fn must be importable.
        args: Its arguments.
        timeout: Seconds after which ranks that still run are ended.

    Returns:
        The results, by rank.

    Raises:
        LaunchError: A rank raised an exception, with its traceback, or the timeout is over.
    """
    _validate(fn, n, backend, args, timeout)
    n = n.__index__()
    if backend == "mpi":
        results = _over_mpi(fn, n, tuple(args), timeout)
    else:
        results = _over_fork(fn, n, backend, tuple(args), timeout)
    return [_result(number, results.get(number, b"")) for number in range(n)]


def _result(number: int, data: bytes) -> Any:
    if not data:
        raise LaunchError(f"spawn: rank {number} ended without a result; the function must return, not exit")
    try:
        return pickle.loads(data)
    except Exception as error:
        raise LaunchError(
            f"spawn: the result of rank {number} cannot be unpickled here ({type(error).__name__}: {error}); "
            "return plain data or tensors"
        ) from error


def _validate(fn: object, n: int, backend: str | None, args: Sequence[Any], timeout: float | None) -> None:
    if not callable(fn):
        raise UsageError(f"spawn runs a function, not {fn!r}")
    if not isinstance(n, SupportsIndex) or isinstance(n, bool) or n.__index__() < 1:
        raise UsageError(f"spawn needs a number of ranks of at least 1, not {n!r}")
    if backend not in _BACKENDS:
        raise UsageError(f"backend {backend!r} is unknown; use gloo, nccl or mpi, or None for automatic choice")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise UsageError(f"spawn: args={args!r}; expected a tuple of the function's arguments")
    if timeout is not None and (not isinstance(timeout, (int, float)) or not timeout > 0):
        raise UsageError(f"timeout {timeout!r} must be a number of seconds above 0")
    torch = sys.modules.get("torch")
    if backend != "mpi" and torch is not None and torch.cuda.is_initialized():
        raise LaunchError(
            "this process has initialised CUDA, and forked ranks could not use it: call spawn before the"
            " first CUDA call, or start the program with `unisono run`"
        )


def _over_fork(
    fn: Callable[..., Any], n: int, backend: str | None, args: tuple[Any, ...], timeout: float | None
) -> dict[int, bytes]:
    release_openmp_threads()
    keep = rank_main.open_descriptors()
    secret = job_secret.draw()
    store = _serve_store(secret)
    reserved = network.reserve_port()
    console = Console()
    results: dict[int, bytearray] = {number: bytearray() for number in range(n)}

    def listener(number: int, stream: str, data: bytes) -> None:
        if stream == "result":
            results[number] += data
        else:
            console.write(number, stream, data.decode("utf-8", "surrogateescape"))

    def body(result_fd: int | None) -> int:
        run_openmp_serially()
        atexit._clear()  # exit handlers of this process are not for the ranks
        return rank_main.perform(lambda: rank_main.send_result(fn(*args), result_fd))

    pool = WorkerPool(listener, keep, with_results=True)
    pool.share_secret(secret)
    try:
        with store.standing_still():
            for number in range(n):
                pool.start(number, _variables(number, n, backend, store.port, reserved.getsockname()[1]), body)
        pool.release()
        _await(pool, timeout)
        pool.drain()
    finally:
        pool.stop()
        pool.close()
        console.close()
        store.close()
        reserved.close()
    return {number: bytes(data) for number, data in results.items()}


def _await(pool: WorkerPool, timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    while pool.running:
        pool.pump(0.1)
        if pool.failures():
            raise LaunchError(verdict.describe(verdict.first(pool.settled_failures()), None))
        if deadline is not None and time.monotonic() > deadline and pool.running:
            late = ", ".join(str(worker.rank) for worker in pool.running)
            raise LaunchError(f"spawn: rank {late} still ran after the timeout of {timeout:g} s; all ranks were ended")


def _serve_store(secret: bytes) -> StoreServer:
    """The store for the rendezvous of the ranks, served by this process."""
    return StoreServer(network.listen("127.0.0.1", 0), job_secret.key_of(secret))


def _variables(number: int, n: int, backend: str | None, port: int, master_port: int) -> dict[str, str]:
    variables = environment.of_rank(
        rank=number,
        world=n,
        local_rank=number,
        local_world=n,
        node=0,
        nodes=1,
        address="127.0.0.1",
        port=master_port,
        host=LOCAL,
        attempt=0,
    )
    variables |= environment.of_elastic(attempt=0, max_restarts=0)
    variables |= program_rendezvous.variables("127.0.0.1", port, master_port)
    # a fork of a process that has used OpenMP threads must not use any: it does not have them
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    variables[environment.BACKEND] = backend or "auto"  # independent of how this process was started
    return variables


def _over_mpi(fn: Callable[..., Any], n: int, args: tuple[Any, ...], timeout: float | None) -> dict[int, bytes]:
    try:
        function = pickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"spawn over MPI sends the function and its arguments to fresh processes, and they cannot be"
            f" pickled ({error}); define the function in a module, or use backend='gloo'"
        ) from None
    call = {"preparation": _preparation(b"__main__" in function), "function": function}
    job = LaunchJob(
        program=Entrypoint(CALL, base64.b64encode(pickle.dumps(call)).decode(), (), os.getcwd()),
        placements=(Placement(Host(LOCAL, n), 0, n),),
        backend="mpi",
        environment={environment.BACKEND: "mpi"},
        start_timeout=default_start_timeout(n, "mpi", of_group=False),
        time_limit=timeout,
    )
    console = Console()
    try:
        outcome = launcher.launch(job, console)
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        console.close()
    if outcome.error:
        raise LaunchError(outcome.error)
    return outcome.results


def _preparation(with_main: bool) -> dict[str, Any]:
    """multiprocessing's preparation data, with which a new process can unpickle objects of this one."""
    data: dict[str, Any] = {"sys_path": list(sys.path), "sys_argv": list(sys.argv), "dir": os.getcwd()}
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if with_main and spec is not None:
        data["init_main_from_name"] = spec.name
    elif with_main and getattr(main, "__file__", None):
        data["init_main_from_path"] = os.path.abspath(str(main.__file__))
    return data
