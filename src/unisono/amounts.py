"""Amounts in words, the same wherever they are shown: bytes, seconds, rates, counts and ranks. It needs no torch.

Units are chosen by the amount, unless the caller names one: for a column, say, whose rows are to be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

MIB, GIB = 1 << 20, 1 << 30

_LISTED = 8  # ranks, or ranges of ranks, that are written out
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_PREFIXES = {
    f"{letter}{i}": base**power for i, base in (("", 1000), ("i", 1024)) for power, letter in enumerate("KMGTP", 1)
}
_PREFIXES[""] = 1
_AMOUNT = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+) ?([KMGTP]i?|)([A-Za-z/]*)")


def parse_amount(text: str, *units: str) -> float | None:
    """Of "80 GiB", "1.5GB" or "2e12 FLOP/s", where the unit is one of these; None where it is no finite amount."""
    found = _AMOUNT.fullmatch(text.strip())
    value = math.inf if found is None or found[3] not in units else float(found[1]) * _PREFIXES[found[2]]
    return value if math.isfinite(value) else None


def parse_bytes(text: str) -> float | None:
    """Of "80GiB" or "1.5 GB"; None where it is no amount above 0."""
    return parse_amount(text, "B") or None


def format_bytes(size: float, unit: str | None = None, digits: int = 1) -> str:
    """384 B, 1.5 KiB."""
    if unit is None and size >= 1024 ** len(_BYTES):
        return f"2^{int(size).bit_length() - 1} B"
    unit = unit or _bytes_unit(size)
    return f"{size / 1024 ** _BYTES.index(unit):.{0 if unit == 'B' else digits}f} {unit}"


def shortfall(needs: float, has: float, digits: int = 0) -> str:
    """needs 91 GiB of 80; with more digits where fewer would tell no difference."""
    unit = _bytes_unit(has)
    scale = 1024 ** _BYTES.index(unit)
    while digits < 6 and f"{needs / scale:.{digits}f}" == f"{has / scale:.{digits}f}":
        digits += 1
    return f"needs {needs / scale:.{digits}f} {unit} of {has / scale:.{digits}f}"


def format_seconds(seconds: float, unit: str | None = None, digits: int | None = None) -> str:
    """2.31 s, 14.2 ms, 1.42 ms, 8.1 µs."""
    unit = unit or next((name for name, least in _TIMES.items() if seconds >= least), "µs")
    value = seconds / _TIMES[unit]
    if digits is None:
        digits = 2 if unit == "s" or (unit == "ms" and value < 10) else 1
    return f"{value:.{digits}f} {unit}"


def format_clock(seconds: float) -> str:
    """Of what lasts long, for a line that is rewritten: 1:04:09."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def format_count(number: float) -> str:
    """175 billion."""
    for unit in ("", " thousand", " million", " billion"):
        if number < 999.5:  # which three digits round to 1000
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} trillion"


def format_ranks(ranks: Sequence[int], separator: str = ",") -> str:
    """The ranks of a group; more than 8 as ranges: `0-1023`, `644-700 step 8`, `0-3,16-19,...,1008-1011`."""
    if len(ranks) <= _LISTED:
        return separator.join(map(str, ranks))
    ranges = _ranges(ranks)
    texts = [_range_text(each) for each in ranges]
    shifts = {(after.start - before.start, len(before), before.step) for before, after in pairwise(ranges)}
    if len(ranges) > _LISTED and len(shifts) == 1 and len(ranges[-1]) == len(ranges[0]):
        texts = [*texts[:2], "...", texts[-1]]
    return separator.join(texts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """rank 3, ranks 0,1."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def _bytes_unit(size: float) -> str:
    return next((unit for power, unit in enumerate(_BYTES, 1) if size < 1024**power), _BYTES[-1])


def _ranges(ranks: Sequence[int]) -> list[range]:
    """Consecutive ranks with a constant distance as ranges; ranks one apart first, so that 0,1,2,8,9,10 are two."""
    found: list[range] = []
    step = 1 if any(after - before == 1 for before, after in pairwise(ranks)) else max(1, ranks[1] - ranks[0])
    for rank in ranks:
        if found and rank == found[-1].stop:
            found[-1] = range(found[-1].start, rank + step, step)
        else:
            found.append(range(rank, rank + step, step))
    return found


def _range_text(ranks: range) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    return f"{ranks[0]}-{ranks[-1]}" + (f" step {ranks.step}" if ranks.step > 1 else "")
