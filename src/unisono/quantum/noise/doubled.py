"""The circuit that acts on a density matrix as a vector of 2n wires.

Wire w is wire w's bit of the row index, and wire n + w its bit of the column index. A gate U becomes U on the first and
conj(U) on the second; a channel on k wires becomes its superoperator, a matrix on 2k wires. So the
scheduler, the exchanges and the kernels are those of state vectors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from unisono.errors import UsageError
from unisono.quantum.circuit.channels import RESET, Channel, kraus, phase_flip
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import ArrayGate, Gate, Parameters, PauliRotation, diagonal, gate, unitary
from unisono.quantum.circuit.operation import Operation

_REAL = {"id", "x", "z", "h", "swap", "ry"}
_SIGNS = {"u2": (-1, -1), "u3": (1, -1, -1), "rot": (-1, 1, -1)}


def doubled(circuit: Circuit) -> Circuit:
    """A measurement whose outcome nobody asks for removes coherences; conditions are refused."""
    made = Circuit(2 * circuit.wires)
    for each in circuit.operations:
        if each.condition:
            raise UsageError(
                f"{each} depends on a measured bit: a density matrix has no bits; use uq.measured or uq.trajectories"
            )
        columns = {wire: circuit.wires + wire for wire in range(circuit.wires)}
        if channel := _channel_of(each):
            wires = (*each.targets, *[columns[wire] for wire in each.targets])
            made.append(Operation(channel.superoperator(), wires, parameters=each.parameters))
        elif each.gate.unitary and not (each.name == "gphase" and not each.controls):
            made.append(each)
            made.append(conjugate(each).on(columns))
    return made


def conjugate(operation: Operation) -> Operation:
    """The operation whose matrix is the complex conjugate."""
    kind, parameters = _conjugate(operation.gate, operation.parameters)
    return replace(operation, gate=kind, parameters=parameters)


def _conjugate(kind: Gate, parameters: Parameters) -> tuple[Gate, Parameters]:
    if isinstance(kind, ArrayGate):
        make = unitary if kind.array.ndim == 2 else diagonal
        return make(kind.array.conj()), ()
    if isinstance(kind, PauliRotation):  # real for an odd number of Y, else symmetric
        return (kind, parameters) if kind.paulis.count("Y") % 2 else kind.inverse(parameters)
    if kind.name in _REAL:
        return kind, parameters
    if kind.name in _SIGNS:
        return kind, tuple(sign * angle for sign, angle in zip(_SIGNS[kind.name], parameters, strict=True))
    if kind.name == "y":
        return unitary(gate("y").matrix().conj()), ()
    return kind.inverse(parameters)  # of a symmetric matrix the inverse is the conjugate


def _channel_of(operation: Operation) -> Channel | None:
    if isinstance(operation.gate, Channel):
        return operation.gate
    if operation.name == "measure":
        return phase_flip(0.5)
    return kraus([np.array(each) for each in RESET]) if operation.name == "reset" else None
