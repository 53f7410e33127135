"""torch.rand, torch.randn and the other random functions of torch, computed from a RandomState's numbers.

Four functions draw (torch.rand, torch.randn and their `_like` forms); the others are computed from them, both in a
running model and in a trace of it, so that both draw the same numbers. Functions are replaced here; methods of tensors
are handled in random_ops.py, which also refuses all other draws. A call that passes its own generator is left to torch.

The RandomState's scopes determine which part of the full tensor is drawn, as for dropout. Without `sample_dims`, the
samples are along dim 0; a tensor that the scopes do not fit, such as noise for a weight, is the same on every rank.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.mesh.random import dropout, random_ops
from unisono.mesh.random.active import active_state, enter_state, leave_state
from unisono.mesh.random.draw import DTYPES, Draw
from unisono.torch_patches import PatchSet, Target, attention, original, runs_in

if TYPE_CHECKING:
    from unisono.mesh.random.state import RandomState

Function = Callable[..., Any]
Make = Callable[[Function], Function]  # the replacement of a torch function


def enter(state: RandomState) -> None:
    """From here on this thread draws from `state`; other threads draw as without it."""
    _PATCHES.enter()
    attention.patch.enter()
    enter_state(state)
    random_ops.show(_METHODS, all_ops=state.is_new)


def leave(state: RandomState) -> None:
    leave_state(state)
    state.is_new = False
    random_ops.hide()
    attention.patch.leave()
    _PATCHES.leave()


def entries() -> list[tuple[Any, str, Function]]:
    """What replaces functions of torch while a RandomState is active: the owner, the name and the replacement."""
    return _PATCHES.entries()


def draws_decomposed() -> contextlib.AbstractContextManager[None]:
    """In the block, this thread draws by torch.rand, torch.randn and their `_like`s only, and they are torch's own."""
    thread = threading.get_ident()
    return _patched(dict.fromkeys(_DRAWING, lambda own: own), lambda: runs_in(thread), "draws are traced as four ops")


def constant_draws() -> contextlib.AbstractContextManager[None]:
    """In the block, in all threads, every number drawn is 0.5: for runs of a model that are compared."""
    return _patched(_CONSTANT, lambda: True, "runs of a model that are compared draw equal numbers")


def _patched(drawing: Mapping[Target, Make], applies: Callable[[], bool], why: str) -> PatchSet:
    methods = {(torch.Tensor, name): form for name, form in _METHODS.items()}
    functions = {(torch, name): _METHODS[name] for name in ("bernoulli", "multinomial")}
    forms = {target: _computed(form, applies) for target, form in {**_FORMS, **methods, **functions}.items()}
    return PatchSet(_made({**drawing, **forms}), why=why, until="the end of the block")


def _made(makes: Mapping[Target, Make]) -> dict[Target, Function]:
    return {target: make(original(*target)) for target, make in makes.items()}


# ---- functions that draw -----------------------------------------------------------------------------------------


def _drawn(state: RandomState, shape: tuple[int, ...], like: torch.Tensor | None = None) -> Draw:
    """like: the argument of a `_like` function; a parameter has no samples."""
    return state.draw(shape, parts={} if isinstance(like, nn.Parameter) else None, like=like, may_be_full=True)


def _by_shape(number: str) -> Make:
    def make(original: Function) -> Function:
        def replacement(*size: Any, generator: Any = None, out: Any = None, **more: Any) -> torch.Tensor:
            state = active_state()
            like = torch.empty(*size, **more) if state is not None and generator is None and out is None else None
            if state is None or like is None or not _can_draw(like, state):
                return original(*size, generator=generator, out=out, **more)
            return _numbers(_drawn(state, tuple(like.shape)), number, like)

        return replacement

    return make


def _by_example(number: str) -> Make:
    def make(original: Function) -> Function:
        def replacement(input: torch.Tensor, **more: Any) -> torch.Tensor:
            state = active_state()
            if state is None or isinstance(input, DTensor):
                return original(input, **more)
            like = torch.empty_like(input, **more)
            if not _can_draw(like, state):
                return original(input, **more)
            return _numbers(_drawn(state, tuple(like.shape), input), number, like)

        return replacement

    return make


def _can_draw(like: torch.Tensor, state: RandomState) -> bool:
    return like.dtype in DTYPES and (state.counts_meta or not like.is_meta)


def _numbers(draw: Draw, number: str, like: torch.Tensor) -> torch.Tensor:
    if like.is_meta:
        return like
    made: torch.Tensor = getattr(draw, number)(like.dtype, like.device)
    return made.requires_grad_(like.requires_grad)


_DRAWING: dict[Target, Make] = {
    (torch, "rand"): _by_shape("uniform"),
    (torch, "randn"): _by_shape("normal"),
    (torch, "rand_like"): _by_example("uniform"),
    (torch, "randn_like"): _by_example("normal"),
}

_CONSTANT: dict[Target, Make] = {
    (torch, "rand"): lambda _: lambda *size, generator=None, **more: torch.empty(*size, **more).fill_(0.5),
    (torch, "randn"): lambda _: lambda *size, generator=None, **more: torch.empty(*size, **more).fill_(0.5),
    (torch, "rand_like"): lambda _: lambda like, **more: torch.empty_like(like, **more).fill_(0.5),
    (torch, "randn_like"): lambda _: lambda like, **more: torch.empty_like(like, **more).fill_(0.5),
}


