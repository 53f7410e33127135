"""PennyLane's operators as gates of unisono.quantum.

A GateSpec has all of an operator but its angles: operators with equal specs share one compiled program, in which angle
number i is weight(i).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pennylane as qml
from pennylane.decomposition import GateSet
from pennylane.ops.op_math import Adjoint, Controlled

from unisono.quantum.circuit.gates import diagonal, gate, pauli_rotation, unitary
from unisono.quantum.circuit.operation import Controls, Operation
from unisono.quantum.circuit.parameter import weight

MOST_MATRIX = 10  # wires of an operator without decomposition that is run as a matrix

_GATES: dict[str, tuple[str, int]] = {  # the gate and how many of the first wires are its controls
    "PauliX": ("x", 0),
    "PauliY": ("y", 0),
    "PauliZ": ("z", 0),
    "Hadamard": ("h", 0),
    "S": ("s", 0),
    "T": ("t", 0),
    "SX": ("sx", 0),
    "SWAP": ("swap", 0),
    "ISWAP": ("iswap", 0),
    "CNOT": ("x", 1),
    "CY": ("y", 1),
    "CZ": ("z", 1),
    "CH": ("h", 1),
    "CSWAP": ("swap", 1),
    "Toffoli": ("x", 2),
    "CCZ": ("z", 2),
    "RX": ("rx", 0),
    "RY": ("ry", 0),
    "RZ": ("rz", 0),
    "PhaseShift": ("p", 0),
    "U1": ("p", 0),
    "U2": ("u2", 0),
    "U3": ("u3", 0),
    "Rot": ("rot", 0),
    "CRX": ("rx", 1),
    "CRY": ("ry", 1),
    "CRZ": ("rz", 1),
    "CRot": ("rot", 1),
    "ControlledPhaseShift": ("p", 1),
    "IsingXX": ("rxx", 0),
    "IsingYY": ("ryy", 0),
    "IsingZZ": ("rzz", 0),
}
_PAULI, _UNITARY, _DIAGONAL = "pauli", "unitary", "diagonal"
_OTHERS = {"Identity", "GlobalPhase", "PauliRot", "MultiRZ", "QubitUnitary", "DiagonalQubitUnitary", "MultiControlledX"}
_NAMES = {*_GATES, *_OTHERS}
GATE_SET = GateSet(
    {*_NAMES, *(f"C({name})" for name in _NAMES), *(f"Adjoint({name})" for name in _NAMES), "ControlledQubitUnitary"},
    name="unisono.qubit",
)


class GateSpec(NamedTuple):
    """`kind` is a gate's name, or one of those above with `data`: a Pauli string, or an array's shape and bytes."""

    kind: str
    targets: tuple[int, ...]
    controls: Controls = ()
    inverse: bool = False
    data: Any = None

    @property
    def is_array(self) -> bool:
        return self.kind in (_UNITARY, _DIAGONAL)


def is_native(op: Any) -> bool:
    """Whether the device runs the operator as it is; the others are decomposed by PennyLane."""
    if op.name in _NAMES:
        return True
    if isinstance(op, Controlled | Adjoint):
        return is_native(op.base)
    return op.has_matrix and not op.has_decomposition and len(op.wires) <= MOST_MATRIX


def is_differentiable(op: Any) -> bool:
    """Whether the adjoint method has derivatives for all trainable parameters of a native operator."""
    return not any(qml.math.requires_grad(data) for data in op.data) or _reads_angles(op)


def batched_parameters(op: Any) -> list[Any]:
    """The parameters that have a value for each sample. (Some operators that PennyLane took from a batch keep its size:
    `batch_size` alone does not tell.)"""
    if getattr(op, "batch_size", None) is None:
        return []
    return [data for data, axes in zip(op.data, op.ndim_params, strict=True) if qml.math.ndim(data) > axes]


def is_batchable(op: Any) -> bool:
    """Whether one program can read a native operator's parameters sample by sample: they are angles, or no batch."""
    return not batched_parameters(op) or _reads_angles(op)


def _reads_angles(op: Any) -> bool:
    """Whether all parameters are angles of a gate, and none is an array or given to a matrix."""
    while isinstance(op, Controlled | Adjoint) and op.name not in _NAMES:
        op = op.base
    return op.name in _NAMES and op.name not in ("QubitUnitary", "DiagonalQubitUnitary")


def spec_of(op: Any, wire_of: Mapping[Any, int] | None) -> GateSpec | None:
    """The spec of a native operator; None for an identity. `wire_of`: the wire of each label; None: its own number."""
    labels = op.wires.labels
    wires = labels if wire_of is None else tuple([wire_of[label] for label in labels])
    if (found := _GATES.get(op.name)) is not None:
        kind, count = found
        if not count:
            return GateSpec(kind, wires)
        return GateSpec(kind, wires[count:], tuple([(wire, 1) for wire in wires[:count]]))
    if op.name == "Identity":
        return None
    if op.name == "GlobalPhase":
        return GateSpec("gphase", (), inverse=True)  # exp(-i angle)
    if op.name == "MultiRZ":
        return GateSpec(_PAULI, wires, data="Z" * len(wires))
    if op.name == "PauliRot":
        pairs = [pair for pair in zip(wires, op.hyperparameters["pauli_word"], strict=True) if pair[1] != "I"]
        return GateSpec(_PAULI, tuple(wire for wire, _ in pairs), data="".join(pauli for _, pauli in pairs))
    if isinstance(op, Controlled):
        return _controlled(op, wire_of)
    if isinstance(op, Adjoint):
        inner = spec_of(op.base, wire_of)
        return None if inner is None else inner._replace(inverse=not inner.inverse)
    if op.name == "DiagonalQubitUnitary":
        return GateSpec(_DIAGONAL, wires, data=_bytes(op.data[0]))
    matrix = op.data[0] if op.name == "QubitUnitary" and not _is_sparse(op.data[0]) else op.matrix()
    return GateSpec(_UNITARY, wires, data=_bytes(matrix))


def _controlled(op: Any, wire_of: Mapping[Any, int] | None) -> GateSpec | None:
    inner = spec_of(op.base, wire_of)
    if inner is None:
        return None
    wires = [label if wire_of is None else wire_of[label] for label in op.control_wires]
    controls = tuple((wire, int(value)) for wire, value in zip(wires, op.control_values, strict=True))
    return inner._replace(controls=(*controls, *inner.controls))


def operation_of(spec: GateSpec, first: int) -> Operation:
    """The operation whose angles are weight(first), weight(first + 1), ..."""
    if spec.kind == _PAULI and not spec.data:  # a rotation about the identity
        made = Operation(gate("gphase"), (), spec.controls, (-0.5 * weight(first),))
    else:
        kind = _gate(spec)
        angles = tuple(weight(first + number) for number in range(kind.parameters))
        made = Operation(kind, spec.targets, spec.controls, angles)
    return made.inverse() if spec.inverse else made


def _gate(spec: GateSpec) -> Any:
    if spec.kind == _PAULI:
        return pauli_rotation(spec.data)
    if not spec.is_array:
        return gate(spec.kind)
    shape, raw = spec.data
    array = np.frombuffer(raw, dtype=np.complex128).reshape(shape)
    return unitary(array) if spec.kind == _UNITARY else diagonal(array)


def _bytes(array: Any) -> tuple[tuple[int, ...], bytes]:
    numbers = np.ascontiguousarray(qml.math.toarray(array), dtype=np.complex128)
    return numbers.shape, numbers.tobytes()


def _is_sparse(matrix: Any) -> bool:
    return hasattr(matrix, "todense")
