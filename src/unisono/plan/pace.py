"""What a part of the model takes, for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a segment or a stage, for one microbatch: seconds."""

    forward: float = 0.0
    inputs: float = 0.0  # the half of the backward that others wait for
    weights: float = 0.0  # the half that nobody waits for
    talk: float = 0.0  # of all of these together, what is collectives
    sent: float = 0.0
    launch_forward: float = 0.0  # of a host that runs ahead of its device
    launch_backward: float = 0.0

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def times(self, count: int) -> Pace:
        return Pace(
            self.forward * count,
            self.inputs * count,
            self.weights * count,
            self.talk * count,
            self.sent * count,
            self.launch_forward * count,
            self.launch_backward * count,
        )

    def plus(self, other: Pace) -> Pace:
        return Pace(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
            self.talk + other.talk,
            self.sent + other.sent,
            self.launch_forward + other.launch_forward,
            self.launch_backward + other.launch_backward,
        )

    def launched(self) -> Pace:
        """Where launching takes longer than what is launched, it sets the pace."""
        if self.launch_forward <= self.forward and self.launch_backward <= self.backward:
            return self
        forward = max(self.forward, self.launch_forward)
        slower = max(self.launch_backward / self.backward, 1.0) if self.backward else 1.0
        return replace(self, forward=forward, inputs=self.inputs * slower, weights=self.weights * slower)
