"""A Call: one op of the graph, its arguments by name and its tensors in order, as a rule wants to see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from unisono.graph.rules.option import REPLICATE, Option
from unisono.mesh.placement import Placement, Placements

Shape = tuple[int, ...]


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a node stands for: one, or those of its list or tuple."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(item for item in value if isinstance(item, torch.Tensor))
    return ()


class OpCall:
    """Tensor inputs are numbered as in `Option.inputs`: by their index among the flattened arguments."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.tensors: list[fx.Node] = []
        self.names: list[str] = []  # the argument that each tensor came in
        self.arguments: dict[str, Any] = {}
        self._schema = getattr(node.target, "_schema", None)
        for i, value in enumerate(node.args):
            self._take(self._schema.arguments[i].name if self._schema else str(i), value)
        for name, value in node.kwargs.items():
            self._take(name, value)

    def _take(self, name: str, value: Any) -> None:
        self.arguments[name] = value

        def note(node: fx.Node) -> fx.Node:
            if tensors_of(node.meta.get("val")):
                self.tensors.append(node)
                self.names.append(name)
            return node

        fx.map_arg(value, note)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the op's schema, or the schema's default."""
        if name in self.arguments:
            return self.arguments[name]
        for argument in self._schema.arguments if self._schema else ():
            if argument.name == name:
                return argument.default_value
        raise KeyError(f"{self.node.target} has no argument {name!r}")

    def shape(self, tensor: str | int | fx.Node = 0) -> Shape:
        """The full shape of a tensor input, by its number or argument name."""
        if isinstance(tensor, str):
            tensor = self.names.index(tensor)
        node = self.tensors[tensor] if isinstance(tensor, int) else tensor
        return tuple(tensors_of(node.meta["val"])[0].shape)

    @property
    def shapes(self) -> list[Shape]:
        return [self.shape(node) for node in self.tensors]

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        return tensors_of(self.node.meta.get("val"))

    @property
    def result(self) -> Shape:
        return tuple(self.results[0].shape)

    def dim(self, name: str, of: Shape | None = None) -> int:
        """A dim argument, counted from 0."""
        ndim = len(of if of is not None else self.shape())
        return int(self[name]) % max(ndim, 1)

    def option(
        call,  # not self, which an argument of the op may be called
        outputs: Placement | Iterable[Placement],
        local: str | None = None,
        /,
        **inputs: Placement | Iterable[Placement],
    ) -> Option:
        """An option from placements by argument name; a tensor that is not named is Replicate.

        One placement for an argument that is a list of tensors, or for several outputs, counts for all of them.
        """
        lists = {name: iter(given) for name, given in inputs.items() if not isinstance(given, Placement)}
        taken: list[Placement] = []
        for name in call.names:
            given = inputs.get(name, REPLICATE)
            taken.append(given if isinstance(given, Placement) else next(lists[name]))
        made: Placements = (outputs,) * len(call.results) if isinstance(outputs, Placement) else tuple(outputs)
        return Option(tuple(taken), made, local)
