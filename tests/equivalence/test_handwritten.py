"""tp without rules for language models as people write them: nearly all of them is sharded, the result is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import unisono as uni
from tests.equivalence import handwritten
from tests.equivalence.proof import prove, refused
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.parallel.rules.sharded_dims import sharded_dims
from unisono.parallel.tensor.tensor_parallel import fitting_rules, require_shareable

Pools = Callable[[str, int], RankPool]
ALL = [name for name, value in vars(handwritten).items() if isinstance(value, uni.Task)]


def sharded_fraction(name: str, ranks: int = 2) -> float:
    task = getattr(handwritten, name)
    model = task.model()
    styles = require_shareable(model, ranks, fitting_rules(model, ranks, None, task.batch(0)))
    sharded = sharded_dims(model, styles)
    parameters = dict(model.named_parameters())
    return sum(parameters[name].numel() for name in parameters if name in sharded) / sum(
        map(torch.numel, parameters.values())
    )


@pytest.mark.parametrize("name", ALL)
def test_nearly_all_parameters_are_sharded(name: str) -> None:
    assert sharded_fraction(name) > 0.9


CASES = [(name, plan) for name in ALL for plan in ("tp=2", "tp=2,sp") if (name, plan) != ("one_forward", "tp=2,sp")]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_the_result_is_that_of_one_device(pools: Pools, name: str, plan: str) -> None:
    verdict = pools("gloo", 2).run(prove, "handwritten", name, plan)[0]
    assert verdict.equivalent, verdict


def test_a_block_that_reads_its_length_off_a_part_of_the_sequence_is_refused(pools: Pools) -> None:
    for message in pools("gloo", 2).run(refused, "handwritten", "one_forward", "tp=2,sp"):
        assert "the model fails where it has some of the tokens" in message


@pytest.mark.parametrize("name", ["olmo2", "phi3", "glm4", "deepseek_v3", "roberta", "modernbert", "gpt_neox"])
def test_models_of_hugging_face_under_sequence_parallelism(pools: Pools, name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    verdict = pools("gloo", 2).run(prove, "foreign" if name == "deepseek_v3" else "sequences", name, "tp=2,sp")[0]
    assert verdict.equivalent, verdict


def reported_coverage(comm: Communicator, rules: dict[str, str] | None) -> tuple[str, list[str]]:
    task = handwritten.minus_one
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = uni.parallelize(
            task.model,
            "tp=2",
            loss=task.loss,
            optimizer=task.optimizer,
            example=task.batch(0),
            rules=rules,
            check="off",
        )
    return trainer.coverage, [str(each.message) for each in caught if each.category is UserWarning]


def test_how_much_is_sharded_is_reported(pools: Pools) -> None:
    expected = (
        "tp=2 shards 97% of the parameters and 100% of the FLOPs; largest module left replicated: mesta "
        "(384 parameters): nn.Embedding whose rows are positions"
    )
    assert pools("gloo", 2).run(reported_coverage, None) == [(expected, [])] * 2


def test_little_is_a_warning_on_the_first_rank(pools: Pools) -> None:
    (line, reported), (_, elsewhere) = pools("gloo", 2).run(reported_coverage, {"golova": "column_gather"})
    assert line.startswith(
        "tp=2 shards 7% of the parameters and 7% of the FLOPs; largest module left replicated: bloki"
    )
    assert reported == [f"{line}; pass rules that shard more, or use less tp"]
    assert not elsewhere
