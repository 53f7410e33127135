"""Means over the global batch, inside a loss that knows nothing of it.

A loss takes means over what it counts: samples, tokens that are not ignored, weights of classes. Where the batch is
split into parts, the mean over the full batch is

    sum over parts of (the part's sum / the global count)

so every part divides its own *sum* by the *global* count, and the parts' losses add up. `LossNormalizer` is a mode
under which torch's own means do so. It sees, in the order of the calls:

- `mean` of a tensor that still has the batch (dim 0, or `batch_dim`, is not reduced away yet), over dims that include
  it;
- every loss of torch.nn.functional with reduction="mean", as the sum of its reduction="none", and kl_div's "batchmean";
- a sum divided by a sum that needs no gradient, as in `(loss * mask).sum() / mask.sum()`;
- a sum divided by a number of Python that is a size of the batch, as in `loss.sum() / len(targets)`. Whether it is one
  cannot be seen here: `divisors` lists all such numbers, and `sizes` gives which of them are counts.

Sums stay sums. A tensor from which the batch was summed away is marked, so that further means over it are plain ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from unisono.errors import UsageError

Count = float | torch.Tensor
Totals = Sequence[float] | Callable[[], Sequence[Count]]

_MEANS = {torch.mean, torch.Tensor.mean}
_SUMS = {torch.sum, torch.Tensor.sum}
_DIVISIONS = {torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.true_divide, torch.Tensor.__truediv__}
_FLOORS = {torch.clamp, torch.clamp_min, torch.Tensor.clamp, torch.Tensor.clamp_min}
_CASTS = {
    torch.Tensor.to,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.type,
    torch.Tensor.type_as,
    torch.Tensor.detach,
}
_LOSSES: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function)
    for name, function in vars(F).items()
    if name.endswith(("_loss", "_div", "cross_entropy", "_with_logits")) and inspect.isfunction(function)
    if "reduction" in inspect.signature(function).parameters
}
_OVER_CLASSES: list[Callable[..., Any]] = [F.cross_entropy, F.nll_loss]
if hasattr(F, "linear_cross_entropy"):  # PyTorch 2.12 has it, 2.11 has not
    _OVER_CLASSES.append(F.linear_cross_entropy)
_ELEMENTWISE = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
_HALVES = (torch.float16, torch.bfloat16)
# With these, a number of Python or a shape may depend on values, and not on the batch's size.
_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__bool__, torch.nonzero, torch.Tensor.nonzero,
    torch.masked_select, torch.Tensor.masked_select, torch.unique, torch.Tensor.unique, torch.argwhere,
}  # fmt: skip


@dataclass(frozen=True)
class _Mark:
    """Carried by tensors from which the batch was summed away."""

    is_sum: bool  # a plain sum over the batch, so that it may be a count
    floor: float | None = None  # such a count, but at least this
    is_mean: bool = False  # it was divided by a count


def _mark_of(value: Any) -> _Mark | None:
    return getattr(value, "_unisono_mark", None) if isinstance(value, torch.Tensor) else None


def _marked(tensor: torch.Tensor, is_sum: bool) -> torch.Tensor:
    tensor._unisono_mark = _Mark(is_sum, is_mean=not is_sum)  # type: ignore[attr-defined]
    return tensor


class LossNormalizer(TorchFunctionMode):
    """While active, means divide by `totals`, one a mean in the order of the calls.

    Without totals they divide by their own counts. Totals that are still to be agreed on are given as a function, asked
    at the first division. Either way `counts` gives what this part counted. With `dry`, losses of torch.nn.functional
    are counted and, where that needs no values, not computed.
    """

    def __init__(
        self,
        totals: Totals | None = None,
        dry: bool = False,
        batch_dim: int = 0,
        sizes: frozenset[int] = frozenset(),
    ) -> None:
        """sizes: which of the numbers that sums are divided by, in the order of the calls, are sizes of the batch."""
        super().__init__()
        self._sizes = sizes
        self.divisors: list[float] = []
        self.reads_values = False  # whether divisors may depend on more than the batch's shapes
        self._batch_dim = batch_dim
        self.counts: list[Count] = []
        self.made = 0  # with dry: how many elements were computed all the same
        self._totals = totals
        self._dry = dry
        self._total_in_graph: Callable[[torch.Tensor, int], torch.Tensor] | None = None

    @property
    def in_graphs(self) -> bool:
        """Whether a compiled loss may be traced under it: see parallel/compile."""
        return self._totals is not None and not self._dry

    def agreed_totals(self) -> Sequence[Count]:
        assert self._totals is not None
        return self._totals() if callable(self._totals) else self._totals

    def for_trace(self, total: Callable[[torch.Tensor, int], torch.Tensor]) -> LossNormalizer:
        """One that divides by total(the part, the number of the mean), in a graph that is traced."""
        made = LossNormalizer((), batch_dim=self._batch_dim, sizes=self._sizes)
        made._total_in_graph = total
        return made

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads_values |= func in _READS or (func is torch.Tensor.__getitem__ and _is_mask(args[1]))
        out = self._handled(func, args, kwargs or {})
        if self._dry and isinstance(out, torch.Tensor):
            self.made += _made(out, _tensors_in(args, kwargs or {}))
        return out

    def _handled(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        marks = [mark for mark in map(_mark_of, _tensors_in(args, kwargs)) if mark is not None]
        if func in _DIVISIONS and len(args) == 2 and not kwargs:
            mark = _mark_of(args[1])
            if mark is not None and mark.is_sum and not args[1].requires_grad:
                return self._divided(args[0], args[1].detach(), mark.floor)
            if isinstance(args[1], int | float) and any(not each.is_mean for each in marks):
                self.divisors.append(args[1])
                if len(self.divisors) - 1 in self._sizes:
                    return self._divided(args[0], args[1])
        if marks:
            return _passed_on(func, args, kwargs, marks)
        if func in _MEANS and _takes_batch(args, kwargs, self._batch_dim):
            return self._mean(*args, **kwargs)
        if func in _SUMS and _takes_batch(args, kwargs, self._batch_dim):
            return _marked(func(*args, **kwargs), is_sum=True)
        if func in _LOSSES:
            return self._loss(func, args, kwargs)
        return func(*args, **kwargs)

    def _divided(self, part: torch.Tensor, count: Count, floor: float | None = None) -> torch.Tensor:
        """The part's share of a mean: its sum by the global count."""
        number = len(self.counts)
        self.counts.append(count)
        divisor = count
        if self._total_in_graph is not None:
            divisor = self._total_in_graph(part, number)
        elif self._totals is not None:
            totals = self.agreed_totals()
            if number >= len(totals):
                raise UsageError(
                    f"the loss took more means than the {len(totals)} that were counted before; "
                    "a loss must take the same means on every microbatch: use microbatches=1"
                )
            divisor = totals[number]
        if floor is not None:
            divisor = divisor.clamp(min=floor) if isinstance(divisor, torch.Tensor) else max(divisor, floor)
        return _marked(part / divisor, is_sum=False)

    def _mean(
        self,
        input: torch.Tensor,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> torch.Tensor:
        dims = _dims(input, dim)
        count = 1
        for reduced in dims:
            count *= input.shape[reduced]
        dtype = dtype or input.dtype
        wide = torch.float32 if dtype in _HALVES else dtype
        return self._divided(input.sum(dims, keepdim, dtype=wide), count).to(dtype)

    def _loss(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        bound = _LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reduction = _reduction(given)
        if reduction == "none":
            return func(*args, **kwargs)
        if reduction == "sum":
            return _marked(func(*args, **kwargs), is_sum=True)
        count = _count_by_shape(func, given, reduction)
        if self._dry and count is not None:
            return self._divided(torch.zeros((), device=given["input"].device), count)
        given["reduction"] = "none"
        values = func(*bound.args, **bound.kwargs)
        if func is F.ctc_loss and reduction == "mean":
            values = values / _lengths(given, values)
        part = values.sum(dtype=torch.float32 if values.dtype in _HALVES else values.dtype)
        return self._divided(part, values.numel() if count is None else count).to(values.dtype)


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found.extend(value) if isinstance(value, list | tuple) else found.append(value)
    return found


def _made(out: torch.Tensor, given: list[Any]) -> int:
    """How many elements are new: none in a view."""
    address = _address(out)
    return 0 if address is not None and address in map(_address, given) else out.numel()


def _address(value: Any) -> int | None:
    """The address of a plain tensor's data."""
    return value.untyped_storage().data_ptr() if type(value) is torch.Tensor else None


def _passed_on(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], marks: Sequence[_Mark]) -> Any:
    """Run a function on marked tensors, and mark what comes out."""
    only = marks[0]
    if func in _FLOORS and only.is_sum and not args[0].requires_grad:
        floor = kwargs.get("min", args[1] if len(args) > 1 else None)
        if isinstance(floor, int | float) and len(args) + len(kwargs) == 2:
            # The floor holds for the global count: a part may well count less.
            counted = args[0].clone()
            counted._unisono_mark = replace(only, floor=float(floor))
            return counted
    out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        mark = only if func in _CASTS else _Mark(is_sum=False, is_mean=any(each.is_mean for each in marks))
        out._unisono_mark = mark  # type: ignore[attr-defined]
    return out


def _dims(tensor: torch.Tensor, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(tensor.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % tensor.ndim for d in dims)


def _takes_batch(args: Sequence[Any], kwargs: dict[str, Any], batch_dim: int) -> bool:
    """Whether the batch is reduced away; a tensor with fewer dims has it along the last one."""
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
        return False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return min(batch_dim, tensor.ndim - 1) in _dims(tensor, None if isinstance(dim, torch.dtype) else dim)


def _reduction(given: dict[str, Any]) -> str:
    """The reduction asked for, also in the words of old."""
    size_average, reduce = given.get("size_average"), given.get("reduce")
    if size_average is None and reduce is None:
        return given["reduction"]
    given["size_average"] = given["reduce"] = None
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _count_by_shape(func: Callable[..., Any], given: dict[str, Any], reduction: str) -> Count | None:
    """What a loss divides its sum by, if that takes no computing; else None: the elements that "none" gives."""
    if func in _OVER_CLASSES and not given["target"].is_floating_point():
        ignored = given["ignore_index"]
        return _classes(given["target"], given["weight"], -100 if ignored is None else ignored)
    if reduction == "batchmean":
        return given["input"].shape[0]
    if func in _ELEMENTWISE:
        return torch.broadcast_shapes(given["input"].shape, given["target"].shape).numel()
    return None


def _classes(target: torch.Tensor, weight: torch.Tensor | None, ignore: int) -> torch.Tensor:
    """The count of targets that are not ignored, each by its class's weight."""
    counted = target != ignore
    if weight is None:
        return counted.sum()
    return (weight.detach()[torch.where(counted, target, 0)] * counted).sum()


def _lengths(given: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(given["target_lengths"], device=like.device).clamp(min=1).to(like.dtype)
