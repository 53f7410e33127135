"""Classes of unisono whose objects are plain data where their fields are.

A module without torch: plans and the command do not import it.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
RECORDS: dict[str, type] = {}


def plain_record(cls: type[T]) -> type[T]:
    """Decorates a dataclass or named tuple; an object of it is read by calling it with its fields."""
    assert cls.__name__ not in RECORDS, f"two records are called {cls.__name__}"
    RECORDS[cls.__name__] = cls
    return cls
