"""Whether a word has an odd number of bits, inside kernels."""

from __future__ import annotations

from typing import Any

from numba.core import types

from unisono.quantum.kernels.vector import intrinsic


@intrinsic
def parity(typing: Any, word: Any) -> Any:
    """1 for an odd number of bits, else 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(builder.ctpop(args[0]), args[0].type(1))

    return types.int64(types.int64), generate
