"""What the loss counts on the full batch, when every rank has computed only its part of the outputs.

`ExchangedCounts` asks the other ranks, in one message that travels while the loss is computed. Where every rank has all
of the targets, each can count the full batch by itself (`PredictedCounts`), and no one waits. That this gives the same
is seen first: the first step asks and compares, and every later one sends along, with the loss, what was in fact
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError
from unisono.parallel.loss.normalizers import Count

MOST_MEANS = 61  # that a loss may take; so many counts travel in one message


class ExchangedCounts:
    """The counts of all microbatches and ranks, with a check that all take the same means."""

    def __init__(self, name: str, predicted: list[list[Count]], comm: Communicator | None) -> None:
        self._name = name
        self._most = max((len(counts) for counts in predicted), default=0)
        self._agreed: Sequence[Count] | None = None
        self.differs: PendingFlag | None = None  # whether ranks take other means, where that is on its way from a GPU
        taken = [len(counts) for counts in predicted]
        if comm is None or comm.size == 1:  # no one is asked, and what is on a GPU stays there
            self._require_same(len(set(taken)) <= 1)
            self._agreed = summed(predicted)[: self._most]
            return
        kinds = [len(taken), sum(taken), sum(number**2 for number in taken)]
        self._message = joined([*kinds, *summed(predicted)], _device_of(predicted, comm))
        self._handle: Handle = comm.all_reduce(self._message, async_op=True)

    def __call__(self) -> Sequence[Count]:
        """What all have counted, for each mean."""
        if self._agreed is None:
            self._handle.wait()
            self._agreed = self._read()
        return self._agreed

    def _read(self) -> Sequence[Count]:
        if self._message.is_cuda:  # nobody waits for the GPU: see GlobalLoss.settle
            parts, means, squares = self._message[:3]
            self.differs = PendingFlag(parts * squares != means**2)
            return list(self._message[3 : 3 + self._most])
        parts, means, squares, *totals = self._message.tolist()
        self._require_same(parts * squares == means**2)
        return totals[: round(means / parts)] if parts else []

    def settle(self) -> None:
        """UsageError where ranks were found to take other means."""
        if self.differs is not None:
            self._require_same(not self.differs.read())

    def _require_same(self, takes_same: bool) -> None:
        if not takes_same:
            raise UsageError(
                f"the loss {self._name} takes {self._most} means on some of this rank's part of the batch and another "
                "number elsewhere; a loss must take the same means whatever the batch's size"
            )


class PredictedCounts:
    """The counts of the full batch, from all of its targets."""

    def __init__(self, counts: Sequence[Count]) -> None:
        """Those on a GPU stay there: to read one would be to wait for all that the GPU has been given to do."""
        self._counts = [count if _is_on_gpu(count) else float(count) for count in counts]
        is_rounded = any(isinstance(count, torch.Tensor) and count.is_floating_point() for count in counts)
        self._tolerance = 1e-6 if is_rounded else 0.0  # weights of classes, added up in another order

    def __call__(self) -> list[Count]:
        return self._counts

    def agrees(self, counts: Sequence[Count]) -> bool:
        """Whether these, with zeros for means that are not taken, are the same."""
        return self.agree([float(count) for count in self._counts], [float(count) for count in counts])

    def agree(self, mine: Sequence[float], counts: Sequence[float]) -> bool:
        """The same, where this one's counts have been read."""
        mine = [*mine, *[0.0] * (len(counts) - len(mine))]
        return len(mine) == len(counts) and all(
            abs(one - other) <= self._tolerance * abs(one) for one, other in zip(mine, counts, strict=True)
        )


class _FromGpu:
    """A tensor on its way from a GPU: whoever reads it waits for what the GPU had been given to do until then, and for
    nothing that it was given since."""

    def __init__(self, sent: torch.Tensor) -> None:
        self._here = torch.empty_like(sent, device="cpu", pin_memory=sent.is_cuda).copy_(sent, non_blocking=True)
        self._arrival = torch.cuda.Event() if sent.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    @property
    def is_here(self) -> bool:
        return self._arrival is None

    def arrived(self) -> torch.Tensor:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._here


class PendingFlag(_FromGpu):
    def read(self) -> bool:
        return bool(self.arrived())


class PendingCounts(_FromGpu):
    """What ranks have counted in fact, and what was predicted."""

    def __init__(self, message: torch.Tensor, predicted_counts: PredictedCounts) -> None:
        self.predicted_counts = predicted_counts
        counts = predicted_counts()
        self._length = len(counts)
        super().__init__(torch.cat([joined(counts, message.device), message]))

    def read(self) -> tuple[list[float], list[float]]:
        """What was predicted, and what was counted."""
        numbers: list[float] = self.arrived().tolist()
        return numbers[: self._length], numbers[self._length :]


def _is_on_gpu(count: Count) -> bool:
    return isinstance(count, torch.Tensor) and count.is_cuda


def summed(parts: Sequence[Sequence[Count]]) -> list[Any]:
    """The sum of all parts' counts, one a mean, with zeros for those that are not taken."""
    sums: list[Any] = [0.0] * MOST_MEANS
    for counts in parts:
        for number, count in enumerate(counts):
            sums[number] += count
    return sums


def joined(numbers: Sequence[Any], device: torch.device | None) -> torch.Tensor:
    """Numbers in one tensor; nobody waits for those that are on a GPU."""
    if device is None or device.type == "cpu":
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
    known = [0.0 if isinstance(number, torch.Tensor) else float(number) for number in numbers]
    message = torch.tensor(known, dtype=torch.float64).to(device, non_blocking=True)  # one copy, for which nobody waits
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            message[index] = number
    return message


def _device_of(parts: Sequence[Sequence[Count]], comm: Communicator | None) -> torch.device | None:
    found = next((count.device for counts in parts for count in counts if isinstance(count, torch.Tensor)), None)
    return comm.device if found is None and comm is not None else found
