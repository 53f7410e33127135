"""The names that `import unisono as uni` gives."""

from __future__ import annotations

import pytest

import unisono as uni


def test_every_name_is_there() -> None:
    for name in uni.__all__:
        assert getattr(uni, name) is not None
    assert uni.nn.MoE is not None
    assert uni.nn.ColumnParallelLinear is not None
    assert set(uni.__all__) <= set(dir(uni))


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        uni.paralelize  # noqa: B018
