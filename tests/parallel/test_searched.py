"""tp without rules, for models that show none: the graph is searched, and the result is that of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.equivalence import unnamed
from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.parallel.tensor.tensor_parallel import fitting_rules, styles_of
from unisono.verify.float64 import Float64Mode


def test_layers_are_split_where_little_travels() -> None:
    model = unnamed.Tower()
    with pytest.raises(UsageError, match="none can be inferred from its blocks"):
        styles_of(model, 2)
    rules = fitting_rules(model, 2, None, unnamed.tower.batch(0))
    assert rules is not None
    assert (rules["alpha"], rules["beta"]) == ("column", "row")  # nothing is communicated in between
    assert (rules["gamma"], rules["tilt"], rules["delta"]) == ("column", "channels", "row")
    assert {"alpha", "beta", "gamma", "tilt", "delta", "odd"} == set(rules)
    assert fitting_rules(model, 5, None, unnamed.tower.batch(0)) is None  # no layer that five ranks divide
    assert fitting_rules(nn.Linear(4, 4), 2, None, None) is None  # nothing to search with
    with pytest.raises(UsageError, match=r"the model is one Linear.*wrap it: nn.Sequential\(layer\)"):
        fitting_rules(nn.Linear(4, 4), 2, None, (torch.randn(4, 4), torch.randn(4, 4)))


@pytest.mark.parametrize(("task", "plan"), [("tower", "tp=2"), ("looker", "tp=2"), ("looker", "dp=2,tp=2,zero=1")])
def test_what_is_found_gives_the_result_of_one_device(
    task: str, plan: str, pools: Callable[[str, int], RankPool]
) -> None:
    verdict = pools("gloo", 4 if "dp" in plan else 2).run(prove, "unnamed", task, plan)[0]
    assert verdict.equivalent, verdict


class Rounding(unnamed.Tower):
    """Computes in float32 on its way, whatever it is in, and draws, also when it does not train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.float() * 1.1).to(x.dtype)) + torch.rand(len(x), 1) * x.new_empty(3).normal_()


def test_rounding_and_draws_are_no_reason_to_split_nothing() -> None:
    inputs = torch.randn(512, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with Float64Mode(torch.float64):  # which the simulated ranks, threads of their own, do not know of
        rules = fitting_rules(Rounding().double(), 2, None, (inputs, None))
    assert rules is not None
    assert (rules["alpha"], rules["beta"]) == ("column", "row")
