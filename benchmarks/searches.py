"""Searches for placements, compared: what they find, and how long they take.

    python benchmarks/searches.py [--models mlp,gpt,llama] [--time-limit 120] [--json out.json]

Each model is traced once; every search then gets the trace and a mesh of eight ranks, without marks, and all ops are to
be shared among all ranks. The step is that of the model of cost that `dynamic` and `exact` minimise
(graph/placement/problem.py), computed anew for what each search found. Search is processor time from the trace to the
assignment, one run, with nothing cached of the searches before. `exact` gets the time limit; where it finds nothing by
then, ratios are to the best that was found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.placement import cost, dp, ilp, recursive
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.problem import Problem
from unisono.mesh.mesh import Mesh
from unisono.mesh.route import find_route

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Config

from tests.graph import hugging_face


def mlp() -> Trace:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 512))
    return trace(model, (torch.zeros(256, 512), torch.zeros(256, 512)), F.mse_loss)


def convolutions() -> Trace:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 16 * 16, 256), nn.ReLU(), nn.Linear(256, 16),
    )  # fmt: skip
    return trace(model, (torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)), F.cross_entropy)


def gpt() -> Trace:
    """A block of the example's GPT."""
    tokens = torch.zeros(8, 64, dtype=torch.long)
    model = GPT(Config(width=256, heads=8, layers=1))
    return trace(model, (tokens, tokens), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))


def of_hugging_face(name: str) -> Trace:
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    wide |= {"num_key_value_heads": 8} if name == "llama" else {}
    return trace(hugging_face.model(name, **wide), hugging_face.batch(name, 8, 16), hugging_face.loss)


MODELS: dict[str, Callable[[], Trace]] = {
    "mlp": mlp,
    "convolutions": convolutions,
    "gpt": gpt,
    "llama": lambda: of_hugging_face("llama"),
    "bert": lambda: of_hugging_face("bert"),
}


@dataclass
class Found:
    model: str
    nodes: int
    mesh: tuple[int, ...]
    search: str
    cost: float | None  # seconds of a step by the model of cost
    search_seconds: float
    ratio: float | None = None


def compare(name: str, traced: Trace, shape: tuple[int, ...], time_limit: float) -> list[Found]:
    mesh = Mesh.describe(shape, tuple(f"axis{number}" for number in range(len(shape))))
    searches: dict[str, Callable[[], Assignment]] = {
        "recursive": lambda: recursive.recursive(traced, mesh, fully_use_devices=True),
        "dynamic": lambda: dp.dynamic(traced, mesh, fully_use_devices=True),
        "exact": lambda: ilp.exact(traced, mesh, fully_use_devices=True, time_limit=time_limit),
    }
    problem = Problem.of(traced, mesh, fully=False)
    made: list[Found] = []
    for search, run in searches.items():
        cost._edge.cache_clear()
        find_route.cache_clear()
        began = time.process_time()
        try:
            found = run()
        except UsageError:
            found = None
        spent = time.process_time() - began
        seconds = None if found is None else problem.seconds(_numbers(problem, found))
        made.append(Found(name, len(traced.graph.nodes), shape, search, seconds, spent))
    best = min(each.cost for each in made if each.cost is not None)
    exact = made[-1].cost
    for each in made:
        each.ratio = None if each.cost is None else each.cost / (exact or best)
    return made


def _numbers(problem: Problem, found: Assignment) -> dict[str, int]:
    return {
        name: next(i for i, choice in enumerate(choices) if choice.options == found.options[name])
        for name, choices in problem.choices.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default="8,2x4,2x2x2")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for exact")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "nodes", "mesh", "search", "step by the cost model", "to exact", "search")
    rows: list[Found] = []
    for name in given.models.split(","):
        traced = MODELS[name]()
        for mesh in given.meshes.split(","):
            for each in compare(name, traced, tuple(map(int, mesh.split("x"))), given.time_limit):
                rows.append(each)
                step = "none" if each.cost is None else f"{1e3 * each.cost:.4g} ms"
                ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
                table.add_row(name, str(each.nodes), mesh, each.search, step, ratio, f"{each.search_seconds:.2f} s")
            table.add_section()
    Console(width=110).print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in rows], indent=1))


if __name__ == "__main__":
    main()
