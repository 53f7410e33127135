"""The time of one op, by the roofline: the longer of computing and of moving its bytes, at measured efficiencies.

On a device that its host runs ahead of, an op takes time twice: that of the device, and that of the host, which
launches it. The two go on at the same time, so they are distinguished here, and the longer counts for a whole stage.
Elsewhere the time to launch is part of the op's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from unisono.plan.hardware.spec import Hardware, share_at
from unisono.plan.profile.model_profile import OpCost, Segment, Setting

# Bytes that the loss of a sharded vocabulary passes for each logit: it works in float32, in several passes.
_LOSS_FORWARD, _LOSS_BACKWARD = 34.0, 22.0
_ATTENTION_BACKWARD = 2.5  # times the forward's FLOPs: five products instead of two


class OpTime(NamedTuple):
    """Seconds: forward, the backward's halves, and what the host takes to launch forward and backward."""

    forward: float
    inputs: float
    weights: float = 0.0
    launch_forward: float = 0.0
    launch_backward: float = 0.0


class OpTimer:
    """Times ops of one dtype on one machine."""

    def __init__(self, hardware: Hardware, dtype: str) -> None:
        self.hardware = hardware
        self.bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency
        self._peak = hardware.peak(dtype)

    def op(self, work: OpCost, segment: Segment, setting: Setting) -> OpTime:
        if work.weight_copy and not setting.copied(work):
            return OpTime(0.0, 0.0)
        overhead = self.hardware.op_overhead * work.calls
        if not self.hardware.asynchronous:
            return self._on_device(work, segment, setting, overhead)
        timed = self._on_device(work, segment, setting, 0.0)
        if work.kind == "view":
            return timed._replace(launch_forward=overhead / 2, launch_backward=overhead / 2)
        # Backward: a product for the inputs and one for the weights, and each parameter's gradient goes to its place.
        launches = 1 + bool(work.flops and work.weights)
        backward = overhead * launches + self.hardware.op_overhead * work.parameters
        return timed._replace(launch_forward=overhead, launch_backward=backward)

    def _on_device(self, work: OpCost, segment: Segment, setting: Setting, overhead: float) -> OpTime:
        divided = setting.tp * setting.cp if work.is_sharded else setting.outside(segment)
        flops = work.flops * setting.samples / divided
        moved = work.moved * setting.samples / divided + work.weights / (setting.tp if work.is_sharded else 1)
        more = work.moved_back * setting.samples / divided / self.bandwidth
        if work.kind == "view":
            return OpTime(overhead / 2, overhead / 2 + more)
        if work.tp_saved and setting.tp > 1:
            logits = setting.samples / divided * (work.saved + work.tp_saved) / 4
            passes = (_LOSS_FORWARD * logits / self.bandwidth, _LOSS_BACKWARD * logits / self.bandwidth)
            return OpTime(passes[0] + overhead, passes[1] + overhead)
        moving = moved / self.bandwidth
        if not flops:
            return OpTime(moving + overhead, moving + overhead + more)
        is_attention = work.kind == "attention"
        curve = self.hardware.attention if is_attention else self.hardware.matmul
        computing = flops / (self._peak * share_at(curve, flops / work.calls))
        forward = max(computing, moving) + overhead
        if is_attention:
            return OpTime(forward, _ATTENTION_BACKWARD * computing + overhead + more)
        if not work.weights:
            return OpTime(forward, 2 * forward + more)
        return OpTime(forward, forward + more, forward)


# ---- sums of ops -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageCost:
    """Of a segment or a stage, for one microbatch: seconds."""

    forward: float = 0.0
    inputs: float = 0.0  # the half of the backward that others wait for
    weights: float = 0.0  # the half that nobody waits for
    communication: float = 0.0  # of all of these together, what is collectives
    sent: float = 0.0
    launch_forward: float = 0.0  # of a host that runs ahead of its device
    launch_backward: float = 0.0

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def times(self, count: int) -> StageCost:
        return StageCost(
            self.forward * count,
            self.inputs * count,
            self.weights * count,
            self.communication * count,
            self.sent * count,
            self.launch_forward * count,
            self.launch_backward * count,
        )

    def plus(self, other: StageCost) -> StageCost:
        return StageCost(
            self.forward + other.forward,
            self.inputs + other.inputs,
            self.weights + other.weights,
            self.communication + other.communication,
            self.sent + other.sent,
            self.launch_forward + other.launch_forward,
            self.launch_backward + other.launch_backward,
        )

    def launched(self) -> StageCost:
        """Where launching takes longer than what is launched, it sets the cost."""
        if self.launch_forward <= self.forward and self.launch_backward <= self.backward:
            return self
        forward = max(self.forward, self.launch_forward)
        slower = max(self.launch_backward / self.backward, 1.0) if self.backward else 1.0
        return replace(self, forward=forward, inputs=self.inputs * slower, weights=self.weights * slower)
