"""A density matrix sharded over ranks: exact simulation of circuits with noise.

    rho = DensityState(10, comm).run(circuit, weights)
    rho.expectations(["Z0 Z1", "X2"])      rho.purity()      rho.samples(1000, readout=0.02)

The matrix of n wires is the state vector of 2n wires that `doubled` circuits act on: `rho.vector`. What is read off it
needs entries whose row and column differ in few bits, which ranks find among their own: only sums are communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import MOST, Circuit, require_circuit
from unisono.quantum.circuit.gates import PAULIS
from unisono.quantum.circuit.parameter import is_index, require_seed
from unisono.quantum.noise.doubled import doubled
from unisono.quantum.noise.readout import confused, flipped, readout_errors
from unisono.quantum.observables.observable import PauliString, observables
from unisono.quantum.outputs import checked_wires, require_shots, shard
from unisono.quantum.state import NORM_TOLERANCE, State, full_vector, sampled

MOST_MATRIX = 13  # wires of a matrix that every rank has (1 GiB at 13)
MOST_TABLE = 26


class DensityState:
    """The density matrix of `wires` wires, 4^wires numbers over the ranks of `comm`, a power of two; at first |0...0>.

    The options are those of State. All ranks call every method alike and get the same answer."""

    def __init__(self, wires: int, comm: Communicator | None = None, **options: Any) -> None:
        if not is_index(wires) or not 1 <= wires <= MOST // 2:
            raise UsageError(f"DensityState({wires!r}): expected a number of wires of 1 or more")
        self.wires = int(wires)
        self.vector = State(2 * self.wires, comm, **options)

    @classmethod
    def of_vector(cls, vector: State) -> DensityState:
        """The density matrix of a state vector of twice as many wires, which `doubled` circuits have made."""
        made = cls.__new__(cls)
        made.wires, made.vector = vector.wires // 2, vector
        return made

    def run(self, circuit: Circuit, weights: Any = (), features: Any = ()) -> DensityState:
        """Run a circuit. Channels act exactly; a measurement removes coherences: its outcome is not looked at."""
        if require_circuit(circuit, "run").wires != self.wires:
            raise UsageError(f"a circuit of {circuit.wires} wires for a density matrix of {self.wires}")
        weights, features = circuit.check_values(weights, features)
        both = doubled(circuit.with_strengths(weights, features))
        self.vector.run(both, weights[: both.weights], features[: both.features])
        return self

    def set_matrix(self, matrix: Any) -> DensityState:
        """Begin with this density matrix, (2^wires, 2^wires), given alike on every rank."""
        size = 1 << self.wires
        try:
            given = torch.as_tensor(matrix).to(torch.complex128)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"set_matrix: expected ({size}, {size}) numbers ({error})") from None
        if given.shape != (size, size):
            raise UsageError(f"density matrix of shape {tuple(given.shape)}: expected ({size}, {size})")
        apart, trace = float((given - given.mH).abs().max()), complex(given.trace())
        if not apart <= NORM_TOLERANCE or not abs(trace - 1) <= NORM_TOLERANCE:
            raise UsageError(
                f"density matrix of trace {trace.real:.6g} that differs from its adjoint by {apart:.3g}: expected a "
                "Hermitian matrix of trace 1"
            )
        self.vector.load_amplitudes(given.reshape(-1))
        return self

    # ---- looking ------------------------------------------------------------------------------------------------

    def expectations(self, of: Any) -> torch.Tensor:
        """tr(O rho) of each observable (or of one), float64."""
        sums = [each.check(self.wires).paulis().terms for each in observables(of)]
        strings = sorted({pauli_string for terms in sums for _, pauli_string in terms})
        values = torch.tensor([self._pauli(each) for each in strings], dtype=torch.float64, device=self.vector.device)
        value_of = dict(zip(strings, self.vector.total(values).tolist(), strict=True))
        found = [sum(coefficient * value_of[each] for coefficient, each in terms) for terms in sums]
        return torch.tensor(found, dtype=torch.float64)

    def probabilities(self, wires: Sequence[int] | int | None = None, *, readout: Any = None) -> torch.Tensor:
        """The probability of each reading of these wires (default: all), float64, the first wire most significant.

        `readout`: the probability that a wire is read wrongly, a pair (of 0 as 1, of 1 as 0), or a mapping from wires
        to either."""
        chosen = checked_wires(self.wires, wires, MOST_TABLE)
        errors = readout_errors(readout, self.wires, "wire")
        table = self.vector.total(self._diagonal(chosen)).cpu().clamp(min=0)
        return confused(table, None if errors is None else errors[list(chosen)])

    def samples(
        self, shots: int, *, seed: int = 0, wires: Sequence[int] | None = None, readout: Any = None
    ) -> torch.Tensor:
        """`shots` readings of these wires (default: all), uint8, (shots, wires). The state is not changed."""
        shots, draws = require_shots(shots), np.random.default_rng(require_seed(seed))
        errors = readout_errors(readout, self.wires, "wire")
        chosen = checked_wires(self.wires, wires, MOST_TABLE)
        picks = self.vector.agreed(sampled(self.probabilities(chosen).numpy(), draws.random(shots)))
        places = np.arange(len(chosen) - 1, -1, -1)
        bits = torch.from_numpy((picks[:, None] >> places & 1).astype(np.uint8))
        return flipped(bits, None if errors is None else errors[list(chosen)], [draws])

    def purity(self) -> float:
        """tr(rho^2): 1 for a pure state, 2^-wires for the maximally mixed one."""
        return self.vector.norm() ** 2

    def trace(self) -> float:
        return float(self.expectations({"I": 1.0})[0])

    def partial_trace(self, keep: Sequence[int] | int) -> torch.Tensor:
        """The reduced density matrix of the wires that are kept, complex128, the first most significant."""
        chosen = checked_wires(self.wires, keep, MOST_MATRIX)
        total = torch.view_as_real(self._reduced(chosen))
        return torch.view_as_complex(self.vector.total(total.contiguous())).cpu()

    def matrix(self) -> torch.Tensor:
        """The density matrix, complex128, on every rank: for few wires."""
        return self.partial_trace(range(self.wires))

    def fidelity(self, pure: State | torch.Tensor | np.ndarray) -> float:
        """<psi|rho|psi> with a pure state: all its amplitudes of norm one, or a State on these ranks."""
        if isinstance(pure, State) and pure.wires != self.wires:
            raise UsageError(f"fidelity with a state of {pure.wires} wires: expected {self.wires}")
        given = pure.amplitudes() if isinstance(pure, State) else full_vector(pure, self.wires)
        psi = given.to(self.vector.device, torch.complex128)
        norm = float(torch.linalg.vector_norm(psi))
        if not abs(norm - 1) <= NORM_TOLERANCE:
            raise UsageError(f"fidelity with amplitudes of norm {norm:.6g}: expected 1; divide them by their norm")
        size = 1 << self.wires
        if 1 << self.vector.global_qubits > size:
            raise UsageError(f"fidelity on {1 << self.vector.global_qubits} ranks: expected at most 2^{self.wires}")
        rows = shard(self.vector).to(torch.complex128).view(-1, size)  # this rank's rows, in order
        first = self.vector.rank * len(rows)
        return float(self.vector.total(torch.vdot(psi[first : first + len(rows)], rows @ psi).real.clone()))

    def __repr__(self) -> str:
        return f"DensityState({self.wires} wires on {1 << self.vector.global_qubits} ranks)"

    # ---- inside -------------------------------------------------------------------------------------------------

    def _pauli(self, pauli_string: PauliString) -> float:
        """This rank's part of tr(P rho), the sum of P[column, row] rho[row, column]."""
        pauli_of = dict(pauli_string)
        factors: list[tuple[complex, complex]] = []
        strides, offset, factor = [], 0, complex(1)
        for wire in range(self.wires):
            matrix = PAULIS[pauli_of.get(wire, "I")]
            at = [(row, column, matrix[column, row]) for row, column in np.argwhere(matrix.T)]
            row_stride, row_bit = self._stride(wire)
            column_stride, column_bit = self._stride(self.wires + wire)
            at = [each for each in at if row_bit in (None, each[0]) and column_bit in (None, each[1])]
            if not at:
                return 0.0
            places = sorted((int(r) * row_stride + int(c) * column_stride, complex(value)) for r, c, value in at)
            offset += places[0][0]
            if len(places) == 1:
                factor *= places[0][1]
            else:
                strides.append(places[1][0] - places[0][0])
                factors.append((places[0][1], places[1][1]))
        entries = self.vector.local.as_strided((2,) * len(strides), strides, offset).to(torch.complex128)
        for low, high in factors:
            entries = entries[0] * low + entries[1] * high
        return (factor * complex(entries)).real

    def _diagonal(self, chosen: Sequence[int]) -> torch.Tensor:
        """This rank's part of the diagonal of the reduced density matrix, float64."""
        out = torch.zeros((2,) * len(chosen), dtype=torch.float64, device=self.vector.device)
        if (found := self._equal(range(self.wires))) is None:
            return out.view(-1)
        offset, stride_of, bit_of = found
        free = list(stride_of)
        entries = self.vector.local.as_strided((2,) * len(free), list(stride_of.values()), offset).real.double()
        if summed := [axis for axis, wire in enumerate(free) if wire not in chosen]:
            entries = entries.sum(summed)
        kept = [wire for wire in free if wire in chosen]
        index = tuple(bit_of.get(wire, slice(None)) for wire in chosen)
        out[index] = entries.permute([kept.index(wire) for wire in chosen if wire in kept])
        return out.view(-1)

    def _reduced(self, chosen: Sequence[int]) -> torch.Tensor:
        """This rank's part of the reduced density matrix, complex128."""
        out = torch.zeros((2,) * (2 * len(chosen)), dtype=torch.complex128, device=self.vector.device)
        if (found := self._equal([wire for wire in range(self.wires) if wire not in chosen])) is not None:
            offset, stride_of, _ = found
            places = [self._stride(wire) for wire in (*chosen, *[self.wires + wire for wire in chosen])]
            strides = [stride for stride, bit in places if bit is None]
            summed = range(len(strides), len(strides) + len(stride_of))
            strides += stride_of.values()
            entries = self.vector.local.as_strided((2,) * len(strides), strides, offset).to(torch.complex128)
            index = tuple(slice(None) if bit is None else bit for _, bit in places)
            out[index] = entries.sum([*summed]) if summed else entries
        return out.view((1 << len(chosen),) * 2)

    def _equal(self, wires: Iterable[int]) -> tuple[int, dict[int, int], dict[int, int]] | None:
        """The entries whose row and column agree on these wires: their offset in the local array, the stride of each
        wire that is free, and the bit of each that is not; None where this rank has no such entry."""
        offset = 0
        stride_of: dict[int, int] = {}
        bit_of: dict[int, int] = {}
        for wire in wires:
            (row, row_bit), (column, column_bit) = self._stride(wire), self._stride(self.wires + wire)
            bits = {row_bit, column_bit} - {None}
            if len(bits) == 2:
                return None
            if bits:
                bit_of[wire] = bit = int(row_bit if row_bit is not None else column_bit or 0)
                offset += bit * (row + column)
            else:
                stride_of[wire] = row + column
        return offset, stride_of, bit_of

    def _stride(self, wire: int) -> tuple[int, int | None]:
        """The stride of a wire of the vector in the local array, or 0 and this rank's bit of a global qubit."""
        axis = self.vector.axis(wire)
        if axis is None:
            return 0, self.vector.value(wire)
        return 1 << (self.vector.wires - self.vector.global_qubits - 1 - axis), None
