"""Whole numbers, in the many forms in which programs give them."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(given: Any) -> int | None:
    """The int that a number, an array or a tensor of one element is; None of what is no whole number, as a bool is."""
    if isinstance(given, bool):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None
