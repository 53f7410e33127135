"""Linear layers shared by several ranks.

Sharded by columns, each rank computes some of the output features; sharded by rows, each rank takes some of the input
features and computes a part of every output, and the parts are summed. One after the other they need no communication
in between:

    y = f(x A) B:   x -> [A1 | A2] -> f -> [B1 / B2] -> sum        (f elementwise, or attention by heads)

(Features run along rows of torch's weights, which are stored transposed; the names follow the mathematics.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world as worlds
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.parallel.compile.collectives import features_number, inside
from unisono.parallel.tensor import adapters, deferred
from unisono.parallel.tensor.parameter_shards import ParameterSharder, lengths_of, packed
from unisono.parallel.tensor.region import Region

Initialiser = Callable[[torch.Tensor], Any]


def is_linear(module: nn.Module) -> bool:
    """Also with LoRA adapters (see adapters)."""
    return isinstance(module, nn.Linear) or is_transposed(module) or adapters.is_adapted_linear(module)


def is_transposed(module: nn.Module) -> bool:
    """A linear layer whose weight is (inputs, outputs): Hugging Face's Conv1D, or a class that says so."""
    module = adapters.without_adapters(module)
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return is_conv1d or getattr(type(module), "HAS_TRANSPOSED_WEIGHT", False)


