"""Many ranks, one state: random circuits give the amplitudes that one dense vector gives."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.distributed import shared_memory as staging
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.distributed.local_steps import LocalExchange, LocalOperations
from unisono.quantum.distributed.memory import zeros
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.distributed.rank_groups import share
from unisono.quantum.state import NormError, State

Pools = Callable[[str, int], RankPool]
SIZES = [("none", 1), ("gloo", 2), ("gloo", 4), ("gloo", 8), ("mpi", 2), ("mpi", 4)]
WEIGHTS, FEATURES = (0.3, -1.1, 2.0), (0.7, 0.2)


def run_random(comm: Any, n: int, gates: int, seeds: list[int], kernel: str) -> list[tuple[np.ndarray, int]]:
    found = []
    for seed in seeds:
        if comm is not None and seed % 2:
            staging._kept[comm] = None  # messages, as between hosts
        elif comm is not None:
            staging._kept.pop(comm, None)
        circuit = random_circuit(n, gates, seed, weights=3, features=2)
        state = State(n, comm, chunk=64 * (seed % 5 + 1), kernel=kernel)  # buffers of a few amplitudes: many pieces
        schedule = state.schedule(circuit)
        found.append((state.run(schedule, WEIGHTS, FEATURES).amplitudes().numpy(), len(schedule.exchanges)))
    return found


@functools.cache
def dense_random(n: int, gates: int, seed: int) -> np.ndarray:
    return dense.state(random_circuit(n, gates, seed, weights=3, features=2), WEIGHTS, FEATURES)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("backend", "size"), SIZES)
def test_random_circuits_equal_the_dense_reference(pools: Pools, backend: str, size: int) -> None:
    seeds = list(range(4))  # two of them with blocks in shared memory, two with messages
    n, gates = 7, 60
    kernel = "cpu" if (backend, size) == ("gloo", 2) else "reference"
    given = (n, gates, seeds, kernel)
    answers = pools(backend, size).run(run_random, *given) if size > 1 else [run_random(None, *given)]
    exchanges = 0
    for seed in seeds:
        expected = dense_random(n, gates, seed)
        for answer in answers:
            np.testing.assert_allclose(answer[seed][0], expected, atol=1e-12)
        exchanges += answers[0][seed][1]
    assert (exchanges > 0) == (size > 1)


def run_in_two_parts(comm: Any, seed: int) -> np.ndarray:
    state = State(6, comm, kernel="reference")
    state.run(random_circuit(6, 25, seed)).run(random_circuit(6, 25, seed + 1))
    return state.amplitudes().numpy()


def test_a_second_circuit_goes_on_from_the_first(pools: Pools) -> None:
    for seed in range(20, 26, 2):
        expected = dense.state(random_circuit(6, 25, seed) + random_circuit(6, 25, seed + 1))
        for answer in pools("gloo", 4).run(run_in_two_parts, seed):
            np.testing.assert_allclose(answer, expected, atol=1e-12)


def there_and_back(comm: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse schedule, and the walk of the adjoint: the same program backwards, each operation undone."""
    circuit = random_circuit(6, 40, seed)
    vector = random_vector(6, seed)
    state = State(6, comm, kernel="reference").set_amplitudes(vector)
    schedule = state.schedule(circuit)
    inverted = state.like(state.local.clone())
    inverted.run(schedule).run(schedule.inverse())
    walked = state.like(state.local.clone())
    program = QuantumProgram.of(schedule, walked.rank)
    for step in program.steps:
        walked.do(step)
    for step in reversed(program.steps):
        assert isinstance(step, LocalOperations | LocalExchange)
        undone = (
            LocalOperations(tuple(o.inverse() for o in reversed(step.operations)))
            if isinstance(step, LocalOperations)
            else step
        )
        walked.do(undone)
    return inverted.amplitudes().numpy(), walked.amplitudes().numpy()


def random_vector(n: int, seed: int) -> torch.Tensor:
    vector = torch.randn(2**n, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))
    return vector / torch.linalg.vector_norm(vector)


def test_a_schedule_can_be_undone(pools: Pools) -> None:
    for seed in range(30, 32):
        for inverted, walked in [there_and_back(None, seed), *pools("gloo", 4).run(there_and_back, seed)]:
            np.testing.assert_allclose(inverted, random_vector(6, seed).numpy(), atol=1e-12)
            np.testing.assert_allclose(walked, random_vector(6, seed).numpy(), atol=1e-12)


def measured_circuit() -> Circuit:
    circuit = Circuit(5, bits=4)
    for wire in range(5):
        circuit.ry(wire, 0.4 + 0.3 * wire)
    circuit.cnot_ring().measure(0, 0).measure(4, 1)
    circuit.apply("x", 1, condition={0: 1}).apply("rz", 0, 0.7, condition={1: 1}).apply("ry", 4, 1.3, condition={1: 0})
    return circuit.cnot_line().reset(2).rx(2, 0.4).measure(2, 2).reset(0).cnot(3, 0).measure(3, 3)


