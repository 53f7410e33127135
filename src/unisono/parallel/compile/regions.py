"""Regions: the modules of a model that are compiled, one by one.

Blocks are compiled alike: one graph serves all blocks of a class whose shapes agree, as Dynamo's guards decide, so that
a deep model takes as long to compile as a shallow one. Besides blocks, modules that do more than one product (the norm
before the head, for example) are regions. What is between regions runs eagerly: collectives of ZeRO and pipelines,
recomputation, and the hooks of users.

A region runs eagerly
- in trial runs, and in a first step in which values and random numbers are checked;
- where a mode of torch watches its operations, or its tensors have no values;
- from then on, if it cannot be compiled: one warning has the reason. Of a block with experts, or with another module
  that no graph can have, the modules that it calls become regions in its place.
"""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from unisono.amounts import format_seconds
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import RandomState
from unisono.parallel.blocks import is_container, outermost_lists
from unisono.parallel.compile import rewrite
from unisono.parallel.compile.backends import backend_for, compiler
from unisono.parallel.compile.collectives import Location, locate
from unisono.torch_compat import (
    DeviceContext,
    RegionCall,
    compiler_at_work,
    compiler_options,
    dispatch_mode,
    function_modes,
    keep_order_of_graphs,
    no_function_modes,
    no_spare_keys,
    pop_function_modes,
)

_RECOMPILED = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")
_PLAIN = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity)  # one op: nothing to fuse


_REGION = "unisono_compiled"
_running: list[CompiledRegion] = []  # the innermost last
_eager_depth = 0
_any = False


@contextmanager
def eager_regions() -> Iterator[None]:
    """In the block, no region is compiled."""
    global _eager_depth
    _eager_depth += 1
    try:
        yield
    finally:
        _eager_depth -= 1


def compiles() -> bool:
    """Whether this process has compiled regions."""
    return _any


