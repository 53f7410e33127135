"""Mixtures of experts in a plan's program: each is one op, whose experts ep spreads over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.assignment import Assignment, producers
from unisono.graph.mixture import EXPERTS, MIXTURE, is_mixture
from unisono.graph.op import Op
from unisono.graph.option import REPLICATE, Option
from unisono.graph.rules import Call
from unisono.graph.trace import Trace
from unisono.mesh.mesh import Mesh
from unisono.parallel.expert import MoE
from unisono.plan.plan import DATA
from unisono.train.data_cuts import DataCuts

AXIS = "ep"


@contextlib.contextmanager
def mixtures_as_ops() -> Iterator[None]:
    """In the block, a MoE that is called is one op: a trace can hold it, whatever its router would say."""
    plain = MoE.forward
    MoE.forward = _as_op  # type: ignore[method-assign]
    try:
        yield
    finally:
        MoE.forward = plain  # type: ignore[method-assign]


def _as_op(self: MoE, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = MIXTURE(
        x,
        self.router.weight,
        self.up,
        self.down,
        self.up_bias,
        self.down_bias,
        self.gate,
        top_k=self.top_k,
        capacity_factor=self.capacity_factor,
        aux_weight=self.aux_weight,
    )
    return made


def mixtures(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if is_mixture(op.node)]


def require_spreadable(model: nn.Module, trace: Trace, mesh: Mesh) -> None:
    """UsageError where ranks along ep can have the experts, but a program cannot show who has which."""
    if AXIS not in mesh.names:
        return
    experts, ranks = _experts(trace), mesh.size(AXIS)
    called = {id(model.get_parameter(trace.parameters[node])) for node in experts if node in trace.parameters}
    for name, module in model.named_modules():
        if isinstance(module, MoE) and id(module.up) not in called:
            raise UsageError(
                f"{name} is called in no forward, so a program does not show which rank along {AXIS} has its experts; "
                f"use --plan without {AXIS}, or remove it"
            )
        if isinstance(module, MoE) and module.experts % ranks:
            raise UsageError(
                f"{name} has {module.experts} experts, which {AXIS}={ranks} ranks share unevenly, and a program is "
                f"shown of equal shares; use an {AXIS} that divides {module.experts}"
            )
    for node in sorted(experts):
        for user in trace.node(node).users:
            if not is_mixture(user):
                raise UsageError(
                    f"{trace.parameters.get(node, node)}, of which ranks along {AXIS} have some experts each, is used "
                    f"by {user.name} too, which is not shown; use --plan without {AXIS}"
                )


def _experts(trace: Trace) -> set[str]:
    """What mixtures take that has a row for each expert."""
    calls = [Call(op.node) for op in mixtures(trace)]
    given = [pair for call in calls for pair in zip(call.names, call.tensors, strict=True)]
    return {node.name for name, node in given if name in EXPERTS}


class ExpertCuts(DataCuts):
    """Along ep, ranks have other samples each, as along dp, and some of the experts."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._experts = _experts(trace)

    def of_placeholder(self, node: fx.Node) -> Option:
        return Option((), (Shard(0),)) if node.name in self._experts else super().of_placeholder(node)


def require_shared_tokens(found: Assignment) -> None:
    """Ranks of the data axis give their experts the tokens of their samples, and tp leaves mixtures whole: a program in
    which they would not is not theirs."""
    mesh = found.mesh
    data = [axis for axis, name in enumerate(mesh.names) if name in DATA and mesh.size(name) > 1]
    for op in mixtures(found.trace):
        call, sources = Call(op.node), producers(op.node)
        talks = AXIS in mesh.names or call["aux_weight"] or call["capacity_factor"] is not None
        lies, wanted = found.layout(*sources[0]), found.wanted(op.name, 0)
        if talks and any(lies[axis] != wanted[axis] or wanted[axis] == REPLICATE for axis in data):
            raise UsageError(
                f"what {op.path} is given at {op.line} does not come of the samples of each rank alone, so what ranks "
                "say there is not shown; use --plan without dp and ep"
            )
        for number, source in enumerate(sources):
            if number and found.layout(*source) != found.wanted(op.name, number):
                raise UsageError(
                    f"{call.names[number]} of {op.path} is cut in a way in which what ranks say there is not shown; "
                    "leave it out of the rules for tp"
                )
