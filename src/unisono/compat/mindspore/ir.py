"""set_context(save_graphs=2): the program of each rank as text, under save_graphs_path/rank_N, in MindSpore's form.

    step_parallel_begin_0000.ir   every op with its strategy and the shapes of full tensors
    18_execute_0001.ir            what the rank runs: local shapes, and collectives with their ranks

Both are written from the program that runs (graph/program/lowering.py); the numbers at the end count the files. With
save_graphs=3 there is a drawing too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from unisono.compat.mindspore.ops.primitive import Primitive
from unisono.graph.capture.op import Op
from unisono.graph.program.lowering import Compute, Lowered, Redistribute, ShardedSpec
from unisono.graph.render.listing import CollectiveStep, listing_of, strategy
from unisono.graph.rules import target_name

_files = itertools.count()
_COLLECTIVES = {
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_gather": "AllGather",
    "all_to_all": "AlltoAll",
    "slice": "StridedSlice",
    "pad": "Pad",
    "assign": "Assign",
}


def save(lowered: Lowered, net: nn.Module, folder: Path, rank: int) -> Path:
    """Write both files of a rank; the folder that they are in."""
    own = folder / f"rank_{rank}"
    own.mkdir(parents=True, exist_ok=True)
    writer = _Writer(lowered, net, rank)
    for name, lines in (("step_parallel_begin", writer.strategies()), ("18_execute", writer.execution())):
        (own / f"{name}_{next(_files):04}.ir").write_text("\n".join(lines) + "\n")
    return own


class _Writer:
    def __init__(self, lowered: Lowered, net: nn.Module, rank: int) -> None:
        self._lowered = lowered
        self._mesh = lowered.mesh
        self._rank = rank
        self._net = net
        self._ops: dict[str, Op] = {op.name: op for op in lowered.trace.ops}
        self._primitives = {path: each for path, each in net.named_modules() if isinstance(each, Primitive)}
        self._in_primitive = Counter(op.path for op in lowered.trace.ops)
        self._numbers = itertools.count(1)

    def strategies(self) -> Iterator[str]:
        yield f"# strategies of {type(self._net).__name__} on {self._mesh}, {self._mesh.ranks.size} ranks"
        values = self._given()
        self._numbers = itertools.count(1)
        yield from self._parameters(values, is_local=False)
        for each in self._lowered.instructions:
            if isinstance(each, Redistribute):
                values[each.name] = values[each.source]
                continue
            number = self._named(values, each.name)
            yield f"{number}({each.name}) = {self._head(each, values)}"
            inputs = [spec.shape for spec in self._inputs(each)]
            yield f"    : {self._types(each, inputs, [spec.shape for spec in each.outputs])}"
            yield from self._where(each)

    def execution(self) -> Iterator[str]:
        yield f"# execution on rank {self._rank} of {self._mesh.ranks.size}, on {self._mesh}"
        values = self._given()
        self._numbers = itertools.count(1)
        yield from self._parameters(values, is_local=True)
        lines = listing_of(self._lowered, self._rank).lines
        for each, line in zip(self._lowered.instructions, lines, strict=True):
            if isinstance(each, Redistribute):
                yield from self._moves(each, line.forward, values)
                continue
            number = self._named(values, each.name)
            yield f"{number}({each.name}) = {self._head(each, values)}"
            inputs = [self._local(spec) for spec in self._inputs(each)]
            yield f"    : {self._types(each, inputs, [self._local(spec) for spec in each.outputs])}"
            yield from self._where(each)
            for step in line.forward:
                yield f"    # inside the op: {_COLLECTIVES.get(step.kind, step.kind)} {_group(step)}"

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, str]:
        """Parameters and inputs by their nodes: %para1_w, %para2_input_0."""
        names = {**self._lowered.trace.parameters, **self._lowered.trace.buffers}
        return {
            node: f"%para{number}_{names.get(node, node)}" for number, node in enumerate(self._lowered.given, start=1)
        }

    def _parameters(self, values: dict[str, str], is_local: bool) -> Iterator[str]:
        for node, spec in self._lowered.given.items():
            shape = self._local(spec) if is_local else spec.shape
            yield f"{values[node]} : {_tensor(spec.dtype, shape)}, strategy: {_numbers(strategy(spec, self._mesh))}"

    def _head(self, each: Compute, values: dict[str, str]) -> str:
        """MatMul(%1, %2) {instance name: matmul} primitive_attrs: {...} {in_strategy: ((2, 4), (4, 1))}"""
        op = self._ops[each.name]
        primitive = self._primitives.get(op.path)
        given = ", ".join(values[name] for name in each.inputs if name in values)
        words = [f"{self._op_name(each, op)}({given})"]
        if primitive is not None:
            words.append(f"{{instance name: {primitive.instance_name or op.path}}}")
            if primitive.in_strategy is not None:
                words.append(f"primitive_attrs: {{in_strategy: {_strategies(primitive.in_strategy)}}}")
        found = [strategy(spec, self._mesh) for spec in self._inputs(each)]
        return f"{' '.join(words)} {{in_strategy: {_strategies(found)}}}"

    def _op_name(self, each: Compute, op: Op) -> str:
        """The primitive's name, if it is one op; otherwise torch's in MindSpore's form."""
        primitive = self._primitives.get(op.path)
        if primitive is not None and self._in_primitive[op.path] == 1:
            return primitive.name
        words = target_name(each.node.target).split(".")
        return "".join(word.title() for word in (words[1] if len(words) > 2 else words[0]).split("_"))

    def _moves(self, each: Redistribute, steps: Sequence[CollectiveStep], values: dict[str, str]) -> Iterator[str]:
        source = values[each.source]
        if not steps:
            values[each.name] = source
        dtype = each.redistribution.dtype
        for step in steps:
            number = self._named(values, each.name)
            kind = _COLLECTIVES.get(step.kind, step.kind)
            if step.is_collective:
                yield f"{number}({each.name}) = {kind}({source}) {_group(step)}"
            else:
                yield f"{number}({each.name}) = {kind}({source}) primitive_attrs: {{{step.detail}}}"
            yield f"    : ({_tensor(dtype, step.before)}) -> ({_tensor(dtype, step.after)})"
            source = number

    def _where(self, each: Compute) -> Iterator[str]:
        op = self._ops[each.name]
        parts = [f"{name}-{type(self._net.get_submodule(name)).__name__}" for name in _prefixes(op.path, self._net)]
        yield f"    # scope: ({'/'.join(['Default', f'network-{type(self._net).__name__}', *parts])})"
        primitive = self._primitives.get(op.path)
        line = op.line or (primitive.called_at if primitive is not None else "")
        if line:
            yield f"    # In file {line}"

    # ---- words ---------------------------------------------------------------------------------------------------

    def _named(self, values: dict[str, str], name: str) -> str:
        values[name] = f"%{next(self._numbers)}"
        return values[name]

    def _inputs(self, each: Compute) -> list[ShardedSpec]:
        return [self._lowered.values[name] for name in each.inputs if name in self._lowered.values]

    def _local(self, spec: ShardedSpec) -> tuple[int, ...]:
        return spec.local(self._mesh, self._rank)

    def _types(self, each: Compute, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> str:
        given = [_tensor(spec.dtype, shape) for spec, shape in zip(self._inputs(each), inputs, strict=True)]
        made = [_tensor(spec.dtype, shape) for spec, shape in zip(each.outputs, outputs, strict=True)]
        return f"({', '.join(given)}) -> ({', '.join(made)})"


def _prefixes(path: str, net: nn.Module) -> list[str]:
    words = path.split(".") if path else []
    names = [".".join(words[: i + 1]) for i in range(len(words))]
    known = dict(net.named_modules())
    return [name for name in names if name in known and not isinstance(known[name], Primitive)]


def _group(step: CollectiveStep) -> str:
    """rank_list and group_ranks, as MindSpore has them."""
    ranks = ", ".join(map(str, step.ranks))
    reduction = "op: sum, " if "sum" in step.detail else ""
    return f"primitive_attrs: {{{reduction}rank_list: ({ranks}), group_ranks: {'-'.join(map(str, step.ranks))}}}"


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """<Tensor[Float32], (16, 32)>"""
    return f"<Tensor[{str(dtype).removeprefix('torch.').title()}], {_numbers(shape)}>"


def _numbers(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _strategies(given: Sequence[Sequence[int]]) -> str:
    """((2, 4)) of one tensor, as MindSpore writes it."""
    return f"({', '.join(map(_numbers, given))})"
