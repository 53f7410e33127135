"""The CPU kernel against the readable one: amplitudes and gradients, with tiles so small that every path is taken."""

from __future__ import annotations

import functools
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import NAMES, random_circuit, random_unitary
from unisono.errors import UsageError
from unisono.quantum import Circuit, hardware_efficient, weight
from unisono.quantum.circuit.gates import GATES
from unisono.quantum.circuit.parameter import Affine
from unisono.quantum.compile.compiled import _ROOM, LANE_BITS, Compiled, assemble, narrowed
from unisono.quantum.compile.packed import Packed, arrays_of
from unisono.quantum.gradients.layer_outputs import Expectations
from unisono.quantum.kernels import code, compiling, cpu, reference
from unisono.quantum.kernels.workspace import together
from unisono.quantum.observables.observable import observable
from unisono.quantum.state import State

WEIGHTS, FEATURES = np.array([0.3, -1.1, 2.0, 4.4, -2.9]), np.array([0.7, 0.2])
TOLERANCE = {torch.complex64: 2e-5, torch.complex128: 1e-12}
DTYPES = list(TOLERANCE)


def random_state(bits: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(1 << bits, dtype=torch.complex128, generator=draw)
    return (state / state.norm()).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.to(expected), expected, atol=TOLERANCE[found.dtype], rtol=0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_gate_on_low_and_high_axes_with_controls(name: str, dtype: torch.dtype) -> None:
    bits, kind = 8, GATES[name]
    draw = np.random.default_rng(1)
    for controls in range(3):
        for _ in range(3):
            wires = [int(wire) for wire in draw.permutation(bits)]
            values = {wires[kind.targets + i]: int(draw.integers(2)) for i in range(controls)}
            angles = [float(angle) for angle in draw.uniform(-7, 7, kind.parameters)]
            circuit = Circuit(bits).apply(name, wires[: kind.targets], *angles, controls=values)
            found, expected = random_state(bits, dtype), random_state(bits, torch.complex128)
            Compiled(circuit.operations, bits, dtype, row_bits=4).run(found)
            reference.run(expected, circuit.operations)
            close(found, expected)


@functools.cache
def plainly_run(bits: int, seed: int) -> tuple[Circuit, torch.Tensor]:
    """A random circuit, and what the readable kernel makes of a random state; the same for precisions and threads."""
    circuit, state = random_circuit(bits, 80, seed, weights=5, features=2), random_state(bits, torch.complex128)
    reference.run(state, circuit.operations, WEIGHTS, FEATURES)
    return circuit, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "row_bits", "threads"),  # with rows of 11 bits there is one tile, which one thread does
    [(1, 11, 1), (2, 11, 1), (5, 11, 1), (8, 5, 1), (8, 5, 2), (9, 5, 2), (10, 6, 2), (12, 11, 1)],
    indirect=["threads"],
)
def test_random_circuits(bits: int, row_bits: int, dtype: torch.dtype, threads: int) -> None:
    for seed in range(4):
        circuit, expected = plainly_run(bits, seed)
        found = random_state(bits, dtype)
        Compiled(circuit.operations, bits, dtype, row_bits=row_bits).run(found, WEIGHTS, FEATURES)
        close(found, expected)


@functools.cache
def plainly_reversed(bits: int, seed: int) -> tuple[Circuit, tuple[np.ndarray, np.ndarray], list[torch.Tensor]]:
    """The same for gradients."""
    circuit = random_circuit(bits, 60, seed, weights=5, features=2)
    states = [random_state(bits, torch.complex128, 1), random_state(bits, torch.complex128, 2)]
    return circuit, reference.reverse(*states, circuit.operations, WEIGHTS, FEATURES), states


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "row_bits", "threads"), [(3, 11, 1), (8, 5, 1), (8, 5, 2), (11, 11, 1)], indirect=["threads"]
)
def test_gradients_of_random_circuits(bits: int, row_bits: int, dtype: torch.dtype, threads: int) -> None:
    for seed in range(3):
        circuit, expected, expected_states = plainly_reversed(bits, seed)
        states = [random_state(bits, dtype, 1), random_state(bits, dtype, 2)]
        compiled = Compiled(circuit.operations, bits, dtype, row_bits=row_bits)
        found = compiled.reverse(*states, WEIGHTS, FEATURES)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=50 * TOLERANCE[dtype])
        for mine, theirs in zip(states, expected_states, strict=True):
            close(mine, theirs)


