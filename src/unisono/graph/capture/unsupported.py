"""What a model does that a graph of its ops does not show, so that a program would lose it silently: gradients of
its own making (here), state that it keeps elsewhere than in buffers (attributes.py), and draws that are not torch's
(rng_use.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from unisono.graph.capture.source import calling_line
from unisono.torch_patches import PatchSet, Target

LOST = ", which a program would lose; use a plan, which runs the model itself"
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_FOLLOWED = ("unisono.", "torch.nn.modules._functions")  # ours; and those by which modules call hooks
_OF_CUSTOM_OPS = "GeneratedBackwardFor_"  # torch.library's: the op itself is in the graph, and its backward with it


def gradients_at_hooks(model: nn.Module) -> list[str]:
    """Hooks of modules and parameters that are called in a backward."""
    found = [
        f"{name or type(module).__name__} has a backward hook{LOST}"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    return found + [
        f"{name} has a hook for its gradient{LOST}"
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ]


@contextlib.contextmanager
def gradients_of_its_own() -> Iterator[list[str]]:
    """In the block, notes where a model brings its own backward: torch.export takes only the ops of its forward."""
    found: list[str] = []
    plain_apply = Function.__dict__["apply"]
    plain_hooks = {name: getattr(torch.Tensor, name) for name in _HOOKS}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(_FOLLOWED) and not cls.__name__.startswith(_OF_CUSTOM_OPS):
            advice = " (give use_reentrant=False)" * (cls.__name__ == "CheckpointFunction")
            found.append(f"at {calling_line()} {cls.__name__} computes gradients of its own{advice}{LOST}")
        return plain_apply.__get__(None, cls)(*args, **kwargs)

    def noting(name: str) -> Any:
        def hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if line := calling_line():
                found.append(f"at {line} a hook is put on a gradient{LOST}")
            return plain_hooks[name](tensor, *args, **kwargs)

        return hook

    replacements: dict[Target, Any] = {
        (Function, "apply"): classmethod(apply),
        **{(torch.Tensor, name): noting(name) for name in _HOOKS},
    }
    with PatchSet(replacements, why="a trace does not see gradients of a model's own", until="the trace is made"):
        yield found