@dataclass
class Compilation:
    """Of one model under one plan."""

    random: RandomState
    backend: str
    budget: float = 1.0  # of the activations that the compiler would keep: the share that it may
    seconds: float = 0.0  # that compiling took
    graphs: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # of regions that run eagerly: why
    split: dict[str, str] = field(default_factory=dict)  # of regions whose modules are regions instead: why
    regions: list[CompiledRegion] = field(default_factory=list)
    runners: dict[type, Runners] = field(default_factory=dict)  # of modules of a class
    has_begun: bool = False  # whether the graph of what runs has been found, or compiled
    modes: Sequence[TorchFunctionMode] = ()  # that are on around the region that runs, and in its graph

    def compile(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend for modules."""
        region = _running[-1]
        modules = {str(id(module)): module for module in region.module.modules()}
        rewrite.rewrite(graph_module, partial(self._site, region, modules), _run_from)
        rewrite.trace_under(graph_module, self.modes)
        return self.compile_graph(graph_module, inputs)

    def compile_graph(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        start, modes = time.perf_counter(), len(function_modes())
        try:
            with compiler_at_work(), compiler_options(self.budget):
                compiled = compiler(self.backend)(graph_module, inputs)
        finally:
            pop_function_modes(modes)  # of a trace that failed
            self.seconds += time.perf_counter() - start
            self.graphs += 1

        def run(*args: Any) -> Any:
            self.has_begun = True
            return compiled(*args)

        return run

    def add(self, module: nn.Module, name: str, *, is_part: bool = False) -> None:
        """Compile a module when it runs."""
        of_class = self.runners.setdefault(type(module), Runners(self.compile))
        region = CompiledRegion(module, name, self, of_class, is_part=is_part)
        module.forward = wraps(module.forward)(partial(region))
        setattr(module, _REGION, True)
        self.regions.append(region)

    def note_failure(self, name: str, error: Exception) -> None:
        """What cannot be compiled runs eagerly from now on; one warning has the first reason."""
        self.failures[name] = failure_of(error)
        if len(self.failures) == 1 and not self.split:
            warnings.warn(f"{name} cannot be compiled and runs eagerly: {self.failures[name]}", stacklevel=3)

    def split_up(self, region: CompiledRegion, parts: dict[str, nn.Module], error: Exception) -> None:
        """Compile the modules of a region that cannot be one graph; one warning has the first reason."""
        self.split[region.name] = failure_of(error)
        self.regions.remove(region)
        setattr(region.module, _REGION, False)
        for path, part in parts.items():
            self.add(part, region.name_of(path), is_part=True)
        if len(self.split) == 1 and not self.failures:
            warnings.warn(
                f"{region.name} cannot be compiled as one graph, and its modules are compiled one by one: "
                f"{self.split[region.name]}",
                stacklevel=3,
            )

    def _site(self, region: CompiledRegion, modules: dict[str, nn.Module], node: fx.Node) -> str:
        """The innermost named module that makes a call, as an attribute of the region's module."""
        paths = {module: path for path, module in region.module.named_modules()}
        for module in rewrite.calling_modules(node, modules):
            if self.random.name_of(module) is not None:
                return paths[module]
        return ""

    def __str__(self) -> str:
        if not self.regions:
            return "nothing to compile"
        compiled = sum(region.name not in self.failures for region in self.regions)
        text = f"compiled {compiled} of {len(self.regions)} regions in {self.graphs} graphs: "
        text += format_seconds(self.seconds, "s", 0)
        for name, reason in list(self.failures.items())[:1]:
            text += f"; {name} runs eagerly: {reason}"
        for name, reason in list(self.split.items())[: not self.failures]:
            text += f"; {name} is compiled by its modules: {reason}"
        return text


def _run_from(site: str, location: Location) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function of a compiled graph as called by a module of the region that runs. Graphs of several models may
    have the same call, so it knows no model."""

    def run(call: Callable[[], Any]) -> Any:
        state = active_state()
        if state is None:
            return call()
        with state.called_by(_running[-1].name_of(site), locate(location)):
            return call()

    return run


class CompiledRegion:
    """The forward of a module, compiled where that is possible."""

    def __init__(
        self, module: nn.Module, name: str, compilation: Compilation, runners: Runners, *, is_part: bool = False
    ) -> None:
        """is_part: whether it is a module of a region that could not be compiled."""
        self.module, self.name, self._is_part = module, name, is_part
        self._own_forward = vars(module).get("forward")  # of this module alone, where it is not its class's
        self._compilation, self._runners = compilation, runners

    def name_of(self, site: str) -> str:
        """The name by which a module of the region draws random numbers: several regions may share the module."""
        return self._compilation.random.name_of(self.module.get_submodule(site)) or f"{self.name}.{site}".strip(".")

    @property
    def _forward(self) -> Callable[..., Any]:
        """Looked up for each call: a layer may be given another class later (float8.py)."""
        return self._own_forward or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = modes_in_graph()
        known = self._compilation.failures, self._compilation.split
        if modes is None or any(self.name in names for names in known) or not can_be_compiled((args, kwargs)):
            return self._forward(*args, **kwargs)
        _running.append(self)
        try:
            self._compilation.modes, self._compilation.has_begun = modes, False
            with plain_for_dynamo(), RegionCall():
                return self._runners(modes)(self._forward, *args, **kwargs)
        except Exception as error:
            if self._compilation.has_begun:
                raise  # of the region itself, not of its compilation
            self._leave_to_parts(error)
        finally:
            _running.pop()
        return self._forward(*args, **kwargs)

    def _leave_to_parts(self, error: Exception) -> None:
        parts = {} if self._is_part or type(error).__name__ in _RECOMPILED else parts_of(self.module)
        if parts:
            self._compilation.split_up(self, parts, error)
        else:
            self._compilation.note_failure(self.name, error)


def modules_in_regions(model: nn.Module) -> set[nn.Module]:
    """Modules that do not run by themselves, but as a part of a compiled region."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if getattr(module, _REGION, False):
            found.update(child for child in module.modules() if child is not module)
    return found


def modes_in_graph() -> list[TorchFunctionMode] | None:
    """Function modes that are on and that a graph can be traced under: those with `in_graphs`. None if there are
    others, but for torch's default device, which Dynamo knows."""
    modes = [mode for mode in function_modes() if not isinstance(mode, DeviceContext)]
    return modes if all(getattr(mode, "in_graphs", False) for mode in modes) else None


def plain_for_dynamo() -> AbstractContextManager[None]:
    """In the block, no mode is on but a default device, and the thread has its usual dispatch keys: Dynamo guards them,
    and they differ from step to step."""
    return _without_modes() if function_modes() else no_spare_keys()


@contextmanager
def _without_modes() -> Iterator[None]:
    devices = [mode for mode in function_modes() if isinstance(mode, DeviceContext)]
    with no_function_modes(but=devices), no_spare_keys():
        yield


class Runners:
    """Compiled functions that call a function, by the modes that their graphs are traced under."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._made: dict[tuple[type, ...], Callable[..., Any]] = {}

    def __call__(self, modes: Sequence[TorchFunctionMode]) -> Callable[..., Any]:
        kinds = tuple(map(type, modes))
        if kinds not in self._made:
            self._made[kinds] = torch.compile(runner(), backend=self._backend, fullgraph=True)
        return self._made[kinds]


def can_be_compiled(arguments: Any) -> bool:
    """Whether what runs now may be compiled: no dispatch mode watches it, and tensors have values."""
    if _eager_depth or dispatch_mode() is not None or torch.compiler.is_compiling():
        return False
    return all(type(each) in (torch.Tensor, nn.Parameter) and not each.is_meta for each in _tensors_in(arguments))


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Those of usual containers without torch's registry of containers, which takes as long as Dynamo's guards."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif type(tree) in (tuple, list):
        for each in tree:
            yield from _tensors_in(each)
    elif type(tree) is dict:
        for each in tree.values():
            yield from _tensors_in(each)
    elif tree is not None and not isinstance(tree, bool | int | float | str):
        yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def compile_regions(model: nn.Module, random: RandomState, budget: float = 1.0) -> Compilation:
    """Compile the model's regions when they run. Modules are changed in place. budget: of the activations that the
    compiler would keep, the share that it may; others are computed again."""
    global _any
    _any = True
    import torch._dynamo  # takes a second to be imported

    rewrite.prepare_dynamo()
    keep_order_of_graphs()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    compilation = Compilation(random, backend_for(device), budget)
    for module in regions_of(model):
        compilation.add(module, random.name_of(module) or "")
    return compilation


def without_compiled(model: nn.Module) -> tuple[nn.Module, bool]:
    """The model as it was before torch.compile(model), or of parts of it, or `compile()` of modules; and whether
    anything was compiled. Parts are put back in place."""
    was_compiled = is_compiled(model)
    model = _own_module(model)
    for module in model.modules():
        for name, child in module._modules.items():
            if child is not None and is_compiled(child):
                module._modules[name], was_compiled = _own_module(child), True
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl, was_compiled = None, True
    return model, was_compiled


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile(module) gives; without importing the compiler."""
    return type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module)


