"""Gradients by running the circuit again: the parameter-shift rule, and finite differences. For small circuits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.operation import Operation

Evaluate = Callable[[Circuit, np.ndarray, np.ndarray], float]  # a function of the state that the circuit makes
STEP = 1e-6  # of finite differences


def shift_rule(frequencies: tuple[float, ...]) -> list[tuple[float, float]]:
    """(shift s, coefficient c) pairs, f'(0) = sum of c (f(s) - f(-s)), exact for functions of these frequencies."""
    count = len(frequencies)
    shifts = [(k + 1) * math.pi / ((count + 1) * max(frequencies)) for k in range(count)]
    sines = np.array([[2 * math.sin(frequency * shift) for shift in shifts] for frequency in frequencies])
    return list(zip(shifts, np.linalg.solve(sines, frequencies).tolist(), strict=True))


def parameter_shift(
    circuit: Circuit, evaluate: Evaluate, weights: np.ndarray, features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each angle of each operation is shifted by itself; weights and features share the sums."""
    found = np.zeros(len(weights)), np.zeros(len(features))
    operations = circuit.operations
    for number, operation in enumerate(operations):
        for which, parameter in enumerate(operation.parameters):
            if parameter.is_constant or not (frequencies := operation.frequencies(which)):
                continue
            slope = 0.0
            for shift, coefficient in shift_rule(frequencies):
                for sign in (1, -1):
                    moved = _with(circuit, number, _shifted(operation, which, sign * shift))
                    slope += sign * coefficient * evaluate(moved, weights, features)
            for total, terms in zip(found, (parameter.weights, parameter.features), strict=True):
                for index, factor in terms:
                    total[index] += factor * slope
    return found


def finite_differences(
    circuit: Circuit, evaluate: Evaluate, weights: np.ndarray, features: np.ndarray, step: float = STEP
) -> tuple[np.ndarray, np.ndarray]:
    found = np.zeros(len(weights)), np.zeros(len(features))
    for values, total in zip((weights, features), found, strict=True):
        for index in range(len(values)):
            kept = values[index]
            values[index] = kept + step
            ahead = evaluate(circuit, weights, features)
            values[index] = kept - step
            behind = evaluate(circuit, weights, features)
            values[index] = kept
            total[index] = (ahead - behind) / (2 * step)
    return found


def _shifted(operation: Operation, which: int, shift: float) -> Operation:
    angles = list(operation.parameters)
    angles[which] = angles[which] + shift
    return replace(operation, parameters=tuple(angles))


def _with(circuit: Circuit, number: int, operation: Operation) -> Circuit:
    changed = type(circuit)(circuit.wires, circuit.bits)
    for at, each in enumerate(circuit.operations):
        changed.append(operation if at == number else each)
    return changed
