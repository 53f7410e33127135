"""A snapshot finds out whatever happens to a tensor."""

from __future__ import annotations

import pytest
import torch

from unisono.comm import snapshot


def test_this_build_of_torch_is_understood() -> None:
    assert snapshot._finds_changes()


@pytest.mark.parametrize("kind", [snapshot.Snapshot, snapshot.Questions])
def test_changes_are_found_and_uses_are_not(kind: type[snapshot.Snapshot] | type[snapshot.Questions]) -> None:
    x = torch.ones(4, 6)
    taken = kind(x)
    x.add_(1)
    x.copy_(torch.zeros(4, 6))
    assert taken.is_true(x)
    x.t_()
    assert not taken.is_true(x)
    x.t_()
    assert taken.is_true(x)
    x.data = torch.ones(4, 6)
    assert not taken.is_true(x)


def test_where_the_records_say_too_little_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_TENSOR", 8)
    assert not snapshot._finds_changes.__wrapped__()
