"""Training in half precision, with the same decisions on every rank.

Gradients are float32, as are what the optimizer updates and its state, but for bfloat16 parameters with master=None
(master_weights.py). Matrix products and attention are computed in a half dtype, norms and losses in float32, as
torch.autocast decides. The reference of every plan is one process under torch.autocast, for float16 with
torch.amp.GradScaler.

Autocast rounds the weight of a linear layer or convolution whenever it is used. Under ZeRO ranks round such weights
before they are gathered (`rounded_weights`): half the bytes, and the same values reach the product. Parameters that are
also used in float32 (norms, biases, embeddings and what is tied to them) are gathered in float32. Gradients are summed
in float32, or with reduce="bf16" in bfloat16.

`emulated` is how verify proves that wiring: in float64, with the same parameters rounded to the same values, on one
device and under the plan. What halves do to activations and gradients is left out.

    with autocast(torch.bfloat16, device):
        outputs = model(inputs)

For float16 the loss is scaled: see loss/loss_scale.py.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import NamedParameters
from unisono.mesh.optimizers import OptimizerScope, optimizer_scope
from unisono.parallel.float8 import Float8Layers, float8_layers
from unisono.parallel.loss.loss_scale import LossScaler
from unisono.parallel.master_weights import ROUNDINGS, MasterWeights, RoundedStep, follow

HALF_DTYPES = (torch.float16, torch.bfloat16)
_COMPUTED_IN: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTED_IN["fp8"] = torch.bfloat16  # but for linear layers, which are float8: see float8.py


@dataclass(frozen=True)
class Precision:
    """What a job computes in: "fp32" (the parameters' own precision), "bf16", "fp16", or "fp8": as "bf16", with linear
    layers of at least `least` features in float8 (see float8.py).

    The scale of the loss, which only fp16 needs, begins at `init_scale`, halves when a gradient overflows and doubles
    after `growth_interval` steps without. gather: "half" or "fp32", the dtype in which ZeRO gathers the weights of
    linear layers and convolutions. reduce: "fp32" or "bf16", the dtype in which gradients are summed over the ranks.

    With "bf16" and "fp8" the model's parameters may be bfloat16. master: "fp32", the optimizer updates float32 copies
    of them, or None, it updates them in place, with `rounding` "stochastic" or "kahan" (see master_weights.py).
    """

    name: str = "fp32"
    init_scale: float = 2.0**16
    growth_interval: int = 2000
    gather: str = "half"
    reduce: str = "fp32"
    master: str | None = "fp32"
    rounding: str = "stochastic"
    least: int = 256
    is_emulated: bool = False
    halves: frozenset[str] = frozenset()  # of an emulation: parameters that are bfloat16 in the user's model

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _COMPUTED_IN:
            raise UsageError(f"precision={self.name!r}; expected one of {', '.join(_COMPUTED_IN)}")
        if self.gather not in ("half", "fp32"):
            raise UsageError(f'precision: gather={self.gather!r}; expected "half" or "fp32"')
        if self.reduce not in ("fp32", "bf16"):
            raise UsageError(f'precision: reduce={self.reduce!r}; expected "fp32" or "bf16"')
        if self.reduce == "bf16" and self.half is None:
            raise UsageError('reduce="bf16" with precision="fp32"; use precision="bf16" or "fp16" with it')
        if self.master not in ("fp32", None):
            raise UsageError(f'precision: master={self.master!r}; expected "fp32" or None')
        if self.rounding not in ROUNDINGS:
            raise UsageError(f"precision: rounding={self.rounding!r}; expected one of {', '.join(ROUNDINGS)}")
        if self.rounding != "stochastic" and self.master is not None:
            raise UsageError(
                f"precision: rounding={self.rounding} is of parameters without master weights, but master=fp32; use "
                f'"bf16,master=none,rounding={self.rounding}", or leave rounding out'
            )
        if not isinstance(self.least, int) or self.least < 1:
            raise UsageError(f"precision: least={self.least!r}; expected a number of features")
        if not isinstance(self.init_scale, int | float) or not 0 < self.init_scale < math.inf:
            raise UsageError(f"precision: init_scale={self.init_scale!r}; expected a number above 0")
        if not isinstance(self.growth_interval, int) or self.growth_interval < 1:
            raise UsageError(f"precision: growth_interval={self.growth_interval!r}; expected a number of steps")
        self._require_used("least", "fp8")
        self._require_used("gather", "bf16", "fp16", "fp8")
        self._require_used("init_scale", "fp16")
        self._require_used("growth_interval", "fp16")
        if self.master is None and self.half != torch.bfloat16:
            raise UsageError(f'master=None with precision="{self.name}"; use precision="bf16" with it')

    def _require_used(self, option: str, *names: str) -> None:
        """Refuse an option that has no effect with this precision."""
        if self.name not in names and getattr(self, option) != getattr(type(self), option):
            raise UsageError(
                f"precision: {option}={getattr(self, option)} has no effect with {self.name}; it is an option of "
                f"{' and '.join(names)}"
            )

    @classmethod
    def of(cls, given: str | Precision) -> Precision:
        """From a text such as "bf16" or "bf16,reduce=bf16"."""
        if isinstance(given, Precision):
            return given
        name, *options = str(given).split(",")
        chosen: dict[str, Any] = {}
        for option in options:
            key, _, value = (each.strip() for each in option.partition("="))
            if key in chosen:
                raise UsageError(f"precision={given!r} has {key} twice")
            if key not in ("gather", "reduce", "master", "rounding", "least"):
                raise UsageError(
                    f"precision={given!r}: {key!r}; expected gather=half|fp32, reduce=fp32|bf16, master=fp32|none, "
                    "rounding=stochastic|kahan or least=N"
                )
            if key == "least" and not value.isdecimal():
                raise UsageError(f"precision={given!r}: least={value}; expected a number of features")
            chosen[key] = None if (key, value.lower()) == ("master", "none") else value
            chosen |= {"least": int(value)} if key == "least" else {}
        return cls(name.strip(), **chosen)

    @property
    def half(self) -> torch.dtype | None:
        return _COMPUTED_IN[self.name]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what is computed; None for that of the parameters."""
        return None if self.is_emulated else self.half

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of gradients on their way; None for their own."""
        return torch.bfloat16 if self.reduce == "bf16" and not self.is_emulated else None

    def float8(self, model: nn.Module) -> Float8Layers:
        """The layers of the full model that compute in float8; none but with "fp8"."""
        return float8_layers(model, self.least) if self.name == "fp8" else Float8Layers()

    def emulated(self, model: nn.Module) -> Precision:
        """The same roundings of parameters in a wider dtype. model: the user's, for its dtypes."""
        if self.half is None:
            return self
        halves = frozenset(name for name, each in model.named_parameters() if each.dtype == torch.bfloat16)
        return replace(self, is_emulated=True, halves=halves)

    def gathered(self, model: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes in which ZeRO gathers parameters, by name, where they are not the parameters' own."""
        if self.half is None or (self.gather == "fp32" and not self.is_emulated):
            return {}
        names = set(rounded_weights(model, torch.float64 if self.is_emulated else torch.float32))
        names = names - self.halves if self.master is None else names | self.halves
        return {name: self.half for name, each in model.named_parameters() if name in names and each.requires_grad}

    def update_on_one_device(
        self, optimizer: Optimizer, model: nn.Module, random: Callable[[], tuple[object, ...]]
    ) -> MasterWeights:
        """Make an optimizer of the full model update bfloat16 parameters as plans do. random: see RoundedStep."""
        masters = self.masters(model, self.gathered(model)) or MasterWeights({})
        if self.dtype is not None:
            accumulate_in_float32(model.parameters())
        follow(optimizer, masters)
        if self.master is None:
            RoundedStep(optimizer, model.named_parameters(), self.rounding, random, emulated=self.halves)
        return masters

    def masters(self, model: nn.Module, gathered: Mapping[str, torch.dtype]) -> MasterWeights | None:
        """The copies that an optimizer without ZeRO gets, if any parameter needs one. gathered: as of `gathered` for
        the full model."""
        if self.is_emulated:
            named = dict(model.named_parameters())
            return MasterWeights({name: named[name] for name in gathered if name in named}, emulates=self.half)
        if self.dtype is None or self.master is None:
            return None
        halves = {
            name: each for name, each in model.named_parameters() if each.dtype in HALF_DTYPES and each.requires_grad
        }
        return MasterWeights(halves) if halves else None

    def scaler(self, mesh: Mesh) -> LossScaler | None:
        if self.dtype != torch.float16:
            return None
        return LossScaler(mesh, self.init_scale, growth_interval=self.growth_interval)

    def require_dtypes(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> None:
        """Halves are computed from float32 parameters, or bfloat16 from bfloat16 ones; and the optimizer that
        make(parameters) gives can update those."""
        if self.dtype is None:
            return
        halves = [name for name, each in model.named_parameters() if each.dtype == torch.bfloat16]
        for name, parameter in model.named_parameters():
            is_own = parameter.dtype == self.half == torch.bfloat16
            if parameter.is_floating_point() and parameter.dtype != torch.float32 and not is_own:
                raise UsageError(
                    f"precision={self.name} keeps parameters in float32, but {name} is {parameter.dtype}; pass the "
                    "model in float32"
                    + ("" if parameter.dtype in HALF_DTYPES else f", or leave precision={self.name} out")
                )
        if self.master is None and not halves:
            raise UsageError(
                "master=None updates bfloat16 parameters, but the model has none; pass it in bfloat16, as "
                "model.bfloat16(), or leave master=None out"
            )
        if halves:
            self._require_masters(make, make(NamedParameters.of(model)), halves[0])

    def _require_masters(self, make: Callable[[Any], Optimizer], optimizer: Optimizer, name: str) -> None:
        kind = type(optimizer).__name__
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{name} is bfloat16, but {kind} evaluates the model several times in a step, when only its master "
                "weights would have changed; pass the model in float32"
            )
        if self.master is None and optimizer_scope(optimizer, make) is OptimizerScope.MODEL:
            raise UsageError(
                f'master=None updates some parameters at a time, but {kind} looks at all at once; use master="fp32"'
            )


FULL = Precision()


def autocast(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for a half dtype; nothing for None and full precisions."""
    if dtype is None or dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    if dtype not in HALF_DTYPES:
        raise UsageError(f"precision {dtype}; expected float16, bfloat16, float32 or float64")
    return _autocast(dtype, device)


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()  # of nn.TransformerEncoder, without autocast on a CPU
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.autocast(device.type, dtype=dtype):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def rounded_weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the parameters that autocast rounds at every use: float32 matrices whose modules all multiply by them.
    dtype: in place of float32.

    A Linear's weight that is an Embedding's, too, is not among them: the embedding takes float32 rows.
    """
    is_rounded: dict[int, bool] = {}
    for module in model.modules():
        names = _matrices(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                is_matrix = name in names and parameter.dim() > 1 and parameter.dtype == dtype
                is_rounded[id(parameter)] = is_matrix and is_rounded.get(id(parameter), True)
    return [name for name, parameter in model.named_parameters() if is_rounded[id(parameter)]]


@torch.no_grad()
def round_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter a half dtype; its gradients keep the dtype that they have."""
    parameter.unisono_model_dtype = own = parameter.dtype  # type: ignore[attr-defined]
    parameter.data = parameter.data.to(dtype)
    parameter.grad_dtype = own


def model_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter or buffer in the user's model."""
    return getattr(tensor, "unisono_model_dtype", tensor.dtype)


# Functions of torch whose operands autocast rounds.
PRODUCTS = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv",
     "einsum", "chain_matmul", "multi_dot", "multi_head_attention_forward", "scaled_dot_product_attention", "conv1d",
     "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)  # fmt: skip
_LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def _matrices(module: nn.Module) -> tuple[str, ...]:
    """The names under which a module has weights of matrix products or convolutions."""
    if "forward" in vars(module):
        return ()
    if any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _LAYERS):
        return ("weight",)
    if type(module) is nn.MultiheadAttention:
        return ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's, a transposed linear layer
        return ("weight",)
    return tuple(getattr(type(module), "PRODUCTS", ()))


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on, gradients of half parameters are added up, and kept, in float32.

    Microbatches whose gradients are small beside the sum of the ones before would be lost to rounding otherwise.
    """
    for parameter in parameters:
        if parameter.dtype in HALF_DTYPES and parameter.requires_grad:
            parameter.grad_dtype = torch.float32
