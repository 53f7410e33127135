"""Steps of small models as a CUDA graph, beside eager ones, on one GPU.

    python benchmarks/cuda_graph.py [--rounds 5] [--dropout 0.1]

A GPT (width 256, 4 layers, 8 samples of 128 tokens, AdamW, gradients clipped) by a plain loop, by unisono eagerly and
with `cudagraph=True`, float32 (TF32) and bfloat16; rows take turns, medians of rounds of 50 steps are shown.
Gate: at least twice as fast as the eager step of unisono.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import unisono as uni
from examples.gpt import GPT, Config

CONFIG = Config(vocabulary=256, context=128, width=256, heads=8, layers=4)
BATCH, STEPS, GATE = 8, 50, 2.0


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (BATCH, CONFIG.context + 1), generator=torch.Generator().manual_seed(0)).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG).cuda()


def plain(precision: str) -> Callable[[], torch.Tensor]:
    net, (inputs, targets) = model(), batch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            value = loss(net(inputs), targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    return step


def planned(precision: str, plan: str = "dp=1", *, cudagraph: bool) -> Callable[[], torch.Tensor]:
    given = batch()
    trainer = uni.parallelize(
        model(),
        plan,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip=1.0,
        precision=precision,
        cudagraph=cudagraph,
    )
    return lambda: trainer.step(given)


def seconds(step: Callable[[], torch.Tensor]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description="Steps as a CUDA graph, beside eager ones.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    global CONFIG
    CONFIG = replace(CONFIG, dropout=options.dropout)
    torch.set_float32_matmul_precision("high")
    failed = False
    for precision in ("fp32", "bf16"):
        rows = {
            "plain loop": plain(precision),
            "unisono": planned(precision, cudagraph=False),
            "unisono compile": planned(precision, "compile", cudagraph=False),
            "unisono cudagraph": planned(precision, cudagraph=True),
            "unisono compile, cudagraph": planned(precision, "compile", cudagraph=True),
        }
        losses = {name: [float(step()) for _ in range(6)][-1] for name, step in rows.items()}
        times: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(options.rounds):
            for name, step in rows.items():
                times[name].append(seconds(step))
        middle = {name: statistics.median(each) for name, each in times.items()}
        for name, each in times.items():
            spread = (max(each) - min(each)) / middle[name]
            print(
                f"{precision} {name:27} {1e3 * middle[name]:7.3f} ms a step (spread {spread:.0%})"
                f"  {middle['unisono'] / middle[name]:5.2f} times eager  loss of step 6 {losses[name]:.5f}",
                flush=True,
            )
        failed |= middle["unisono"] < GATE * middle["unisono cudagraph"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
