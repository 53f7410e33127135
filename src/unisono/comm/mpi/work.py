"""MPI requests behind torch's Work: waited for, tested, or finished by a thread in the background."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
from mpi4py import MPI
from torch.distributed import Work

from unisono.errors import CommError, MessageError

Finish = Callable[[], None]

LOOKS = range(300)  # tests of a request before blocking in MPI
SPINS = 200  # tests of a request before the waiter begins to yield its core
# Seconds of yielding before sleeping. MPI makes progress on a long message only while somebody tests it, a chunk at a
# time, so a thread that has nothing else to do should test often.
_WAITER_YIELDS = 1.0
_PROGRESS_YIELDS = 5e-3
# After that, tests come in bursts with sleep between them: one test per sleep would move 16 KiB each time.
_CYCLE = 4e-4
_BURST = 2e-4
_BATCH = "a batch of calls"
_MESSAGES = ("send", "recv", _BATCH)


class MPIOperation:
    """Requests in flight, the memory they use, and what to do once when they have completed."""

    __slots__ = (
        "_finish",
        "_listeners",
        "_lock",
        "_memory",
        "_requests",
        "begun",
        "comm",
        "done",
        "error",
        "name",
        "outputs",
        "status",
    )

    def __init__(
        self,
        name: str,
        requests: list[MPI.Request],
        outputs: Sequence[torch.Tensor],
        memory: Sequence[torch.Tensor] | None,
        finish: Finish | None,
        status: MPI.Status,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        self.name = name
        self.begun = time.monotonic()
        self.comm = comm
        self.outputs = outputs
        self.status = status
        self.done = False
        self.error: Exception | None = None
        self._requests = requests
        self._memory = memory
        self._finish = finish
        self._listeners: list[Finish] = []
        self._lock = threading.Lock()

    @property
    def devices(self) -> set[torch.device]:
        """The GPUs whose memory MPI works on."""
        memory = self._memory or ()
        return {tensor.device for tensor in memory if tensor.is_cuda}

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the world that take part in it; none where that is not known."""
        try:
            return MPI.Group.Translate_ranks(self.comm.group, None, MPI.COMM_WORLD.group) if self.comm else ()
        except MPI.Exception:  # the group is no more
            return ()

    def poll(self, block: bool = True) -> bool:
        """Let MPI move on. True once everything has completed and the outputs hold the result.

        `block=False` does nothing while another thread is polling the same operation.
        """
        if self.done:
            return True
        if not self._lock.acquire(block):
            return False
        try:
            if not self.done and self._test():
                self.done = True
            listeners = self._taken_listeners() if self.done else []
        finally:
            self._lock.release()
        for listener in listeners:
            listener()
        return self.done

    def on_completion(self, listener: Finish) -> None:
        """Call `listener` once when done: now, or by whoever polls."""
        with self._lock:
            if not self.done:
                self._listeners.append(listener)
                return
        listener()

    def _taken_listeners(self) -> list[Finish]:
        listeners, self._listeners = self._listeners, []
        return listeners

    def _test(self) -> bool:
        try:
            if not self._requests_completed():
                return False
            if self._finish is not None:
                with torch.no_grad():
                    self._finish()
                wait_for_devices(self.outputs)
        except MPI.Exception as error:
            self.error = failure(self.name, error)
        except Exception as error:
            self.error = error
        self._finish = self._memory = None
        return True

    def _requests_completed(self) -> bool:
        if len(self._requests) == 1:
            return self._requests[0].Test(self.status)
        return MPI.Request.Testall(self._requests)


class JointOperation(MPIOperation):
    """Several operations as one, done when all are."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[MPIOperation]) -> None:
        outputs = [output for part in parts for output in part.outputs]
        super().__init__(_BATCH, [], outputs, None, None, MPI.Status())
        self._parts = parts

    def _requests_completed(self) -> bool:
        waiting = [part for part in self._parts if not part.poll()]  # polls all, so that all move on
        for part in self._parts:
            if not waiting and part.error is not None:
                raise part.error
        return not waiting

    @property
    def devices(self) -> set[torch.device]:
        return {device for part in self._parts for device in part.devices}


class MPIWork(Work):
    """What a c10d call on MPI returns.

    Dropping it does not end the operation: the background thread keeps its memory alive and completes it.
    """

    _future: torch.futures.Future | None = None

    def __init__(self, operation: MPIOperation, timeout: timedelta) -> None:
        super().__init__()
        self._operation = operation
        self._timeout = timeout

    @classmethod
    def of_all(cls, works: Sequence[MPIWork], timeout: timedelta) -> MPIWork:
        return cls(JointOperation([work._operation for work in works]), timeout)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. CommError when that takes longer than `timeout` (0: the group's)."""
        operation = self._operation
        if not operation.poll():
            self._wait_for(operation, (timeout if timeout > timedelta(0) else self._timeout).total_seconds())
        if operation.error is not None:
            raise operation.error
        return True

    def _wait_for(self, operation: MPIOperation, timeout: float) -> None:
        for _ in range(SPINS):
            if operation.poll():
                return
        start = time.monotonic()
        while not operation.poll():
            waited = time.monotonic() - start
            if waited > timeout:
                raise CommError(
                    f"{operation.name} did not finish within {timeout:g} s; see whether every rank of the "
                    "group called it, and in the same order, or give a longer timeout"
                )
            _give_way(waited, _WAITER_YIELDS)

    def is_completed(self) -> bool:
        return self._operation.poll()

    def is_success(self) -> bool:
        return self._operation.poll() and self._operation.error is None

    def exception(self) -> Exception | None:
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        return list(self._operation.outputs)

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._operation.status.Get_source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future:
        """A Future of the list of outputs. It completes whether or not it is waited for."""
        if self._future is None:
            devices = {tensor.device for tensor in self._operation.outputs if tensor.device.type == "cuda"}
            self._future = torch.futures.Future(devices=sorted(devices, key=str))
            self._operation.on_completion(_Settle(self._operation, self._future))
            if not self._operation.done:
                PROGRESS.complete(self._operation)
        return self._future

    def __del__(self) -> None:
        operation = getattr(self, "_operation", None)
        if operation is not None and not operation.done:
            PROGRESS.complete(operation)


