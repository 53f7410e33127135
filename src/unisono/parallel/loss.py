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
from unisono.comm.handle import Handle
from unisono.errors import UnisonoError, UsageError
from unisono.parallel.counts import MOST_MEANS, Exchanged, Foretold, Told, joined, summed
from unisono.parallel.means import Count, Means

Loss = Callable[[Any, Any], torch.Tensor]

_FEW = 16  # tokens
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class GlobalLoss:
    def __init__(self, loss: Loss, comm: Communicator | None = None, dims: Sequence[int] = (0,)) -> None:
        """`comm` joins the ranks that share the batch; `dims` are those along which outputs are cut between them."""
        self._loss = loss
        self._comm = comm
        self.dims = tuple(dims)
        self._predicted: list[list[Count]] = []
        self._totals: Exchanged | Foretold | None = None
        self._whole: Foretold | None = None
        self._told: Told | None = None  # of the last step, on its way
        self._foretells = False  # whether all ranks have seen that each can count the whole by itself
        self._made = 0  # elements of the tensors that the last counting made
        self._microbatches = 0
        self._counts: list[list[Count]] = []  # of the microbatches so far
        self._sum: tuple[torch.Tensor, Handle | None] | None = None  # of the partial losses, on its way
        self._next = 0
        self._is_proved = False
        self.shift: int | None = None  # by how many tokens targets are ahead of outputs, if dims has 1; see learn_shift
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

    def trust(self) -> None:
        """Do without the proof that the loss is made of sums and means: what simulated ranks bring proves nothing."""
        self._is_proved = True

    def prepare(self, microbatches: Sequence[tuple[Any, Any]], whole: tuple[Any, Any] | None = None) -> None:
        """Count what the loss will count on all of this rank's microbatches, and agree with the other ranks.

        `whole`: outputs and targets of the global batch, where this rank has them all; again for their shapes only.
        """
        self.settle()
        self._require_no_surprise()
        self._next = 0
        self._microbatches = len(microbatches)
        self._predicted, self._counts = [], []
        self._totals, self._whole, self._sum = None, None, None
        if self.ranks == 1 and len(microbatches) == 1:
            return  # the batch is whole here: the user's loss serves as it is
        if self._foretells and whole is not None:
            self._whole = self._totals = Foretold(self._counted(_blank(whole[0]), whole[1]))
            return
        self._predicted = [self._counted(_blank(outputs), targets) for outputs, targets in microbatches]
        self._totals = Exchanged(name_of(self._loss), self._predicted, self._comm)
        if whole is not None and self._is_quickly_counted(microbatches[-1][1]):
            self._whole = self._foretold(*whole)

    def _foretold(self, outputs: Any, targets: Any) -> Foretold | None:
        try:
            return Foretold(self._counted(_blank(outputs), targets))
        except UsageError:
            return None  # outputs whose shape does not follow from the number of samples: the ranks ask each other

    def _is_quickly_counted(self, targets: Any) -> bool:
        """Whether counting, as it was done last, looks at targets only and makes nothing of the outputs' size."""
        size = sum(leaf.numel() for leaf in tree_leaves(targets) if isinstance(leaf, torch.Tensor))
        return self._made <= 4 * size

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """This microbatch's part of the loss."""
        if self._totals is None:
            return self._evaluated(outputs, targets)
        if self._next >= self._microbatches:
            raise UsageError(f"the loss was prepared for {self._microbatches} microbatches, but called once more")
        if not self._is_proved:
            self._prove(outputs, targets)
        means = Means(self._totals)
        with means:
            partial = self._evaluated(outputs, targets)
        self._totals()  # also a loss that takes no mean hears where others take some
        self._counts.append(means.counts)
        if self._predicted:
            self._compare(means.counts, self._predicted[self._next])
        self._next += 1
        return partial

    def total(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss on the global batch. Every rank calls it, with the partial losses of all its microbatches."""
        self._require_no_surprise()
        if self._sum is None:
            self.start_total(partials)
        assert self._sum is not None
        (message, handle), self._sum = self._sum, None
        if handle is not None:
            handle.wait()
            if self._whole is not None:
                self._told = Told(message[1:], self._whole)
                if self._told.is_here:
                    self.settle()
        return message[0].to(partials[0].dtype) if partials else message[0]

    def start_total(self, partials: Sequence[torch.Tensor]) -> None:
        """Begin to sum, before the last backward, so that `total` need not wait."""
        device = self._comm.device if self._comm is not None else torch.device("cpu")
        device = partials[0].device if partials else device
        value = sum((partial.detach().double() for partial in partials), torch.zeros((), device=device).double())
        if self._comm is None or self.ranks == 1:
            self._sum = (value.reshape(1), None)
            return
        agrees = self._whole is not None and (self._whole is self._totals or self._agrees(self._whole))
        message = joined([value, agrees, *summed(self._counts)], device)
        self._sum = (message, self._comm.all_reduce(message, async_op=True))

    def _agrees(self, whole: Foretold) -> bool:
        return self._totals is not None and whole.agrees(self._totals())

    def settle(self) -> None:
        """Hear what was counted in the last step, before anything is made of it. All ranks are told the same: how many
        of them could count the whole, and what was counted in fact."""
        told, self._told = self._told, None
        if told is None:
            return
        mine, (agreeing, *counts) = told.read()
        foretold, self._foretells = self._foretells, agreeing == self.ranks
        if foretold and not told.foretold.agree(mine, counts):
            self._foretells = False
            raise UsageError(_ASTRAY)

    def _evaluated(self, outputs: Any, targets: Any) -> torch.Tensor:
        try:
            value = self._loss(outputs, targets)
        except UnisonoError:  # of the plan or the communication, not of the loss
            raise
        except Exception as error:
            raise UsageError(
                f"the loss {name_of(self._loss)} cannot take what the model returns, {_shown(outputs)}, "
                f"with the targets {_shown(targets)}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(
                f"the loss {name_of(self._loss)} returned {_shown(value)}; expected one number in a tensor"
            )
        return value

    def _counted(self, outputs: Any, targets: Any, *, dry: bool = True) -> list[Count]:
        means = Means(dry=dry)
        with means:
            self._evaluated(outputs, targets)
        if len(means.counts) > MOST_MEANS:
            raise UsageError(
                f"the loss {name_of(self._loss)} takes {len(means.counts)} means; expected at most {MOST_MEANS}: "
                "take one mean over the batch, not one a sample"
            )
        self._made = means.made
        return means.counts

    def _compare(self, counts: list[Count], predicted: list[Count]) -> None:
        """A count that follows from shapes is checked now; one on the device at `total`: nobody waits for it."""
        if len(counts) != len(predicted):
            raise UsageError(_ASTRAY)
        for count, foretold in zip(counts, predicted, strict=True):
            if isinstance(count, torch.Tensor) or isinstance(foretold, torch.Tensor):
                self._astray.append(torch.as_tensor(count != foretold))
            elif count != foretold:
                raise UsageError(_ASTRAY)

    def learn_shift(self, outputs: Any, targets: Any) -> None:
        """Find whether the loss compares a token's output with the next token's target, where ranks have some tokens of
        every sequence; on a rank's own tokens. Every rank calls it, at the first microbatch."""
        if self.shift is not None or 1 not in self.dims:
            return
        outputs = tree_map(_cut_off, outputs)
        few = (_first_tokens(outputs), tree_map(_counted_target, _first_tokens(targets)))
        fits = [all(self._separates(*batch, 1, shift) for batch in (few, (outputs, targets))) for shift in (0, 1)]
        if self._comm is not None:
            message = torch.tensor([float(fit) for fit in fits], device=self._comm.device)
            fits = [bool(fit) for fit in self._comm.all_reduce(message, "min").tolist()]
        if not any(fits):
            raise UsageError(
                f"the loss {name_of(self._loss)} compares tokens with each other along dim 1 (the sequence), which cp "
                "gives to several ranks; expected sums and means over tokens, or targets that are one token ahead "
                "(outputs[:, :-1] with targets[:, 1:]): use cp=1"
            )
        self.shift = 0 if fits[0] else 1

    def _separates(self, outputs: Any, targets: Any, dim: int, shift: int) -> bool:
        """Whether two halves along a dim add up; True where the batch does not show it."""
        try:
            halves = _halves(outputs, targets, dim, shift)
            if halves is None:
                return True
            whole, parts = self._in_halves(outputs, targets, halves)
        except UsageError:
            return False
        return not bool(whole.isfinite()) or _is_near(whole, parts)

    def _in_halves(self, outputs: Any, targets: Any, halves: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss, and the partial losses of two halves."""
        counts = [self._counted(*half, dry=False) for half in halves]
        totals = [float(sum(pair)) for pair in zip(*counts, strict=True)] if len(counts[0]) == len(counts[1]) else []
        parts = []
        for half in halves:
            with Means(totals):
                parts.append(self._evaluated(*half))
        return self._evaluated(outputs, targets), parts

    def _prove(self, outputs: Any, targets: Any) -> None:
        """That the loss of the whole is the sum of partial losses of two halves, on this very batch."""
        outputs = tree_map(_cut_off, outputs)
        for dim in self.dims:
            samples = _samples(outputs)
            if samples is None:
                raise UsageError(
                    f"the loss {name_of(self._loss)} is computed from {_shown(outputs)}, without an output for each "
                    "sample: the model has made one number of its part of the batch already; return outputs a sample "
                    "and compute the loss from them, or give the labels to the model as an input of their own"
                )
            if dim == 0 and samples == 1:
                outputs, targets = _with_another_sample(outputs), tree_map(_twice, targets)
            halves = _halves(outputs, targets, dim, (self.shift or 0) if dim == 1 else 0)
            if halves is None:
                continue
            whole, parts = self._in_halves(outputs, targets, halves)
            if not bool(whole.isfinite()):
                return  # proves nothing; the next call may
            if not _is_near(whole, parts):
                raise UsageError(
                    f"the loss {name_of(self._loss)} on a batch is {whole.item():.6g}, but from two halves along dim "
                    f"{dim} it comes to {(parts[0] + parts[1]).item():.6g}: it is not made of sums and means over "
                    "samples. Take means with .mean(), reduction='mean' or sum / sum, rather than dividing by a size; "
                    "a loss that compares samples with each other is given all of them by loss=uni.BatchLoss(loss); "
                    "one that has a term without samples cannot be split: use dp=1, cp=1, microbatches=1"
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


def _samples(outputs: Any) -> int | None:
    """How many samples the outputs are of; None where no tensor in them has such a dim."""
    tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return max((tensor.shape[0] for tensor in tensors if tensor.ndim), default=None)


def _with_another_sample(outputs: Any) -> Any:
    """Outputs of one sample and of another one, made up: a single sample cannot show whether it can be separated."""

    def doubled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == 1:
            other = leaf * 0.75 + 0.125 if leaf.is_floating_point() else leaf
            return torch.cat([leaf, other])
        return leaf

    return tree_map(doubled, outputs)


def _twice(leaf: Any) -> Any:
    has_one = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == 1
    return torch.cat([leaf, leaf]) if has_one else leaf


def _is_near(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    scale = parts[0].abs() + parts[1].abs() + whole.abs()
    gap = (whole - parts[0] - parts[1]).abs()
    return bool(gap <= _TOLERANCE.get(whole.dtype, 1e-5) * scale)


def _first_tokens(tree: Any) -> Any:
    """Few enough that one of them makes a difference in any precision."""

    def first(leaf: Any) -> Any:
        return leaf[:, :_FEW] if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 else leaf

    return tree_map(first, tree)


def _counted_target(leaf: Any) -> Any:
    """Targets that are ignored are negative numbers, and would show nothing."""
    is_class = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    return leaf.clamp(min=0) if is_class else leaf


def _halves(outputs: Any, targets: Any, dim: int, shift: int = 0) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
    """The batch in two along a dim; None where it has one row or none."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.ndim > dim]
    rows = tensors[0].shape[dim] if tensors else 0
    if rows < 2:
        return None
    middle = (rows + 1) // 2
    both = (range(middle), range(middle, rows))
    first, second = ((part_of(outputs, dim, part, rows), part_of(targets, dim, part, rows)) for part in both)
    return shifted(first, targets, both[0], rows) if shift else first, second


def part_of(tree: Any, dim: int, part: range, rows: int) -> Any:
    """Of all tensors in a tree that have so many rows along a dim, some."""

    def piece(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > dim and leaf.shape[dim] == rows:
            return leaf.narrow(dim, part.start, len(part)).contiguous()
        return leaf

    return tree_map(piece, tree)


def shifted(pair: tuple[Any, Any], targets: Any, run: range, length: int) -> tuple[Any, Any]:
    """Outputs of a run of tokens and targets, for a loss that compares a token's output with the next one's target.

    Such a loss passes over the last output. So a run that does not end the sequence gets one more target, the next
    one, and one more output, which nobody looks at."""
    if run.stop == length:
        return pair
    return tree_map(lambda leaf: _with_blank_token(leaf, len(run)), pair[0]), part_of(
        targets, 1, range(run.start, run.stop + 1), length
    )


def _with_blank_token(leaf: Any, tokens: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2 or leaf.shape[1] != tokens:
        return leaf
    return torch.cat([leaf, leaf.new_zeros(leaf.shape[0], 1, *leaf.shape[2:])], dim=1)


def name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _shown(value: Any) -> str:
    def one(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return type(leaf).__name__

    shown = [one(leaf) for leaf in tree_leaves(value)]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
