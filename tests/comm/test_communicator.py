"""What a Communicator promises beyond the table: handles, groups, objects, modules, errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.comm.ring import naive_all_reduce, ring_all_reduce
from unisono.errors import UsageError


def handles(comm: Communicator) -> None:
    x = torch.full((1000,), float(comm.rank))
    total = float(sum(range(comm.size)))
    handle = comm.all_reduce(x, async_op=True)
    assert handle.wait() is x
    assert handle.is_completed()
    assert handle.wait() is x
    assert x[0] == total

    halves = torch.full((3,), float(comm.rank)).half()
    handle = comm.all_reduce(halves, "avg", async_op=True)
    while not handle.is_completed():
        pass
    assert halves.tolist() == [total / comm.size] * 3

    y = torch.full((5,), float(comm.rank))
    future = comm.all_reduce(y, async_op=True).get_future()
    assert future.wait() is y
    assert y[0] == total
    doubled = comm.all_reduce(y, async_op=True).get_future().then(lambda f: f.value() * 2)
    assert doubled.wait()[0] == 2 * total * comm.size

    gathered = comm.all_gather(torch.tensor([comm.rank]), async_op=True)
    assert [t.item() for t in gathered.get_future().wait()] == list(range(comm.size))
    comm.barrier(async_op=True).wait()


def test_handles(ranks4: RankPool) -> None:
    ranks4.run(handles)


def groups(comm: Communicator) -> tuple[Any, ...]:
    pair = comm.split([[0, 1], [3, 2]])
    assert pair is not None
    x = torch.tensor([10.0**comm.rank])
    pair.all_reduce(x)
    root = torch.tensor([float(comm.rank)])
    pair.broadcast(root, 0)
    alone = comm.split([[1]])
    assert (alone is None) == (comm.rank != 1)
    third = comm.split([[0, 2, 3]])
    gathered = None
    if third is not None:
        gathered = [t.item() for t in third.all_gather(torch.tensor([comm.rank]))]
        inner = third.split([[0, 2], [1]])  # a group within a group: ranks of the group
        assert inner is not None
        assert inner.ranks == ((2,) if third.rank == 1 else (0, 3))
    again = comm.split([[0, 1], [2, 3]])
    assert again is not None
    again.barrier()
    return pair.rank, pair.size, pair.ranks, x.item(), root.item(), gathered


def test_groups(ranks4: RankPool) -> None:
    assert ranks4.run(groups) == [
        (0, 2, (0, 1), 11.0, 0.0, [0, 2, 3]),
        (1, 2, (0, 1), 11.0, 0.0, None),
        (0, 2, (2, 3), 1100.0, 2.0, [0, 2, 3]),
        (1, 2, (2, 3), 1100.0, 2.0, [0, 2, 3]),
    ]


def objects(comm: Communicator) -> tuple[Any, ...]:
    value = {"rank": comm.rank, "list": [1, "two"]}
    return (
        comm.broadcast_object(value, 2)["rank"],
        [v["rank"] for v in comm.all_gather_object(value)],
        comm.gather_object(comm.rank, 1),
        comm.scatter_object([f"for {r}" for r in range(comm.size)] if comm.rank == 3 else None, 3),
    )


def test_objects(ranks4: RankPool) -> None:
    for rank, (reported, everyone, gathered, mine) in enumerate(ranks4.run(objects)):
        assert (reported, everyone, mine) == (2, [0, 1, 2, 3], f"for {rank}")
        assert gathered == ([0, 1, 2, 3] if rank == 1 else None)


def different_modules(comm: Communicator) -> None:
    other = torch.nn.Linear(2, 3 + (comm.rank > 0))
    with pytest.raises(UsageError, match="modules differ"):
        comm.broadcast_parameters(other)


def test_modules(ranks4: RankPool) -> None:
    ranks4.run(broadcast_a_module)
    ranks4.run(different_modules)


def broadcast_a_module(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    module = build_module()
    comm.broadcast_parameters(module, 1)
    torch.manual_seed(1)
    pairs = zip(module.state_dict().values(), build_module().state_dict().values(), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)
    assert all(parameter.requires_grad for parameter in module.parameters())


def build_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).half())


def odd_tensors(comm: Communicator) -> None:
    total = sum(range(1, comm.size + 1))
    strided = torch.full((4, 6), float(comm.rank + 1))[:, ::2]
    comm.all_reduce(strided)
    assert strided.unique().tolist() == [total]
    comm.broadcast(strided.t(), 1)
    scalar = torch.tensor(float(comm.rank + 1))
    assert comm.all_reduce(scalar).item() == total
    empty = torch.empty(0)
    assert comm.all_reduce(empty).shape == (0,)
    assert [t.shape for t in comm.all_gather(empty)] == [(0,)] * comm.size
    leaf = torch.nn.Parameter(torch.full((2,), float(comm.rank + 1)))
    comm.all_reduce(leaf)
    assert leaf.requires_grad
    assert leaf.tolist() == [total] * 2
    conjugate = torch.full((2,), 1 + 2j * (comm.rank + 1)).conj()
    comm.all_reduce(conjugate)
    assert conjugate.tolist() == [complex(comm.size, -2 * total)] * 2
    fewer = torch.arange(comm.size * 3).reshape(comm.size, 3)
    assert comm.all_to_all(fewer).shape == (comm.size, 3)
    received = torch.zeros(2)
    if comm.rank == 0:
        sources = {comm.recv(received) for _ in range(comm.size - 1)}
        assert sources == set(range(1, comm.size))
    else:
        comm.send(torch.ones(2), 0)
    comm.barrier()


def test_odd_tensors(ranks4: RankPool) -> None:
    ranks4.run(odd_tensors)


def user_errors(comm: Communicator) -> None:
    x = torch.ones(5)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.all_reduce(x, "mean"), "there is no reduction 'mean'; use one of sum, avg"),
        (lambda: comm.all_reduce(x, "premul_sum"), "no factor"),
        (lambda: comm.broadcast(x, 4), "root 4 is not in this group of 4: expected 0 to 3"),
        (lambda: comm.reduce(x, -1), "root -1"),
        (lambda: comm.reduce_scatter(x), "4 ranks do not divide dim 0 of length 5"),
        (lambda: comm.reduce_scatter(torch.tensor(1.0)), "no dimensions"),
        (lambda: comm.all_to_all(x, [1, 1, 1, 1]), r"sizes \[1, 1, 1, 1\] do not split length 5 into 4 parts"),
        (lambda: comm.all_to_all(x, [2, 1, 1, 1], [1]), "recv_sizes"),
        (lambda: comm.scatter(x, [x], comm.rank), "the root needs 4 chunks"),
        (lambda: comm.scatter_object([1], comm.rank), "needs 4 values"),
        (lambda: comm.all_gather_into(torch.empty(7), x), "expected torch.float32 of 4 x 5"),
        (lambda: comm.send(x, comm.rank), "itself"),
        (lambda: comm.recv(x, 9), "peer 9"),
        (lambda: comm.split([[0, 1], [1, 2]]), "rank 1 is in two groups"),
        (lambda: comm.split([[0, 7]]), "rank 7 is not in this group"),
        (lambda: comm.subgroup([(comm.rank + 1) % 4]), "this rank .* among them"),
    ]
    for call, words in cases:
        with pytest.raises(UsageError, match=words):
            call()
    comm.barrier()


def test_errors_come_before_anyone_waits(ranks4: RankPool) -> None:
    ranks4.run(user_errors)


def ring(comm: Communicator, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(comm.rank)
    mine = (torch.rand(length) * 8).to(dtype)
    expected = comm.all_reduce(mine.clone())
    for algorithm in (ring_all_reduce, naive_all_reduce):
        tensor = mine.clone()
        assert algorithm(comm, tensor) is tensor
        torch.testing.assert_close(tensor, expected)
    square = mine[: length // 2 * 2].clone().reshape(2, -1).t()
    expected = comm.all_reduce(square.clone())
    torch.testing.assert_close(ring_all_reduce(comm, square), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 1024])
def test_ring(pools: Callable[[str, int], RankPool], size: int, length: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.int32):
        pools("gloo", size).run(ring, length, dtype)


def test_ring_on_mpi(pools: Callable[[str, int], RankPool]) -> None:
    for length in (0, 3, 1001):
        pools("mpi", 4).run(ring, length, torch.float64)


def sent_bytes_of_a_ring(comm: Communicator) -> int:
    sent = 0
    exchange = comm.exchange

    def counting(sends: Any = (), recvs: Any = (), **options: Any) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor, _ in sends)
        return exchange(sends, recvs, **options)

    comm.exchange = counting  # type: ignore[method-assign]
    try:
        ring_all_reduce(comm, torch.ones(1200))
    finally:
        del comm.exchange
    return sent


def test_a_ring_sends_less_than_two_tensors_a_rank(pools: Callable[[str, int], RankPool]) -> None:
    assert pools("gloo", 4).run(sent_bytes_of_a_ring) == [2 * 3 * 1200] * 4


def plain_torch_beside_it(comm: Communicator) -> None:
    x = torch.ones(2)
    dist.all_reduce(x)
    comm.all_reduce(x)
    assert x.tolist() == [comm.size**2] * 2


def test_torch_calls_work_beside_it(ranks4: RankPool) -> None:
    ranks4.run(plain_torch_beside_it)


def some_wait_and_some_do_not(comm: Communicator) -> None:
    """Every collective, with async_op on odd ranks only."""
    later = comm.rank % 2 == 1

    def done(outcome: Any) -> Any:
        return outcome.wait() if later else outcome

    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64):
        x = torch.ones(2 * comm.size).to(dtype)
        expected = comm.all_reduce(x.clone(), "product")
        assert torch.equal(done(comm.all_reduce(x.clone(), "product", async_op=later)), expected)
        done(comm.reduce(x.clone(), 1, async_op=later))
        done(comm.broadcast(x.clone(), 2, async_op=later))
        assert len(done(comm.all_gather(x, async_op=later))) == comm.size
        assert len(done(comm.all_gather(x[: comm.rank], uneven=True, async_op=later))) == comm.size
        done(comm.all_gather_into(torch.empty(x.numel() * comm.size, dtype=dtype), x, async_op=later))
        done(comm.gather(x, 1, async_op=later))
        done(comm.gather(x[: comm.rank + 1], 1, uneven=True, async_op=later))
        done(comm.scatter(x.clone(), [x] * comm.size if comm.rank == 0 else None, async_op=later))
        assert done(comm.reduce_scatter(x, "product", async_op=later)).shape == (2,)
        assert done(comm.reduce_scatter(x, "product", sizes=[1, 3, 0, 4], async_op=later)).numel() in (0, 1, 3, 4)
        assert torch.equal(done(comm.all_to_all(x, async_op=later)), x)
        assert torch.equal(done(comm.all_to_all(x, [2, 2, 2, 2], async_op=later)), x)
        done(comm.barrier(async_op=later))


def test_some_ranks_may_wait_at_once_and_others_later(ranks4: RankPool) -> None:
    ranks4.run(some_wait_and_some_do_not)


def outcomes_in_place(comm: Communicator) -> None:
    mine = torch.full((2, 3), float(comm.rank))
    table = torch.empty(comm.size, 2, 3) if comm.rank == 1 else None
    gathered = comm.gather(mine, 1, out=table)
    assert gathered is table
    if table is not None:
        assert table[:, 0, 0].tolist() == list(range(comm.size))
    rows = torch.arange(comm.size * 2.0).view(comm.size, 2) if comm.rank == 0 else None
    assert comm.scatter(torch.empty(2), rows).tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1]
    assert comm.scatter(torch.empty(2), rows, async_op=True).wait().tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1]
    full_value = torch.arange(float(comm.size))
    part = torch.empty(1)
    assert comm.reduce_scatter(full_value, out=part) is part
    assert part.item() == comm.size * comm.rank
    received = torch.empty(comm.size)
    assert comm.all_to_all(full_value, out=received) is received
    assert received.tolist() == [float(comm.rank)] * comm.size
    with pytest.raises(UsageError, match="all_to_all: out is"):
        comm.all_to_all(full_value, out=torch.empty(2))
    with pytest.raises(UsageError, match="gather: out is"):
        comm.gather(mine, comm.rank, out=torch.empty(2))
    comm.barrier()


def test_outcomes_in_memory_of_the_callers(ranks4: RankPool) -> None:
    ranks4.run(outcomes_in_place)


def chunks_that_lie_side_by_side(comm: Communicator) -> None:
    """Allocators put small tensors next to each other; they are no slices of one tensor for that."""
    for _ in range(200):
        chunks = [torch.full((12,), float(rank)) for rank in range(comm.size)] if comm.rank == 0 else None
        assert comm.scatter(torch.empty(12), chunks).tolist() == [float(comm.rank)] * 12
    slices = list(torch.arange(4.0 * comm.size).chunk(comm.size)) if comm.rank == 0 else None
    assert comm.scatter(torch.empty(4), slices).tolist() == [4.0 * comm.rank + i for i in range(4)]


def test_scattering_many_small_chunks(ranks4: RankPool) -> None:
    ranks4.run(chunks_that_lie_side_by_side)


def memory_that_changes_under_the_same_tensor(comm: Communicator) -> None:
    """A large tensor is remembered from call to call, but not what it has ceased to be."""
    side = 256
    x = torch.empty(side, side)
    out = torch.empty(comm.size, side, side)
    pattern = torch.arange(float(side * side)).view(side, side)
    for _ in range(3):
        x.copy_(pattern + comm.rank)
        comm.all_gather_into(out, x)
        assert all(torch.equal(out[rank], pattern + rank) for rank in range(comm.size))
    x.t_()  # where it lay, as large as it was, in another order
    comm.all_gather_into(out, x)
    assert all(torch.equal(out[rank], (pattern + rank).t()) for rank in range(comm.size))
    x.data = torch.full((side, side), float(comm.rank))
    comm.all_gather_into(out, x)
    assert out[:, 5, 7].tolist() == list(range(comm.size))
    x.data = x.data[: side // 2]
    comm.broadcast(x, 1)
    assert torch.equal(x, torch.ones(side // 2, side))
    out.resize_(comm.size, side // 2, side)
    table = comm.gather(x + comm.rank, 0, out=out if comm.rank == 0 else None)
    assert comm.rank or table[:, 0, 0].tolist() == [1.0 + rank for rank in range(comm.size)]
    z = torch.full((side, side), 1j * comm.rank)
    comm.broadcast(z, 2)
    z.data = z.data.conj()
    comm.broadcast(z, 1)
    assert torch.equal(z, torch.full((side, side), -2j))


def test_memory_that_changes_under_the_same_tensor(ranks4: RankPool) -> None:
    ranks4.run(memory_that_changes_under_the_same_tensor)


def unpicklable_objects(comm: Communicator) -> list[str]:
    """What each rank raises when rank 2 gives a function that has no name."""
    bad = {"loss": lambda: 0} if comm.rank == 2 else {}
    calls: list[Callable[[], Any]] = [
        lambda: comm.all_gather_object(bad),
        lambda: comm.broadcast_object(bad, 2),
        lambda: comm.gather_object(bad, 0),
        lambda: comm.scatter_object([bad, 1, 2, 3] if comm.rank == 2 else None, 2),
        lambda: comm.all_gather_object(bad, async_op=True).wait(),
    ]
    reported = []
    for call in calls:
        try:
            reported.append(f"returned {call()}")
        except UsageError as error:
            reported.append(str(error))
    comm.barrier()
    return reported


def test_a_value_that_cannot_be_pickled_is_refused_on_every_rank(ranks4: RankPool) -> None:
    for rank, reported in enumerate(ranks4.run(unpicklable_objects)):
        for text in reported:
            assert "rank 2 gave" in text, reported
            assert "cannot be pickled" in text, reported
        full = [text for text in reported if not text.startswith("gather_object") or rank in (0, 2)]
        assert len(full) >= 4, reported
        assert all("a value of type builtins.dict" in text and "lambda" in text for text in full), reported


def objects_later(comm: Communicator) -> None:
    """Ranks that wait at once and ranks that wait later are in one collective."""
    mine = {"rank": comm.rank, "text": "x" * comm.rank}
    later = comm.rank % 2 == 1

    def outcome(value: Any) -> Any:
        return value.wait() if later else value

    everyone = [{"rank": rank, "text": "x" * rank} for rank in range(comm.size)]
    assert outcome(comm.all_gather_object(mine, async_op=later)) == everyone
    assert outcome(comm.gather_object(mine, 1, async_op=later)) == (everyone if comm.rank == 1 else None)
    assert outcome(comm.broadcast_object(mine, 2, async_op=later)) == everyone[2]
    dealt = comm.scatter_object(everyone if comm.rank == 3 else None, 3, async_op=later)
    assert outcome(dealt) == mine
    first = comm.broadcast_object(comm.rank, 0, async_op=True)
    second = comm.all_gather_object(comm.rank, async_op=True)
    assert second.get_future().wait() == list(range(comm.size))
    assert first.wait() == 0


def test_objects_later(ranks4: RankPool) -> None:
    ranks4.run(objects_later)


def first_bytes(comm: Communicator | None = None) -> dict[str, bytes]:
    """The machine code with which libc's functions begin."""
    if comm is not None:
        comm.all_reduce(torch.ones(1 << 17))
    libc = ctypes.CDLL(None)
    return {
        name: ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value, 12)  # type: ignore[arg-type]
        for name in ("mmap", "munmap", "madvise")
    }


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="memory is registered with a network card")
def test_libc_is_left_as_it_is(ranks4: RankPool) -> None:
    assert ranks4.run(first_bytes) == [first_bytes()] * 4
