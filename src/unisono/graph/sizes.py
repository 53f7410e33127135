"""Bytes in words. Commands that never need torch use it too."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Bytes in words: 384 B, 1.5 KiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
