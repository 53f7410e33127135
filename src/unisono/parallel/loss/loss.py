"""The loss of the global batch, from losses of its parts.

    loss = GlobalLoss(F.cross_entropy, mesh.comm("dp", "ep", "cp"))
    loss.prepare([(outputs, targets), ...])           # once a step: a pair a microbatch; outputs for their shapes only
    partial = loss(outputs, targets)                  # for each microbatch, in that order; backward through it
    value = loss.total(partials)                      # what the user's loss would be on the global batch

The partial losses of all ranks and microbatches sum to the user's loss on the full batch, whatever it counts (see
normalizers.py); so gradients are summed too, and never averaged. The user's loss is called as it is. It must be made of
sums and means over samples: the first call proves that on the batch at hand, by splitting it in two.

A term without samples (learned weights of tasks, a norm of weights) is in every part: each part but the first one
subtracts it. It is what the loss gives for no samples at all, where every mean is 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UnisonoError, UsageError
from unisono.mesh.random.state import SampleDim
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.compile.regions import eager_regions
from unisono.parallel.loss.counts import (
    MOST_MEANS,
    ExchangedCounts,
    PendingCounts,
    PendingFlag,
    PredictedCounts,
    joined,
    summed,
)
from unisono.parallel.loss.loss_parts import (
    blank_like,
    counted_target,
    detached_from,
    first_tokens,
    halves_along,
    has_gradient,
    is_near,
    leaves_but,
)
from unisono.parallel.loss.normalizers import Count, LossNormalizer
from unisono.parallel.share import BatchDim, dims_of, samples_between

Loss = Callable[[Any, Any], torch.Tensor]


class GlobalLoss:
    def __init__(self, loss: Loss, comm: Communicator | None = None, dims: Sequence[int] = (0,)) -> None:
        """`comm` joins the ranks that share the batch; `dims` are those along which outputs are sharded between
        them."""
        self._loss = loss
        self._comm = comm
        self.dims = tuple(dims)
        self._predicted: list[list[Count]] = []
        self._totals: ExchangedCounts | PredictedCounts | None = None
        self._full: PredictedCounts | None = None
        self._reported: PendingCounts | None = None  # of the last step, on its way
        self._predicts = False  # whether all ranks have seen that each can count the full batch by itself
        self._made = 0  # elements of the tensors that the last counting made
        self._microbatches = 0
        self._counts: list[list[Count]] = []  # of the microbatches so far
        self._sum: tuple[torch.Tensor, Handle | None] | None = None  # of the partial losses, on its way
        self._next = 0
        self._is_proved = False
        self._sizes: frozenset[int] | None = None  # see _learn_sizes
        self.shift: int | None = None  # by how many tokens targets are ahead of outputs, if dims has 1; see learn_shift
        self._has_constant = False
        self.sees_full_parameters = True  # whether parameters that the loss reads are those of one device
        self._outputs_have: Sequence[SampleDim | None] | None = None
        self._targets_dim: BatchDim = 0
        self._astray: list[torch.Tensor] = []
        self._surprises: list[PendingFlag] = []  # of the last step, on their way
        self._exchanged: ExchangedCounts | None = None  # in the last step, of which the check may be on its way

    def expect(self, outputs: Sequence[SampleDim | None], targets: BatchDim) -> None:
        """Where samples are in the outputs, leaf by leaf (None: it has none), and in the targets."""
        self._outputs_have, self._targets_dim = outputs, targets

    def _normalizer(self, totals: Any = None, dry: bool = False) -> LossNormalizer:
        known = [where.dim for where in self._outputs_have or () if where is not None]
        return LossNormalizer(totals, dry, known[0] or 0 if known else 0, self._sizes or frozenset())

    def _require_no_surprise(self) -> None:
        """UsageError where a count was another than predicted; of counts on a GPU, at `settle`."""
        flags, self._astray = self._astray, []
        if flags:
            self._surprises.append(PendingFlag(torch.stack(flags).any()))
            if self._surprises[-1].is_here:
                self._read_surprises()

    def _read_surprises(self) -> None:
        surprises, self._surprises = self._surprises, []
        if any(surprise.read() for surprise in surprises):
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

    def prepare(self, microbatches: Sequence[tuple[Any, Any]], full: tuple[Any, Any] | None = None) -> None:
        """Count what the loss will count on all of this rank's microbatches, and agree with the other ranks.

        `full`: outputs and targets of the global batch, where this rank has them all; again for their shapes only.
        """
        self.settle()
        self._require_no_surprise()
        self._next = 0
        self._microbatches = len(microbatches)
        self._predicted, self._counts = [], []
        self._totals, self._full, self._sum = None, None, None
        if self.ranks == 1 and len(microbatches) == 1:
            return  # this rank has the full batch: the user's loss serves as it is
        if microbatches:
            self._learn_sizes(*microbatches[0])
        if self._predicts and full is not None:
            self._full = self._totals = PredictedCounts(self._counted(blank_like(full[0]), full[1]))
            return
        self._predicted = [self._counted(blank_like(outputs), targets) for outputs, targets in microbatches]
        self._totals = self._exchanged = ExchangedCounts(name_of(self._loss), self._predicted, self._comm)
        if full is not None and self._is_quickly_counted(microbatches[-1][1]):
            self._full = self._predicted_counts(*full)

    def _predicted_counts(self, outputs: Any, targets: Any) -> PredictedCounts | None:
        try:
            return PredictedCounts(self._counted(blank_like(outputs), targets))
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
        normalizer = self._normalizer(self._totals)
        with normalizer:
            partial = self._evaluated(outputs, targets)
        if self._has_constant and not self._is_first_part:
            partial = partial - self._constant(outputs, targets)
        self._totals()  # also a loss that takes no mean hears where others take some
        self._counts.append(normalizer.counts)
        if self._predicted:
            self._compare(normalizer.counts, self._predicted[self._next])
        self._next += 1
        return partial

    @property
    def _is_first_part(self) -> bool:
        return self._next == 0 and (self._comm is None or self._comm.rank == 0)

    def total(self, partials: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss on the global batch. Every rank calls it, with the partial losses of all its microbatches."""
        self._require_no_surprise()
        if self._sum is None:
            self.start_total(partials)
        assert self._sum is not None
        (message, handle), self._sum = self._sum, None
        if handle is not None:
            handle.wait()
            if self._full is not None:
                self._reported = PendingCounts(message[1:], self._full)
                if self._reported.is_here:
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
        agrees = self._full is not None and (self._full is self._totals or self._agrees(self._full))
        message = joined([value, agrees, *summed(self._counts)], device)
        self._sum = (message, self._comm.all_reduce(message, async_op=True))

    def _agrees(self, full: PredictedCounts) -> bool:
        return self._totals is not None and full.agrees(self._totals())

    def settle(self) -> None:
        """Hear what was counted in the last step, before anything is made of it. All ranks get the same: how many
        of them could count the full batch, and what was counted in fact."""
        self._read_surprises()
        exchanged, self._exchanged = self._exchanged, None
        if exchanged is not None:
            exchanged.settle()
        reported, self._reported = self._reported, None
        if reported is None:
            return
        mine, (agreeing, *counts) = reported.read()
        was_predicted, self._predicts = self._predicts, agreeing == self.ranks
        if was_predicted and not reported.predicted_counts.agree(mine, counts):
            self._predicts = False
            raise UsageError(_ASTRAY)

    @property
    def _advice(self) -> str:
        if self.ranks == 1 and self._microbatches <= 1:
            return ""
        return "; if it needs the outputs for all samples of the batch, pass loss=uni.BatchLoss(loss)"

    def _evaluated(self, outputs: Any, targets: Any) -> torch.Tensor:
        try:
            value = self._loss(outputs, targets)
        except UnisonoError:  # of the plan or the communication, not of the loss
            raise
        except Exception as error:
            raise UsageError(
                f"the loss {name_of(self._loss)} cannot take what the model returns, {_shown(outputs)}, "
                f"with the targets {_shown(targets)}: {type(error).__name__}: {error}{self._advice}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(
                f"the loss {name_of(self._loss)} returned {_shown(value)}; expected one number in a tensor"
            )
        return value

    def _counted(self, outputs: Any, targets: Any, *, dry: bool = True) -> list[Count]:
        normalizer = self._normalizer(dry=dry)
        with normalizer:
            self._evaluated(outputs, targets)
        if len(normalizer.counts) > MOST_MEANS:
            raise UsageError(
                f"the loss {name_of(self._loss)} takes {len(normalizer.counts)} means; expected at most {MOST_MEANS}: "
                "take one mean over the batch, not one a sample"
            )
        self._require_sizes(normalizer, outputs, targets)
        self._made = normalizer.made
        return normalizer.counts

    def _learn_sizes(self, outputs: Any, targets: Any) -> None:
        """Find which of the numbers of Python that the loss divides sums by are sizes of the batch: those of two halves
        add up to that of both. The first call proves the loss with these as counts."""
        if self._sizes is not None:
            return
        batch = (blank_like(outputs), targets)
        try:
            if not self._divisors(*batch):
                self._sizes = frozenset()
                return
            if self._batch_size(*batch) < 2:
                batch = self._two_made_up(*batch)
            halves = self._halves(*batch, 0)
            found = [self._divisors(*each) for each in (batch, *(halves or ()))]
        except Exception:  # whatever the loss raises here, its first call will raise too
            return
        numbers = zip(*found, strict=True) if halves and len(set(map(len, found))) == 1 else ()
        self._sizes = frozenset(index for index, (full, *two) in enumerate(numbers) if full == sum(two))

    def _divisors(self, outputs: Any, targets: Any) -> list[float]:
        normalizer = self._normalizer(dry=True)
        with normalizer:
            self._evaluated(outputs, targets)
        return [] if normalizer.reads_values else normalizer.divisors

    def _require_sizes(self, normalizer: LossNormalizer, outputs: Any, targets: Any) -> None:
        """A number that is a size of the batch is 0 where there are no samples: one that is at least 1, as of
        `max(len(targets), 1)`, would be counted too often."""
        sizes = [number for index, number in enumerate(normalizer.divisors) if index in (self._sizes or ())]
        if any(sizes) and not self._batch_size(outputs, targets):
            raise UsageError(
                f"the loss {name_of(self._loss)} divides by {max(sizes):g} where a rank has no samples; divide by the "
                "size of the batch itself, or use a batch with a sample for every rank and microbatch"
            )

    def _compare(self, counts: list[Count], predicted: list[Count]) -> None:
        """A count that follows from shapes is checked now; one on the device at `total`: nobody waits for it."""
        if len(counts) != len(predicted):
            raise UsageError(_ASTRAY)
        for count, expected in zip(counts, predicted, strict=True):
            if isinstance(count, torch.Tensor) or isinstance(expected, torch.Tensor):
                self._astray.append(torch.as_tensor(count != expected))
            elif count != expected:
                raise UsageError(_ASTRAY)

    def learn_shift(self, outputs: Any, targets: Any) -> None:
        """Find whether the loss compares a token's output with the next token's target, where ranks have some tokens of
        every sequence; on a rank's own tokens. Every rank calls it, at the first microbatch."""
        if self.shift is not None or 1 not in self.dims:
            return
        outputs = tree_map(detached_from, outputs)
        self._learn_sizes(outputs, targets)
        few = (first_tokens(outputs), tree_map(counted_target, first_tokens(targets)))
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

    @eager_regions()
    def _separates(self, outputs: Any, targets: Any, dim: int, shift: int) -> bool:
        """Whether two halves along a dim add up; True where the batch does not show it."""
        try:
            halves = halves_along(outputs, targets, dim, shift)
            if halves is None:
                return True
            constant = self._found_constant(outputs, targets)
            full, parts = self._in_halves(outputs, targets, halves)
        except UsageError:
            return False
        return not bool(full.isfinite()) or is_near(full, parts, 0.0 if constant is None else constant.detach())

    def _in_halves(self, outputs: Any, targets: Any, halves: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss, and the partial losses of two halves."""
        counts = [self._counted(*half, dry=False) for half in halves]
        totals = [float(sum(pair)) for pair in zip(*counts, strict=True)] if len(counts[0]) == len(counts[1]) else []
        parts = []
        for half in halves:
            with self._normalizer(totals):
                parts.append(self._evaluated(*half))
        return self._evaluated(outputs, targets), parts

    @eager_regions()
    def _prove(self, outputs: Any, targets: Any) -> None:
        """That the batch's loss is the sum of partial losses of two halves, less what both have without samples,
        on this very batch. Outputs without samples take other values: a term that is 0 by chance must not hide."""
        self._require_repeatable(outputs, targets)
        outputs = self._with_free_outputs_moved(tree_map(detached_from, outputs))
        made = tree_leaves(outputs)
        constant = self._found_constant(outputs, targets)
        extra = 0.0 if constant is None else constant.detach()
        for dim in self.dims:
            if not any(where is not None for where in self._output_dims(made)):
                raise UsageError(
                    f"the loss {name_of(self._loss)} is computed from {_shown(outputs)}, without an output for each "
                    "sample: the model has made one number of its part of the batch already; return outputs a sample "
                    "and compute the loss from them, or give the labels to the model as an input of their own"
                )
            if dim == 0 and self._batch_size(outputs, targets) == 1:
                outputs, targets = self._with_another_sample(outputs, targets)
            halves = self._halves(outputs, targets, dim)
            if halves is None:
                continue
            try:
                full, parts = self._in_halves(outputs, targets, halves)
            except UsageError as error:
                self._evaluated(outputs, targets)  # raises where it fails on all of them, too
                raise UsageError(
                    f"the loss {name_of(self._loss)} takes the outputs for the samples of a rank, but not for a half "
                    f"of them ({error.__cause__ or error}): a loss that compares samples with each other is given all "
                    "of them by loss=uni.BatchLoss(loss); else use dp=1, cp=1, microbatches=1"
                ) from error
            if not bool(full.isfinite()):
                return  # proves nothing; the next call may
            if not is_near(full, parts, extra):
                raise UsageError(
                    f"the loss {name_of(self._loss)} on a batch is {full.item():.6g}, but from two halves along dim "
                    f"{dim} it comes to {(parts[0] + parts[1] - extra).item():.6g}: it is not made of sums and means "
                    "over samples. Take means with .mean(), reduction='mean' or sum / sum, rather than dividing by a "
                    "size; a loss that compares samples with each other is given all of them by "
                    "loss=uni.BatchLoss(loss); another one cannot be split: use dp=1, cp=1, microbatches=1"
                )
        self._is_proved = True

    def _require_repeatable(self, outputs: Any, targets: Any) -> None:
        """That the loss keeps nothing from one call to the next, as a weight that grows with every call: it is called
        for every rank and microbatch, and to count what it counts."""
        with no_side_effects(inspect.unwrap(self._loss)) as changed, torch.no_grad():
            values = [self._evaluated(outputs, targets)]
            names = sorted(changed())
            if not names:
                return
            values.append(self._evaluated(outputs, targets))
        if not torch.equal(*values) and not any(value.isnan() for value in values):
            raise UsageError(
                f"the loss {name_of(self._loss)} keeps {', '.join(names[:3])} from one call to the next, and is "
                f"{values[1].item():.6g} where it was {values[0].item():.6g} for the same batch; under this plan it is "
                "called once for every rank and microbatch, and more often: change what it keeps in the training loop, "
                "or use dp=1, cp=1, microbatches=1"
            )

    # ---- terms without samples -----------------------------------------------------------------------------------

    @eager_regions()
    def _constant(self, outputs: Any, targets: Any) -> torch.Tensor:
        """What the loss gives for no samples."""
        none = self._samples(outputs, targets, 0, 0)
        with self._normalizer([math.inf] * MOST_MEANS):
            return self._evaluated(*none)

    @eager_regions()
    def _found_constant(self, outputs: Any, targets: Any) -> torch.Tensor | None:
        """The same, to find out whether there is such a term; None where the loss cannot do without samples."""
        self._has_constant = False
        try:
            constant = self._constant(outputs, targets)
        except Exception:
            return None
        if not bool(constant.isfinite()):
            return None
        made = tree_leaves(outputs)
        sampled = [leaf for leaf, where in zip(made, self._output_dims(made), strict=True) if where is not None]
        self._has_constant = bool(constant != 0) or bool(leaves_but(constant, sampled))
        others = leaves_but(constant, made)
        if not self.sees_full_parameters and others and has_gradient(constant, others):
            raise UsageError(
                f"the loss {name_of(self._loss)} has a term of the model's parameters, of which a rank has a part only "
                "under this plan; let the model return that term as an output, or use tp=1, pp=1, ep=1 and zero=2"
            )
        return constant

    def _with_free_outputs_moved(self, outputs: Any) -> Any:
        leaves, spec = tree_flatten(outputs)
        for index, where in enumerate(self._output_dims(leaves)):
            leaf = leaves[index]
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                continue
            if where is None or (1 in self.dims and leaf.ndim < 2):  # of no samples, or of no tokens
                leaves[index] = (leaf.detach() * 1.1 + 0.05).requires_grad_(leaf.requires_grad)
        return tree_unflatten(leaves, spec)

    # ---- samples -------------------------------------------------------------------------------------------------

    def _output_dims(self, outputs: Sequence[Any]) -> Sequence[SampleDim | None]:
        if self._outputs_have is not None and len(self._outputs_have) == len(outputs):
            return self._outputs_have
        batch_size = next((x.shape[0] for x in outputs if isinstance(x, torch.Tensor) and x.ndim), 0)
        have = [isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[0] == batch_size for x in outputs]
        return [SampleDim(x.ndim, 0) if has else None for x, has in zip(outputs, have, strict=True)]

    def _samples(self, outputs: Any, targets: Any, first: int, last: int) -> tuple[Any, Any]:
        """Outputs and targets of these samples."""
        made, spec = tree_flatten(outputs)
        given, targets_spec = tree_flatten(targets)
        batch_size = self._batch_size(outputs, targets)
        made = [
            samples_between(leaf, where, batch_size, first, last)
            for leaf, where in zip(made, self._output_dims(made), strict=True)
        ]
        given = [
            samples_between(leaf, None if dim is None else SampleDim(leaf.ndim, dim), batch_size, first, last)
            for leaf, dim in zip(given, dims_of(targets, self._targets_dim), strict=True)
        ]
        return tree_unflatten(made, spec), tree_unflatten(given, targets_spec)

    def _batch_size(self, outputs: Any, targets: Any) -> int:
        """How many samples there are: a tensor may have several elements of each along its dim, but none fewer."""
        made, given = tree_leaves(outputs), tree_leaves(targets)
        dims = [*(None if where is None else where.dim for where in self._output_dims(made))]
        dims += dims_of(targets, self._targets_dim)
        sizes = [x.shape[dim] for x, dim in zip([*made, *given], dims, strict=True) if dim is not None]
        return min(sizes, default=0)

    def _two_made_up(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Zeros for two samples, where there are fewer."""

        def zeros(leaf: Any, dim: int | None) -> Any:
            if dim is None:
                return leaf
            shape = list(leaf.shape)
            shape[dim] = 2 * max(shape[dim], 1)
            return leaf.new_zeros(shape, requires_grad=leaf.requires_grad)

        made, spec = tree_flatten(outputs)
        given, targets_spec = tree_flatten(targets)
        made = [zeros(x, None if at is None else at.dim) for x, at in zip(made, self._output_dims(made), strict=True)]
        given = [zeros(x, dim) for x, dim in zip(given, dims_of(targets, self._targets_dim), strict=True)]
        return tree_unflatten(made, spec), tree_unflatten(given, targets_spec)

    def _with_another_sample(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Outputs of one sample and of another one, made up: one alone cannot show whether it can be separated."""
        made, spec = tree_flatten(outputs)
        given, targets_spec = tree_flatten(targets)
        for index, where in enumerate(self._output_dims(made)):
            if where is not None and where.dim is not None:
                other = made[index] * 0.75 + 0.125 if made[index].is_floating_point() else made[index]
                made[index] = torch.cat([made[index], other], where.dim)
        for index, dim in enumerate(dims_of(targets, self._targets_dim)):
            if dim is not None:
                given[index] = torch.cat([given[index], given[index]], dim)
        return tree_unflatten(made, spec), tree_unflatten(given, targets_spec)

    def _halves(self, outputs: Any, targets: Any, dim: int) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
        """The batch in two, by samples (dim 0) or along another dim; None where there is one of them or none."""
        if dim:
            return halves_along(outputs, targets, dim, self.shift or 0)
        batch_size = self._batch_size(outputs, targets)
        middle = (batch_size + 1) // 2
        if batch_size < 2:
            return None
        return self._samples(outputs, targets, 0, middle), self._samples(outputs, targets, middle, batch_size)


_ASTRAY = "the loss's count depends on the outputs, so it cannot be known before all are there; use microbatches=1"


def name_of(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _shown(value: Any) -> str:
    def one(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return type(leaf).__name__

    shown = [one(leaf) for leaf in tree_leaves(value)]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")