def features(linear: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs; of a convolution, its channels."""
    outputs, inputs = adapters.without_adapters(linear).weight.shape[:2]
    return (outputs, inputs) if is_transposed(linear) else (inputs, outputs)


def _full(
    in_features: int,
    out_features: int,
    bias: bool,
    init: Initialiser | None,
    bias_init: Initialiser | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Linear:
    """The layer as one device would have it: made from the same random numbers, on every rank."""
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
    with torch.no_grad():
        if init is not None:
            init(linear.weight)
        if bias_init is not None and bias:
            bias_init(linear.bias)
    return linear


class _ParallelLinear(nn.Module):
    """What both ways of sharding have in common: `in_features` and `out_features` are those of the full layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    region: Region
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = staticmethod(F.linear)

    def _take_settings(self, linear: nn.Module, region: Region) -> None:
        if not is_linear(linear):
            raise UsageError(f"{type(self).__name__} of a {type(linear).__name__}: expected an nn.Linear")
        self.region = region
        self.transposed = is_transposed(linear)
        self.in_features, self.out_features = features(linear)
        self.train(linear.training)

    def _linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.product(x, self.weight.t() if self.transposed else self.weight, bias)

    def _require_width(self, x: torch.Tensor, width: int, what: str) -> None:
        if x.shape[-1] != width:
            raise UsageError(
                f"{type(self).__name__}({self.in_features}, {self.out_features}): the input is {x.shape[-1]} wide; "
                f"expected {width}, {what}"
            )

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, ranks={self.region.comm.size}"


class ColumnParallelLinear(_ParallelLinear):
    """nn.Linear whose outputs are shared out: rank r computes the r-th shard of them (sizes differ by one at most).

    The input is the same on all ranks; the output is this rank's shard, or with `gather_output` full on every rank.
    From the same torch seed the parameters are the shards of those nn.Linear would have; `init` and `bias_init` are
    given the full tensors. Without `comm` all ranks of the world share the layer.
    """

    is_inside = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
        *,
        comm: Communicator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        full = _full(in_features, out_features, bias, init, bias_init, dtype, device)
        self._take_shard(full, Region(comm or worlds.world()), gather_output)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        comm: Communicator | Region | None = None,
        *,
        gather_output: bool = False,
        parts: Sequence[int] = (1,),
        shards: ParameterSharder | None = None,
        is_inside: bool = False,
    ) -> ColumnParallelLinear:
        """The same layer, sharded. `parts` are the relative sizes of what its outputs consist of: (1, 1, 1) for q, k, v
        in one, each of which is then sharded. Layers that share parameters are given the same `shards`. is_inside: the
        input comes from a RowParallelLinear that is inside too."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.is_inside = is_inside
        layer._take_shard(linear, _region(comm), gather_output, parts, shards)
        return layer

    def _take_shard(
        self,
        linear: nn.Module,
        region: Region,
        gather_output: bool,
        parts: Sequence[int] = (1,),
        shards: ParameterSharder | None = None,
    ) -> None:
        self._take_settings(linear, region)
        if gather_output and len(parts) > 1:
            raise UsageError(
                f"a layer of {len(parts)} parts cannot be sharded by columns and gathered; use one of the two"
            )
        self.gather_output = gather_output
        shards = shards or ParameterSharder(region.comm.rank, region.comm.size)
        split = packed(int(self.transposed), part_lengths(self.out_features, parts), region.comm.size)
        self.lengths = lengths_of(split)
        self.totals = sorted({self.out_features, *part_lengths(self.out_features, parts)})
        self.packed = split if len(parts) > 1 else None
        self.features = features_number(self.totals, self.packed)
        self.weight = shards.shard(linear.weight, split)  # type: ignore[arg-type]
        full_bias: Any = linear.bias
        bias_split = packed(0, part_lengths(self.out_features, parts), region.comm.size)
        self.register_parameter("bias", None if full_bias is None else shards.shard(full_bias, bias_split))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._traced(x)
        x = x if self.is_inside else self.region.enter(x)
        self._require_width(x, self.in_features, "all of the input features")
        weight = self.weight.t() if self.transposed else self.weight
        can_wait = (self.is_inside or self.region.has_just_entered(x, self)) and self.product is F.linear
        y = deferred.linear(x, weight, self.bias) if can_wait else self.product(x, weight, self.bias)
        if self.gather_output:
            return autograd_collectives.gather(y, -1, self.lengths, self.region.comm)
        self.region.locate_inside(self.totals, self.packed)
        return y

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.is_inside else self.region.enter(x, self.in_features)
        y = self._linear(x, self.bias)
        if self.gather_output:
            return self.region.traced(y, "gather", -1, self.lengths)
        return inside(y, self.region.number, self.features)


class RowParallelLinear(_ParallelLinear):
    """nn.Linear whose inputs are shared out: rank r takes the r-th shard of them (sizes differ by one at most).

    The input is this rank's shard, or without `input_is_parallel` full on every rank; the output is full on every
    rank. The bias is replicated, and added once, after the sum. Otherwise as ColumnParallelLinear.
    """

    is_inside = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
        *,
        comm: Communicator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        full = _full(in_features, out_features, bias, init, bias_init, dtype, device)
        self._take_shard(full, Region(comm or worlds.world()), input_is_parallel)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        comm: Communicator | Region | None = None,
        *,
        input_is_parallel: bool = True,
        shards: ParameterSharder | None = None,
        is_inside: bool = False,
    ) -> RowParallelLinear:
        """The same layer, sharded. is_inside: every rank uses the output with its own part of the features, so that the
        output's gradients are summed as well."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.is_inside = is_inside
        layer._take_shard(linear, _region(comm), input_is_parallel, shards)
        return layer

    def _take_shard(
        self, linear: nn.Module, region: Region, input_is_parallel: bool, shards: ParameterSharder | None = None
    ) -> None:
        self._take_settings(linear, region)
        self.input_is_parallel = input_is_parallel
        shards = shards or ParameterSharder(region.comm.rank, region.comm.size)
        split = packed(int(not self.transposed), (self.in_features,), region.comm.size)
        self.lengths = lengths_of(split)
        self.weight = shards.shard(linear.weight, split)  # type: ignore[arg-type]
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        comm = self.region.comm
        if self.input_is_parallel:
            self._require_width(x, self.lengths[comm.rank], "this rank's shard of the input features")
        else:
            self._require_width(x, self.in_features, "all of the input features")
            if torch.compiler.is_compiling():
                x = self.region.traced(x, "split", -1, self.lengths)
            else:
                x = autograd_collectives.split(x, -1, self.lengths, comm)
        if self.is_inside and torch.compiler.is_compiling():
            y = self.region.traced(self._linear(x, None), "reduce")
            return self.region.traced(y if self.bias is None else y + self.bias, "copy")
        if self.is_inside:
            y = autograd_collectives.reduce(self._linear(x, None), comm)
            return autograd_collectives.copy(y if self.bias is None else y + self.bias, comm)
        y = self.region.leave(self._linear(x, None))
        return y if self.bias is None else y + self.bias


def part_lengths(length: int, parts: Sequence[int]) -> list[int]:
    """`length` split in the proportions of `parts`."""
    if length % sum(parts):
        raise UsageError(f"{length} features do not consist of parts of the proportions {'+'.join(map(str, parts))}")
    return [length // sum(parts) * part for part in parts]


def _region(comm: Communicator | Region | None) -> Region:
    return comm if isinstance(comm, Region) else Region(comm or worlds.world())
