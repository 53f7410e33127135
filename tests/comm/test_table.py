"""One table for every backend: each collective x dtype x reduction gives the same answer, or the same error.

Run with `-s` to see the table.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"]
FACTOR = 0.5
INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
COMPLEXES = {torch.complex64, torch.complex128}
LENGTH = 12


def numbers(rank: int, dtype: torch.dtype) -> list[Any]:
    """What `rank` brings: small enough that every reduction is exact in every dtype."""
    values = [(3 * rank + 5 * i) % 4 + 1 for i in range(LENGTH)]
    if dtype == torch.bool:
        return [value > 2 for value in values]
    if dtype in COMPLEXES:
        return [complex(value, (rank + i) % 3 - 1) for i, value in enumerate(values)]
    return values


def reduced(op: str, dtype: torch.dtype, size: int) -> list[Any] | None:
    """The answer by plain Python arithmetic; None where the reduction has no meaning."""
    columns = list(zip(*(numbers(rank, dtype) for rank in range(size)), strict=True))
    if dtype == torch.bool:
        folds: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("sum", "max", "bor"), any),
            **dict.fromkeys(("product", "min", "band"), all),
            "bxor": lambda column: functools.reduce(operator.xor, column),
        }
    else:
        folds = {"sum": sum, "product": lambda column: functools.reduce(operator.mul, column)}
        if dtype not in COMPLEXES:
            folds |= {"min": min, "max": max}
        if dtype in INTEGERS:
            folds["avg"] = lambda column: int(sum(column) / size)
            for name, fold in (("band", operator.and_), ("bor", operator.or_), ("bxor", operator.xor)):
                folds[name] = functools.partial(functools.reduce, fold)
        else:
            folds["avg"] = lambda column: sum(column) / size
            folds["premul_sum"] = lambda column: sum(FACTOR * value for value in column)
    return [folds[op](column) for column in columns] if op in folds else None


def done(outcome: Any) -> Any:
    return outcome.wait() if isinstance(outcome, Handle) else outcome


def reductions(comm: Communicator, async_op: bool) -> dict[tuple[str, str, str], Any]:
    """Every cell of the table that reduces, as this rank sees it: its numbers, or the error's text."""
    cells: dict[tuple[str, str, str], Any] = {}
    for dtype in DTYPES:
        for op in OPS:
            factor = FACTOR if op == "premul_sum" else None
            mine = torch.tensor(numbers(comm.rank, dtype), dtype=dtype)
            for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter uneven"):
                tensor = mine.clone()
                try:
                    if name == "all_reduce":
                        outcome = done(comm.all_reduce(tensor, op, factor=factor, async_op=async_op))
                        assert outcome is tensor
                    elif name == "reduce":
                        outcome = done(comm.reduce(tensor, 1, op, factor=factor, async_op=async_op))
                    else:
                        sizes = None if name == "reduce_scatter" else uneven_sizes(comm.size)
                        outcome = done(comm.reduce_scatter(tensor, op, sizes=sizes, factor=factor, async_op=async_op))
                        assert torch.equal(tensor, mine), "reduce_scatter changed its input"
                    assert outcome.dtype == dtype
                    cell: Any = outcome.tolist()
                except UsageError as error:
                    cell = str(error)
                cells[name, op, str(dtype)] = cell
    return cells


def uneven_sizes(size: int) -> list[int]:
    sizes = [0, 5, *[1] * (size - 3)] if size > 2 else [5]
    return [*sizes, LENGTH - sum(sizes)]


def movements(comm: Communicator, async_op: bool) -> dict[tuple[str, str], Any]:
    """Every collective that moves data, for every dtype: right or wrong."""
    n, rank, right, left = comm.size, comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    cells: dict[tuple[str, str], Any] = {}
    for dtype in DTYPES:
        every = [torch.tensor(numbers(r, dtype), dtype=dtype) for r in range(n)]
        mine = every[rank]

        def check(name: str, got: Any, expected: Any, dtype: torch.dtype = dtype) -> None:
            if isinstance(expected, list):
                right_answer = len(got) == len(expected) and all(map(torch.equal, got, expected))
            else:
                right_answer = torch.equal(got, expected)
            cells[name, str(dtype)] = "ok" if right_answer else f"{got} instead of {expected}"

        check("broadcast", done(comm.broadcast(mine.clone(), 1, async_op=async_op)), every[1])
        check("all_gather", done(comm.all_gather(mine, async_op=async_op)), every)
        lengths = [(3 * r) % 5 for r in range(n)]
        parts = [every[r][: lengths[r]] for r in range(n)]
        check("all_gather uneven", done(comm.all_gather(parts[rank], uneven=True, async_op=async_op)), parts)
        out = torch.empty(n * LENGTH, dtype=dtype)
        check("all_gather_into", done(comm.all_gather_into(out, mine, async_op=async_op)), torch.cat(every))
        is_root = rank == n - 1
        got = done(comm.gather(mine, n - 1, async_op=async_op))
        check("gather", got if is_root else [], every if is_root else [])
        got = done(comm.gather(parts[rank], n - 1, uneven=True, async_op=async_op))
        check("gather uneven", got if is_root else [], parts if is_root else [])
        out = torch.empty(LENGTH, dtype=dtype)
        check("scatter", done(comm.scatter(out, every if is_root else None, n - 1, async_op=async_op)), mine)
        exact = LENGTH // n * n
        expected = torch.cat([e[:exact].chunk(n)[rank] for e in every])
        check("all_to_all", done(comm.all_to_all(mine[:exact], async_op=async_op)), expected)
        sizes = uneven_sizes(n)
        expected = torch.cat([e.split(sizes)[rank] for e in every])
        check("all_to_all uneven", done(comm.all_to_all(mine, sizes, async_op=async_op)), expected)
        table = torch.stack([mine, mine]).t()  # two columns, not contiguous
        expected = torch.cat([torch.stack([e, e]).t().split(sizes)[rank] for e in every])
        check("all_to_all strided", done(comm.all_to_all(table, sizes, async_op=async_op)), expected)
        check("p2p", pass_round(comm, mine, right, left, async_op), every[left])
        out = torch.empty_like(mine)
        done(comm.exchange([(mine, right)], [(out, left)], async_op=async_op))
        check("exchange", out, every[left])
    return cells


