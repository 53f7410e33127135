"""The angles of a program: affine in weights and features, evaluated and differentiated all at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.parameter import Affine
from unisono.quantum.pieces import Pieces


class Linear(NamedTuple):
    """Angle at[i] has factors[i] times number indices[i] of what is given."""

    at: NDArray[np.int64]
    indices: NDArray[np.int64]
    factors: NDArray[np.float64]

    @classmethod
    def of(cls, terms: Pieces[tuple[int, int, float]]) -> Linear:
        count = len(terms)
        at = np.fromiter((number for number, _, _ in terms), np.int64, count)
        indices = np.fromiter((index for _, index, _ in terms), np.int64, count)
        return cls(at, indices, np.fromiter((factor for _, _, factor in terms), np.float64, count))


@dataclass(frozen=True)
class Angles:
    constants: NDArray[np.float64]
    weights: Linear
    features: Linear

    @classmethod
    def of(cls, angles: Iterable[Affine]) -> Angles:
        constants: Pieces[float] = Pieces()
        weights: Pieces[tuple[int, int, float]] = Pieces()
        features: Pieces[tuple[int, int, float]] = Pieces()
        for number, angle in enumerate(angles):
            constants.append(angle.constant)
            for kept, terms in ((weights, angle.weights), (features, angle.features)):
                for index, factor in terms:
                    kept.append((number, index, factor))
        values = np.fromiter(constants, np.float64, len(constants))
        return cls(values, Linear.of(weights), Linear.of(features))

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


def _gradients(terms: Linear, of_angles: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    found = np.zeros(size)
    np.add.at(found, terms.indices, terms.factors * of_angles[terms.at])
    return found
