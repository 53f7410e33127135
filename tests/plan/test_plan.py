from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.plan.plan import Plan

FULL = "dp=2,tp=2,pp=2,zero=1,sp,recompute=selective,microbatches=8,schedule=interleaved,chunks=2"


def test_a_plan_is_read_and_written_back() -> None:
    plan = Plan.parse("dp=2,tp=2,pp=2,zero=1,sp,recompute=selective,microbatches=8,schedule=1f1b")
    assert plan == Plan(dp=2, tp=2, pp=2, zero=1, sequence=True, recompute="selective", microbatches=8, schedule="1f1b")
    for text in (
        FULL,
        "dp=4",
        "dp=8,ep=4",
        "cp=2,context=ulysses",
        "recompute=*.mlp+*.attention",
        "dp=2,recompute=attention",
        "dp=2,recompute=auto:12GiB",
        "dp=2,zero=3,offload",
        "dp=8,zero=2,shard=4",
    ):
        assert Plan.parse(str(Plan.parse(text))) == Plan.parse(text)
    assert str(Plan.parse(FULL)) == FULL
    assert Plan.parse("") == Plan()


def test_lists_are_kept_as_values() -> None:
    plan = Plan(pp=2, boundaries=[0, 2], recompute=["*.mlp", "*.attention"])
    assert plan == Plan.parse(str(plan)) == Plan(pp=2, boundaries=(0, 2), recompute=("*.mlp", "*.attention"))
    assert len({plan, Plan.parse(str(plan))}) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recompute": None}, "recompute=None; expected none, selective, attention, full, auto:12GiB, or a list"),
        ({"recompute": []}, "expected a list of module patterns"),
        ({"recompute": "auto"}, "recompute=auto; expected the memory that a rank may need: recompute=auto:12GiB"),
        ({"recompute": "auto:12"}, "recompute=auto:12; expected the memory that a rank may need"),
        ({"recompute": "auto:0GiB"}, "expected the memory that a rank may need"),
        ({"recompute": [3]}, "expected a list of module patterns"),
        ({"pp": 2, "boundaries": 3}, "boundaries=3; expected a list of the first block"),
        ({"zero": True}, "zero=True; expected 0, 1, 2 or 3"),
        ({"tp": 2, "sequence": "yes"}, "sequence='yes'; expected True or False"),
    ],
)
def test_fields_of_another_kind_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan(**fields)


def test_the_mesh_of_a_plan() -> None:
    plan = Plan.parse("dp=4,ep=2,tp=2,pp=3,cp=5")
    assert plan.world == 120
    assert plan.shape == (3, 1, 2, 2, 5, 2)
    assert Plan.parse("dp=8,zero=3,shard=4,tp=2").shape == (1, 2, 4, 1, 1, 2)
    assert plan.fit(120) is plan


def test_names_of_other_frameworks() -> None:
    for name in ("gpipe", "GPipe", "F-then-B", "FThenB"):
        assert Plan.parse(f"pp=2,microbatches=2,schedule={name}") == Plan(pp=2, microbatches=2, schedule="f-then-b")
    assert Plan(schedule="1F1B") == Plan(schedule="pipedream-flush") == Plan()
    stages = [Plan.parse(f"dp=2,zero={name}").zero for name in ("os", "os_g", "p_g_os", "SHARD_GRAD_OP", "FULL_SHARD")]
    assert stages == [1, 2, 3, 2, 3]
    assert Plan(dp=2, zero="os_g") == Plan(dp=2, zero=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=2,qp=3", "unknown key 'qp'; known are dp, tp, pp"),
        ("dp=2,microbatch=4", r"unknown key 'microbatch' \(did you mean microbatches\?\); known are dp"),
        ("dp=2,dp=3", "dp is given twice"),
        ("dp=two", "dp=two; expected a whole number"),
        ("dp", "dp needs a value"),
        ("dp=", "dp needs a value"),
        ("dp=0", "at least 1"),
        ("tp=-1", "at least 1"),
        ("zero=4", "expected 0, 1, 2 or 3"),
        ("sp=maybe,tp=2", "is a flag"),
        ("sp", "but tp=1"),
        ("dp=3,ep=2", "ep=2 does not divide dp=3"),
        ("context=spiral", "expected one of ring, ulysses"),
        ("schedule=gpip", "did you mean f-then-b\\? expected one of naive"),
        ("pp=2,schedule=pipedream", "keeps .stashes. the weights .* use 1f1b"),
        ("dp=2,zero=p_g", "expected a whole number"),
        ("offload", "give zero=1, 2 or 3"),
        ("pp=2,chunks=2", "one stage a rank"),
        ("dp=4,shard=2", "zero=0; give zero=1, 2 or 3"),
        ("dp=4,zero=1,shard=3", "a divisor of dp"),
        ("dp=4,zero=1,shard=1", "at least 2"),
        ("dp=4,ep=2,zero=1,shard=2", "shard with ep"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "world", "words"),
    [
        ("dp=3,tp=2", 8, r"plan dp=3,tp=2 needs 6 ranks \(dp=3·tp=2\), but 8 are running; use dp=4 or start 6"),
        ("dp=2,tp=3", 8, "start 6"),
        ("dp=4,zero=1,shard=4", 6, "start 4"),
        ("dp=4,zero=1,shard=2", 6, "use dp=6 or start 4"),
        ("", 2, "needs 1 ranks"),
    ],
)
def test_a_plan_that_does_not_fit_says_what_would(text: str, world: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan.parse(text).fit(world)
