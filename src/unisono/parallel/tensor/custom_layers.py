"""Linear layers and embeddings with a forward of their own, under tensor parallelism.

A plain nn.Linear is replaced by a parallel layer. A subclass, a parametrized layer or one whose forward was assigned
keeps its class, buffers, parameters and hooks: its parameters are sharded in place, and its own forward runs on shards
between the collectives that the parallel layer would use:

    column   y_r = forward(x; shards of rank r)                       y = concatenation of the y_r
    row      y_r = forward(x_r; shards of rank r)                     y = sum of the y_r
    vocab    y_r = forward(tokens of rank r; rows of rank r)          y = sum of the y_r, zero for other tokens

Whether that is right, and along which dim each tensor has to be sharded, is tried: on random values, outputs and all
gradients of the shards must be those of the full layer. A layer that fails is refused by name. Of a layer with LoRA
adapters it is known (see adapters).

A parameter that stays full is used by every rank for its part of the output, so its gradients are summed. Of a row
layer it may be one that is added to the output (a bias); then the first rank alone adds it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.deferred_init.deferred_model import source_of
from unisono.mesh.global_index import Part
from unisono.parallel.layout import Split
from unisono.parallel.pipeline.off_stage import is_off_stage
from unisono.parallel.rules.rules import Style
from unisono.parallel.tensor import adapters
from unisono.parallel.tensor.linear import features, is_linear, part_lengths
from unisono.parallel.tensor.parameter_shards import ParameterSharder, add_up, lengths_of, packed
from unisono.parallel.tensor.region import Region

_PLAIN: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
    nn.Embedding,
    nn.MultiheadAttention,
)
_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, prune.BasePruningMethod)  # which make a layer's weight before its forward
_ROWS = 64  # of an embedding that is tried
_MOST = 200  # assignments of dims to tensors that are tried
_TOLERANCE = 1e-6  # a forward may compute in float32 on its way

FIRST_RANK = "first rank"  # a full parameter that the first rank alone applies
Sharding = Mapping[str, int | str | None]  # of each tensor: the dim that is sharded, FIRST_RANK, or None


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is as its class in torch, unchanged."""
    is_conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    is_known = type(module) in _PLAIN or is_conv1d or "HAS_TRANSPOSED_WEIGHT" in vars(type(module))
    if not is_known or "forward" in vars(module) or weight_hooks(module):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return is_plain(module.out_proj)
    names = {name for name, _ in module.named_parameters()}
    return names <= {"weight", "bias"} and not any(True for _ in module.named_buffers())


def weight_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _WEIGHT_HOOKS)]


@dataclass(frozen=True)
class _Partition:
    """How the features (or rows of the vocabulary) of a layer are divided."""

    kind: str  # column, row, vocab
    split: Split
    parts: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, module: nn.Module, style: Style, ranks: int, rows: int | None = None) -> _Partition:
        if style.kind == "vocab":
            assert isinstance(module, nn.Embedding)
            return cls("vocab", packed(0, [rows or module.num_embeddings], ranks))
        inputs, outputs = features(module)
        if style.kind in ("row", "row_split"):
            return cls("row", packed(0, [inputs], ranks))
        return cls("column", packed(0, part_lengths(outputs, style.parts), ranks), style.parts)

    @property
    def size(self) -> int:
        return self.split.length

    def along(self, dim: int) -> Split:
        return Split(self.split.axes, dim, self.split.held)

    def attributes(self, module: nn.Module, rank: int) -> dict[str, Any]:
        """The numbers of a layer that differ on a rank that has its shard."""
        held = self.split.held[rank]
        if self.kind == "vocab":
            padding: Any = module.padding_idx
            return {"num_embeddings": len(held), "padding_idx": held.index(padding) if padding in held else None}
        names = ("in_features", "nx") if self.kind == "row" else ("out_features", "nf")
        return {name: len(held) for name in names if hasattr(module, name)}


# ---- the layer on a rank ---------------------------------------------------------------------------------------------


def shard_in_place(
    name: str, module: nn.Module, style: Style, region: Region, shards: ParameterSharder, sharding: Sharding
) -> None:
    """Leave the layer this rank's shards, and run its own forward between collectives."""
    rank, ranks = region.comm.rank, region.comm.size
    partition = _Partition.of(module, style, ranks)
    inputs = features(module)[0] if partition.kind != "vocab" else 0
    draws = adapters.draws(module)
    owners = {module, adapters.without_adapters(module)}
    layer = _OwnForward(name, module, module.forward, style, region, partition, inputs, draws)
    for key, where in sharding.items():
        owner, attribute = _owner(module, key)
        tensor: Any = getattr(owner, attribute)
        if not isinstance(tensor, nn.Parameter):
            layer.buffers |= {key: where} if isinstance(where, int) else {}
        elif isinstance(where, int):
            setattr(owner, attribute, shards.shard(tensor, partition.along(where)))
        else:
            add_up(tensor, "tp")
            layer.zeroed += [key] if where == FIRST_RANK and rank else []
    for each in owners:
        for attribute, value in partition.attributes(each, rank).items():
            setattr(each, attribute, value)
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _WEIGHT_HOOKS):
            layer.weight_hooks.append(module._forward_pre_hooks.pop(number))
    module.forward = partial(_OwnForward.run, layer)


