"""What a distributed program costs: its training step against the eager forms of the same layout, on one GPT.

    python benchmarks/program.py [--only single,dp,tp] [--rounds 15] [--small] [--json out.json]

single: one rank, against a plain loop in torch. dp and tp: two ranks, against uni.parallelize (dp=2; tp=2 with the
layout of Megatron, which the program gets by marks on weights). Rounds and ratios are those of overhead.py. With
--small the model is so small that calls count for more than arithmetic. Ratios: the program's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import unisono as uni

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import contestants, overhead
from benchmarks.contestants import Config, Contestant

SMALL = Config(vocabulary=64, context=32, width=32, heads=4, layers=4, batch=8)
ALLOWED = 1.0  # times the eager form
COLUMN = ("q", "k", "v", "fc1")
ROW = ("out", "fc2")


def program(config: Config, mesh: uni.Mesh, is_sharded: bool) -> Contestant:
    model = contestants.build(config)
    if is_sharded:
        for name, parameter in model.named_parameters():
            layer, _, kind = name.rpartition(".")
            layer = layer.rpartition(".")[2]
            if layer in COLUMN:
                uni.mark(model, name, mesh, [uni.Shard(0)])
            elif layer in ROW and kind == "weight":
                uni.mark(model, name, mesh, [uni.Shard(1)])
            elif parameter.dim() > 1:
                uni.mark(model, name, mesh, [uni.Replicate()])
    made = uni.to_static(
        model,
        example=contestants.batch(config, 0),
        mesh=mesh,
        loss=contestants.loss,
        optimizer=contestants.optimizer(config),
    )
    return Contestant(made.step, "whole")


def plain(config: Config) -> Contestant:
    model = contestants.build(config)
    optimizer = contestants.optimizer(config)(model.parameters())

    def step(batch: contestants.Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = contestants.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Contestant(step, "whole")


def entrants(group: str, config: Config) -> dict[str, Contestant]:
    """The program first: ratios are to it."""
    if group == "single":
        return {"unisono program": program(config, uni.Mesh((1,), ("dp",)), False), "plain loop": plain(config)}
    mesh = uni.Mesh((2,), ("dp" if group == "dp" else "mp",))
    return {
        "unisono program": program(config, mesh, group == "tp"),
        "eager, parallelize": contestants.unisono(f"{group}=2")(config),
    }


def compete(group: str, config: Config, rounds: int) -> dict[str, Any]:
    """On each rank."""
    torch.set_num_threads(1)
    uni.init("gloo")
    racing = entrants(group, config)
    times, values = overhead.alternated(racing, config, rounds, torch.device("cpu"))
    losses = {name: [float(value) for value in kept if value is not None] for name, kept in values.items()}
    uni.shutdown()
    return {"times": times, "losses": losses, "absent": {}}


def complaints(results: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for group, result in results.items():
        if not result["loss_gap"] <= overhead.TOLERANCE:
            found.append(f"{group}: VOID, the losses differ by {result['loss_gap']:.1e}")
        for name, entry in result["contestants"].items():
            if name != "unisono program" and entry["unisono_over_it"] > ALLOWED:
                found.append(f"{group}: the program takes {entry['unisono_over_it']:.3f} times {name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="single,dp,tp", help="groups to run, of single, dp, tp")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="a model so small that calls count most")
    parser.add_argument("--json", type=Path, help="write the figures there")
    chosen = parser.parse_args()
    config = SMALL if chosen.small else Config()
    results = {}
    for group in chosen.only.split(","):
        ranks = uni.spawn(compete, 1 if group == "single" else 2, "gloo", (group, config, chosen.rounds))
        results[group] = overhead.summary(overhead.slowest(ranks), ranks[0]["losses"], {})
    overhead.show(results, chosen.rounds)
    reported = complaints(results)
    print("\n".join(reported) or "as required: no slower than the eager form")
    if chosen.json is not None:
        report = {"config": asdict(config), "rounds": chosen.rounds, "torch": torch.__version__, "results": results}
        chosen.json.write_text(json.dumps({**report, "complaints": reported}, indent=1) + "\n")
    return 1 if reported else 0


if __name__ == "__main__":
    sys.exit(main())
