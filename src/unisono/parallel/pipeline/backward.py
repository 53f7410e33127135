"""The backward of one microbatch at one stage, full or in halves.

A stage's graph begins at an `Arrival`, where the message of the stage before came in, and ends at its roots: the loss,
or the tensors handed on. The full backward is autograd's own. In halves:

    I   runs autograd only along the ways that lead to the Arrival, so no gradient of a weight is computed. Where such
        a way passes an operation that also has weights (a *junction*), the gradient that comes in is kept.
    W   runs each junction again on the gradient kept, this time only towards its weights.

A weight that belongs to one junction gets its gradient there, once. One that belongs to several (a layer that is used
twice) would be counted again on the way from one of its junctions to the next, so it is computed in I already. So are
weights that are vectors only, a norm's for example: their gradients are sums, quicker than a second run of autograd is
to start. Roots from which no way leads to the Arrival are left to W entirely. The sum is the full gradient, exactly.

Where nothing arrives that has a gradient, as at the first stage, I is the full backward: W, left for last, would keep
what comes after it waiting for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from unisono.parallel.pipeline.message import MessageForm

Grads = Sequence[torch.Tensor | None]


class Arrival:
    """Where received tensors enter a stage's graph, and where their gradients come out of it."""

    def __init__(self, tensors: Sequence[torch.Tensor], form: MessageForm) -> None:
        self.form = form
        self.tensors = list(tensors)
        self.node: Node | None = None
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._grads: list[torch.Tensor | None] = []
        self.anchor = torch.empty(0, device=self._device, requires_grad=True)
        positions = [index for index, tensor in enumerate(form.tensors) if tensor.differentiable]
        if positions and torch.is_grad_enabled():
            entered = _Enter.apply(self._grads, self.anchor, [tensors[index] for index in positions])
            for index, tensor in zip(positions, entered, strict=True):
                self.tensors[index] = tensor
            self.node = entered[0].grad_fn

    def take_grads(self) -> list[torch.Tensor]:
        """The gradients of the tensors that want one; zeros where nothing came."""
        forms = self.form.differentiable
        grads = self._grads or [None] * len(forms)
        return [
            torch.zeros(form.shape, dtype=form.dtype, device=self._device) if grad is None else grad
            for form, grad in zip(forms, grads, strict=True)
        ]


class _Enter(torch.autograd.Function):
    """Makes tensors nodes of the graph. They are not inputs of the function, so they may be changed in place."""

    @staticmethod
    def forward(ctx: Any, grads: list[Any], anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.grads[:] = grads
        return None, None, None


@dataclass
class _Junction:
    """An operation on the way to the Arrival that has weights of its own."""

    node: Node
    weights: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)  # of its outputs, kept from I to W


@dataclass
class Pass:
    """One microbatch between its forward and its backward."""

    arrival: Arrival | None
    roots: list[GradientEdge] = field(default_factory=list)
    _junctions: list[_Junction] = field(default_factory=list)
    _rest: tuple[list[GradientEdge], list[torch.Tensor | None]] = field(default_factory=lambda: ([], []))

    @classmethod
    def of(cls, arrival: Arrival | None, ends: Sequence[torch.Tensor]) -> Pass:
        """Only the graph is kept: the memory of the ends is free once they have been sent."""
        return cls(arrival, [get_gradient_edge(end) for end in ends if end.requires_grad])

    def backward(self, grads: Grads) -> None:
        """Weights and the Arrival get their gradients; `grads` are those of the roots."""
        if self.roots:
            torch.autograd.backward(self.roots, list(grads))
        self.roots = []

    def backward_inputs(self, grads: Grads) -> None:
        """The first half: the Arrival gets its gradients."""
        node = self.arrival.node if self.arrival is not None else None
        if node is None:
            self.backward(grads)
            return
        self._to_arrival(node, list(grads))
        self.roots = []

    def backward_weights(self) -> None:
        """The second half: the weights get their gradients."""
        roots, grads = self._rest
        if roots:
            torch.autograd.backward(roots, grads, retain_graph=bool(self._junctions))
        for junction in self._junctions:
            ends = [GradientEdge(junction.node, i) for i, grad in enumerate(junction.grads) if grad is not None]
            given = [grad for grad in junction.grads if grad is not None]
            if ends:
                torch.autograd.backward(ends, given, retain_graph=True, inputs=junction.weights)
        self._junctions, self._rest = [], ([], [])

    def _to_arrival(self, node: Node, grads: list[torch.Tensor | None]) -> None:
        assert self.arrival is not None
        leading, self._junctions, at_once = _explore([root.node for root in self.roots], node)
        for junction in self._junctions:
            junction.node.register_prehook(_keep(junction.grads))
        there: tuple[list[GradientEdge], list[torch.Tensor | None]] = ([], [])
        for root, grad in zip(self.roots, grads, strict=True):
            edges, given = there if root.node in leading else self._rest
            edges.append(root)
            given.append(grad)
        if there[0]:
            torch.autograd.backward(*there, retain_graph=True, inputs=[self.arrival.anchor, *at_once])


def _keep(grads: list[torch.Tensor | None]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """A hook that keeps a junction's gradients in I and gives the same in W.

    It runs after the hooks of tensors, which may change a gradient, and so must not change it a second time.
    """

    def hook(incoming: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if grads:
            return tuple(grads)
        grads.extend(incoming)
        return None

    return hook


def _explore(roots: Sequence[Node], arrival: Node) -> tuple[set[Node], list[_Junction], list[torch.Tensor]]:
    """The nodes that lead to the arrival, the junctions among them, and the weights that are not left to these."""
    leading = {arrival}
    below: dict[Node, set[Node]] = {}  # of a node that does not lead there: the accumulators of weights it leads to
    users: dict[Node, list[Node]] = {}  # of an accumulator: the junctions
    for node in _inputs_first(roots, arrival):
        following = [after for after, _ in node.next_functions if after is not None]
        aside = set().union(*(below[after] for after in following if after in below))
        if any(after in leading for after in following):
            leading.add(node)
            for accumulator in aside:
                users.setdefault(accumulator, []).append(node)
        else:
            below[node] = {node} if hasattr(node, "variable") else aside
    junctions: dict[Node, _Junction] = {}
    at_once = []
    for accumulator, nodes in users.items():
        weight = accumulator.variable  # type: ignore[attr-defined]
        if len(nodes) > 1:
            at_once.append(weight)
        else:
            junctions.setdefault(nodes[0], _Junction(nodes[0])).weights.append(weight)
    for junction in junctions.values():
        if all(weight.ndim < 2 for weight in junction.weights):
            at_once += junction.weights
    return leading, [one for one in junctions.values() if any(weight.ndim > 1 for weight in one.weights)], at_once


def _inputs_first(roots: Sequence[Node], stop: Node) -> list[Node]:
    """All nodes below the roots, each after those it leads to; `stop` and what is below it left out."""
    order: list[Node] = []
    seen = {stop}
    stack = [(root, False) for root in roots]
    while stack:
        node, explored = stack.pop()
        if explored:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((after, False) for after, _ in node.next_functions if after is not None and after not in seen)
    return order