@dataclass
class _OwnForward:
    """A layer's own forward, on this rank's shards."""

    name: str
    module: nn.Module
    own: Callable[..., torch.Tensor]
    style: Style
    region: Region
    partition: _Partition
    inputs: int
    draws: bool = False  # whether it drops some of its input
    zeroed: list[str] = field(default_factory=list)  # parameters that the first rank alone applies
    buffers: dict[str, int] = field(default_factory=dict)  # which stay full, and the dim that forward sees a shard of
    weight_hooks: list[Any] = field(default_factory=list)

    def run(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            raise UsageError(
                f"tp: {self.name} ({type(self.module).__name__}) was called with {len(args) + len(kwargs) + 1} "
                "arguments, but its own forward is sharded for one; "
                f'keep it full with the rule {{"{self.name}": "replicate"}}'
            )
        match self.partition.kind:
            case "column":
                return self._column(x)
            case "row":
                return self._row(x)
        return self._vocab(x)

    def _column(self, x: torch.Tensor) -> torch.Tensor:
        y = self._own(self.region.enter(x), None)
        if self.style.kind == "column_gather":
            return autograd_collectives.gather(y, -1, lengths_of(self.partition.split), self.region.comm)
        totals = sorted({self.partition.size, *part_lengths(self.partition.size, self.partition.parts)})
        self.region.locate_inside(totals, self.partition.split if len(self.partition.parts) > 1 else None)
        return y

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        if self.style.kind == "row_split":
            x = autograd_collectives.split(x, -1, lengths_of(self.partition.split), self.region.comm)
        held = self.partition.split.held[self.region.comm.rank]
        assert isinstance(held, range)
        return self.region.leave(self._own(x, Part(held, self.partition.size)))

    def _vocab(self, tokens: torch.Tensor) -> torch.Tensor:
        mine = _looked_up(partial(self._own, part=None), tokens, self.partition.split.held[self.region.comm.rank])
        return mine if is_off_stage(self.module) else autograd_collectives.reduce(mine, self.region.comm)

    def _own(self, x: torch.Tensor, part: Part | None) -> torch.Tensor:
        """part: of all input features, which this rank has; None where it has all of them."""
        with self._local_tensors(), self.region.located(part) if self.draws else contextlib.nullcontext():
            for hook in self.weight_hooks:
                hook(self.module, (x,))
            return self.own(x)

    @contextlib.contextmanager
    def _local_tensors(self) -> Iterator[None]:
        """In the block buffers are shards, and parameters that are not for this rank are zero."""
        full: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for key in (*self.zeroed, *self.buffers):
            owner, attribute = _owner(self.module, key)
            held: dict[str, Any] = owner._buffers if key in self.buffers else owner._parameters
            if attribute in held:  # a pipeline takes those of other stages away
                full.append((held, attribute, held[attribute]))
                held[attribute] = self._shard(key, held[attribute]) if key in self.buffers else held[attribute] * 0
        try:
            yield
        finally:
            for held, attribute, tensor in full:
                held[attribute] = tensor

    def _shard(self, key: str, buffer: torch.Tensor) -> torch.Tensor:
        indices = self.partition.split.held[self.region.comm.rank]
        return buffer.index_select(self.buffers[key], torch.as_tensor(list(indices), device=buffer.device))


def _looked_up(own: Callable[..., torch.Tensor], tokens: torch.Tensor, held: Any) -> torch.Tensor:
    elsewhere = (tokens < held[0]) | (tokens > held[-1])
    found = own((tokens - held[0]).masked_fill(elsewhere, 0))
    return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


# ---- whether it is right ---------------------------------------------------------------------------------------------

_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Sharding]] = weakref.WeakKeyDictionary()
_of_kind: dict[Any, Sharding] = {}  # for layers that differ in their values only


def require_sharding(name: str, module: nn.Module, style: Style, ranks: int) -> Sharding:
    """How the layer's tensors have to be sharded; UsageError where its own forward does not work on shards."""
    key = (style, ranks, id(vars(module).get("forward")))
    known = _found.setdefault(module, {})
    if key not in known:
        kind = _kind(module)
        found = _of_kind.get((style, ranks, kind)) if kind else None
        known[key] = found or _require_sharding(name, module, style, ranks)
        if kind:
            _of_kind[style, ranks, kind] = known[key]
    return known[key]


