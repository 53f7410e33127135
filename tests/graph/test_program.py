"""Distributed programs give the result of one device: from marks, from the batch alone, and under any placements."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.graph.proof import prove, prove_by_chance
from tests.ranks import RankPool
from unisono.verify.mesh_program import ProgramSpec

Pools = Callable[[str, int], RankPool]

MESHES = {
    "quickstart": ["dp=2,mp=4,full"],
    "mlp": [
        "dp=2",
        "mp=2,full",
        "mp=2,search=exact,full",
        "mp=2,search=dynamic,full",
        "mp=2,search=recursive,full",
        "dp=2,zero=2",
    ],
    "gpt": ["a=2,b=2,search=recursive,full", "dp=2,mp=2,full,unpack", "mp=2,dp=2,full,zero=1", "dp=2,mp=2,full,zero=3"],
    "encoder": ["mp=2,full,unpack"],
}
CHANCE = [
    ("mlp", (2, 2), range(2)),
    ("mlp", (2, 2, 2), range(1)),
    ("gpt", (2, 2), range(1)),
    ("unpacked", (2, 2), range(1)),
    ("conv", (2,), range(2)),
]
if importlib.util.find_spec("transformers"):
    MESHES["llama"] = ["dp=2"]  # every option of its ops: test_models.py


@pytest.mark.parametrize("name", MESHES)
def test_the_result_of_one_device(pools: Pools, name: str) -> None:
    pool = pools("gloo", ProgramSpec.parse(MESHES[name][0]).world)
    for verdict in pool.run(prove, name, MESHES[name])[0]:
        assert verdict.equivalent, verdict


@pytest.mark.parametrize(("name", "shape", "seeds"), CHANCE)
def test_under_any_placements(pools: Pools, name: str, shape: tuple[int, ...], seeds: range) -> None:
    for verdict in pools("gloo", 2 ** len(shape)).run(prove_by_chance, name, shape, list(seeds))[0]:
        assert verdict.equivalent, verdict


def test_on_mpi_too(pools: Pools) -> None:
    for verdict in pools("mpi", 2).run(prove_by_chance, "mlp", (2,), [9])[0]:
        assert verdict.equivalent, verdict
