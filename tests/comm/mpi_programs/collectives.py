"""Every collective, dtype and op, through torch.distributed and as a Communicator makes it, on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from tests.comm.expectation import DTYPES, FACTOR, OPS, has_meaning, reduced, sample
from tests.comm.mpi_programs import harness
from unisono.comm.mpi import buffers, calls
from unisono.errors import CommError, UsageError

warnings.filterwarnings("ignore", category=FutureWarning)  # 2.13 renamed some calls, 2.11 knows the old names

TRAVELLERS = (*DTYPES, torch.float8_e5m2, torch.uint16)
SHAPE = (3, 5)


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def group():  # type: ignore[no-untyped-def]
    return dist.group.WORLD


def now(call: calls.MPICall) -> None:
    """The way of a Communicator's transport."""
    group().run([call])


def all_reduce_now(x: torch.Tensor, op: str = "sum", factor: float | None = None) -> None:
    now(calls.all_reduce(x, op, factor, size()))


def broadcast_now(x: torch.Tensor, root: int) -> None:
    now(calls.broadcast(x, root, rank()))


def all_gather_now(out: torch.Tensor, x: torch.Tensor) -> None:
    now(calls.all_gather_single(out, x, rank(), size()))


def all_gather_parts_now(outs: list[torch.Tensor], x: torch.Tensor) -> None:
    now(calls.all_gather(outs, x, rank(), size()))


def reduce_scatter_parts_now(out: torch.Tensor, chunks: Sequence[torch.Tensor], op: str, by: float | None) -> None:
    now(calls.reduce_scatter(out, chunks, op, by, rank(), size()))


def all_to_all_now(
    out: torch.Tensor, x: torch.Tensor, out_splits: Sequence[int] = (), in_splits: Sequence[int] = ()
) -> None:
    if out_splits or in_splits:
        now(calls.all_to_all_single(out, x, out_splits, in_splits, size()))
    else:
        now(calls.all_to_all_even(out, x, size()))


def recv_now(x: torch.Tensor, source: int, tag: int = 0) -> int:
    call = calls.receive(x, source, tag)
    now(call)
    return call.status.Get_source()


