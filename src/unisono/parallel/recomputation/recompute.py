"""Recomputation: drop activations in the forward pass and compute them again in the backward pass.

    none        nothing
    selective   in every block, what is cheap to compute again: norms, activation functions, casts (selective.py)
    attention   attention's core, F.scaled_dot_product_attention: little work to repeat, and where it makes a matrix
                of queries by keys, most of the memory. Fused attention makes none, and then this only costs time
    full        every block of the model: about a third more work, and only one tensor a block is kept
    patterns    the modules whose names match, such as ("*.mlp", "encoder.*")

Attention, full and patterns run code again (torch.utils.checkpoint), from inputs that are kept. The second run must
give exactly what the first gave. Random numbers are drawn again as they were: torch's generators are put back, and a
RandomState knows a repeated draw by that. Modes that change what torch's functions do (a default device, a proof in
float64) are on again, which in a backward they are not otherwise. Buffers that a forward changes, such as the running
statistics of BatchNorm, change once: the second run works on copies.
So do attributes of modules, such as a counter. So does every run on a cache of keys and values that it is given, as
Hugging Face's models make one by default: the second would find there what the first has appended.

Modules are changed in place and keep their names, so recomputation composes with whatever else is done to them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from unisono.errors import UsageError
from unisono.mesh.autograd_collectives import require_eager
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import RandomState
from unisono.parallel.blocks import find_blocks
from unisono.parallel.context import sharded_attention
from unisono.parallel.context.sharded_attention import ShardedAttention
from unisono.parallel.recomputation.selective import Learned, run_selectively
from unisono.plan.plan import RECOMPUTE
from unisono.torch_compat import function_modes, transform_at_work
from unisono.torch_patches import attention

_MARK = "unisono_recomputed"
_TORCH_NAMES = frozenset(vars(nn.Module()))


def recompute(model: nn.Module, what: str | Sequence[str] = "full") -> nn.Module:
    """Recompute parts of the model in its backward pass: none, selective, attention, full, or module names with
    wildcards."""
    if what == "none":
        return model
    if what == "attention":
        return _wrap(model, partial(_with_core_recomputed, model.forward))
    if what == "selective":
        for module in _regions(model):
            _wrap(module, partial(_selective, Learned(), module.forward))
        return model
    for name in recomputed_modules(model, what):
        module = model.get_submodule(name)
        _wrap(module, partial(_recomputed, module, module.forward))
    return model


def recomputed_modules(model: nn.Module, what: str | Sequence[str]) -> list[str]:
    """The names of the modules that are recomputed as one segment: under "full", or by patterns."""
    if what == "full":
        blocks = find_blocks(model, "name the modules to recompute: recompute=[patterns]")
        return [blocks.name(number) for number in range(len(blocks.modules))]
    if isinstance(what, str):
        raise UsageError(f"recompute={what!r}; expected one of {', '.join(RECOMPUTE)}, or a list of module patterns")
    return _matching(model, what)


def runs_again(model: nn.Module) -> bool:
    """Whether the backward runs modules, or attention, a second time."""
    return any(vars(module).get(_MARK) == "again" for module in model.modules())


def _regions(model: nn.Module) -> list[nn.Module]:
    """The blocks; the full model where it has no list of them."""
    try:
        return list(dict.fromkeys(find_blocks(model).modules))
    except UsageError:
        return [model]


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The outermost modules that match: one inside another would only be run a third time."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(name for name, _ in list(model.named_modules())[1:9])
            raise UsageError(
                f"recompute: no module of {type(model).__name__} matches {pattern!r}; its modules are {known}, ..."
            )
        chosen |= dict.fromkeys(names)
    return [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]


def _wrap(module: nn.Module, forward: partial[Any]) -> nn.Module:
    if _MARK in vars(module):
        raise UsageError(f"recompute: a {type(module).__name__} would be recomputed twice; call recompute once")
    module.forward = wraps(module.forward)(forward)
    setattr(module, _MARK, "again" if forward.func is not _selective else "ops")
    return module


def _selective(learned: Learned, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or transform_at_work():
        return forward(*args, **kwargs)
    return run_selectively(learned, forward, *args, **kwargs)


def _recomputed(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return _checkpointed(module, partial(_with_own_caches, forward, **kwargs), *args)


def _with_own_caches(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if library := sys.modules.get("transformers.cache_utils"):
        kinds = (library.Cache, library.CacheLayerMixin)
        args = tuple(_twin(value, kinds) for value in args)
        kwargs = {name: _twin(value, kinds) for name, value in kwargs.items()}
    return forward(*args, **kwargs)


def _twin(value: Any, kinds: tuple[type, ...]) -> Any:
    """A cache as it is now, of the same tensors; anything else itself."""
    if not isinstance(value, kinds):
        return value
    twin = copy.copy(value)
    for name, held in vars(value).items():
        if isinstance(held, list):
            held = [_twin(each, kinds) for each in held]
        setattr(twin, name, dict(held) if isinstance(held, dict) else _twin(held, kinds))
    return twin


def _with_core_recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward in which attention is recomputed."""
    with attention.handled("recomputation", _recomputed_core):
        return forward(*args, **kwargs)