def test_all_kinds_of_instructions_occur() -> None:
    """The circuits above exercise what they claim to."""
    kinds, conditions, flips, transposed, straight = set(), 0, 0, 0, 0
    for seed in range(4):
        circuit = random_circuit(9, 80, seed, weights=5, features=2)
        made = Compiled(circuit.operations, 9, torch.complex64, row_bits=5).code
        kinds |= set(made.ops[:, code.KIND].tolist())
        conditions += int(made.ops[:, code.CONDITION_COUNT].sum())
        flips += int(made.ops[:, code.FLIP_COUNT].sum())
        transposed += int((made.sweeps[:, code.LANES] >= 0).sum())
        straight += int((made.sweeps[:, code.LANES] < 0).sum())
    assert kinds == {code.TURNS, code.PAIR, code.PHASE, code.LANE_PHASE, code.DENSE}
    assert min(conditions, flips, transposed, straight) > 0


def test_wide_words_and_unitaries() -> None:
    bits = 10
    circuit = Circuit(bits).pauli_rotation("XYXXYXZX", range(8), 0.7)
    circuit.unitary(random_unitary(np.random.default_rng(0), 32), (9, 1, 4, 6, 2))
    found, expected = random_state(bits, torch.complex128), random_state(bits, torch.complex128)
    Compiled(circuit.operations, bits, torch.complex128, row_bits=4).run(found)
    reference.run(expected, circuit.operations)
    close(found, expected)


def test_runs_of_gates_need_few_passes() -> None:
    """CNOT, X and SWAP are free, turns run three at a time, all phases of a layer are one pass."""
    circuit = Circuit(8)
    for wire in range(8):
        circuit.ry(wire, weight(0)).rz(wire, weight(1)).rz(wire, 0.5)
    for wire in range(8):
        circuit.cnot(wire, (wire + 1) % 8)
    circuit.swap(0, 3).x(2)
    made = Compiled(circuit.operations, 8, torch.complex128).code
    assert len(made.sweeps) == 2  # 6 rows: four lanes are left alone each time
    assert sorted(made.ops[:, code.KIND]) == [code.TURNS] * 3 + [code.PHASE] * 2


def test_turns_by_every_angle_keep_the_norm() -> None:
    circuit = Circuit(8)
    for number, angle in enumerate([0, np.pi / 2, np.pi, 3 * np.pi / 2, 2 * np.pi, -np.pi, 1e-9, 3.0]):
        circuit.ry(number, Affine(float(angle))).cry(number, (number + 1) % 8, Affine(float(angle)))
    found, expected = random_state(8, torch.complex128), random_state(8, torch.complex128)
    compiled = Compiled(circuit.operations, 8, torch.complex128)
    for _ in range(50):
        compiled.run(found)
        reference.run(expected, circuit.operations)
    close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pauli_words(dtype: torch.dtype, threads: int) -> None:
    draw = np.random.default_rng(0)
    for bits in (1, 4, 12):
        texts = [" ".join(f"{draw.choice([*'IXYZ'])}{wire}" for wire in range(bits)) for _ in range(6)]
        made = [observable({text: float(draw.normal())}) for text in texts]
        made[1] = made[1] + made[0] + 0.5
        state = State(bits, dtype=dtype).set_amplitudes(random_state(bits, dtype))
        state.layout = tuple(int(wire) for wire in draw.permutation(bits))
        vector = state.amplitudes().to(torch.complex128).numpy()
        output = Expectations(made, bits, dtype)
        found = output.read(state).double().numpy()
        weights = draw.normal(size=len(made))
        applied = output.costate(state, torch.empty(0), torch.from_numpy(weights)).local
        if bits < 10:
            expected = [dense.expectation(vector, each) for each in made]
            np.testing.assert_allclose(found, expected, atol=10 * TOLERANCE[dtype])
        overlap = torch.vdot(state.local, applied).real.item()
        np.testing.assert_allclose(overlap, found @ weights, atol=10 * TOLERANCE[dtype])


