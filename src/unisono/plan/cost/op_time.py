"""The time of one op: the longer of computing and of moving its bytes, at measured efficiencies.

On a device that its host runs ahead of, an op takes time twice: that of the device, and that of the host, which
launches it. The two go on at the same time, so they are distinguished here, and the longer counts for a whole stage.
Elsewhere the time to launch is part of the op's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

from unisono.plan.hardware.spec import Hardware, share_at
from unisono.plan.profile.model_profile import OpCost, Segment, Setting

# Bytes that the loss of a sharded vocabulary passes for each logit: it works in float32, in several passes.
_LOSS_FORWARD, _LOSS_BACKWARD = 34.0, 22.0

# Bytes of weights that ranks hold, each, while products of few rows are measured: so few that caches keep them from one
# use to the next, and so many that they come from memory.
IN_CACHE, OUTSIDE = 8 * 2**20, 32 * 2**20


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
        self._curves = {kind: hardware.curve(kind, dtype) for kind in ("matmul", "attention")}
        self._of_backward = hardware.curves.get("matmul_backward", self._curves["matmul"])

    def op(self, work: OpCost, segment: Segment, setting: Setting, held: float = OUTSIDE) -> OpTime:
        """held: bytes of weights on the rank."""
        overhead = self.hardware.op_overhead * work.calls
        share = self.hardware.together
        beside = 0.0 if self.hardware.asynchronous else overhead * share  # which is in the end what it is
        timed = OpTime(*(seconds / share for seconds in self._on_device(work, segment, setting, held, beside)))
        if not self.hardware.asynchronous:
            return timed
        if work.kind == "view":
            return timed._replace(launch_forward=overhead / 2, launch_backward=overhead / 2)
        # Backward: a product for the inputs and one for the weights, and each parameter's gradient goes to its place.
        launches = 1 + bool(work.flops and work.weights)
        backward = overhead * launches + self.hardware.op_overhead * work.parameters
        return timed._replace(launch_forward=overhead, launch_backward=backward)

    def _on_device(self, work: OpCost, segment: Segment, setting: Setting, held: float, overhead: float) -> OpTime:
        divided = setting.tp * setting.cp if work.is_sharded else setting.outside(segment)
        flops = work.flops * setting.rows / divided
        moved = work.moved * setting.rows / divided + work.weights / (setting.tp if work.is_sharded else 1)
        more = work.moved_back * setting.rows / divided / self.bandwidth
        if work.kind == "view":
            return OpTime(overhead / 2, overhead / 2 + more)
        if work.tp_saved and setting.tp > 1:
            logits = setting.rows / divided * (work.saved + work.tp_saved) / 4
            passes = (_LOSS_FORWARD * logits / self.bandwidth, _LOSS_BACKWARD * logits / self.bandwidth)
            return OpTime(passes[0] + overhead, passes[1] + overhead)
        if not flops:
            ahead, back = self.hardware.rates.get(work.family, (self.bandwidth, self.bandwidth))
            drawing = self.hardware.dropout_overhead if work.family == "dropout" else 0.0
            return OpTime(moved / ahead + max(overhead, drawing), moved / back + overhead + more)
        if work.kind in self.hardware.attention_times:
            ahead, back = self._attending(work, work.heads * setting.rows / divided)
            return OpTime(ahead + overhead / work.calls, back + overhead / work.calls + more)
        curve = self._curves["attention" if work.kind == "attention" else "matmul"]
        computing = flops / (self._peak * share_at(curve, flops / work.calls))
        forward = max(computing, moved / self.bandwidth) + overhead
        if work.kind == "attention":
            return OpTime(forward, 2.5 * computing + overhead + more)
        in_backward = flops / (self._peak * share_at(self._of_backward, flops / work.calls))
        half = max(in_backward, moved / self.bandwidth) + overhead
        if not work.weights:
            return OpTime(forward, 2 * half + more)
        ahead, back = self._of_few_rows(flops, work.weights / (setting.tp if work.is_sharded else 1), held)
        half = max(half, back + overhead)
        return OpTime(max(forward, ahead + overhead), half + more, half)

    def _attending(self, work: OpCost, matrices: float, parts: int = 1) -> tuple[float, float]:
        """Forward and backward with so many of queries by keys, or of such parts of them."""
        width = work.flops / (4.0 * work.heads * work.matrix)
        return self.hardware.attention_times[work.kind].seconds(matrices, work.matrix / parts, width)

    def ring(self, work: OpCost, setting: Setting) -> OpTime:
        """What an attention takes more in a ring, whose visits have smaller matrices, as many of them as the whole.

        Where no query looks ahead, visits after the first attend half as much: kernels skip nothing, but nothing that
        is all ahead is given to them. With dropout the backward makes matrices again, and draws again."""
        if work.kind not in self.hardware.attention_times:
            return OpTime(0.0, 0.0)
        cp, share, matrices = setting.cp, self.hardware.together, work.heads * setting.rows / setting.tp
        whole = self._attending(work, matrices / cp)
        ahead, back = self._attending(work, matrices, cp**2)
        if work.kind == "attention_dropout":
            return OpTime((cp * ahead - whole[0]) / share, (cp * (ahead + back) - whole[1]) / share)
        further = self._attending(work, matrices, (2 if work.is_causal else 1) * cp**2)
        beside = self.hardware.attention_times[work.kind].call  # of visits, what is called is counted elsewhere
        visits = (
            one + (cp - 1) * (other - call) for one, other, call in zip((ahead, back), further, beside, strict=True)
        )
        return OpTime(*((taken - once) / share for taken, once in zip(visits, whole, strict=True)))

    def _of_few_rows(self, flops: float, weights: float, held: float) -> tuple[float, float]:
        """A product's seconds, forward and for each half of the backward, where there are so few rows that bringing the
        weights into place, which computing then waits for, is what takes the time."""
        rates = self.hardware.rates
        if "weights" not in rates:
            return 0.0, 0.0
        share = log(min(max(held, IN_CACHE), OUTSIDE) / IN_CACHE) / log(OUTSIDE / IN_CACHE)
        near, far = rates.get("weights_in_cache", rates["weights"]), rates["weights"]
        ahead, back = (one ** (1 - share) * other**share for one, other in zip(near, far, strict=True))
        return flops / self._peak + weights / ahead, flops / self._peak + weights / back / 2


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
