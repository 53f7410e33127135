"""The private names of torch that unisono uses, in one file. Tested on torch 2.11 and 2.13.

A torch release that renames one of them is served here, and nowhere else. Not here: `torch.utils._pytree`, which is in
common use, and attributes of modules and tensors (`_parameters`, `_backward_hooks`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as export_config
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks as global_optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

__all__ = [
    "MODULE_CALL",
    "NN_FUNCTIONS",
    "SPARE_KEYS",
    "BatchNormNd",
    "ConvNd",
    "DeviceContext",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "OpOverload",
    "RegionCall",
    "TorchDispatchMode",
    "assume_all_nonzero",
    "at_end_of_backward",
    "autograd_node",
    "clip_grad",
    "compiler_at_work",
    "compiler_options",
    "disable_dispatch_modes",
    "dispatch_mode",
    "exclude_key",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "forked_after_cuda",
    "function_modes",
    "global_optimizer_post_hooks",
    "global_optimizer_pre_hooks",
    "has_storage",
    "in_backward",
    "include_key",
    "is_compiling",
    "is_functorch_wrapped",
    "is_tracing",
    "keep_order_of_graphs",
    "may_be_compiled",
    "no_autocast",
    "no_function_modes",
    "no_spare_keys",
    "no_torch_function",
    "no_torch_function_subclass",
    "no_tracing",
    "not_compiled",
    "pop_function_modes",
    "random_ops",
    "saved_tensors_hooks",
    "set_tracing",
    "storage_uses",
    "transform_at_work",
    "unscale_",
    "update_scale_",
    "watch_random_ops",
    "will_run",
    "with_autograd",
    "without_wrapper",
]

# ---- modes: what torch calls instead of its functions ----------------------------------------------------------------

no_torch_function = torch._C.DisableTorchFunction  # neither modes nor subclasses of tensors
no_torch_function_subclass = torch._C.DisableTorchFunctionSubclass
no_autocast = torch._C._DisableAutocast
not_compiled = torch._disable_dynamo  # a decorator: torch.compile calls such a function instead of tracing it


def may_be_compiled() -> bool:
    """Whether torch.compile has been used in this process."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # None is the backend of what torch.compile is kept away from
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())


def without_wrapper(op: Any) -> Callable[..., Any]:
    """An op of torch's dispatcher, to be called without a frame of Python."""
    found: Callable[..., Any] = getattr(op, "_op", op)
    return found


@contextlib.contextmanager
def no_function_modes(but: Collection[Any] = ()) -> Iterator[None]:
    """In the block, no TorchFunctionMode is active, but for some, and new ones may be entered; those are left with
    it."""
    modes = pop_function_modes(0)
    try:
        for mode in reversed(modes):
            if any(mode is each for each in but):
                torch._C._push_on_torch_function_stack(mode)
        yield
    finally:
        pop_function_modes(0)
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def forked_after_cuda() -> bool:
    """Whether this process was forked from one that had initialised CUDA, and so cannot use it."""
    return bool(torch.cuda._is_in_bad_fork())


def pop_function_modes(left: int) -> list[Any]:
    """Leave all but some outer modes; those that were left, the innermost first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack() - left)]


def assume_all_nonzero() -> contextlib.AbstractContextManager[Any]:
    """In the block, torch.nonzero of a meta tensor has the shape that it has if no element is zero."""
    return export_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


# Keys of torch's dispatcher that are above autograd, and that torch itself uses in its own tests only.
SPARE_KEYS = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")
_PARSED = {name: torch._C._dispatch_key_parse(name) for name in SPARE_KEYS}
_SPARE = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _PARSED.values()))


def exclude_key(name: str, is_excluded: bool) -> None:
    """Whether this thread's ops pass by kernels that are registered under a spare key: a block without a block."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(_PARSED[name], is_excluded)


def include_key(name: str, is_included: bool) -> None:
    """Whether this thread's ops look for kernels that are registered under a spare key."""
    torch._C._dispatch_tls_set_dispatch_key_included(_PARSED[name], is_included)


def no_spare_keys() -> contextlib.AbstractContextManager[Any]:
    """In the block, this thread's ops pass by the kernels that are registered under spare keys."""
    return torch._C._ExcludeDispatchKeyGuard(_SPARE)


def watch_random_ops(watch: bool | list[tuple[bool, bool]]) -> list[tuple[bool, bool]]:
    """Whether this thread's ops look for kernels under spare keys, or as they did before; what was before."""
    before = [
        (torch._C._dispatch_tls_is_dispatch_key_included(key), torch._C._dispatch_tls_is_dispatch_key_excluded(key))
        for key in _PARSED.values()
    ]
    states = watch if isinstance(watch, list) else [(watch, not watch)] * len(_PARSED)
    for key, (is_included, is_excluded) in zip(_PARSED.values(), states, strict=True):
        torch._C._dispatch_tls_set_dispatch_key_included(key, is_included)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, is_excluded)
    return before


