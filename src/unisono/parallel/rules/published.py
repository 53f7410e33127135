"""Rules that a model brings (Hugging Face's plans), tried before they are used.

Such a plan names layers; what is between them it takes for granted. A learned activation between `up` and `down`
computes a part of its gradient on every rank, an attention bias for all heads does not fit a rank's heads. So every
module that holds a column and a row layer is tried on simulated ranks, as inferred rules are (see trial); modules that
are built alike are tried once, and large ones are left to the check of the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.meta.meta_tensors import realised_copy
from unisono.parallel.rules.dataflow import Dataflow, as_float64, recorded, synthetic
from unisono.parallel.rules.inferred import form
from unisono.parallel.rules.rules import Rules, Style, Styles
from unisono.parallel.rules.trial import Shard, Trial, simulated_ranks

_KINDS = ("column", "row", "heads", "sizes", "summed", "replicate", "channels")  # of modules that can be tried alone
_PARAMETERS, _FLOPS = 2 * 10**6, 10**9  # of a module that is tried


@dataclass
class Tried:
    fails: list[str] = field(default_factory=list)  # modules of which simulated ranks do not give the result
    sums: list[str] = field(default_factory=list)  # parameters of which each rank computes a part of the gradient


def tried(model: nn.Module, ranks: int, styles: Styles, inputs: Any, shard: Shard) -> Tried:
    found = Tried()
    known: dict[Any, list[str] | None] = {}
    with no_side_effects(model):
        flow = recorded(model, inputs)
        if flow is None:
            return found
        for host in _hosts(styles, flow):
            module = model.get_submodule(host)
            inside = {
                name[len(host) + 1 :]: style for name, style in styles.items() if f"{name}.".startswith(f"{host}.")
            }
            if any(style.kind not in _KINDS for style in inside.values()):
                continue
            rules = {name: str(style) for name, style in inside.items()}
            key = (form(module), tuple(sorted(rules.items())))
            if key not in known and _is_large(host, module, flow):
                known[key] = _partial(host, inside, flow)
            elif key not in known:
                known[key] = _needed(module, ranks, rules, flow.calls[host], shard, flow.used.get(host))
            sums = known[key]
            if sums is None:
                found.fails.append(host)
            else:
                found.sums += [f"{host}.{name}" for name in sums]
    return found


def _hosts(styles: Styles, flow: Dataflow) -> Iterator[str]:
    """The smallest modules that are called, and hold a row layer and a column layer."""
    columns = [name for name, style in styles.items() if style.kind == "column"]
    seen: set[str] = set()
    for name in [name for name, style in styles.items() if style.kind == "row"]:
        host = name
        while host and (host not in flow.calls or not any(each.startswith(f"{host}.") for each in columns)):
            host = host.rpartition(".")[0]
        if host and host not in seen:
            seen.add(host)
            yield host


def _is_large(host: str, module: nn.Module, flow: Dataflow) -> bool:
    flops = sum(flops for name, flops in flow.layer_flops.items() if name.startswith(f"{host}."))
    return flops > _FLOPS or sum(map(torch.numel, module.parameters())) > _PARAMETERS


def _needed(
    module: nn.Module, ranks: int, rules: Rules, given: Any, shard: Shard, used: set[int] | None
) -> list[str] | None:
    """Parameters whose gradients must be summed; None where the rules do not hold. A module that does not even repeat
    its own result (it writes to a cache that it is given) proves nothing about its rules."""
    real = realised_copy(module)
    if real is None:
        return []
    given = tree_map(as_float64, synthetic(given, torch.Generator().manual_seed(0)))
    trial = Trial(real.double().cpu().eval(), simulated_ranks(ranks), given, shard, used)
    sums = trial.needed_sums(rules)
    if sums is None and trial.needed_sums({}) is None:
        return []
    return sums


def _partial(host: str, inside: dict[str, Style], flow: Dataflow) -> list[str]:
    """Parameters that meet outputs of the module's column layers and nothing else."""
    columns = {f"{host}.{name}" for name, style in inside.items() if style.kind == "column"}
    met = {name[len(host) + 1 :]: others for name, others in flow.met.items() if name.startswith(f"{host}.")}
    return [name for name, others in met.items() if others <= columns and _style_of(name, inside) is None]


def _style_of(parameter: str, inside: dict[str, Style]) -> Style | None:
    return inside.get(parameter) or inside.get(parameter.rpartition(".")[0])
