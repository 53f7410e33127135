"""Attention in parts against attention at once, in the plain form and in torch's fused kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unisono.parallel.context import partial_attention
from unisono.parallel.context.partial_attention import AttentionRules, MergedAttention, attend, attend_backward

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, splits: list[int], **rules: Any
) -> list[torch.Tensor]:
    """Output and gradients when the keys come in shards of these lengths."""
    rule = AttentionRules(1 / math.sqrt(q.shape[-1]), **rules)
    full = MergedAttention(q, v.shape[-1])
    everything = slice(0, q.shape[2])
    for key, value in zip(k.split(splits, 2), v.split(splits, 2), strict=True):
        full.merge(everything, *attend(q, key, value, rule))
    out = full.out.to(q.dtype)
    shares = [
        attend_backward(grad, q, key, value, out, full.lse, rule)
        for key, value in zip(k.split(splits, 2), v.split(splits, 2), strict=True)
    ]
    dq = sum(share[0].to(full.out.dtype) for share in shares)
    return [out, dq, torch.cat([share[1] for share in shares], 2), torch.cat([share[2] for share in shares], 2)]


def at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, causal: bool) -> list[torch.Tensor]:
    q, k, v = (x.detach().double().clone().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(grad.double())
    return [out, q.grad, k.grad, v.grad]  # type: ignore[list-item]


def tensors(dtype: torch.dtype, device: str, value_width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 12, 16), (2, 12, 16), (2, 12, value_width), (4, 12, value_width)]
    return [torch.randn(2, *size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]


def assert_like(found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("fused", [True, False])
def test_parts(monkeypatch: pytest.MonkeyPatch, fused: bool, dtype: torch.dtype, device: str) -> None:
    if not fused:
        monkeypatch.setattr(partial_attention, "_flash_of", lambda *_: None)
        monkeypatch.setattr(partial_attention, "_CHUNK", 200)  # several chunks of queries
    q, k, v, grad = tensors(dtype, device)
    assert_like(in_parts(q, k, v, grad, [5, 4, 3]), at_once(q, k, v, grad, False), dtype)
    assert_like(in_parts(q, k, v, grad, [12], causal=True), at_once(q, k, v, grad, True), dtype)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_values_of_another_width(device: str) -> None:
    q, k, v, grad = tensors(torch.float64, device, value_width=6)
    assert_like(in_parts(q, k, v, grad, [7, 5]), at_once(q, k, v, grad, False), torch.float64)


def test_fused_where_it_can_be() -> None:
    q, k, v, _ = tensors(torch.float64, "cpu")
    assert partial_attention._flash_of(q, k, v, AttentionRules(1.0)) is not None
    assert partial_attention._flash_of(q, k, v, AttentionRules(1.0, bias=lambda rows: q)) is None
    assert partial_attention._flash_of(q, k, v[..., :3], AttentionRules(1.0)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fused_on_gpu() -> None:
    q, k, v, _ = tensors(torch.bfloat16, "cuda")
    assert partial_attention._flash_of(q, k, v, AttentionRules(1.0)) is partial_attention._CUDA


def test_rows_that_see_nothing() -> None:
    q, k, v, grad = tensors(torch.float64, "cpu")
    hidden = torch.zeros(12, 12, dtype=torch.float64)
    hidden[3] = -torch.inf
    found = in_parts(q, k, v, grad, [12], bias=lambda rows: hidden[rows])
    assert torch.equal(found[0][:, :, 3], torch.zeros_like(found[0][:, :, 3]))
    assert all(torch.isfinite(tensor).all() for tensor in found)
