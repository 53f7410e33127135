"""What it costs that the host waits for the GPU in a step: fp16's overflows, and the counts of experts, on one GPU.

    python benchmarks/waiting_gpu.py [--rounds 5]

Each pair is the same step of unisono, once as it was (the host reads) and once as it is (the GPU decides): GPTs in
fp16, and residual mixtures of experts in bf16 by autocast. Rows take turns; medians of rounds of 20 steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import unisono as uni
from examples.gpt import GPT, Config
from unisono.parallel import trainer as trainers
from unisono.parallel.expert import expert as experts

STEPS, VOCABULARY = 20, 256


class Mixture(nn.Module):
    def __init__(self, width: int, count: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixtures = nn.ModuleList(uni.nn.MoE(width, 4 * width, experts=count) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def gpt(width: int, layers: int) -> nn.Module:
    return GPT(Config(vocabulary=VOCABULARY, context=1024, width=width, heads=width // 64, layers=layers))


CASES: list[tuple[str, Callable[[], nn.Module], str, tuple[int, int]]] = [
    ("fp16: GPT of width 256, 4 layers, 8 x 128 tokens", lambda: gpt(256, 4), "fp16", (8, 128)),
    ("fp16: GPT of width 1024, 12 layers, 8 x 512 tokens", lambda: gpt(1024, 12), "fp16", (8, 512)),
    ("8 experts of width 256, 4 layers, 8 x 128 tokens", lambda: Mixture(256, 8, 4), "bf16", (8, 128)),
    ("8 experts of width 1024, 4 layers, 8 x 1,024 tokens", lambda: Mixture(1024, 8, 4), "bf16", (8, 1024)),
    ("64 experts of width 1024, 4 layers, 8 x 1,024 tokens", lambda: Mixture(1024, 64, 4), "bf16", (8, 1024)),
]


@contextmanager
def reading() -> Iterator[None]:
    """In the block, the host reads."""
    before = trainers.can_be_skipped, experts.can_be_grouped
    trainers.can_be_skipped = experts.can_be_grouped = lambda *_: False  # type: ignore[assignment]
    try:
        yield
    finally:
        trainers.can_be_skipped, experts.can_be_grouped = before


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(make: Callable[[], nn.Module], precision: str, shape: tuple[int, int]) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(0)).cuda()
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    options: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "precision": precision, "clip": 1.0}
    trainer = uni.parallelize(make().cuda(), "dp=1", check="off", **options)
    return lambda: trainer.step(batch)


def seconds(step: Callable[[], torch.Tensor]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs that the host waits for the GPU.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, make, precision, shape in CASES:
        steps = [trained(make, precision, shape) for _ in range(2)]
        with reading():
            losses = [float(steps[0]()) for _ in range(6)]
        found = [float(steps[1]()) for _ in range(6)]
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            with reading():
                times[0].append(seconds(steps[0]))
            times[1].append(seconds(steps[1]))
        before, after = (statistics.median(each) for each in times)
        spread = max((max(each) - min(each)) / statistics.median(each) for each in times)
        print(
            f"{name:54} reads {1e3 * before:8.2f} ms, does not {1e3 * after:8.2f} ms a step: {before / after:.2f} times"
            f" (spread {spread:.0%}); losses of steps 1 {losses[0]:.5f}, {found[0]:.5f} and 6 {losses[-1]:.5f}, "
            f"{found[-1]:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
