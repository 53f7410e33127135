"""The loss of the global batch, from losses of its parts.

    loss = GlobalLoss(F.cross_entropy, mesh.comm("dp", "ep", "cp"))
    loss.prepare([(outputs, targets), ...])           # once a step: a pair a microbatch; outputs for their shapes only
    partial = loss(outputs, targets)                  # for each microbatch, in that order; backward through it
    value = loss.total(partials)                      # what the user's loss would be on the global batch

The partial losses of all ranks and microbatches sum to the user's loss on the whole, whatever it counts (see means.py);
so gradients are summed too, and never averaged. The user's loss is called as it is. It must be made of sums and means
over samples: the first call proves that on the batch at hand, by cutting it in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.means import Count, Means

Loss = Callable[[Any, Any], torch.Tensor]

MOST_MEANS = 61  # that a loss may take; so many counts travel in one message
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class GlobalLoss:
    def __init__(self, loss: Loss, comm: Communicator | None = None, dims: Sequence[int] = (0,)) -> None:
        """`comm` joins the ranks that share the batch; `dims` are those along which outputs are cut between them."""
        self._loss = loss
        self._comm = comm
        self.dims = tuple(dims)
        self._predicted: list[list[Count]] = []
        self._totals: list[float] | None = None
        self._next = 0
        self._is_proved = False
        self._astray: list[torch.Tensor] = []

    def _require_no_surprise(self) -> None:
        flags, self._astray = self._astray, []
        if flags and bool(torch.stack(flags).any()):
            raise UsageError(_ASTRAY)

    @property
    def loss(self) -> Loss:
        """The user's own."""
        return self._loss

    @property
    def ranks(self) -> int:
        return self._comm.size if self._comm is not None else 1

    def prepare(self, microbatches: Sequence[tuple[Any, Any]]) -> None:
        """Count what the loss will count on all of this rank's microbatches, and agree with the other ranks."""
        self._require_no_surprise()
        self._next = 0
        self._predicted = []
        self._totals = None
        if self.ranks == 1 and len(microbatches) == 1:
            return  # the batch is whole here: the user's loss serves as it is
        self._predicted = [self._counted(_blank(outputs), targets) for outputs, targets in microbatches]
        self._totals = self._summed(self._predicted)

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """This microbatch's part of the loss."""
        if self._totals is None:
            return self._evaluated(outputs, targets)
        if self._next >= len(self._predicted):
            raise UsageError(f"the loss was prepared for {len(self._predicted)} microbatches, but called once more")
        if not self._is_proved:
            self._prove(outputs, targets)
        means = Means(self._totals)
        with means:
            partial = self._evaluated(outputs, targets)
        self._compare(means.counts, self._predicted[self._next])
        self._next += 1
        return partial

    def total(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss on the global batch. Every rank calls it, with the partial losses of all its microbatches."""
        self._require_no_surprise()
        device = self._comm.device if self._comm is not None else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=partials[0].device if partials else device)
        for partial in partials:
            total += partial.detach()
        if self.ranks > 1 and self._comm is not None:
            self._comm.all_reduce(total)
        return total.to(partials[0].dtype) if partials else total

    def _evaluated(self, outputs: Any, targets: Any) -> torch.Tensor:
        try:
            value = self._loss(outputs, targets)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the loss {_name(self._loss)} cannot take what the model returns, {_shown(outputs)}, "
                f"with the targets {_shown(targets)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(f"the loss {_name(self._loss)} returned {_shown(value)}; expected one number in a tensor")
        return value

    def _counted(self, outputs: Any, targets: Any, *, dry: bool = True) -> list[Count]:
        means = Means(dry=dry)
        with means:
            self._evaluated(outputs, targets)
        if len(means.counts) > MOST_MEANS:
            raise UsageError(
                f"the loss {_name(self._loss)} takes {len(means.counts)} means; expected at most {MOST_MEANS}: "
                "take one mean over the batch, not one a sample"
            )
        return means.counts

    def _summed(self, predicted: list[list[Count]]) -> list[float]:
        """The counts of all microbatches and ranks, in one message, with a check that all take the same means."""
        kinds = {len(counts) for counts in predicted} or {0}
        most = max(kinds)
        device = next((c.device for counts in predicted for c in counts if isinstance(c, torch.Tensor)), None)
        if device is None and self._comm is not None:
            device = self._comm.device
        message = torch.zeros(3 + MOST_MEANS, dtype=torch.float64, device=device)
        for counts in predicted:
            message[0] += 1
            message[1] += len(counts)
            message[2] += len(counts) ** 2
            for number, count in enumerate(counts):
                message[3 + number] += count
        if self.ranks > 1 and self._comm is not None:
            self._comm.all_reduce(message)
        parts, means, squares, *totals = message.tolist()
        if parts * squares != means**2:
            raise UsageError(
                f"the loss {_name(self._loss)} takes {most} means on some of this rank's part of the batch and another "
                "number elsewhere; a loss must take the same means whatever the batch's size"
            )
        return totals[: round(means / parts)] if parts else []

    def _compare(self, counts: list[Count], predicted: list[Count]) -> None:
        """A count that follows from shapes is checked now; one on the device at `total`: nobody waits for it."""
        if len(counts) != len(predicted):
            raise UsageError(_ASTRAY)
        for count, foretold in zip(counts, predicted, strict=True):
            if isinstance(count, torch.Tensor) or isinstance(foretold, torch.Tensor):
                self._astray.append(torch.as_tensor(count != foretold))
            elif count != foretold:
                raise UsageError(_ASTRAY)

    def _prove(self, outputs: Any, targets: Any) -> None:
        """That the loss of the whole is the sum of partial losses of two halves, on this very batch."""
        outputs = tree_map(_cut_off, outputs)
        for dim in self.dims:
            halves = _halves(outputs, targets, dim)
            if halves is None:
                continue
            counts = [self._counted(*half, dry=False) for half in halves]
            totals = (
                [float(sum(pair)) for pair in zip(*counts, strict=True)] if len(counts[0]) == len(counts[1]) else []
            )
            parts = []
            for half in halves:
                with Means(totals):
                    parts.append(self._evaluated(*half))
            whole = self._evaluated(outputs, targets)
            if not bool(whole.isfinite()):
                return  # proves nothing; the next call may
            scale = parts[0].abs() + parts[1].abs() + whole.abs()
            gap = (whole - parts[0] - parts[1]).abs()
            if not bool(gap <= _TOLERANCE.get(whole.dtype, 1e-5) * scale):
                raise UsageError(
                    f"the loss {_name(self._loss)} on a batch is {whole.item():.6g}, but from two halves along dim "
                    f"{dim} it comes to {(parts[0] + parts[1]).item():.6g}: it is not made of sums and means over "
                    "samples. Take means with .mean(), reduction='mean' or sum / sum, rather than dividing by a size; "
                    "a loss that compares samples with each other, or has a term without samples, cannot be cut: "
                    "use dp=1, cp=1, microbatches=1"
                )
        self._is_proved = True


_ASTRAY = "the loss's count depends on the outputs, so it cannot be known before all are there; use microbatches=1"


def _blank(outputs: Any) -> Any:
    """Zeros of the same shapes, which take no memory."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = "cpu" if leaf.device.type == "meta" else leaf.device
        zero = torch.zeros((), dtype=leaf.dtype, device=device, requires_grad=leaf.is_floating_point())
        return zero.expand(leaf.shape)

    return tree_map(blank, outputs)


def _cut_off(leaf: Any) -> Any:
    """The tensor without its history; it still says whether it needs a gradient, which tells counts from values."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _halves(outputs: Any, targets: Any, dim: int) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
    """The batch in two along a dim; None where it has one row or none."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.ndim > dim]
    rows = tensors[0].shape[dim] if tensors else 0
    if rows < 2:
        return None

    def cut(first: int, last: int) -> Any:
        def piece(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.ndim > dim and leaf.shape[dim] == rows:
                return leaf.narrow(dim, first, last - first).contiguous()
            return leaf

        return tree_map(piece, (outputs, targets))

    middle = (rows + 1) // 2
    return cut(0, middle), cut(middle, rows)


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _shown(value: Any) -> str:
    def one(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return type(leaf).__name__

    shown = [one(leaf) for leaf in tree_leaves(value)]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
