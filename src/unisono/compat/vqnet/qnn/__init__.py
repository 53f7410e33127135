"""VQNet's quantum networks."""

from __future__ import annotations

from unisono.compat.vqnet.missing import missing_names
from unisono.compat.vqnet.qnn import vqc as vqc

__getattr__ = missing_names(__name__, globals())
