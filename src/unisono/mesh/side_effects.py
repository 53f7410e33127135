"""Trial runs: a user's code is run to learn something of it, and Python is then put back as it was.

Plans are checked on models without data, on the "meta" device, and on copies in float64. What the user's code keeps of
such a run must not be met by the real one:

    @functools.lru_cache                      a cache that now holds a tensor without data
    def positions(n): return torch.arange(n)

    _TABLES = {}                              a dict of a module, an attribute of a class, a default argument, ...
    Block.calls += 1                          a counter

In a block of `no_side_effects(model, loss)` the state that this code can reach is recorded, and restored at the end.

Note: what can be reached. From a module to its class, from a class to its methods, from a function to the globals that
its code names, its closure and its defaults, and from there on. Code of torch, of Python and of this library is not
followed: torch's own caches know of devices. Of a functools cache that was added to and holds tensors, all entries are
dropped; others may hold what must be made only once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_SKIPPED = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "functorch", "numpy", "pytest", "scipy", "sympy", "torch", "torchgen", "triton", "unisono", "_pytest",
}  # fmt: skip
_LARGE = 10_000  # elements of a container that is data, and no cache
_MOST_COPIED = 10**7  # elements of tensors in attributes: more are data, and no running means
_DEPTH = 4  # containers in containers that a result of a cached function is searched for tensors
_Cache = functools._lru_cache_wrapper
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size)
_CONTAINERS: tuple[Any, ...] = (collections.OrderedDict, dict, list, set, collections.deque)
_NAMESPACES = (nn.Module, types.SimpleNamespace, threading.local)  # objects that are followed whoever wrote their class
_MISSING = object()
_NO_NAMES: frozenset[str] = frozenset()


_active: list[_State] = []  # of the blocks that are open, the innermost last


@contextlib.contextmanager
def no_side_effects(*roots: Any) -> Iterator[Callable[[], set[str]]]:
    """In the block, run code of these objects (modules, functions); afterwards Python's state is what it was before.

    Restored are caches, globals, attributes of classes and objects, containers and generators of random numbers that
    this code can reach, tensors that modules hold in attributes or containers, the default generators on the CPU, and
    torch's default dtype. A block inside another one, for the same objects, restores what was before the outer one.
    The function that it gives names what has been changed so far.
    """
    roots = tuple(root for root in roots if root is not None)
    state = next((each for each in _active if each.covers(roots)), None) or _State(*roots)
    _active.append(state)
    try:
        yield state.changed
    finally:
        _active.pop()
        state.restore()


def reaches(root: Any, targets: Iterable[Any]) -> bool:
    """Whether the code of an object can reach any of the others, as a hook may whose closure holds a model."""
    state = _State(root)
    return any(state.covers((target,)) for target in targets)


def recorded(*roots: Any) -> Callable[[], None]:
    """Record the state that the code of these objects can reach; calling what is returned restores it."""
    return _State(*roots).restore


def _is_numpy_random(value: Any) -> bool:
    return type(value).__module__.startswith("numpy.random")


class _State:
    """What code can reach, as it is now."""

    def __init__(self, *roots: Any) -> None:
        self._seen: dict[int, Any] = {}  # by id; kept, so that no other object gets the id
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._modules: set[tuple[int, frozenset[str]]] = set()  # with the names that were followed
        self._caches: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any, list[Any]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._objects: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor]] = {}  # with version and values
        self._room = _MOST_COPIED
        self._paths: dict[int, str] = {}  # of modules in the roots
        for root in roots:
            if isinstance(root, nn.Module):
                self._paths |= {id(module): name for name, module in root.named_modules()}
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []  # how to restore them, and their states
        self._pending: list[tuple[Any, frozenset[str]]] = [(root, frozenset()) for root in roots]
        while self._pending:
            self._visit(*self._pending.pop())
        numpy = sys.modules.get("numpy")
        self._python_random, self._torch_random = random.getstate(), torch.get_rng_state()
        self._numpy_random = None if numpy is None else numpy.random.get_state()
        self._dtype = torch.get_default_dtype()

    def covers(self, roots: tuple[Any, ...]) -> bool:
        return all(id(root) in self._seen for root in roots)

    def restore(self) -> None:
        for cache, before in self._caches:
            now = cache.cache_info()
            if (now.misses, now.currsize) != (before.misses, before.currsize) and _holds_tensors(cache):
                cache.cache_clear()
        for kind, container, members in self._containers:
            _restore_container(kind, container, members)
        for cls, attributes in self._classes:
            _restore_class(cls, attributes)
        for set_state, state in self._generators:
            set_state(state)
        for cell, value in self._cells:
            cell.cell_contents = value
        for _, namespace, names in self._objects:
            if _is_other(namespace, names):
                namespace.clear()
                namespace.update(names)
        for key, (name, tensor, version, values) in self._tensors.items():
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(values)
                self._tensors[key] = (name, tensor, tensor._version, values)
        for (_, name), (namespace, value) in self._globals.items():
            if value is _MISSING:
                namespace.pop(name, None)
            elif namespace.get(name, _MISSING) is not value:
                namespace[name] = value
        self._restore_torch()

    def changed(self) -> set[str]:
        """The names of attributes, globals and containers that are not what they were."""
        names: set[str] = set()
        for owner, namespace, before in self._objects:
            if _is_other(namespace, before):
                names |= {self._named(owner, name) for name in namespace.keys() | before.keys()
                          if namespace.get(name, _MISSING) is not before.get(name, _MISSING)}  # fmt: skip
        for cls, attributes in self._classes:
            now = dict(vars(cls))
            names |= {f"{cls.__name__}.{name}" for name, value in attributes.items() if now.get(name) is not value}
        for (_, name), (namespace, value) in self._globals.items():
            if namespace.get(name, _MISSING) is not value:
                names.add(name)
        for kind, container, members in self._containers:
            if _has_other_members(kind, container, members):
                names |= self._names_in(container, members)
        names |= {"a variable of a closure" for cell, value in self._cells if cell.cell_contents is not value}
        names |= {name for name, tensor, version, _ in self._tensors.values() if tensor._version != version}
        return names

    def _named(self, owner: Any, attribute: str) -> str:
        path = self._paths.get(id(owner))
        return f"{type(owner).__name__}.{attribute}" if not path else f"{path}.{attribute}"

    def _names_in(self, container: Any, members: list[Any]) -> set[str]:
        for owner, _, before in self._objects:
            for name, value in before.items():
                if value is container and isinstance(owner, nn.Module) and name in _OF_MODULES:
                    was = dict(zip(members[::2], members[1::2], strict=True))
                    others = {key for key in container.keys() | was.keys() if container.get(key) is not was.get(key)}
                    return {self._named(owner, key) for key in others}
                if value is container:
                    return {self._named(owner, name)}
        named = (name for (_, name), (_, value) in self._globals.items() if value is container)
        return {next(named, f"a {type(container).__name__}")}

    def _restore_torch(self) -> None:
        random.setstate(self._python_random)
        torch.set_rng_state(self._torch_random)
        torch.set_default_dtype(self._dtype)
        if self._numpy_random is not None:
            sys.modules["numpy"].random.set_state(self._numpy_random)

    # ---- the walk ----------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, names: frozenset[str]) -> None:
        """`names` are those that the code uses that led here."""
        if isinstance(value, types.ModuleType):  # comes for each function that uses it; modules may name each other
            if _is_followed(value.__name__) and (id(value), names) not in self._modules:
                self._modules.add((id(value), names))
                self._follow_names(vars(value), names)
            return
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, _CONTAINERS):
            self._container(value)
        elif isinstance(value, tuple):
            self._later(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.CellType):
            self._cell(value)
        elif isinstance(value, _Cache):
            self._caches.append((value, value.cache_info()))
            self._later((value.__wrapped__,))
        elif isinstance(value, types.MethodType):
            self._later((value.__self__, value.__func__))
        elif isinstance(value, staticmethod | classmethod):
            self._later((value.__func__,))
        elif isinstance(value, property):
            self._later((value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self._later((value.func, value.args, value.keywords))
        elif isinstance(value, functools.cached_property):
            self._later((value.func,))
        elif isinstance(value, torch.Generator) or (_is_numpy_random(value) and hasattr(value, "set_state")):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif _is_numpy_random(value) and hasattr(value, "bit_generator"):
            bits = value.bit_generator
            self._generators.append((functools.partial(setattr, bits, "state"), bits.state))
        else:
            self._object(value)

    def _later(self, values: Iterable[Any]) -> None:
        self._pending.extend((value, _NO_NAMES) for value in values if not isinstance(value, _PLAIN))

    def _function(self, function: types.FunctionType) -> None:
        if (function.__module__ or "").partition(".")[0] == "unisono":
            return  # a hook, perhaps, that notes what this very run is for
        self._later((*(function.__closure__ or ()), *(function.__defaults__ or ())))
        self._later((function.__kwdefaults__ or {}).values())
        if vars(function):
            self._later((vars(function),))
        if _is_followed(function.__globals__.get("__name__")):
            self._follow_names(function.__globals__, _names_in(function.__code__))

    def _follow_names(self, namespace: dict[str, Any], names: frozenset[str]) -> None:
        for name in names:
            key = (id(namespace), name)
            if key not in self._globals:
                self._globals[key] = (namespace, namespace.get(name, _MISSING))
            value = self._globals[key][1]
            if value is not _MISSING and not isinstance(value, _PLAIN):
                self._pending.append((value, names))

    def _container(self, value: Any) -> None:
        if len(value) <= _LARGE:
            kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
            members = _members(kind, value)
            self._containers.append((kind, value, members))
            self._later(members)

    def _class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_followed(base.__module__) and (base is cls or id(base) not in self._seen):
                self._seen[id(base)] = base
                attributes = dict(vars(base))
                self._classes.append((base, attributes))
                self._later(attributes.values())

    def _cell(self, cell: types.CellType) -> None:
        with contextlib.suppress(ValueError):  # it is empty
            self._cells.append((cell, cell.cell_contents))
            self._later((cell.cell_contents,))

    def _object(self, value: Any) -> None:
        namespace = getattr(value, "__dict__", None)
        if type(namespace) is not dict or not (isinstance(value, _NAMESPACES) or _is_followed(type(value).__module__)):
            return
        before = dict(namespace)
        self._objects.append((value, namespace, before))
        self._later((type(value),))
        is_module = isinstance(value, nn.Module)
        self._later(each for name, each in before.items() if not is_module or name not in _TORCH_NAMES or each)
        if is_module:
            for name, each in before.items():
                if name not in _TORCH_NAMES and name not in _OF_MODULES:
                    self._note_tensors(self._named(value, name), each)

    def _note_tensors(self, name: str, value: Any, depth: int = _DEPTH) -> None:
        """Of an attribute, and of containers in it: an op in place changes a tensor where no attribute changes."""
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, list | tuple | collections.deque):
            for each in value if depth and len(value) <= _LARGE else ():
                self._note_tensors(name, each, depth - 1)
            return
        if type(value) is not torch.Tensor or value.layout != torch.strided or id(value) in self._tensors:
            return
        if not value.is_meta and not value.is_inference() and value.numel() <= self._room:
            self._room -= value.numel()
            self._tensors[id(value)] = (name, value, value._version, value.detach().clone())


_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
_TORCH_NAMES = frozenset(vars(nn.Module())) - _OF_MODULES


def _is_other(namespace: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(namespace) != len(before) or any(namespace.get(n, _MISSING) is not v for n, v in before.items())


def _has_other_members(kind: Any, container: Any, members: list[Any]) -> bool:
    now = _members(kind, container)
    return len(now) != len(members) or any(a is not b for a, b in zip(now, members, strict=True))


def _restore_container(kind: Any, container: Any, members: list[Any]) -> None:
    if not _has_other_members(kind, container, members):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(members[::2], members[1::2], strict=True):
            kind.__setitem__(container, key, value)
        return
    add = kind.add if kind is set else kind.append
    for member in members:
        add(container, member)


def _restore_class(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(cls, name, value)


def _members(kind: Any, value: Any) -> list[Any]:
    """Of a dict, keys and values alternately. By the methods of the base class: a subclass may import things, for
    example, when it is asked for its values."""
    if issubclass(kind, dict):
        return [each for item in kind.items(value) for each in item]
    return list(kind.__iter__(value))


def _is_followed(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _SKIPPED


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that the code uses, that of functions in it too."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _holds_tensors(cache: Any) -> bool:
    """Whether a functools cache has a tensor among its results. The collector knows what it refers to."""
    function = cache.__wrapped__
    return any(_has_tensor(each, _DEPTH) for each in gc.get_referents(cache) if each is not function)


def _has_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if not depth or isinstance(value, _PLAIN):
        return False
    if isinstance(value, dict):
        return any(_has_tensor(each, depth - 1) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_tensor(each, depth - 1) for each in value)
    return isinstance(getattr(value, "__dict__", None), dict) and _has_tensor(vars(value), depth - 1)
