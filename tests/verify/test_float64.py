"""Kernels that have no float64: replaced for the proof where we know how, else the proof is in float32, and reports
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.mesh.interception import Interception
from unisono.parallel.task import Task
from unisono.verify.compare import Verdict
from unisono.verify.float64 import Float64Mode
from unisono.verify.verify import verify, verify_all, verify_here

GROUPED = [function for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if function]


@torch.jit.script
def scale(x: torch.Tensor) -> torch.Tensor:
    """As DeBERTa scales its attention."""
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float))


def test_a_script_function_gives_the_same_when_operations_are_watched() -> None:
    x = torch.zeros(2, 8, dtype=torch.float64)
    with Float64Mode():
        plain = scale(x)
        with Interception():
            ActivationRecorder = scale(x)
    assert plain.dtype == ActivationRecorder.dtype
    assert plain == ActivationRecorder


@pytest.mark.parametrize("grouped_mm", GROUPED)
def test_a_grouped_product_in_float64(grouped_mm: Callable[..., torch.Tensor]) -> None:
    rows = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 8, 24, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([3, 3, 9, 14], dtype=torch.int32)
    weights = torch.randn(16, 24, dtype=torch.float64)
    of_rows = torch.tensor([0] * 3 + [2] * 6 + [3] * 5)
    expected = torch.cat([torch.einsum("rk,rkn->rn", rows[:14], matrices[of_rows]), torch.zeros(2, 24)])
    with Float64Mode() as mode:
        given = grouped_mm(rows, matrices, offs=offsets)
        shape = grouped_mm(rows.detach().to("meta"), matrices.detach().to("meta"), offs=offsets.to("meta")).shape
    assert torch.allclose(given, expected, rtol=1e-14)
    assert shape == given.shape
    assert mode.replaced == {"grouped_mm"}
    inputs = (rows, matrices)
    for mine, theirs in zip(
        torch.autograd.grad((given * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-12)


def mixtral() -> nn.Module:
    """As it is built by default: its experts run by grouped products."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def sentences(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 32, (2, 4, 8), generator=generator)
    return {"input_ids": tokens, "use_cache": False}, targets


def loss_of_logits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def judged(comm: Communicator, plan: str) -> Verdict:
    return verify_here(comm, Task(mixtral, loss_of_logits, adam, sentences), uni.Plan.parse(plan), steps=1)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2"])
def test_a_mixture_as_built_by_default(pools: Callable[[str, int], RankPool], plan: str) -> None:
    verdict = pools("gloo", 2).run(judged, plan)[0]
    assert verdict.equivalent, verdict
    assert verdict.note == "grouped_mm has no float64 kernel: for the proof its single products are computed"


class Single(torch.autograd.Function):
    """Stands for a kernel that was compiled for float32 only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("\"single_kernel\" not implemented for 'Double'")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(x))
        given: torch.Tensor = self.head(hidden if hidden.is_meta else Single.apply(hidden))
        return given


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def doubled_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) * uni.world_size()


@pytest.mark.thorough
def test_a_kernel_without_float64_is_proved_in_float32() -> None:
    output = (
        """proved in float32, as float64 fails: NotImplementedError: "single_kernel" not implemented for 'Double'"""
    )
    verdicts = verify_all(Task(Net, F.cross_entropy, adam, batch), [uni.Plan(dp=2), uni.Plan(dp=2, zero=1)], steps=1)
    for verdict in verdicts:
        assert verdict.equivalent, verdict
        assert verdict.note.startswith(output), verdict
    wrong = verify(Task(Net, doubled_loss, adam, batch), "dp=2", steps=1)
    assert not wrong.equivalent
    assert not wrong.failure
    assert wrong.note.startswith(output)
