"""Programs that call torch.distributed themselves meet through the job's store, as those of `uni.init` do.

torch's rendezvous of env:// would connect to a TCPStore at MASTER_ADDR and MASTER_PORT, which takes anyone. In a rank
that an agent has forked, where torch is loaded, it gets the job's store instead. Programs in interpreters of their own
(`--no-python`, subprocesses) open torch's store at MASTER_PORT, which the agent keeps free for that. So do programs
that see a GPU, as NCCL's threads ask the store of their group at any time and must not wait for Python then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from unisono.launch import environment
from unisono.launch.store import secret
from unisono.launch.tunnel import addresses


def address(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Where the agents of this process's job serve its store. None without one, and in a job within the job."""
    host, port, master_port = (environ.get(environment.STORE) or "- - -").rsplit(" ", 2)
    if environ.get("MASTER_PORT") != master_port or not environ.get(environment.SECRET_FILE):
        return None
    return host, int(port)


def variables(host: str, port: int, master_port: int) -> dict[str, str]:
    """With these a rank finds the store. torch itself must not look for one that an agent keeps."""
    return {environment.STORE: f"{host} {port} {master_port}", "TORCHELASTIC_USE_AGENT_STORE": "False"}


def install() -> None:
    """Have torch's env:// use the job's store in this process, where it is loaded."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and address() is not None:
        handlers: dict[str, Callable[..., Iterator[Any]]] = rendezvous._rendezvous_handlers
        if handlers.get("env") is not _from_environment:
            handlers["env"], _torchs[:] = _from_environment, [handlers["env"]]


_torchs: list[Callable[..., Iterator[Any]]] = []
_times = 0  # that this process has met others here


def _from_environment(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[Any]:
    global _times
    import torch
    import torch.distributed as dist

    found, key = address(), secret.of_job()
    is_nccls = torch.cuda.is_available() and addresses.of_job() is None
    if found is None or key is None or is_nccls:  # or the program has chosen another place to meet
        yield from _torchs[0](url, timeout=timeout, **options)
        return

    from unisono.launch.store.client import AuthenticatedStore

    query = parse_qs(urlparse(url).query)
    rank, size = (int(query[name][0] if name in query else os.environ[name.upper()]) for name in ("rank", "world_size"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"/worker/attempt_{attempt}/{_times}", AuthenticatedStore(*found, key, timeout))
    _times += 1
    yield store, rank, size
    raise RuntimeError("Unable to perform re-rendezvous using env:// method")
