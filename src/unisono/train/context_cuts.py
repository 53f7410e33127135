"""How tensors of a traced model lie along cp: what each rank has of the sequences, op by op, as ranks cut them.

What stands before the blocks is whole. Hidden states are cut to a rank's tokens where they enter the first block, and
so is every other argument of a block that runs along the sequence; from there on all that is made of them is of these
tokens. Where targets are of whole sequences, tokens are gathered after the last block, and ranks take some of the
samples to the loss. The gradient of what is whole is that of a rank's tokens, among zeros: it stays a part up to the
parameters, whose gradients are summed.

Ops have the rules of any axis, with two exceptions: attention, which ranks do together (context_said), and views that
put samples and tokens into one dim. A rank's tokens are no run of that dim, but ops that work row by row do not mind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment, producers
from unisono.graph.lowering import Compute, Lowered, Move
from unisono.graph.option import REPLICATE, Option
from unisono.graph.rules.registry import options, rule_of, target_name
from unisono.graph.rules.shape import view
from unisono.graph.stage import inside
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, is_partial, shard_dim
from unisono.parallel.blocks import find_blocks
from unisono.parallel.context import NEEDS, sequence_dim
from unisono.plan.plan import DATA

AXIS = "cp"
CORE = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Lies:
    """How a tensor lies along cp. `rows`: how many rows of tokens its cut dim holds, one sample after the other."""

    placement: Placement = REPLICATE
    rows: int = 1


WHOLE = Lies()


def blocks_of(model: nn.Module) -> list[str]:
    found = find_blocks(model, NEEDS)
    return [found.name(number) for number in range(len(found.modules))]


class ContextCuts:
    """`of_sequences`: whether targets are of whole sequences, and not of tokens."""

    def __init__(self, trace: Trace, blocks: Sequence[str], of_sequences: bool) -> None:
        self._trace = trace
        self._home = inside(trace, blocks)
        self._last = len(blocks) - 1
        self._of_sequences = of_sequences
        self._samples, self._length = self._entering(blocks[0])
        self._lying: dict[tuple[str, int], Lies] = {}
        self._made_in_blocks: set[str] = set()  # of nothing that was given to them: ranks make it for their tokens
        self._options = {node.name: self._of_node(node) for node in trace.graph.nodes}

    def _entering(self, first: str) -> tuple[int, int]:
        """Samples and tokens of the hidden states."""
        for op in self._trace.ops:
            for source, output in producers(op.node) if self._home[op.name] == 0 else ():
                spec = self._trace.specs[source][output]
                is_hidden = source in self._trace.tracked and len(spec.shape) == 3 and self._comes_from_outside(source)
                if is_hidden and spec.dtype.is_floating_point:
                    return spec.shape[0], spec.shape[1]
        raise UsageError(f"cp: block {first} is given no hidden states; expected a tensor (batch, sequence, width)")

    def _comes_from_outside(self, source: str) -> bool:
        """Whether it is given to a block, and neither its own parameter nor made in one."""
        is_held = source in (*self._trace.parameters, *self._trace.buffers, *self._trace.constants)
        return not is_held and self._home.get(source) is None

    def _is_a_block_s(self, source: str) -> bool:
        return source in self._made_in_blocks or source in self._trace.parameters or source in self._trace.constants

    # ---- op by op --------------------------------------------------------------------------------------------------

    def _of_node(self, node: fx.Node) -> Option:
        if node.op == "output":
            return options(node)[0]
        if node.op == "placeholder":
            return self._laid(node, self._of_placeholder(node), 1)
        given = [self._taken(node, source, output) for source, output in producers(node)]
        if self._home[node.name] is not None and all(self._is_a_block_s(source) for source, _ in producers(node)):
            self._made_in_blocks.add(node.name)
        if all(each.placement == REPLICATE for each in given):
            return self._laid(node, options(node)[0], 1)
        if target_name(node.target).startswith(CORE):
            return self._laid(node, self._together(node, given), 1)
        if (viewed := self._viewed(node, given)) is not None:
            return self._laid(node, *viewed)
        return self._laid(node, self._by_rule(node, given), max(each.rows for each in given))

    def _laid(self, node: fx.Node, option: Option, rows: int) -> Option:
        for number, placement in enumerate(option.outputs):
            self._lying[node.name, number] = Lies(placement, rows) if shard_dim(placement) is not None else WHOLE
            if is_partial(placement):
                self._lying[node.name, number] = Lies(placement)
        return option

    def _of_placeholder(self, node: fx.Node) -> Option:
        specs = self._trace.specs[node.name]
        if node.name not in self._trace.targets:
            return options(node)[0]
        dim = 0 if self._of_sequences else 1
        if len(specs[0].shape) <= dim:
            raise UsageError(
                f"targets of shape {specs[0].shape} under context parallelism; expected one a token: (batch, sequence, "
                "...); use a plan with cp=1"
            )
        return Option((), (Shard(dim),))

    def _taken(self, node: fx.Node, source: str, output: int) -> Lies:
        """How an op takes a tensor: as it lies, but for those that enter or leave the blocks."""
        lies, home = self._lying[source, output], self._home[node.name]
        spec = self._trace.specs[source][output]
        if home is not None and lies == WHOLE and self._comes_from_outside(source):
            is_hidden = len(spec.shape) == 3 and spec.shape[:2] == (self._samples, self._length)
            is_hidden = is_hidden and source in self._trace.tracked
            shadow = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            dim = 1 if is_hidden else sequence_dim(shadow, self._length, self._samples)
            return lies if dim is None else Lies(Shard(dim))
        if home is None and self._of_sequences and self._home.get(source) == self._last:
            return WHOLE
        return lies

    def _together(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        """Attention over the tokens of all ranks; a mask is of all of them."""
        names = [producers(node)[number] for number in range(3)]
        rows = [Shard(len(self._trace.specs[name][output].shape) - 2) for name, output in names]
        masks = given[3:]
        if any(source in self._made_in_blocks for source, _ in producers(node)[3:]):
            raise self._unshown(node)
        if [each.placement for each in given[:3]] != rows or any(each.placement != REPLICATE for each in masks):
            raise self._unshown(node)
        return Option((*rows, *(each.placement for each in masks)), (rows[0],))

    def _viewed(self, node: fx.Node, given: Sequence[Lies]) -> tuple[Option, int] | None:
        """A view of a tensor that is cut: where its tokens come to lie, and how many rows of them in that dim."""
        if rule_of(node.target) is not view or shard_dim(given[0].placement) is None:
            return None
        (source, output), after = producers(node)[0], self._trace.specs[node.name][0].shape
        before, dim = self._trace.specs[source][output].shape, shard_dim(given[0].placement)
        assert dim is not None
        place, rows = moved_dim(before, after, dim, given[0].rows)
        more = (REPLICATE,) * (len(given) - 1)
        return Option((given[0].placement, *more), (Shard(place),), "view"), rows

    def _by_rule(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        """The option that takes what is cut as it is; what is whole may be cut for it, which nobody hears."""
        wanted = [each.placement for each in given]
        found = _fitting(node, wanted)
        if not found:  # sums in parts are summed
            found = _fitting(node, [REPLICATE if is_partial(each) else each for each in wanted])
        if not found:
            raise self._unshown(node)
        return min(found, key=lambda option: sum(a != b for a, b in zip(option.inputs, wanted, strict=True)))

    def _unshown(self, node: fx.Node) -> UsageError:
        op = next(op for op in self._trace.ops if op.name == node.name)
        return UsageError(
            f"cp: {op.name} ({op.path} {op.line}) looks at several tokens at once, and how ranks that share each "
            "sequence do that cannot be shown; use --plan without cp, or unisono report, which writes down what ranks "
            "of a run said"
        )

    # ---- the program -----------------------------------------------------------------------------------------------

    def added(self, found: Assignment, mesh: Mesh) -> Assignment:
        """The assignment of a mesh without cp, on one with it."""
        self._require_even(mesh)
        place, others = mesh.axis(AXIS), [found.mesh.names.index(name) for name in mesh.names if name != AXIS]
        made = {}
        for name, option in self._options.items():
            chosen = [found.options[name][other] for other in others]
            made[name] = (*chosen[:place], option, *chosen[place:])
        return replace(found, mesh=mesh, options=made)

    def _require_even(self, mesh: Mesh) -> None:
        ranks = mesh.size(AXIS)
        if self._length % ranks:
            raise UsageError(
                f"cp={ranks}: sequences of {self._length} tokens cannot be shared evenly, as a program shows it; give "
                f"a batch of sequences of a multiple of {ranks}"
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
                made += _sums_first(each, lowered, axis)
                self._require_known(each, lowered, axis)
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


def _fitting(node: fx.Node, wanted: Sequence[Placement]) -> list[Option]:
    def fits(option: Option) -> bool:
        pairs = zip(option.inputs, wanted, strict=True)
        return all(a == b or (b == REPLICATE and shard_dim(a) is not None) for a, b in pairs)

    return [option for option in options(node) if fits(option)]


def moved_dim(before: Sequence[int], after: Sequence[int], dim: int, rows: int) -> tuple[int, int]:
    """Where a view takes a dim that holds `rows` rows of tokens: its place, and how many rows that dim then holds."""
    outside = rows
    for size in before[:dim]:
        outside *= size
    inside_of = 1
    for place, size in enumerate(after):
        if inside_of * size > outside:
            return place, outside // inside_of
        inside_of *= size
    return len(after) - 1, 1