def _recomputed_core(attend: Callable[..., torch.Tensor], *tensors: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return attend(*tensors, **options)
    return _checkpointed(None, partial(attend, **options), *tensors)


def _checkpointed(module: nn.Module | None, function: Callable[..., Any], *args: Any) -> Any:
    for value in args:
        require_eager(value, "a recomputed module runs")
    held = () if module is None else module.parameters()
    again = _SecondRun(module, active_state(), sharded_attention.active(), function_modes())
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), again),
        # Without memory (simulate/), a tensor may report another device when it is computed again.
        determinism_check="none" if any(map(_is_meta, (*args, *held))) else "default",
    )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class _SecondRun:
    """With the first run's random numbers, modes and attention over sharded tokens, also where the backward is outside
    them, and on copied buffers.

    May be entered again: a backward in halves runs the region once for each half.
    """

    def __init__(
        self,
        module: nn.Module | None,
        state: RandomState | None,
        sharded: ShardedAttention | None,
        modes: Sequence[TorchFunctionMode],
    ) -> None:
        self._module = module
        self._around = [each for each in (state, sharded) if each is not None]
        self._modes = modes
        self._attributes = [
            (child, _attributes_of(child)) for child in (module.modules() if module is not None else ())
        ]

    def __enter__(self) -> None:
        active = function_modes()
        self._resumed = [mode for mode in self._modes if not any(mode is other for other in active)]
        for mode in self._resumed:
            TorchFunctionMode.__enter__(mode)  # what its own __enter__ does besides has been done, and not yet undone
        self._originals = [
            (child, name, buffer)
            for child in (self._module.modules() if self._module is not None else ())
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]
        for child, name, buffer in self._originals:
            child._buffers[name] = buffer.clone()
        self._changed = [(child, _attributes_of(child), before) for child, before in self._attributes]
        for child, now, before in self._changed:
            _set_attributes(child, now, before)
        self._entered = contextlib.ExitStack()
        for each in self._around:
            self._entered.enter_context(each)

    def __exit__(self, *reason: object) -> None:
        self._entered.close()
        # The originals are put back untouched, not written back: autograd may have saved them.
        for child, name, buffer in self._originals:
            child._buffers[name] = buffer
        for child, now, before in self._changed:
            _set_attributes(child, before, now)
        for mode in reversed(self._resumed):
            TorchFunctionMode.__exit__(mode, None, None, None)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a forward may keep on its module; no tensors with a graph, which would live longer than the user meant."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _TORCH_NAMES and not (isinstance(value, torch.Tensor) and value.grad_fn is not None)
    }


def _set_attributes(module: nn.Module, now: dict[str, Any], then: dict[str, Any]) -> None:
    for name, value in then.items():
        if now.get(name, _MARK) is not value:
            vars(module)[name] = value