def random_ops() -> Iterator[tuple[str, Any]]:
    """All ops of aten that draw from a generator, such as "normal_" and "bernoulli_.float", with their schemas."""
    for name in torch._C._dispatch_get_all_op_names():
        op, _, overload = name.partition(".")
        if op.startswith("aten::"):
            tags = torch._C._get_operation_overload(op, overload)[2]
            if torch.Tag.nondeterministic_seeded in tags:
                yield name.removeprefix("aten::"), torch._C._get_schema(op, overload)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


_compiler = threading.local()


def compiler_options(share: float) -> contextlib.AbstractContextManager[Any]:
    """In the block, compiled graphs keep at most this share of what they would keep for the backward."""
    from torch._functorch import config

    # The backward is compiled with the forward, not when it first runs: what fails then cannot run eagerly any more.
    patched: contextlib.AbstractContextManager[Any] = config.patch(
        activation_memory_budget=share, force_non_lazy_backward_lowering=True
    )
    return patched


def keep_order_of_graphs() -> None:
    """Dynamo tries compiled graphs in the order in which they were made, not the last used one first: a recomputation
    must take the graph that the forward took."""
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def compiler_at_work() -> Iterator[None]:
    """In the block, this thread compiles a graph."""
    _compiler.depth = getattr(_compiler, "depth", 0) + 1
    try:
        yield
    finally:
        _compiler.depth -= 1
        set_tracing(False)


def is_compiling() -> bool:
    """Whether this thread is in a compilation: torch calls functions on fake tensors, and for purposes of its own."""
    if getattr(_compiler, "depth", 0) > 0:
        return True
    return getattr(_compiler, "regions", 0) > 0 and TracingContext.try_get() is not None


class RegionCall:
    """In a `with` block of it, Dynamo may compile what runs. Other traces, such as torch.export's, are not meant by
    `is_compiling`.

    Graphs compiled here do not serve once hooks were added to a module, and take numbers of Python (the rate of a
    dropout) as constants."""

    _OPTIONS: ClassVar = {"skip_nnmodule_hook_guards": False, "specialize_float": True}

    def __enter__(self) -> None:
        from torch._dynamo import config

        _compiler.regions = getattr(_compiler, "regions", 0) + 1
        self._before = {name: getattr(config, name) for name in self._OPTIONS}
        for name, value in self._OPTIONS.items():
            setattr(config, name, value)

    def __exit__(self, *_: object) -> None:
        from torch._dynamo import config

        for name, value in self._before.items():
            setattr(config, name, value)
        _compiler.regions -= 1


def set_tracing(is_tracing: bool) -> None:
    """Whether what a compilation calls from here on are the operations of the graph that is compiled."""
    if is_tracing and not getattr(_compiler, "is_tracing", False):
        _compiler.keys = watch_random_ops(True)
    elif not is_tracing and getattr(_compiler, "is_tracing", False):
        watch_random_ops(_compiler.keys)
    _compiler.is_tracing = is_tracing


@contextlib.contextmanager
def no_tracing() -> Iterator[None]:
    """In the block, operations are not those of a graph that is compiled, but for the shapes of one."""
    was_tracing = is_tracing()
    set_tracing(False)
    try:
        with no_spare_keys():
            yield
    finally:
        set_tracing(was_tracing)


def is_tracing() -> bool:
    return getattr(_compiler, "is_tracing", False)


# ---- autograd --------------------------------------------------------------------------------------------------------


_AUTOGRAD_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in vars(torch._C.DispatchKey)
    if name.startswith("Autograd") or name == "ADInplaceOrView"
]


@contextlib.contextmanager
def with_autograd() -> Iterator[None]:
    """In the block, within the kernel of an op, operations are recorded by autograd again."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def autograd_node() -> Any:
    """The node whose backward, or hook, this thread is in; None outside of a backward."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def saved_tensors_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The hooks that pack and unpack what autograd saves now: those of the innermost torch.autograd.graph block."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def will_run(node: Any) -> bool:
    """Whether the backward that is under way runs a node; RuntimeError of a leaf's node in torch.autograd.grad."""
    return bool(torch._C._will_engine_execute_node(node))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- tensors ---------------------------------------------------------------------------------------------------------

has_storage = torch._C._has_storage
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def transform_at_work() -> bool:
    """Whether a transform of torch.func (grad, vmap) calls what runs: tensors are then not known by their memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


# ---- modules ---------------------------------------------------------------------------------------------------------

MODULE_CALL = nn.Module._call_impl.__code__  # of the frames in which modules run
NN_FUNCTIONS = torch._C._nn
ConvNd = nn.modules.conv._ConvNd
BatchNormNd = nn.modules.batchnorm._BatchNorm
NormBase = nn.modules.batchnorm._NormBase
