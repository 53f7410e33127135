"""Changes in place: the graph, which has none, gives what the model gives and leaves its buffers as the model does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace


class Changing(nn.Module):
    mean: torch.Tensor
    last: torch.Tensor
    count: torch.Tensor

    def __init__(self, change: Callable[[Changing, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(3, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.change(self, y)
        return y


def twice_through_a_slice(_: Changing, y: torch.Tensor) -> None:
    middle = y[:, 1:3]
    middle += 1
    middle *= 2


def a_slice_of_a_slice(_: Changing, y: torch.Tensor) -> None:
    rows = y[1:4]
    rows[0] = 0
    rows[1, 1:] += 1
    rows *= 2
    y[0] = rows.sum()


def a_slice_then_an_average(model: Changing, y: torch.Tensor) -> None:
    y[:, 1:3] = y[:, :2].clone()
    with torch.no_grad():
        model.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)


def a_queue(model: Changing, y: torch.Tensor) -> None:
    with torch.no_grad():
        model.last[1:] = model.last[:-1].clone()
        model.last[0].mul_(0.5).add_(y.mean(0))
        model.mean.copy_(model.last.mean(0))


def set_again(model: Changing, y: torch.Tensor) -> None:
    model.count += 1
    with torch.no_grad():
        model.mean[:2] += y.mean(0)[:2]
        model.mean *= 0.5


def values(traced: Trace, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What every node of the graph gives, op after op."""
    own = model.state_dict()
    given = {node: own[name].clone() for node, name in (traced.parameters | traced.buffers).items()}
    found = given | traced.constants | {traced.inputs[0]: x}
    for op in traced.ops:
        args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), lambda node: found[node.name])
        found[op.name] = op.target(*args, **kwargs)
    return found


@pytest.mark.parametrize(
    "change",
    [
        twice_through_a_slice,
        lambda _, y: y[:, 1:3].add_(1).mul_(2),
        a_slice_of_a_slice,
        a_slice_then_an_average,
        a_queue,
        set_again,
    ],
)
def test_the_graph_gives_what_the_model_gives(change: Callable[[Changing, torch.Tensor], object]) -> None:
    torch.manual_seed(0)
    model, x = Changing(change), torch.randn(6, 4)
    traced = trace(model, (x, None))
    assert not traced.assigned
    found = values(traced, model, x)
    torch.testing.assert_close(found[traced.outputs[0]], model(x))
    for node, name in traced.buffers.items():
        torch.testing.assert_close(found[traced.changed.get(node, node)], model.get_buffer(name))


def a_view_of_what_changes_again(_: Changing, y: torch.Tensor) -> None:
    middle = y[:, 1:3]
    middle += 1
    y *= 2
    middle += 1


def a_view_of_a_view(_: Changing, y: torch.Tensor) -> None:
    middle = y[:, 1:3]
    column = middle[:, 0]
    y += 1
    y[0] = column.sum()


def one_of_many(model: Changing, _: torch.Tensor) -> None:
    with torch.no_grad():
        first, _ = model.last.split([1, 2])
        first.mul_(0.5).add_(1)


@pytest.mark.parametrize("change", [a_view_of_what_changes_again, a_view_of_a_view, one_of_many])
def test_what_cannot_be_followed_is_refused(change: Callable[[Changing, torch.Tensor], object]) -> None:
    with pytest.raises(UsageError, match=r"test_in_place\.py:\d+ changes a tensor in place"):
        trace(Changing(change), (torch.randn(6, 4), None))
