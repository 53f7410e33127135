"""Deferred initialization: each tensor gets, alone, the values that building the full model gives it."""

from __future__ import annotations

import importlib.util
import io
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.parallel.models import gpt, llama, mlp
from unisono.mesh.deferred_init.deferred_model import defer_init, defer_init_approximately, tensors_in
from unisono.mesh.deferred_init.init_recorder import CannotRecord
from unisono.mesh.deferred_init.seeded_init import build
from unisono.parallel.expert.expert import MoE


class Tied(nn.Module):
    """Initialised twice, by its layers and by itself, with one weight in two places and a table beside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8, padding_idx=3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.moe = MoE(8, 16, experts=4)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.steps = [torch.arange(3.0)]  # neither a parameter nor a buffer
        self.apply(self._begin)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(4))

    def _begin(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
        if isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight)


def by_hand() -> nn.Module:
    layer = nn.Linear(6, 6)
    nn.init.orthogonal_(layer.weight)
    layer.bias.data = layer.bias.data * 2 + layer.weight.data.norm()
    layer.weight.data[0] = 7
    with torch.no_grad():
        layer.weight[layer.weight < 0] = 0.5
        layer.bias.mul_(torch.bernoulli(torch.full((6,), 0.5)))
        layer.weight.detach().cpu()[1] = 3  # what is on the CPU already is not copied
    return layer


def looked_at() -> nn.Module:
    layer = nn.Linear(4, 3)
    if layer.weight.max() > 0:
        layer.bias.data.fill_(float(layer.weight.detach().abs().max()))
    layer.rates = torch.linspace(0, 1, 3).tolist()  # type: ignore[assignment]
    assert layer.weight.device.type == "cpu"
    assert not layer.weight.is_meta
    return layer


def from_numpy() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight.data.copy_(torch.from_numpy(numpy.arange(12, dtype="f4").reshape(3, 4)))
    layer.register_buffer("table", torch.as_tensor(numpy.ones(3)))
    return layer


def by_another_name() -> nn.Module:
    layer = nn.Linear(4, 3)
    nn.init.constant_(torch.as_tensor(layer.bias), 0.5)  # the parameter itself
    with torch.no_grad():
        torch.asarray(layer.weight, device="cpu").mul_(2)
    layer.register_buffer("wide", torch.as_tensor(layer.weight.detach(), dtype=torch.float64))  # a copy
    return layer


def turned_in_place() -> nn.Module:
    layer = nn.Linear(4, 4)
    nn.init.orthogonal_(layer.weight[:2])  # wider than high: torch turns it, in place
    layer.weight.data.t_()
    with torch.no_grad():
        layer.weight[0] += 1
    layer.register_buffer("places", torch.arange(3.0).unsqueeze_(0).add_(1))
    return layer


def many_generators() -> nn.Module:
    layer = nn.Linear(20, 20)
    layer.weight.data.normal_(generator=torch.Generator().manual_seed(7))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer.bias.data.uniform_()
    return nn.Sequential(layer, nn.Linear(20, 3))


def in_double() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    layer = nn.Linear(3, 3)
    torch.set_default_dtype(before)
    return nn.Sequential(layer, nn.Linear(3, 3).to("cpu", torch.bfloat16))


STATE = build(lambda: nn.Linear(3, 3), 1).state_dict()


def loaded() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.load_state_dict(STATE)
    return layer


WRITTEN_DOWN: list[Callable[[], nn.Module]] = [
    Tied, mlp, gpt, by_hand, looked_at, from_numpy, by_another_name, turned_in_place, many_generators,
    in_double, loaded,
    lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTMCell(8, 8), nn.MultiheadAttention(8, 2)),
    lambda: nn.ModuleList([nn.LSTM(3, 4, 2, bidirectional=True), nn.GRU(3, 4), nn.RNN(3, 4, bias=False)]),
]  # fmt: skip
if importlib.util.find_spec("transformers"):
    WRITTEN_DOWN.append(llama)


def test_every_tensor_alone_is_what_it_is_in_the_full() -> None:
    for make in WRITTEN_DOWN:
        state = torch.get_rng_state()
        deferred = defer_init(make, 3)
        assert deferred.is_deferred, (make, deferred.note)
        assert all(tensor.is_meta for _, tensor in tensors_in(deferred.model))
        assert torch.equal(torch.get_rng_state(), state)
        full_value = dict(tensors_in(build(make, 3)))
        for name, tensor in reversed(full_value.items()):  # in another order than they were made
            value = deferred.value(name)
            assert value.dtype == tensor.dtype, name
            assert torch.equal(value, tensor), (make, name)
        assert {name for name, _ in tensors_in(deferred.model)} == set(full_value)


def changed_past_torch() -> nn.Module:
    numbers, layer = numpy.zeros(3, dtype="f4"), nn.Linear(4, 3)
    shared = torch.from_numpy(numbers)
    numbers[:] = 5
    layer.bias.data.copy_(shared)
    numbers[:] = 6
    return layer


def written_past_torch() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight.detach().numpy()[:] = 1
    return layer


TABLE = torch.ones(4, 3)


def written_through_a_view() -> nn.Module:
    layer = nn.Embedding(4, 3)
    TABLE[0] = 0
    layer.weight.data.copy_(TABLE)
    return layer


def in_a_closure() -> nn.Module:
    layer, added = nn.Linear(4, 3), torch.randn(3)
    layer.register_forward_hook(lambda module, inputs, output: output + added)
    return layer


def hooked() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def one_memory() -> nn.Module:
    both, module = torch.randn(6), nn.Module()
    module.first, module.second = nn.Parameter(both[:3]), nn.Parameter(both[3:])
    return module


def from_file() -> nn.Module:
    file = io.BytesIO()
    torch.save(STATE, file)
    file.seek(0)
    layer = nn.Linear(3, 3)
    layer.load_state_dict(torch.load(file))
    return layer


def referred_to() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.noticed = weakref.ref(layer.weight)  # type: ignore[assignment]
    return layer


def each_from_all_before() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))
    with torch.no_grad():
        for number in range(1, 40):
            layers[number].weight.add_(layers[number - 1].weight)
    return layers


BUILT = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (changed_past_torch, "changed past torch"),
        (written_past_torch, "past torch"),
        (written_through_a_view, "not the model's"),
        (lambda: BUILT.to(torch.float64), "was there before is moved"),
        (in_a_closure, "outside the model's modules"),
        (one_memory, "shares its memory"),
        (hooked, "has hooks"),
        (referred_to, "weak reference to weight"),
        (from_file, "memory"),
        (each_from_all_before, "takes too long"),
        (lambda: BUILT, "there before"),
    ],
)
def test_what_cannot_be_written_down_is_built_full(make: Any, why: str) -> None:
    deferred = defer_init(make, 3)
    assert not deferred.is_deferred
    assert why in deferred.note
    assert not any(tensor.is_meta for tensor in BUILT.parameters())
    expected = dict(tensors_in(build(make, 3)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_in(deferred.model))
    assert not any(tensor.is_meta for _, tensor in tensors_in(deferred.model))


def test_a_mistake_of_the_constructor_is_raised_as_it_is() -> None:
    def mistaken() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear("wide", 3))  # type: ignore[arg-type]

    with pytest.raises(TypeError):
        defer_init(mistaken, 0)


def test_pythons_generators_are_drawn_from_once() -> None:
    def drawn() -> nn.Module:
        layer = in_a_closure()
        layer.number = numpy.random.rand()  # type: ignore[assignment]
        return layer

    numpy.random.seed(4)
    expected = numpy.random.rand()
    numpy.random.seed(4)
    assert defer_init(drawn, 0).model.number == expected


def test_what_is_built_again_draws_what_was_drawn() -> None:
    def drawn() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.bias.data.copy_(torch.as_tensor(numpy.random.rand(3)))
        return layer

    numpy.random.seed(4)
    deferred = defer_init(drawn, 0)
    after = numpy.random.rand()
    assert deferred.is_deferred, deferred.note
    expected = deferred.value("bias")
    numpy.random.seed(4)
    numpy.random.rand(3)
    assert torch.equal(deferred.rebuilt("asked").model.bias, expected)
    assert numpy.random.rand() == after


def test_a_sketch_has_values_of_the_same_kind() -> None:
    """Without drawing those that are not asked for: here more than any memory holds."""

    def make() -> nn.Module:
        made = nn.ModuleList([nn.Embedding(10**10, 1000), nn.Linear(1000, 100), nn.LayerNorm(3)])
        nn.init.normal_(made[1].weight, mean=5.0, std=0.1)
        return made

    sketch = defer_init_approximately(make, 0)
    weight = sketch.value("1.weight")
    assert (weight.mean().item(), weight.std().item()) == (pytest.approx(5, rel=0.01), pytest.approx(0.1, rel=0.05))
    assert sketch.value("1.bias").unique().numel() > 90
    assert sketch.value("2.weight").tolist() == [1, 1, 1]


def test_a_sketch_of_what_looks_at_random_numbers_is_refused() -> None:
    def make() -> nn.Module:
        return nn.Linear(2, 2 if torch.rand(()).item() < 0.5 else 3)

    with pytest.raises(CannotRecord, match="it looks at random numbers"):
        defer_init_approximately(make, 0)
