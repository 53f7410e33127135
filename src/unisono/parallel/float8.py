"""Linear layers in float8, on GPUs that compute in it: operands in e4m3, gradients of outputs in e5m2.

    y  = x W'     x and W rounded to e4m3, 3 bits of mantissa
    dx = dy W     dy rounded to e5m2, 2 bits of mantissa and a wider range
    dW = dy' x

Products are summed in float32 and are bfloat16, as those of autocast. Each operand is multiplied by a scale, found from
its largest element, so that this fits into the dtype's range (dynamic tensor-wise scaling).

Note: one scale a rank. Scales are powers of two. A float8 has an exponent of its own, so a factor of two leaves its
mantissa alone: whatever the scale, an element is rounded to the same value, unless it is smaller than about 2**-14 of
the largest (e4m3) and loses bits to the end of the range. So ranks take scales of the samples, tokens or shards that
they have and do not communicate for them. `verify` emulates the rounding of mantissas, without an end of the range, in
float64.

Layers stay in bfloat16 that are too small to be faster, whose sizes are no multiples of 16, or that are outside the
model's lists of blocks, as the head of a language model is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unisono.errors import UsageError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MANTISSA = {E4M3: 3, E5M2: 2}  # bits, without the leading one
_MULTIPLE = 16  # of sizes, for the kernels


# ---- products --------------------------------------------------------------------------------------------------------


def float8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear in float8; the result is bfloat16."""
    rows = x.to(torch.bfloat16).flatten(0, -2) if x.dim() > 1 else x.to(torch.bfloat16).unsqueeze(0)
    if not rows.numel():  # no element to find a scale from
        return F.linear(
            x.to(torch.bfloat16), weight.to(torch.bfloat16), None if bias is None else bias.to(torch.bfloat16)
        )
    padding = -rows.shape[0] % _MULTIPLE
    y = _Float8Product.apply(F.pad(rows, (0, 0, 0, padding)) if padding else rows, weight.to(torch.bfloat16))
    y = (y[: rows.shape[0]] if padding else y).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(torch.bfloat16)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x rounded to a float8 dtype, multiplied by a power of two; and the inverse of that."""
    most = torch.finfo(dtype).max
    largest = x.detach().abs().amax().float().clamp(min=2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(most / largest)))
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def _product(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], fast: bool = False
) -> torch.Tensor:
    """a b' of float8 matrices, both with rows in memory one after the other. fast: with sums of fewer bits."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=fast)


def _refuse_create_graph() -> None:
    """In a backward: rounding has no derivative of its own."""
    if torch.is_grad_enabled():
        raise UsageError(
            "precision=fp8: a backward with create_graph=True, as a gradient penalty runs, cannot be differentiated "
            "through float8 products; use precision=bf16"
        )


class _Float8Product(torch.autograd.Function):
    """x W'. The weight is rounded again in the backward: what ZeRO 3 frees in between stays free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rounded = quantize(x, E4M3)
        ctx.save_for_backward(*rounded, weight)
        return _product(rounded, quantize(weight, E4M3), fast=True)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        _refuse_create_graph()
        x, x_scale, weight = ctx.saved_tensors
        gradient, scale = quantize(dy, E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            narrow, weight_scale = quantize(weight, E4M3)
            dx = _product((gradient, scale), (narrow.t().contiguous(), weight_scale))
        if ctx.needs_input_grad[1]:
            dw = _product((gradient.t().contiguous(), scale), (x.t().contiguous(), x_scale))
        return dx, dw


# ---- emulated --------------------------------------------------------------------------------------------------------


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x with so many bits after the leading one, rounded to nearest, ties to even; exponents have no end."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) * 2.0 ** -(bits + 1), exponent)


def emulated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float8_linear in a wide dtype: only mantissas are rounded."""
    y: torch.Tensor = _EmulatedProduct.apply(x, weight)
    return y if bias is None else y + bias


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(round_mantissa(x, MANTISSA[E4M3]), round_mantissa(weight, MANTISSA[E4M3]))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse_create_graph()
        x, weight = (round_mantissa(each, MANTISSA[E4M3]) for each in ctx.saved_tensors)
        gradient = round_mantissa(dy, MANTISSA[E5M2])
        flat = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient.unsqueeze(0)
        return gradient @ weight, flat.t() @ (x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0))


