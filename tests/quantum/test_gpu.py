"""The GPU kernel against the readable one: amplitudes and gradients; and what is said where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.quantum.circuits import random_circuit, random_unitary
from unisono.errors import UsageError
from unisono.quantum import Circuit, Layer, State, Z, weight
from unisono.quantum.kernels import code, reference
from unisono.quantum.kernels.gpu import ROW_BITS, GpuCompiled
from unisono.quantum.kernels.pauli_strings_gpu import GpuPauliStrings
from unisono.quantum.kernels.runner import runner
from unisono.quantum.observables.application import applied
from unisono.quantum.observables.expectation import expectations
from unisono.quantum.observables.observable import PauliSum, observable

WEIGHTS, FEATURES = np.array([0.3, -1.1, 2.0, 4.4, -2.9]), np.array([0.7, 0.2])
TOLERANCE = {torch.complex64: 2e-5, torch.complex128: 1e-12}
DTYPES = list(TOLERANCE)
SIZES = [(1, None), (3, None), (9, 5), (10, 6), (10, None), (14, None), (16, None)]
CUDA = torch.device("cuda", 0)

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def random_state(bits: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(1 << bits, dtype=torch.complex128, generator=draw)
    return state / state.norm()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().to(expected), expected, atol=TOLERANCE[found.dtype], rtol=0)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "row_bits"), SIZES)
def test_random_circuits_on_a_gpu(bits: int, row_bits: int | None, dtype: torch.dtype) -> None:
    for seed in range(3):
        circuit = random_circuit(bits, 80, seed, weights=5, features=2)
        found, expected = random_state(bits).to(CUDA, dtype), random_state(bits)
        GpuCompiled(circuit.operations, bits, dtype, CUDA, row_bits=row_bits).run(found, WEIGHTS, FEATURES)
        reference.run(expected, circuit.operations, WEIGHTS, FEATURES)
        check(found, expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "row_bits"), SIZES)
def test_gradients_on_a_gpu(bits: int, row_bits: int | None, dtype: torch.dtype) -> None:
    for seed in range(3):
        circuit = random_circuit(bits, 60, seed, weights=5, features=2)
        expected_states = [random_state(bits, 1), random_state(bits, 2)]
        states = [state.to(CUDA, dtype) for state in expected_states]
        compiled = GpuCompiled(circuit.operations, bits, dtype, CUDA, row_bits=row_bits)
        again = compiled.reverse(*(state.clone() for state in states), WEIGHTS, FEATURES)
        found = compiled.reverse(*states, WEIGHTS, FEATURES)
        expected = reference.reverse(*expected_states, circuit.operations, WEIGHTS, FEATURES)
        for mine, same, theirs in zip(found, again, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=50 * TOLERANCE[dtype])
            np.testing.assert_array_equal(mine, same)  # added up in one order
        for mine, theirs in zip(states, expected_states, strict=True):
            check(mine, theirs)


@gpu
@needs_gpu
def test_a_long_circuit_on_few_wires_stays_in_range() -> None:
    circuit = Circuit(4)
    for number in range(400):
        circuit.h(number % 4).cnot(number % 4, (number + 1) % 4).ry(number % 4, weight(number % 3))
        circuit.ry((number + 1) % 4, np.pi).rz(number % 4, weight(3))
    weights = np.array([np.pi, 1.5, -0.4, 0.3])
    expected_states = [random_state(4, 1), random_state(4, 2)]
    states = [state.to(CUDA, torch.complex64) for state in expected_states]
    found = GpuCompiled(circuit.operations, 4, torch.complex64, CUDA).reverse(states[0], states[1], weights)
    expected = reference.reverse(expected_states[0], expected_states[1], circuit.operations, weights)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-2)
    for mine, theirs in zip(states, expected_states, strict=True):
        torch.testing.assert_close(mine.cpu().to(theirs), theirs, atol=1e-4, rtol=0)


@gpu
@needs_gpu
def test_wide_words_and_unitaries_on_a_gpu() -> None:
    circuit = Circuit(12).pauli_rotation("XYXXYXZX", range(8), 0.7)
    circuit.unitary(random_unitary(np.random.default_rng(0), 32), (9, 1, 4, 6, 2))
    found, expected = random_state(12).to(CUDA), random_state(12)
    GpuCompiled(circuit.operations, 12, torch.complex128, CUDA, row_bits=4).run(found)
    reference.run(expected, circuit.operations)
    check(found, expected)
    widest = Circuit(13).unitary(np.eye(1 << 12), range(12)).operations
    assert isinstance(runner(widest, 13, torch.complex64, CUDA, "auto"), reference.ReferenceRunner)
    with pytest.raises(UsageError, match="at most 11 wires"):
        GpuCompiled(widest, 13, torch.complex64, CUDA)


@gpu
@needs_gpu
def test_the_circuits_above_take_every_path() -> None:
    kinds, conditions, flips = set(), 0, 0
    for seed in range(3):
        circuit = random_circuit(9, 80, seed, weights=5, features=2)
        made = GpuCompiled(circuit.operations, 9, torch.complex64, CUDA, row_bits=5).code
        kinds |= set(made.ops[:, code.KIND].tolist())
        conditions += int(made.ops[:, code.CONDITION_COUNT].sum())
        flips += int(made.ops[:, code.FLIP_COUNT].sum())
    assert kinds == {code.TURNS, code.PAIR, code.PHASE, code.DENSE}
    assert min(conditions, flips) > 0


@gpu
@needs_gpu
def test_a_layer_on_a_gpu_equals_one_on_the_cpu() -> None:
    circuit = Circuit(13)
    for wire in range(13):
        circuit.ry(wire, weight(wire)).rz(wire, weight(13 + wire)).cnot(wire, (wire + 1) % 13)
    assert ROW_BITS[torch.complex128] < 13
    found = []
    for device in ("cpu", "cuda"):
        layer = Layer(circuit, [Z(0), Z(5) @ Z(12)], dtype=torch.complex128, device=device)
        out = layer()
        out.sum().backward()
        assert layer.weights.grad is not None
        found.append((out.detach().cpu(), layer.weights.grad.cpu()))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=0)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_pauli_words_on_a_gpu(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(0)
    for bits in (1, 4, 12):
        made = [
            observable({" ".join(f"{draw.choice([*'IXYZ'])}{wire}" for wire in range(bits)): float(draw.normal())})
            for _ in range(6)
        ]
        made[1] = made[1] + made[0] + 0.5
        layout = [int(wire) for wire in draw.permutation(bits)]
        state = State(bits, dtype=torch.complex128)
        state.local, state.layout = random_state(bits), tuple(layout)
        words = GpuPauliStrings(made, layout)
        there = state.local.to(CUDA, dtype)
        np.testing.assert_allclose(words.values(there), expectations(state, made), atol=10 * TOLERANCE[dtype])
        weights = draw.normal(size=len(made)).tolist()
        expected = applied(state, sum((w * each for w, each in zip(weights, made, strict=True)), PauliSum()))
        check(words.applied(there, weights), expected.local)


@gpu
@needs_gpu
def test_bad_amplitudes_are_refused() -> None:
    compiled = GpuCompiled(Circuit(3).h(0).operations, 3, torch.complex64, CUDA)
    for wrong in (torch.zeros(8, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64, device=CUDA)):
        with pytest.raises(UsageError, match=r"expected torch\.complex64 \(8,\) on cuda:0"):
            compiled.run(wrong)
    with pytest.raises(UsageError, match="contiguous"):
        compiled.run(torch.zeros(16, dtype=torch.complex64, device=CUDA)[::2])


def test_the_gpu_kernel_wants_a_gpu() -> None:
    with pytest.raises(UsageError, match="kernel 'gpu' for a state on cpu"):
        State(3, kernel="gpu").run(Circuit(3).h(0).cnot(0, 1).h(0))
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UsageError, match=r"torch sees .* CUDA GPUs here"):
        State(3, device=missing)
    with pytest.raises(UsageError, match="use device='cpu'"):
        Layer(Circuit(3).h(0), [Z(0)], device=missing)
