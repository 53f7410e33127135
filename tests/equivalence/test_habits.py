"""Models with habits of their own under tensor parallelism: the result is that of one device, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import unisono as uni
from tests.equivalence import habits
from tests.equivalence.proof import prove, refused
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.parallel.tensor.tensor_parallel import fitting_rules, require_shareable

Pools = Callable[[str, int], RankPool]
ALL = [name for name, value in vars(habits).items() if isinstance(value, uni.Task)]
REFUSED = {
    ("folded_heads", "tp=2"): "which of its dims tp=2 shards is not known",
    ("folded_heads", "tp=2,sp"): "which of its dims tp=2 shards is not known",
    ("own_encoder_layer", "tp=2,sp"): "inside a block does not go with sequence parallelism",
    ("convolutions", "tp=2,sp"): "has none; leave sequence out",
    ("residual_net", "tp=2,sp"): "column of a convolution does not go with sequence parallelism; leave sp out",
    ("shared_blocks", "tp=2,sp"): "leave sp out",
    ("weights_used", "tp=2,sp"): "the model fails where it has some of the tokens",
    ("gated_by_input", "tp=2,sp"): "would give blocks.0.gate a shard of the sequence",
}
CASES = [(name, plan) for name in ALL for plan in ("tp=2", "tp=2,sp")]


@pytest.mark.parametrize(("name", "plan"), [case for case in CASES if case not in REFUSED])
def test_the_result_is_that_of_one_device(pools: Pools, name: str, plan: str) -> None:
    verdict = pools("gloo", 2).run(prove, "habits", name, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(
    "name",
    ["late_heads", "packed_dropout", "scaled_heads", "shared_blocks", "convolutions", "residual_net", "state_space"],
)
def test_the_result_is_that_of_one_device_with_data_parallelism(pools: Pools, name: str) -> None:
    verdict = pools("gloo", 4).run(prove, "habits", name, "dp=2,tp=2")[0]
    assert verdict.equivalent, verdict


def test_rules_are_proved_for_as_many_ranks_as_there_are(pools: Pools) -> None:
    verdict = pools("gloo", 4).run(prove, "habits", "heads_by_parity", "tp=4")[0]
    assert verdict.equivalent, verdict


def rules_of(name: str) -> dict[str, str]:
    task = getattr(habits, name)
    return dict(fitting_rules(task.model(), 2, None, task.batch(0)) or {})


def test_convolutions_are_sharded_by_channels() -> None:
    expected = {"widen": "column", "depthwise": "channels", "narrow": "row", "last": "column", "head": "row"}
    assert rules_of("convolutions") == expected


def test_norms_between_convolutions_are_sharded_by_channels() -> None:
    block = {"conv1": "column", "norm1": "channels", "conv2": "row"}
    assert {name.removeprefix("blocks.*."): rule for name, rule in rules_of("residual_net").items()}.items() >= (
        block.items()
    )


def test_a_rule_that_does_not_fit_a_norm_is_refused() -> None:
    task = habits.residual_net
    with pytest.raises(UsageError, match=r"the rule for blocks\.0\.norm1 is row, but it is a BatchNorm2d; expected"):
        require_shareable(task.model(), 2, {"blocks.0.norm1": "row"})
    with pytest.raises(UsageError, match=r"blocks\.1\.norm1 has 2 groups, which tp=3 does not divide"):
        require_shareable(task.model(), 3, {"blocks.1.norm1": "channels"})


def test_attention_whose_weights_nobody_uses_is_sharded_by_heads() -> None:
    assert rules_of("weights_ignored")["blocks.*.attention.o"] == "row"
    assert rules_of("weights_used").get("blocks.*.attention.o") != "row"


def test_a_state_space_model_is_sharded_by_channels() -> None:
    found = {name.removeprefix("blocks.*.mixer."): rule for name, rule in rules_of("state_space").items()}
    assert found.items() >= {
        "in_proj": "column:1+1", "conv": "channels", "x_proj": "row_sum", "dt_proj": "column_inside", "a": "channels",
        "d": "channels", "out_proj": "row",
    }.items()  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), REFUSED)
def test_what_cannot_be_right_is_refused(pools: Pools, name: str, plan: str) -> None:
    for message in pools("gloo", 2).run(refused, "habits", name, plan):
        assert REFUSED[name, plan] in message
