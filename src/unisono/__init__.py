"""unisono: many devices, one result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.launch.spawn import spawn as spawn

__version__ = "0.1.0"

# Loaded when first used: `import unisono` stays light. Name -> module.
_LAZY = {"spawn": "unisono.launch.spawn"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")
