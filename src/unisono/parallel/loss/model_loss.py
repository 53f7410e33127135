"""A loss that the model computes itself, from labels among its inputs, normalised over the global batch.

Hugging Face models take `labels=` and return `outputs.loss`, a mean over the samples or tokens that the call was given.
Under a plan a call is given a part of the batch, so that mean is the wrong one. The part of the forward that depends on
the labels is therefore not computed where it stands but recorded, and replayed as the loss of `outputs` and `labels`,
which loss.py can normalise like any other:

    found = ModelLoss.of(model, loss, example)         # once, on a meta copy: which inputs are labels, what is recorded
    recorded = found.record(model, inputs)             # a forward; a Recorded holds what the loss needs of it
    loss = with_model_loss(loss)                       # takes Recorded outputs, and Labelled targets

loss_recorder.py records and replays. Labels that the model feeds to its own layers (the decoder's inputs of T5) are
given to them as they are.

Note: what may be replayed. A step keeps the Python numbers that it was called with. One that follows from the size of
the batch, as in `loss.sum() / labels.shape[0]`, would be that of a part; so the program is recorded for two sizes, and
must be the same. A leaf must belong to samples (its dim 0 grows with the batch) or not depend on the batch at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import (
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from unisono.errors import UsageError
from unisono.mesh.interception import Interception
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.inputs import call
from unisono.parallel.loss.loss import Loss, name_of
from unisono.parallel.loss.loss_recorder import LossProgram, LossRecorder, LossStep, LossValues, ref_of
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.pipeline.dependence import Dependence, storages_of
from unisono.parallel.pipeline.parameter_usage import left_as_it_was
from unisono.parallel.share import batch_size_of, batch_slice

Trial = TypeVar("Trial")

_NAMES = ("label", "start_positions", "end_positions")  # in the names of inputs that are labels in Hugging Face models


class Labelled(NamedTuple):
    """The user's targets, and the labels among the model's inputs."""

    targets: Any
    labels: list[torch.Tensor]


# ---- what a forward leaves for the loss ------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A forward's outputs, with a LossRef where the model's own loss stands, and what it is computed from."""

    outputs: Any
    samples: list[torch.Tensor]  # leaves that belong to samples: (samples, ...)
    shared: list[torch.Tensor]  # leaves that do not depend on the batch
    steps: list[LossStep]
    is_flat: list[bool | None]  # of each leaf: whether the model had it as (samples * ..., ...); None of a shared one

    def evaluated(self, labels: Sequence[torch.Tensor]) -> Any:
        """The outputs as the model would have returned them."""
        samples, shared = iter(self.samples), iter(self.shared)
        leaves = [next(shared) if is_flat is None else _flattened(next(samples), is_flat) for is_flat in self.is_flat]
        return LossValues(self.steps, labels, leaves).of(self.outputs)


def _flattened(leaf: torch.Tensor, is_flat: bool) -> torch.Tensor:
    return leaf if not is_flat else leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _is_flat(leaf: torch.Tensor, batch_size: int, of_example: int | None) -> bool | None:
    """Whether a leaf has several entries a sample; sequences may be of another length than the example's."""
    if of_example is None or not leaf.ndim:
        return None if of_example is None else False
    return of_example > 1 or leaf.shape[0] != batch_size


def _by_sample(leaf: torch.Tensor, batch_size: int, is_flat: bool | None, of_example: int) -> torch.Tensor:
    if not is_flat:
        return leaf.reshape(1) if batch_size == 1 and not leaf.ndim else leaf
    return leaf.reshape(batch_size, leaf.shape[0] // batch_size if batch_size else of_example, *leaf.shape[1:])


register_pytree_node(
    Recorded,
    lambda recorded: ([recorded.outputs, recorded.samples], (recorded.shared, recorded.steps, recorded.is_flat)),
    lambda children, context: Recorded(*children, *context),
)


def with_model_loss(loss: Loss) -> Loss:
    """The loss, also of Recorded outputs with Labelled targets."""

    def evaluated(outputs: Any, targets: Any) -> torch.Tensor:
        if not isinstance(outputs, Recorded):
            return loss(outputs, targets)
        return loss(outputs.evaluated(targets.labels), targets.targets)

    evaluated.__name__ = name_of(loss)
    setattr(evaluated, "__wrapped__", loss)  # noqa: B010
    return evaluated


def own_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """The loss of a model that computes it itself: `outputs.loss`, or the output where that is a number."""
    if isinstance(outputs, torch.Tensor) and not outputs.ndim:
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            f"no loss= was given, and the model's output ({type(outputs).__name__}) has no loss; expected 'labels' in "
            "the batch of a model that computes its loss (outputs.loss), or loss=, a function of (outputs, targets)"
        )
    return found


