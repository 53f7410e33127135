"""From a trace to a profile: which ops belong to which block, and what tensor parallelism divides.

What tp shards is known from the parameters alone. A product with a column-parallel weight begins a region; everything
made from its result is sharded too; a product with a row-parallel weight ends the region. A vocabulary-parallel
embedding gives partial sums, so it ends one as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch

from unisono.errors import UsageError
from unisono.graph.capture.autocast import INNER_CASTS, WEIGHT_CAST
from unisono.graph.capture.op import Memory, Op, TensorSpec
from unisono.graph.capture.trace import Trace
from unisono.plan.profile.backward import held_by_ops, is_view, moved_back
from unisono.plan.profile.model_profile import ModelProfile, OpCost, OptimizerState, Segment, Weight
from unisono.plan.profile.selective import Value, choose, is_cast, is_cheap


@dataclass(frozen=True)
class Subject:
    """What a trace does not say of the job."""

    name: str
    batch: int  # samples of a step
    samples: int  # of the traced example
    weights: Mapping[str, Weight]  # parameters by name, with the dims that tp shards
    blocks: str  # path of the list of blocks
    names: tuple[str, ...]  # of the blocks themselves, where no list holds them
    count: int  # of blocks
    optimizer: OptimizerState
    flash: bool = True  # attention without dropout keeps no matrix of queries by keys
    mask_bytes: float | None = None  # that a dropout keeps for an element; without: as many as the element has
    keeps_gathered: bool = True
    clips: bool = False
    recomputes: bool = True
    repeats: int = 1  # how often the last traced block stands in the model: blocks that are alike are traced once


def read(trace: Trace, subject: Subject) -> ModelProfile:
    """The profile of a traced job."""
    reader = _TraceReader(trace, subject)
    for op in trace.ops:
        reader.take(op)
    reader.look_back()
    reader.select()
    return reader.profile()


@dataclass
class _Part:
    ops: list[OpCost] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    enters: list[float] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)


class _TraceReader:
    def __init__(self, trace: Trace, subject: Subject) -> None:
        self.trace = trace
        self.subject = subject
        self.parameter = dict(trace.parameters)  # of a node: the parameter that it is, or is a view of
        self.sharded: set[str] = set()  # nodes whose tensors tp shards
        self.entered: set[tuple[int, str]] = set()
        self.parts = [_Part() for _ in range(subject.count + 2)]
        self.part_number = 0
        self.home: dict[str, int] = {}  # the part that makes a node
        self.hidden: TensorSpec | None = None
        self.makers: dict[str, Op] = {}

    # ---- ops -----------------------------------------------------------------------------------------------------

    def take(self, op: Op) -> None:
        self.makers[op.name] = op
        self.part_number = self._part_number(op)
        part = self.parts[self.part_number]
        self.home[op.name] = self.part_number
        weights = [self.parameter[name] for name in op.inputs if name in self.parameter]
        others = [name for name in op.inputs if name not in self.parameter and name not in self.trace.buffers]
        if weights and not others and (not op.bytes_moved or op.node.meta.get(WEIGHT_CAST)):
            self.parameter[op.name] = weights[0]  # a view of a parameter, or a cast
            if op.bytes_moved:
                part.ops.append(self._weight_cast(op, self.subject.weights[weights[0]]))
            return
        self._see_boundary(others)
        for name in weights:
            part.weights[name] = self.subject.weights[name]
        is_from_sharded = any(name in self.sharded for name in others)
        role = self._role(op, weights)
        if role in ("column", "gather"):
            key = (self.part_number, others[0])
            if key not in self.entered:
                self.entered.add(key)
                part.enters.append(self._sample_bytes(self._spec(others[0])))
        if role in ("row", "vocab", "gather"):
            part.leaves.append(self._sample_bytes(op.outputs[0]))
        is_sharded = role == "column" or (is_from_sharded and role not in ("row", "gather"))
        if is_sharded and op.outputs and prod(op.outputs[0].shape) > 1:
            self.sharded.add(op.name)
        part.ops.append(
            self._work(op, role, is_sharded=is_sharded or role in ("row", "gather"), is_from_sharded=is_from_sharded)
        )

    def _part_number(self, op: Op) -> int:
        prefix = f"{self.subject.blocks}." if self.subject.blocks else ""
        if self.subject.names:
            if (name := op.path.split(".")[0]) in self.subject.names:
                return self.subject.names.index(name) + 1
        elif op.path.startswith(prefix):
            number = op.path.removeprefix(prefix).split(".")[0]
            if number.isdigit() and int(number) < self.subject.count:
                return int(number) + 1
        if self.part_number == self.subject.count + 1:
            return self.part_number
        # Outside the blocks: before the first one, between two of them (kept with the earlier), or after the last.
        return self.part_number if self.part_number < self.subject.count else self.subject.count + 1

    def _role(self, op: Op, weights: list[str]) -> str:
        """column, gather, row or vocab, where the op works with a weight that tp shards."""
        packet = str(getattr(op.target, "_overloadpacket", ""))
        for name in weights:
            weight = self.subject.weights[name]
            if weight.tp_dim is None or len(weight.shape) < 2:
                continue
            if packet == "aten.embedding":
                return "vocab"
            is_transposed = packet in ("aten.addmm", "aten.mm", "aten.matmul")
            outputs = len(weight.shape) - 1 if is_transposed else len(weight.shape) - 2
            return "row" if weight.tp_dim != outputs else "gather" if weight.gathers else "column"
        return ""

    def _weight_cast(self, op: Op, weight: Weight) -> OpCost:
        """Of autocast. The copy stays until the backward, which makes its gradient first. There is none of weights that
        ZeRO gathers in that dtype."""
        copy = float(op.outputs[0].nbytes)
        return OpCost(
            name=op.name,
            kind="memory",
            weights=float(op.bytes_moved),
            weight_copy=copy,
            is_gathered=op.outputs[0].dtype.itemsize == weight.gathered_itemsize,
            is_sharded=weight.tp_dim is not None,
            gradients=0.0 if weight.is_frozen else copy,
        )

    def _work(self, op: Op, role: str, *, is_sharded: bool, is_from_sharded: bool) -> OpCost:
        samples = self.subject.samples
        packet = str(getattr(op.target, "_overloadpacket", ""))
        of_weights = sum(self.trace.specs[name][0].nbytes for name in op.inputs if name in self.parameter)
        read = 0 if packet == "aten.embedding" else of_weights  # an embedding reads the rows that it looks up
        is_attention = packet == "aten.scaled_dot_product_attention"
        inputs = [name for name in op.inputs if name not in self.parameter and self.trace.specs[name]]
        crossing = self._spec(inputs[0]) if role in ("column", "gather") else op.outputs[0] if role else None
        work = OpCost(
            name=op.name,
            kind="attention" if is_attention else "matmul" if op.flops else "view" if is_view(op) else "memory",
            flops=op.flops / samples,
            moved=max(op.bytes_moved - of_weights, 0) / samples,
            weights=float(read),
            outputs=sum(spec.nbytes for spec in op.outputs) / samples,
            saved=op.saved / samples,
            is_sharded=is_sharded,
            saved_is="gathered" if role in ("column", "gather") else "sharded" if is_from_sharded else "replicated",
            moved_back=self._moved_back(op, role, others=inputs),
            parameters=sum(name in self.parameter for name in op.inputs),
            gradients=float(sum(self._gradient_bytes(name) for name in op.inputs)),
            role=role,
            crossing=self._sample_bytes(crossing) if crossing is not None else 0.0,
        )
        if is_attention:
            return self._attention(op, work)
        if packet == "aten.cross_entropy_loss":
            return self._cross_entropy(op, work, is_from_sharded)
        if packet == "aten.dropout" and op.saved:
            elements = prod(op.outputs[0].shape)
            return replace(work, saved=work.saved + (self._mask_bytes(op.outputs[0]) - 1) * elements / samples)
        return work

    def _attention(self, op: Op, work: OpCost) -> OpCost:
        """Fused, it keeps a number a query beside its inputs and result; else a matrix or three of queries by keys."""
        query, key = (self._spec(name) for name in op.inputs[:2])
        samples = self.subject.samples
        queries = prod(query.shape[:-1])
        normalisers = 4.0 * queries / samples
        heads = prod(query.shape[:-2]) / samples
        dropout = self._argument(op, 4, "dropout_p", 0.0)
        if self.subject.flash and not dropout:
            return replace(work, is_core=True, core_saved=min(normalisers, work.saved))
        matrix = heads * query.shape[-2] * key.shape[-2]
        itemsize = query.dtype.itemsize
        kept = matrix * (2 * itemsize + self._mask_bytes(query) if dropout else itemsize)
        # The result is kept either way: here where attention is fused, else by the layer that it goes into.
        saved = max(work.saved - normalisers, 0.0) + kept
        moved = work.moved + matrix * itemsize * (8 if dropout else 6)
        calls = 6 if dropout else 4
        kind = "attention_dropout" if dropout else "matmul"
        return replace(work, saved=saved, core_saved=kept, is_core=True, moved=moved, calls=calls, kind=kind)

    def _cross_entropy(self, op: Op, work: OpCost, is_from_sharded: bool) -> OpCost:
        """A log-softmax, which is kept, and a choice, whose gradient is as large. Where the vocabulary is sharded,
        exponentials in float32 are kept, and a gradient in float32 comes before that of the logits."""
        logits = self._spec(op.inputs[0])
        inner = op.node.meta.get(INNER_CASTS, 0) / self.subject.samples  # of the log-softmax, for the choice
        work = replace(work, temporary=self._sample_bytes(logits), saved=work.saved + inner)
        if not is_from_sharded:
            return work
        wide = 4 * prod(logits.shape) / self.subject.samples
        is_half = logits.dtype.itemsize < 4
        return replace(work, tp_saved=max(wide - work.saved, 0.0), tp_temporary=wide if is_half else 0.0)

    def _moved_back(self, op: Op, role: str, others: list[str]) -> float:
        """What views move, and a bias, whose gradient is a sum over all of the op's."""
        moved = float(moved_back(op, self.makers)) if others else 0.0
        if op.flops and sum(name in self.parameter for name in op.inputs) > 1:
            moved += op.outputs[0].nbytes
        return moved / self.subject.samples

    def _gradient_bytes(self, name: str) -> int:
        weight = self.subject.weights.get(self.parameter.get(name, ""))
        if weight is None or weight.is_frozen:
            return 0
        is_cast = weight.gradient > weight.itemsize  # from that of the parameter, when it is added
        return weight.numel * (weight.gradient + is_cast * weight.itemsize)

    def look_back(self) -> None:
        """Tell every op what is alive in its backward."""
        held = held_by_ops(self.trace, self.sharded)
        samples = self.subject.samples
        for part in self.parts:
            part.ops = [
                replace(
                    work,
                    held_sharded=held[work.name].sharded / samples,
                    held_replicated=held[work.name].replicated / samples,
                    moved_back=work.moved_back + 3 * held[work.name].added / samples,  # two are read, one is written
                )
                for work in part.ops
            ]

    def select(self) -> None:
        """Tell the ops of blocks what recompute=selective drops, keeps instead and runs again."""
        samples = self.subject.samples
        savers: dict[int, str] = {}  # of each storage: the first op that saves it
        for op in self.trace.ops:
            for number, _ in op.saves:
                savers.setdefault(number, op.name)
        for part in self.parts[1 : self.subject.count + 1]:
            found = _Selection(self.trace, [self.makers[work.name] for work in part.ops], savers)
            part.ops = [
                replace(
                    work,
                    is_repeated=work.name in found.repeated,
                    dropped=found.dropped.get(work.name, 0) / samples,
                    kept_instead=found.kept_instead.get(work.name, 0) / samples,
                )
                for work in part.ops
            ]

    def _argument(self, op: Op, index: int, name: str, default: float) -> float:
        value = op.node.args[index] if len(op.node.args) > index else op.node.kwargs.get(name, default)
        return float(value) if isinstance(value, int | float) else default

    def _mask_bytes(self, spec: TensorSpec) -> float:
        own = float(spec.dtype.itemsize)
        return own if self.subject.mask_bytes is None else min(self.subject.mask_bytes, own)

    def _spec(self, name: str) -> TensorSpec:
        return self.trace.specs[name][0]

    def _sample_bytes(self, spec: TensorSpec) -> float:
        return spec.nbytes / self.subject.samples

    def _see_boundary(self, inputs: list[str]) -> None:
        """What the second block takes from the first is what a pipeline sends."""
        if self.hidden is None and self.part_number >= 2:
            crossing = [n for n in inputs if self.home.get(n, self.part_number) < self.part_number]
            floats = [self._spec(n) for n in crossing if self.trace.specs[n] and self._spec(n).dtype.is_floating_point]
            self.hidden = max(floats, key=lambda spec: spec.nbytes, default=None)

    # ---- the model -----------------------------------------------------------------------------------------------

    def profile(self) -> ModelProfile:
        segments = self._shared([self._segment(part, number) for number, part in enumerate(self.parts)])
        if not any(segment.ops for segment in segments):
            raise UsageError(f"{self.subject.name}: the trace has no ops to plan for")
        hidden = self.hidden
        both = {w.name for w in segments[0].weights} & {w.name for w in segments[-1].weights}
        computes = next((op for op in self.trace.ops if op.flops), None)
        return ModelProfile(
            name=self.subject.name,
            batch=self.subject.batch,
            before=segments[0],
            blocks=(*segments[1:-1], *segments[-2:-1] * (self.subject.repeats - 1)),
            after=segments[-1],
            hidden=0.0 if hidden is None else self._sample_bytes(hidden),
            dtype=_dtype_name(computes.outputs[0].dtype if computes else torch.float32),
            optimizer=self.subject.optimizer,
            length=hidden.shape[1] if hidden is not None and len(hidden.shape) > 2 else 1,
            tied=tuple(sorted(both)),
            has_experts=any(weight.is_expert for weight in self.subject.weights.values()),
            keeps_gathered=self.subject.keeps_gathered,
            recomputes=self.subject.recomputes,
            clips=self.subject.clips,
        )

    def _segment(self, part: _Part, number: int) -> Segment:
        return Segment(
            ops=tuple(part.ops),
            weights=tuple(part.weights.values()),
            enters=tuple(part.enters),
            leaves=tuple(part.leaves),
            in_blocks=0 < number <= self.subject.count,
        )

    def _shared(self, segments: list[Segment]) -> list[Segment]:
        """One object for the ops of blocks that are alike; parameters keep their own names."""
        first: dict[object, Segment] = {}
        made = []
        for segment in segments:
            key = (segment.in_blocks, tuple(replace(work, name="") for work in segment.ops),
                   tuple(replace(weight, name="") for weight in segment.weights))  # fmt: skip
            made.append(first.setdefault(key, segment))
        return made


