"""VQNet's quantum networks."""

from __future__ import annotations

from unisono.compat.vqnet.qnn import vqc as vqc
