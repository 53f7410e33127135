"""tp without rules for language models as people write them: nearly all of them is sharded, the result is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.equivalence import handwritten
from tests.equivalence.proof import prove
from tests.ranks import RankPool
from unisono.parallel.cut_dims import cut_dims
from unisono.parallel.tensor import fitting_rules, require_shareable

Pools = Callable[[str, int], RankPool]
ALL = [name for name, value in vars(handwritten).items() if isinstance(value, handwritten.uni.Task)]


def sharded_fraction(name: str, ranks: int = 2) -> float:
    task = getattr(handwritten, name)
    model = task.model()
    styles = require_shareable(model, ranks, fitting_rules(model, ranks, None, task.batch(0)))
    sharded = cut_dims(model, styles)
    parameters = dict(model.named_parameters())
    return sum(parameters[name].numel() for name in parameters if name in sharded) / sum(
        map(torch.numel, parameters.values())
    )


@pytest.mark.parametrize("name", ALL)
def test_nearly_all_parameters_are_sharded(name: str) -> None:
    assert sharded_fraction(name) > 0.9


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sp"])
def test_the_result_is_that_of_one_device(pools: Pools, name: str, plan: str) -> None:
    verdict = pools("gloo", 2).run(prove, "handwritten", name, plan)[0]
    assert verdict.equivalent, verdict