# ---- which inputs are labels, and what is recorded -------------------------------------------------------------------


class NeedsValues(Exception):
    """The model cannot be run without values, and has none."""


def on_two_sizes(
    model: nn.Module, example: tuple[Any, Any], trial: Callable[[nn.Module, Any], Trial]
) -> tuple[Trial, Trial, int]:
    """What trial(model, batch) gives for some samples of the example and for one less, and how many those are.

    The model is a copy without values; where that fails, it is the model itself, or NeedsValues is raised."""
    batch_size = min(batch_size_of(example), 3)
    sizes = [batch_slice(tuple(example), 0, count) for count in (batch_size, batch_size - 1)]
    try:
        with torch.device("meta"):
            large, small = (trial(meta_copy(model), to_meta(batch)) for batch in sizes)
    except UsageError:
        raise
    except Exception as error:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise NeedsValues from error
        try:
            with left_as_it_was(model):
                large, small = (trial(model, batch) for batch in sizes)
        finally:
            collect_aux(model)  # nobody else will
    return large, small, batch_size


@dataclass(eq=False)
class ModelLoss:
    """How a model computes a loss from labels among its inputs."""

    labels: tuple[int, ...]  # which of the inputs' leaves
    forms: list[Any]  # of the steps
    multiples: list[int | None]  # of each leaf: its entries a sample, or None where it does not belong to samples

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, example: tuple[Any, Any]) -> ModelLoss | None:
        """That of a model whose own loss the user's `loss` reads; None where there is none. May raise NeedsValues."""
        leaves = tree_leaves(example[0])
        if sum(isinstance(leaf, torch.Tensor) for leaf in leaves) < 2 or batch_size_of(example) < 2:
            return None
        labels = _named_labels(example[0]) or _inferred_labels(model, example[0])
        if not labels:
            return None
        try:
            large, small, batch_size = on_two_sizes(
                model, example, lambda model, batch: _ModelLossTrial(model, labels, batch, loss)
            )
        except (UsageError, NeedsValues):
            raise
        except Exception:
            return None  # it cannot be run on the example: the first step shows it
        if not large.is_read:
            return None
        return cls(labels, large.forms, _multiples(large, small, batch_size))

    def record(
        self,
        model: nn.Module,
        inputs: Any,
        shown: Callable[[torch.Tensor], torch.Tensor] = lambda label: label,
        kept: Callable[[torch.Tensor], torch.Tensor] = lambda leaf: leaf,
    ) -> Recorded:
        """Run the model on a microbatch. Where it gives outputs for some of the tokens, `shown` gives their labels;
        where a rank takes some of the samples to the loss, `kept` gives those of a leaf."""
        leaves, spec = tree_flatten(inputs)
        batch_size = batch_size_of(inputs)
        recorder = LossRecorder(self.labels_in(inputs), shown)
        for position, stand_in in zip(self.labels, recorder.stand_ins, strict=True):
            leaves[position] = stand_in
        with recorder.layers_given_values(model), recorder:
            program = LossProgram.for_outputs(recorder, call(model, tree_unflatten(leaves, spec)))
        if [step.form for step in program.steps] != self.forms or len(program.leaves) != len(self.multiples):
            raise UsageError(
                "the model computes its own loss in another way than on the example, depending on the batch; compute "
                "it from the model's outputs: loss(outputs, targets)"
            )
        is_flat = [_is_flat(leaf, batch_size, many) for leaf, many in zip(program.leaves, self.multiples, strict=True)]
        pairs = list(zip(program.leaves, is_flat, self.multiples, strict=True))
        samples = [kept(_by_sample(leaf, batch_size, flat, many)) for leaf, flat, many in pairs if many is not None]
        shared = [leaf for leaf, _, many in pairs if many is None]
        return Recorded(program.outputs, samples, shared, program.steps, is_flat)

    def labelled(self, batch: tuple[Any, Any]) -> Labelled:
        inputs, targets = batch
        return Labelled(targets, self.labels_in(inputs))

    def labels_in(self, inputs: Any) -> list[torch.Tensor]:
        leaves = tree_leaves(inputs)
        return [leaves[position] for position in self.labels]


