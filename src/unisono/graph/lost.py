"""What a model does that a graph of its ops does not tell, so that a program would lose it without a word: gradients of
its own making, and state that it keeps elsewhere than in buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from unisono.graph.source import calling_line

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_FOLLOWED = ("unisono.", "torch.nn.modules._functions")  # ours; and those by which modules call hooks
_OF_CUSTOM_OPS = "GeneratedBackwardFor_"  # torch.library's: the op itself is in the graph, and its backward with it


def gradients_at_hooks(model: nn.Module) -> list[str]:
    """Hooks of modules and parameters that are called in a backward."""
    found = [
        f"{name or type(module).__name__} has a backward hook"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    return found + [
        f"{name} has a hook for its gradient"
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
            found.append(f"at {calling_line()} {cls.__name__} computes gradients of its own{advice}")
        return plain_apply.__get__(None, cls)(*args, **kwargs)

    def noting(name: str) -> Any:
        def hook(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if line := calling_line():
                found.append(f"at {line} a hook is put on a gradient")
            return plain_hooks[name](tensor, *args, **kwargs)

        return hook

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    for name in _HOOKS:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield found
    finally:
        Function.apply = plain_apply  # type: ignore[method-assign]
        for name, hook in plain_hooks.items():
            setattr(torch.Tensor, name, hook)


class Attributes:
    """What the modules of a model keep in plain attributes, as it was before a run.

    torch.export puts all back afterwards, so a run is looked at from within, by `look`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._before = {path: _plain(module) for path, module in self._modules.items()}
        self.changed: dict[str, Any] = {}  # numbers, texts and collections, by name: what they are after a run
        self.replaced: dict[str, torch.Tensor] = {}  # tensors that others took the place of: those that were there

    def look(self) -> None:
        for path, module in self._modules.items():
            for name, was in self._before[path].items():
                full, now = f"{path}.{name}".lstrip("."), vars(module).get(name)
                if isinstance(was, torch.Tensor):
                    if isinstance(now, torch.Tensor) and now is not was:
                        self.replaced[full] = was
                elif not isinstance(now, torch.Tensor) and not _is_same(was, now):
                    self.changed.setdefault(full, _copied(now))

    @contextlib.contextmanager
    def after_a_run(self) -> Iterator[None]:
        """In the block, what a run changes is as it is after one."""
        places = [(self._modules[path].__dict__, name) for path, _, name in (n.rpartition(".") for n in self.changed)]
        kept = [holder.get(name) for holder, name in places]
        for (holder, name), value in zip(places, self.changed.values(), strict=True):
            holder[name] = value
        try:
            yield
        finally:
            for (holder, name), value in zip(places, kept, strict=True):
                holder[name] = value


def _plain(module: nn.Module) -> dict[str, Any]:
    kinds = bool | int | float | str | list | dict | set | torch.Tensor | None
    held = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    return {name: _copied(value) for name, value in held.items() if isinstance(value, kinds)}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else value


def _is_same(was: Any, now: Any) -> bool:
    """Of collections, what is plain is compared; tensors and other objects in them are not."""
    if type(was) is not type(now):
        return False
    if isinstance(was, list):
        return len(was) == len(now) and all(map(_is_same_item, was, now))
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(_is_same_item(was[key], now[key]) for key in was)
    return bool(was == now)


def _is_same_item(was: Any, now: Any) -> bool:
    return not isinstance(was, bool | int | float | str) or _is_same(was, now)
