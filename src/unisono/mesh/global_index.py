"""Global indices: which elements of a full tensor a rank holds.

Along each dim a rank holds all positions or a `Part` of them. An element's number is its row-major index in the full
tensor, so two ranks that shard a tensor differently agree on the number of every element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from unisono.errors import UsageError

Positions = range | torch.Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Some positions along a dim of `total`: a range, or any order of positions as a tensor of integers."""

    positions: Positions
    total: int

    def __post_init__(self) -> None:
        if isinstance(self.positions, torch.Tensor):
            if self.positions.dim() != 1 or self.positions.is_floating_point():
                raise UsageError(f"positions {self.positions}: expected a range or a list of integers")
            object.__setattr__(self, "positions", self.positions.to("cpu", torch.int64))
        lowest, highest = _extremes(self.positions) if len(self) else (0, -1)
        if lowest < 0 or highest >= self.total:
            raise UsageError(f"positions {self.positions} of {self.total}: expected 0 to {self.total - 1}")

    def __len__(self) -> int:
        return len(self.positions)

    def within(self, outer: Part) -> Part:
        """This part of another part: positions here count what the other one holds."""
        if self.total != len(outer):
            raise UsageError(
                f"a part of {self.total} was taken within one that holds {len(outer)} of {outer.total}; "
                f"expected a part of {len(outer)}"
            )
        mine = self.positions
        if isinstance(mine, range) and mine.step == 1:
            return Part(outer.positions[mine.start : mine.stop], outer.total)
        if isinstance(outer.positions, range) and isinstance(mine, range):
            start, step = outer.positions.start, outer.positions.step
            return Part(
                range(start + mine.start * step, start + mine.stop * step, mine.step * step) if len(mine) else range(0),
                outer.total,
            )
        return Part(_as_tensor(outer.positions)[_as_tensor(mine)], outer.total)

    def stretched(self, length: int) -> Part:
        """The same part of a dim whose positions each became several, as when (batch, seq) is folded into one dim."""
        times = length // len(self)
        if times == 1:
            return self
        if isinstance(self.positions, range) and self.positions.step == 1:
            return Part(range(self.positions.start * times, self.positions.stop * times), self.total * times)
        each = _as_tensor(self.positions)[:, None] * times + torch.arange(times)
        return Part(each.reshape(-1), self.total * times)

    def repeated(self, length: int) -> Part:
        """The same part of a dim that counts all positions again and again, as when (seq, batch) is folded into one."""
        times = length // len(self)
        if times == 1:
            return self
        each = torch.arange(times)[:, None] * self.total + _as_tensor(self.positions)
        return Part(each.reshape(-1), self.total * times)


def _extremes(positions: Positions) -> tuple[int, int]:
    if isinstance(positions, range):
        return min(positions[0], positions[-1]), max(positions[0], positions[-1])
    return int(positions.min()), int(positions.max())


def _as_tensor(positions: Positions) -> torch.Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step)
    return positions


@dataclass(frozen=True, eq=False)
class Runs:
    """The numbers of a rank's elements in order, as runs of consecutive numbers, all of the same length."""

    starts: torch.Tensor  # the number of each run's first element; int64, on the CPU
    length: int
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.starts) * self.length

    def starts_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._copies:
            self._copies[device] = self.starts.to(device, non_blocking=True)
        return self._copies[device]


def runs_of(shape: Sequence[int], parts: Mapping[int, Part]) -> Runs:
    """The runs of a local tensor of that shape that holds `parts` of some dims and all of the others."""
    if any(isinstance(part.positions, torch.Tensor) for part in parts.values()):
        return _make_runs(tuple(shape), dict(parts))
    return _runs_of_ranges(tuple(shape), tuple((dim, part.positions, part.total) for dim, part in parts.items()))


@lru_cache(maxsize=256)
def _runs_of_ranges(shape: tuple[int, ...], ranges: tuple[tuple[int, range, int], ...]) -> Runs:
    return _make_runs(shape, {dim: Part(positions, total) for dim, positions, total in ranges})


def _make_runs(shape: tuple[int, ...], parts: dict[int, Part]) -> Runs:
    full = [parts[dim].total if dim in parts else size for dim, size in enumerate(shape)]
    if math.prod(shape) == 0:
        return Runs(torch.zeros(1, dtype=torch.int64), 0)
    length, stride, dim = 1, 1, len(shape) - 1
    while dim >= 0 and dim not in parts:
        length *= shape[dim]
        stride *= full[dim]
        dim -= 1
    starts = torch.zeros(1, dtype=torch.int64)
    if dim >= 0 and isinstance(held := parts[dim].positions, range) and held.step == 1:
        starts = starts + held.start * stride
        length *= len(held)
        stride *= full[dim]
        dim -= 1
    for outer in range(dim, -1, -1):
        positions = _as_tensor(parts[outer].positions) if outer in parts else torch.arange(shape[outer])
        starts = (positions[:, None] * stride + starts).reshape(-1)
        stride *= full[outer]
    return Runs(starts, length)
