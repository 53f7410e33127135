"""How tensors of a traced model lie along an axis of ranks that have other samples each: dp, or ep.

A rank runs whatever the model does on its own samples, so ops without a rule are shown so too, where their result has
samples where they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx
from torch.distributed.tensor import Shard

from unisono.graph.assignment import producers
from unisono.graph.option import REPLICATE, SUM, Option
from unisono.graph.rules.registry import options, target_name
from unisono.graph.trace import Trace
from unisono.mesh.placement import shard_dim
from unisono.train.norms_said import is_known_to_norm, is_of_batch
from unisono.train.walk import Lies, Walk


class DataCuts(Walk):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        shapes = [trace.specs[name][0].shape for name in trace.inputs]
        self._samples = next((shape[0] for shape in shapes if shape), 0)

    def of_placeholder(self, node: fx.Node) -> Option:
        """Inputs and targets that have a row a sample are cut."""
        is_given = node.name in (*self.trace.inputs, *self.trace.targets)
        shape = self.trace.specs[node.name][0].shape if is_given else ()
        return Option((), (Shard(0),)) if shape and shape[0] == self._samples > 1 else options(node)[0]

    def together(self, node: fx.Node, given: Sequence[Lies]) -> Option | None:
        """A BatchNorm, which takes the statistics of all ranks' samples (see norms_said)."""
        if is_of_batch(node):
            return Option((Shard(0), *(REPLICATE,) * (len(given) - 1)), (Shard(0),))
        if is_known_to_norm(self.trace, node):
            self.notes[node.name] = "as the norm has found it, of all ranks' samples"
            return Option((given[0].placement,), (REPLICATE,))
        return None

    def without_rule(self, node: fx.Node, given: Sequence[Lies]) -> Option:
        if target_name(node.target).startswith("aten.sum") and not self.trace.specs[node.name][0].shape:
            return Option(tuple(each.placement for each in given), (SUM,))  # a count, of whole numbers
        cut = {shard_dim(each.placement) for each in given} - {None}
        specs = self.trace.specs[node.name]
        dim = next(iter(cut)) if len(cut) == 1 else None
        if dim is None or not all(self._has_samples(node, spec.shape, given, dim) for spec in specs):
            self.notes[node.name] = f"no rule for {target_name(node.target)}: every rank does all of it"
            return Option((REPLICATE,) * len(given), (REPLICATE,) * len(specs))
        self.notes[node.name] = f"no rule for {target_name(node.target)}: each rank does all of it for its samples"
        inputs = tuple(Shard(dim) if shard_dim(each.placement) is not None else REPLICATE for each in given)
        return Option(inputs, (Shard(dim),) * len(specs))

    def _has_samples(self, node: fx.Node, shape: Sequence[int], given: Sequence[Lies], dim: int) -> bool:
        """Whether the result is as long as what is cut, where that is cut."""
        sources = [source for source, each in zip(producers(node), given, strict=True) if each.placement != REPLICATE]
        lengths = {self.trace.specs[name][output].shape[dim] for name, output in sources}
        return len(shape) > dim and lengths == {shape[dim]}
