"""A model as a list of layers that are not built yet.

    layers = [LayerSpec(nn.Linear, 64, 256), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 256, 10)]
    stages = split_layers(layers, schedule, rank, seed=0)     # on every rank: builds this rank's layers only
    model = build_full(layers, seed=0)                    # the same model on one device

Each layer gets, bit for bit, the parameters that it has in the full model. Layers with the same key, written as
TiedSpec, are one layer used at several positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build_layers
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import Blocks
from unisono.parallel.pipeline.off_stage import OffStage
from unisono.parallel.pipeline.split import COSTS, Cost, StageSplit
from unisono.parallel.pipeline.stage import Stage
from unisono.parallel.pipeline.tied import Tied
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.search.balance import balanced, checked, require_enough


class LayerSpec:
    """A layer to be built as cls(*args, **kwargs), where and when it is needed."""

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(cls):
            raise UsageError(f"LayerSpec: expected a module class or a function that makes a module, not {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{getattr(self.cls, '__name__', self.cls)}({', '.join(given)})"

    def build(self) -> nn.Module:
        made = self.cls(*self.args, **self.kwargs)
        if not isinstance(made, nn.Module):
            raise UsageError(f"LayerSpec {self!r} made a {type(made).__name__}; expected a module")
        return made


class TiedSpec(LayerSpec):
    """One of several positions of one layer. The first one builds it; `forward(layer, x)` is what this one does."""

    def __init__(
        self,
        key: str,
        cls: Callable[..., nn.Module],
        *args: Any,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(cls, *args, **kwargs)
        self.key = key
        self.forward = forward


class _Again(nn.Module):
    """A tied layer at one of its positions."""

    def __init__(self, layer: nn.Module, forward: Callable[[nn.Module, Any], Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self.layer(x) if self._forward is None else self._forward(self.layer, x)


def build_full(specs: Sequence[LayerSpec], seed: int) -> nn.Sequential:
    """The model that one device gets."""
    everything = range(len(specs))
    return _assembled(specs, everything, _built(specs, everything, seed))


def split_layers(
    specs: Sequence[LayerSpec],
    schedule: Schedule,
    rank: int,
    seed: int,
    *,
    boundaries: Sequence[int] | None = None,
    cost: Cost = "parameters",
) -> StageSplit:
    """Build this rank's stages. Boundaries and costs as in `split`; only "parameters" can be counted beforehand."""
    require_enough(len(specs), schedule.stages, "the list of layers")
    if boundaries is None:
        starts = balanced(_costs(specs, cost), schedule.stages)
    else:
        starts = checked(boundaries, len(specs), schedule.stages)
    spans = [range(low, high) for low, high in zip(starts, (*starts[1:], len(specs)), strict=True)]
    mine = [position for stage in schedule.stages_of(rank) for position in spans[stage]]
    layers = _built(specs, mine, seed)
    model = _assembled(specs, mine, layers)
    blocks = Blocks("", tuple(model.children()))
    off_stage = OffStage(model, {id(tensor) for tensor in (*model.parameters(), *model.buffers())})
    stages = tuple(Stage(model, blocks, number, spans[number], off_stage) for number in schedule.stages_of(rank))
    return StageSplit(model, stages, starts, _tied(specs, model, layers, spans, schedule))


def _first_positions(specs: Sequence[LayerSpec]) -> list[int]:
    """Of each position, the one that builds its layer: itself, or the first with its key."""
    first: dict[str, int] = {}
    return [
        first.setdefault(spec.key, position) if isinstance(spec, TiedSpec) else position
        for position, spec in enumerate(specs)
    ]


def _built(specs: Sequence[LayerSpec], positions: Sequence[int], seed: int) -> dict[int, nn.Module]:
    """The layers of these positions, by the position that builds them. Each draws what it would in the full model."""
    first = _first_positions(specs)
    builders = sorted(set(first))
    wanted = {builders.index(first[position]) for position in positions}
    made = build_layers([specs[position].build for position in builders], wanted, seed)
    return {builders[number]: layer for number, layer in made.items()}


def _assembled(specs: Sequence[LayerSpec], positions: Sequence[int], layers: dict[int, nn.Module]) -> nn.Sequential:
    """All positions in order, with an empty module where nothing was built.

    A tied layer is at its first position too, from which its parameters have their names.
    """
    modules: list[nn.Module] = []
    for position, (spec, first) in enumerate(zip(specs, _first_positions(specs), strict=True)):
        if position == first and position in layers:
            again = isinstance(spec, TiedSpec) and spec.forward is not None
            modules.append(_Again(layers[position], spec.forward) if again else layers[position])  # type: ignore[attr-defined]
        elif position in positions:
            assert isinstance(spec, TiedSpec)
            modules.append(_Again(layers[first], spec.forward))
        else:
            modules.append(nn.Module())
    return nn.Sequential(*modules)


def _tied(
    specs: Sequence[LayerSpec],
    model: nn.Module,
    layers: dict[int, nn.Module],
    spans: Sequence[range],
    schedule: Schedule,
) -> tuple[Tied, ...]:
    holder = [schedule.placement[stage] for stage, span in enumerate(spans) for _ in span]
    ranks: dict[int, set[int]] = {}
    for position, first in enumerate(_first_positions(specs)):
        ranks.setdefault(first, set()).add(holder[position])
    names = {id(p): name for name, p in model.named_parameters()}
    return tuple(
        Tied(names[id(parameter)], tuple(sorted(ranks[first])))
        for first in sorted(layers)
        if len(ranks[first]) > 1
        for parameter in layers[first].parameters()
    )


def _costs(specs: Sequence[LayerSpec], cost: Cost) -> list[float]:
    if not isinstance(cost, str):
        if len(cost) != len(specs):
            raise UsageError(f"pipeline: {len(cost)} costs are given for {len(specs)} layers; give one for each")
        return list(cost)
    if cost != "parameters":
        raise UsageError(f"pipeline: cost={cost!r} for layers that are not built; expected {COSTS[0]!r} or numbers")
    costs = []
    for spec in specs:
        try:
            with no_side_effects(spec.cls), torch.device("meta"):
                costs.append(float(sum(parameter.numel() for parameter in spec.build().parameters())))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"pipeline: the size of {spec!r} is not known without building it ({error}); give boundaries or costs"
            ) from error
    return costs
