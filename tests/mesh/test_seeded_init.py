"""Initial parameters: what one process gets from the seed, on whichever rank and in whichever part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build, build_layers


def layers() -> list[Callable[[], nn.Module]]:
    return [
        lambda: nn.Embedding(11, 6),
        lambda: nn.Linear(6, 9),
        lambda: nn.TransformerEncoderLayer(6, 2, 8),
        lambda: nn.LayerNorm(6),
        lambda: nn.Linear(9, 3),
    ]


def one_process() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(layer() for layer in layers()))


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_full_model() -> None:
    expected = one_process()
    before = torch.get_rng_state()
    built = build(lambda: nn.Sequential(*(layer() for layer in layers())), 5)
    assert same(built, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(build(lambda: nn.Sequential(*(layer() for layer in layers())), 6), expected)


@pytest.mark.parametrize("wanted", [[], [0], [4], [1, 3], [2, 3, 4], range(5)])
def test_some_layers(wanted: list[int]) -> None:
    expected = one_process()
    built = build_layers(layers(), wanted, 5)
    assert sorted(built) == sorted(wanted)
    assert all(same(built[number], expected[number]) for number in wanted)


def test_unknown_layers() -> None:
    with pytest.raises(UsageError, match=r"layers \[5\] are wanted, but there are only 5"):
        build_layers(layers(), [0, 5], 5)


def build_stage(comm: Communicator) -> dict[int, dict[str, torch.Tensor]]:
    torch.manual_seed(comm.rank)  # what ranks did before must not matter
    stage = build_layers(layers(), [number for number in range(5) if number % comm.size == comm.rank], 5)
    return {number: layer.state_dict() for number, layer in stage.items()}


def test_stages_on_ranks(pools: Callable[[str, int], RankPool]) -> None:
    expected = one_process()
    built = {number: state for stage in pools("gloo", 4).run(build_stage) for number, state in stage.items()}
    assert sorted(built) == [0, 1, 2, 3, 4]
    for number, state in built.items():
        assert all(torch.equal(tensor, expected[number].state_dict()[name]) for name, tensor in state.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_function_that_draws_on_a_gpu() -> None:
    torch.manual_seed(5)
    wanted = nn.Linear(6, 9, device="cuda")
    before = torch.cuda.get_rng_state()
    made = build(lambda: nn.Linear(6, 9, device="cuda"), 5)
    assert torch.equal(made.weight, wanted.weight)
    assert torch.equal(torch.cuda.get_rng_state(), before)