def run_measured(comm: Any, seeds: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
    states = [State(5, comm, seed=seed, kernel="reference").run(measured_circuit()) for seed in range(seeds)]
    return [(tuple(state.bits.get(bit, 0) for bit in range(4)), state.amplitudes().numpy()) for state in states]


def test_measurements_and_resets_follow_a_branch_of_the_reference(pools: Pools) -> None:
    branches = {bits: [] for _, bits, _ in dense.branches(measured_circuit())}
    for _, bits, vector in dense.branches(measured_circuit()):
        branches[bits].append(vector)
    seen = set()
    answers = pools("gloo", 4).run(run_measured, 6)
    for seed, (bits, vector) in enumerate(run_measured(None, 6)):
        seen.add(bits)
        assert any(np.abs(vector - each).max() < 1e-12 for each in branches[bits])
        for answer in answers:
            assert answer[seed][0] == bits
            np.testing.assert_allclose(answer[seed][1], vector, atol=1e-12)
    assert len(seen) > 1


def damage(comm: Any) -> str:
    state = State(6, comm, kernel="reference")
    program = QuantumProgram.of(state.schedule(Circuit(6).qft().qft()), state.rank)
    state.begin(program.schedule)
    try:
        for step in program.steps:
            state.do(step)
            state.local *= 1.01
    except NormError as error:
        return str(error)
    return "no error"


def test_a_norm_that_drifts_is_an_error(pools: Pools) -> None:
    for message in pools("gloo", 2).run(damage):
        assert "after an exchange the norm is" in message


def wait_for_partners(comm: Any) -> tuple[np.ndarray, str]:
    """One rank comes late; then each waits for a meeting that never comes, with a partner that has ended."""
    staging._kept.pop(comm, None)
    shared = staging.staging(comm, 1 << 12)
    assert shared is not None
    if comm.rank:
        time.sleep(0.2)
    vector = State(7, comm, kernel="reference").run(random_circuit(7, 40, 2)).amplitudes().numpy()
    ended = subprocess.Popen(["true"])
    ended.wait()
    shared._pids = [ended.pid] * comm.size
    with pytest.raises(RuntimeError) as raised:
        shared._wait(1 - comm.rank, 1 << 40)
    return vector, str(raised.value)


def test_ranks_of_a_host_wait_for_each_other_as_long_as_they_live(pools: Pools) -> None:
    for rank, (vector, output) in enumerate(pools("gloo", 2).run(wait_for_partners)):
        np.testing.assert_allclose(vector, dense.state(random_circuit(7, 40, 2)), atol=1e-12)
        assert output == f"rank {1 - rank} has ended"


def test_large_arrays_are_zero_and_full_pages() -> None:
    for count in (3, 1 << 19, (1 << 19) + 5):
        made = zeros(count, torch.complex128, torch.device("cpu"))
        assert made.shape == (count,)
        assert not made.any()
        made += 1
        assert made.sum() == count
        assert count < 9 or made.data_ptr() % (2 << 20) == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_a_large_array_takes_the_place_of_heap_that_was_freed() -> None:
    blocks = [bytes([1]) * (1 << 15) for _ in range(256)]  # 8 MiB
    pin = blocks.pop()  # the heap's end, without which the C library gives back all that is free
    blocks.clear()
    before = anonymous_memory()
    made = zeros(1 << 19, torch.complex64, torch.device("cpu"))
    assert anonymous_memory() < before - (6 << 20)
    made += 1
    assert anonymous_memory() < before
    del pin


def anonymous_memory() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_a_state_that_does_not_fit_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        UsageError, match=r"a state of 45 wires in complex64 needs 256.0 TiB .* (\d+) ranks with as much"
    ):
        State(45, dtype=torch.complex64)
    with pytest.raises(UsageError, match=r"expected torch\.complex64 or torch\.complex128"):
        State(3, dtype=torch.float32)


def surplus(comm: Any, batch: int) -> tuple[int, int, int, str]:
    found = share(comm, 10, batch=batch)
    if found.group >= 0:
        State(10, found.comm, kernel="reference").run(Circuit(10).qft())
    return found.global_qubits, found.groups, found.group, found.note


@pytest.mark.filterwarnings("ignore:.*ranks")
def test_a_number_of_ranks_that_is_no_power_of_two(pools: Pools) -> None:
    answers = pools("gloo", 3).run(surplus, 1)
    assert [group for _, _, group, _ in answers] == [0, 0, -1]
    assert all("2 of 3 ranks share the state" in note for _, _, _, note in answers)
    answers = pools("gloo", 3).run(surplus, 8)
    assert [(held, groups, group) for held, groups, group, _ in answers] == [(0, 3, 0), (0, 3, 1), (0, 3, 2)]


def test_permutations_of_held_bits_move_no_amplitude() -> None:
    index_map = GlobalIndexMap(3)
    circuit = Circuit(3).x(0).cnot(0, 2).toffoli(0, 2, 1).cswap(1, 0, 2)
    expected = dense.unitary(circuit).real.argmax(axis=0)
    assert index_map.restrict(circuit.operations, 5) == []
    np.testing.assert_array_equal(index_map.table, expected)


def test_a_schedule_from_another_layout_is_refused() -> None:
    state = State(3).run(Circuit(3).swap(0, 1))
    with pytest.raises(UsageError, match="begins with another layout"):
        state.run(State(3).schedule(Circuit(3).h(0)))
