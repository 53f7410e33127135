"""Passes that bring an exported graph into the form that rules expect: ops without side effects on full tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.capture.source import line_of
from unisono.graph.marks.marker_ops import kept, take_marks
from unisono.graph.marks.spec import Mark, PendingMark
from unisono.graph.rules.call import OpCall

_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def clean(
    module: fx.GraphModule, notes: Sequence[PendingMark] = (), number: Callable[[fx.Graph], None] = lambda graph: None
) -> tuple[fx.Graph, list[Mark]]:
    """The module's graph with regions inlined, assertions gone, and changes in place made new values; and the marks
    that were in it, of which `notes` gives what their numbers mean. number: is given the graph while it still has the
    ops that nothing depends on."""
    graph = module.graph
    _recount_users(graph)
    _inline_regions(module)
    for node in list(graph.nodes):
        if node.op == "call_module" or (node.op == "call_function" and node.target in _ASSERTIONS):
            if node.users:
                raise UsageError(f"{node.target} at {line_of(node)} is not an op that a graph can hold")
            graph.erase_node(node)
    _make_functional(graph)
    _write_out_running_statistics(graph)
    _drop_broadcasts(graph)
    _make_gradients_dense(graph)
    number(graph)
    marks = take_marks(graph, notes)
    afterwards = {node.meta["changed_to"] for node in graph.nodes if "changed_to" in node.meta}
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in afterwards:
            graph.erase_node(node)
    graph.lint()
    return graph, kept(graph, notes, marks)


def _recount_users(graph: fx.Graph) -> None:
    """torch.export forgets some where it sets a region apart before which a tensor is changed in place."""
    for node in graph.nodes:
        node.users.clear()
    for node in graph.nodes:
        for given in node.all_input_nodes:
            given.users[node] = None


# ---- regions: no_grad and autocast ------------------------------------------------------------------------------


def _inline_regions(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        given = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        settings, body = node.args[:given], getattr(module, str(node.args[given].target))
        if name == "wrap_with_autocast" and settings[2]:
            raise UsageError(
                "the model turns torch.autocast on inside its forward, which a graph cannot hold; trace it without and "
                'give precision="bf16" to what trains it'
            )
        _inline_regions(body)
        _inline(graph, node, body, node.args[given + 1 :], no_grad=settings[0] is False)


def _inline(graph: fx.Graph, node: fx.Node, body: fx.GraphModule, args: Any, no_grad: bool) -> None:
    """Replaces a region by its ops; those of no_grad are marked in their meta, and their results are detached."""
    arguments = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), args, strict=True))
    for inner in body.graph.nodes if no_grad else ():
        inner.meta["no_grad"] = True
    with graph.inserting_before(node):
        results = graph.graph_copy(body.graph, arguments)
        values = [_detached(graph, value) if no_grad else value for value in _as_list(results)]
    for user in list(node.users):
        assert user.target is operator.getitem
        number = user.args[1]
        assert isinstance(number, int)
        user.replace_all_uses_with(values[number])
        graph.erase_node(user)
    graph.erase_node(node)


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    detached = graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = dict(value.meta)
    return detached


def _drop_broadcasts(graph: fx.Graph) -> None:
    """torch's losses broadcast their arguments to each other; most have the same shape already."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.broadcast_tensors.default:
            for user in list(node.users):
                source = node.args[0][user.args[1]]
                if source.meta["val"].shape == user.meta["val"].shape:
                    user.replace_all_uses_with(source)
                    graph.erase_node(user)


def _make_gradients_dense(graph: fx.Graph) -> None:
    """nn.Embedding(sparse=True) gives the same gradient in a form that cannot be sharded or summed."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.embedding.default and OpCall(node)["sparse"]:
            node.args = node.args[:4]


# ---- changes in place -------------------------------------------------------------------------------------------

_VIEWS_THAT_SCATTER: dict[Any, Any] = {
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
}


def _make_functional(graph: fx.Graph) -> None:
    """x.add_(y) becomes a new value that later ops use instead of x; through a slice, the slice is put back first."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        changed = node.args[0] if _changes_self(node.target) else node.kwargs.get("out")
        if isinstance(changed, fx.Node):
            value = _functional_value(graph, node)
            if node.meta.get("no_grad"):
                _refuse_gradient_past(node, changed)
                with graph.inserting_before(node):
                    value = _detached(graph, value)
            _write_back(graph, node, changed, value, position)
            graph.erase_node(node)