def everybodys(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    if dtype in DTYPES:
        return [sample(r, shape, dtype) for r in range(size())]
    return [sample(r, shape, torch.uint8).to(dtype) for r in range(size())]


def equal(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    same = torch.equal(actual.view(torch.uint8), expected.contiguous().view(torch.uint8)) if actual.numel() else True
    if actual.is_floating_point() or actual.is_complex():
        same = same or bool((actual.to(torch.complex128) == expected.to(torch.complex128)).all())  # -0.0 is 0.0
    assert same, f"{what}: {actual} instead of {expected}"


def c10d_op(op: str) -> object:
    if op == "premul_sum":
        return dist._make_nccl_premul_sum(FACTOR)
    return getattr(dist.ReduceOp, op.upper())


def c10d_all_reduce(tensor: torch.Tensor, op: str, async_op: bool = False) -> dist.Work:
    """dist.all_reduce, but for what it refuses before it asks the backend."""
    if not (tensor.is_complex() and op in ("product", "min", "max", "band", "bor", "bxor")):
        return dist.all_reduce(tensor, c10d_op(op), async_op=async_op)
    opts = dist.AllreduceOptions()
    opts.reduceOp = c10d_op(op)
    opts.asyncOp = async_op
    work = group().allreduce([tensor], opts)
    if not async_op:
        work.wait()
    return work


def meaningful() -> Iterator[tuple[str, torch.dtype]]:
    for op in OPS:
        for dtype in DTYPES:
            if has_meaning(op, dtype):
                yield op, dtype


def factor(op: str) -> float | None:
    return FACTOR if op == "premul_sum" else None


def check_all_reduce() -> None:
    for op, dtype in meaningful():
        expected = reduced(op, everybodys(dtype))
        ways: list[Callable[[torch.Tensor], object]] = [
            lambda x, op=op: c10d_all_reduce(x, op, async_op=False),
            lambda x, op=op: c10d_all_reduce(x, op, async_op=True).wait(),
            lambda x, op=op: all_reduce_now(x, op, factor(op)),
        ]
        for way, call in enumerate(ways):
            mine = everybodys(dtype)[rank()]
            call(mine)
            equal(mine, expected, ("all_reduce", op, dtype, way))


def check_meaningless_reductions() -> None:
    for op in OPS:
        for dtype in DTYPES:
            if has_meaning(op, dtype):
                continue
            mine = everybodys(dtype)[rank()]
            for call in (c10d_all_reduce, all_reduce_now):
                with pytest.raises(UsageError, match=f"{op} has no meaning for {dtype}"):
                    call(mine, op)


def check_reduce() -> None:
    for op, dtype in meaningful():
        for root in (0, size() - 1):
            for call in (
                lambda x, op=op, root=root: dist.reduce(x, root, c10d_op(op)),
                lambda x, op=op, root=root: now(calls.reduce(x, root, op, factor(op), rank(), size())),
            ):
                mine = everybodys(dtype)[rank()]
                call(mine)
                expected = reduced(op, everybodys(dtype)) if rank() == root else everybodys(dtype)[rank()]
                equal(mine, expected, ("reduce", op, dtype, root))


def check_reduce_scatter() -> None:
    shape = (2 * size(), 3)
    for op, dtype in meaningful():
        expected = reduced(op, everybodys(dtype, shape)).chunk(size())[rank()]
        ways: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
            lambda out, x, op=op: dist.reduce_scatter_tensor(out, x, c10d_op(op)),
            lambda out, x, op=op: dist.reduce_scatter(out, list(x.chunk(size())), c10d_op(op)),
            lambda out, x, op=op: dist.reduce_scatter(out, [c.clone() for c in x.chunk(size())], c10d_op(op)),
            lambda out, x, op=op: now(calls.reduce_scatter_single(out, x, op, factor(op), rank(), size())),
            lambda out, x, op=op: reduce_scatter_parts_now(out, x.chunk(size()), op, factor(op)),
        ]
        for way, call in enumerate(ways):
            mine = everybodys(dtype, shape)[rank()]
            out = torch.empty_like(expected)
            call(out, mine)
            equal(out, expected, ("reduce_scatter", op, dtype, way))
            equal(mine, everybodys(dtype, shape)[rank()], ("reduce_scatter kept its input", op, dtype, way))


def check_reductions_that_torch_folds() -> None:
    """What is done with GPU memory where MPI takes it, done here on the host: MPI moves, torch computes."""
    usual, buffers.folds = buffers.folds, lambda wire, ranks: True
    try:
        for op, dtype in meaningful():
            everything = everybodys(dtype, (2 * size(), 3))
            expected = reduced(op, everything)
            mine = everything[rank()].clone()
            now(calls.all_reduce(mine.t(), op, factor(op), size()))
            equal(mine, expected, ("folded all_reduce", op, dtype))
            mine = everything[rank()].clone()
            group().start(calls.reduce(mine, 1, op, factor(op), rank(), size())).wait()
            equal(mine, expected if rank() == 1 else everything[rank()], ("folded reduce", op, dtype))
            counts = [1, *[2] * (size() - 2), 3]
            out = torch.empty(counts[rank()], 3, dtype=dtype)
            chunks = everything[rank()].split(counts)
            now(calls.reduce_scatter(out, chunks, op, factor(op), rank(), size()))
            equal(out, expected.split(counts)[rank()], ("folded reduce_scatter", op, dtype))
        inexact = [torch.randn(999, generator=torch.Generator().manual_seed(r)) for r in range(size())]
        mine = inexact[rank()].clone()
        now(calls.all_reduce(mine, "sum", None, size()))
        assert torch.equal(mine, sum(inexact[1:], start=inexact[0])), "not in the order of ranks"
    finally:
        buffers.folds = usual


def check_gpu_memory_is_not_for_this_mpi() -> None:
    assert buffers._loaded_library("mpi(?:ch)?") is not None
    assert not buffers.cuda_aware()
    assert not buffers.folds(torch.empty(1), 1)


def check_reduce_scatter_in_place_and_uneven() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        all_inputs = everybodys(dtype, (2 * size(), 3))
        mine = all_inputs[rank()].clone()
        dist.reduce_scatter_tensor(mine.chunk(size())[rank()], mine)
        equal(mine.chunk(size())[rank()].clone(), reduced("sum", all_inputs).chunk(size())[rank()], dtype)
        counts = [r + 1 for r in range(size())]
        uneven = everybodys(dtype, (sum(counts),))
        out = torch.empty(counts[rank()], dtype=dtype)
        reduce_scatter_parts_now(out, uneven[rank()].split(counts), "avg", None)
        equal(out, reduced("avg", uneven).split(counts)[rank()].clone(), ("uneven", dtype))


def check_broadcast() -> None:
    for dtype in TRAVELLERS:
        for root in range(size()):
            for call in (dist.broadcast, broadcast_now):
                mine = everybodys(dtype)[rank()]
                call(mine, root)
                equal(mine, everybodys(dtype)[root], ("broadcast", dtype, root))


def check_all_gather() -> None:
    for dtype in TRAVELLERS:
        expected = torch.stack(everybodys(dtype))
        mine = expected[rank()].clone()
        for call in (dist.all_gather_into_tensor, all_gather_now):
            out = torch.empty_like(expected)
            call(out, mine)
            equal(out, expected, ("all_gather_into_tensor", dtype))
            in_place = torch.zeros(expected.shape, dtype=torch.uint8).to(dtype)
            in_place[rank()].copy_(mine)
            call(in_place, in_place[rank()])
            equal(in_place, expected, ("all_gather in place", dtype))
        for outs in ([torch.empty_like(mine) for _ in range(size())], list(torch.empty_like(expected))):
            dist.all_gather(outs, mine)
            equal(torch.stack(outs), expected, ("all_gather list", dtype))


def check_all_gather_uneven() -> None:
    for dtype in TRAVELLERS:
        everything = [everybodys(dtype, (r, 2))[r] for r in range(size())]  # rank 0 has nothing
        for call in (dist.all_gather, all_gather_parts_now):
            outs = [torch.empty_like(one) for one in everything]
            call(outs, everything[rank()])
            for out, expected in zip(outs, everything, strict=True):
                equal(out, expected, ("uneven all_gather", dtype))


def check_gather_and_scatter() -> None:
    for dtype in TRAVELLERS:
        everything = everybodys(dtype)
        for root in (0, size() - 1):
            at_root = rank() == root
            outs = [torch.empty_like(one) for one in everything] if at_root else None
            dist.gather(everything[rank()], outs, dst=root)
            now(calls.gather(outs or (), everything[rank()], root, rank(), size()))
            for out, expected in zip(outs or (), everything, strict=False):
                equal(out, expected, ("gather", dtype, root))
            back = torch.empty_like(everything[0])
            dist.scatter(back, everything if at_root else None, src=root)
            equal(back, everything[rank()], ("scatter", dtype, root))
            back = back.zero_() if dtype in DTYPES else back
            now(calls.scatter(back, everything if at_root else (), root, rank(), size()))
            equal(back, everything[rank()], ("scatter_now", dtype, root))


def check_all_to_all() -> None:
    def shard(source: int, target: int, dtype: torch.dtype) -> torch.Tensor:
        rows = (source + target) % 3  # some are empty
        return sample(10 * source + target, (rows, 2), torch.uint8).to(dtype)

    for dtype in TRAVELLERS:
        ins = [shard(rank(), target, dtype) for target in range(size())]
        expected = [shard(source, rank(), dtype) for source in range(size())]
        outs = [torch.empty_like(one) for one in expected]
        dist.all_to_all(outs, ins)
        equal(torch.cat(outs), torch.cat(expected), ("all_to_all", dtype))
        in_splits, out_splits = [len(one) for one in ins], [len(one) for one in expected]
        for call in (dist.all_to_all_single, all_to_all_now):
            out = torch.empty_like(torch.cat(expected))
            call(out, torch.cat(ins), out_splits, in_splits)
            equal(out, torch.cat(expected), ("uneven all_to_all_single", dtype))
            even = everybodys(dtype, (2 * size(), 3))
            out = torch.empty_like(even[0])
            call(out, even[rank()])
            wanted = torch.cat([one.chunk(size())[rank()] for one in even])
            equal(out, wanted, ("even all_to_all_single", dtype))
            aliased = even[rank()].clone()
            call(aliased, aliased)
            equal(aliased, wanted, ("all_to_all_single in place", dtype))


def check_point_to_point() -> None:
    right, left = (rank() + 1) % size(), (rank() - 1) % size()
    for dtype in TRAVELLERS:
        everything = everybodys(dtype)
        out = torch.empty_like(everything[0])
        works = [dist.isend(everything[rank()], right, tag=3), dist.irecv(out, left, tag=3)]
        for work in works:
            work.wait()
        equal(out, everything[left], ("isend and irecv", dtype))
        ops = [dist.P2POp(dist.isend, everything[rank()], left), dist.P2POp(dist.irecv, out, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        equal(out, everything[right], ("batch_isend_irecv", dtype))
        if rank() == 0:
            senders = set()
            for _ in range(size() - 1):
                sender = dist.recv(out)
                equal(out, everything[sender], ("recv from anybody", dtype))
                senders.add(sender)
            assert senders == set(range(1, size()))
            assert recv_now(out, MPI.ANY_SOURCE, tag=5) == 1
        else:
            dist.send(everything[rank()], 0)
        if rank() == 1:
            now(calls.send(everything[1], 0, 5))
        dist.barrier()


def check_strides_and_views() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool):
        everything = everybodys(dtype, (4, 6))
        for view in (lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:3], lambda x: x[0, 0]):
            for call in (dist.all_reduce, all_reduce_now):
                mine = everything[rank()].clone()
                call(view(mine))
                expected = everything[rank()].clone()
                view(expected).copy_(view(reduced("sum", everything)))
                equal(mine, expected, ("all_reduce of a view", dtype))
            mine = everything[rank()].clone()
            dist.broadcast(view(mine), 0)
            expected = everything[rank()].clone()
            view(expected).copy_(view(everything[0]))
            equal(mine, expected, ("broadcast of a view", dtype))
        wide = torch.zeros(size(), 6, 4, dtype=dtype).transpose(1, 2)
        dist.all_gather(list(wide), everything[rank()])
        equal(wide.contiguous(), torch.stack(everything), ("all_gather into views", dtype))
    conjugated = everybodys(torch.complex64)
    mine = conjugated[rank()].clone().conj()
    all_reduce_now(mine)
    equal(mine.resolve_conj(), reduced("sum", conjugated).conj().resolve_conj(), "conjugate views")
    parameter = torch.nn.Parameter(torch.full((3,), float(rank())))
    dist.broadcast(parameter, size() - 1)
    dist.all_reduce(parameter, dist.ReduceOp.AVG)
    assert parameter.tolist() == [size() - 1.0] * 3


def check_calls_cut_into_shards() -> None:
    """What an MPI that counts in an int does above 2**31 elements, done here above 4."""
    buffers.AT_ONCE, usual = 4, buffers.AT_ONCE
    try:
        check_all_reduce()
        check_reduce()
        check_reduce_scatter()
        check_broadcast()
        check_all_gather()
        check_all_gather_uneven()
        out, tensors = torch.empty(11), everybodys(torch.float32, (11,))
        if rank() == 0:
            dist.send(tensors[0], 1)
            now(calls.send(tensors[0], 1, 0))
        elif rank() == 1:
            dist.recv(out, 0)
            equal(out, tensors[0], "recv in pieces")
            assert recv_now(out.zero_(), 0) == 0
            equal(out, tensors[0], "recv_now in pieces")
        with pytest.raises(CommError, match="need an MPI-4 library"):
            all_to_all_now(torch.empty(2 * size(), 3), torch.empty(2 * size(), 3))
    finally:
        buffers.AT_ONCE = usual


def check_empty_tensors() -> None:
    for dtype in DTYPES:
        nothing = torch.empty(0, 3, dtype=dtype)
        dist.all_reduce(nothing)
        all_reduce_now(nothing)
        dist.broadcast(nothing, 0)
        broadcast_now(nothing, 0)
        dist.all_gather_into_tensor(torch.empty(0, 3, dtype=dtype), nothing)
        dist.all_gather([torch.empty_like(nothing) for _ in range(size())], nothing)
        dist.reduce_scatter_tensor(torch.empty(0, 3, dtype=dtype), nothing)
        dist.all_to_all_single(torch.empty(0, 3, dtype=dtype), nothing)
        if rank() == 0:
            dist.send(nothing, 1)
        elif rank() == 1:
            dist.recv(nothing, 0)


def check_coalesced() -> None:
    for dtype in DTYPES:
        everything = [everybodys(dtype, shape) for shape in ((2, 3), (5,), (1,))]
        mine = [tensors[rank()].clone() for tensors in everything]
        with dist._coalescing_manager():
            for tensor in mine:
                dist.all_reduce(tensor)
        for tensor, tensors in zip(mine, everything, strict=True):
            equal(tensor, reduced("sum", tensors), ("coalesced all_reduce", dtype))
        outs = [torch.empty(size(), *tensors[0].shape, dtype=dtype) for tensors in everything]
        with dist._coalescing_manager(async_ops=True) as manager:
            for out, tensors in zip(outs, everything, strict=True):
                dist.all_gather_into_tensor(out, tensors[rank()])
        manager.wait()
        for out, tensors in zip(outs, everything, strict=True):
            equal(out, torch.stack(tensors), ("coalesced all_gather", dtype))
        backs = [torch.empty_like(tensors[0]) for tensors in everything]
        with dist._coalescing_manager():
            for back, out in zip(backs, outs, strict=True):
                dist.reduce_scatter_tensor(back, out)
        for back, out in zip(backs, outs, strict=True):
            equal(back, reduced("sum", [out[rank()]] * size()), ("coalesced reduce_scatter", dtype))
    tensor = torch.full((4,), float(rank()))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(tensor, 1)
    manager.wait()
    assert tensor.tolist() == [1.0] * 4


def check_objects() -> None:
    found: list[object] = [None] * size()
    dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size())]
    reported = [("root", rank())]
    dist.broadcast_object_list(reported, src=1)
    assert reported == [("root", 1)]
    one: list[object] = [None]
    dist.scatter_object_list(one, [str(r) for r in range(size())] if rank() == 0 else None, src=0)
    assert one == [str(rank())]


def check_wrong_input() -> None:
    n = size()
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: dist.all_gather_into_tensor(torch.empty(n + 1), torch.empty(1)), "the output holds"),
        (
            lambda: all_gather_parts_now([torch.empty(1)] * (n + 1), torch.empty(1)),
            "pass one for each rank",
        ),
        (lambda: all_gather_now(torch.empty(n), torch.empty(1).long()), "must be alike"),
        (lambda: all_to_all_now(torch.empty(n), torch.empty(n), [9] * n, [1] * n), "output splits"),
        (lambda: all_to_all_now(torch.empty(n + 1), torch.empty(n + 1)), "pass splits"),
        (lambda: all_reduce_now(torch.empty(1), "mean"), "no reduction 'mean'"),
        (lambda: broadcast_now(torch.eye(2).to_sparse(), 0), "pass a dense one"),
    ]
    for call, message in wrong:
        with pytest.raises(UsageError, match=message):
            call()


if __name__ == "__main__":
    harness.main(globals())
