"""Where samples are in what a model draws and returns, and whether it keeps them apart: tried once, on a few samples.

The model is run on up to four samples of a batch, then on either half of them, as data ranks and microbatches run it.
Between the runs

- a call for random numbers whose shape follows the number of samples has samples along the dim that does; one whose
  shape does not is the same on every rank (dropout of a table of positions);
- an output has samples along the dim that follows their number, or is free of samples (learned weights of tasks);
- buffers that the forward pass writes must not depend on the samples; nor must what it keeps in Python, in an
  attribute or a list, which is tried over two steps;
- the gradients that come to a sample must not depend on the others, as those of a user's autograd function may;
- the halves, with the random numbers that belong to their samples, must give the halves of the outputs: else the model
  mixes samples or reads the size of the batch, and is refused by the name of the first module that shows it.

BatchNorm, whose statistics the plan makes global, and the capacity of uni.nn.MoE, which it makes global too, are left
out of the comparison. Of a model without values only the shapes are compared; one that cannot be run here is taken to
have samples along dim 0 of everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten

from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import states_outside_torch
from unisono.mesh.global_index import Part
from unisono.mesh.random.state import Key, RandomState, SampleDim
from unisono.mesh.side_effects import no_side_effects, reaches
from unisono.parallel.checks.sample_comparison import (
    FirstDifference,
    Found,
    Written,
    are_close,
    are_same,
    copied,
    found_output_dims,
    gradients_match,
    is_inexact,
    matches,
    noting,
    sample_weights,
)
from unisono.parallel.expert.even_experts import evenly_visited
from unisono.parallel.expert.expert import MoE, collect_aux
from unisono.parallel.inputs import call, cloned
from unisono.parallel.meta.meta_tensors import meta_copy, realised_copy
from unisono.parallel.meta.shadow import OnMeta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.pipeline.parameter_usage import left_as_it_was
from unisono.parallel.pipeline.rehearsal import device_of
from unisono.parallel.share import BatchDim, batch_size_of, batch_slice, dims_of, inputs_dim, joined_batches

_FEW = 4
_SMALL_META = 2 * 10**6  # parameters of a model without values that is given some to be tried

Loss = Callable[[Any, Any], torch.Tensor]


class HoldsItself(Exception):
    """A hook or a closure of the model holds the model: what a copy would do is not what the model does."""


@dataclass(frozen=True)
class Samples:
    """What was found out about a model."""

    draws: dict[Key, SampleDim]
    outputs: tuple[SampleDim | None, ...]  # for every leaf; None for one free of samples, dim=None for one made of all


@dataclass(frozen=True)
class _Job:
    """What is asked: whether a batch of (inputs, targets) with samples along `dim` can be sharded."""

    batch: tuple[Any, Any]  # a few samples
    dim: BatchDim
    loss: Loss | None
    microbatches: int
    may_mix: bool
    looks_back: bool
    all_inputs: Any

    @property
    def batch_size(self) -> int:
        return batch_size_of(self.batch, self.dim)

    @property
    def halves(self) -> list[range]:
        middle = (self.batch_size + 1) // 2
        return [range(middle), range(middle, self.batch_size)]

    def inputs(self, held: range, step: int = 0) -> Any:
        """Of the second step, the samples of the first in another order."""
        batch = self.batch
        if step:
            ends = [batch_slice(batch, *end, self.dim) for end in ((1, self.batch_size), (0, 1))]
            batch = joined_batches(ends, self.dim)
        return cloned(batch_slice(batch, held.start, held.stop, self.dim)[0])


def find_samples(
    model: nn.Module,
    batch: tuple[Any, Any],
    dim: BatchDim = 0,
    loss: Loss | None = None,
    microbatches: int = 1,
    may_mix: bool = False,
    looks_back: bool = False,
) -> Samples | None:
    """UsageError where the model mixes samples; None where the model could not be run. HoldsItself where a model
    without values would have to be copied to be run, and cannot.

    loss: what must not read outputs that are made of all samples. may_mix: samples may be mixed, as the loss is given
    all of them. looks_back: try the backward too, of a model that no plan has changed yet."""
    batch_size = batch_size_of(batch, dim)
    if batch_size < 2:
        return None
    inputs, targets = batch
    job = _Job(
        batch_slice((inputs, targets), 0, min(_FEW, batch_size), dim),
        dim,
        loss,
        microbatches,
        may_mix,
        looks_back,
        inputs,
    )
    tried: nn.Module | None = model
    if any(tensor.is_meta for tensor in model.parameters()):
        is_small = sum(map(torch.numel, model.parameters())) <= _SMALL_META
        tried = realised_copy(model) if is_small else None
        if tried is not None and reaches(tried, model.modules()):
            raise HoldsItself
    if tried is None:
        return _SampleTrial(meta_copy(model), job, has_values=False).found()
    return _SampleTrial(tried, job).found()


@dataclass(frozen=True)
class _Gradient:
    """What a module has put out, and the gradient that came to it."""

    point: str
    value: torch.Tensor
    gradient: torch.Tensor | None


class _SampleTrial:
    def __init__(self, model: nn.Module, job: _Job, has_values: bool = True) -> None:
        self._model, self._job, self._has_values = model, job, has_values
        self._watch = _Watch(model, job.batch_size, has_values)
        self._written: dict[str, Written] = {}  # buffers that the last run has changed
        self._needs_gradients = False  # to run at all, as it registers hooks on gradients or computes some
        self._kept_in_python: set[str] = set()  # the attributes, globals and containers that it has

    def found(self) -> Samples | None:
        versions = {name: parameter._version for name, parameter in self._model.named_parameters()}
        try:
            full = self._first_run()
        except UsageError:
            raise
        except Exception as error:
            self._require_failing_on_all(error)
            return None
        for name, parameter in self._model.named_parameters():
            if parameter._version != versions.get(name):
                raise UsageError(
                    f"the forward pass writes the parameter {name}, and a rank or a microbatch has some of the samples "
                    "only to write it by; use dp=1 and microbatches=1, or write it in the optimizer's step"
                )
        try:
            written = self._written
            parts = []
            for held in self._job.halves:
                parts.append(self._run(held))
                self._require_free_of_samples(written)
            if written and self._job.microbatches > 1:
                self._require_written_once()
        except UsageError:
            raise
        except Exception:  # whatever a model raises here, its first step will raise too
            return None
        self._require_draws_found()
        output_dims = found_output_dims(full, parts[0], self._job.batch_size, len(self._job.halves[0]))
        if not self._has_values:
            self._watch.require_certain_order(output_dims)
            self._require_no_comparison(full, parts[0], output_dims)
        elif not self._job.may_mix:
            output_dims = self._apart(full, parts, output_dims)
        if self._has_values and self._job.looks_back:
            self._require_separable_backward(output_dims)
        if self._has_values and self._kept_in_python:
            self._require_nothing_carried(full, parts, output_dims)
        return Samples(self._watch.found, output_dims)

    # ---- runs ----------------------------------------------------------------------------------------------------

    def _first_run(self) -> Any:
        try:
            return self._run(range(self._job.batch_size))
        except UsageError:
            raise
        except Exception:
            self._needs_gradients = self._has_values
            if not self._needs_gradients:
                raise
            return self._run(range(self._job.batch_size))

    def _run(self, held: range, times: int = 1) -> Any:
        return self._run_in_turn([(held, 0)] * times)[-1]

    def _run_in_turn(self, passes: Sequence[tuple[range, int]]) -> list[Any]:
        """Forward passes on these samples of these steps, of which later ones meet what earlier ones have left."""
        with contextlib.ExitStack() as scopes:
            if not self._has_values:
                for scope in (KnownShapes(), OnMeta(device_of(self._job.batch)), evenly_visited(self._model)):
                    scopes.enter_context(scope)
            changed = scopes.enter_context(_undisturbed(self._model))
            scopes.enter_context(_without_batch_statistics(self._model))
            scopes.enter_context(_without_capacity(self._model))
            scopes.enter_context(torch.set_grad_enabled(self._needs_gradients))
            scopes.enter_context(self._watch)
            before, generators, earlier = self._buffers(), states_outside_torch(), changed()
            outputs = []
            for held, step in passes:
                self._watch.begin(held if len(held) < self._job.batch_size else None)
                made = call(self._model, self._job.inputs(held, step))
                outputs.append(cloned(made) if len(passes) > 1 or self._needs_gradients else made)
                self._written, before = self._changed(before), self._buffers()
            self._kept_in_python = changed() - earlier
            for name, state in states_outside_torch().items():
                if state != generators[name]:
                    raise UsageError(
                        f"the forward pass draws numbers with {name}, of which every rank and microbatch would draw "
                        "its own; draw them with torch, which a plan follows, or use dp=1 and microbatches=1"
                    )
        collect_aux(self._model)
        return outputs

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers() if not buffer.is_meta}

    def _changed(self, before: dict[str, torch.Tensor]) -> dict[str, Written]:
        pairs = ((name, before.get(name), value) for name, value in self._buffers().items())
        return {name: Written(old, new) for name, old, new in pairs if old is not None and not are_same(old, new)}

    # ---- what is refused -----------------------------------------------------------------------------------------

    def _require_failing_on_all(self, error: Exception) -> None:
        """A model that fails on a few samples must fail on all of them too: then its first step shows why."""
        try:
            with _undisturbed(self._model), torch.set_grad_enabled(self._needs_gradients):
                call(self._model, cloned(self._job.all_inputs))
        except Exception:
            return
        finally:
            collect_aux(self._model)
        if not self._has_values:
            return
        if self._is_time_major():
            raise _time_major()
        shown = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the model runs on the batch, but not on {self._job.batch_size} of its samples ({shown}), and dp and "
            "microbatches give a rank some of them only; let the model take any number of samples, or use dp=1 and "
            "microbatches=1"
        ) from error

    def _require_free_of_samples(self, written: dict[str, Written]) -> None:
        """`written` by a run on all samples, and other values by the last run, on a half of them."""
        for name, by_all in written.items():
            mine = self._written.get(name)
            if mine is None or by_all.differs_from(mine):
                raise UsageError(
                    f"the forward pass writes the buffer {name}, with values that depend on the samples of the batch, "
                    "of which a rank or a microbatch sees some only; use dp=1 and microbatches=1, or nn.BatchNorm for "
                    "statistics of the batch"
                )

    def _require_written_once(self) -> None:
        """Buffers that a second forward pass writes again, with other values: not a table that is filled once."""
        self._run(range(self._job.batch_size), times=2)
        for name in self._written:
            raise UsageError(
                f"every forward pass changes the buffer {name}, and microbatches={self._job.microbatches} runs more of "
                "them in a step than one device does; use microbatches=1"
            )

    def _require_nothing_carried(self, full: Any, parts: list[Any], output_dims: tuple[SampleDim | None, ...]) -> None:
        """What the forward pass keeps in Python from one call to the next (a running mean in an attribute) must be for
        a part of the samples what it is for all of them: two steps are tried."""
        names = ", ".join(sorted(self._kept_in_python)[:3])
        everything, halves = range(self._job.batch_size), self._job.halves
        agree = partial(self._agree, output_dims=output_dims)
        if not all(map(agree, [full] * len(halves), parts, halves)):
            return  # samples are mixed, as they may be: parts show nothing
        in_turn = []
        try:
            later = self._run_in_turn([(everything, 0), (everything, 1)])[1]
            apart = [self._run_in_turn([(held, 0), (held, 1)])[1] for held in halves]
            if self._job.microbatches > 1:
                in_turn = self._run_in_turn([(held, step) for step in (0, 1) for held in halves])
        except UsageError:
            raise
        except Exception:  # whatever a model raises here, its second step will raise too
            return
        if not all(map(agree, [later] * len(halves), apart, halves)):
            raise UsageError(
                f"the forward pass keeps {names} from one call to the next, with values that depend on the samples of "
                "the batch, of which a rank or a microbatch sees some only; use dp=1 and microbatches=1, or "
                "nn.BatchNorm for statistics of the batch"
            )
        expected = [full] * len(halves) + [later] * len(halves)
        if not all(map(agree, expected[: len(in_turn)], in_turn, halves * 2)):
            raise UsageError(
                f"every forward pass changes {names} and depends on what the one before has left there, and "
                f"microbatches={self._job.microbatches} runs more of them in a step than one device does; use "
                "microbatches=1"
            )

    def _require_separable_backward(self, output_dims: tuple[SampleDim | None, ...]) -> None:
        """The gradients that come to a sample must not depend on the others: an autograd function or a hook of a
        user's own may mix them where the forward does not. Tried on two samples, where a module's output has them one
        after the other: that of an expert has tokens by their routes."""
        pair = range(2)
        try:
            both = self._gradients_at_modules(pair, output_dims)
            singles = [self._gradients_at_modules(range(i, i + 1), output_dims) for i in pair]
        except UsageError:
            raise
        except Exception:  # whatever a backward raises here, the first step will raise too
            return
        if any([each.point for each in alone] != [each.point for each in both] for alone in singles):
            return  # another way through the model: nothing is known
        found = [each.gradient for each in both if each.gradient is not None and each.gradient.numel()]
        largest = max((float(gradient.abs().max()) for gradient in found), default=0.0)
        for of_pair, *of_one in reversed(list(zip(both, *singles, strict=True))):
            held = [range(i, i + 1) for i in pair]
            pairs = list(zip(of_one, held, strict=True))
            if not all(matches(mine.value, of_pair.value, part, len(pair)) for mine, part in pairs):
                continue
            for mine, part in pairs:
                if not gradients_match(mine.gradient, of_pair.gradient, part, len(pair), largest):
                    raise UsageError(
                        f"the gradient of {of_pair.point} for a sample depends on the other samples of the batch: an "
                        "autograd function or a hook on gradients mixes them in the backward. dp and microbatches give "
                        "a rank some of the samples only; keep samples apart there, or use dp=1 and microbatches=1"
                    )

    def _gradients_at_modules(self, held: range, output_dims: tuple[SampleDim | None, ...]) -> list[_Gradient]:
        """Of a sum of the outputs with weights that belong to samples: its gradient at what modules put out."""
        noted: list[tuple[str, torch.Tensor, torch.Tensor]] = []

        def note(point: str, values: list[torch.Tensor]) -> None:
            if point.startswith("the output"):
                noted.extend((point, value, value.detach().clone()) for value in values if value.requires_grad)

        with contextlib.ExitStack() as scopes:
            scopes.enter_context(_undisturbed(self._model))
            scopes.enter_context(_without_batch_statistics(self._model))
            scopes.enter_context(_without_capacity(self._model))
            scopes.enter_context(noting(self._model, note))
            scopes.enter_context(torch.enable_grad())
            scopes.enter_context(self._watch)
            self._watch.begin(held if len(held) < self._job.batch_size else None)
            outputs = tree_leaves(call(self._model, self._job.inputs(held)))
            weighted = [
                (value, sample_weights(value, where, held))
                for value, where in zip(outputs, output_dims, strict=True)
                if isinstance(value, torch.Tensor) and value.requires_grad and is_inexact(value)
                if where is not None and where.dim is not None
            ]
            values, weights = [value for value, _ in weighted], [weight for _, weight in weighted]
            at, noted = noted, []  # a backward that runs modules again notes more
            found = torch.autograd.grad(values, [value for _, value, _ in at], weights, allow_unused=True)
        collect_aux(self._model)
        return [_Gradient(point, value, each) for (point, _, value), each in zip(at, found, strict=True)]

    def _agree(self, full: Any, part: Any, held: range, output_dims: tuple[SampleDim | None, ...]) -> bool:
        """Whether a part's outputs are those for its samples of the full batch's; of what is made of all samples,
        nothing is known."""
        pairs = zip(tree_leaves(full), tree_leaves(part), output_dims, strict=len(output_dims) > 0)
        return all(
            matches(mine, full_value, held, self._job.batch_size)
            for full_value, mine, where in pairs
            if isinstance(full_value, torch.Tensor) and is_inexact(full_value)
            if where is None or where.dim is not None
        )

    def _apart(
        self, full: Any, parts: list[Any], output_dims: tuple[SampleDim | None, ...]
    ) -> tuple[SampleDim | None, ...]:
        """The sample dims of the outputs, with outputs that are made of all samples marked; UsageError where
        samples are mixed."""
        found = list(output_dims)
        for held, part in zip(self._job.halves, parts, strict=True):
            pairs = zip(tree_flatten_with_path(full)[0], tree_leaves(part), output_dims, strict=len(output_dims) > 0)
            for number, ((path, full_value), mine, where) in enumerate(pairs):
                if not isinstance(full_value, torch.Tensor) or not is_inexact(full_value):
                    continue
                if where is not None and where.dim is not None:
                    if not matches(mine, full_value, held, self._job.batch_size):
                        raise self._mixing()
                elif not are_close(mine, full_value):
                    found[number] = SampleDim(full_value.ndim, None)
                    if self._is_used(full, number):
                        raise self._made_of_all(keystr(path), full_value, mine)
        return tuple(found)

    def _require_draws_found(self) -> None:
        try:
            self._watch.require_found()
        except UsageError:
            if self._has_values and self._is_time_major():
                raise _time_major() from None
            raise

    def _require_no_comparison(self, full: Any, part: Any, output_dims: tuple[SampleDim | None, ...]) -> None:
        """UsageError where the loss reads an output of samples by samples."""
        pairs = zip(tree_flatten_with_path(full)[0], tree_leaves(part), output_dims, strict=len(output_dims) > 0)
        for number, ((path, full_value), mine, where) in enumerate(pairs):
            if where is not None and where.dim is None and self._is_used(full, number):
                raise self._made_of_all(keystr(path), full_value, mine)

    def _is_used(self, outputs: Any, point: int) -> bool:
        """Whether the loss depends on a leaf of the outputs."""
        leaves, spec = tree_flatten(outputs)
        if self._job.loss is None:
            return False
        leaves[point] = leaves[point].detach().clone().requires_grad_()
        try:
            with torch.enable_grad():
                value = self._job.loss(tree_unflatten(leaves, spec), self._job.batch[1])
            if not value.requires_grad:
                return False
            return torch.autograd.grad(value, leaves[point], allow_unused=True)[0] is not None
        except Exception:
            return True

    def _made_of_all(self, path: str, output: torch.Tensor, part: torch.Tensor) -> UsageError:
        if part.shape != output.shape:
            return UsageError(
                f"the model's output{path} is of shape {tuple(output.shape)} for {self._job.batch_size} samples: it "
                "compares samples with each other, and a rank or a microbatch has some of them only; return an "
                "embedding for every sample and compare them in the loss, given as loss=uni.BatchLoss(loss), or use "
                "dp=1 and microbatches=1"
            )
        return UsageError(
            f"the model's output{path} is of shape {tuple(output.shape)} for any number of samples, but its values "
            "depend on the samples, of which a rank or a microbatch has some only; return a value for every sample "
            "and let the loss take the mean, give the labels of a loss to the model as an input of their own, or use "
            "dp=1 and microbatches=1"
        )

    def _mixing(self) -> UsageError:
        if self._is_time_major():
            return _time_major()
        return UsageError(
            f"the model's outputs for a sample depend on the other samples of the batch, or on how many there are: "
            f"{self._first_mixing()}. dp and microbatches give a rank some of the samples only; keep samples apart, or "
            "use dp=1 and microbatches=1"
        )

    def _is_time_major(self) -> bool:
        inputs = self._job.all_inputs
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if set(dims_of(inputs, inputs_dim(self._job.dim))) != {0} or any(leaf.ndim < 2 for leaf in tensors):
            return False
        try:
            return find_samples(self._model, (inputs, None), (1, None)) is not None
        except UsageError:
            return False

    def _first_mixing(self) -> str:
        """The first module of the forward pass at which a half of the samples gives other values than all of them."""
        events: list[tuple[str, Any]] = []
        with noting(self._model, lambda point, values: events.append((point, copied(values)))):
            self._run(range(self._job.batch_size))
        for held in self._job.halves:
            found = FirstDifference(events, held, self._job.batch_size)
            with contextlib.suppress(Found), noting(self._model, found.meet):
                self._run(held)
            if found.point:
                return found.point
        return "it shows in the outputs only"


def _time_major() -> UsageError:
    return UsageError(
        "the inputs' samples are along dim 1 (time-major), but they would be sharded along dim 0: parts of the batch "
        "along dim 1 give the same outputs as all of it, along dim 0 they do not; pass batch_dim=1"
    )


class _Watch(RandomState):
    """Notes the calls for random numbers in the run on all samples; in that on a part of them, draws its numbers."""

    def __init__(self, model: nn.Module, batch_size: int, has_values: bool) -> None:
        super().__init__(seed=0)
        self.name_modules(model)
        self.counts_meta = not has_values
        self.refuses_unfollowed = True
        self.found: dict[Key, SampleDim] = {}
        self._batch_size = batch_size
        self._part: range | None = None
        self._seen: dict[Key, _RandomCall] = {}
        self._faults: dict[Key, str] = {}
        self._unordered: list[Key] = []  # a dim of which it is not known whether samples alternate

    def begin(self, part: range | None) -> None:
        """A run on these samples, or on all of them."""
        self.step = 0
        self._part = part

    def _held(self, key: Key, shape: Any, kind: str, like: torch.Tensor | None, may_be_full: bool) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        if self._part is None:
            self._seen[key] = _RandomCall.of(shape, like, self._batch_size)
        else:
            parts = self._compared(key, tuple(shape), like, self._part)
        return parts if self.locate is None else self.locate(shape, kind, parts, key)

    def _compared(self, key: Key, shape: tuple[int, ...], like: torch.Tensor | None, part: range) -> dict[int, Part]:
        full_value = self._seen.get(key)
        if full_value is None or len(full_value.shape) != len(shape):
            self._faults[key] = "other calls for some of the samples than for all of them"
            return {}
        changed = [dim for dim, size in enumerate(shape) if size != full_value.shape[dim]]
        if not changed:
            self.found.setdefault(key, SampleDim(len(shape), None))
            return {}
        dim = changed[0]
        if len(changed) > 1 or shape[dim] * self._batch_size != full_value.shape[dim] * len(part):
            self._faults[key] = f"shape {full_value.shape} for {self._batch_size} samples and {shape} for {len(part)}"
            return {}
        if key not in self.found:
            alternates, is_certain = full_value.alternates(
                _RandomCall.of(shape, like, len(part)), dim, part, self._batch_size
            )
            self.found[key] = SampleDim(len(shape), dim, alternates)
            if not is_certain:
                self._unordered.append(key)
        held = Part(part, self._batch_size)
        return {dim: held.repeated(shape[dim]) if self.found[key].alternates else held.stretched(shape[dim])}

    def require_found(self) -> None:
        for (site, _), fault in self._faults.items():
            raise UsageError(
                f"{site or 'the model'} draws random numbers that cannot be assigned to samples: "
                f"{fault}; use dp=1 and microbatches=1, or leave its dropout or noise out"
            )

    def require_certain_order(self, outputs: tuple[SampleDim | None, ...]) -> None:
        """Without values it is not seen how samples follow each other in a folded dim: in models whose tensors all have
        them first, they come one after the other."""
        everything = [*self.found.values(), *filter(None, outputs)]
        if self._unordered and any(where.dim for where in everything):
            raise UsageError(
                f"{self._unordered[0][0] or 'the model'} draws random numbers along a dim into which samples were "
                "folded, in a model that does not have samples first; draw them before folding, or use dp=1 and "
                "microbatches=1"
            )


@dataclass(frozen=True)
class _RandomCall:
    shape: tuple[int, ...]
    sums: dict[int, torch.Tensor]  # by dims that may be folded: a number for every position along the dim

    @classmethod
    def of(cls, shape: Any, like: torch.Tensor | None, batch_size: int) -> _RandomCall:
        shape = tuple(shape)
        if like is None or like.is_meta or tuple(like.shape) != shape or not like.is_floating_point():
            return cls(shape, {})
        folded = [dim for dim, size in enumerate(shape) if size > batch_size and size % batch_size == 0]
        squares = like.detach().double().square() if folded else like
        return cls(shape, {d: squares.sum([o for o in range(len(shape)) if o != d]) for d in folded})

    def alternates(self, part: _RandomCall, dim: int, held: range, batch_size: int) -> tuple[bool, bool]:
        """Whether samples alternate along the dim, judged by the values of those that the part holds; whether that is
        certain."""
        times = self.shape[dim] // batch_size
        if times == 1:
            return False, True
        if dim not in self.sums or dim not in part.sums:
            return False, False
        all_of_it, mine = self.sums[dim], part.sums[dim]
        interleaved = (all_of_it.view(times, batch_size)[:, held.start : held.stop].reshape(-1) - mine).abs().max()
        consecutive = (all_of_it.view(batch_size, times)[held.start : held.stop].reshape(-1) - mine).abs().max()
        return bool(interleaved * 10 < consecutive), True


# ---- runs that leave no trace ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[Callable[[], set[str]]]:
    with no_side_effects(model) as changed, left_as_it_was(model):
        yield changed


@contextlib.contextmanager
def _without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """In the block, every BatchNorm normalises by its running statistics, or not at all where it has none."""
    changed = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in changed:
        module.forward = partial(_normalised, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


@contextlib.contextmanager
def _without_capacity(model: nn.Module) -> Iterator[None]:
    """In the block, every MoE is dropless: which tokens exceed its capacity depends on the full batch."""
    limited = [(moe, moe.capacity_factor) for moe in model.modules() if isinstance(moe, MoE)]
    for moe, _ in limited:
        moe.capacity_factor = None
    try:
        yield
    finally:
        for moe, factor in limited:
            moe.capacity_factor = factor


def _normalised(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    if module.running_mean is not None and module.running_var is not None:
        return F.batch_norm(x, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return x if module.weight is None else x * module.weight.view(shape) + module.bias.view(shape)
