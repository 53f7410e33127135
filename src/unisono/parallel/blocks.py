"""The blocks of a model: its repeated layers, between which it can be cut.

Most deep models are a few layers, then many alike, then a few more: an embedding, N transformer blocks, a head. The
pipeline cuts between blocks, and context parallelism shards the sequence inside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from unisono.errors import UsageError


@dataclass(frozen=True)
class Blocks:
    path: str  # of the list that holds them: "transformer.h"
    modules: tuple[nn.Module, ...]

    def name(self, number: int) -> str:
        return f"{self.path}.{number}" if self.path else str(number)


_MEND = "give the pipeline an nn.Sequential or a list of LayerSpec instead"


def find_blocks(model: nn.Module, mend: str = _MEND) -> Blocks:
    """The longest list of modules of one class in the model; of several as long, the one with most parameters.

    A list inside a block of another (its experts, say) is a part of that block, however long it is. `mend` tells the
    user what to do where there are none.
    """
    found = [
        Blocks(path, tuple(module.children()))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _is_repeated(module)
    ]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of one class); "
            f"{mend}"
        )
    outermost = [each for each in found if not any(_is_inside(each, other) for other in found)]
    return max(outermost, key=lambda blocks: (len(blocks.modules), _weight(blocks)))


def _is_inside(inner: Blocks, outer: Blocks) -> bool:
    return inner.path != outer.path and f"{inner.path}.".startswith(f"{outer.path}." if outer.path else "")


def _is_repeated(module: nn.Module) -> bool:
    children = list(module.children())
    return len(children) > 1 and len({type(child) for child in children}) == 1 and _weight_of(module) > 0


def _weight(blocks: Blocks) -> int:
    return sum(_weight_of(module) for module in blocks.modules)


def _weight_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
