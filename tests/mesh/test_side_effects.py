"""Models that keep tensors beyond a call, in every place that Python offers, are run on trial before they train."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.mesh.deferred_init.deferred_model import defer_init
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import parallelize
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
WIDTH = 8

_TABLES: dict[int, torch.Tensor] = {}
_SPACE = types.SimpleNamespace(table=None)
_table: torch.Tensor | None = None
made_once: list[str] = []


def table(n: int) -> torch.Tensor:
    return torch.linspace(0, 1, n)


@functools.lru_cache(maxsize=4)
def of_cache(n: int) -> tuple[torch.Tensor, int]:
    return table(n), n


@functools.cache
def of_unbounded_cache(n: int) -> torch.Tensor:
    return table(n)


@functools.cache
def registered() -> str:
    """What must not be made twice, and holds no tensors."""
    made_once.append("registered")
    return "registered"


def of_dict(n: int) -> torch.Tensor:
    if n not in _TABLES:
        _TABLES[n] = table(n)
    return _TABLES[n]


def of_global(n: int) -> torch.Tensor:
    global _table
    if _table is None:
        _table = table(n)
    return _table


def of_default(n: int, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return known.setdefault(n, table(n))


def of_namespace(n: int) -> torch.Tensor:
    if _SPACE.table is None:
        _SPACE.table = table(n)
    return _SPACE.table


def closing() -> Callable[[int], torch.Tensor]:
    known: list[torch.Tensor] = []
    first: torch.Tensor | None = None

    def of_closure(n: int) -> torch.Tensor:
        nonlocal first
        if first is None:
            first = table(n)
            known.append(first)
        return known[0]

    return of_closure


of_closure = closing()


class Holder:
    kept: torch.Tensor | None = None
    is_ready = False

    @classmethod
    def of_class(cls, n: int) -> torch.Tensor:
        if not cls.is_ready:
            cls.kept, cls.is_ready = table(n), True
        assert cls.kept is not None
        return cls.kept

    @staticmethod
    @torch.no_grad()
    def of_decorated(n: int) -> torch.Tensor:
        return of_unbounded_cache(n)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def of_method(self, n: int) -> torch.Tensor:
        return table(n)


HOLDER = Holder()
WAYS: dict[str, Callable[[int], Any]] = {
    "cache": of_cache,
    "unbounded cache": of_unbounded_cache,
    "dict": of_dict,
    "global": of_global,
    "default": of_default,
    "namespace": of_namespace,
    "closure": of_closure,
    "class": Holder.of_class,
    "decorated": Holder.of_decorated,
    "method": HOLDER.of_method,
}


class Keeping(nn.Module):
    """Scales by a table that is kept somewhere."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.fc = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        registered()
        kept = WAYS[self.way](WIDTH)
        kept = kept[0] if isinstance(kept, tuple) else kept
        return x + self.fc(x) * kept.to(x.dtype)


class Calls(nn.Module):
    """Scales by how often any module of the class was called."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mine = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Calls.count += 1
        self.mine += 1
        return x + self.fc(x) * (Calls.count + self.mine)


def forget() -> None:
    global _table
    _table, _SPACE.table, Holder.kept, Holder.is_ready, Calls.count = None, None, None, False, 0
    _TABLES.clear()
    of_default.__defaults__[0].clear()  # type: ignore[index]
    for cell in of_closure.__closure__ or ():
        cell.cell_contents = [] if isinstance(cell.cell_contents, list) else None
    for cache in (of_cache, of_unbounded_cache, registered, Holder.of_method):
        cache.cache_clear()


def task_with(block: Callable[[], nn.Module]) -> Task:
    def batch(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)

    return Task(
        model=lambda: nn.Sequential(block(), block()),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=batch,
    )


def _first_step_of(comm: Communicator, way: str, plan: str) -> str:
    """With nothing kept from before: the plan is tried first, and then the plain model."""
    forget()
    verdict = verify_here(comm, task_with(lambda: Keeping(way)), Plan.parse(plan), steps=2)
    return "" if verdict.equivalent else str(verdict)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_keeps_is_not_of_a_trial(pools: Pools, way: str) -> None:
    for plan in ("dp=2", "pp=2,microbatches=2", "dp=2,zero=3"):
        assert pools("gloo", 2).run(_first_step_of, way, plan) == ["", ""], plan


def _counting(comm: Communicator) -> tuple[int, list[int]]:
    forget()
    task = task_with(Calls)
    trainer = parallelize(task.model, "dp=2", loss=task.loss, optimizer=task.optimizer, example=task.batch(0))
    trainer.step(task.batch(0))
    return Calls.count, [block.mine for block in trainer.model.children()]


def test_counters_count_steps_only(pools: Pools) -> None:
    assert pools("gloo", 2).run(_counting) == [(2, [1, 1])] * 2


@pytest.mark.parametrize("way", WAYS)
def test_state_is_restored(way: str) -> None:
    forget()
    model = Keeping(way)
    with no_side_effects(model), torch.device("meta"):
        assert model.to("meta")(torch.ones(1, WIDTH)).is_meta
    kept = WAYS[way](WIDTH)
    assert not (kept[0] if isinstance(kept, tuple) else kept).is_meta


def test_a_cache_without_tensors_keeps_its_entries() -> None:
    forget()
    made_once.clear()
    for _ in range(2):
        with no_side_effects(registered):
            registered()
    assert registered.cache_info().currsize == 1


def test_random_numbers_and_defaults_are_restored() -> None:
    def draw() -> None:
        random.random()
        torch.rand(3)
        torch.set_default_dtype(torch.float64)

    before = random.getstate(), torch.get_rng_state()
    with no_side_effects(draw):
        draw()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_default_dtype() == torch.float32


def test_inner_blocks_restore_what_outer_ones_recorded() -> None:
    forget()
    with no_side_effects(of_dict):
        with no_side_effects(of_dict):
            of_dict(3)
        assert not _TABLES
        of_dict(3)
    assert not _TABLES


def test_a_constructor_that_keeps_tensors_is_built_from_a_clean_state() -> None:
    class Built(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", of_cache(WIDTH)[0].clone())

    forget()
    deferred = defer_init(Built, 0)
    assert not deferred.is_deferred  # the cache holds a tensor that is none of the model's
    assert not of_cache(WIDTH)[0].is_meta
    assert torch.equal(deferred.model.table, table(WIDTH))


def test_modules_that_name_each_other_are_followed_once() -> None:
    one, other = types.ModuleType("one"), types.ModuleType("other")
    source = "def use(): return one.other.one.kept\nkept = []"
    for module in (one, other):
        module.__dict__.update(one=one, other=other)
        exec(source, module.__dict__)
    with no_side_effects(one.use):
        other.kept.append(1)
        one.use().append(2)
    assert one.use() == other.kept == []


_OWN: list[Any] = [torch.Generator(), random.Random(3), numpy.random.default_rng(3), numpy.random.RandomState(3)]


def _drawn() -> list[float]:
    generator, python, new, old = _OWN
    return [torch.rand(1, generator=generator).item(), python.random(), new.random(), old.random_sample()]


def test_generators_that_code_reaches_are_as_before() -> None:
    with no_side_effects(_drawn):
        first = _drawn()
        assert _drawn() != first
    assert _drawn() == first
