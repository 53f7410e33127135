"""Float8: rounding does not depend on how tensors are split, and layers are float8 under every plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel import float8
from unisono.parallel.apply import parallelize
from unisono.parallel.float8 import E4M3, E5M2, MANTISSA, emulated_linear, float8_linear, quantize, round_mantissa
from unisono.parallel.precision import Precision
from unisono.plan.plan import Plan
from unisono.verify.compare import Verdict
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
TASK = dataclasses.replace(tasks.short, precision="fp8,least=16")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_element_is_rounded_alike_whatever_the_scale(dtype: torch.dtype) -> None:
    full = drawn(64, 32) * torch.logspace(-1, 1, 64)[:, None]
    rounded, inverse = quantize(full, dtype)
    assert torch.log2(inverse) == torch.log2(inverse).round()
    assert float(rounded.float().abs().max()) > torch.finfo(dtype).max / 4
    parts = [quantize(part, dtype) for part in full.split(16)]
    separately = torch.cat([values.float() * factor for values, factor in parts])
    together = rounded.float() * inverse
    is_small = full.abs() < full.abs().max() * 2.0**-12  # near the end of the range
    torch.testing.assert_close(separately.masked_fill(is_small, 0), together.masked_fill(is_small, 0), rtol=0, atol=0)
    emulated = round_mantissa(full.double(), MANTISSA[dtype]).float()
    torch.testing.assert_close(emulated.masked_fill(is_small, 0), together.masked_fill(is_small, 0), rtol=0, atol=0)
    assert quantize(torch.zeros(16, 16), dtype)[0].float().abs().max() == 0


def test_no_samples_and_second_derivatives() -> None:
    empty, weight = torch.empty(0, 64, requires_grad=True), drawn(32, 64).requires_grad_()
    for function in (float8_linear, emulated_linear):
        y = function(empty, weight)
        assert y.shape == (0, 32)
        y.sum().backward()
        assert weight.grad is not None
        assert not weight.grad.any()
        x = drawn(16, 64).requires_grad_()
        with pytest.raises(UsageError, match=r"create_graph=True, .* cannot be differentiated through float8"):
            torch.autograd.grad(function(x, weight).float().square().sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [(32, 64), (5, 64), (2, 3, 64), (64,)])
def test_products_and_gradients(shape: tuple[int, ...]) -> None:
    """torch._scaled_mm, which CPUs have too, beside products of rounded operands in float64."""
    x, weight, bias = drawn(*shape), drawn(48, 64, seed=1), drawn(48, seed=2)
    dy = drawn(*shape[:-1], 48, seed=3)

    def run(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        given = [each.bfloat16().to(dtype).requires_grad_() for each in (x, weight, bias)]
        y = function(*given)
        y.backward(dy.bfloat16().to(y.dtype))
        return [y.detach(), *(each.grad for each in given if each.grad is not None)]

    found, expected, exact = run(float8_linear, torch.float32), run(emulated_linear, torch.float64), None
    exact = run(F.linear, torch.float64)
    for name, mine, emulated, true in zip(("y", "dx", "dw", "db"), found, expected, exact, strict=True):
        scale = true.abs().max()
        assert float((mine.double() - emulated).abs().max() / scale) < 2.0**-7, name  # results are bfloat16
        assert float((emulated - true).abs().max() / scale) < 0.1, name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.odd = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 8))
        self.head = nn.Linear(32, 64)


def test_layers_that_stay_are_listed() -> None:
    layers = Precision.of("fp8,least=16").float8(Model())
    assert layers.chosen == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    assert str(layers) == (
        "float8: 4 linear layers; bfloat16: odd.0 (32 x 40, no multiples of 16), odd.1 (fewer than 16 features), head "
        "(outside the blocks)"
    )
    with pytest.raises(UsageError, match="Model has no linear layer to compute in float8, with at least 256"):
        Precision.of("fp8").float8(Model())
    assert not Precision.of("bf16").float8(Model()).chosen
    with pytest.raises(UsageError, match="least=few; expected a number"):
        Precision.of("fp8,least=few")


def proved(comm: Communicator, plan: str, is_wrong: bool = False) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        if is_wrong:  # on the ranks only: gradients of outputs are rounded as operands are
            patch.setattr(float8, "MANTISSA", {E4M3: 3, E5M2: 3} if comm.rank else MANTISSA)
        return verify_here(comm, TASK, Plan.parse(plan), steps=2)


@pytest.mark.parametrize(
    "plan", ["dp=2", "dp=2,zero=3", "tp=2,sp,zero=1", "pp=2,microbatches=2", "cp=2", "dp=2,zero=2,recompute=full"]
)
def test_plans_round_as_one_device_does(pools: Pools, plan: str) -> None:
    verdict = pools("gloo", 2).run(proved, plan)[0]
    assert verdict.equivalent, verdict
    assert all(each.deviation < 1e-9 for each in verdict.worst), verdict


def test_another_rounding_is_found(pools: Pools) -> None:
    assert not pools("gloo", 2).run(proved, "dp=2", True)[0].equivalent


def compiled(comm: Communicator) -> list[list[float]]:
    """Layers that are compiled regions themselves, with and without float8."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()

    emulated = Precision.of("fp8,least=16").emulated(layers())
    example = drawn(8, 32).double(), drawn(8, 32, seed=1).double()
    found = []
    for plan, precision in (("dp=1", emulated), ("dp=1,compile", emulated), ("dp=1", "fp32")):
        trainer = parallelize(
            layers, plan, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=example,
            precision=precision,
        )  # fmt: skip
        found.append([trainer.step(example).item() for _ in range(2)])
    return found


@pytest.mark.thorough
def test_compiled_layers_are_float8(pools: Pools) -> None:
    eager, with_compile, exact = pools("gloo", 1).run(compiled)[0]
    assert with_compile == pytest.approx(eager, rel=1e-12)
    assert eager != pytest.approx(exact, rel=1e-6)


def refused_here(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="precision=fp8 computes on a GPU, but the model is on the cpu; use"):
        parallelize(TASK.model, "dp=1", loss=TASK.loss, optimizer=TASK.optimizer, precision="fp8,least=16")


def test_a_cpu_is_refused(pools: Pools) -> None:
    pools("gloo", 1).run(refused_here)


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UsageError, match=r"compute capability 8.9 or more, but A100 has 8.0"):
        float8.require_float8(torch.device("cuda"))
