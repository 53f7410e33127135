"""Hugging Face architectures under plans: every cell is equivalent, or refused in one sentence that says what to do.

    make test-all                                            # the whole matrix, after all other tests
    python -m pytest tests/matrix -k "gemma or beit"         # some rows
    MATRIX_PAGE=docs/models.md python -m pytest tests/matrix   # and write the table

`make test` leaves it out: it takes some minutes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix.architectures import ARCHITECTURES, task
from tests.matrix.plans import plans_of
from tests.matrix.table import CELLS
from tests.pairs import Pairs
from tests.ranks import RemoteError
from unisono.verify.training_record import TrainingRecord

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
for _each in ARCHITECTURES.values():  # imported here, so that ranks, which are forked later, need not
    getattr(transformers, _each.model)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    with Pairs(timeout=120) as started:
        yield started


@functools.lru_cache(maxsize=1)  # the plans of an architecture come one after the other
def _reference(pairs: Pairs, name: str) -> TrainingRecord | None:
    try:
        return pairs.reference(task, name)
    except RemoteError:
        return None  # what then becomes of a plan is the plan's outcome


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in ARCHITECTURES for plan in plans_of(name)])
def test_the_result_of_one_device_or_a_refusal(pairs: Pairs, name: str, plan: str) -> None:
    outcome = CELLS[name, plan] = pairs.outcome(task, name, plan, _reference(pairs, name))
    if log := os.environ.get("MATRIX_LOG"):
        with Path(log).open("a") as file:
            file.write(json.dumps([name, plan, outcome.kind, outcome.text]) + "\n")
    if outcome.is_fault:
        pytest.fail(f"{name} under {plan}: {outcome.kind}\n{outcome.text}", pytrace=False)
