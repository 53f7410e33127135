"""torch programs for GPUs, on a machine without them, and torch's `backend="mpi"` without a rebuilt torch.

    unisono run -n 2 --compat torch train.py          # or, in the program: unisono.compat.torch.install()

Where no GPU is visible, after `install`:

- tensors and modules that go to a GPU (`.cuda()`, `.to(local_rank)`, `device="cuda"`) stay on the CPU. `.cuda()`,
  `.to()` and `.cpu()` copy, as between two devices: a program that changes the copy must not change the original;
- "nccl" is gloo, `DistributedDataParallel(device_ids=)` takes modules on the CPU, `init_device_mesh("cuda", ...)` is a
  mesh of CPUs, autocast and GradScaler are the CPU's in the dtype of the GPU's;
- of `torch.cuda`, devices, streams, events and synchronisation do nothing, and memory is the host's (cuda.py);
  device_count() is the number of ranks on the host. is_available() stays False: a program that asks goes its own way;
- SyncBatchNorm takes tensors on the CPU.

With or without GPUs, `init_process_group("mpi")` is unisono's MPI, whatever rank and size are given, under
`unisono run --backend mpi`, and `mp.spawn(fn, nprocs=...)` under `unisono run` calls fn in the ranks that are there.
Nothing is installed by default; all of it is undone at exit, or by `uninstall`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from unisono.comm.rendezvous import world
from unisono.compat import cuda
from unisono.compat.cuda import CPU, is_gpu
from unisono.compat.language import say, say_once
from unisono.errors import UsageError
from unisono.parallel.data.batchnorm import over_ranks
from unisono.torch_compat import function_modes
from unisono.torch_patches import PatchSet

_installed: contextlib.ExitStack | None = None


def install() -> None:
    """Make programs for GPUs run here. Does nothing where it is installed already."""
    global _installed
    if _installed is not None:
        return
    _installed = contextlib.ExitStack()
    _installed.enter_context(_group_patches())
    if not torch.cuda.is_available():
        _installed.enter_context(_device_patches())
        _installed.enter_context(_on_cpu())
    atexit.register(uninstall)


def uninstall() -> None:
    """Undo `install`. Does nothing where it is not installed."""
    global _installed
    installed, _installed = _installed, None
    if installed is not None:
        installed.close()


# ---- tensors ---------------------------------------------------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
    """Functions of torch that are given a GPU get the CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if is_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    mode = _OnCpu()
    mode.__enter__()
    try:
        yield
    finally:
        if function_modes()[-1:] == [mode]:  # at exit, one that the program has entered may be above it
            mode.__exit__(None, None, None)


def _device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = args[0] if args else kwargs.get("type", kwargs.get("device"))
    return CPU if is_gpu(given) else func(*args, **kwargs)


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.to: as from one device to another, where it names one."""
    goes_to = [each for each in (*args[1:2], kwargs.get("device")) if each is not None]
    if isinstance(goes_to[0] if goes_to else None, torch.Tensor):
        return func(*args, **kwargs)
    has_device = any(is_gpu(each) or isinstance(each, str | torch.device) for each in goes_to)
    args = tuple(CPU if place == 1 and is_gpu(each) else each for place, each in enumerate(args))
    kwargs = {name: CPU if name == "device" and is_gpu(each) else each for name, each in kwargs.items()}
    made = func(*args, **kwargs)
    return made.clone() if has_device and made is args[0] else made


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.cuda and Tensor.cpu."""
    return args[0].clone(memory_format=kwargs.get("memory_format", torch.preserve_format))


def _parsed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What nn.Module.to is given."""
    args = tuple(CPU if is_gpu(each) else each for each in args)
    return func(*args, **{name: CPU if name == "device" and is_gpu(each) else each for name, each in kwargs.items()})


def _typed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.type("torch.cuda.FloatTensor")."""
    given = [each.replace("torch.cuda.", "torch.") if isinstance(each, str) else each for each in args]
    return func(*given, **kwargs)


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch.Tensor.to: _moved,
    torch.Tensor.cuda: _copied,
    torch.Tensor.cpu: _copied,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.type: _typed,
    torch._C._nn._parse_to: _parsed,
}


# ---- devices ---------------------------------------------------------------------------------------------------------


def _device_patches() -> PatchSet:
    """Everything that a program for GPUs calls and that a torch without CUDA does not have."""
    replaced: dict[tuple[Any, str], Any] = {
        **cuda.names(),
        (torch, "load"): _load,
        (device_mesh, "init_device_mesh"): _init_device_mesh,
        (dist, "init_device_mesh"): _init_device_mesh,
        (DistributedDataParallel, "__init__"): _init_ddp,
        (torch.nn.SyncBatchNorm, "forward"): _sync_batch_norm,
        (DistributedDataParallel, "_passing_sync_batchnorm_handle"): cuda.nothing,  # refuses it on the CPU
        (torch.Tensor, "record_stream"): cuda.nothing,
        (torch.amp.autocast, "__init__"): _init_autocast,
        (torch.amp.GradScaler, "__init__"): _init_scaler,
    }
    return PatchSet(replaced, why="programs for GPUs run on the CPU (compat.torch)", until="uninstall, or exit")


