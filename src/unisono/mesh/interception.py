"""A block in which every operation on tensors passes through one method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Interception(TorchDispatchMode):
    """In a `with` block of it, `operate` is called in the place of every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes seconds, to keep away from it

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.operate(func, args, kwargs or {})

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives; here, what it gives by itself."""
        return func(*args, **kwargs)
