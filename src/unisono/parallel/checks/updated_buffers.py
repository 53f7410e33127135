"""Buffers that a model's forward pass updates: running means, counters, power iterations.

BatchNorm's are kept right by batchnorm.py. Of others nothing is known but what a trial run shows: which buffers change,
and whether they depend on the samples. The trial run is on the "meta" device, with every op seen by a
TorchDispatchMode: what is computed from the inputs is marked, storage by storage, and a buffer that a marked tensor is
written into depends on the samples. A number that Python computes from a shape (`self.seen += len(x)`) carries no mark,
so a second run has fewer samples, and writes must be the same.

A buffer that depends on the samples is refused where ranks or microbatches see some of them only; one that does not (a
counter of steps, spectral_norm's vectors) is refused where there are more forward passes than on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.expert.expert import MoE
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.recomputation.recompute import recomputed_modules
from unisono.parallel.share import BatchDim, batch_slice, first_batch_size
from unisono.plan.plan import RUN_ONCE, Plan
from unisono.torch_compat import TorchDispatchMode

_KNOWN = (_NormBase, MoE)  # modules whose buffers are kept right, or refused, elsewhere


def require_steady_buffers(model: nn.Module, plan: Plan, example: tuple[Any, Any], batch_dim: BatchDim = 0) -> None:
    """UsageError where a buffer that the model updates would not be that of one device."""
    is_split = plan.dp * plan.cp * plan.microbatches > 1 or plan.sequence
    recomputed = _recomputed(model, plan)
    if not any(_updatable(model)) or not (is_split or recomputed):
        return
    for name, depends_on_samples in _updates(model, example, batch_dim).items():
        if is_split and depends_on_samples:
            raise UsageError(
                f"the forward pass updates the buffer {name} from the samples of a batch, but under plan {plan} a rank "
                "or a microbatch sees some of them only; use dp=1, cp=1, microbatches=1 without sp, or keep such "
                "statistics with nn.BatchNorm"
            )
        if plan.microbatches > 1 or any(name.startswith(f"{module}.") for module in recomputed):
            raise UsageError(
                f"the forward pass updates the buffer {name}, and microbatches or recomputation make more passes than "
                "one device does; use microbatches=1 and recompute=none, selective or attention, or update it in the "
                "training loop"
            )


def _recomputed(model: nn.Module, plan: Plan) -> Sequence[str]:
    return () if plan.recompute in RUN_ONCE else recomputed_modules(model, plan.recompute)


def _updatable(model: nn.Module) -> Iterator[str]:
    """The buffers that a forward pass in training mode might update, by name."""
    for prefix, module in model.named_modules():
        if module.training and not isinstance(module, _KNOWN):
            for name, _ in module.named_buffers(prefix, recurse=False):
                yield name


def _updates(model: nn.Module, example: tuple[Any, Any], batch_dim: BatchDim) -> dict[str, bool]:
    """The buffers that a forward pass updates, and whether they depend on samples; none where that needs values."""
    samples = first_batch_size(example, batch_dim)
    try:
        first = _BufferWrites.of(model, example[0])
        fewer = batch_slice(tuple(example), 0, samples - 1, batch_dim)[0] if samples > 1 else example[0]
        second = _BufferWrites.of(model, fewer)
    except Exception:
        return {}
    return {
        name: name in first.marked or first.by_buffer.get(name) != second.by_buffer.get(name) for name in first.updated
    }


class _BufferWrites(TorchDispatchMode):
    """The writes to a model's buffers, while it is active."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self._model = model
        self._before = {name: model.get_buffer(name) for name in _updatable(model)}
        self._names = {_storage(buffer): name for name, buffer in self._before.items()}
        self._kept: list[torch.Tensor] = [*tree_leaves(inputs)]  # so that no storage is used again
        self._marked_storages = {_storage(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        self.by_buffer: dict[str, list[Any]] = {}
        self.updated: list[str] = []
        self.marked: set[str] = set()

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> _BufferWrites:
        with no_side_effects(model), torch.no_grad(), torch.device("meta"), KnownShapes():
            copy, given = meta_copy(model), to_meta(inputs)
            writes = cls(copy, given)
            with writes:
                call(copy, given)
        writes._compare()
        return writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_marked = any(_storage(tensor) in self._marked_storages for tensor in tensors)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        written = list(_written(func, args, kwargs))
        self._kept += made
        if is_marked:
            self._marked_storages |= {_storage(tensor) for tensor in (*made, *written)}
        for tensor in written:
            name = self._names.get(_storage(tensor))
            if name is not None:
                numbers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int | float | complex)]
                self.by_buffer.setdefault(name, []).append((str(func), numbers))
        return out

    def _compare(self) -> None:
        """After the run: which buffers were written into, or are other tensors now."""
        for name, before in self._before.items():
            now = self._model.get_buffer(name)
            if name in self.by_buffer or now is not before:
                self.updated.append(name)
                if _storage(now) in self._marked_storages:
                    self.marked.add(name)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments of an op that it writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if not tensor.is_sparse else id(tensor)
