"""What careful and careless users try: odd tensors, odd moments, wrong arguments. Silence would be the worst answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import MessageError, UsageError


def negated(value: float) -> torch.Tensor:
    """One number that torch keeps as its opposite, with a note to turn it round (the imaginary part of a conjugate)."""
    tensor = torch.full((1,), complex(0, -value)).conj().imag
    assert tensor.is_neg()
    assert tensor.is_contiguous()
    return tensor


def negated_numbers(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    total = float(sum(range(size)))
    assert comm.all_reduce(negated(rank)).item() == total
    assert comm.reduce(negated(rank), 1).item() == (total if rank == 1 else rank)
    assert comm.broadcast(negated(rank), 1).item() == 1
    assert [each.item() for each in comm.all_gather(negated(rank))] == list(range(size))
    assert comm.scatter(negated(9), [negated(r) for r in range(size)] if rank == 0 else None).item() == rank
    right, left = (rank + 1) % size, (rank - 1) % size
    [came] = comm.exchange([(negated(rank), right)], [(negated(9), left)])
    assert came.item() == left
    kept = torch.nn.Parameter(torch.zeros(2))
    assert comm.reduce_scatter(torch.ones(2 * size), out=kept).tolist() == [size, size]


def messages_as_handles(comm: Communicator) -> None:
    """A message tells that it is over, and may be waited for by several threads."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = comm.isend(torch.tensor([comm.rank]), right), comm.irecv(torch.tensor([-1]), left)
    while not (sent.is_completed() and received.is_completed()):
        pass
    assert received.wait().item() == left
    sent, received = comm.isend(torch.tensor([comm.rank]), right), comm.irecv(torch.tensor([-1]), left)
    future = received.get_future()
    assert received.wait().item() == left
    assert future.wait().item() == left
    sent.wait()
    gathered = comm.gather(torch.ones(1 + comm.rank), 1, uneven=True, async_op=True)
    while not gathered.is_completed():
        pass