def _refuse_gradient_past(node: fx.Node, changed: fx.Node) -> None:
    """Under no_grad autograd does not see a change, and a gradient goes past it; a graph cannot represent that."""
    if changed.op == "call_function" and _has_gradient(changed):
        raise UsageError(
            f"{node.target} at {line_of(node)} changes, in place and under no_grad, a tensor that has gradients; "
            "write the result to a new tensor, or use a plan, which needs no graph"
        )


def _has_gradient(node: fx.Node) -> bool:
    stack, seen = [node], {node}
    while stack:
        at = stack.pop()
        if at.op == "placeholder":
            value = at.meta.get("val")
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return True
        elif not at.meta.get("no_grad") and at.target is not torch.ops.aten.detach.default:
            stack += [given for given in at.all_input_nodes if given not in seen]
            seen.update(at.all_input_nodes)
    return False


def _changes_self(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    first = schema.arguments[0]
    name = schema.name.rpartition("::")[2]
    return first.alias_info is not None and first.alias_info.is_write and name.endswith("_")


def _functional_value(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if "out" in node.kwargs:
        return _without_out(graph, node)
    if node.target is torch.ops.aten.copy_.default:
        return _copied(graph, node)
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = node.target._schema.overload_name or "default"  # type: ignore[union-attr]
    target = getattr(packet, overload, None)
    if target is None:
        raise UsageError(f"{node.target} at {line_of(node)} changes a tensor in place and has no form that does not")
    with graph.inserting_before(node):
        value = graph.call_function(target, node.args, node.kwargs)
    value.meta = dict(node.meta)
    return value


def _without_out(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """torch.mul(a, b, out=c), as a value of its own."""
    schema = node.target._schema  # type: ignore[union-attr]
    taken = [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]
    packet = node.target._overloadpacket  # type: ignore[union-attr]
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(each.name, str(each.type)) for each in overload._schema.arguments] == taken:
            given = {name: value for name, value in node.kwargs.items() if name != "out"}
            with graph.inserting_before(node):
                value = graph.call_function(overload, node.args, given)
            value.meta = dict(node.meta)
            return value
    raise UsageError(f"{node.target} at {line_of(node)} writes into a tensor and has no form that does not")


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """x.copy_(y), as what y is in the form of x; torch's own form of it has no gradient."""
    value, like = node.args[1], node.meta["val"]
    assert isinstance(value, fx.Node)
    for target, args in (
        (torch.ops.aten.to.dtype, (like.dtype,)),
        (torch.ops.aten.expand.default, (list(like.shape),)),
        (torch.ops.aten.clone.default, ()),
    ):
        with graph.inserting_before(node):
            made = graph.call_function(target, (value, *args))
        made.meta = dict(node.meta)
        made.meta["val"] = target(value.meta["val"], *args)
        value = made
    return value


def _replace_later(old: fx.Node, after: fx.Node, new: fx.Node, position: dict[fx.Node, int]) -> None:
    for user in list(old.users):
        if user is not new and position.get(user, -1) > position[after]:
            user.replace_input_with(old, new)


def _write_back(graph: fx.Graph, node: fx.Node, changed: fx.Node, value: fx.Node, position: dict[fx.Node, int]) -> None:
    """Let later ops see, in what was changed and in what it is a view of, the new value."""
    views = [changed]  # each a view of the next
    while not _is_given(views[-1]) and _is_view(views[-1]):
        views.append(_viewed(views[-1]))
    for view in views:
        _refuse_other_views(node, view, views, position)
    for view, base in pairwise(views):
        with graph.inserting_before(node):
            value = _made(
                graph, base, base.meta["val"], _scatter(node, view), (base, value, *view.args[1:]), view.kwargs
            )
    root = views[-1]
    given = root if root.op == "placeholder" else root.meta.get("changes")
    if given is not None:
        given.meta["changed_to"] = value
        value.meta["changes"] = given
    _replace_later(root, node, value, position)
    for view in reversed(views[:-1]):
        with graph.inserting_before(node):
            value = _made(graph, view, view.meta["val"], view.target, (value, *view.args[1:]), view.kwargs)
        position[value] = position[node]
        _replace_later(view, node, value, position)
    _replace_later(node, node, value, position)


def _is_given(node: fx.Node) -> bool:
    return node.op == "placeholder" or "changes" in node.meta


def _viewed(view: fx.Node) -> fx.Node:
    base = view.args[0]
    assert isinstance(base, fx.Node)
    return base


def _scatter(node: fx.Node, view: fx.Node) -> Any:
    """The op that puts a view's new value back."""
    scatter = _VIEWS_THAT_SCATTER.get(view.target)
    if scatter is None:
        raise UsageError(
            f"{node.target} at {line_of(node)} changes a tensor in place through {view.target}; "
            "write the result to a new tensor (torch.where, torch.cat), or use a plan, which needs no graph"
        )
    return scatter


def _write_out_running_statistics(graph: fx.Graph) -> None:
    """batch_norm and instance_norm change their running mean and variance on the side: here ops of their own do."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        is_norm = node.target in (aten.batch_norm.default, aten.instance_norm.default)
        if not is_norm or not node.args[5] or node.args[3] is None:
            continue
        x, weight, bias, mean, variance, training, momentum, *more = node.args
        node.args = (x, weight, bias, None, None, training, momentum, *more)
        dims = [dim for dim in range(x.meta["val"].dim()) if dim != 1]
        with graph.inserting_after(node):
            seen = _made(graph, node, x.meta["val"], aten.detach.default, (x,))
        with graph.inserting_before(seen.next):
            _follow(graph, node, mean, _made(graph, node, mean.meta["val"], aten.mean.dim, (seen, dims)), momentum)
            if node.target is aten.batch_norm.default:
                now = _made(graph, node, variance.meta["val"], aten.var.correction, (seen, dims), {"correction": 1})
            else:  # the mean of the samples' own variances
                of_each = x.meta["val"].new_empty(x.meta["val"].shape[:2])
                each = _made(graph, node, of_each, aten.var.correction, (seen, dims[1:]), {"correction": 1})
                now = _made(graph, node, variance.meta["val"], aten.mean.dim, (each, [0]))
            _follow(graph, node, variance, now, momentum)


def _follow(graph: fx.Graph, norm: fx.Node, running: fx.Node, now: fx.Node, momentum: float) -> None:
    value = running.meta["val"]
    kept = _made(graph, norm, value, torch.ops.aten.mul.Tensor, (running, 1 - momentum))
    running.meta["changed_to"] = _made(graph, norm, value, torch.ops.aten.add.Tensor, (kept, now), {"alpha": momentum})


def _made(
    graph: fx.Graph, beside: fx.Node, value: Any, target: Any, args: Any, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    made.meta = dict(beside.meta) | {"val": value}
    return made


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(_viewed(node))
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.arguments and schema.arguments[0].alias_info and schema.returns[0].alias_info)


def _refuse_other_views(
    node: fx.Node, changed: fx.Node, views: Sequence[fx.Node], position: dict[fx.Node, int]
) -> None:
    for view in changed.users:
        if position.get(view, len(position)) >= position[node] or not _is_view(view) or view in views:
            continue
        if _is_used_after(view, node, position):
            raise UsageError(
                f"{node.target} at {line_of(node)} changes a tensor in place of which {view.name} is a view that "
                "is used later; take the view after the change, or use a plan, which needs no graph"
            )


def _is_used_after(view: fx.Node, node: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether a view, or a view of it, is used after a node."""
    return any(
        position.get(user, -1) > position[node] or (_is_view(user) and _is_used_after(user, node, position))
        for user in view.users
    )