def _kind(module: nn.Module) -> Any:
    """What distinguishes layers whose forwards do the same; None where that is not known."""
    kind: list[Any] = []
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if name.startswith("_") or name == "training":
                continue
            if not isinstance(value, bool | int | float | str | None):
                return None
            kind.append((path, name, value))
        hooks = tuple(map(id, weight_hooks(each)))
        kind.append((path, type(each), hooks))
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple(kind), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


def _require_sharding(name: str, module: nn.Module, style: Style, ranks: int) -> Sharding:
    if adapters.is_adapted_linear(module):
        by_rows = style.kind in ("row", "row_split")
        dims = adapters.dims(module, by_rows=by_rows)
        return {key: FIRST_RANK if by_rows and key.endswith(".bias") else dim for key, dim in dims.items()}
    with _undisturbed(module):
        trial = _LayerTrial(name, module, style, ranks)
        for sharding in itertools.islice(trial.candidates(), _MOST):
            if trial.holds(sharding):
                return sharding
    trial.refuse("its own forward on shards does not give what the full layer gives")
    raise AssertionError


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """After the block, what the layer's forward has left on it is gone, and random numbers go on as before."""
    before = [(each, dict(vars(each)), each.training) for each in module.modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for each, held, training in before:
            vars(each).clear()
            vars(each).update(held)
            each.training = training


class _ForwardOnly(nn.Module):
    """Calls a module's forward without its hooks, but for those that make its weight."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        for hook in weight_hooks(self.module):
            hook(self.module, ())
        return run()


class _LayerTrial:
    """One layer and random values of its tensors, full and on each rank."""

    def __init__(self, name: str, module: nn.Module, style: Style, ranks: int) -> None:
        self.name, self.module, self.style, self.ranks = name, module, style, ranks
        rows = min(module.num_embeddings, max(_ROWS, ranks)) if isinstance(module, nn.Embedding) else None
        if isinstance(module, nn.Embedding) and (module.padding_idx or 0) >= (rows or 0):
            rows = module.num_embeddings
        self.partition = _Partition.of(module, style, ranks, rows)
        if any(not len(held) for held in self.partition.split.held):
            self.refuse(f"it has fewer features than ranks ({self.partition.size})")
        if style.kind == "column_gather" and len(style.parts) > 1:
            self.refuse("a layer of several parts cannot be gathered")
        self.tensors = self._values(signed=True)
        self.inputs = self._inputs()
        self.expected = self._full()

    def refuse(self, reason: str) -> None:
        what = "its parametrization or forward" if is_linear(self.module) else "its forward"
        raise UsageError(
            f"tp={self.ranks}: {self.name} is a {type(self.module).__name__}, {what} is not torch's own, and the rule "
            f'{self.style} does not fit it: {reason}; keep it full with the rule {{"{self.name}": "replicate"}}, '
            "or use a plan without tp"
        )

    # ---- values

    def _values(self, *, signed: bool) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        values: dict[str, torch.Tensor] = {}
        for name, parameter in self.module.named_parameters():
            shape = self._shape(name, parameter)
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
            values[name] = (drawn if signed else drawn.abs() + 0.1).requires_grad_(parameter.is_floating_point())
        for name, buffer in self.module.named_buffers():
            value = self._known(name, buffer)
            if self._shape(name, buffer) != buffer.shape:
                value = value[: self.partition.size]
            values[name] = value.double() if value.is_floating_point() else value.clone()
        return values

    def _shape(self, name: str, tensor: torch.Tensor) -> torch.Size:
        """An embedding is tried with fewer rows."""
        if self.partition.kind == "vocab" and tensor.ndim and tensor.shape[0] == self.module.num_embeddings:
            return torch.Size((self.partition.size, *tensor.shape[1:]))
        return tensor.shape

    def _known(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if not buffer.is_meta:
            return buffer.detach().cpu().clone()
        source = source_of(buffer)
        if source is None:
            self.refuse(f"the values of its buffer {name} are not known")
        assert source is not None
        return source[0].value(source[1]).cpu()

    def _inputs(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        if self.partition.kind == "vocab":
            return torch.randint(self.partition.size, (3, self.partition.size), generator=generator)
        width = features(self.module)[0]
        return torch.randn(2, 3, width, dtype=torch.float64, generator=generator, requires_grad=True)

    # ---- the full layer

    def _full(self) -> list[list[torch.Tensor | None]]:
        """Outputs and gradients in training and in evaluation."""
        attributes = {"num_embeddings": self.partition.size} if self.partition.kind == "vocab" else {}
        try:
            found = [self._run_full(mode, attributes) for mode in (True, False)]
            if not all(_finite(outcome) for outcome in found):
                self.tensors = self._values(signed=False)
                found = [self._run_full(mode, attributes) for mode in (True, False)]
            again = [self._run_full(mode, attributes) for mode in (True, False)]
        except UsageError:
            raise
        except Exception as error:  # whatever a forward of any kind may raise
            self.refuse(f"it could not be tried on random input ({type(error).__name__}: {error})")
        if not all(map(_same, found, again)):
            self.refuse("its forward draws random numbers, or changes its buffers")
        return found

    def _run_full(self, training: bool, attributes: Mapping[str, Any]) -> list[torch.Tensor | None]:
        before = {name: self.tensors[name].clone() for name, _ in self.module.named_buffers()}
        output = self._call(self.tensors, attributes, training, self.inputs)
        if not isinstance(output, torch.Tensor):
            self.refuse(f"it gives a {type(output).__name__}, not a tensor")
        if any(not torch.equal(value, self.tensors[name]) for name, value in before.items()):
            self.refuse("its forward changes its buffers")
        return self._with_gradients(output)

    def _call(
        self, tensors: Mapping[str, torch.Tensor], attributes: Mapping[str, Any], training: bool, x: torch.Tensor
    ) -> Any:
        before = dict(vars(self.module))
        for each in self.module.modules():
            each.training = training
        for attribute, value in attributes.items():
            setattr(self.module, attribute, value)
        try:
            caller = _ForwardOnly(self.module)
            named = {f"module.{name}": tensor for name, tensor in tensors.items()}
            return torch.func.functional_call(caller, named, (lambda: self.module.forward(x),))
        finally:
            vars(self.module).clear()
            vars(self.module).update(before)

    def _with_gradients(self, output: torch.Tensor) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(2)
        slope = torch.randn(output.shape, dtype=torch.float64, generator=generator)
        leaves = [tensor for tensor in (self.inputs, *self.tensors.values()) if tensor.requires_grad]
        gradients = torch.autograd.grad((output * slope).sum(), leaves, allow_unused=True)
        return [output.detach(), *gradients]

    # ---- the shards

    def candidates(self) -> Iterator[Sharding]:
        """Ways to shard the tensors; those along the dims that features suggest come first."""
        options = [self._options(name, tensor) for name, tensor in self.tensors.items()]
        for chosen in itertools.product(*options):
            yield dict(zip(self.tensors, chosen, strict=True))

    def _options(self, name: str, tensor: torch.Tensor) -> list[int | str | None]:
        dims: list[int | str | None] = [dim for dim, size in enumerate(tensor.shape) if size == self.partition.size]
        natural = 0 if self.partition.kind != "row" else tensor.ndim - 1
        dims.sort(key=lambda dim: dim != natural)
        is_parameter = tensor.requires_grad
        if self.partition.kind != "row" or not is_parameter:
            return [*dims, None]
        return [FIRST_RANK, None, *dims] if tensor.ndim == 1 else [*dims, None, FIRST_RANK]

    def holds(self, sharding: Sharding) -> bool:
        for training, expected in zip((True, False), self.expected, strict=True):
            try:
                output = self._joined([self._run_rank(rank, sharding, training) for rank in range(self.ranks)])
                if not _same([output.detach()], expected[:1]):
                    return False
                if not _same(self._with_gradients(output), expected):
                    return False
            except Exception:  # shapes that do not fit each other
                return False
        return True

    def _run_rank(self, rank: int, sharding: Sharding, training: bool) -> torch.Tensor:
        held = self.partition.split.held[rank]
        indices = torch.as_tensor(list(held))
        tensors = {}
        for name, tensor in self.tensors.items():
            where = sharding[name]
            if isinstance(where, int):
                tensors[name] = tensor.index_select(where, indices)
            else:
                tensors[name] = tensor * (rank == 0) if where == FIRST_RANK else tensor
        attributes = self.partition.attributes(self.module, rank)
        if self.partition.kind == "vocab":
            return _looked_up(lambda x: self._call(tensors, attributes, training, x), self.inputs, held)
        x = self.inputs.index_select(-1, indices) if self.partition.kind == "row" else self.inputs
        return self._call(tensors, attributes, training, x)

    def _joined(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        if self.partition.kind != "column":
            return torch.stack(outputs).sum(0)
        if [output.shape[-1] for output in outputs] != lengths_of(self.partition.split):
            raise ValueError("a rank gives another number of features than it holds")
        order = torch.tensor([position for held in self.partition.split.held for position in held])
        return torch.cat(outputs, -1).index_select(-1, order.argsort())


def _finite(outcome: list[torch.Tensor | None]) -> bool:
    return all(tensor is None or bool(tensor.isfinite().all()) for tensor in outcome)


def _same(got: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(map(_is_close, got, expected))


def _is_close(got: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if got is None or expected is None:
        present = got if expected is None else expected
        return present is None or not bool(present.any())
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return bool(torch.allclose(got, expected, rtol=0, atol=_TOLERANCE * max(largest, 1e-12)))
