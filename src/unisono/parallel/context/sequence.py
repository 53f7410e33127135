"""Sequence parallelism: between tensor-parallel regions, activations are sharded along the sequence (dim 1).

Plain tensor parallelism keeps everything outside its regions full on every rank: norms, dropouts and residuals are
computed, and their activations kept, tp times. They work token by token, so here every rank does its own tokens only:

    plain        norm(all tokens)   ->  copy        [ column .. row ]  all-reduce      ->  dropout(all tokens)
    sequence     norm(my tokens)    ->  all-gather  [ column .. row ]  reduce-scatter  ->  dropout(my tokens)

A reduce-scatter and an all-gather are the two halves of an all-reduce: what is sent stays the same, what is kept
between regions is 1/tp. The model's blocks run this way: at the first one's entry hidden states are sharded, at the
last one's exit they are gathered. Replicated parameters in between (norms, biases of row layers) see each rank's tokens
only, so their gradients are summed along "tp", as their layouts record.

A module in a block that needs all tokens but is not sharded by columns and rows (attention with a norm over all heads,
layers without a rule) runs on the full sequence, as without sp: its input is gathered, its output sharded again. What
the block hands it besides, such as a bias made of the block's own parameters, gets its full gradient on every rank,
of which one counts in the sum.

Tensors that a block takes besides its tokens (an encoder's output that it attends to, a bias, a condition) are not
sharded. A rank uses them for its own tokens or heads, so that their gradients too are summed over ranks, where they
enter the block.

The sequence's length need not be a multiple of tp.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.collective_ops import eager_only
from unisono.mesh.global_index import Part
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import Key, Locate
from unisono.parallel.blocks import Blocks, find_blocks, not_called, some_of_the_tokens
from unisono.parallel.compile.regions import compiles, eager_regions
from unisono.parallel.layout import Split, layout_of
from unisono.parallel.rules.rules import Styles
from unisono.parallel.tensor import adapters
from unisono.parallel.tensor.linear import is_linear
from unisono.parallel.tensor.parameter_shards import TP, add_up, lengths_of
from unisono.parallel.tensor.region import Region
from unisono.torch_compat import BatchNormNd, ConvNd

DIM = 1  # of the sequence
Forward = Callable[..., Any]

# Attributes of tensors in and between blocks
_FULL = "unisono_full"  # not sharded, in a block: the tensor that it is outside of the blocks
_USED = "unisono_used"  # outside: what blocks use instead
_SHARDED = "unisono_sharded"  # returned by a block, beside its hidden states

Kind = tuple[Any, ...]  # of a microbatch: the shapes of its inputs


class SequenceRegion(Region):
    """Outside, every rank has its shard of the sequence."""

    def __init__(self, comm: Communicator, outside_blocks: Callable[[], UsageError] | None = None) -> None:
        """outside_blocks: why a layer of the blocks may not run outside them; None on a stage of a pipeline."""
        super().__init__(comm)
        self._outside_blocks = outside_blocks
        self.length: int | None = None  # of the full sequence that entered the blocks last
        self.kind: Kind | None = None  # of the microbatch that runs, on a stage of a pipeline
        self._exchanged: dict[Kind | None, list[int]] = {}  # lengths of shards by kind of microbatch
        self._tokens: list[int] = []
        self._own: torch.Tensor | None = None  # tokens of the block that runs
        self._like_own: list[torch.Tensor] = []  # tensors beside them with as many tokens, which are not sharded

    @property
    def outside(self) -> Locate:
        return self._outside

    def enter(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return super().enter(x, width)
        if hasattr(x, _FULL):
            return x  # its gradient is summed where it enters the block
        if self._like_own:
            self._require_own(x)
        return super().enter(x, width)

    @eager_only
    def use(self, x: torch.Tensor) -> torch.Tensor:
        """Replaces x, which is not sharded, in a block: ranks use it in different ways."""
        if hasattr(x, _FULL):
            return x
        now = (self, x._version, torch.is_grad_enabled())
        before, used = getattr(x, _USED, (None, None))
        if used is None or before != now:
            used = autograd_collectives.copy(x, self.comm) if x.requires_grad else x.detach()
            setattr(used, _FULL, weakref.ref(x))
            if not x.is_inference():
                setattr(x, _USED, (now, used))
        return used

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """What a tensor that is not sharded is outside of the blocks, where all ranks compute its full gradient."""
        outside = getattr(x, _FULL, lambda: None)()
        return autograd_collectives.count_once(x, self.comm) if outside is None else outside

    @contextmanager
    def block(self, hidden: torch.Tensor, others: Sequence[torch.Tensor]) -> Iterator[None]:
        self._own = hidden
        self._like_own = [x for x in others if x.shape[:2] == hidden.shape[:2] and hidden.shape[DIM] != self.length]
        self.locate_outside()
        may_compile = not self._like_own and not any(x.requires_grad for x in others)
        if may_compile and compiles():
            self.lengths = self._shards_of(hidden.shape[DIM])
        try:
            with nullcontext() if may_compile else eager_regions():
                yield
        finally:
            self._own, self._like_own = None, []
            self.locate_elsewhere()

    def _require_own(self, x: torch.Tensor) -> None:
        """UsageError where x is made only of tensors that are not sharded, and as long as this rank's tokens. Tokens
        without a gradient, in the first block, leave no trace in x: there the next block shows it."""
        own = None if self._own is None else self._own.grad_fn
        others = {each.grad_fn for each in self._like_own if each.grad_fn is not None}
        if own is None or not others or not x.requires_grad:
            return
        reached = _origins(x, others | {own})
        if reached & others and own not in reached:
            raise _ambiguous_tensor(x, self.length)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's shard of what every rank has in full; the sequence enters the blocks."""
        if x.dim() < 3:
            raise UsageError(
                f"sequence parallelism: the first block was given a tensor of shape {tuple(x.shape)}; "
                "expected (batch, sequence, features)"
            )
        self.length = x.shape[DIM]
        return autograd_collectives.split(x, DIM, self.shards(self.length), self.comm)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The full tensor of which every rank has its shard; the sequence leaves the blocks."""
        return autograd_collectives.gather(x, DIM, self._shards_of(x.shape[DIM]), self.comm)

    def shards(self, length: int) -> list[int]:
        return lengths_of(Split.even(TP, DIM, length, self.comm.size))

    def _left(self, part: torch.Tensor) -> torch.Tensor:
        return autograd_collectives.reduce_to_shard(part, DIM, self.shards(part.shape[DIM]), self.comm)

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        return autograd_collectives.gather_to_use(x, DIM, self._shards_of(x.shape[DIM]), self.comm)

    def _shards_of(self, mine: int) -> list[int]:
        """All ranks' shards of the sequence of which this rank's one is so long.

        A stage of a pipeline that does not have the first block has not seen it in full: there ranks exchange lengths,
        once for each kind of microbatch.
        """
        if self.length is not None:
            shards = self.shards(self.length)
        elif self._outside_blocks is not None:
            raise self._outside_blocks()
        else:
            if self.kind is None or self.kind not in self._exchanged:
                lengths = self.comm.all_gather(torch.tensor([mine], device=self.comm.device))
                self._exchanged[self.kind] = [int(length) for length in lengths]
            shards = self._exchanged[self.kind]
        if shards[self.comm.rank] != mine:
            raise UsageError(
                f"sequence parallelism: a layer inside the blocks was given {mine} tokens; expected this rank's "
                f"{shards[self.comm.rank]} of {sum(shards)}, or a tensor as the block was given it; leave sp out"
            )
        return shards

    @eager_only
    def locate_outside(self) -> None:
        self.is_inside = False
        state = active_state()
        if state is not None:
            state.locate = self._outside

    @eager_only
    def locate_elsewhere(self) -> None:
        """Dropouts from here on are not in the blocks."""
        super().locate_outside()

    def _outside(
        self, shape: Sequence[int], kind: str, parts: dict[int, Part], key: Key | None = None
    ) -> dict[int, Part]:
        if kind == "attention" or len(shape) < 3:
            raise UsageError(
                f"sequence parallelism: a dropout outside the tensor-parallel regions works on a tensor of shape "
                f"{tuple(shape)}; expected (batch, sequence, features)"
            )
        shards = self._shards_of(shape[DIM])
        first = sum(shards[: self.comm.rank])
        mine = Part(range(first, first + shape[DIM]), sum(shards))
        return parts | {DIM: mine.within(parts[DIM]) if DIM in parts else mine}

    @eager_only
    def enter_tokens(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # Experts take (batch x my sequence) tokens in one dim, in any order.
        mine = torch.tensor([len(value)], device=self.comm.device)
        self._tokens = [int(tokens) for tokens in self.comm.all_gather(mine)]
        return autograd_collectives.gather_to_use(value, 0, self._tokens, self.comm)

    @eager_only
    def leave_tokens(self, part: torch.Tensor) -> torch.Tensor:
        return autograd_collectives.reduce_to_shard(part, 0, self._tokens, self.comm)


class SequenceParallel:
    """Sequence parallelism in a model's blocks."""

    def __init__(
        self,
        blocks: Blocks,
        comm: Communicator,
        full: Sequence[str] = (),
        outside_blocks: Callable[[], UsageError] | None = None,
    ) -> None:
        """full: modules in the blocks that run on the full sequence."""
        self.blocks = blocks
        self._full = full
        self._inside = SequenceRegion(comm, outside_blocks)
        self._outside = Region(comm)

    @classmethod
    def of(cls, model: nn.Module, styles: Styles, mesh: Mesh) -> SequenceParallel:
        blocks = require_sound_blocks(model, styles)
        is_pipeline = "pp" in mesh.names and mesh.size("pp") > 1
        outside = None if is_pipeline else partial(not_called, blocks, model, "sp")
        return cls(blocks, mesh.comm("tp"), full_sequence_modules(blocks, styles), outside)

    def enter_microbatch(self, kind: Kind) -> None:
        """A stage of a pipeline begins to run a microbatch of that kind."""
        self._inside.kind = kind

    def region_of(self, name: str) -> Region:
        """The region of the layer of that name."""
        is_inside = f"{name}.".startswith(f"{self.blocks.path}.") and not self._is_full(name)
        return self._inside if is_inside else self._outside

    def _is_full(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{each}.") for each in self._full)

    def install(self) -> None:
        """Split at the first block's entry, gather at the last one's exit; declare whose gradients are summed."""
        last = len(self.blocks.modules) - 1
        for number, block in enumerate(self.blocks.modules):
            # What wraps a block from now on is outside, and sees shards between blocks.
            block.forward = partial(self._run_block, block.forward, number, number == last)
            for name, parameter in block.named_parameters(prefix=self.blocks.name(number)):
                if "tp" not in layout_of(parameter).axes and not self._is_full(name):
                    add_up(parameter, "tp")
            for name, module in block.named_modules(prefix=self.blocks.name(number)):
                if name in self._full:
                    module.forward = partial(self._run_full, name, module.forward)

    def _run_block(self, forward: Forward, number: int, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        region, is_first = self._inside, number == 0
        given = _first_tensor((*args, *kwargs.values()))
        hidden = region.split(given) if is_first else given
        others: list[torch.Tensor] = []

        def entered(leaf: Any) -> Any:
            if leaf is given:
                return hidden
            if not self._is_used_in_full(leaf, hidden, is_first):
                return leaf
            others.append(region.use(leaf))
            return others[-1]

        args, kwargs = tree_map(entered, (args, kwargs))
        name = f"sp: block {self.blocks.name(number)}"
        with region.block(hidden, others), some_of_the_tokens(name, region.length, "leave sp out"):
            outputs = forward(*args, **kwargs)
        return self._left(outputs, is_last)

    def _is_used_in_full(self, x: Any, hidden: torch.Tensor, is_first: bool) -> bool:
        """Whether what a block is given beside its tokens is a tensor that is not sharded, and must be used as such."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or hasattr(x, _SHARDED):
            return False
        if x.dim() != 3 or is_first or hasattr(x, _USED):
            return x.requires_grad or x.dim() == 3
        if x.shape[:2] == hidden.shape[:2] and hidden.shape[DIM] != self._inside.length:
            raise _ambiguous_tensor(x, self._inside.length)
        return True

    def _left(self, outputs: Any, is_last: bool) -> Any:
        """What a block returns: its tokens, gathered after the last block, and others, as they are between blocks."""
        hidden = _first_tensor(outputs if isinstance(outputs, tuple | list) else (outputs,))

        def left(leaf: Any) -> Any:
            if leaf is hidden:
                return self._inside.join(hidden) if is_last else hidden
            if isinstance(leaf, torch.Tensor) and hasattr(leaf, _FULL):
                return self._inside.full(leaf)
            if isinstance(leaf, torch.Tensor):
                setattr(leaf, _SHARDED, True)
            return leaf

        return tree_map(left, outputs)

    def _run_full(self, name: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Hidden states, and others of their width beside them, are gathered; every rank computes the same."""
        region = self._inside
        tensors = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
        hidden = next((each for each in tensors if not hasattr(each, _FULL)), None)
        lengths = [] if hidden is None else region._shards_of(hidden.shape[DIM])

        def gathered(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if hasattr(leaf, _FULL):
                return region.full(leaf)
            if hidden is not None and leaf.shape == hidden.shape:
                return autograd_collectives.gather(leaf, DIM, lengths, region.comm)
            return self._counted_once(name, leaf)

        region.locate_elsewhere()
        try:
            outputs = forward(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
        finally:
            region.locate_outside()
        first = None if hidden is None else _first_tensor(outputs if isinstance(outputs, tuple | list) else (outputs,))

        def returned(leaf: Any) -> Any:
            if leaf is first and first is not None:
                return autograd_collectives.split(first, DIM, lengths, region.comm)
            is_used = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return _kept(region.use(leaf), leaf) if is_used else leaf

        return tree_map(returned, outputs)

    def _counted_once(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor made of the running block's parameters, for a module that runs on the full sequence."""
        own = self._inside._own
        if not tensor.requires_grad or own is None:
            return tensor
        if own.grad_fn is not None and own.grad_fn in _origins(tensor, {own.grad_fn}):
            raise UsageError(
                f"sp runs {name} on the full sequence, and its block gives it a tensor of shape {tuple(tensor.shape)} "
                "that is made of this rank's tokens; make it in that module, or leave sp out"
            )
        return autograd_collectives.count_once(tensor, self._inside.comm)


def _kept(used: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Keeps the tensor alive that `used` stands for: nobody else does."""
    setattr(used, _FULL, lambda: outside)
    return used


def _ambiguous_tensor(x: torch.Tensor, length: int | None) -> UsageError:
    return UsageError(
        f"sequence parallelism: a block was given a tensor of shape {tuple(x.shape)} beside its hidden states, and "
        f"{x.shape[DIM]} tokens are also this rank's share of {length or 'the sequence'}, so that the two could not be "
        "distinguished; pad it to another length, or leave sp out"
    )


def _first_tensor(values: Sequence[Any]) -> torch.Tensor:
    return next(value for value in values if isinstance(value, torch.Tensor))


def _origins(tensor: torch.Tensor, stops: set[Any]) -> set[Any]:
    """Nodes of autograd's graph in which the tensor's history ends: leaves, and those of `stops`."""
    found, seen, left = set(), set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions if each is not None]
        if node in stops or not following:
            found.add(node)
        else:
            left += following
    return found


def _blocks(model: nn.Module) -> Blocks:
    try:
        return find_blocks(model)
    except UsageError:
        raise UsageError(
            f"sequence parallelism runs in a model's repeated blocks (an nn.ModuleList or nn.Sequential of one class), "
            f"but {type(model).__name__} has none; leave sequence out"
        ) from None


def require_sound_blocks(model: nn.Module, styles: Styles) -> Blocks:
    """The model's blocks; UsageError where one has a layer that cannot be given a shard of the sequence."""
    blocks = _blocks(model)
    full = full_sequence_modules(blocks, styles)
    for number, block in enumerate(blocks.modules):
        _require_sound(blocks.name(number), block, styles, full)
    return blocks


def full_sequence_modules(blocks: Blocks, styles: Styles) -> tuple[str, ...]:
    """Modules in the blocks with layers that can be given the full sequence only."""
    found: list[str] = []
    for number, block in enumerate(blocks.modules):
        inner = adapters.inner_modules(block)
        modules = dict(block.named_modules(prefix=blocks.name(number)))
        for name, module in modules.items():
            if module in inner and name not in styles:
                continue
            if not _needs_full(name, module, modules, styles) or any(f"{name}.".startswith(f"{e}.") for e in found):
                continue
            parent = name.rpartition(".")[0]
            while isinstance(modules.get(parent), nn.ModuleList | nn.ModuleDict):
                parent = parent.rpartition(".")[0]
            if parent in modules and parent != blocks.name(number):
                found.append(parent)
    return tuple(found)


def _needs_full(name: str, module: nn.Module, modules: dict[str, nn.Module], styles: Styles) -> bool:
    style = styles.get(name)
    if not is_linear(module) or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    owners = [each for key, each in modules.items() if f"{name}.".startswith(f"{key}.")]
    if any(getattr(each, "is_tokenwise", False) for each in owners):
        return False
    return style is None or style.kind in ("column_gather", "row_split")


_TOKEN_MIXERS = (nn.MultiheadAttention, nn.RNNBase, ConvNd)


def _require_sound(block_name: str, block: nn.Module, styles: Styles, full: Sequence[str]) -> None:
    """Outside its regions a block must work token by token."""
    tokenwise: set[nn.Module] = set()  # modules that declare that they work token by token
    inner = adapters.inner_modules(block)
    for inner_name, module in block.named_modules(prefix=block_name):
        if getattr(module, "is_tokenwise", False):
            tokenwise.update(module.modules())
        if module in tokenwise or any(f"{inner_name}.".startswith(f"{each}.") for each in full):
            continue
        style = styles.get(inner_name)
        if style is not None and style.kind in ("column_gather", "row_split", "vocab", "mla_kv"):
            raise UsageError(f"{inner_name}: {style} inside a block does not go with sequence parallelism")
        if style is not None and isinstance(module, ConvNd) and style.kind in ("column", "row"):
            raise UsageError(
                f"{inner_name}: {style} of a convolution does not go with sequence parallelism; leave sp out"
            )
        if isinstance(module, BatchNormNd):
            raise UsageError(
                f"{inner_name} takes means over all tokens, and sequence parallelism gives it some of them"
            )
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            raise UsageError(f"{inner_name} has the sequence in dim 0; sequence parallelism needs batch_first=True")
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue  # nn.MultiheadAttention's own, sharded with it
        if style is None and module not in inner and (is_linear(module) or isinstance(module, _TOKEN_MIXERS)):
            raise UsageError(
                f"sequence parallelism would give {inner_name} a shard of the sequence, as no rule shards it; if it "
                f'works token by token, say so with the rule {{"{_pattern(inner_name)}": "replicate"}}, else shard it'
            )


def _pattern(name: str) -> str:
    return "*." + name.rpartition(".")[2]
