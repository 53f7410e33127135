"""What the modules of a model keep in plain attributes, and what a run makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unisono.graph.marks.recorder import MARKER

_OF_MODULES = frozenset(vars(nn.Module()))  # what every module has
_NOTHING = object()  # the value of an attribute that is not there
_PLAIN = bool | int | float | str | list | tuple | dict | set | torch.Tensor | None


class Attributes:
    """The plain attributes of a model's modules, as they were before a run.

    torch.export puts all back afterwards, so a run is looked at from within, by `look`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._names = {path: set(vars(module)) for path, module in self._modules.items()}
        self._before = {path: _plain(module) for path, module in self._modules.items()}
        self.changed: dict[str, Any] = {}  # by name: what they are after a run; of tensors only shapes and dtypes
        self.replaced: dict[str, list[torch.Tensor]] = {}  # tensors that others replaced, by name
        self.noted: list[str] = []  # for each tensor that a run has put into an attribute: that attribute's name
        self.settled: set[str] = set()  # what the run before has changed, and this one has left as it was
        self._put: dict[str, Any] = {}

    def look(self) -> None:
        """At what the run that is being traced has changed; its tensors are noted in the graph."""
        self.noted = []
        self.settled = {name for name, value in self._put.items() if _is_left(value, self._now(name))}
        for path, module in self._modules.items():
            before, after = self._before[path], _plain(module)
            for name in {**before, **after}:
                was, now = before.get(name, _NOTHING), vars(module).get(name, _NOTHING)
                full = f"{path}.{name}".lstrip(".")
                if not _is_same(was, now):
                    self.changed.setdefault(full, _copied(now, _without_data))
                    self._note(full, now)
                elif gone := _gone(was, now):
                    self.replaced[full] = gone

    def _note(self, name: str, now: Any) -> None:
        for leaf in pytree.tree_leaves(now):
            if isinstance(leaf, torch.Tensor):
                self.noted.append(name)
                MARKER(leaf.detach(), -1)

    def _now(self, name: str) -> Any:
        holder, last = self._owner_of(name)
        return holder.get(last, _NOTHING)

    def _owner_of(self, name: str) -> tuple[dict[str, Any], str]:
        path, _, last = name.rpartition(".")
        return self._modules[path].__dict__, last

    @contextlib.contextmanager
    def after_a_run(self, names: Collection[str], fake: Callable[[Any], Any]) -> Iterator[None]:
        """In the block, these are as they are after a run; `fake` gives tensors for shapes and dtypes."""
        kept = {name: self._now(name) for name in names}
        self._put = {name: fake(self.changed[name]) for name in names}
        for name, value in self._put.items():
            _set(*self._owner_of(name), _copied(value))
        try:
            yield
        finally:
            self._put = {}
            for name, value in kept.items():
                _set(*self._owner_of(name), value)

    def put_back(self) -> None:
        """Takes away the attributes that a traced run has made."""
        for path, module in self._modules.items():
            for name in set(vars(module)) - self._names[path]:
                del module.__dict__[name]


def _set(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is _NOTHING:
        holder.pop(name, None)
    else:
        holder[name] = value


def _plain(module: nn.Module) -> dict[str, Any]:
    held = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    return {name: _copied(value) for name, value in held.items() if isinstance(value, _PLAIN)}


def _copied(value: Any, tensor: Callable[[torch.Tensor], Any] = lambda kept: kept) -> Any:
    """A copy of its collections, and of their tensors what `tensor` gives."""

    def leaf(kept: Any) -> Any:
        if isinstance(kept, torch.Tensor):
            return tensor(kept)
        return kept.copy() if isinstance(kept, set) else kept

    return pytree.tree_map(leaf, value)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _gone(was: Any, now: Any) -> list[torch.Tensor]:
    """Tensors that are not where they were."""
    pairs = zip(pytree.tree_leaves(was), pytree.tree_leaves(now), strict=False)
    return [old for old, new in pairs if isinstance(old, torch.Tensor) and new is not old]


def _is_left(was: Any, now: Any) -> bool:
    return _is_same(was, now) and not _gone(was, now)


def _is_same(was: Any, now: Any) -> bool:
    """But for which tensors they hold; objects that are not plain are not compared."""
    if isinstance(was, torch.Tensor) or isinstance(now, torch.Tensor):
        return isinstance(was, torch.Tensor) and isinstance(now, torch.Tensor)
    if not isinstance(was, _PLAIN) and not isinstance(now, _PLAIN):
        return (was is _NOTHING) == (now is _NOTHING)
    if type(was) is not type(now):
        return False
    if isinstance(was, list | tuple):
        return len(was) == len(now) and all(map(_is_same, was, now))
    if isinstance(was, dict):
        return was.keys() == now.keys() and all(_is_same(was[key], now[key]) for key in was)
    return bool(was == now)
