"""paddle.base: core.Graph and framework.IrGraph, with which programs are drawn."""

from __future__ import annotations

from unisono.compat.paddle.base import core as core
from unisono.compat.paddle.base import framework as framework
from unisono.compat.paddle.paddle_names import missing_names

__getattr__ = missing_names(__name__)
