"""Bytes in words. Commands that never need torch use it too."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}


def size_of(text: str) -> int | None:
    """The bytes of a text such as 512, 64MiB or 1.5 GB; None where it is no size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?|)B?", text.strip())
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def size_text(count: int) -> str:
    """Bytes in words: 384 B, 1.5 KiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
