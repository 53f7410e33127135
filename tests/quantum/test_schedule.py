"""The scheduler: how few exchanges it needs, and that what it moves may be moved."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.quantum import dense, lockstep
from tests.quantum.circuits import random_circuit
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.commutation import mixed_wires, wire_paulis
from unisono.quantum.circuit.templates import hardware_efficient, qaoa, uccsd
from unisono.quantum.compile.compiled import Compiled, assemble
from unisono.quantum.distributed.local_steps import LocalOperations
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.kernels import reference
from unisono.quantum.schedule.forecast import Forecast, HostRates
from unisono.quantum.schedule.partition import Order, cluster
from unisono.quantum.schedule.postpone import postponed
from unisono.quantum.schedule.schedule import Schedule
from unisono.quantum.schedule.step import CircuitSegment, Exchange
from unisono.quantum.schedule.sweeps import Sweep, cost, tiles


def random_layers(wires: int, depth: int, seed: int) -> Circuit:
    """Random rotations on every wire, then CNOTs on random pairs."""
    draw = random.Random(seed)
    circuit = Circuit(wires)
    for _ in range(depth):
        for wire in range(wires):
            circuit.rot(wire, draw.random(), draw.random(), draw.random())
        order = draw.sample(range(wires), wires)
        for control, target in zip(order[::2], order[1::2], strict=True):
            circuit.cnot(control, target)
    return circuit


def regular_graph(wires: int, seed: int) -> list[tuple[int, int]]:
    """A random graph in which every wire has three neighbours."""
    draw = random.Random(seed)
    while True:
        ends = draw.sample([wire for wire in range(wires) for _ in range(3)], 3 * wires)
        edges = {(min(pair), max(pair)) for pair in zip(ends[::2], ends[1::2], strict=True)}
        if len(edges) == 3 * wires // 2 and all(first != second for first, second in edges):
            return sorted(edges)


# circuit, and for 4, 32 and 128 ranks: exchanges, and exchanges in order. docs/quantum.md shows this table.
COUNTS = {
    "ansatz, CNOT ring, 32 wires": (lambda: hardware_efficient(32, 10), [(10, 40), (11, 100), (12, 140)]),
    "ansatz, CNOT line, 32 wires": (
        lambda: hardware_efficient(32, 10, entangler="cnot_line"),
        [(1, 30), (1, 90), (1, 130)],
    ),
    "QFT, 30 wires": (lambda: Circuit(30).qft(), [(1, 4), (1, 10), (1, 14)]),
    "random, 30 wires, depth 20": (lambda: random_layers(30, 20, 1), [(3, 58), (5, 149), (7, 205)]),
    "QAOA, 3-regular, 30 wires, 8 layers": (
        lambda: qaoa(regular_graph(30, 3), 8, 30),
        [(2, 18), (3, 45), (4, 63)],
    ),
    "UCCSD, 30 wires, 2 electrons": (lambda: uccsd(30, 2), [(3, 1626), (4, 1626), (6, 1626)]),
}


@pytest.mark.parametrize("name", COUNTS)
def test_exchanges(name: str) -> None:
    build, expected = COUNTS[name]
    circuit = build()
    found = [(len(s.exchanges), s.in_order) for s in (Schedule.of(circuit, ranks) for ranks in (4, 32, 128))]
    assert found == expected


def test_in_order_with_the_wire_unused_longest_given_away() -> None:
    """The other count of docs/quantum.md: one-qubit gates go with the CNOT that follows, wires come one at a time."""
    circuit = hardware_efficient(32, depth=10)
    here = list(range(27))  # the rank's wires, the one used last at the end
    brought = 0
    for each in circuit.operations:
        if len(each.wires) < 2:
            continue
        for wire in each.wires:
            if wire not in here:
                brought += 1
                here.remove(next(other for other in here if other not in each.wires))
        here = [wire for wire in here if wire not in each.wires] + list(each.wires)
    assert brought == 294


def test_letters_that_agree_mean_commuting() -> None:
    circuit = random_circuit(3, 60, 7)
    matrices = [dense.operator(each, each.angles(), 3) for each in circuit.operations]
    agreeing = 0
    for i, first in enumerate(circuit.operations):
        for j, second in enumerate(circuit.operations[:i]):
            left, right = (dict(zip(each.wires, wire_paulis(each), strict=True)) for each in (first, second))
            if all(left[wire] == right[wire] != "*" for wire in left.keys() & right.keys()):
                agreeing += bool(left.keys() & right.keys())
                np.testing.assert_allclose(matrices[i] @ matrices[j], matrices[j] @ matrices[i], atol=1e-12)
    assert agreeing > 100


def test_letters_say_what_is_mixed() -> None:
    assert wire_paulis(Circuit(3).toffoli(0, 1, 2).operations[0]) == ("Z", "Z", "X")
    assert wire_paulis(Circuit(3).rzx(1, 2, 0.3).operations[0]) == ("Z", "X")
    assert mixed_wires(Circuit(4).pauli_rotation("ZXYZ", [0, 1, 2, 3], 0.1).operations[0]) == (1, 2)
    assert wire_paulis(Circuit(2).unitary(np.kron(np.diag([1, 1j]), [[0, 1], [1, 0]]), [0, 1]).operations[0]) == (
        "Z",
        "X",
    )


@pytest.mark.parametrize("capacity", [3, 4, 5])
def test_tiles_mix_few_axes_and_are_the_circuit(capacity: int) -> None:
    for seed in range(6):
        circuit = random_circuit(6, 50, seed)
        made = tiles(circuit.operations, capacity)
        vector = torch.zeros(64, dtype=torch.complex128)
        vector[0] = 1
        for tile in made:
            assert len(tile.active) <= capacity
            assert all(set(mixed_wires(operation)) <= set(tile.active) for operation in tile.operations)
            reference.run(vector, tile.operations)
        np.testing.assert_allclose(vector.numpy(), dense.state(circuit), atol=1e-12)
        assert sum(len(tile.operations) for tile in made) == len(circuit)


def test_a_split_takes_every_operation_once_after_those_it_must_follow() -> None:
    circuit = random_circuit(8, 120, 3)
    for capacity in (3, 5, 8):
        shards = cluster(circuit.operations, capacity)
        numbers = [number for chunk in shards for number in chunk.numbers]
        assert sorted(numbers) == list(range(len(circuit)))
        order = Order(circuit.operations)
        for number in numbers:
            assert order.ready(number)
            order.finish(number)


@functools.cache
def with_its_state(seed: int) -> tuple[Circuit, np.ndarray]:
    circuit = random_circuit(7, 50, seed, weights=2, features=1)
    return circuit, dense.state(circuit, (0.4, -0.9), (1.2,))


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 2), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (16, 4)])
def test_schedules_of_ranks_and_nodes_equal_the_dense_reference(ranks: int, nodes: int) -> None:
    for seed in range(3):
        circuit, expected = with_its_state(seed)
        schedule = Schedule.of(circuit, ranks, nodes=nodes)
        got = lockstep.amplitudes(circuit, schedule, (0.4, -0.9), (1.2,))
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("ranks", "sweep"), [(2, Sweep(3, 1, 0)), (4, Sweep(3, 0, 1))])
def test_schedules_that_fill_sweeps_equal_the_dense_reference(ranks: int, sweep: Sweep) -> None:
    """Operations that waited past exchanges, and wires paged in sweep by sweep, as large states have them."""
    ways: Counter[str] = Counter()
    ring = hardware_efficient(8, 3)
    weights = np.linspace(-3, 3, ring.weights)
    for circuit in (ring, random_circuit(7, 40, 2)):
        few = Schedule.of(circuit, ranks, sweep=Sweep(9))
        chosen = Schedule.of(circuit, ranks, sweep=sweep)
        waited = replace(few, steps=tuple(postponed(few.steps, circuit.wires, few.global_qubits, sweep)))
        ways["waited"] += waited.steps != few.steps
        ways["sweep by sweep"] += chosen.exchanges != few.exchanges
        assert cost(chosen.steps, circuit.wires, few.global_qubits, sweep) <= cost(
            few.steps, circuit.wires, few.global_qubits, sweep
        )
        expected = dense.state(circuit, weights)
        for schedule in (waited, chosen):
            got = lockstep.amplitudes(circuit, schedule, weights)
            np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
    assert min(ways["waited"], ways["sweep by sweep"]) > 0, ways


def test_two_ranks_sweep_as_often_as_one() -> None:
    circuit = hardware_efficient(24, 10)
    full, halves = (Schedule.of(circuit, ranks) for ranks in (1, 2))
    assert cost(halves.steps, 24, 1) - 2.5 * len(halves.exchanges) == cost(full.steps, 24, 0) == 24
    assert len(halves.exchanges) == 12


def test_nodes_exchange_less_often_than_ranks() -> None:
    circuit = hardware_efficient(32, 10)
    schedule = Schedule.of(circuit, 32, nodes=4)
    between = [step for step in schedule.exchanges if min(step.take) < 2]
    assert len(between) == len(Schedule.of(circuit, 4).exchanges)
    assert len(schedule.exchanges) > len(between)


def test_what_is_free() -> None:
    def exchanges(circuit: Circuit, ranks: int = 8) -> int:
        """Counted from a layout with wires 0 to 2 held, in which nothing may be chosen."""
        return len(Schedule.of(circuit, ranks, start=range(circuit.wires)).exchanges)

    assert exchanges(Circuit(6).rz(0, 0.1).cz(0, 1).t(2).rzz(0, 5, 0.2)) == 0
    assert exchanges(Circuit(6).cnot(0, 5).crx(1, 4, 0.3).pauli_rotation("ZZX", [0, 1, 5], 0.1)) == 0
    assert exchanges(Circuit(6).x(0).y(1).swap(0, 5).iswap(1, 4)) == 0
    assert exchanges(Circuit(6).ry(3, 0.1).ry(4, 0.1).ry(5, 0.1).cnot(0, 1).toffoli(0, 1, 2).cswap(0, 1, 2)) == 0
    assert exchanges(Circuit(6).h(0)) == 1
    assert exchanges(Circuit(6).h(0).h(1).h(2).ry(0, 0.1).cnot(1, 2)) == 1
    assert len(Schedule.of(Circuit(6).h(0).h(1).h(2).h(3).h(4).h(5), 8).exchanges) == 0


def test_refusals() -> None:
    with pytest.raises(UsageError, match="16 ranks would hold 4 wires, but the circuit has 3; use 8 or fewer"):
        Schedule.of(Circuit(3), 16)
    with pytest.raises(UsageError, match="6 ranks: expected a power of two"):
        Schedule.of(Circuit(3), 6)
    with pytest.raises(UsageError, match="no more nodes than ranks"):
        Schedule.of(Circuit(3), 2, nodes=4)
    wide = Circuit(4).unitary(np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0], [0, 1, 2])
    with pytest.raises(
        UsageError, match="unitary mixes 3 of 4 wires, but a rank holds only 2 of them; use at most 2 ranks"
    ):
        Schedule.of(wide, 4)


def test_a_pauli_rotation_wider_than_a_rank_is_taken_apart() -> None:
    circuit = Circuit(5).h(0).t(1).pauli_rotation("XYXYX", range(5), 0.7).ry(2, 0.3)
    got = lockstep.amplitudes(circuit, Schedule.of(circuit, 8))
    np.testing.assert_allclose(got.numpy(), dense.state(circuit), atol=1e-12)


def test_the_forecast_counts_what_the_schedule_does() -> None:
    schedule = Schedule.of(hardware_efficient(32, 10), 32)
    forecast = schedule.describe(torch.complex64)
    shard = 2**27 * 8
    assert forecast.exchanges == 11
    assert forecast.sent == sum(shard - shard // 2 ** len(step.give) for step in schedule.exchanges)
    assert forecast.in_order_sent == 100 * shard // 2
    assert forecast.memory == shard + (64 << 20)
    assert forecast.seconds == pytest.approx(Forecast.of(schedule, torch.complex128).seconds, rel=0.6)
    assert "exchanges    11 (in order: 100)" in str(forecast)
    faster = Forecast.of(schedule, torch.complex64, HostRates(memory=1e12, arithmetic=1e12, link=1e12))
    assert faster.seconds < forecast.seconds / 50


@pytest.mark.parametrize(("wires", "ranks"), [(3, 1), (7, 2), (20, 1), (24, 2)])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_forecast_counts_the_sweeps_of_the_kernel(wires: int, ranks: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    schedule = Schedule.of(hardware_efficient(wires, 4), ranks)
    axes = wires - (ranks.bit_length() - 1)
    made = [
        sum(
            len(Compiled(step.operations, axes, dtype).code.sweeps)
            for step in program.steps
            if isinstance(step, LocalOperations)
        )
        for program in (QuantumProgram.of(schedule, rank) for rank in range(ranks))
    ]
    assert schedule.describe(dtype).sweeps == max(made)


def test_the_inverse_of_an_exchange_is_the_exchange() -> None:
    schedule = Schedule.of(hardware_efficient(8, 2), 4)
    back = schedule.inverse()
    assert (back.start, back.finish) == (schedule.finish, schedule.start)
    forwards = [step for step in schedule.steps if isinstance(step, Exchange)]
    assert [step for step in back.steps if isinstance(step, Exchange)] == forwards[::-1]
    with pytest.raises(UsageError, match="measurements"):
        Schedule.of(Circuit(3).measure(0), 1).inverse()


def test_operations_that_nobody_changes_are_kept_once() -> None:
    circuit = hardware_efficient(8, 2)
    copy = circuit.copy()
    program = QuantumProgram.of(Schedule.of(copy))
    (step,), (segment,) = program.steps, program.schedule.steps
    assert isinstance(step, LocalOperations)
    assert isinstance(segment, CircuitSegment)
    assert step.operations is segment.operations is copy.operations is circuit.operations
    assert len(copy.x(0)) == len(circuit) + 1 == len(step.operations) + 1


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [("before", ctypes.c_size_t * 7), ("used", ctypes.c_size_t), ("after", ctypes.c_size_t * 2)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_a_circuit_made_ready_leaves_little_behind() -> None:
    """glibc keeps freed blocks of up to 1 KiB for the thread that freed them, and counts those as used: pages that
    cannot be given back for a state. A thread of its own has none of them yet."""
    heap = ctypes.CDLL(None).mallinfo2
    heap.restype = HeapInfo

    def make_ready() -> None:
        operations = Schedule.of(hardware_efficient(14, 12)).steps[0].operations  # type: ignore[union-attr]
        assert len(operations) > 400
        assemble(operations, 14, 3)

    def left_behind() -> int:
        gc.collect()
        before = heap().used
        make_ready()
        gc.collect()
        return heap().used - before

    make_ready()  # what is made once and kept
    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(left_behind).result() < 40 << 10  # 80 KiB, as long as lists grew
