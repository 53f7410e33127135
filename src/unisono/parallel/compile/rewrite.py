"""What becomes of a region's graph between Dynamo and the compiler.

While a model runs under a plan, some functions of torch are replaced (torch_patches.py). Dynamo puts calls of them into
its graph as they are. The compiler then calls the functions of the graph, to see their operations; a replaced function,
also one that another function of torch calls, becomes

    torch's own function     where nothing is to be handled: dropout that drops nothing, attention without dropout
    an op that runs eagerly  (eager_op.py) where the result depends on the step, on this rank's samples, or on others
    attention with dropout   its products and its softmax, and such an op for the dropout of the weights

Ops that run eagerly are called in the order of the model's code: each takes a tensor of the one before. So a module
draws its numbers in the same order as without compilation, on every rank and in a recomputation.

The module that draws, by whose name random numbers are identified, is the innermost one in the node's
`nn_module_stack`, relative to the region: alike blocks share one graph, and the block's own name is known when it runs.
Where in a tensor-parallel region it draws follows from the markers before it in the graph (collectives.py), which are
replaced here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono import torch_patches
from unisono.mesh.random import dropout as dropouts
from unisono.mesh.random import random_functions
from unisono.mesh.random.active import active_state
from unisono.parallel.compile import collectives
from unisono.parallel.compile.collectives import Location
from unisono.parallel.compile.eager_op import call_eagerly
from unisono.torch_compat import set_tracing
from unisono.torch_patches import attention, original

Function = Callable[..., Any]
RunFrom = Callable[[str, Location], Function]
_CALLER = "unisono_caller"  # in a node's meta


class CompilationError(Exception):
    """What a compiled region cannot contain."""


class _Caller(NamedTuple):
    """Where a node of a graph calls from."""

    site: Callable[[], str]
    location: Location
    run_from: RunFrom


class _Trace:
    """Of the graph whose functions are called now."""

    kept: torch.Tensor | None = None  # by the eager op before


def prepare_dynamo() -> None:
    """Dynamo puts calls of replaced functions and of markers into its graphs, and does not trace through them; it fails
    at functions that depend on what is only known when they run."""
    torch_patches.in_graphs = _in_graph
    replaced = [entry for _, _, entry in (*random_functions.entries(), *attention.patch.entries())]
    for entry in (*replaced, *collectives.MARKERS):
        torch._dynamo.allow_in_graph(entry)
    for function in collectives.never_traced():
        torch._dynamo.forbid_in_graph(function)


def rewrite(graph_module: fx.GraphModule, site_of: Callable[[fx.Node], str], run_from: RunFrom) -> None:
    """site_of: the module that makes a call, relative to the region. run_from: runs a function as called by it."""
    location: Location = None
    markers = _Markers()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in collectives.MARKERS:
            location = markers.replace(node) or location
        elif node.op in ("call_function", "call_method"):
            node.meta[_CALLER] = _Caller(partial(site_of, node), location, run_from)
    markers.finish()
    graph_module.recompile()


def trace_under(graph_module: fx.GraphModule, modes: Sequence[TorchFunctionMode]) -> None:
    """While the compiler calls the functions of a graph, these modes are on, and random ops, which would draw from a
    generator of torch, are refused (random_ops.py). Other random ops that the compiler calls are its own affair."""

    def begin() -> None:
        _Trace.kept = None
        set_tracing(True)
        for mode in modes:
            TorchFunctionMode.__enter__(mode)

    def end() -> None:
        for mode in reversed(modes):
            TorchFunctionMode.__exit__(mode, None, None, None)
        set_tracing(False)
        _Trace.kept = None

    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
        graph.call_function(fx.node.has_side_effect(begin))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(fx.node.has_side_effect(end))
    graph_module.recompile()


def calling_modules(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules that were running where a node was traced, the innermost first; modules: by their ids. Dynamo's key
    of a module that is called again is its id, and "@" with the number of the call."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    keys = [key.partition("@")[0] for key in reversed(stack)]
    unknown = [value for key, value in zip(keys, reversed(stack.values()), strict=True) if key not in modules]
    if unknown:
        raise CompilationError(f"{unknown[0][0]}, which is not in the region, draws random numbers")
    return (modules[key] for key in keys)


# ---- replaced functions ----------------------------------------------------------------------------------------------


def _in_graph(function: Function, own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A replaced function, where the compiler calls it."""
    is_attention = own is original(torch.nn.functional, "scaled_dot_product_attention")
    is_plain = is_attention and attention.is_plain()
    name = getattr(own, "__name__", "function")
    if (is_plain and not _argument(args, kwargs, 4, "dropout_p", 0.0)) or _drops_nothing(name, args, kwargs):
        return own(*args, **kwargs)
    caller: _Caller | None = (traceback.get_current_meta() or {}).get(_CALLER)
    if caller is None:
        raise CompilationError(f"{name}, called where no module is known")
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in tree_leaves((args, kwargs))):
        raise CompilationError(f"{name} with a number that changes from batch to batch")
    if kwargs.get("out") is not None:
        raise CompilationError(f"{name} with out=")
    site = caller.site()
    identity, run = f"{name} {site} {caller.location}", caller.run_from(site, caller.location)
    if is_plain:
        return _attention_with_dropout(identity, run, *args, **kwargs)
    bound = _bound(own, args, kwargs)
    if bound is None or not bound.arguments.get("inplace"):
        return _eagerly(identity, function, own, run, *args, **kwargs)
    bound.arguments["inplace"] = False
    output = _eagerly(identity, function, own, run, *bound.args, **bound.kwargs)
    return bound.arguments["input"].copy_(output)


