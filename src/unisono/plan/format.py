"""Amounts in words."""

from __future__ import annotations

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(B|[KMGT]i?B)")


def parse_bytes(text: str) -> float | None:
    """Of "80GiB" or "1.5 GB"; None where it is no amount above 0."""
    found = _BYTES.fullmatch(text.strip())
    if found is None or not float(found[1]):
        return None
    base = 1024 if "i" in found[2] else 1000
    return float(found[1]) * base ** "BKMGT".index(found[2][0])


def format_bytes(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def shortfall(needs: float, has: float, digits: int = 0) -> str:
    """needs 91 GiB of 80; with more digits where fewer would tell no difference."""
    power = 0
    while power < len(_UNITS) - 1 and has >= 1000 * 1024**power:
        power += 1
    scale = 1024**power
    while digits < 6 and f"{needs / scale:.{digits}f}" == f"{has / scale:.{digits}f}":
        digits += 1
    return f"needs {needs / scale:.{digits}f} {_UNITS[power]} of {has / scale:.{digits}f}"


def format_seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.3g} us" if value >= 1e-8 else "0 us"


def format_count(number: float) -> str:
    for unit in ("", " thousand", " million", " billion"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} trillion"