# ---- functions computed from those that draw ---------------------------------------------------------------------


def _floating(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) for each of its elements."""
    return torch.rand_like(tensor) if tensor.is_floating_point() else torch.rand_like(tensor, dtype=torch.float32)


def _bernoulli(input: torch.Tensor, p: float | None = None) -> torch.Tensor:
    return (_floating(input) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(self: torch.Tensor, p: float | torch.Tensor = 0.5) -> torch.Tensor:
    return self.copy_(_floating(self) < p)


def _uniform_(self: torch.Tensor, *limits: float, **named: float) -> torch.Tensor:
    low, high = [*limits, *[named.get("from", 0.0), named.get("to", 1.0)][len(limits) :]]
    return self.copy_(torch.rand_like(self) * (high - low) + low)


def _normal_(self: torch.Tensor, mean: float = 0, std: float = 1) -> torch.Tensor:
    return self.copy_(torch.randn_like(self) * std + mean)


def _exponential_(self: torch.Tensor, lambd: float = 1) -> torch.Tensor:
    return self.copy_(_exponential(self) / lambd)


def _exponential(like: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(like.dtype).tiny
    return -torch.log1p(-torch.rand_like(like)).clamp(max=-tiny)  # never 0, as some divide by it


def _cauchy_(self: torch.Tensor, median: float = 0, sigma: float = 1) -> torch.Tensor:
    return self.copy_(torch.tan(torch.pi * (torch.rand_like(self) - 0.5)) * sigma + median)


def _log_normal_(self: torch.Tensor, mean: float = 1, std: float = 2) -> torch.Tensor:
    return self.copy_(torch.exp(torch.randn_like(self) * std + mean))


def _geometric_(self: torch.Tensor, p: float) -> torch.Tensor:
    return self.copy_((torch.log1p(-torch.rand_like(_floating(self))) / math.log1p(-p)).ceil().clamp(min=1))


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **more: Any) -> torch.Tensor:
    if size is not None:
        return torch.randn(size, **more) * std + mean
    like = mean if isinstance(mean, torch.Tensor) else std
    full = like * torch.ones_like(std) if isinstance(std, torch.Tensor) else like
    return torch.randn_like(full.detach()) * std + mean


def _randint(*given: Any, dtype: torch.dtype = torch.int64, device: Any = None, **named: Any) -> torch.Tensor:
    numbers = [value for value in given if not isinstance(value, tuple | list)]
    size: Any = next((value for value in given if isinstance(value, tuple | list)), named.get("size"))
    low, high = named.get("low", 0), named.get("high")
    low, high = numbers if len(numbers) == 2 else (low, numbers[0]) if high is None else ((*numbers, low)[0], high)
    return _integers(torch.rand(size, dtype=torch.float64, device=device), low, high, dtype)


def _randint_like(
    input: torch.Tensor, low: int = 0, high: int | None = None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    low, high = (0, low) if high is None else (low, high)
    return _integers(torch.rand_like(input, dtype=torch.float64), low, high, dtype or input.dtype)


def _integers(uniform: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    return ((uniform * (high - low)).floor() + low).to(dtype)


def _randperm(n: int, dtype: torch.dtype = torch.int64, device: Any = None) -> torch.Tensor:
    return torch.rand(n, dtype=torch.float64, device=device).argsort().to(dtype)


def _multinomial(input: torch.Tensor, num_samples: int, replacement: bool = False) -> torch.Tensor:
    if not replacement or num_samples == 1:
        return (input / _exponential(input)).topk(num_samples, -1).indices
    each = input.unsqueeze(-2).expand(*input.shape[:-1], num_samples, input.shape[-1])
    return (each / _exponential(each)).argmax(-1)


def _rrelu(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    slope = torch.rand_like(input) * (upper - lower) + lower if training else (lower + upper) / 2
    made = torch.where(input < 0, input * slope, input)
    return input.copy_(made) if inplace else made


def _computed(form: Function, applies: Callable[[], bool]) -> Make:
    """The form; torch's own function where generator= or out= is given, or the form does not apply."""

    def make(original: Function) -> Function:
        def replacement(*args: Any, generator: Any = None, out: Any = None, **more: Any) -> Any:
            if generator is not None or out is not None or not applies():
                own = {key: value for key, value in (("generator", generator), ("out", out)) if value is not None}
                return original(*args, **own, **more)
            return form(*args, **more)

        return replacement

    return make


_FORMS: dict[Target, Function] = {
    (torch, "normal"): _normal,
    (torch, "randint"): _randint,
    (torch, "randint_like"): _randint_like,
    (torch, "randperm"): _randperm,
    (F, "rrelu"): _rrelu,
}

_METHODS: dict[str, Function] = {  # of tensors
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    "bernoulli_": _bernoulli_,
    "uniform_": _uniform_,
    "normal_": _normal_,
    "exponential_": _exponential_,
    "cauchy_": _cauchy_,
    "log_normal_": _log_normal_,
    "geometric_": _geometric_,
}

_PATCHES = PatchSet(
    {
        **dropout.REPLACEMENTS,
        **_made(_DRAWING),
        **_made({target: _computed(form, lambda: active_state() is not None) for target, form in _FORMS.items()}),
    },
    why="random numbers are drawn by their global index",
    until="the RandomState is left",
)
