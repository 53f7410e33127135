"""The data flow between a model's layers, recorded while the model runs once.

While it runs, every tensor carries the set of layers (nn.Linear, nn.Embedding) from whose outputs it was computed with
no other such layer in between. What a layer is called with shows whose outputs reach it; reshapes, splits and products
on the way are noted as they pass. In a transformer this shows, whatever its modules are called:

    q, k, v -> o        attention: the outputs of three layers reach one layer and nothing else
    up, gate -> down    a gated MLP
    the rest            the residual stream: the embedding, every o and every down reach every q, k, v, up and the head
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.random.random_functions import constant_draws
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, realised_copy, to_meta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.parallel.share import first_samples
from unisono.parallel.tensor import adapters
from unisono.parallel.tensor.convolution import is_convolution
from unisono.parallel.tensor.linear import features, is_linear

# Origins that are no layers
INPUT, TOKENS, PARAMETER = "the model's input", "the model's integer input", "a parameter outside layers"
_SMALL = 5 * 10**7  # parameters of a model that is run with values
_SMALL_META = 2 * 10**6  # of one whose values must be made first
_SHORT = 4096  # elements of a sample
_SAMPLES = 2

Origins = frozenset[str]
Parts = tuple[int, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ReshapeSize:
    """A number that a reshape was called with, at an index counted from the end."""

    origins: Origins
    value: int
    index: int


@dataclass
class Dataflow:
    """What one run showed; layers and modules by name."""

    sources: dict[str, Origins] = field(default_factory=dict)  # whose outputs reach a layer, in order of first calls
    outputs: Origins = frozenset()  # whose outputs reach the model's output
    calls: dict[str, Arguments] = field(default_factory=dict)  # the first call of each module that has children
    used: dict[str, set[int]] = field(default_factory=dict)  # of the tensors that such a module returns: which are used
    parts: dict[str, list[Parts]] = field(default_factory=dict)  # proportions in which layers' outputs are split
    sizes: list[ReshapeSize] = field(default_factory=list)
    layer_flops: dict[str, int] = field(default_factory=dict)
    other_flops: list[tuple[Origins, int]] = field(default_factory=list)
    used_elsewhere: set[str] = field(default_factory=set)  # parameters used outside their own layer's forward
    met: dict[str, Origins] = field(default_factory=dict)  # whose outputs such a parameter is computed with
    has_values: bool = False  # whether the calls' tensors are those of a real run, or on the meta device


def recorded(model: nn.Module, inputs: Any) -> Dataflow | None:
    """The flow of model(inputs); None where the model cannot be run here. A copy is run: the model keeps its state."""
    samples = first_samples(inputs, _SAMPLES)
    attempts = [_on_meta]
    if _is_small(model, samples):
        attempts.insert(0, _with_values)
    for attempt in attempts:
        with contextlib.suppress(Exception):  # such as a size or a branch that depends on data
            return attempt(model, samples)
    return None


def _is_small(model: nn.Module, samples: Any) -> bool:
    longest = max((leaf.numel() // _SAMPLES for leaf in tree_leaves(samples) if _is_tensor(leaf)), default=0)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    limit = _SMALL_META if is_meta else _SMALL
    return longest <= _SHORT and sum(map(torch.numel, model.parameters())) <= limit


def _with_values(model: nn.Module, samples: Any) -> Dataflow:
    real = realised_copy(model)
    if real is None:
        raise ValueError("the values of a meta tensor are not known")
    with constant_draws():
        flow = _recorded(real.double().cpu().eval(), tree_map(as_float64, samples))
    flow.has_values = True
    return flow


def _on_meta(model: nn.Module, samples: Any) -> Dataflow:
    with torch.device("meta"), KnownShapes():
        return _recorded(meta_copy(model).eval(), to_meta(samples))


def _recorded(model: nn.Module, samples: Any) -> Dataflow:
    recorder = _Recorder(model, samples)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), recorder:
            outputs = call(model, samples)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    recorder.flow.outputs = recorder.origins_of(outputs)
    recorder.note_use(outputs)
    return recorder.flow


def as_float64(leaf: Any) -> Any:
    if not _is_tensor(leaf):
        return leaf
    values = leaf.detach().cpu()
    if values.is_complex():
        return values.to(torch.complex128)
    return values.double().requires_grad_(leaf.requires_grad) if values.is_floating_point() else values


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def is_layer(module: nn.Module) -> bool:
    return is_product(module) or isinstance(module, nn.Embedding)


def is_product(module: nn.Module) -> bool:
    """Whether each output feature is made of all input features: a linear layer or convolution."""
    return is_linear(module) or is_convolution(module)


class _Recorder(TorchFunctionMode):
    """Follows tensors through torch's functions; layers are seen by hooks, and not looked into."""

    def __init__(self, model: nn.Module, samples: Any) -> None:
        super().__init__()
        self.flow = Dataflow()
        self._origins: dict[int, Origins] = {}
        self._layer_of: dict[
            int, tuple[str, int]
        ] = {}  # of a layer's output: its name, the dim of features from the end
        self._made_of: dict[int, set[str]] = {}  # tensors that are made of parameters only
        self._returned: dict[int, list[tuple[str, int]]] = defaultdict(list)  # by which modules, at which index
        self._kept: list[torch.Tensor] = []  # so that no other tensor takes their ids
        self._depth = 0  # of layers that are running
        self._slices: dict[str, set[int]] = defaultdict(set)  # bounds of slices of a layer's output
        self._parameters = {id(each): name for name, each in model.named_parameters()}
        for leaf in tree_leaves(samples):
            if _is_tensor(leaf):
                self._note(leaf, frozenset([INPUT if leaf.is_floating_point() else TOKENS]))
        inner = adapters.inner_modules(model)
        for name, module in model.named_modules():
            if module in inner:
                continue
            if is_layer(module):
                module.register_forward_pre_hook(partial(self._enter_layer, name), with_kwargs=True)
                module.register_forward_hook(partial(self._leave_layer, name))
            elif next(module.children(), None) is not None:
                module.register_forward_pre_hook(partial(self._enter_module, name), with_kwargs=True)
                module.register_forward_hook(partial(self._leave_module, name))
            if isinstance(module, nn.MultiheadAttention):
                module.register_forward_hook(partial(self._leave_attention, name), with_kwargs=True)

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for name, bounds in self._slices.items():
            edges = sorted(bounds)
            self._propose(name, [end - start for start, end in itertools.pairwise(edges)])

    # ---- origins -----------------------------------------------------------------------------------------------------

    def origins_of(self, tree: Any) -> Origins:
        found = [self._origins.get(id(leaf), frozenset()) for leaf in tree_leaves(tree) if _is_tensor(leaf)]
        return frozenset().union(*found)

    def _note(self, tensor: torch.Tensor, origins: Origins) -> None:
        if id(tensor) not in self._origins:
            self._kept.append(tensor)
        self._origins[id(tensor)] = origins

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outcome = function(*args, **kwargs)
        if self._depth:
            return outcome
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        self.note_use(given)
        results = [leaf for leaf in tree_leaves(outcome) if _is_tensor(leaf)]
        name = getattr(function, "__name__", "")
        if name == "__setitem__":
            results = given[:1]
        if not results:
            return outcome
        self.flow.used_elsewhere |= {self._parameters[id(each)] for each in given if id(each) in self._parameters}
        origins = self.origins_of(given)
        parameters = set().union(*(self._parameters_in(each) for each in given))
        if parameters:
            origins |= {PARAMETER}
        self._note_rendezvous(parameters, origins - {PARAMETER}, results)
        for each in results:
            self._note(each, origins)
        self._look(name, args, kwargs, given, results, origins)
        return outcome

    def _parameters_in(self, tensor: torch.Tensor) -> set[str]:
        name = self._parameters.get(id(tensor))
        return {name} if name is not None else self._made_of.get(id(tensor), set())

    def _note_rendezvous(self, parameters: set[str], others: Origins, results: list[torch.Tensor]) -> None:
        """Parameters that are computed with other tensors, or with none but parameters so far."""
        if not others and parameters:
            self._made_of |= {id(each): parameters for each in results}
        for name in parameters if others else ():
            self.flow.met[name] = self.flow.met.get(name, frozenset()) | others

    # ---- layers and modules ------------------------------------------------------------------------------------------

    def note_use(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            for name, position in self._returned.get(id(leaf), ()):
                self.flow.used.setdefault(name, set()).add(position)

    def _leave_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for position, leaf in enumerate(leaf for leaf in tree_leaves(output) if _is_tensor(leaf)):
            self._returned[id(leaf)].append((name, position))
            self._kept.append(leaf)

    def _enter_layer(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        self.note_use((args, kwargs))
        self.flow.sources[name] = self.flow.sources.get(name, frozenset()) | self.origins_of((args, kwargs))

    def _leave_layer(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not _is_tensor(output):
            return
        self._note(output, frozenset([name]))
        if is_linear(layer):
            self._layer_of[id(output)] = (name, -1)
        if is_product(layer):
            flops = 2 * output.numel() * _products(layer)
            self.flow.layer_flops[name] = self.flow.layer_flops.get(name, 0) + flops

    def _leave_attention(self, name: str, module: nn.MultiheadAttention, args: Any, kwargs: Any, output: Any) -> None:
        tokens = output[0].numel()  # times the width
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        keys = given[1 if len(given) > 1 else 0].shape[1 if module.batch_first else 0]
        flops = 8 * tokens * module.embed_dim + 4 * tokens * keys
        self.flow.layer_flops[name] = self.flow.layer_flops.get(name, 0) + flops

    def _enter_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in self.flow.calls:
            self.flow.calls[name] = tree_map(self._kept_argument, (args, kwargs))

    def _kept_argument(self, leaf: Any) -> Any:
        """A copy; it requires gradients where the model's training would."""
        if not _is_tensor(leaf):
            return leaf
        has_gradient = leaf.is_floating_point() and bool(self.origins_of(leaf) - {INPUT, TOKENS})
        return leaf.clone().requires_grad_(has_gradient)

    # ---- what happens to a layer's output ----------------------------------------------------------------------------

    def _look(self, name: str, args: Any, kwargs: Any, given: Any, results: Any, origins: Origins) -> None:
        flops = _flops(name, args, given, results)
        if flops:
            self.flow.other_flops.append((origins, flops))
        if not given:
            return
        first = given[0]
        sizes = _sizes(name, args, kwargs, first)
        if sizes is not None:
            index = next((i for i, (a, b) in enumerate(zip(first.shape, sizes, strict=False)) if a != b), None)
            if index is not None:
                has_parts = 1 < sizes[index] <= 3 and index + 2 < len(sizes)  # q, k and v before the heads
                for position in range(index, index + 1 + has_parts):
                    self.flow.sizes.append(ReshapeSize(origins, sizes[position], position - len(sizes)))
        layer, dim = self._layer_of.get(id(first), (None, -1))
        if layer is None:
            return
        if name in ("transpose", "permute", "movedim", "swapaxes", "t") and len(results) == 1:
            self._follow_features(layer, first, dim, results[0])
        elif (
            sizes is not None
            and dim == -1
            and len(sizes) > first.dim()
            and tuple(sizes[: first.dim() - 1]) == first.shape[:-1]
        ):
            count = sizes[first.dim() - 1]
            if 1 < count <= 8:
                self._propose(layer, [1] * count)
        elif name in ("chunk", "split", "tensor_split", "__getitem__", "narrow"):
            self._look_at_split(layer, dim, name, first, results, args)
        elif len(results) == 1 and results[0].shape == first.shape:
            self._layer_of[id(results[0])] = (layer, dim)

    def _follow_features(self, layer: str, before: torch.Tensor, dim: int, after: torch.Tensor) -> None:
        """Of a tensor whose dims were reordered: where its features are, if their stride and length show it."""
        found = [
            position - after.dim()
            for position in range(after.dim())
            if (after.stride(position), after.shape[position]) == (before.stride(dim), before.shape[dim])
        ]
        if len(found) == 1:
            self._layer_of[id(after)] = (layer, found[0])

    def _look_at_split(self, layer: str, dim: int, name: str, first: Any, results: Any, args: Any) -> None:
        lengths = [each.shape[dim] for each in results]
        if name in ("chunk", "split", "tensor_split") and sum(lengths) == first.shape[dim]:
            self._propose(layer, lengths)
            if name == "split":
                self.flow.sizes.append(ReshapeSize(frozenset([layer]), lengths[0], 0))
        elif name == "__getitem__" and dim == -1 and isinstance(args[1], tuple) and isinstance(args[1][-1], slice):
            start, stop, _ = args[1][-1].indices(first.shape[-1])
            self._slices[layer] |= {0, start, stop, first.shape[-1]}

    def _propose(self, layer: str, lengths: Sequence[int]) -> None:
        common = math.gcd(*lengths)
        parts = tuple(length // common for length in lengths) if common else ()
        known = self.flow.parts.setdefault(layer, [])
        if len(parts) > 1 and parts not in known:
            known.append(parts)


def _products(layer: Any) -> int:
    """Multiplications for an element of the output; those of adapters, which are few, are left out."""
    return features(layer)[0] if is_linear(layer) else math.prod(layer.weight.shape[1:])


def _sizes(name: str, args: Any, kwargs: Any, first: torch.Tensor) -> list[int] | None:
    """The sizes that a reshape was called with; what is left to torch (-1) stays so."""
    if name in ("view", "reshape"):
        given = args[1:] or (kwargs.get("shape") or kwargs.get("size") or (),)
        given = given[0] if given and isinstance(given[0], tuple | list) else given
    elif name == "unflatten" and len(args) == 3:
        dim = args[1] % first.dim()
        given = (*first.shape[:dim], *args[2], *first.shape[dim + 1 :])
    else:
        return None
    return [int(size) for size in given] if all(isinstance(size, int) for size in given) else None


def _flops(name: str, args: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Of products of tensors, outside of layers."""
    if name == "scaled_dot_product_attention" and len(given) >= 3:
        return 2 * (given[0].numel() * given[1].shape[-2] + results[0].numel() * given[1].shape[-2])
    if name in ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "linear") and len(given) >= 2:
        return 2 * results[0].numel() * given[0].shape[-1]
    if name == "baddbmm" and len(given) == 3:
        return 2 * results[0].numel() * given[1].shape[-1]
    if name == "einsum" and args and isinstance(args[0], str) and "." not in args[0]:
        terms = args[0].replace(" ", "").partition("->")[0].split(",")
        lengths: dict[str, int] = {}
        for term, each in zip(terms, given, strict=False):
            lengths |= dict(zip(term, each.shape, strict=False))
        return 2 * math.prod(lengths.values()) if len(terms) > 1 else 0
    if name.startswith("conv") and len(given) >= 2:
        return 2 * results[0].numel() * math.prod(given[1].shape[1:])
    return 0


def synthetic(arguments: Arguments, generator: torch.Generator) -> Arguments:
    """Values for arguments that were recorded on the meta device: any do, as a module is compared with itself."""

    def value(leaf: Any) -> Any:
        if not _is_tensor(leaf) or not leaf.is_meta:
            return leaf
        if leaf.is_complex():
            return torch.randn(leaf.shape, dtype=torch.complex128, generator=generator)
        if leaf.is_floating_point():
            made = torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
            return made.requires_grad_(leaf.requires_grad)
        if leaf.dtype == torch.bool:
            return torch.ones(leaf.shape, dtype=torch.bool)
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    return tree_map(value, arguments)
