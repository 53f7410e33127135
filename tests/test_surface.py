"""The names that `import unisono as uni` gives."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_command_does_not_import_torch_before_it_is_needed() -> None:
    """It would cost every launch, and every word of help, two seconds."""
    asked = "import sys, unisono.cli; print('torch' in sys.modules)"
    reported = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert reported.stdout == "False\n"
