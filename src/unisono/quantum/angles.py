"""The angles of a program: affine in weights and features, evaluated and differentiated all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.quantum.parameter import Affine


class Linear(NamedTuple):
    """Angle at[i] has factors[i] times number indices[i] of what is given."""

    at: NDArray[np.int64]
    indices: NDArray[np.int64]
    factors: NDArray[np.float64]


@dataclass(frozen=True)
class Angles:
    constants: NDArray[np.float64]
    weights: Linear
    features: Linear

    @classmethod
    def of(cls, angles: Sequence[Affine]) -> Angles:
        constants = np.array([angle.constant for angle in angles], dtype=np.float64)
        kinds = []
        for kind in ("weights", "features"):
            found = [(i, index, factor) for i, angle in enumerate(angles) for index, factor in getattr(angle, kind)]
            at, indices, factors = zip(*found, strict=True) if found else ((), (), ())
            kinds.append(Linear(np.array(at, np.int64), np.array(indices, np.int64), np.array(factors, np.float64)))
        return cls(constants, *kinds)

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