def test_bad_amplitudes_are_refused() -> None:
    compiled = Compiled(Circuit(3).h(0).operations, 3, torch.complex64)
    with pytest.raises(UsageError, match=r"expected torch\.complex64 \(8,\)"):
        compiled.run(torch.zeros(8, dtype=torch.complex128))
    with pytest.raises(UsageError, match=r"expected torch\.complex64 or torch\.complex128"):
        Compiled((), 3, torch.float32)


def test_a_program_is_small_beside_its_state() -> None:
    """22 wires in complex64 are 32 MiB: what is made on the way to the program counts as well."""
    operations = hardware_efficient(22, depth=10).operations
    Compiled(operations, 22, torch.complex64)  # what is made once is made
    tracemalloc.start()
    try:
        program = Compiled(operations, 22, torch.complex64)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(program.code.rows) < 1 << 13
    assert program.nbytes < 4 << 10  # the kernels read 88 KiB
    assert most < 350 << 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_is_unpacked_as_it_was_assembled(dtype: torch.dtype) -> None:
    for seed in range(4):
        circuit = random_circuit(9, 120, seed, weights=5, features=2)
        narrow = [part for each in circuit.operations for part in narrowed(each)]
        made = assemble(narrow, 9, LANE_BITS[dtype], 5, room=_ROOM // (8 if dtype == torch.complex128 else 4))
        packed = Packed(made)
        assert 2 * packed.nbytes < sum(each.nbytes for each in arrays_of(made))
        found = packed.unpack()
        for mine, theirs in zip(arrays_of(found), arrays_of(made), strict=True):
            np.testing.assert_array_equal(mine, theirs, strict=True)
        assert found.batches == made.batches


def test_programs_take_turns_in_one_workspace() -> None:
    """With the same and with other angles, and copies that came from elsewhere."""
    circuits = [random_circuit(9, 60, seed, weights=5, features=2) for seed in range(3)]
    programs = [Compiled(circuit.operations, 9, torch.complex128) for circuit in circuits]
    programs.append(pickle.loads(pickle.dumps(programs[0])))
    for weights in (WEIGHTS, WEIGHTS, 2 * WEIGHTS):
        for circuit, program in zip([*circuits, circuits[0]], programs, strict=True):
            found, expected = random_state(9, torch.complex128), random_state(9, torch.complex128)
            program.run(found, weights, FEATURES)
            reference.run(expected, circuit.operations, weights, FEATURES)
            close(found, expected)


def test_too_few_weights_are_refused() -> None:
    program = Compiled(Circuit(5).ry(0, weight(3)).operations, 5, torch.complex64)
    with pytest.raises(UsageError, match="read 4 weights, but 3 were given"):
        program.run(random_state(5, torch.complex64), np.zeros(3))


def test_two_callers_do_not_wait_for_each_others_threads() -> None:
    """The calls of a kernel wait for each other; two kernels with half of the threads each would wait for ever."""

    def caller(_: int) -> None:
        for _ in range(60):
            met = Barrier(4)
            together(lambda _, met=met: met.wait(60) and None, 4)  # type: ignore[misc]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    try:
        with ThreadPoolExecutor(4) as callers:
            list(callers.map(caller, range(4)))
    finally:
        sys.setswitchinterval(before)


def test_one_process_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    """Two caches of one kernel, as two processes have them: the lock is the file's, not the process's."""
    saved: dict[str, str] = {}

    class Disk:
        cache_path = str(tmp_path)

        def load_overload(self, signature: str, _: None) -> str | None:
            return saved.get(signature)

        def save_overload(self, signature: str, code: str) -> None:
            saved[signature] = code

    first, second = (compiling.OneCompiles(Disk(), "kernel") for _ in range(2))
    assert first.load_overload("double", None) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.load_overload, "double", None)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        first.save_overload("double", "compiled")
        assert waiting.result(60) == "compiled"
    assert first.load_overload("single", None) is None  # nobody has the lock any more


def test_kernels_on_disk_are_of_these_sources() -> None:
    """numba looks at an entry's own file only: what it calls may have changed."""
    kernel: Any = cpu.forward
    assert compiling._digest() in kernel._cache._cache_file._index_name
