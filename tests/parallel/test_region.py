"""How activations come into a tensor-parallel region."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.training import close, seeded, tp_mesh
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize

Pools = Callable[[str, int], RankPool]


def check_shared_input(comm: Communicator) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return self.down(F.silu(self.gate(x)) * self.up(x))

    model = seeded(Gated)
    tensor_parallelize(model, tp_mesh(comm), {"gate": "column", "up": "column", "down": "row"})
    with traffic.counted() as seen:
        model(torch.randn(4, 8, dtype=torch.float64)).sum().backward()
    assert seen.calls == {"all_reduce": 2}


def test_layers_that_share_an_input_pay_once(pools: Pools) -> None:
    pools("gloo", 2).run(check_shared_input)


def check_changed_input(comm: Communicator) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.first, self.second, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            with torch.no_grad():
                before = self.first(x)
                x.mul_(2)
            return self.down(before + self.second(x))

    rules = {"first": "column", "second": "column", "down": "row"}
    plain, parallel = seeded(Changing), seeded(Changing)
    tensor_parallelize(parallel, tp_mesh(comm), rules)
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    close(parallel(x), plain(x), "the output")
    gradients = [torch.autograd.grad(model(x).square().sum(), model.norm.bias)[0] for model in (parallel, plain)]
    close(gradients[0], gradients[1], "the gradient")


def test_an_input_that_changes_between_layers(pools: Pools) -> None:
    pools("gloo", 2).run(check_changed_input)


def check_stand_in(comm: Communicator) -> list[bool]:
    class Attention(nn.Module):
        def __init__(self, residual: bool) -> None:
            super().__init__()
            self.heads, self.residual = 4, residual
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            width = x.shape[-1]
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(y + x if self.residual else y)

    rules = {"*.attention": "heads:heads", "*.qkv": "column:qkv", "*.out": "row"}
    shown = []
    for residual in (False, True):
        model = nn.ModuleDict({"attention": Attention(residual)})
        tensor_parallelize(model, tp_mesh(comm), rules)
        shown.append(bool(model["attention"](torch.randn(2, 3, 8)).isnan().any()))
    return shown


def test_an_attention_that_uses_its_input_otherwise_shows(pools: Pools) -> None:
    """Never a wrong number: what cannot be shared is nan."""
    assert pools("gloo", 2).run(check_stand_in) == [[False, True]] * 2
