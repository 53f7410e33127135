"""The angles of a program: affine in weights and features, evaluated and differentiated all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.circuit.growable import Numbers
from unisono.quantum.circuit.parameter import Affine


class LinearAngles(NamedTuple):
    """Angle at[i] has factors[i] times number indices[i] of what is given."""

    at: NDArray[np.int64]
    indices: NDArray[np.int64]
    factors: NDArray[np.float64]


@dataclass(frozen=True)
class Angles:
    constants: NDArray[np.float64]
    weights: LinearAngles
    features: LinearAngles

    @classmethod
    def of(cls, angles: Iterable[Affine]) -> Angles:
        constants = Numbers(np.float64)
        kinds = [(Numbers(np.int64), Numbers(np.int64), Numbers(np.float64)) for _ in range(2)]
        for number, angle in enumerate(angles):
            constants.append(angle.constant)
            for (at, indices, factors), terms in zip(kinds, (angle.weights, angle.features), strict=True):
                for index, factor in terms:
                    at.append(number)
                    indices.append(index)
                    factors.append(factor)
        return cls(constants.array, *(LinearAngles(*(each.array for each in kind)) for kind in kinds))

    def __len__(self) -> int:
        return len(self.constants)

    def values(self, weights: NDArray, features: NDArray) -> NDArray[np.float64]:
        """Of each angle, and a 0 after them, for phases that have none."""
        total = np.append(self.constants, 0.0)
        for terms, given in ((self.weights, weights), (self.features, features)):
            np.add.at(total, terms.at, terms.factors * given[terms.indices])
        return total

    def gradients(
        self, of_angles: NDArray[np.float64], weights: int, features: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gradients of weights and of features from those of the angles."""
        return _gradients(self.weights, of_angles, weights), _gradients(self.features, of_angles, features)


def _gradients(terms: LinearAngles, of_angles: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    found = np.zeros(size)
    np.add.at(found, terms.indices, terms.factors * of_angles[terms.at])
    return found