_torch_load = torch.load
_torch_mesh = device_mesh.init_device_mesh
_torch_ddp = DistributedDataParallel.__init__
_torch_autocast = torch.amp.autocast.__init__
_torch_scaler = torch.amp.GradScaler.__init__


@functools.wraps(_torch_load)
def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Saved on a GPU or for one: to the CPU."""
    if map_location is None or is_gpu(map_location) or isinstance(map_location, dict):
        map_location = CPU
    return _torch_load(f, map_location, *args, **kwargs)


@functools.wraps(_torch_mesh)
def _init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return _torch_mesh("cpu" if is_gpu(device_type) else device_type, *args, **kwargs)


@functools.wraps(_torch_ddp)
def _init_ddp(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
    _torch_ddp(self, module, None, None, *args, **kw)


@functools.wraps(_torch_autocast)
def _init_autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
    if is_gpu(device_type):
        device_type, dtype = "cpu", dtype or torch.float16
    _torch_autocast(self, device_type, dtype, *args, **kwargs)


@functools.wraps(_torch_scaler)
def _init_scaler(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    _torch_scaler(self, "cpu" if is_gpu(device) else device, *args, **kwargs)


class _Group:
    """A process group, as batch normalisation over ranks calls it."""

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, dist.get_world_size(group)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group)
        return tensor

    def all_gather_into(self, outputs: torch.Tensor, tensor: torch.Tensor) -> None:
        dist.all_gather(list(outputs.unbind(0)), tensor, group=self.group)


_torch_sync_batch_norm = torch.nn.SyncBatchNorm.forward


@functools.wraps(_torch_sync_batch_norm)
def _sync_batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """torch's own refuses tensors on the CPU."""
    if not (self.training and dist.is_initialized()):
        return _torch_sync_batch_norm(self, input)
    comm: Any = _Group(self.process_group)
    return over_ranks(self, input, comm)


# ---- groups ----------------------------------------------------------------------------------------------------------

_torch_init = dist.init_process_group
_torch_new_group = dist.new_group


@functools.wraps(_torch_init)
def _init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
    if str(backend).lower() == "mpi":
        world.init("mpi", timeout=kwargs.get("timeout"))
        return
    if kwargs.get("device_id") is not None and not torch.cuda.is_available():
        kwargs.pop("device_id")
    _torch_init(_backend_here(backend), *args, **kwargs)


@functools.wraps(_torch_new_group)
def _new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _torch_new_group(ranks, timeout, _backend_here(backend), *args, **kwargs)


def _backend_here(backend: Any) -> Any:
    """gloo where NCCL cannot be; `cpu:gloo,cuda:nccl` is gloo, too."""
    if torch.cuda.is_available() or not isinstance(backend, str) or "nccl" not in backend.lower():
        return backend
    say_once(
        "no GPU is visible here: backend nccl is answered by gloo, and tensors stay on the CPU",
        "此处没有可见的 GPU：nccl 后端由 gloo 代替，张量留在 CPU 上",
    )
    return "gloo"


_torch_spawn = multiprocessing.spawn


@functools.wraps(_torch_spawn)
def _spawn(
    fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **kwargs: Any
) -> Any:
    """Under `unisono run` the ranks are there already: each runs the function with its own number."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    if launched is None:
        return _torch_spawn(_run_spawned, (fn, *args), nprocs, join, daemon, **kwargs)
    if nprocs != int(launched):
        raise UsageError(
            say(
                f"mp.spawn(nprocs={nprocs}), but {launched} ranks are running on this host, each of which would run "
                f"one of them; start the program with: unisono run -n {nprocs} --compat torch",
                f"mp.spawn(nprocs={nprocs})，而本机有 {launched} 个进程，各自运行其中之一；请用 "
                f"unisono run -n {nprocs} --compat torch 启动程序",
            )
        )
    fn(int(os.environ["LOCAL_RANK"]), *args)
    return None if join else _Spawned()


def _run_spawned(index: int, fn: Any, *args: Any) -> None:
    install()
    fn(index, *args)


class _Spawned:
    """What mp.spawn(join=False) returns: the function has returned."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _group_patches() -> PatchSet:
    owners = (dist, distributed_c10d)
    replaced: dict[tuple[Any, str], Any] = {(owner, "init_process_group"): _init_process_group for owner in owners}
    replaced |= {(owner, "new_group"): _new_group for owner in owners}
    replaced[multiprocessing, "spawn"] = _spawn
    return PatchSet(replaced, why="backends that torch does not have here (compat.torch)", until="uninstall, or exit")