def pass_round(comm: Communicator, mine: torch.Tensor, right: int, left: int, async_op: bool) -> torch.Tensor:
    out = torch.empty_like(mine)
    if async_op:
        handles = [comm.isend(mine, right), comm.irecv(out, left)]
        for handle in handles:
            handle.wait()
    elif comm.rank % 2 == 0:
        comm.send(mine, right)
        comm.recv(out, left)
    else:
        held = mine.clone()
        comm.recv(out, left)
        comm.send(held, right)
    return out


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_table_has_no_hole(pools: Callable[[str, int], RankPool], size: int, async_op: bool) -> None:
    tables = {backend: pools(backend, size).run(reductions, async_op) for backend in ("gloo", "mpi")}
    for (name, op, dtype_name), cell in tables["gloo"][0].items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        expected = reduced(op, dtype, size)
        for rank in range(size):
            for backend, table in tables.items():
                got = table[rank][name, op, dtype_name]
                where = f"{name} {op} {dtype_name} on {backend} rank {rank} of {size}"
                assert got == _expected_of(name, expected, rank, size, dtype, cell), where
    if not async_op:
        print(_drawn(tables["gloo"][0]))


def _expected_of(name: str, full_value: list[Any] | None, rank: int, size: int, dtype: torch.dtype, cell: Any) -> Any:
    if full_value is None:
        assert isinstance(cell, str)
        assert "has no meaning" in cell
        return cell  # the same clear error, to the letter, on every rank of every backend
    if name == "all_reduce":
        return full_value
    if name == "reduce":
        return full_value if rank == 1 else torch.tensor(numbers(rank, dtype), dtype=dtype).tolist()
    sizes = [LENGTH // size] * size if name == "reduce_scatter" else uneven_sizes(size)
    start = sum(sizes[:rank])
    return full_value[start : start + sizes[rank]]


def _drawn(cells: dict[tuple[str, str, str], Any]) -> str:
    lines = [f"\n{'gloo = mpi':12}" + "".join(f"{op:>11}" for op in OPS)]
    for dtype in map(str, DTYPES):
        marks = ["ok" if not isinstance(cells["all_reduce", op, dtype], str) else "no meaning" for op in OPS]
        lines.append(f"{dtype.removeprefix('torch.'):12}" + "".join(f"{mark:>11}" for mark in marks))
    return "\n".join(lines)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_every_movement_of_every_dtype(
    pools: Callable[[str, int], RankPool], backend: str, size: int, async_op: bool
) -> None:
    for rank, cells in enumerate(pools(backend, size).run(movements, async_op)):
        wrong = {name: cell for name, cell in cells.items() if cell != "ok"}
        assert not wrong, f"rank {rank}"


def averages_of_large_numbers(comm: Communicator) -> list[list[int]]:
    outcomes = []
    for dtype, value in ((torch.int8, 100), (torch.uint8, 250), (torch.int16, -30000), (torch.int32, 2**31 - 1)):
        tensor = torch.full((2,), value, dtype=dtype)
        outcomes.append(comm.all_reduce(tensor, "avg").tolist())
    tensor = torch.tensor([comm.rank - 3, 3 - comm.rank])
    outcomes.append(comm.all_reduce(tensor, "avg").tolist())
    return outcomes


def test_the_average_of_integers_does_not_overflow_and_truncates_towards_zero(ranks4: RankPool) -> None:
    for outcome in ranks4.run(averages_of_large_numbers):
        assert outcome == [[100, 100], [250, 250], [-30000] * 2, [2**31 - 1] * 2, [-1, 1]]


def sums_that_need_rounding(comm: Communicator) -> dict[str, Any]:
    outcomes = {}
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.tensor([1.0, 2048.0, 0.1]).to(dtype) if comm.rank == 0 else torch.full((3,), 1e-3).to(dtype)
        every = [torch.tensor([1.0, 2048.0, 0.1]).to(dtype), *[torch.full((3,), 1e-3).to(dtype)] * (comm.size - 1)]
        expected = torch.stack([e.double() for e in every]).sum(0).to(dtype)
        outcomes[str(dtype)] = (comm.all_reduce(tensor).tolist(), expected.tolist())
    return outcomes


def test_halves_are_rounded_once(ranks4: RankPool) -> None:
    for outcome in ranks4.run(sums_that_need_rounding):
        for got, expected in outcome.values():
            assert got == expected
