"""Patches of torch: nested, listed, undone; handlers in order; observers; and nothing left after unisono's commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # its import replaces torch.manual_seed, which is torch's own doing
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.equivalence import tasks
from tests.explain.tasks import with_twelve_rows
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import InternalError
from unisono.explain.plan_program import explained
from unisono.mesh.random.state import RandomState
from unisono.simulate.dry_run import run_here
from unisono.torch_patches import (
    Dispatcher,
    Patch,
    PatchSet,
    active_patches,
    attention,
    on_patched_call,
    original,
    patched,
)
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_a_patch_lasts_for_its_block_and_is_listed() -> None:
    own = F.relu
    with patched(F, "relu", twice, why="tests need it"):
        assert F.relu(torch.ones(1)).item() == 2
        assert original(F, "relu") is own
        assert [str(each) for each in active_patches()] == [
            "torch.nn.functional.relu: tests need it, until the end of a block"
        ]
    assert F.relu is own
    assert active_patches() == []


def test_attributes_that_a_class_inherits_are_inherited_again() -> None:
    assert "normal_" not in vars(torch.Tensor)
    with patched(torch.Tensor, "normal_", lambda self: self.fill_(3), why="tests need it"):
        assert torch.zeros(1).normal_().item() == 3
        assert original(torch.Tensor, "normal_") is torch.Tensor.__base__.normal_  # type: ignore[union-attr]
    assert "normal_" not in vars(torch.Tensor)


def test_leaving_out_of_order_is_an_internal_error() -> None:
    own = F.relu
    outer, inner = (PatchSet({(F, "relu"): twice}, why=why, until="the end of the test") for why in ("outer", "inner"))
    outer.enter()
    inner.enter()
    with pytest.raises(InternalError, match=r"relu: outer, until .* is removed out of order: .* is still there"):
        outer.leave()
    inner.leave()
    outer.leave()
    assert F.relu is own
    with pytest.raises(InternalError, match="it is not active"):
        outer.leave()


def test_a_shared_patch_is_removed_by_the_last_to_leave() -> None:
    own = F.relu
    shared = PatchSet({(F, "relu"): twice}, why="tests", until="the end of the test")
    shared.enter()
    shared.enter()
    shared.leave()
    assert F.relu is not own
    shared.leave()
    assert F.relu is own


def test_handlers_are_called_in_order_whatever_was_entered_first() -> None:
    calls: list[str] = []

    def handler(name: str) -> Any:
        def handle(rest: Any, x: torch.Tensor) -> Any:
            calls.append(name)
            return rest(x) + 1

        return handle

    dispatcher = Dispatcher(F, "relu", ("outer", "inner"), why="tests")
    dispatcher.innermost = handler("innermost")
    with dispatcher.handled("inner", handler("old")), dispatcher.handled("inner", handler("inner")):
        with dispatcher.handled("outer", handler("outer")):
            assert F.relu(torch.zeros(1)).item() == 3
        found: list[float] = []
        other = threading.Thread(target=lambda: found.append(F.relu(torch.zeros(1)).item()))
        other.start()
        other.join()
    assert calls == ["outer", "inner", "innermost", "innermost"]
    assert found == [1]
    assert F.relu(torch.zeros(1)).item() == 0


def test_attention_is_one_function_whatever_handles_it() -> None:
    own, q = F.scaled_dot_product_attention, torch.randn(1, 2, 3, 4)

    def doubled(rest: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * rest(*args, **kwargs)

    expected = own(q, q, q)
    with attention.handled("context parallelism", doubled):
        with RandomState(0), attention.handled("recomputation", doubled):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), 4 * expected)
            assert [each.name for each in active_patches()].count("scaled_dot_product_attention") == 1
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), 2 * expected)
    assert F.scaled_dot_product_attention is own


def test_observers_see_what_a_model_calls_and_not_what_unisono_makes_of_it() -> None:
    seen: list[tuple[Any, ...]] = []
    own = {name: getattr(F, name) for name in ("dropout", "rrelu", "scaled_dot_product_attention")}
    x = torch.randn(1, 2, 3, 4)
    model = torch.nn.Dropout(0.5)
    with RandomState(0), on_patched_call(lambda *call: seen.append(call)):
        y = model(x)
        F.rrelu(x, training=True)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        x.clone().normal_()
        torch.rand(3)
    assert [call[0] for call in seen] == [*own.values(), torch.Tensor.normal_, torch.rand]
    assert seen[0][1][0] is x
    assert seen[0][3] is y
    assert seen[2][2] == {"dropout_p": 0.5}
    with RandomState(0):
        model(x)
    assert len(seen) == 5


# ---- nothing is left -------------------------------------------------------------------------------------------------

_OWNERS = (
    *(torch, torch.Tensor, torch.nn.functional, torch.nn.utils, torch.nn.utils.clip_grad, dist, nn.Module),
    *(dist.distributed_c10d, torch.optim.Optimizer, torch.autograd.Function),
)
_DESCRIPTORS = (property, staticmethod, classmethod)


def attributes() -> dict[tuple[str, str], Any]:
    """Functions and classes of torch's modules and classes; not the state that torch itself keeps in variables."""
    found = {(str(owner), name): value for owner in _OWNERS for name, value in vars(owner).items()}
    return {key: value for key, value in found.items() if callable(value) or isinstance(value, _DESCRIPTORS)}


def uses_everything(comm: Communicator) -> None:
    task, plans = with_twelve_rows(tasks.short), ("dp=2,zero=1", "cp=2,recompute=selective", "tp=2")
    x, y = task.batch(0)
    before, keys, others = attributes(), torch._C._dispatch_tls_local_include_set(), active_patches()
    for plan in plans:
        check = "auto" if plan == plans[0] else "off"
        trainer = uni.parallelize(
            task.model, plan, loss=task.loss, optimizer=task.optimizer, example=(x, y), check=check
        )
        trainer.step((x, y))
        task.loss(trainer.model(x), y).backward()
        trainer.optimizer.step()
        trainer.evaluate((x, y))
        assert verify_here(comm, task, uni.Plan.parse(plan), 1).equivalent
    require_unchanged(before, keys, others)


def require_unchanged(before: dict[tuple[str, str], Any], keys: Any, others: list[Patch]) -> None:
    """others: patches by trainers of other tests, that have gradients and will not step."""
    assert active_patches() == others
    after = attributes()
    assert {key for key in before if after.get(key) is not before[key]} == set()
    assert {key for key in after.keys() - before.keys() if not key[1].startswith("__")} == set()
    assert torch._C._dispatch_tls_local_include_set() == keys


@pytest.mark.thorough
def test_torch_is_as_it_was_after_all_that_unisono_does(pools: Pools) -> None:
    pools("gloo", 2).run(uses_everything)


def test_torch_is_as_it_was_after_a_dry_run_and_explain() -> None:
    before, keys = attributes(), torch._C._dispatch_tls_local_include_set()
    run_here(tasks.short, uni.Plan.parse("dp=2,cp=2"), 1, steps=1)
    explained(tasks.short, uni.Plan.parse("dp=2,tp=2"))
    require_unchanged(before, keys, [])
