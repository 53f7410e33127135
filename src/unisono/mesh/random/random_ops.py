"""Random ops where they reach torch's dispatcher, while a RandomState is active in a thread.

Functions of torch are replaced by name (random_functions.py, dropout.py). That misses methods of tensors, names that
were imported before, and ops inside torch's own code. These are handled in the dispatcher: kernels for all random ops
are registered under a dispatch key that nothing else uses, and that a thread includes only while a RandomState is
active in it. Other threads, and this one at other times, do not see them, and other ops have no overhead.

    Tensor.normal_ and similar, bernoulli, multinomial   are computed from torch.rand_like and randn_like (see
                                                         random_functions.py)
    every other random op                                is refused where a plan splits the model or its batches, as its
                                                         numbers would depend on the plan
    ... with its own generator, in a backward,           is torch's own
        on one device, or that draws nothing (p=0)

Attention and recurrent layers, which are random only if their dropout is not 0, would have overhead in each call. They
are under a second key, which is included in the first block of a RandomState: in a trainer's first step.

Note: why not replace the methods of torch.Tensor in each step. Python caches the attributes of a class until the class
changes, and torch.Tensor would change twice a step.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unisono.errors import UsageError
from unisono.mesh.random.active import active_state
from unisono.torch_compat import (
    SPARE_KEYS,
    in_backward,
    include_key,
    is_compiling,
    is_tracing,
    no_spare_keys,
    random_ops,
)
from unisono.torch_patches import observed

Form = Callable[..., Any]
_KEY, _FIRST_STEP = SPARE_KEYS
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)
_kept: weakref.WeakSet[Any] = weakref.WeakSet()  # those who are between a forward and its backward


def show(forms: Mapping[str, Form], all_ops: bool) -> None:
    """From here on this thread's random ops reach the kernels. forms: of methods of tensors, by their names. all_ops:
    also attention and recurrent layers."""
    _register(tuple(forms.items()))
    include_key(_KEY, True)
    if all_ops:
        include_key(_FIRST_STEP, True)


def hide() -> None:
    """The opposite, once no RandomState is active and nobody keeps the kernels in sight."""
    if active_state() is None:
        include_key(_FIRST_STEP, False)
        if not _kept:
            include_key(_KEY, False)


def keep(owner: Any) -> None:
    """Until `release`: for a backward of the user's own, in which a forward may be recomputed. Autograd runs it with
    the dispatch keys that the thread includes when it begins."""
    _kept.add(owner)
    include_key(_KEY, True)


def release(owner: Any) -> None:
    _kept.discard(owner)
    hide()


# ---- the kernels -----------------------------------------------------------------------------------------------------


@functools.cache
def _register(forms: tuple[tuple[str, Form], ...]) -> list[torch.library.Library]:
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    for key in SPARE_KEYS:
        others.fallback(torch.library.fallthrough_kernel, key)
    by_name = dict(forms)
    for name, schema in random_ops():
        base = name.partition(".")[0]
        mostly_plain = {"dropout_p", "num_layers"} & {argument.name for argument in schema.arguments}
        kernel = _computing(base, name, by_name[base]) if base in by_name else _refusing(base, name, schema)
        aten.impl(name, kernel, _FIRST_STEP if mostly_plain else _KEY)
    return [others, aten]  # torch forgets the kernels of a Library that is gone


def _computing(base: str, name: str, form: Form) -> Form:
    op, method = _op(name), observed(getattr(torch.Tensor, base), form, depth=2)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            _require_eager(name)
            return _as_torch_does(op, args, kwargs)
        if active_state() is None or any(kwargs.get(key) is not None for key in ("generator", "out")):
            return _as_torch_does(op, args, kwargs)
        return method(*args)

    return kernel


def _refusing(base: str, name: str, schema: Any) -> Form:
    op = _op(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        state = active_state()
        if is_compiling():
            if _draws(schema, args, kwargs):
                _require_eager(name)
            return _as_torch_does(op, args, kwargs)
        if state is not None and state.refuses_unfollowed and not in_backward() and _draws(schema, args, kwargs):
            raise UsageError(_refusal(base))
        return _as_torch_does(op, args, kwargs)

    return kernel


def _require_eager(name: str) -> None:
    if is_tracing():
        raise UsageError(
            f"aten.{name} draws random numbers, which a compiled graph would draw from a generator of its own"
        )


def _op(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op: Callable[..., Any] = getattr(getattr(torch.ops.aten, base), overload or "default")
    return op


def _as_torch_does(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_spare_keys():
        return op(*args, **kwargs)


def _draws(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op takes numbers from torch's own generator."""
    given = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    given |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    if given.get("generator") is not None or str(given.get("device")) == "meta":
        return False
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    if any(tensor.is_meta or isinstance(tensor, DTensor) for tensor in tensors):  # DTensors draw by their placements
        return False
    if given.get("train") is False or given.get("training") is False or given.get("dropout_p") == 0:
        return False
    if "num_layers" in given:  # recurrent layers, which drop between their layers
        return bool(given["dropout"]) and int(given["num_layers"]) > 1
    return not ("train" in given and given.get("p") == 0)


# ---- the refusal -----------------------------------------------------------------------------------------------------

_BY_NAME = ["rand", "randn", "rand_like", "randn_like", "normal", "randint", "randint_like", "randperm"]
_RECURRENT = ["lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "miopen_rnn"]


def _refusal(name: str) -> str:
    return (
        f"{_calling_line()}torch.{name} draws from torch's own generator, so that every rank would draw numbers of its "
        f"own, other than one device's; {_instead(name)}, or use one device"
    )


def _instead(name: str) -> str:
    if name in _RECURRENT:
        return "use recurrent layers of num_layers=1 with nn.Dropout between them"
    if "dropout" in name or "rrelu" in name:
        function = name if name in ("dropout", "alpha_dropout", "rrelu") else "rrelu" if "rrelu" in name else "dropout"
        return f"call it as torch.nn.functional.{function}, and not by a name that was imported from there"
    if name in _BY_NAME:
        return f"call it as torch.{name}, and not by a name that was imported from there or with out="
    if name in ("random_", "random"):
        return "use torch.randint"
    return "use torch.rand, torch.randn, torch.bernoulli or what is made of them"


def _calling_line() -> str:
    """ "file.py:42 (the line): " of the innermost line outside torch and unisono."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    file = frame.f_code.co_filename
    code = linecache.getline(file, frame.f_lineno).strip()
    return f"{os.path.basename(file)}:{frame.f_lineno}{f' ({code})' if code else ''}: "
