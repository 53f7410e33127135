"""What the stages before a rank's own would have sent it, found without running them.

A stage of a pipeline learns the form of its input from the stage before, which in a dry run is not there. So the model,
sharded as under the plan but without memory, runs up to each of the rank's stages: on the rank's own inputs, which have
numbers, while all that comes of parameters has shapes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.context.context import Context, context_parallelize
from unisono.parallel.expert.even_experts import evenly_visited
from unisono.parallel.meta.meta_tensors import meta_copy
from unisono.parallel.meta.shadow import OnMeta
from unisono.parallel.pipeline.message import Key, MessageForm, kind_of
from unisono.parallel.pipeline.off_stage import OffStage
from unisono.parallel.pipeline.parameter_usage import held_by
from unisono.parallel.pipeline.rehearsal import Rehearsal, rehearsed_without_values
from unisono.parallel.pipeline.split import blocks_of
from unisono.parallel.pipeline.stage import Stage
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize
from unisono.plan.plan import Plan
from unisono.plan.schedules.schedule import Schedule


def foreseen_in(model: nn.Module, order: Schedule, inputs: Any) -> Rehearsal:
    """What a run of a meta model shows: which segments use each parameter and buffer."""
    shown = rehearsed_without_values(model, order, inputs)
    if shown is None:
        raise UsageError(
            f"{type(model).__name__} needs values of its parameters before it can be split into stages, which "
            "a dry run does not have; choose a plan with pp=1"
        )
    return shown


class Upstream:
    """The meta model under the parts of a plan that change what travels between blocks: tp with sp, and cp.

    Experts are not sharded: what comes of them has the shape of what went in.
    """

    def __init__(self, full: nn.Module, plan: Plan, mesh: Mesh, rules: Any) -> None:
        self._model = meta_copy(full)
        self._random = RandomState(0)
        self._random.name_modules(self._model)
        self._blocks = blocks_of(self._model)
        if plan.tp > 1:
            tensor_parallelize(self._model, mesh, rules, sequence=plan.sequence)
        self.context: Context | None = context_parallelize(self._model, mesh, plan.context) if plan.cp > 1 else None

    def forms(
        self, start: int, microbatches: Iterable[tuple[Any, Any]], device: torch.device
    ) -> dict[Key, MessageForm]:
        """Of the messages into block `start`, one for each kind of microbatch (inputs, targets)."""
        everything = OffStage(self._model, {id(tensor) for tensor in held_by(self._model)})
        before = Stage(self._model, self._blocks, 0, range(start), everything)
        found: dict[Key, MessageForm] = {}
        for inputs, targets in microbatches:
            kind = kind_of(inputs)
            if kind in found:
                continue
            if self.context is not None:
                self.context.expect(inputs, targets)
            with no_side_effects(self._model), evenly_visited(self._model), self._random, OnMeta(device):
                outcome = before.forward(inputs)
            assert outcome.form is not None
            found[kind] = outcome.form
        return found