# ---- layers ----------------------------------------------------------------------------------------------------------


class Float8Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return float8_linear(input, self.weight, self.bias)


class EmulatedFloat8Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return emulated_linear(input, self.weight, self.bias)


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a model by name: those in float8, and those that stay, with the reason."""

    chosen: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kept = ", ".join(f"{name} ({reason})" for name, reason in self.kept.items())
        return f"float8: {len(self.chosen)} linear layers" + (f"; bfloat16: {kept}" if kept else "")


def float8_layers(model: nn.Module, least: int) -> Float8Layers:
    """least: the smallest number of features, in and out, of a layer in float8."""
    found = Float8Layers()
    for name, module in model.named_modules():
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            continue
        assert isinstance(module, nn.Linear)
        sizes = (module.in_features, module.out_features)
        if not _is_in_blocks(model, name):
            found.kept[name] = "outside the blocks"
        elif min(sizes) < least:
            found.kept[name] = f"fewer than {least} features"
        elif any(size % _MULTIPLE for size in sizes):
            found.kept[name] = f"{sizes[0]} x {sizes[1]}, no multiples of {_MULTIPLE}"
        else:
            found.chosen.append(name)
    if not found.chosen:
        raise UsageError(
            f"precision=fp8: {type(model).__name__} has no linear layer to compute in float8, with at least {least} "
            f"features in and out, multiples of {_MULTIPLE}, in a list of blocks; use precision=bf16"
        )
    return found


def _is_in_blocks(model: nn.Module, name: str) -> bool:
    parents = ["", *(name[:end] for end, letter in enumerate(name) if letter == ".")]
    return any(isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential) for parent in parents)


def use_float8(model: nn.Module, names: Iterable[str], is_emulated: bool) -> None:
    """From now on these layers, which tp may have sharded, compute in float8."""
    for name in names:
        module = _submodule(model, name)
        if module is None:
            continue  # of another stage of a pipeline
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        shape = tuple(weight.shape)
        if any(size % _MULTIPLE for size in shape) and not is_emulated:
            raise UsageError(
                f"precision=fp8: tp leaves this rank {shape[0]} x {shape[1]} of {name}, but float8 needs multiples "
                f"of {_MULTIPLE}; use a smaller tp, or precision=bf16"
            )
        if isinstance(module, nn.Linear):
            module.__class__ = EmulatedFloat8Linear if is_emulated else Float8Linear
        elif hasattr(module, "product"):  # ColumnParallelLinear, RowParallelLinear
            module.product = emulated_linear if is_emulated else float8_linear  # type: ignore[assignment]


@contextlib.contextmanager
def in_float8(model: nn.Module, names: Iterable[str], is_emulated: bool) -> Iterator[None]:
    """In the block, these layers of a model on one device compute in float8."""
    modules = [model.get_submodule(name) for name in names]
    classes = [type(module) for module in modules]
    for module in modules:
        module.__class__ = EmulatedFloat8Linear if is_emulated else Float8Linear
    try:
        yield
    finally:
        for module, own in zip(modules, classes, strict=True):
            module.__class__ = own


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def require_float8(device: torch.device) -> None:
    """Refuse devices that do not compute in float8."""
    if device.type != "cuda":
        raise UsageError(f"precision=fp8 computes on a GPU, but the model is on the {device.type}; use precision=bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UsageError(
            "precision=fp8 needs a GPU of compute capability 8.9 or more, but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; use precision=bf16"
        )