def messages_beside_a_gather(comm: Communicator) -> None:
    """A message under way does not end in an uneven gather that comes before it is received."""
    sent = comm.isend(torch.full((2,), 9.0), 0) if comm.rank == 1 else None
    gathered = comm.gather(torch.full((2 + comm.rank // 2,), 5.0), 0, uneven=True)
    if comm.rank == 0:
        assert gathered[1].tolist() == [5, 5]
        late = torch.empty(2)
        comm.recv(late, 1)
        assert late.tolist() == [9, 9]
    if sent is not None:
        sent.wait()


def refused_on_one_rank(comm: Communicator) -> None:
    """What one rank is refused is not counted: the numbers of what follows agree, and the watch sees no difference."""
    x = torch.ones(3)
    refused: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(x, "premul_sum"),
        lambda: comm.all_reduce(x, factor=2.0),
        lambda: comm.reduce_scatter(torch.ones(comm.size), factor=2.0, out=torch.ones(1)),
        lambda: comm.all_reduce(x, "premul_sum", factor=1j),
        lambda: comm.all_reduce(x, "premul_sum", factor=torch.ones(2, 3)),
        lambda: comm.all_reduce([1.0]),  # type: ignore[arg-type]
        lambda: comm.all_gather(3.0),  # type: ignore[arg-type]
        lambda: comm.broadcast(torch.eye(2).to_sparse()),
        lambda: comm.broadcast(torch.ones(2, device="meta")),
        lambda: comm.broadcast(x, None),  # type: ignore[arg-type]
        lambda: comm.exchange([(3, 1)]),  # type: ignore[list-item]
        lambda: comm.split([0, 1]),  # type: ignore[list-item]
        lambda: comm.scatter(torch.ones(2, 3), torch.ones(comm.size, 6)),
        lambda: comm.gather(torch.ones(2, 3), out=torch.ones(comm.size, 6)),
        lambda: comm.all_reduce(x, ["sum"]),  # type: ignore[arg-type]
        lambda: comm.all_reduce(x, torch.distributed.ReduceOp.SUM),  # type: ignore[arg-type]
        lambda: comm.reduce(x, 0, {}),  # type: ignore[arg-type]
        lambda: comm.reduce_scatter(torch.ones(comm.size), ["sum"], out=torch.ones(1)),  # type: ignore[arg-type]
        lambda: comm.reduce_scatter(torch.ones(4), sizes=[1.0] * comm.size),  # type: ignore[list-item]
        lambda: comm.reduce_scatter(torch.ones(4), sizes=4),  # type: ignore[arg-type]
        lambda: comm.all_to_all(torch.ones(4), [1.0] * comm.size),  # type: ignore[list-item]
        lambda: comm.all_to_all(torch.ones(4), [1] * comm.size, [1.0] * comm.size),  # type: ignore[list-item]
        lambda: comm.all_to_all(torch.ones(4), [1] * comm.size, [2] * comm.size),
        lambda: comm.all_to_all(torch.ones(4), out=5),  # type: ignore[arg-type]
        lambda: comm.scatter(torch.ones(2), 5),  # type: ignore[arg-type]
        lambda: comm.scatter_object(5),  # type: ignore[arg-type]
        lambda: comm.split(5),  # type: ignore[arg-type]
        lambda: comm.subgroup(5),  # type: ignore[arg-type]
        lambda: comm.broadcast_parameters(5),  # type: ignore[arg-type]
        lambda: comm.send(x, 1, tag=-1),
        lambda: comm.recv(x, tag="a"),  # type: ignore[arg-type]
    ]
    before = comm._log.entered
    if comm.rank == 0:
        for call in refused:
            with pytest.raises(UsageError):
                call()
    comm.barrier()
    assert comm._log.entered == before + 1


def group_timeout(comm: Communicator) -> None:
    """A group's operations may take as long as the world's: torch must not end them before the watchdog does."""
    pair = comm.split([[0, 1], [2, 3]])
    assert pair is not None
    given = pair.group if comm.backend == "mpi" else pair.group._get_backend(torch.device("cpu")).options
    assert given._timeout.total_seconds() == comm._watchdog.timeout + 60


def modules_that_differ_unseen(comm: Communicator) -> None:
    stateful = Stateful(2, 2)
    comm.broadcast_parameters(stateful)
    hidden = torch.nn.Linear(2, 2)
    hidden.register_buffer("hidden", torch.ones(2 + (comm.rank == 2)), persistent=False)
    with pytest.raises(UsageError, match=r"rank 2 has hidden float32\[3\] where rank 0 has hidden float32\[2\]"):
        comm.broadcast_parameters(hidden)
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    if comm.rank == 1:
        tied[1].weight = tied[0].weight
    with pytest.raises(UsageError, match=r"rank 1 has nothing more where rank 0 has 1\.weight"):
        comm.broadcast_parameters(tied)
    with pytest.raises(UsageError, match="root 9"):
        comm.broadcast_parameters(tied, 9)


class Stateful(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def dropped_handle(comm: Communicator) -> None:
    """What was begun is done, whether or not anybody waits for it."""
    if comm.rank == 0:
        for value in (1.0, 2.0):
            comm.isend(torch.full((1 << 20,), value), 1)
    elif comm.rank == 1:
        time.sleep(0.1)
        x = torch.zeros(1 << 20)
        for value in (1.0, 2.0):
            comm.recv(x, 0)
            assert x.min() == x.max() == value
    comm.barrier()


def alarmed(signum: int, frame: object) -> None:
    raise RuntimeError("a worker has died")


def interrupted(comm: Communicator) -> None:
    """Python runs a handler of signals amid a collective: its error is no failure of the collective."""
    before = signal.signal(signal.SIGUSR2, alarmed)
    if comm.rank:
        time.sleep(0.3)
        if comm.rank == 1:
            comm.send(torch.ones(4), 0)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(RuntimeError, match="a worker has died") as caught:
            comm.recv(torch.zeros(4), 1)
        assert type(caught.value) is RuntimeError
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    "part",
    [
        negated_numbers,
        messages_as_handles,
        messages_beside_a_gather,
        refused_on_one_rank,
        group_timeout,
        modules_that_differ_unseen,
        dropped_handle,
        interrupted,
    ],
)
def test_what_careful_users_try(ranks4: RankPool, part: Callable[[Communicator], None]) -> None:
    ranks4.run(part)


def short_messages(comm: Communicator) -> None:
    """Less than was expected is an error, and told as what it is, however it is received."""
    receives: list[Callable[[torch.Tensor], Any]] = [
        lambda buffer: comm.recv(buffer, 0),
        lambda buffer: comm.recv(buffer),
        lambda buffer: comm.irecv(buffer, 0).wait(),
        lambda buffer: comm.exchange(recvs=[(buffer, 0)]),
        lambda buffer: comm.exchange(recvs=[(buffer, 0)], async_op=True).wait(),
    ]
    how_many = "3" if comm.backend == "mpi" else "fewer"
    for dtype in (torch.float32, torch.int16):
        for receive in receives:
            if comm.rank == 0:
                comm.send(torch.ones(3, dtype=dtype), 1)
                comm.exchange([(torch.ones(3, dtype=dtype), 1)])
            elif comm.rank == 1:
                with pytest.raises(
                    MessageError, match=rf"expected 9 elements \({dtype}\), but rank 0 sent {how_many}$"
                ):
                    receive(torch.zeros(9, dtype=dtype))
                buffer = torch.zeros(3, dtype=dtype)
                receive(buffer)  # what comes after it arrives
                assert buffer.tolist() == [1, 1, 1]


def test_a_message_that_is_too_short(ranks4: RankPool) -> None:
    ranks4.run(short_messages)


def long_message(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(9), 1)
    elif comm.rank == 1:
        with pytest.raises(MessageError, match="sent more than its tensor holds"):
            comm.irecv(torch.zeros(5), 0).wait()


def test_a_message_that_is_too_long(pools: Callable[[str, int], RankPool]) -> None:
    """On gloo it ends the rank."""
    pools("mpi", 4).run(long_message)


def test_a_failed_operation_is_over_but_has_no_result() -> None:
    class Failed:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    handle = Handle([Failed()], lambda: "a result")  # type: ignore[list-item]
    assert handle.is_completed()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            handle.wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        handle.get_future().wait()