class _Selection:
    """What selective recomputation does with the ops of a block: the policy that runs, on the memory of a trace."""

    def __init__(self, trace: Trace, ops: list[Op], savers: Mapping[int, str]) -> None:
        self.repeated: set[str] = set()  # ops, by name
        self.dropped: dict[str, int] = {}  # bytes, by the op that saves them
        self.kept_instead: dict[str, int] = {}  # bytes, by the op that reads them
        values: dict[int, Value] = {}
        makers: dict[Value, str] = {}
        casts: dict[object, Value] = {}

        def of(memory: Memory) -> Value:
            return values.setdefault(memory[0], Value(memory[1]))

        for op in ops:
            given = [memory for name in op.inputs for memory in trace.memory[name]]
            known = {number for number, _ in given}
            inputs = [of(memory) for memory in given]
            fresh = [memory for memory in trace.memory[op.name] if memory[0] not in known]
            if is_cheap(op.target):
                cast = (op.target, op.outputs, op.inputs) if is_cast(op.target) else None
                for number, size in fresh:
                    made = Value(size, inputs, op.bytes_moved, repeats=casts.get(cast))
                    values[number], makers[made] = made, op.name
                    if cast is not None:
                        casts.setdefault(cast, made)
            for memory in op.saves:
                of(memory).is_saved = True
        choose(values.values())
        for number, value in values.items():
            if value.is_dropped:
                self._repeat(value, makers)
                saver = savers[number]
                self.dropped[saver] = self.dropped.get(saver, 0) + value.nbytes

    def _repeat(self, value: Value, makers: Mapping[Value, str]) -> None:
        name = makers[value]
        if name in self.repeated:
            return
        if value.repeats is None:
            self.repeated.add(name)
        for given in value.inputs:
            if given.is_source and not given.is_saved:
                self.kept_instead[name] = self.kept_instead.get(name, 0) + given.nbytes
                given.is_saved = True  # counts once
            elif given in makers and not given.is_kept:
                self._repeat(given, makers)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
