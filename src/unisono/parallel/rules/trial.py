"""Simulated ranks: whether a module, sharded by some rules, computes what it computes on one device.

Each rank is a thread of this process with its share of the module; their collectives meet at a barrier. Compared are
outputs and, as gradients, those of the inputs and of every parameter.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.random.random_functions import constant_draws
from unisono.parallel.layout import layout_of
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.parallel.rules.rules import Rules

_PATIENCE = 300.0  # seconds until a rank that waits for others gives up
_OWN, _OVERALL = 1e-5, 1e-7  # of a tensor's largest element, of the largest gradient: modules may compute in float32

_VARIATIONS = 4  # of a module's parameters
_MOST_RANKS = 16  # that are simulated

Shard = Callable[[nn.Module, Rules, Any], None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def simulated_ranks(ranks: int) -> int:
    """How many ranks a trial simulates: as many as there will be, as fewer may hold by chance what more do not (every
    second head on each of two ranks); of very many, a divisor."""
    return max(factor for factor in range(1, min(ranks, _MOST_RANKS) + 1) if ranks % factor == 0)


class Trial:
    """One module in float64 and the arguments of one call of it, held against simulated ranks.

    used: which of the tensors that it returns are compared; by default all. Attention may return its weights beside the
    hidden states, of which a rank has those of its heads, and which nobody uses.
    """

    def __init__(
        self, module: nn.Module, ranks: int, given: Arguments, shard: Shard, used: Set[int] | None = None
    ) -> None:
        self._module, self._ranks, self._given, self._shard, self._used = module, ranks, given, shard, used
        self._expected: _Computed | None = None

    def needed_sums(self, rules: Rules) -> list[str] | None:
        """None where the rules do not hold for the module. Else the parameters of which every rank computes a part of
        the gradient, and which have no rule for it."""
        try:
            with constant_draws():
                if self._expected is None:
                    self._expected = self._computed(self._module)
                results = together(self._module, rules, self._ranks, self._computed, self._shard)
        except Exception:  # sizes that do not fit, arguments that cannot be differentiated: not a way to shard it
            return None
        finally:
            for parameter in self._module.parameters():
                if hasattr(parameter, "unisono_layout"):
                    del parameter.unisono_layout
        return _compared(self._expected, results)

    def _computed(self, module: nn.Module) -> _Computed:
        return _computed(module, self._given, self._used)

    def holds_with_other_values(self, rules: Rules) -> bool:
        """Whether the rules hold whatever the parameters are: `x[:, 0] > 0`, of sharded features, is another question
        on every rank, to which a few samples may have the same answer by chance."""
        for module in varied(self._module):
            other = Trial(module, self._ranks, self._given, self._shard, self._used)
            if other.needed_sums(rules) != [] and other.is_finite:
                return False
        return True

    @property
    def is_finite(self) -> bool:
        """Whether the module has run, and has given numbers."""
        if self._expected is None:
            return False
        outputs, of_inputs, of_parameters = self._expected
        found = [*outputs, *of_inputs, *(each for each, _ in of_parameters.values())]
        return all(bool(each.isfinite().all()) for each in found if each is not None)


def varied(module: nn.Module) -> Iterator[nn.Module]:
    """Copies of a module with other parameters, of a size that lets samples differ."""
    for seed in range(_VARIATIONS):
        other = copy.deepcopy(module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in other.parameters():
                if parameter.is_floating_point():
                    size = parameter.square().mean().sqrt().clamp_min(0.3) if parameter.numel() else 1.0
                    noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                    parameter.add_(size * noise.to(parameter.dtype))
        yield other


def _weights(number: int, output: torch.Tensor) -> torch.Tensor:
    """Random factors of an output in a scalar, the same for every rank."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output.dtype)


_Computed = tuple[list[torch.Tensor], list[torch.Tensor | None], dict[str, tuple[torch.Tensor | None, Any]]]


def _computed(module: nn.Module, given: Arguments, used: Set[int] | None) -> _Computed:
    """Outputs, gradients of inputs, and gradients of parameters with their layouts."""
    inputs: list[torch.Tensor] = []

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copied = leaf.detach().clone()
        if leaf.requires_grad:
            inputs.append(copied.requires_grad_())
            return copied * 1  # which a module may change in place
        return copied

    with torch.enable_grad():
        args, kwargs = tree_map(fresh, given)
        found = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        compared = [leaf for number, leaf in enumerate(found) if not used or number in used]
        outputs = [leaf for leaf in compared if leaf.is_floating_point()]
        total = sum((each * _weights(number, each)).sum() for number, each in enumerate(outputs))
        named = {name: each for name, each in module.named_parameters() if each.requires_grad}
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            raise ValueError("nothing to differentiate")
        gradients = torch.autograd.grad(total, [*inputs, *named.values()], allow_unused=True)
    of_parameters = zip(named.items(), gradients[len(inputs) :], strict=True)
    return (
        [each.detach() for each in outputs],
        list(gradients[: len(inputs)]),
        {name: (gradient, layout_of(parameter)) for (name, parameter), gradient in of_parameters},
    )


