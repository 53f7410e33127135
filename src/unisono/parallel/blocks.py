"""The blocks of a model: its repeated layers, between which it can be split.

Most deep models are a few layers, then many alike, then a few more: an embedding, N transformer blocks, a head. The
pipeline is split between blocks, and context parallelism shards the sequence inside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from unisono.errors import UnisonoError, UsageError
from unisono.parallel.layout import full_numel


@dataclass(frozen=True)
class Blocks:
    path: str  # of the list that holds them: "transformer.h"
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...] = ()  # of blocks that are in no list: their own

    def name(self, number: int) -> str:
        if self.names:
            return self.names[number]
        return f"{self.path}.{number}" if self.path else str(number)

    def holders(self, model: nn.Module) -> list[tuple[dict[str, nn.Module | None], str]]:
        """Where each block stands in the model: the holder's modules, and the block's key among them."""
        if not self.names:
            holder = model.get_submodule(self.path)._modules
            return [(holder, key) for key in holder]
        split = [name.rpartition(".") for name in self.names]
        return [(model.get_submodule(parent)._modules, key) for parent, _, key in split]


def layers_of(model: nn.Module) -> Blocks | None:
    """For a model without a list of blocks: those of its own children that have parameters, if there are several. They
    are taken to run once each in that order, which a pipeline finds out when it runs the model once."""
    named = [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
    if len(named) < 2:
        return None
    return Blocks("", tuple(child for _, child in named), tuple(name for name, _ in named))


_FIX = "give the pipeline an nn.Sequential or a list of LayerSpec instead"


def find_blocks(model: nn.Module, fix: str = _FIX) -> Blocks:
    """The longest list of modules of one class in the model; of several as long, the one with most parameters.

    A list inside a block of another (its experts, for example) is a part of that block, however long it is. `fix` gives
    the user what to do where there are none.
    """
    found = _lists(model)
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of one class); "
            f"{fix}"
        )
    return max(_outermost(found), key=lambda blocks: (len(blocks.modules), _weight(blocks)))


def find_output_blocks(model: nn.Module, fix: str = _FIX) -> Blocks:
    """As `find_blocks`; of an encoder and a decoder, the decoder's, through which the sequence of the outputs runs."""
    blocks = find_blocks(model, fix)
    names = blocks.path.split(".")
    if "encoder" not in names:
        return blocks
    index = names.index("encoder")
    beside = [
        each for each in _outermost(_lists(model)) if each.path.split(".")[: index + 1] == [*names[:index], "decoder"]
    ]
    return max(beside, key=lambda blocks: (len(blocks.modules), _weight(blocks)), default=blocks)


def outermost_lists(model: nn.Module) -> list[Blocks]:
    """All lists of repeated blocks that are not inside a block of another."""
    return _outermost(_lists(model))


def _lists(model: nn.Module) -> list[Blocks]:
    return [
        Blocks(path, tuple(module.children()))
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _is_repeated(module)
    ]


def _outermost(found: list[Blocks]) -> list[Blocks]:
    return [each for each in found if not any(_is_inside(each, other) for other in found)]


def not_called(blocks: Blocks, model: nn.Module, word: str) -> UsageError:
    """Of a plan with cp or sp, where the forward passes the blocks by."""
    return UsageError(
        f"{word} gives a rank some of the tokens from the first block of a model to its last, but "
        f"{type(model).__name__} does not call {blocks.name(0)} to {blocks.name(len(blocks.modules) - 1)} as modules, "
        f"in that order; let its forward call them, not their parts, or use a plan without {word}"
    )


def _is_inside(inner: Blocks, outer: Blocks) -> bool:
    return inner.path != outer.path and f"{inner.path}.".startswith(f"{outer.path}." if outer.path else "")


def _is_repeated(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        len(children) > 1
        and len({type(child) for child in children}) == 1
        and not any(map(is_container, children))
        and _weight_of(module) > 0
    )


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, as nn.ModuleList does: it has no forward, so it never runs itself."""
    return type(module).forward is nn.Module.forward


def _weight(blocks: Blocks) -> int:
    return sum(_weight_of(module) for module in blocks.modules)


def _weight_of(module: nn.Module) -> int:
    return sum(map(full_numel, module.parameters()))


@contextlib.contextmanager
def some_of_the_tokens(what: str, length: int | None, remedy: str) -> Iterator[None]:
    """In the block of `with`, a module runs on this rank's tokens; UsageError where it fails."""
    try:
        yield
    except (UnisonoError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        raise UsageError(
            f"{what} fails where this rank has some of the {length} tokens ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); if it runs on the full sequence, {remedy}"
        ) from error