class _Settle:
    """Completes a future as its operation ended."""

    def __init__(self, operation: MPIOperation, future: torch.futures.Future) -> None:
        self.operation = operation
        self.future = future

    def __call__(self) -> None:
        if self.operation.error is not None:
            self.future.set_exception(self.operation.error)
        else:
            self.future.set_result(list(self.operation.outputs))


class Progress:
    """A thread, started on first need, that completes operations nobody is waiting for.

    It polls, because MPI has no way to sleep until a request completes, and it sleeps longer the longer
    nothing happens, because its core belongs to the computation.
    """

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[MPIOperation | None] = SimpleQueue()
        self._unstarted = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._devices: set[torch.device] = set()
        self._pending: list[MPIOperation] = []
        atexit.register(self.stop)

    def complete(self, operation: MPIOperation) -> None:
        # May run inside a garbage collection, in any thread: SimpleQueue allows that; no lock is waited for.
        self._arrivals.put(operation)
        if self._thread is None and not self._stopping and self._unstarted.acquire(blocking=False):
            self._thread = threading.Thread(target=self._run, name="unisono-mpi-progress", daemon=True)
            self._thread.start()

    def oldest(self) -> MPIOperation | None:
        """Of the collectives that nobody waits for here, the one that was begun first; any thread may ask.

        torch waits for them in native code, in a backward pass above all, where nothing else shows it. Messages are
        left out: a receiver may take its time.
        """
        collectives = [each for each in self._pending if each.name not in _MESSAGES and not each.done]
        return min(collectives, key=lambda each: each.begun, default=None)

    def stop(self) -> None:
        """End the thread, since MPI must not be called while it is being finalized."""
        self._stopping = True
        self._arrivals.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pending: list[MPIOperation] = []
        quiet_since = 0.0
        while not self._stopping:
            arrived = self._arrived(block=not pending)
            self._pending = pending = pending + arrived
            still = [operation for operation in pending if not operation.poll(block=False)]
            if arrived or len(still) < len(pending):
                quiet_since = time.monotonic()
            else:
                _give_way(time.monotonic() - quiet_since, _PROGRESS_YIELDS)
            self._pending = pending = still

    def _arrived(self, block: bool) -> list[MPIOperation]:
        arrived: list[MPIOperation] = []
        try:
            while (operation := self._arrivals.get(block=block and not arrived)) is not None:
                arrived.append(operation)
        except Empty:
            pass
        for operation in arrived:
            self._enter(operation)
        return arrived

    def _enter(self, operation: MPIOperation) -> None:
        """Make the GPU that an operation works on this thread's own: an MPI that moves GPU memory does it from here."""
        for device in operation.devices - self._devices:
            torch.cuda.set_device(device)
            torch.cuda.mem_get_info(device)  # set_device alone leaves a thread without the GPU's context
            self._devices.add(device)


def settle(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Wait for a request. MPI's own wait gives the core away too soon for one that is over within 0.1 ms."""
    test = request.Test
    for _ in LOOKS:
        if test(status):
            return
    request.Wait(status)


def failure(name: str, error: MPI.Exception) -> CommError:
    if name == "recv" and error.Get_error_class() == MPI.ERR_TRUNCATE:
        return MessageError("recv was sent more than its tensor holds; the sender's and the receiver's must be as long")
    return CommError(f"{name} failed in MPI: {error.Get_error_string()}")


def wait_for_devices(tensors: Sequence[torch.Tensor]) -> None:
    """Block until what was queued for the tensors' GPUs has happened, so that any stream may use them."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()


def _give_way(waited: float, yields: float) -> None:
    into_the_cycle = waited % _CYCLE
    if waited < yields or into_the_cycle < _BURST:
        os.sched_yield()
    else:
        time.sleep(_CYCLE - into_the_cycle)


PROGRESS = Progress()
