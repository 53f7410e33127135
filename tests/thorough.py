"""Which cases `make test` leaves to `make test-all` (pytest --all), which CI runs.

Some tests try one claim on many models, plans or signals, and take most of the time: of these, `make test` runs the
first cases only. Tests that make a claim of their own are not here. What is marked `thorough` is left out, too.
"""

from __future__ import annotations

from collections import Counter

import pytest

FEW: dict[str, int] = {}  # a test, and how many of its cases `make test` runs


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    seen: Counter[str] = Counter()
    found = []
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        seen[name] += 1
        if item.get_closest_marker("thorough") or seen[name] > FEW.get(name, seen[name]):
            found.append(item)
    return found


def unknown(items: list[pytest.Item]) -> list[str]:
    """Names in FEW that are no tests: for a run of all files."""
    return sorted(FEW.keys() - {item.nodeid.partition("[")[0].removeprefix("tests/") for item in items})
