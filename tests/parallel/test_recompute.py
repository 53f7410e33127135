"""Recomputation: the same gradients bit for bit, less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from examples.gpt import GPT, Config
from tests.parallel.live import Allocated
from unisono.errors import UsageError
from unisono.mesh.random.state import RandomState
from unisono.parallel.recomputation.recompute import recompute, runs_again

WAYS = ["none", "selective", "attention", "full", ("*.fc?", "blocks.1"), ["blocks.*.attention"]]
TOKENS = torch.randint(17, (3, 32), generator=torch.Generator().manual_seed(1))


def _gpt(dropout: float, context: int = 32) -> GPT:
    torch.manual_seed(3)
    return GPT(Config(vocabulary=17, context=context, width=16, heads=4, layers=3, dropout=dropout))


def _loss(model: nn.Module) -> torch.Tensor:
    logits = model(TOKENS)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("random", ["no dropout", "torch's dropout", "RandomState"])
def test_gradients_are_the_same_bit_for_bit(way: str | tuple[str, ...], random: str) -> None:
    gradients = []
    for each in ("none", way):
        model = recompute(_gpt(0.0 if random == "no dropout" else 0.2), each)
        state = RandomState(seed=7)
        state.name_modules(model)
        torch.manual_seed(11)
        with state if random == "RandomState" else contextlib.nullcontext():
            for state.step in range(2):  # two passes, so that what is remembered of one must not disturb the other
                _loss(model).backward()
        gradients.append(_gradients(model))
    plain, again = gradients
    assert set(plain) == set(again)
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


@pytest.mark.parametrize(
    ("way", "most"), [("selective", 0.9), ("attention", 0.8), ("full", 0.35), (("*.attention",), 0.7)], ids=str
)
def test_memory_between_forward_and_backward_is_saved(way: str | tuple[str, ...], most: float) -> None:
    kept = []
    for each in ("none", way):
        model = recompute(_gpt(0.1), each)
        state = RandomState(seed=7)
        with state, Allocated() as allocated:
            loss = _loss(model)
        kept.append(allocated.alive)
        loss.backward()
        del loss
        assert allocated.alive == 0
    assert kept[1] < most * kept[0]


def test_a_block_runs_twice_and_only_where_asked() -> None:
    model = recompute(_gpt(0.0), ["blocks.1"])
    runs = dict.fromkeys(range(3), 0)

    def count(number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            runs[number] += 1

        return hook

    for number, block in enumerate(model.blocks):
        block.norm1.register_forward_hook(count(number))
    _loss(model).backward()
    assert runs == {0: 1, 1: 2, 2: 1}
    with torch.no_grad():
        _loss(model)
    assert runs == {0: 2, 1: 3, 2: 2}


def test_running_statistics_move_once() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True)) for _ in range(3))
        )

    x = torch.randn(8, 4)
    plain, again = made(), recompute(made(), "full")
    for _ in range(2):
        for model in (plain, again):
            model(x).square().sum().backward()
    for (name, one), two in zip(plain.named_buffers(), again.buffers(), strict=True):
        assert torch.equal(one, two), name
    for (name, left), right in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad), name  # type: ignore[arg-type]


class Wide(TorchFunctionMode):
    """Whoever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].double() if func is torch.Tensor.float else func(*args, **(kwargs or {}))


class Rounding(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float().tanh().to(x.dtype))


def test_modes_that_change_torchs_functions_are_on_again() -> None:
    """A backward that is called within a mode runs without it, and so would the second run."""
    gradients = []
    for way in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(Rounding(4, 4), Rounding(4, 4)).double()
        with Wide():
            recompute(model, way)(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        gradients.append(_gradients(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_names_stay_and_attention_is_put_back() -> None:
    before = [name for name, _ in _gpt(0.0).named_parameters()]
    attention = F.scaled_dot_product_attention
    for way in WAYS:
        model = recompute(_gpt(0.0), way)
        assert [name for name, _ in model.named_parameters()] == before
        assert runs_again(model) == (way not in ("none", "selective"))
        with pytest.raises(IndexError):
            model(torch.full((1, 4), 99))
        assert F.scaled_dot_product_attention is attention


def test_what_cannot_be_recomputed_is_named() -> None:
    with pytest.raises(UsageError, match=r"no module of GPT matches '\*\.mlp'"):
        recompute(_gpt(0.0), ["*.mlp"])
    with pytest.raises(UsageError, match="expected one of none, selective, attention, full"):
        recompute(_gpt(0.0), "all")
    with pytest.raises(UsageError, match="no list of repeated blocks"):
        recompute(nn.Linear(2, 2), "full")
    with pytest.raises(UsageError, match="twice"):
        recompute(recompute(_gpt(0.0), "full"), "full")


@pytest.mark.parametrize("prefix", [0, 3], ids=["made by the model", "given"])
def test_a_cache_of_keys_and_values_is_as_the_first_run_found_it(prefix: int) -> None:
    """A Hugging Face model makes a cache unless its config says no, and each block appends to it; prefix tuning gives
    one that is not empty. With padding, the second run's keys did not fit the mask."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    mask = torch.ones(3, 32 + prefix, dtype=torch.long)
    mask[1, -9:] = 0
    gradients = []
    for way in ("none", "full"):
        torch.manual_seed(3)
        config = transformers.GPT2Config(vocab_size=17, n_embd=16, n_head=4, n_layer=3, n_positions=40, eos_token_id=0)
        model = recompute(transformers.GPT2LMHeadModel(config), way)
        cache = transformers.DynamicCache(config=config)
        for layer in range(3 if prefix else 0):
            cache.update(torch.randn(3, 4, prefix, 4), torch.randn(3, 4, prefix, 4), layer)
        given = {"past_key_values": cache} if prefix else {}
        torch.manual_seed(11)
        model(TOKENS, attention_mask=mask, labels=TOKENS, **given).loss.backward()
        gradients.append(_gradients(model))
    plain, again = gradients
    assert set(plain) == set(again)
    for name in plain:
        assert torch.equal(plain[name], again[name]), name
