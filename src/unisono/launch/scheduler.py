"""Nodes that a scheduler has started: Slurm, Kubernetes, torchrun's options. One launcher a node, none of them above.

`unisono run --nnodes 2 --nproc-per-node 8 train.py` on each of two nodes makes one job of 16 ranks. Each launcher runs
the ranks of its own node; their agents meet at the first node's address, where they also agree on restarts. What is not
given as an option comes from the environment:

    torchrun, Kubeflow   PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    Kubernetes           JOB_COMPLETION_INDEX, the number of a pod of an indexed Job; MASTER_ADDR, MASTER_PORT
    Slurm                every task of srun is a node of the job: SLURM_PROCID of SLURM_STEP_NUM_TASKS
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.errors import UsageError

MASTER_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class NodeGroup:
    """The place of this launcher's node in its job."""

    node: int
    nodes: int
    per_node: int  # ranks
    address: str  # of node 0
    port: int  # there; 0: any free one, for a single node
    host: str  # this node's name
    job: str  # equal on all nodes of the job, different in others
    local_offset: int = 0  # local rank of the node's first rank, where a host has several nodes (tasks of Slurm)
    local_world: int = 0  # ranks on this host, if more than those of the node

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


def find_group(
    nnodes: str | None,
    per_node: str | None,
    node_rank: int | None,
    address: str | None,
    port: int,
    environ: Mapping[str, str] = os.environ,
) -> NodeGroup | None:
    """The group of these options and variables; None where no scheduler starts several nodes. UsageError if invalid."""
    nnodes = nnodes or environ.get("PET_NNODES")
    per_node = per_node or environ.get("PET_NPROC_PER_NODE")
    if nnodes is None and in_slurm_step(environ):
        return _slurm_group(_ranks_per_node(per_node or "1"), environ)
    if nnodes is None:
        if node_rank is not None or address is not None:
            raise UsageError("--node-rank and --master-addr are for a job of several nodes: give --nnodes too")
        return None
    nodes = _whole("--nnodes", nnodes, least=1)
    node = _node_rank(node_rank, nodes, environ)
    address = address or environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
    if nodes == 1:
        address = "127.0.0.1"
    if not address:
        raise UsageError(f"--nnodes {nodes}: where is node 0? give --master-addr, or set MASTER_ADDR")
    try:
        address.encode("idna")
    except UnicodeError:
        raise UsageError(f"--master-addr {address}: no host can have this name; expected that of node 0") from None
    given = environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT")
    if not port and (given or nodes > 1):
        port = _port(given or str(MASTER_PORT))
    return NodeGroup(node, nodes, _ranks_per_node(per_node or "1"), address, port, socket.gethostname(), "")


def ranks_here(per_node: str | None) -> int | None:
    """--nproc-per-node without --nnodes: so many ranks on this machine."""
    return None if per_node is None else _ranks_per_node(per_node)


def _node_rank(given: int | None, nodes: int, environ: Mapping[str, str]) -> int:
    name, text = "--node-rank", None if given is None else str(given)
    for variable in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if text is None and variable in environ:
            name, text = variable, environ[variable]
    if text is None:
        if nodes == 1:
            return 0
        raise UsageError(f"--nnodes {nodes}: which of them is this? give --node-rank, or set PET_NODE_RANK")
    node = _whole(name, text, least=0)
    if node >= nodes:
        raise UsageError(f"{name} {node} does not fit --nnodes {nodes}: nodes go from 0 to {nodes - 1}")
    return node


def _ranks_per_node(text: str) -> int:
    """A number, or torchrun's words: gpu, cpu, auto (gpu where there is one)."""
    if text in ("gpu", "auto"):
        import torch

        if gpus := torch.cuda.device_count():
            return gpus
        if text == "gpu":
            raise UsageError("--nproc-per-node gpu: there is no GPU on this machine")
        text = "cpu"
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    return _whole("--nproc-per-node", text, least=1)


def _whole(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise UsageError(f"{name} {text}: expected a whole number of at least {least}")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 1 << 16:
        raise UsageError(f"MASTER_PORT is {text!r}; expected a number from 1 to 65535")
    return int(text)


# ---- Slurm -------------------------------------------------------------------------------------------------------


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process. The batch script itself has no SLURM_STEP_NUM_TASKS."""
    return "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ


def _slurm_group(per_node: int, environ: Mapping[str, str]) -> NodeGroup:
    host, port = slurm_rendezvous(environ)
    return NodeGroup(
        node=int(environ["SLURM_PROCID"]),
        nodes=int(environ["SLURM_STEP_NUM_TASKS"]),
        per_node=per_node,
        address=slurm_address(host),
        port=_port(port),
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        job=f"Slurm's {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}",
        local_offset=int(environ.get("SLURM_LOCALID", "0")) * per_node,
        local_world=_tasks_here(environ) * per_node,
    )


def slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, str]:
    """Where the tasks of one Slurm step meet: the step's first host, a port that follows from the step's number."""
    host = environ.get("MASTER_ADDR") or first_slurm_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    step = int(environ.get("SLURM_JOB_ID", "0")) * 61 + int(environ.get("SLURM_STEP_ID", "0"))
    # below the ports that systems assign by themselves
    return host, environ.get("MASTER_PORT") or str(20000 + step % 12768)


def first_slurm_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login` gives gpu07."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST is {nodes!r}; expected a list such as node[01-04]")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def slurm_address(node: str) -> str:
    """The address of a node: its name, or what Slurm knows about one whose name does not resolve."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        scontrol = shutil.which("scontrol")
    if scontrol is None:
        return node
    shown = subprocess.run([scontrol, "--oneliner", "show", "node", node], capture_output=True, text=True)
    address = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return address[1] if address else node


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of this step on this host: `2(x3),1` is 2, 2, 2, 1 by host."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    host = int(environ.get("SLURM_NODEID", "0"))
    return counts[host] if host < len(counts) else 1
