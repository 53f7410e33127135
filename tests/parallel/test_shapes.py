"""Shapes that are remembered are those that torch works out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from examples.gpt import GPT, Config
from tests.parallel.context_models import Encoder, Rotary
from unisono.parallel.meta import shapes
from unisono.parallel.meta.shapes import KnownShapes


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    shapes._known.clear()


def _forms(tree: Any) -> list[tuple[Any, ...]]:
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    ]


def _trained(model: nn.Module, inputs: torch.Tensor) -> list[tuple[Any, ...]]:
    model = copy.deepcopy(model)
    outputs = model(inputs)
    loss = F.cross_entropy(outputs.flatten(0, -2), torch.zeros(outputs.shape[:-1], dtype=torch.long).flatten())
    loss.backward()
    return _forms([outputs, loss, [parameter.grad for parameter in model.parameters()]])


@pytest.mark.parametrize(
    "make", [lambda: GPT(Config(20, 8, 16, 4, 2, 0.1)), lambda: Rotary().double(), lambda: Encoder(causal=True)]
)
def test_a_model_has_the_shapes_that_it_has_without(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
        inputs = torch.zeros(3, 8, dtype=torch.long)
        expected = _trained(model, inputs)
        with KnownShapes():
            assert _trained(model, inputs) == expected  # what is worked out
            known = len(shapes._known)
            assert _trained(model, inputs) == expected  # what is known
        assert known == len(shapes._known) > 20


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "added to a truth": lambda x: x + True,
    "added to a whole number": lambda x: x + 1,
    "added to a number": lambda x: x + 1.0,
    "a view": lambda x: x.transpose(0, 1),
    "written": lambda x: x.mul_(2),
    "several outputs": lambda x: x.double().topk(2),
    "a list": lambda x: torch.unbind(x),
    "no copy": lambda x: x.contiguous(),
    "along another dimension": lambda x: x.double().softmax(0),
    "turned": lambda x: x.t() * x.t(),
    "by default": lambda x: x / 2,
    "factory": lambda x: torch.ones(2, 3),
}


@pytest.mark.parametrize("start", [torch.int64, torch.bool, torch.float16])
def test_operations_are_reported_apart(start: torch.dtype) -> None:
    def outcomes() -> list[Any]:
        return [_outcome(act, start) for act in OPERATIONS.values()]

    with torch.device("meta"):
        expected = outcomes()
        with KnownShapes():
            assert outcomes() == expected
            assert outcomes() == expected
            torch.set_default_dtype(torch.float64)
            try:
                (doubled,) = _forms(OPERATIONS["factory"](torch.empty(0)))
            finally:
                torch.set_default_dtype(torch.float32)
            assert doubled[2] == torch.float64


def _outcome(act: Callable[[torch.Tensor], Any], start: torch.dtype) -> Any:
    """The forms, and which outputs lie in the memory of the input."""
    x = torch.empty(4, 3, dtype=start)
    try:
        found = act(x)
    except RuntimeError:
        return "refused"
    memory = x.untyped_storage()._cdata
    return _forms(found), [leaf.untyped_storage()._cdata == memory for leaf in tree_leaves(found)]


def test_tensors_with_numbers_are_computed() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with KnownShapes():
        for _ in range(2):
            assert torch.equal(x.softmax(1) + x, torch.softmax(x, 1) + x)
            assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2]))
    assert not shapes._known
