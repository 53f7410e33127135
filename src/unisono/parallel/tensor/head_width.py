"""Each head is on one of tp's ranks, unsplit. A model that counts its heads itself, and takes what is left for their
width, splits every head instead: `x.view(batch, tokens, self.heads, -1)` fits half the columns as well, and each
rank then computes attention of the wrong kind, in the right shape. So the first step compares: what attentions sum over
must be as wide as in the full model, which is run without values on the same inputs.

That run also gives the full shape of every call for random numbers, and with it along which dim ranks share them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.errors import UsageError
from unisono.mesh.global_index import Part
from unisono.mesh.random.draw import Draw
from unisono.mesh.random.state import Key, RandomState
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta
from unisono.parallel.meta.shapes import KnownShapes
from unisono.torch_compat import MODULE_CALL

# torch's own: when it is called, others may have replaced it.
_ATTENTION = F.scaled_dot_product_attention
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)

Tell = Callable[[int], object]


class HeadWidth:
    """Made of the full model, before it is sharded."""

    def __init__(self, full: nn.Module, ranks: int, products: bool) -> None:
        """products: whether attention that is written out with matmul counts too, if there is no other."""
        self._full: nn.Module | None = None
        with contextlib.suppress(Exception):  # a model with a layer that communicates cannot be copied
            self._full = meta_copy(full).eval()
        self._ranks, self._products = ranks, products

    @contextlib.contextmanager
    def required(self, inputs: Any) -> Iterator[None]:
        """In the block the model runs on these inputs, sharded; UsageError where an attention is of another width."""
        in_attention, in_products = self._full_widths(inputs)
        if in_attention:
            with _Widths(self._require(in_attention), _ignored):
                yield
        elif in_products and self._products:
            with _Widths(_ignored, self._require(in_products)):
                yield
        else:
            yield

    def _full_widths(self, inputs: Any) -> tuple[set[int], set[int]]:
        """Empty where the model cannot run without values."""
        if self._full is None:
            return set(), set()
        in_attention: set[int] = set()
        in_products: set[int] = set()
        can_run = False
        for training in (False, True):  # a model may leave tokens out in training
            self._full.train(training)
            with (
                contextlib.suppress(Exception),
                no_side_effects(self._full),
                torch.no_grad(),
                torch.device("meta"),
                KnownShapes(),
            ):
                with _Widths(in_attention.add, in_products.add):
                    call(self._full, to_meta(inputs))
                can_run = True
        self._full.eval()
        return (in_attention, in_products) if can_run else (set(), set())

    def drawn_shapes(self, inputs: Any) -> dict[Key, tuple[int, ...]] | None:
        """Shapes of the full model's calls for random numbers in training; None where it cannot run without values."""
        if self._full is None:
            return None
        shapes = _Shapes(self._full)
        self._full.train()
        try:
            with no_side_effects(self._full), torch.no_grad(), torch.device("meta"), KnownShapes(), shapes:
                call(self._full, to_meta(inputs))
            return shapes.found
        except Exception:  # a branch that depends on data, a size that is not known
            return None
        finally:
            self._full.eval()

    def _require(self, allowed: set[int]) -> Tell:
        def require(width: int) -> None:
            if width not in allowed:
                raise UsageError(
                    f"tp={self._ranks}: {_caller()} computes attention over {width} features of a head; in the full "
                    f"model it is {' or '.join(map(str, sorted(allowed)))}. tp has split heads, as the module "
                    'counts them itself; give it a rule "heads:NAME", NAME being the attribute that counts them, or '
                    "write the head's width in its view, and -1 for the number of heads"
                )

        return require


class _Shapes(RandomState):
    """Notes the calls of a model's modules for random numbers."""

    counts_meta = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.name_modules(model)
        self.found: dict[Key, tuple[int, ...]] = {}

    def draw(
        self,
        shape: Sequence[int],
        kind: str = "dropout",
        parts: Mapping[int, Part] | None = None,
        *,
        like: torch.Tensor | None = None,
        may_be_full: bool = False,
    ) -> Draw:
        site = self._site()
        key = (site, self._calls[site])
        self._calls[site] += 1
        self.found[key] = tuple(shape)
        return Draw((0, 0, *key), tuple(shape), {})


class _Widths(TorchFunctionMode):
    """Tells what attentions sum over, and what other products of four dimensions do."""

    def __init__(self, of_attention: Tell, of_product: Tell) -> None:
        super().__init__()
        self._of_attention, self._of_product = of_attention, of_product

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _ATTENTION:
            self._of_attention((args[0] if args else kwargs["query"]).shape[-1])
        elif function in _PRODUCTS and len(args) == 2 and args[0].dim() == args[1].dim() == 4:
            self._of_product(args[0].shape[-1])
        return function(*args, **kwargs)


def _ignored(width: int) -> None:
    pass


def _caller() -> str:
    """The module that computes, by its class."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back  # type: ignore[assignment]
    return "the model" if frame is None else type(frame.f_locals["self"]).__name__
