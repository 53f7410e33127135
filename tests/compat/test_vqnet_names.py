"""VQNet's functions, layers, losses and optimizers against torch's; names that are not here, in sentences."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import unisono.compat.vqnet as pyvqnet
from unisono.compat.vqnet import nn, optim, tensor
from unisono.compat.vqnet.distributed.qubits_reorder import DistributeQMachine
from unisono.errors import UsageError

X = torch.tensor([[0.1, -0.7, 0.5], [0.9, 0.3, -0.2]])
Y = torch.tensor([[0.4, 0.3, 2.0], [1.0, -0.3, 0.6]])
TORCH = {"divide": "div", "power": "pow", "equal": "eq", "not_equal": "ne", "greater": "gt", "greater_equal": "ge"}
TORCH |= {"less": "lt", "less_equal": "le"}
ONE = """abs acos asin atan ceil cos cosh exp floor isfinite isinf isnan log logical_not neg reciprocal round sigmoid
sign sin sinh sqrt square tan tanh"""
TWO = """add sub mul divide power maximum minimum equal not_equal greater greater_equal less less_equal logical_and
logical_or logical_xor"""
SCATTERED = torch.tensor([[0.1, -0.7, 5.0], [0.9, 0.3, 6.0]])
CALLS: dict[str, tuple[Any, Any]] = {
    "matmul": (lambda t: tensor.matmul(t, tensor.transpose(t)), X @ X.T),
    "clip": (lambda t: tensor.clip(t, -0.3, 0.4), X.clamp(-0.3, 0.4)),
    "where": (lambda t: tensor.where(t > 0, t, -t), X.abs()),
    "masked_fill": (lambda t: tensor.masked_fill(t, t > 0, 9.0), X.masked_fill(X > 0, 9.0)),
    "max": (lambda t: tensor.max(t, 1, True), X.amax(1, True)),
    "min": (lambda t: tensor.min(t), X.min()),
    "argmin": (lambda t: tensor.argmin(t, 1), X.argmin(1)),
    "var": (lambda t: tensor.var(t, 0, unbiased=False), X.var(0, correction=0)),
    "std": (lambda t: tensor.std(t, 1, True), X.std(1, keepdim=True)),
    "cumsum": (lambda t: tensor.cumsum(t), X.cumsum(-1)),
    "softmax": (lambda t: tensor.softmax(t, 0), X.softmax(0)),
    "log_softmax": (lambda t: tensor.log_softmax(t), X.log_softmax(-1)),
    "sort": (lambda t: tensor.sort(t, 1, True), X.sort(1, True).values),
    "argsort": (lambda t: tensor.argsort(t, 0), X.argsort(0)),
    "all": (lambda t: tensor.all(t < 1), torch.tensor(True)),
    "any": (lambda t: tensor.any(t > 1), torch.tensor(False)),
    "trace": (lambda t: tensor.trace(t, 1), X[0, 1] + X[1, 2]),
    "transpose": (lambda t: tensor.transpose(t.reshape([1, 2, 3]), [2, 0, 1]), X.view(1, 2, 3).permute(2, 0, 1)),
    "permute": (lambda t: tensor.permute(t), X.T),
    "swapaxis": (lambda t: tensor.swapaxis(t, 0, 1), X.T),
    "moveaxis": (lambda t: tensor.moveaxis(t, 0, 1), X.T),
    "squeeze": (lambda t: tensor.squeeze(t.reshape([1, 6]), 0), X.view(6)),
    "unsqueeze": (lambda t: tensor.unsqueeze(t, 1), X[:, None]),
    "tile": (lambda t: tensor.tile(t, [2, 1]), torch.cat([X, X])),
    "flip": (lambda t: tensor.flip(t, [0]), X.flip(0)),
    "diag": (lambda t: tensor.diag(t[0], 1), torch.diag(X[0], 1)),
    "tril": (lambda t: tensor.tril(t), X.tril()),
    "triu": (lambda t: tensor.triu(t, 1), X.triu(1)),
    "gather": (lambda t: tensor.gather(t, 1, [[0], [2]]), X.gather(1, torch.tensor([[0], [2]]))),
    "scatter": (
        lambda t: tensor.scatter(t, 1, [[2], [2]], [[5.0], [6.0]]),
        SCATTERED,
    ),
    "nonzero": (lambda t: tensor.nonzero(t > 0), (X > 0).nonzero()),
    "full_like": (lambda t: tensor.full_like(t, 3), torch.full_like(X, 3)),
    "eye": (lambda t: tensor.eye(3, 1), torch.diag(torch.ones(2), 1)),
    "linspace": (lambda t: tensor.linspace(0, 1, 5), torch.linspace(0, 1, 5)),
}


@pytest.mark.parametrize("name", ONE.split())
def test_of_each_element(name: str) -> None:
    found = getattr(tensor, name)(tensor.QTensor(X))
    assert type(found) is tensor.QTensor
    torch.testing.assert_close(tensor.plain(found), getattr(torch, name)(X), equal_nan=True)
    assert getattr(tensor.tensor, name) is getattr(tensor, name)


@pytest.mark.parametrize("name", TWO.split())
def test_of_two(name: str) -> None:
    expected = getattr(torch, TORCH.get(name, name))
    found = getattr(tensor, name)(tensor.QTensor(X), tensor.QTensor(Y))
    torch.testing.assert_close(tensor.plain(found), expected(X, Y), equal_nan=True)
    by_number = getattr(tensor, name)(tensor.QTensor(X), 2.0)
    torch.testing.assert_close(tensor.plain(by_number), expected(X, torch.tensor(2.0)), equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_with_arguments(name: str) -> None:
    call, expected = CALLS[name]
    found = call(tensor.QTensor(X))
    assert type(found) is tensor.QTensor
    torch.testing.assert_close(tensor.plain(found), expected)


def test_random_ones_follow_the_seed_and_an_axis_is_not_guessed() -> None:
    pyvqnet.utils.set_random_seed(3)
    drawn = tensor.randn([2000], mean=4.0, std=0.5), tensor.randu([2000], -1, 1)
    torch.manual_seed(3)
    assert torch.equal(tensor.plain(drawn[0]), torch.randn(2000) * 0.5 + 4.0)
    assert -1 <= drawn[1].min() < -0.9 < 0.9 < drawn[1].max() <= 1
    with pytest.raises(UsageError, match="the last axis, or all of length one"):
        tensor.squeeze(tensor.ones([1, 2, 1]), -1)


def same_as(layer: Any, like: torch.nn.Module, *inputs: torch.Tensor) -> None:
    assert isinstance(layer, nn.Module)
    like.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(*inputs), like(*inputs))


def test_layers_are_torchs() -> None:
    image, words = torch.randn(2, 4, 3, 3), torch.randn(2, 5, 4)
    same_as(nn.BatchNorm2d(4, momentum=0.3, epsilon=1e-3), torch.nn.BatchNorm2d(4, 1e-3, 0.3), image)
    same_as(nn.BatchNorm1d(5), torch.nn.BatchNorm1d(5), words)
    same_as(nn.LayerNormNd([5, 4], epsilon=1e-2), torch.nn.LayerNorm([5, 4], 1e-2), words)
    same_as(nn.LayerNorm1d(4), torch.nn.LayerNorm(4), words)
    same_as(nn.GroupNorm(2, 4), torch.nn.GroupNorm(2, 4), image)
    same_as(nn.Embedding(7, 3), torch.nn.Embedding(7, 3), torch.tensor([[1, 6]]))
    for name in ("LSTM", "GRU", "RNN"):
        options = {"bidirectional": True, "batch_first": True}
        like = getattr(torch.nn, name)(4, 3, 2, bias=False, **options)
        same_as(getattr(nn, name)(4, 3, 2, use_bias=False, bidirectional=True), like, words)
    gamma = nn.BatchNorm2d(4, gamma_initializer=lambda shape: np.full(shape, 2.0)).weight
    assert gamma.tolist() == [2.0] * 4
    assert nn.Dropout(0.25).p == 0.25
    pairs = {"Softplus": F.softplus, "Softsign": F.softsign, "HardSigmoid": F.hardsigmoid, "ELU": F.elu}
    for name, function in pairs.items():
        torch.testing.assert_close(getattr(nn.activation, name)()(X), function(X))
    torch.testing.assert_close(nn.Gelu()(X), F.gelu(X, approximate="tanh"))


def test_losses_and_optimizers() -> None:
    classes = torch.tensor([2, 0])
    one_hot = F.one_hot(classes, 3)
    expected = F.cross_entropy(X, classes)
    for name in ("CategoricalCrossEntropy", "SoftmaxCrossEntropy"):
        torch.testing.assert_close(getattr(nn, name)()(one_hot, X), expected)
    torch.testing.assert_close(nn.NLL_Loss()(classes, X.log_softmax(1)), expected)
    torch.testing.assert_close(
        nn.BinaryCrossEntropy()(one_hot, X.sigmoid()), F.binary_cross_entropy(X.sigmoid(), one_hot.float())
    )
    with pytest.raises(UsageError, match=r"CategoricalCrossEntropy\(target, output\): shapes"):
        nn.CategoricalCrossEntropy()(classes, X)
    ours, theirs = (torch.nn.Parameter(X.clone()) for _ in range(2))
    pair = optim.AdamW([ours], 0.1, 0.8, 0.9, weight_decay=0.2), torch.optim.AdamW([theirs], 0.1, (0.8, 0.9), 1e-8, 0.2)
    for parameter, optimizer in zip((ours, theirs), pair, strict=True):
        parameter.square().sum().backward()
        optimizer.step()
    assert torch.equal(ours, theirs)


MODULES = ["", ".tensor", ".tensor.tensor", ".nn", ".nn.activation", ".optim", ".data", ".dtype", ".device", ".utils"]
MODULES += [".distributed", ".qnn", ".qnn.vqc"]


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_name_is_a_sentence(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    found = importlib.import_module(f"unisono.compat.vqnet{module}")
    with pytest.raises(AttributeError, match=rf"^pyvqnet{module}.no_such_name is not one of the names"):
        found.no_such_name  # noqa: B018
    assert not hasattr(found, "no_such_name")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    with pytest.raises(UsageError, match=r"unisono\.compat\.vqnet 中没有 pyvqnet"):
        found.no_such_name  # noqa: B018


def test_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with pytest.raises(ImportError, match=r"did you mean softmax\?"):
        from unisono.compat.vqnet.tensor import sofmax  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(UsageError, match=r"use torch\.topk"):
        tensor.tensor.topK  # noqa: B018
    assert "unisono.quantum" in pyvqnet.explain_missing_module("pyvqnet.qnn.pq3.quantumlayer")


def test_global_qubits_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    machine = DistributeQMachine(4)
    machine.set_qr_config({"qubit": 4, "global_qubit": 0})
    with pytest.raises(UsageError, match="global_qubit=1 is for 2 ranks, but 1 run; give global_qubit=0, or start"):
        machine.set_qr_config({"qubit": 4, "global_qubit": 1})