def _answered(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a model asks a meta tensor for yes or no. The answer is yes, as for masks of batches without padding:
    where that leads it astray, what is recorded later differs and is refused."""
    return func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool


class BatchDependence(Dependence):
    """What depends on the batch, in a run with or without values."""

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _answered(func, args) or super().operate(func, args, kwargs)


class _ModelLossTrial:
    """A run of the plain model on a few samples, recorded."""

    def __init__(self, model: nn.Module, labels: tuple[int, ...], example: tuple[Any, Any], loss: Loss) -> None:
        inputs, targets = example
        leaves, spec = tree_flatten(inputs)
        recorder = LossRecorder([leaves[position] for position in labels], lambda label: label)
        batch = BatchDependence()
        batch.mark(leaves)
        for position, stand_in in zip(labels, recorder.stand_ins, strict=True):
            leaves[position] = stand_in
        with torch.no_grad(), batch, recorder.layers_given_values(model), recorder:
            outputs = call(model, tree_unflatten(leaves, spec))
            program = LossProgram.for_outputs(recorder, outputs)
            self.is_read = bool(program.steps)
            with contextlib.suppress(Exception):
                self.is_read = self.is_read and ref_of(loss(outputs, targets)) is not None
        self.forms = [step.form for step in program.steps]
        self.shapes = [tuple(leaf.shape) for leaf in program.leaves]
        self.is_of_batch = [leaf in batch for leaf in program.leaves]


def _multiples(large: _ModelLossTrial, small: _ModelLossTrial, batch_size: int) -> list[int | None]:
    """How many entries of each leaf belong to a sample, from runs on `batch_size` samples and on one less."""
    if large.forms != small.forms:
        raise UsageError(
            "the model's own loss uses the number of samples that it is given, which is that of a part of the batch "
            f"under this plan; take means with .mean() or reduction='mean' rather than dividing by a size, {_INSTEAD}"
        )
    found: list[int | None] = []
    for shape, other, is_of_batch in zip(large.shapes, small.shapes, large.is_of_batch, strict=True):
        if not is_of_batch and shape == other:
            found.append(None)
        elif (
            is_of_batch
            and shape
            and other
            and shape[0] * (batch_size - 1) == other[0] * batch_size
            and shape[1:] == other[1:]
        ):
            found.append(shape[0] // batch_size)
        elif is_of_batch and batch_size == 2 and len(shape) == 1 and shape[0] == 2 and not other:
            found.append(1)  # squeezed: one sample has no dim
        else:
            raise UsageError(
                f"the model's own loss uses a tensor of shape {list(shape)} that is made of all samples of a batch "
                "before the labels are looked at, such as a router's auxiliary loss or a count: it would be that of a "
                f"part of the batch; leave it out, {_INSTEAD}"
            )
    return found


_INSTEAD = "compute the loss from the model's outputs (loss(outputs, targets)), or use dp=1, cp=1, microbatches=1"


def _named_labels(inputs: Any) -> tuple[int, ...]:
    if not isinstance(inputs, dict):
        return ()
    return tuple(
        number
        for number, (path, leaf) in enumerate(tree_flatten_with_path(inputs)[0])
        if isinstance(leaf, torch.Tensor) and is_label(keystr(path))
    )


def is_label(name: str) -> bool:
    """Whether an input of a Hugging Face model is a label, by its name."""
    return any(each in name for each in _NAMES)


def _inferred_labels(model: nn.Module, inputs: Any) -> tuple[int, ...]:
    """Inputs that meet no parameter on their way, of a model that returns a number."""
    try:
        with torch.device("meta"), torch.no_grad():
            copy, inputs = meta_copy(model), to_meta(inputs)
            feeding = _Feeding(copy, tree_leaves(inputs))
            with feeding:
                outputs = call(copy, inputs)
    except Exception:
        return ()  # a model that needs values
    leaves = tree_leaves(inputs)
    if not any(isinstance(leaf, torch.Tensor) and not leaf.ndim for leaf in tree_leaves(outputs)):
        return ()
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return tuple(number for number in tensors if number not in feeding.fed and leaves[number].ndim)


class _Feeding(Interception):
    """While active, finds which inputs are combined with parameters, directly or by what is made of them."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._parameters = {storage for parameter in model.parameters() for storage in storages_of(parameter)}
        self._inputs: dict[StorageWeakRef, frozenset[int]] = {
            storage: frozenset([number]) for number, leaf in enumerate(inputs) for storage in storages_of(leaf)
        }
        self.fed: set[int] = set()

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _answered(func, args):
            return True
        outcome = func(*args, **kwargs)
        given = storages_of((args, kwargs))
        reached = frozenset().union(*(self._inputs.get(storage, frozenset()) for storage in given))
        if not self._parameters.isdisjoint(given):
            self.fed |= reached
        for storage in storages_of(outcome) if reached else ():
            self._inputs[storage] = self._inputs.get(storage, frozenset()) | reached
        return outcome
