"""Every patch of torch: what is replaced, why, and until when. Nothing stays patched after the block that needed it.

    with patched(F, "dropout", mine, why="...", until="..."):
        ...                                     # F.dropout is `mine`

    PATCHES = PatchSet({(F, "dropout"): mine, ...}, why="...", until="...")
    PATCHES.enter()                             # the first to enter replaces, the last to leave restores
    PATCHES.leave()

    with attention.handled("recomputation", handler):   # several parts of unisono handle one function one after the
    other
        ...

    with on_patched_call(record):               # record(F.dropout, args, kwargs, result) of calls by others' code
        ...

Order. Patches of one attribute nest: the last one installed is the first one removed, and PatchSet.leave raises an
InternalError otherwise, before anything is restored. `active_patches()` lists what is patched now.

Threads. A patch is seen by all threads, and a replacement is meant for one of them, the thread that runs the model. It
asks `runs_in(thread)`; in other threads (data loaders, loggers) it calls torch's own function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from unisono.errors import InternalError
from unisono.torch_compat import in_backward, is_compiling, is_tracing, no_spare_keys, not_compiled

Function = Callable[..., Any]
Target = tuple[Any, str]  # the module or class that has an attribute, and its name
Observer = Callable[[Function, tuple[Any, ...], dict[str, Any], Any], None]

_ABSENT = object()  # instead of a value that a class inherits, and does not have itself
_UNISONO = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAMES_OF_MODES = 6  # between a function of torch and what a mode calls for it
# Instead of a replaced function, while the functions of a graph are called to compile it; set by parallel/compile:
# in_graphs(the replacement, torch's own function, args, kwargs)
in_graphs: Callable[[Function, Function, tuple[Any, ...], dict[str, Any]], Any] | None = None
_lock = threading.RLock()
_entered: list[PatchSet] = []
_observers: list[tuple[int, Observer]] = []  # with the thread whose calls they see


@dataclass(frozen=True)
class Patch:
    owner: Any
    name: str
    why: str
    until: str

    def __str__(self) -> str:
        return f"{_name_of(self.owner)}.{self.name}: {self.why}, until {self.until}"


class PatchSet:
    """Attributes of torch that are replaced together. It may be entered several times, from several threads."""

    def __init__(self, replacements: Mapping[Target, Any], *, why: str, until: str) -> None:
        """replacements: functions or classes, and of a class also classmethods and other descriptors."""
        self.why, self.until = why, until
        self._new: dict[Any, dict[str, Any]] = {}  # by owner and name
        self._before: dict[Any, dict[str, Any]] = {}
        self._count = 0
        for (owner, name), replacement in replacements.items():
            self._new.setdefault(owner, {})[name] = _entry(owner, name, replacement)

    @property
    def patches(self) -> list[Patch]:
        return [Patch(owner, name, self.why, self.until) for owner, new in self._new.items() for name in new]

    def entries(self) -> list[tuple[Any, str, Any]]:
        """What attributes are replaced by: the owner, the name, and the replacement as it is installed."""
        return [(owner, name, entry) for owner, new in self._new.items() for name, entry in new.items()]

    def enter(self) -> None:
        with _lock:
            self._count += 1
            if self._count == 1:
                for owner, new in self._new.items():
                    held = vars(owner)
                    self._before[owner] = {name: held.get(name, _ABSENT) for name in new}
                    _assign(owner, new)
                _entered.append(self)

    def leave(self) -> None:
        with _lock:
            if self._count > 1:
                self._count -= 1
                return
            self._require_innermost()
            self._count = 0
            for owner, before in self._before.items():
                _assign(owner, before)
            _entered.remove(self)

    def _require_innermost(self) -> None:
        for owner, new in self._new.items():
            held = vars(owner)
            for name, function in new.items():
                if not self._count or held.get(name) is not function:
                    patch = Patch(owner, name, self.why, self.until)
                    over = (
                        f"{held.get(name)!r} was put over it and is still there" if self._count else "it is not active"
                    )
                    raise InternalError(f"the patch of {patch} is removed out of order: {over}; please report this")

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()


def _assign(owner: Any, values: dict[str, Any]) -> None:
    if isinstance(owner, ModuleType):
        vars(owner).update(values)
        return
    for name, value in values.items():
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def patched(owner: Any, name: str, replacement: Any, *, why: str, until: str = "the end of a block") -> PatchSet:
    """In a `with` block of it, an attribute of torch is replaced."""
    return PatchSet({(owner, name): replacement}, why=why, until=until)


def active_patches() -> list[Patch]:
    """What is patched now, in the order in which it was."""
    with _lock:
        return [patch for each in _entered for patch in each.patches]


def original(owner: Any, name: str) -> Any:
    """torch's own attribute, also where it is patched now."""
    with _lock:
        for each in _entered:
            if name in each._new.get(owner, ()):
                before = each._before[owner][name]
                return before if before is not _ABSENT else getattr(super(owner, owner), name)
    return getattr(owner, name)


