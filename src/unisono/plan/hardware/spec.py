"""Hardware: the figures of a machine that the cost model reads.

A device computes at `flops[dtype]` times an efficiency that depends on the size of a call: small matrix products do not
fill a device. `matmul` and `attention` are therefore curves (FLOPs of one call, share of the peak), interpolated over
the logarithm. Files are read and written by `toml`; `unisono bench hardware` measures this machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace

from unisono.amounts import shortfall
from unisono.comm.signatures.records import plain_record
from unisono.errors import UsageError

# ---- curves ----------------------------------------------------------------------------------------------------------

Curve = tuple[tuple[float, float], ...]  # (size, share or seconds), sizes rising


def share_at(curve: Curve, size: float) -> float:
    """The curve's value at a size: linear between points over the logarithm, flat beyond them."""
    index = bisect_right(curve, (size, math.inf))
    if index == 0:
        # Below the first point a call takes as long as the smallest that was measured.
        return curve[0][1] * max(size, 1.0) / curve[0][0] if len(curve) > 1 else curve[0][1]
    if index == len(curve):
        return curve[-1][1]
    (low, below), (high, above) = curve[index - 1], curve[index]
    part = math.log(size / low) / math.log(high / low)
    return below + (above - below) * part


def seconds_at(curve: Curve, size: float) -> float:
    """The time that a measured curve (bytes, seconds) gives: flat below its sizes, beyond them at its last slope."""
    index = bisect_right(curve, (size, math.inf))
    if index == 0 or len(curve) == 1:
        return curve[0][1]
    (low, below), (high, above) = curve[min(index, len(curve) - 1) - 1], curve[min(index, len(curve) - 1)]
    return max(below + (above - below) * (size - low) / (high - low), curve[0][1])


# ---- the machine -----------------------------------------------------------------------------------------------------


@plain_record
@dataclass(frozen=True)
class Link:
    """A link between devices, alpha-beta: `latency` seconds a message, `bandwidth` bytes a second in each direction."""

    bandwidth: float
    latency: float
    measured: tuple[tuple[str, Curve], ...] = ()  # of a collective: (bytes, seconds), between `ranks` ranks
    ranks: int = 0


@plain_record
@dataclass(frozen=True)
class Hardware:
    """A machine of nodes with equal devices."""

    name: str
    devices_per_node: int
    memory: float  # bytes of a device
    flops: dict[str, float]  # peak operations a second, by dtype
    memory_bandwidth: float  # bytes a second
    intra_node: Link
    inter_node: Link
    matmul: Curve = ((1.0, 1.0),)  # share of the peak that a product of so many operations reaches
    attention: Curve = ((1.0, 1.0),)
    memory_efficiency: float = 1.0  # share of the bandwidth that elementwise work reaches
    op_overhead: float = 0.0  # seconds that an op takes beside its work, forward or backward
    asynchronous: bool = False  # whether that is the time of a host which runs ahead while the device works
    overlap: float = 1.0  # share of a gradient's travel that can hide behind the backward
    margin: float = 0.05  # share of the memory that allocators cannot use: fragments and context
    flash: bool = True  # whether attention keeps no matrix of queries by keys
    library_memory: float = 0.0  # bytes that the device's libraries keep once they have computed
    dropout_mask: float = 0.0  # bytes that a dropout keeps for an element; unisono draws again on GPUs
    nodes: int | None = None
    cores: int | None = None  # of a node: where it has more devices than cores, these take turns
    limit: float | None = None  # bytes that a rank may need, in place of what the device has
    source: str = field(default="", compare=False)

    def peak(self, dtype: str) -> float:
        if dtype in self.flops:
            return self.flops[dtype]
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "float32")
        for known in (other, "float32"):
            if known in self.flops:
                return self.flops[known]
        raise UsageError(
            f"hardware {self.source or self.name}: no flops.{dtype}, in which the model computes; known are "
            f"{', '.join(self.flops)}"
        )

    def with_devices(self, devices: int) -> Hardware:
        """The same kind of machine with so many devices."""
        if devices < 1:
            raise UsageError(f"devices={devices}: expected at least 1")
        most = None if self.nodes is None else self.nodes * self.devices_per_node
        if most is not None and devices > most:
            raise UsageError(
                f"{devices} devices are asked for, but {self.source or self.name} has {self.nodes} nodes x "
                f"{self.devices_per_node} = {most}; ask for fewer, or raise machine.nodes"
            )
        if devices > self.devices_per_node and devices % self.devices_per_node:
            raise UsageError(
                f"{devices} devices do not fill nodes of {self.devices_per_node}; use a multiple of "
                f"{self.devices_per_node}"
            )
        return replace(self, nodes=math.ceil(devices / self.devices_per_node))

    def turns(self, devices: int) -> float:
        """How many devices share a core, where so many of them compute."""
        here = min(devices, self.devices_per_node)
        return 1.0 if self.cores is None else max(here / self.cores, 1.0)

    @property
    def usable_memory(self) -> float:
        return self.memory * (1 - self.margin) if self.limit is None else self.limit

    def short_of(self, needs: float, digits: int = 0) -> str:
        """In words: needs more than there is."""
        words = shortfall(needs, self.usable_memory, digits)
        return words if self.limit is None else f"{words}, the limit of a rank"
