"""What unisono costs: a training step under a plan against raw torch, DeepSpeed and Accelerate, on one GPT.

    python benchmarks/overhead.py [--only dp,zero3,tp,pp] [--rounds 21] [--json out.json]
    python benchmarks/overhead.py --single [--json out.json]        one rank, on the GPU if there is one

Two ranks on this machine. In every round each contestant of a group takes a step on the same batch, one right after
the other, in a turning order, so what disturbs the machine disturbs all alike; a ratio is the median, over rounds, of
the ratio within a round. The losses of all contestants of a group must agree, else the comparison is void. DeepSpeed
and Accelerate take part where they are installed (pip install -e '.[peers]').
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import unisono as uni

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import contestants
from benchmarks.contestants import Batch, Config, Contestant

WARM_UP = 3
TOLERANCE = 1e-4  # relative, between the losses of contestants: float32's rounding, amplified by the steps before
ALLOWED = 1.05  # times raw torch
ALLOWED_COMPILED = 1.02  # times raw torch with compiled blocks and a compiled loss
ALLOWED_SINGLE = 1.02  # times a plain loop, on a GPU
GPU_CONFIG = Config(vocabulary=8192, context=512, width=1024, heads=16, layers=8, batch=16)

Times = dict[str, list[float]]
Losses = dict[str, list[float]]


def alternated(
    entrants: dict[str, Contestant], config: Config, rounds: int, device: torch.device
) -> tuple[Times, dict[str, list[torch.Tensor | None]]]:
    """Everybody's times and losses; the order turns by one every round."""
    times: Times = {name: [] for name in entrants}
    losses: dict[str, list[torch.Tensor | None]] = {name: [] for name in entrants}
    names = list(entrants)
    for number in range(-WARM_UP, rounds):
        step_batch = contestants.batch(config, number + WARM_UP, device)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds, value = timed(entrants[name], step_batch, device)
            losses[name].append(value)
            if number >= 0:
                times[name].append(seconds)
    return times, losses