def runs_in(thread: int) -> bool:
    """Whether this code runs in that thread, or on a thread of autograd's engine, which runs parts of a backward."""
    if threading.get_ident() == thread:
        return True
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


# ---- who watches calls of patched functions ------------------------------------------------------------------------


@contextlib.contextmanager
def on_patched_call(observe: Observer) -> Iterator[None]:
    """In the block, observe(torch's own function, args, kwargs, result) follows every call of a patched function that
    this thread makes from code outside unisono: what a model calls, however unisono computes it."""
    watching = (threading.get_ident(), observe)
    _observers.append(watching)
    try:
        yield
    finally:
        _observers.remove(watching)


def _entry(owner: Any, name: str, replacement: Any) -> Any:
    if isinstance(replacement, type) or not callable(replacement):  # classmethods and other descriptors
        return replacement
    return observed(original(owner, name), replacement)


def observed(own: Function, replacement: Function, depth: int = 1) -> Function:
    """The replacement of a torch function, with which observers see calls. depth: how many frames up the caller is."""

    code = getattr(inspect.unwrap(own), "__code__", None)
    eagerly = not_compiled(replacement)

    @functools.wraps(own)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a function that the user has compiled calls it: the graph ends here
            return eagerly(*args, **kwargs)
        if is_compiling():
            if is_tracing():
                assert in_graphs is not None
                return in_graphs(entry, own, args, kwargs)
            with no_spare_keys():  # the compiler asks for shapes, or for a purpose of its own
                return own(*args, **kwargs)
        if code is not None and _is_running(code):
            return own(*args, **kwargs)
        result = replacement(*args, **kwargs)
        if _observers and not sys._getframe(depth).f_code.co_filename.startswith(_UNISONO):
            for thread, observe in tuple(_observers):
                if threading.get_ident() == thread:
                    observe(own, args, kwargs, result)
        return result

    return entry


def _is_running(code: CodeType) -> bool:
    """Whether torch's own function has been called, and has asked a TorchFunctionMode: that is given the function as
    its module has it, so the patched one, which would be handled only where a mode happens to be active."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_OF_MODES):
        if frame is None or frame.f_code is code:
            return frame is not None
        frame = frame.f_back
    return False


# ---- functions that several parts of unisono handle ----------------------------------------------------------------


class Dispatcher:
    """One patch of a torch function with a chain of handlers: the outermost is called first, torch's own function last.

    A handler is called as handler(rest, *args, **kwargs), where `rest` is the remainder of the chain. Of handlers of
    one kind, the one that was added last is in the chain, in the thread that has added it. `innermost` is in the chain
    of every thread, while any handler is, or `patch` has been entered.
    """

    innermost: Function | None = None

    def __init__(self, owner: Any, name: str, kinds: Sequence[str], *, why: str) -> None:
        """kinds: of handlers, outermost first."""
        self._kinds = kinds
        self._own = original(owner, name)
        self._handlers: dict[str, list[tuple[int, Function]]] = {kind: [] for kind in kinds}
        self.patch = PatchSet({(owner, name): self._call}, why=why, until="the last handler is removed")

    @contextlib.contextmanager
    def handled(self, kind: str, handler: Function) -> Iterator[None]:
        """In the block, the handler is in the chain of this thread."""
        added = (threading.get_ident(), handler)
        self._handlers[kind].append(added)
        try:
            with self.patch:
                yield
        finally:
            self._handlers[kind].remove(added)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return _called(self._own, self._chain(), *args, **kwargs)

    def is_plain(self) -> bool:
        """Whether only `innermost` handles calls of this thread."""
        return len(self._chain()) == (self.innermost is not None)

    def _chain(self) -> list[Function]:
        chain = []
        for kind in self._kinds:
            for thread, handler in reversed(self._handlers[kind]):
                if runs_in(thread):
                    chain.append(handler)
                    break
        return chain if self.innermost is None else [*chain, self.innermost]


def _called(own: Function, chain: Sequence[Function], *args: Any, **kwargs: Any) -> Any:
    if not chain:
        return own(*args, **kwargs)
    return chain[0](functools.partial(_called, own, chain[1:]), *args, **kwargs)


attention = Dispatcher(
    F,
    "scaled_dot_product_attention",
    ("token check", "context parallelism", "recomputation"),  # and innermost dropout: mesh/random/dropout.py
    why="attention is checked, reaches the tokens of other ranks, is recomputed, or draws its dropout by global index",
)


@contextlib.contextmanager
def without_fused_attention() -> Iterator[None]:
    """In the block, torch's transformer layers do not take their fused path, which passes by the dispatcher."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _name_of(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)
