"""Which rule an op has. A rule takes a Call and yields its options besides the one in which every rank does it all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch.distributed.tensor import Shard

from unisono.graph.rules.call import OpCall, tensors_of
from unisono.graph.rules.option import Option, full
from unisono.mesh.placement import is_partial, shard_dim

Rule = Callable[[OpCall], Iterable[Option]]
_rules: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ops by name: "aten.linear" is for all its overloads, "aten.sum.default" for one."""

    def register(function: Rule) -> Rule:
        for target in targets:
            assert target not in _rules, f"two rules for {target}"
            _rules[target] = function
        return function

    return register


def target_name(target: Any) -> str:
    """aten.linear.default for an op of torch; the function's name for another."""
    return getattr(target, "__name__", str(target)) if not hasattr(target, "_schema") else str(target)


def rule_of(target: Any) -> Rule | None:
    name = target_name(target)
    return _rules.get(name) or _rules.get(name.rpartition(".")[0])


def options(node: fx.Node) -> list[Option]:
    """The ways to run a node on one axis, the replicated one first. An op without a rule has that one only.

    All options of a node that name a rewrite name the same one, which looks at the placements on all axes together.
    """
    call = OpCall(node)
    if node.op == "placeholder":
        return _parameter_specs(call)
    if node.op == "output":
        return _leaving(call)
    found = rule_of(node.target)
    listed = [full(len(call.tensors), len(call.results))]
    listed += found(call) if found is not None else ()
    by_placements = {(option.inputs, option.outputs): option for option in listed}
    return [option for option in by_placements.values() if _possible(option, call)]


def _possible(option: Option, call: OpCall) -> bool:
    """Whether each sharded dim is long enough to be sharded at all, and only tensors that can be added are Partial."""
    assert len(option.inputs) == len(call.tensors), f"{call.node.target}: {option}"
    assert len(option.outputs) == len(call.results), f"{call.node.target}: {option}"
    tensors = [*(tensors_of(node.meta["val"])[0] for node in call.tensors), *call.results]
    for placement, tensor in zip((*option.inputs, *option.outputs), tensors, strict=True):
        dim = shard_dim(placement)
        if dim is not None and (dim >= tensor.dim() or tensor.shape[dim] < 2 or not tensor.numel()):
            return False
        if is_partial(placement) and not (tensor.is_floating_point() or tensor.is_complex()):
            return False
    return True


def _parameter_specs(call: OpCall) -> list[Option]:
    if not call.results:
        return [Option((), ())]
    shards = [Option((), (Shard(dim),)) for dim, size in enumerate(call.result) if size > 1]
    return [full(0, 1), *shards]


def _leaving(call: OpCall) -> list[Option]:
    listed = [full(len(call.tensors), 0)]
    rows = {shape[0] if shape else 1 for shape in call.shapes}
    if len(rows) == 1 and max(rows) > 1:
        listed.append(Option((Shard(0),) * len(call.tensors), ()))
    return listed
