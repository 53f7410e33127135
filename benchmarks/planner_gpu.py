"""Does the planner know what one GPU of a big job needs and takes?

    python benchmarks/planner_gpu.py [--json out.json] [--hardware here.toml]

Eleven settings, each one rank of a job of 8 to 64 devices, executed on this GPU with communication simulated (the other
ranks are not there: shapes, memory and computing are real). Predicted peak memory against the allocator's peak (within
5%), and the time of a step by the cost model alone, for machines that are not here, against the measured (within 30%;
a job on this machine replays steps instead). Without --hardware the GPU is measured first. Takes some minutes; needs no
package beyond unisono's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import unisono as uni
from unisono.plan.hardware.spec import Hardware, Link
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.plan.plan import Plan
from unisono.planner.measure.machine import measure
from unisono.planner.planner import Planner
from unisono.simulate.dry_run import run_here

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import Config, large_gpt

MEMORY, TIME = 0.05, 0.3
MEDIUM = Config(vocabulary=32768, context=1024, width=2048, heads=16, layers=12)
WIDE = Config(vocabulary=32768, context=2048, width=4096, heads=32, layers=6)


@dataclass(frozen=True)
class Setting:
    name: str
    config: Config
    batch: int
    plan: str
    dtype: str = "bfloat16"
    precision: str = "fp32"

    def task(self) -> uni.Task:
        task = large_gpt(self.name, self.config, self.batch, getattr(torch, self.dtype))
        return replace(task, precision=self.precision)


SETTINGS = (
    Setting("medium", MEDIUM, 64, "dp=8"),
    Setting("medium-selective", MEDIUM, 64, "dp=8,recompute=selective"),
    Setting("medium-zero1", MEDIUM, 64, "dp=8,zero=1,microbatches=2"),
    Setting("medium-zero3-full", MEDIUM, 256, "dp=16,zero=3,recompute=full"),
    Setting("medium-float32", MEDIUM, 32, "dp=8,zero=2,recompute=full", "float32"),
    Setting("wide-tp-sp", WIDE, 32, "dp=4,tp=4,sp,zero=1"),
    Setting("wide-microbatches", WIDE, 64, "dp=8,tp=2,zero=1,microbatches=4"),
    Setting("autocast", MEDIUM, 64, "dp=8", "float32", "bf16"),
    Setting("autocast-zero3", MEDIUM, 64, "dp=8,zero=3", "float32", "bf16"),
    Setting("autocast-tp-full", WIDE, 32, "dp=4,tp=4,sp,zero=1,recompute=full", "float32", "bf16"),
    Setting("compile", MEDIUM, 64, "dp=8,compile", "float32", "bf16"),
)


def judge(setting: Setting, hardware: Hardware) -> dict[str, Any]:
    plan, task = Plan.parse(setting.plan), setting.task()
    planner = Planner(task, hardware)
    # Messages are simulated: they take no time, so none is predicted.
    silent = replace(hardware, intra_node=Link(1e18, 0.0), inter_node=Link(1e18, 0.0))
    planner.hardware = silent
    expected = planner.search(plan.world).judged(plan)
    began = time.perf_counter()
    found = run_here(task, plan, rank=0, steps=9)
    return {
        "setting": asdict(setting),
        "predicted_memory": expected.footprint.total,
        "memory_parts": expected.footprint.parts(),
        "measured_memory": found.peak,
        "memory_error": expected.footprint.total / found.peak - 1,
        "predicted_state": expected.footprint.parameters + expected.footprint.optimizer,
        "measured_state": found.state,
        "predicted_seconds": expected.seconds,
        "parts": asdict(expected.duration),
        "measured_seconds": found.seconds,
        "time_error": expected.seconds / found.seconds - 1,
        "took": time.perf_counter() - began,
    }


def usual(visits: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several processes: a host that launches is quicker in some than in others, whatever the GPU does."""
    seconds = sorted(each["measured_seconds"] for each in visits)
    middle = statistics.median(seconds)
    error = visits[0]["predicted_seconds"] / middle - 1
    return visits[0] | {"measured_seconds": middle, "spread": (seconds[0], seconds[-1]), "time_error": error}


def this_gpu() -> Hardware:
    """The figures of this GPU; communication does not matter here."""
    hardware = replace(measure(), devices_per_node=8)
    print(write_hardware(hardware))
    return hardware


def show(results: list[dict[str, Any]]) -> None:
    table = Table("setting", "plan", "memory predicted", "measured", "error", "step predicted", "measured", "error")
    for each in results:
        table.add_row(
            each["setting"]["name"],
            each["setting"]["plan"],
            f"{each['predicted_memory'] / 2**30:.2f} GiB",
            f"{each['measured_memory'] / 2**30:.2f} GiB",
            f"{each['memory_error']:+.1%}",
            f"{each['predicted_seconds'] * 1e3:.1f} ms",
            f"{each['measured_seconds'] * 1e3:.1f} ms ({each['spread'][0] * 1e3:.1f} to {each['spread'][1] * 1e3:.1f})",
            f"{each['time_error']:+.1%}",
        )
    Console(highlight=False, width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--only", default="", help="settings, by name")
    parser.add_argument("--visits", type=int, default=3, help="processes that measure a setting")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    hardware = read_hardware(chosen.hardware) if chosen.hardware else this_gpu()
    wanted = [each for each in SETTINGS if not chosen.only or each.name in chosen.only.split(",")]
    # Each in a process of its own: what one leaves behind on the GPU would count for the next.
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=apart, max_tasks_per_child=1) as processes:
        visits = [list(processes.map(judge, wanted, [hardware] * len(wanted))) for _ in range(chosen.visits)]
    results = [usual(list(of_setting)) for of_setting in zip(*visits, strict=True)]
    show(results)
    if chosen.json is not None:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        chosen.json.write_text(json.dumps({**machine, "results": results}, indent=1) + "\n")
    heavy = [each["setting"]["name"] for each in results if abs(each["memory_error"]) > MEMORY]
    wrong = [each["setting"]["name"] for each in results if abs(each["time_error"]) > TIME]
    print(f"memory more than {MEMORY:.0%} off: {', '.join(heavy) or 'none'}")
    print(f"time more than {TIME:.0%} off: {', '.join(wrong) or 'none'}")
    return 1 if heavy or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
