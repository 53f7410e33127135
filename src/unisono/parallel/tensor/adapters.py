"""Adapters of the peft package on layers that tensor parallelism shards.

A layer with a LoRA adapter is one linear layer, of x W + scaling (drop(x) A) B, under the name that it has without. A
rule for it shards W, and of A and B the one with that dim:

    column   y_r = x W_r + scaling (drop(x) A) B_r          A is full; each rank computes a part of its gradient
    row      y   = sum of x_r W_r + scaling (drop(x_r) A_r) B      B is full, likewise

So an adapter communicates no activations of its own: the sum of a row layer's outputs is that of its adapter's too, as
B is linear. The layer keeps its class and runs its own forward on shards, as others with a forward of their own do (see
custom_layers); that it is right follows from the formula, and is not tried layer by layer.

Only peft's plain LoRA is known so well. Layers with another adapter (DoRA, whose weights are divided by norms over the
dim that row shards; IA3; adapters of experts), with merged adapters, or over a quantized layer or one with a forward of
its own, are `other` here: a plan that names them is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_LORA, _OTHER = "peft.tuners.lora.layer", "peft.utils.other"
_LAYERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_adapted_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer with LoRA adapters of which the formula above is all."""
    if not _is(module, _LORA, "Linear") or "forward" in vars(module):
        return False
    own: Any = module
    base = own.base_layer
    is_conv1d = type(base).__name__ == "Conv1D" and type(base).__module__ == "transformers.pytorch_utils"
    factors = [*own.lora_A.values(), *own.lora_B.values()]
    return (
        (type(base) is nn.Linear or is_conv1d)
        and own.fan_in_fan_out == is_conv1d
        and _has_plain_adapters(own)
        and all(type(each) is nn.Linear for each in factors)
        and all(each.weight.is_contiguous() for each in factors)  # not transposed: that of another layer's adapter
        and all(type(each) in (nn.Dropout, nn.Identity) for each in own.lora_dropout.values())
        and all(_is_untouched(each) for each in (base, *factors, *own.lora_dropout.values()))
        and len(list(own.parameters())) == sum(len(list(each.parameters())) for each in (base, *factors))
    )


def is_adapted_embedding(module: nn.Module) -> bool:
    """Whether it is an embedding with LoRA adapters, whose forward adds a product to what its base layer gives."""
    return (
        _is(module, _LORA, "Embedding") and isinstance(module.base_layer, nn.Embedding) and _has_plain_adapters(module)
    )


def _has_plain_adapters(module: Any) -> bool:
    variants = (getattr(module, name, ()) for name in ("lora_variant", "lora_magnitude_vector"))
    return not module.merged_adapters and not any(len(each) for each in variants)


def _is_untouched(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


def is_other(module: nn.Module) -> bool:
    """Whether it is a layer of peft that computes something else than its base layer, in a way that is not known."""
    is_peft = any(each.__name__ in _LAYERS and each.__module__.startswith("peft.") for each in type(module).__mro__)
    return is_peft and not (is_adapted_linear(module) or is_adapted_embedding(module) or _is_saved_layer(module))


def _is_saved_layer(module: nn.Module) -> bool:
    """Whether it holds a layer, and copies of it that are trained in full."""
    return _is(module, _OTHER, "ModulesToSaveWrapper") and not list(module.original_module.children())  # type: ignore[union-attr]


def _is(module: nn.Module, package: str, name: str) -> bool:
    return type(module).__name__ == name and type(module).__module__ == package


def without_adapters(module: nn.Module) -> Any:
    """The layer that adapters were added to; the module itself where there are none, or others."""
    return module.base_layer if is_adapted_linear(module) or is_adapted_embedding(module) else module


def inner_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that linear layers with adapters consist of, which are no layers by themselves."""
    adapted = [module for module in model.modules() if is_adapted_linear(module)]
    return {inner for module in adapted for inner in module.modules() if inner is not module}


def dims(module: Any, *, by_rows: bool) -> dict[str, int | None]:
    """Of a linear layer with adapters, the dim along which each parameter is sharded, by name."""
    is_transposed = module.fan_in_fan_out
    of_outputs: dict[str, int | None] = {"base_layer.weight": int(is_transposed), "base_layer.bias": 0}
    of_inputs: dict[str, int | None] = {"base_layer.weight": int(not is_transposed)}
    for adapter in module.lora_A:
        of_outputs |= {f"lora_B.{adapter}.weight": 0, f"lora_B.{adapter}.bias": 0}
        of_inputs |= {f"lora_A.{adapter}.weight": 1}
    sharded = of_inputs if by_rows else of_outputs
    return {name: sharded.get(name) for name, _ in module.named_parameters()}


def draws(module: nn.Module) -> bool:
    """Whether it drops some of its input in training."""
    return is_adapted_linear(module) and any(isinstance(each, nn.Dropout) for each in module.modules())


# ---- models with adapters --------------------------------------------------------------------------------------------


def base_model(model: nn.Module) -> tuple[str, nn.Module]:
    """The model that layers with adapters were put into, and its name in the one that peft has wrapped it in."""
    name = "base_model.model"
    if type(model).__module__.startswith("peft.") and hasattr(model, "peft_config"):
        tuner = getattr(model, "base_model", None)
        inner = getattr(tuner, "_modules", {}).get("model")
        if type(tuner).__module__.startswith("peft.") and isinstance(inner, nn.Module):
            return name, inner
    return "", model


def layers_of(name: str, module: nn.Module) -> Iterator[str]:
    """The names of the layers that a rule for a layer of the base model is for."""
    if is_adapted_embedding(module):
        yield f"{name}.base_layer"
    elif _is_saved_layer(module):
        yield f"{name}.original_module"
        yield from (f"{name}.modules_to_save.{adapter}" for adapter in module.modules_to_save)  # type: ignore[union-attr]
    else:
        yield name
