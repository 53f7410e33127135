"""Regularizers: L2Decay adds coeff times a parameter to its gradient, as torch's weight_decay does."""

from __future__ import annotations

from unisono.compat.paddle.paddle_names import missing_names


class L2Decay:
    def __init__(self, coeff: float = 0.0) -> None:
        self.coeff = float(coeff)

    def __repr__(self) -> str:
        return f"L2Decay({self.coeff})"


__getattr__ = missing_names(__name__)