def _bound(own: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
    try:
        return inspect.signature(own).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a function of C++: those have another name where they work in place
        return None


def _eagerly(identity: str, function: Function, own: Function, run: Function, *args: Any, **kwargs: Any) -> Any:
    output, _Trace.kept = call_eagerly(identity, function, own, run, args, kwargs, _Trace.kept)
    return output


def _attention_with_dropout(
    identity: str,
    run: Function,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """F.scaled_dot_product_attention with dropout: only the dropout of the weights is an op of its own."""
    weights = dropouts.attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    dropped: torch.Tensor = _eagerly(f"dropout of {identity}", _drop_weights, _like, run, weights, dropout_p)
    return dropped @ value


def _drop_weights(weights: torch.Tensor, p: float) -> torch.Tensor:
    state = active_state()
    return weights if state is None else dropouts.apply(state, weights, p, "attention")


def _like(weights: torch.Tensor, p: float) -> torch.Tensor:
    return weights


def _drops_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is a dropout that is not in training, or drops nothing."""
    if "dropout" not in name:
        return False
    training = _argument(args, kwargs, 2, "training", "alpha" not in name)
    return training is False or _argument(args, kwargs, 1, "p", 0.5) == 0


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


# ---- markers of tensor parallelism -----------------------------------------------------------------------------------


class _Markers:
    """Those of one graph, replaced; see collectives.py."""

    def __init__(self) -> None:
        self._entered: dict[tuple[fx.Node, int], fx.Node] = {}
        self._stand_ins: dict[fx.Node, fx.Node] = {}

    def replace(self, node: fx.Node) -> Location:
        """Where dropouts are from here on; None where that does not change."""
        graph, (x, *rest) = node.graph, node.args
        assert isinstance(x, fx.Node)
        assert not node.kwargs
        match node.target:
            case collectives.enter:
                region, _, lengths = rest
                x = self._stand_ins.get(x, x)
                if (x, region) not in self._entered:
                    with graph.inserting_before(node):
                        entered = graph.call_function(collectives.enter_form, (x, region, lengths))
                    self._entered[x, region] = entered  # type: ignore[index]
                node.replace_all_uses_with(self._entered[x, region])  # type: ignore[index]
                graph.erase_node(node)
            case collectives.stand_in:
                self._stand_ins[node] = x
                node.target = collectives.stand_in_form
            case collectives.leave:
                node.target = collectives.leave_form
                return ("outside", rest[0], 0)  # type: ignore[return-value]
            case collectives.inside:
                node.replace_all_uses_with(x)
                graph.erase_node(node)
                return ("inside", *rest)  # type: ignore[return-value]
            case collectives.collective:
                node.target = collectives.collective_form
        return None

    def finish(self) -> None:
        for node in self._stand_ins:
            if not node.users:
                node.graph.erase_node(node)
