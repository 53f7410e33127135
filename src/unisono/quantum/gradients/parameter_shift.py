"""Gradients by running the circuit again: the parameter-shift rule, and finite differences.

The rule shifts one angle of one gate at a time. So the circuit is run in a form in which each angle that varies is a
weight of its own; it is scheduled and compiled once for all shifts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import Affine, weight

Gradients = tuple[np.ndarray, np.ndarray]  # of the weights, of the features
STEP = 1e-6  # of finite differences


@dataclass(frozen=True)
class VaryingAngle:
    """An angle of one gate that depends on weights or features, and the frequencies of expectation values in it."""

    parameter: Affine
    frequencies: tuple[float, ...]


def separated(circuit: Circuit) -> tuple[Circuit, tuple[VaryingAngle, ...]]:
    """The circuit with weight(k) as its k-th varying angle, and what these angles are.

    A condition on classical bits adds no frequency, unlike a control: there is no coherence between its cases."""
    made, angles = Circuit(circuit.wires, circuit.bits), list[VaryingAngle]()
    for operation in circuit.operations:
        parameters = []
        for which, parameter in enumerate(operation.parameters):
            if parameter.is_constant:
                parameters.append(parameter)
            else:
                parameters.append(weight(len(angles)))
                angles.append(VaryingAngle(parameter, operation.frequencies(which)))
        made.append(replace(operation, parameters=tuple(parameters)))
    return made, tuple(angles)


def shift_rule(frequencies: tuple[float, ...]) -> list[tuple[float, float]]:
    """(shift s, coefficient c) pairs, f'(0) = sum of c (f(s) - f(-s)), exact for functions of these frequencies."""
    count = len(frequencies)
    shifts = [(k + 1) * math.pi / ((count + 1) * max(frequencies)) for k in range(count)]
    sines = np.array([[2 * math.sin(frequency * shift) for shift in shifts] for frequency in frequencies])
    return list(zip(shifts, np.linalg.solve(sines, frequencies).tolist(), strict=True))


def parameter_shift(
    angles: Sequence[VaryingAngle],
    evaluate: Callable[[np.ndarray], float],
    weights: np.ndarray,
    features: np.ndarray,
) -> Gradients:
    """evaluate: a function of the state that the separated circuit makes with these angles, or an estimate of it."""
    found = np.zeros(len(weights)), np.zeros(len(features))
    values = np.array([each.parameter.evaluate(weights, features) for each in angles], dtype=np.float64)
    for number, angle in enumerate(angles):
        if not angle.frequencies:
            continue
        slope, kept = 0.0, values[number]
        for shift, coefficient in shift_rule(angle.frequencies):
            for sign in (1, -1):
                values[number] = kept + sign * shift
                slope += sign * coefficient * evaluate(values)
        values[number] = kept
        for total, terms in zip(found, (angle.parameter.weights, angle.parameter.features), strict=True):
            for index, factor in terms:
                total[index] += factor * slope
    return found


def finite_differences(
    evaluate: Callable[[np.ndarray, np.ndarray], float],
    weights: np.ndarray,
    features: np.ndarray,
    step: float = STEP,
) -> Gradients:
    found = np.zeros(len(weights)), np.zeros(len(features))
    for values, total in zip((weights, features), found, strict=True):
        for index in range(len(values)):
            kept = values[index]
            values[index] = kept + step
            ahead = evaluate(weights, features)
            values[index] = kept - step
            behind = evaluate(weights, features)
            values[index] = kept
            total[index] = (ahead - behind) / (2 * step)
    return found
