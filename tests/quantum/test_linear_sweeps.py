"""Programs in linear sweeps, as the GPU kernel runs them, interpreted by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.quantum_gpu import hardware_efficient
from tests.quantum.circuits import random_circuit
from unisono.quantum import Circuit
from unisono.quantum.compile.assembly import Code
from unisono.quantum.compile.compiled import assemble_linear, narrowed, sweeps
from unisono.quantum.compile.frame import odd
from unisono.quantum.kernels import code as fields
from unisono.quantum.kernels import reference
from unisono.quantum.kernels.gpu_program import GpuProgram, Scaling

WEIGHTS, FEATURES = np.array([0.3, -1.1, 2.0, 4.4, -2.9]), np.array([0.7, 0.2])


class Interpreter:
    def __init__(self, code: Code, weights: NDArray, features: NDArray) -> None:
        self.code, self.angles = code, code.angles.values(weights, features)
        self.tables = code.tables(self.angles)
        self.constants = {begin: code.constants[at : at + size] for begin, at, size in code.constant_places.tolist()}

    def run(self, state: NDArray[np.complex128]) -> None:
        code = self.code
        for sweep in code.sweeps.tolist():
            count = 1 << sweep[fields.ROW_BITS]
            places = code.places[sweep[fields.PLACES] :][:count] >> 1
            start, order = (code.rows[sweep[field] :][:count] for field in (fields.START, fields.ORDER))
            bits = (code.places[sweep[fields.OUTSIDE] :][: sweep[fields.OUTSIDE_BITS]] >> 1).tolist()
            for number in range(1 << len(bits)):
                at = sum(bit for k, bit in enumerate(bits) if number >> k & 1) ^ places
                tile = np.empty(count, dtype=complex)
                tile[start] = state[at]
                for op in code.ops[sweep[fields.FIRST] : sweep[fields.LAST]].tolist():
                    pairs = code.pairs[op[fields.CONDITIONS] :][: op[fields.CONDITION_COUNT]].tolist()
                    if all(odd(mask & (number | fields.ONE)) == value for mask, value in pairs):
                        self.instruction(tile, op, self.shift(op[fields.FLIPS], op[fields.FLIP_COUNT], number))
                shift = self.shift(sweep[fields.SWEEP_FLIPS], sweep[fields.SWEEP_FLIP_COUNT], number)
                state[at] = tile[order ^ shift]

    def shift(self, begin: int, count: int, number: int) -> int:
        shift = 0
        for outside, mask in self.code.pairs[begin : begin + count].tolist():
            shift ^= mask if odd(outside & (number | fields.ONE)) else 0
        return shift

    def instruction(self, tile: NDArray[np.complex128], op: list[int], shift: int) -> None:
        rows = self.code.rows[op[fields.ROWS] :][: op[fields.ROW_COUNT]] ^ shift
        if op[fields.KIND] == fields.PHASE:
            tile *= np.exp(1j * self.phase(op))[np.arange(len(tile)) ^ shift]
        elif op[fields.KIND] == fields.DENSE:
            size = 1 << op[fields.COUNT]
            entries = self.constants[op[fields.VALUES]][1:]
            at = rows[:, None] ^ self.code.rows[op[fields.ROWS] - size : op[fields.ROWS]]
            tile[at] = tile[at] @ (entries[::2] + 1j * entries[1::2]).reshape(size, size).T
        else:
            masks = op[fields.MASK0 : fields.MASK0 + op[fields.COUNT]]
            for number, mask in enumerate(masks):
                low = rows
                for other in masks[:number] + masks[number + 1 :]:
                    low = np.concatenate([low, low ^ other])
                half = self.angles[op[fields.SLOT] + number] / 2
                a, b = tile[low], tile[low ^ mask]
                tile[low], tile[low ^ mask] = np.cos(half) * a - np.sin(half) * b, np.cos(half) * b + np.sin(half) * a

    def phase(self, op: list[int]) -> NDArray[np.float64]:
        rows = np.arange(op[fields.ROW_COUNT])
        angle, at = np.zeros(len(rows)), op[fields.ROWS]
        for _ in range(op[fields.COUNT]):
            size, table, _, _, guards, _, *parities = self.code.terms[at : at + self.code.terms[at]].tolist()
            read = [(np.bitwise_count(rows & parities[k]) & 1) ^ parities[k + 2] for k in range(0, len(parities), 3)]
            index = np.zeros(len(rows), dtype=np.int64)
            for bit in read[guards:]:
                index = index << 1 | bit
            angle += np.where(np.any(read[:guards], axis=0) if guards else False, 0.0, self.tables[table + index])
            at += size
        return angle


@pytest.mark.parametrize(("bits", "row_bits"), [(1, 4), (3, 5), (5, 5), (6, 4), (7, 5), (9, 5), (8, 6)])
def test_random_circuits(bits: int, row_bits: int) -> None:
    for seed in range(3):
        circuit = random_circuit(bits, 80, seed, weights=5, features=2)
        operations = [part for each in circuit.operations for part in narrowed(each)]
        code = assemble_linear(operations, bits, row_bits, near=2, banks=2, together=4)
        draw = torch.Generator().manual_seed(seed)
        found = torch.randn(1 << bits, dtype=torch.complex128, generator=draw)
        expected = found.clone()
        Interpreter(code, WEIGHTS, FEATURES).run(found.numpy())
        reference.run(expected, circuit.operations, WEIGHTS, FEATURES)
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_an_ansatz_takes_two_thirds_of_the_sweeps_at_most() -> None:
    operations = hardware_efficient(28, 10).operations
    plain, _, _ = sweeps(operations, 28, lane_bits=0, row_bits=12, near=4)
    linear = assemble_linear(operations, 28, 12, near=4, banks=4, together=4)
    assert len(linear.sweeps) <= 2 / 3 * len(plain)


def test_what_a_kernel_leaves_out_stays_in_range() -> None:
    circuit = Circuit(4)
    for number in range(400):
        circuit.h(number % 4).cnot(number % 4, (number + 1) % 4).ry(number % 4, 0.1)
    code = assemble_linear(circuit.operations, 4, 12, near=4, banks=4, together=4)
    scaling = Scaling(code)
    half = code.angles.values(np.zeros(0), np.zeros(0))[: code.turns] / 2
    for angles in (half, np.full(code.turns, np.pi / 4), np.full(code.turns, np.pi / 2), np.full(code.turns, 1.5)):
        cosine, sine = np.cos(angles), np.sin(angles)
        scales, _ = scaling.factors(np.where(scaling.swapped(cosine, sine), sine, cosine), copies=0)
        assert np.abs(np.log2(np.abs(scales))).max() <= 40


def test_phases_of_a_pass_are_factors_of_threads_and_registers() -> None:
    """The ansatz' phases need few tables of whole tiles, which are slow to read."""
    made = GpuProgram(assemble_linear(hardware_efficient(20, 6).operations, 20, 12, 4, 4, 4), 4, 8)
    phases = made.ops[made.ops[:, fields.KIND] == fields.PHASE]
    of_threads, of_registers, of_rows = (phases[:, fields.MASK0 + kind] >= 0 for kind in range(3))
    assert np.all(of_threads | of_registers | of_rows)
    assert of_rows.sum() <= len(phases) / 4
