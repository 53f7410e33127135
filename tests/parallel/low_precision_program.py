"""Run by test_low_precision_gpu.py on two ranks that share a GPU: plans agree in half precision and in float8."""

from __future__ import annotations

import torch

import unisono as uni
from tests.parallel.test_low_precision import Net, batch, token_loss
from unisono.parallel.apply import parallelize

PLANS = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "tp=2,sp,zero=1")


def losses(plan: str, precision: str, dtype: torch.dtype | None, lr: float = 1e-3) -> list[float]:
    torch.manual_seed(3)
    model = Net(64).to("cuda", dtype)
    on_gpu = [tuple(each.cuda() for each in batch(0))] * 4  # one batch, which four steps learn
    trainer = parallelize(
        model, plan, loss=token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=lr), precision=precision,
        example=on_gpu[0],
    )  # fmt: skip
    return [float(trainer.step(each)) for each in on_gpu]


def main() -> None:
    comm = uni.init()
    bf16, untrained = losses("dp=2", "bf16", None), losses("dp=2", "bf16", None, lr=0.0)
    assert abs(bf16[-1] / untrained[-1] - 1) > 5e-2, (bf16, untrained)  # else the comparisons below show nothing
    for precision, dtype, close in (
        ("bf16", None, 1e-2),
        ("bf16", torch.bfloat16, 1e-2),
        ("bf16,master=none", torch.bfloat16, 1e-2),
        ("fp8,least=64", None, 2e-2),
        ("fp8,least=64,reduce=bf16", torch.bfloat16, 2e-2),
    ):
        for plan in PLANS:
            found = losses(plan, precision, dtype)
            off = max(abs(mine / theirs - 1) for mine, theirs in zip(found, bf16, strict=True))
            assert off < close, (plan, precision, dtype, found, bf16)
            if comm.rank == 0:
                print(f"{precision} {plan}: within {off:.0e} of bf16")


if __name__ == "__main__":
    main()
