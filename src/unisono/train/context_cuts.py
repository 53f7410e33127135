"""How tensors of a traced model lie along cp: what each rank has of the sequences, op by op, as ranks cut them.

What stands before the blocks is whole. Hidden states are cut to a rank's tokens where they enter the first block, and
so is every other argument of a block that runs along the sequence; from there on all that is made of them is of these
tokens. Where targets are of whole sequences, tokens are gathered after the last block, and ranks take some of the
samples to the loss. The gradient of what is whole is that of a rank's tokens, among zeros: it stays a part up to the
parameters, whose gradients are summed.

Attention is what ranks do together (see context_said).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.assignment import producers
from unisono.graph.lowering import Compute, Lowered, Move
from unisono.graph.option import REPLICATE, Option
from unisono.graph.rules.registry import options, target_name
from unisono.graph.stage import inside
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import is_partial, shard_dim
from unisono.parallel.blocks import find_blocks
from unisono.parallel.context import NEEDS, sequence_dim
from unisono.plan.plan import DATA
from unisono.train.walk import WHOLE, Lies, Walk

AXIS = "cp"
CORE = "aten.scaled_dot_product_attention"


def blocks_of(model: nn.Module) -> list[str]:
    found = find_blocks(model, NEEDS)
    return [found.name(number) for number in range(len(found.modules))]


class ContextCuts(Walk):
    """`of_sequences`: whether targets are of whole sequences, and not of tokens; `sequence`: whether sp cuts a rank's
    tokens again."""

    def __init__(self, trace: Trace, mesh: Mesh, blocks: Sequence[str], of_sequences: bool, sequence: bool) -> None:
        super().__init__(trace)
        self._mesh = mesh
        self._sequence = sequence
        self._home = inside(trace, blocks)
        self._last = len(blocks) - 1
        self._of_sequences = of_sequences
        self._samples, self._length = self._entering(blocks[0])
        self._made_in_blocks: set[str] = set()  # of nothing that was given to them: ranks make it for their tokens
        for op in trace.ops:
            if self._home[op.name] is not None and all(self._is_a_block_s(source) for source, _ in producers(op.node)):
                self._made_in_blocks.add(op.name)

    def _entering(self, first: str) -> tuple[int, int]:
        """Samples and tokens of the hidden states."""
        for op in self.trace.ops:
            for source, output in producers(op.node) if self._home[op.name] == 0 else ():
                spec = self.trace.specs[source][output]
                is_hidden = source in self.trace.tracked and len(spec.shape) == 3 and self._comes_from_outside(source)
                if is_hidden and spec.dtype.is_floating_point:
                    return spec.shape[0], spec.shape[1]
        raise UsageError(f"cp: block {first} is given no hidden states; expected a tensor (batch, sequence, width)")

    def _comes_from_outside(self, source: str) -> bool:
        """Whether it is given to a block, and neither its own parameter nor made in one."""
        is_held = source in (*self.trace.parameters, *self.trace.buffers, *self.trace.constants)
        return not is_held and self._home.get(source) is None

    def _is_a_block_s(self, source: str) -> bool:
        return source in self._made_in_blocks or source in self.trace.parameters or source in self.trace.constants

    # ---- op by op --------------------------------------------------------------------------------------------------

    def of_placeholder(self, node: fx.Node) -> Option:
        specs = self.trace.specs[node.name]
        if node.name not in self.trace.targets:
            return options(node)[0]
        dim = 0 if self._of_sequences else 1
        if len(specs[0].shape) <= dim:
            raise UsageError(
                f"targets of shape {specs[0].shape} under context parallelism; expected one a token: (batch, sequence, "
                "...); use a plan with cp=1"
            )
        return Option((), (Shard(dim),))

    def taken(self, node: fx.Node, source: str, output: int) -> Lies:
        """How an op takes a tensor: as it lies, but for those that enter or leave the blocks."""
        lies, home = super().taken(node, source, output), self._home[node.name]
        spec = self.trace.specs[source][output]
        if home is not None and lies == WHOLE and self._comes_from_outside(source):
            is_hidden = len(spec.shape) == 3 and spec.shape[:2] == (self._samples, self._length)
            is_hidden = is_hidden and source in self.trace.tracked
            shadow = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            dim = 1 if is_hidden else sequence_dim(shadow, self._length, self._samples)
            return lies if dim is None else Lies(Shard(dim))
        if home is None and self._of_sequences and self._home.get(source) == self._last:
            return WHOLE
        return lies

    def is_made_in_pieces(self, node: fx.Node) -> bool:
        return self._home[node.name] is not None  # before the blocks, sequences are whole

    def together(self, node: fx.Node, given: Sequence[Lies]) -> Option | None:
        """Attention over the tokens of all ranks; a mask is of all of them."""
        if not target_name(node.target).startswith(CORE):
            return None
        sources = producers(node)
        rows = [Shard(len(self.trace.specs[name][output].shape) - 2) for name, output in sources[:3]]
        is_spread = [each.placement for each in given[:3]] == rows
        is_whole = all(each.placement == REPLICATE for each in given[3:])
        if not is_spread or not is_whole or any(name in self._made_in_blocks for name, _ in sources[3:]):
            raise self._unshown(node)
        return Option((*rows, *(each.placement for each in given[3:])), (rows[0],))

    def without_rule(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        raise self._unshown(node)

    def _unshown(self, node: fx.Node) -> UsageError:
        op = next(op for op in self.trace.ops if op.name == node.name)
        return UsageError(
            f"cp: {op.name} ({op.path} {op.line}) looks at several tokens at once, and how ranks that share each "
            "sequence do that cannot be shown; use --plan without cp, or unisono report, which writes down what ranks "
            "of a run said"
        )

    # ---- the program -----------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Option]:
        chosen = super().options()
        self._require_even()
        return chosen

    def _require_even(self) -> None:
        mesh, ranks = self._mesh, self._mesh.size(AXIS)
        sharing = ranks * mesh.size("tp") if self._sequence else ranks
        if self._length % sharing:
            others = " with the ranks of tp" if self._sequence else ""
            raise UsageError(
                f"cp={ranks}: sequences of {self._length} tokens cannot be shared evenly{others}, as a program shows "
                f"it; give a batch of sequences of a multiple of {sharing}"
            )
        samples = self._samples // math.prod(mesh.size(name) for name in DATA if name in mesh.names)
        if self._of_sequences and samples % ranks:
            raise UsageError(
                f"cp={ranks}: ranks share {samples} samples in the loss, which they cannot evenly, as a program shows "
                f"it; give a batch of a multiple of {ranks} samples a rank"
            )

    def checked(self, lowered: Lowered) -> Lowered:
        """Sums come before cuts along cp. What moves along cp otherwise than ranks move it is not theirs."""
        axis = lowered.mesh.axis(AXIS)
        made: list[Move | Compute] = []
        for each in lowered.instructions:
            if isinstance(each, Move):
                steps = _sums_first(each, lowered, axis)
                for step in steps:
                    self._require_known(step, lowered, axis)
                made += steps
            else:
                made.append(each)
        return replace(lowered, instructions=made)

    def _require_known(self, move: Move, lowered: Lowered, axis: int) -> None:
        steps = (*move.way.forward_steps(lowered.mesh), *move.way.backward_steps(lowered.mesh))
        kinds = {step.kind for step in steps if axis in step.axes and step.talks}
        leaves = self._of_sequences and self._home.get(move.source) == self._last
        known = {"all_gather", "reduce_scatter"} if leaves else {"all_reduce"} if not move.way.shape else set()
        if kinds - known:
            raise self._unshown(lowered.trace.node(move.source))


def _sums_first(move: Move, lowered: Lowered, axis: int) -> list[Move]:
    """A sum over other ranks is of whole sequences, where these are cut after it."""
    way = move.way
    is_cut = way.before[axis] == REPLICATE and shard_dim(way.after[axis]) is not None
    if not is_cut or not any(is_partial(placement) for placement in way.before):
        return [move]
    between = tuple(REPLICATE if number == axis else each for number, each in enumerate(way.after))
    back = None
    if way.gradient_after is not None and way.gradient_before is not None:
        both = zip(way.gradient_before, way.gradient_after, strict=True)
        back = tuple(before if number == axis else after for number, (before, after) in enumerate(both))
    name = f"{move.source}_summed"
    lowered.values[name] = replace(lowered.values[move.source], placements=between)
    first = Move(name, move.source, replace(way, after=between, gradient_after=back))
    return [first, Move(move.name, name, replace(way, before=between, gradient_before=back))]
