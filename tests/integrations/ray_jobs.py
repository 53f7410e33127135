"""Jobs on a cluster of Ray with two nodes on this machine, for test_ray.py, which starts this as a process of its own.

    python -m tests.integrations.ray_jobs FOLDER      # writes FOLDER/outcomes.json

Each job's outcome is what `run` returned, or the error that it raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 8
FAILS_AT = 4  # the step after which a rank, or its node, is lost in the first attempt


def train(folder: str, how: str = "", head: str = "") -> dict[str, Any]:
    """A rank's training, of which one rank is lost after FAILS_AT steps of the first attempt: killed, or with its
    node, which is the one that is not `head`."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import unisono as uni

    comm = uni.init()
    attempt = int(os.environ["UNISONO_ATTEMPT"])

    from ray import get_runtime_context

    node = get_runtime_context().get_node_id()
    is_lost = (how == "kill" and comm.rank == 1) or (how == "node" and node != head)

    class Lost(uni.Callback):
        def on_step(self, engine: Any, info: Any) -> None:
            if attempt or info.step != FAILS_AT or not is_lost:
                return
            while not uni.Checkpoints(f"{folder}/run/checkpoints").steps():  # they are written in the background
                time.sleep(0.05)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            Path(folder, "lose").touch()
            time.sleep(3600)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    engine = uni.Engine(model, F.cross_entropy, lambda p: torch.optim.AdamW(p, lr=1e-2), plan=f"dp={comm.size},zero=1")
    history = engine.fit(
        dataset(), epochs=STEPS, max_steps=STEPS, batch_size=8, shuffle=False, progress=False, callbacks=[Lost()],
        save=f"{folder}/run", save_every=1,
    )  # fmt: skip
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "UNISONO_HOST", "UNISONO_ATTEMPT")
    return (
        {name: os.environ[name] for name in names}
        | {"node": node}
        | {"losses": history.losses, "first_step": history.first_step}
    )


def dataset() -> Any:
    import torch
    from torch.utils.data import TensorDataset

    x = torch.randn(STEPS * 8, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def raises() -> None:
    import torch.distributed as dist

    import unisono as uni

    comm = uni.init()
    if comm.rank == 1:
        raise ValueError(f"no such sample on {dist.get_rank()}")
    comm.barrier()


def leaves() -> None:
    import unisono as uni

    comm = uni.init()
    if comm.rank == 0:
        comm.barrier()


def misuses(folder: str) -> None:
    from unisono.errors import UsageError

    Path(folder, f"misused.{os.environ['RANK']}.{os.environ['UNISONO_ATTEMPT']}").touch()
    raise UsageError("batch_size=0: expected at least 1")


def starts_ranks() -> Any:
    from unisono.integrations import ray

    return ray.run(print, ranks=1)


def with_plain_torch(start: float) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.full((), start + dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def exits() -> None:
    sys.exit(3)


# ---- the driver --------------------------------------------------------------------------------------------------


def lose_node(cluster: Any, asked: Path, job: threading.Thread) -> None:
    """Wait for a rank to ask for it, kill the node that is not the head, and add another one."""
    while job.is_alive() and not asked.exists():
        time.sleep(0.1)
    (lost,) = cluster.worker_nodes
    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(num_cpus=1)


def outcomes(folder: Path) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    from unisono.integrations.ray import run

    found: dict[str, Any] = {}

    def attempt(name: str, job: Callable[[str], Any]) -> None:
        own = folder / name
        own.mkdir()
        try:
            found[name] = {"results": job(str(own))}
        except Exception as error:
            found[name] = {"error": str(error), "kind": type(error).__name__, "traceback": traceback.format_exc()}
        print(f"{name}: {found[name]}", flush=True)

    memory = {"object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory}, connect=True
    )
    try:
        cluster.add_node(num_cpus=1, **memory)
        cluster.wait_for_nodes()
        lock = threading.Lock()
        attempt("room", lambda own: run(train, ranks=3, args=(own,)))
        attempt("pickle", lambda own: run(lambda: lock, ranks=2))
        found["nodes"] = [cluster.head_node.node_id, *[node.node_id for node in cluster.worker_nodes]]
        attempt("equal", lambda own: run(train, ranks=2, args=(own,), placement="SPREAD"))
        attempt("plain torch", lambda own: run(with_plain_torch, ranks=2, args=(0.5,), backend="gloo"))
        attempt("raises", lambda own: run(raises, ranks=2))
        attempt("leaves", lambda own: run(leaves, ranks=2))
        attempt("exits", lambda own: run(exits, ranks=1))
        attempt("nested", lambda own: run(starts_ranks, ranks=1))
        attempt("misuses", lambda own: run(misuses, ranks=2, args=(own,), max_restarts=2))
        attempt("killed", lambda own: run(train, ranks=2, args=(own, "kill"), max_restarts=1))
        attempt("killed for good", lambda own: run(train, ranks=2, args=(own, "kill")))
        options = {"placement": "SPREAD", "max_restarts": 2}
        head = cluster.head_node.node_id
        lost = threading.Thread(
            target=attempt, args=("lost", lambda own: run(train, ranks=2, args=(own, "node", head), **options))
        )
        lost.start()
        lose_node(cluster, folder / "lost" / "lose", lost)  # Ray starts nodes in the main thread
        lost.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


if __name__ == "__main__":
    written = outcomes(Path(sys.argv[1]))
    Path(sys.argv[1], "outcomes.json").write_text(json.dumps(written))