def timed(entrant: Contestant, step_batch: Batch, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Seconds of a step, from a barrier until this rank is done."""
    settle(device)
    start = time.perf_counter()
    value = entrant.step(step_batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def full_losses(entrant: Contestant, values: list[torch.Tensor | None]) -> list[float]:
    """The losses of global batches, on every rank."""
    mine = torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    if entrant.loss_is == "share":
        return torch.stack(gathered).mean(0).tolist()
    return gathered[-1].tolist()


def compete(group: str, config: Config, rounds: int) -> dict[str, Any]:
    """On each rank: build a group's contestants and let them take turns."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's and DeepSpeed's own, about torch's new names
    uni.init("gloo")
    entrants: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    for name, make in contestants.groups(config)[group].items():
        package = contestants.missing(name)
        if package is not None:
            absent[name] = f"{package} is not installed"
        else:
            entrants[name] = make(config)
    times, values = alternated(entrants, config, rounds, torch.device("cpu"))
    losses = {name: full_losses(entrants[name], values[name]) for name in entrants}
    uni.shutdown()
    return {"times": times, "losses": losses, "absent": absent}


def slowest(results: list[dict[str, Any]]) -> Times:
    """A step takes as long as its slowest rank."""
    names = results[0]["times"]
    return {name: [max(pair) for pair in zip(*(r["times"][name] for r in results), strict=True)] for name in names}


def summary(times: Times, losses: Losses, absent: dict[str, str]) -> dict[str, Any]:
    first = next(iter(times))
    entries = {}
    for name, seconds in times.items():
        ratios = [mine / theirs for mine, theirs in zip(times[first], seconds, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        entries[name] = {
            "median_ms": statistics.median(seconds) * 1e3,
            "least_ms": min(seconds) * 1e3,
            "unisono_over_it": statistics.median(ratios),
            "middle_half": [low, high],
            "last_loss": losses[name][-1],
        }
    return {"contestants": entries, "absent": absent, "loss_gap": loss_gap(losses)}


def loss_gap(losses: Losses) -> float:
    """The greatest relative difference between contestants, over all steps."""
    steps = zip(*losses.values(), strict=True)
    return max((max(values) - min(values)) / max(abs(value) for value in values) for values in steps)


def verdict(group: str, found: dict[str, Any], is_gpu: bool) -> list[str]:
    """What is not as it should be."""
    if not found["loss_gap"] <= TOLERANCE:
        return [f"{group}: VOID, the contestants' losses differ by {found['loss_gap']:.1e}, more than {TOLERANCE:g}"]
    complaints = []
    for name, entry in found["contestants"].items():
        if name.startswith("torch"):
            most = ALLOWED_COMPILED if "compiled" in name else ALLOWED
        elif name.startswith("plain"):
            most = ALLOWED_SINGLE if is_gpu else ALLOWED
        else:
            most = 1.0
        if entry["unisono_over_it"] > most and not name.startswith("unisono"):
            complaints.append(f"{group}: unisono takes {entry['unisono_over_it']:.3f} times {name}; allowed: {most:g}")
    return complaints


def show(results: dict[str, dict[str, Any]], rounds: int) -> None:
    table = Table(title=f"a training step; ratios are medians of {rounds} rounds", title_justify="left")
    for column in ("", "contestant", "median ms", "least ms", "unisono / it", "middle half", "last loss"):
        table.add_column(column, justify="left" if column in ("", "contestant") else "right")
    for group, found in results.items():
        for name, entry in found["contestants"].items():
            low, high = entry["middle_half"]
            is_own = name.startswith("unisono")
            table.add_row(
                group if is_own else "",
                name,
                f"{entry['median_ms']:.1f}",
                f"{entry['least_ms']:.1f}",
                "" if is_own else f"{entry['unisono_over_it']:.3f}",
                "" if is_own else f"{low:.3f} to {high:.3f}",
                f"{entry['last_loss']:.5f}",
            )
        for name, why in found["absent"].items():
            table.add_row("", name, "skipped:", why)
        table.add_section()
    Console(width=120).print(table)
    for group, found in results.items():
        print(f"{group}: losses agree to {found['loss_gap']:.1e}")


def run_single(config: Config, rounds: int, device: torch.device) -> dict[str, Any]:
    uni.init()
    entrants = contestants.single(device, config)
    times, values = alternated(entrants, config, rounds, device)
    losses = {name: [float(value) for value in kept if value is not None] for name, kept in values.items()}
    uni.shutdown()
    return summary(times, losses, {})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(contestants.groups(Config()))
    parser.add_argument("--only", default=",".join(known), help=f"groups to run, of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--single", action="store_true", help="one rank: unisono against a plain loop")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--batch", type=int, help="samples in a global batch")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for every contestant")
    parser.add_argument("--json", type=Path, help="write the figures there")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.only.split(",") if name not in known]
    if unknown or chosen.rounds < 2:
        parser.error(f"--only takes {', '.join(known)} and --rounds at least 2")
    return chosen


def main() -> int:
    chosen = arguments()
    is_gpu = chosen.single and torch.cuda.is_available()
    given = {key: value for key in ("width", "layers", "batch") if (value := getattr(chosen, key)) is not None}
    config = Config(**{**asdict(GPU_CONFIG if is_gpu else Config()), **given, "fused": chosen.fused})
    results: dict[str, dict[str, Any]] = {}
    if chosen.single:
        device = torch.device("cuda" if is_gpu else "cpu")
        results["single"] = run_single(config, chosen.rounds, device)
    else:
        for group in chosen.only.split(","):
            ranks = uni.spawn(compete, 2, "gloo", (group, config, chosen.rounds))
            results[group] = summary(slowest(ranks), ranks[0]["losses"], ranks[0]["absent"])
    show(results, chosen.rounds)
    complaints = [line for group, found in results.items() for line in verdict(group, found, is_gpu)]
    print("\n".join(complaints) or "as required: no more than allowed of any other")
    if chosen.json is not None:
        machine = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        }
        report = {"config": asdict(config), "rounds": chosen.rounds, **machine, "results": results}
        chosen.json.write_text(json.dumps({**report, "complaints": complaints}, indent=1) + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
