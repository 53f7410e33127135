"""What torch.cuda has, where no GPU is visible: names for `unisono.compat.torch` to put in torch's place.

Devices, streams and events do nothing, random numbers are the CPU's, memory is the host's, and what cannot be here,
such as times of a GPU and CUDA graphs, is refused in a sentence.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from unisono.compat.language import say, say_once

CPU = torch.device("cpu")
NAME = "CPU (unisono.compat.torch)"


def is_gpu(given: Any) -> bool:
    """Whether a program names a GPU so: "cuda:1", torch.device("cuda"), or a number."""
    if isinstance(given, bool):
        return False
    if isinstance(given, torch.device):
        return given.type == "cuda"
    return isinstance(given, int) or (isinstance(given, str) and given.partition(":")[0] == "cuda")


class Context:
    """A stream, an event or a device, of which there is one."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait = record = record_event = wait_event = wait_stream = lambda self, *_: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        raise RuntimeError(
            say(
                "torch.cuda.Event.elapsed_time: there is no GPU here whose time could be taken; use time.perf_counter",
                "torch.cuda.Event.elapsed_time：此处没有 GPU，无法计时；请用 time.perf_counter",
            )
        )


_torch_generator = torch.Generator


class _IsGenerator(type):
    def __instancecheck__(cls, given: Any) -> bool:
        return isinstance(given, _torch_generator)


class Generator(metaclass=_IsGenerator):
    """torch.Generator(device): on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _torch_generator(CPU if is_gpu(device) else device)


def nothing(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _range(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _seed(seed: int) -> None:
    """There is one generator, so it is the one to seed."""
    torch.default_generator.manual_seed(seed)


def _no_graphs(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        say(
            "CUDA graphs record what a GPU does, and there is none here; use them only where torch.cuda.is_available()",
            "CUDA graph 记录 GPU 的操作，而此处没有 GPU；请仅在 torch.cuda.is_available() 为真时使用",
        )
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def _say_of_memory() -> None:
    say_once(
        "no GPU is visible here: what torch.cuda says of allocated memory is 0, and its device has the host's memory",
        "此处没有可见的 GPU：torch.cuda 给出的显存用量为 0，其设备的内存为主机内存",
    )


def _allocated(*_: Any, **__: Any) -> int:
    _say_of_memory()
    return 0


def _statistics(*_: Any, **__: Any) -> dict[str, int]:
    _say_of_memory()
    return defaultdict(int)


def _summary(*_: Any, **__: Any) -> str:
    return say("no GPU is visible here, so no memory of one is used", "此处没有可见的 GPU，没有使用显存")


def _bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _free_and_total(device: Any = None) -> tuple[int, int]:
    _say_of_memory()
    return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Properties:
    """Of a device that computes in float32 on the host's cores: capabilities of GPUs are all absent."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0
    warp_size: int = 1
    is_integrated: int = 1
    is_multi_gpu_board: int = 0


def _properties(device: Any = None) -> Properties:
    _say_of_memory()
    return Properties(NAME, _bytes("SC_PHYS_PAGES"), os.cpu_count() or 1)


def names() -> dict[tuple[Any, str], Any]:
    """What to put in the place of which attribute."""
    cuda, nvtx = torch.cuda, torch.cuda.nvtx
    replaced: dict[tuple[Any, str], Any] = {
        (torch, "Generator"): Generator,
        (cuda, "is_available"): lambda: False,  # a torch with CUDA would count the devices
        (cuda, "device_count"): lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        (cuda, "current_device"): _local_rank,
        (cuda, "get_device_name"): lambda device=None: NAME,
        (cuda, "get_device_capability"): lambda device=None: (0, 0),
        (cuda, "get_device_properties"): _properties,
        (cuda, "can_device_access_peer"): lambda device, peer_device: True,
        (cuda, "default_stream"): Context,
        (cuda, "current_stream"): Context,
        (cuda, "stream"): lambda stream: Context(),
        (cuda, "Stream"): Context,
        (cuda, "Event"): Context,
        (cuda, "device"): Context,
        (cuda, "get_rng_state"): lambda device=None: torch.get_rng_state(),
        (cuda, "get_rng_state_all"): lambda: [torch.get_rng_state()],
        (cuda, "manual_seed"): _seed,
        (cuda, "manual_seed_all"): _seed,
        (cuda, "seed"): torch.seed,
        (cuda, "seed_all"): torch.seed,
        (cuda, "initial_seed"): torch.initial_seed,
        (cuda, "mem_get_info"): _free_and_total,
        (cuda, "memory_stats"): _statistics,
        (cuda, "memory_summary"): _summary,
        (cuda, "graph"): _no_graphs,
        (cuda, "CUDAGraph"): _no_graphs,
        (cuda, "make_graphed_callables"): _no_graphs,
        (nvtx, "range"): _range,
    }
    used = ("allocated", "reserved", "cached")
    sizes = [f"{most}memory_{kind}" for most in ("", "max_") for kind in used]
    without_effect = [
        *("set_device", "set_stream", "synchronize", "init", "ipc_collect", "empty_cache", "set_rng_state"),
        *("set_rng_state_all", "set_per_process_memory_fraction", "reset_peak_memory_stats"),
        *("reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    ]
    replaced |= _all(cuda, sizes, _allocated) | _all(cuda, without_effect, nothing)
    return replaced | _all(nvtx, ["range_push", "range_pop", "range_start", "range_end", "mark"], nothing)


def _all(owner: Any, listed: list[str], replacement: Callable[..., Any]) -> dict[tuple[Any, str], Any]:
    return {(owner, name): replacement for name in listed if hasattr(owner, name)}