def _own_module(module: nn.Module) -> nn.Module:
    while is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def regions_of(model: nn.Module) -> list[nn.Module]:
    """Blocks, and other modules outside of them that do more than one product."""
    blocks = [block for each in outermost_lists(model) for block in each.modules]
    inside = {module for block in blocks for module in block.modules()}
    rest: list[nn.Module] = []
    taken: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or module in taken or is_container(module) or isinstance(module, _PLAIN):
            continue
        if any(each in inside for each in module.modules()) or not any(True for _ in module.parameters()):
            continue
        rest.append(module)
        taken.update(module.modules())
    return [*blocks, *rest]


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that a region calls and that are worth a graph of their own, by their names in it."""
    found: dict[str, nn.Module] = {}
    for path, child in module.named_children():
        if is_container(child):
            found |= {f"{path}.{name}": each for name, each in parts_of(child).items()}
        elif not isinstance(child, _PLAIN) and any(True for _ in child.parameters()) and not hasattr(child, _REGION):
            found[path] = child
    return found


def runner() -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo keeps compiled graphs by code, and those of one model under one
    plan must not serve another, whose guards they would pass."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def failure_of(error: Exception) -> str:
    if type(error).__name__ in _RECOMPILED:
        return "it was compiled for as many different arguments or attributes as Dynamo's recompile_limit allows"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    shown = str(cause) or str(error)
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith("raised:")]
    return lines[0] if lines else type(error).__name__
