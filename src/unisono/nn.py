"""Layers to build models with by hand."""

from __future__ import annotations

from unisono.parallel.expert import MoE as MoE

__all__ = ["MoE"]
