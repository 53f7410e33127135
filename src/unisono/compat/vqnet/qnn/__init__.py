"""VQNet's quantum networks."""

from __future__ import annotations

from unisono.compat.vqnet.qnn import vqc as vqc
from unisono.compat.vqnet.vqnet_names import missing_names

__getattr__ = missing_names(__name__)
