"""Cell: torch's Module, whose forward is called `construct`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import nn

from unisono.compat.language import say
from unisono.compat.mindspore.common.parameter import Parameter
from unisono.compat.mindspore.ops.primitive import Primitive
from unisono.errors import UsageError


class Cell(nn.Module):
    """A net, or a part of one: `construct` is what it computes."""

    def __init__(self, auto_prefix: bool = True, flags: Any = None) -> None:
        super().__init__()
        self.training = False  # as in MindSpore, until set_train or Model.train

    def construct(self, *inputs: Any, **kwargs: Any) -> Any:
        raise UsageError(
            say(
                f"{type(self).__name__} has no construct(): what a Cell computes is written there",
                f"{type(self).__name__} 没有 construct()：Cell 的计算应写在其中",
            )
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.construct(*inputs, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Parameters without a name get the attribute's; those of a cell within get it in front of theirs."""
        if isinstance(value, Parameter):
            value.name = value.name or name
        elif isinstance(value, Primitive):
            value.instance_name = name
        elif isinstance(value, Cell):
            prefix(value, name)
        super().__setattr__(name, value)

    def get_parameters(self, expand: bool = True) -> Iterator[nn.Parameter]:
        return self.parameters(expand)

    def trainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse) if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters(recurse) if not parameter.requires_grad]

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self.named_parameters(name_prefix, expand)

    def parameters_dict(self, recurse: bool = True) -> dict[str, nn.Parameter]:
        """By MindSpore's names."""
        return {name_of(parameter, path): parameter for path, parameter in self.named_parameters(recurse=recurse)}

    def set_train(self, mode: bool = True) -> Self:
        return self.train(mode)

    def set_grad(self, requires_grad: bool = True) -> Self:
        """Nothing: gradients are those of the trainable parameters."""
        return self

    def cells(self) -> Iterator[nn.Module]:
        return (cell for cell in self.children() if not isinstance(cell, Primitive))

    def name_cells(self) -> dict[str, nn.Module]:
        return {name: cell for name, cell in self.named_children() if not isinstance(cell, Primitive)}

    def cells_and_names(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, cell) for name, cell in self.named_modules() if not isinstance(cell, Primitive))


def prefix(cell: nn.Module, name: str) -> None:
    for parameter in cell.parameters():
        if isinstance(parameter, Parameter):
            parameter.name = f"{name}.{parameter.name}"


def name_of(parameter: nn.Parameter, path: str) -> str:
    """MindSpore's name of a parameter; of one that torch made, its path."""
    return (parameter.name or path) if isinstance(parameter, Parameter) else path


class SequentialCell(Cell):
    """Cells one after the other; a cell may be a list of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        listed = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        for number, cell in enumerate(listed):
            setattr(self, str(number), cell)

    def construct(self, x: Any) -> Any:
        for cell in self.children():
            x = cell(x)
        return x

    def append(self, cell: nn.Module) -> None:
        setattr(self, str(len(self._modules)), cell)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, number: int) -> nn.Module:
        return list(self.children())[number]


class CellList(Cell, nn.ModuleList):
    """Cells that a net goes through by itself."""

    def __init__(self, *args: Iterable[nn.Module]) -> None:
        listed = list(args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)
        for number, cell in enumerate(listed):
            prefix(cell, str(number))
        nn.ModuleList.__init__(self, listed)