def _compared(expected: _Computed, results: list[_Computed]) -> list[str] | None:
    outputs, of_inputs, of_parameters = expected
    gradients = [*of_inputs, *(each for each, _ in of_parameters.values())]
    largest = max((_largest(each) for each in gradients if each is not None), default=0.0)
    if not math.isfinite(largest):
        return None  # of these few samples the model makes no numbers, which prove nothing
    sums = []
    for got_outputs, got_inputs, _ in results:
        if len(got_outputs) != len(outputs) or not all(map(is_close, got_outputs, outputs)):
            return None
        if not all(_is_near(got, want, largest) for got, want in zip(got_inputs, of_inputs, strict=True)):
            return None
    for name, (want, _) in of_parameters.items():
        if any(name not in got for _, _, got in results):
            return None
        got = [result[name][0] for _, _, result in results]
        layouts = [result[name][1] for _, _, result in results]
        if layouts[0].splits:
            shards = [want if want is None else _local(want, layout, rank) for rank, layout in enumerate(layouts)]
            if not all(_is_near(mine, shard, largest) for mine, shard in zip(got, shards, strict=True)):
                return None
        elif "tp" in layouts[0].summed:
            if not _is_near(_sum(got), want, largest):
                return None
        elif not all(_is_near(mine, want, largest) for mine in got):
            if not _is_near(_sum(got), want, largest):
                return None
            sums.append(name)
    return sums


def _local(full: torch.Tensor, layout: Any, rank: int) -> torch.Tensor:
    for split in layout.splits:
        full = full.index_select(split.dim, torch.as_tensor(list(split.held[rank]), dtype=torch.long))
    return full


def _sum(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.stack(found).sum(0) if found else None


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _is_near(got: torch.Tensor | None, expected: torch.Tensor | None, largest: float) -> bool:
    if got is None or expected is None:
        other = expected if got is None else got
        return other is None or _largest(other) <= _OVERALL * largest
    if got.shape != expected.shape:
        return False
    tolerance = _OWN * _largest(expected) + _OVERALL * largest
    return torch.allclose(got, expected, rtol=0.0, atol=tolerance)


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """But for rounding: some models compute in float32 on their way, of whatever dtype they are."""
    if got.shape != expected.shape:
        return False
    finite = expected[expected.isfinite()]
    return torch.allclose(got, expected, atol=max(_OWN * _largest(finite), 1e-8), equal_nan=True)


def together(full: nn.Module, rules: Rules, ranks: int, compute: Callable[[nn.Module], Any], shard: Shard) -> list[Any]:
    """What each simulated rank computes with its share of the module; the first error of any of them."""
    rendezvous = _Rendezvous(ranks)
    holder = nn.ModuleDict({"probed": full})
    named = {f"probed.{relative}".strip("."): text for relative, text in rules.items()}
    kept = {id(parameter): parameter for parameter in holder.parameters()}  # sharding copies what it needs of them
    shared = [deep_copy(holder, dict(kept)) for _ in range(ranks)]
    for rank, module in enumerate(shared):
        shard(module, named, _SimulatedRank(rank, rendezvous))
    outcomes: list[Any] = [None] * ranks
    has_gradients = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(has_gradients):
                outcomes[rank] = compute(shared[rank]["probed"])
        except Exception as error:
            outcomes[rank] = error
            rendezvous.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return outcomes


class _Rendezvous:
    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=_PATIENCE)
        self.brought: list[Any] = [None] * ranks


class _SimulatedRank:
    """As much of a Communicator as a layer needs in its forward and its backward."""

    is_simulated = True
    device = torch.device("cpu")

    def __init__(self, rank: int, rendezvous: _Rendezvous) -> None:
        self.rank, self.size = rank, rendezvous.barrier.parties
        self._rendezvous = rendezvous

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        stacked = torch.stack(self._brought(tensor))
        tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))
        self._rendezvous.barrier.wait()
        return _Done(tensor) if async_op else tensor

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        out.copy_(torch.cat(self._brought(tensor)).view(out.shape))
        self._rendezvous.barrier.wait()
        return out

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = list(self._brought(tensor))
        self._rendezvous.barrier.wait()
        return found

    def reduce_scatter(self, tensor: torch.Tensor, async_op: bool = False) -> Any:
        mine = torch.stack(self._brought(tensor)).sum(0).chunk(self.size)[self.rank].clone()
        self._rendezvous.barrier.wait()
        return _Done(mine) if async_op else mine

    def _brought(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._rendezvous.brought[self.rank] = tensor.detach().clone()
        self._rendezvous.barrier.wait()
        return self._rendezvous.brought


class _Done:
    """The handle of a collective that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor
