"""Options of other launchers that `unisono run` takes, too: torchrun's, torch.distributed.launch's and Paddle's.

    torchrun --standalone --nproc-per-node 2 train.py               unisono run --standalone --nproc-per-node 2 train.py
    torchrun --nnodes 2 --rdzv-endpoint host0:29400 ...             the same, on each of the two nodes
    python -m paddle.distributed.launch --gpus 0,1 --log_dir logs   unisono run --gpus 0,1 --log_dir logs

`settle` says in unisono's own options what they say. --nnodes, --nproc-per-node, --node-rank, --master-addr and
--master-port are options of the command itself; see scheduler.py.
"""

from __future__ import annotations

import argparse
import ipaddress
import socket
from typing import Any

from unisono.errors import UsageError

# torchrun's, for what unisono does in any case or in another way: output is forwarded, restarts are noticed at once
_WITHOUT_EFFECT = ("rdzv-id", "rdzv-conf", "monitor-interval", "start-method", "role", "event-log-handler")
_RENDEZVOUS = ("c10d", "static")


def add_options(parser: argparse.ArgumentParser) -> None:
    def add(name: str, *others: str, **settings: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, *others, **settings)

    add("standalone", action="store_true", help="one node, as with torchrun: what is the case without --nnodes")
    add("rdzv-endpoint", metavar="HOST[:PORT]", help="address of node 0, as --master-addr and --master-port")
    add("rdzv-backend", metavar="NAME", help="c10d or static; launchers meet at the endpoint either way")
    for name in _WITHOUT_EFFECT:
        add(name, metavar="...", help=argparse.SUPPRESS)
    add("redirects", "-r", metavar="...", help=argparse.SUPPRESS)
    add("tee", "-t", metavar="...", help=argparse.SUPPRESS)
    add("log-dir", metavar="DIR", help="also write each rank's output to DIR/rank.N, as --output-filename")
    add("use-env", action="store_true", help="do not pass --local-rank to a script that parses it")
    add("no-python", action="store_true", help="what every rank runs is a command, and no Python script")
    add("gpus", "--devices", metavar="0,1", help="GPUs to use, one for each rank (without GPUs: as many ranks)")


def settle(chosen: argparse.Namespace) -> None:
    """Turn these options into the command's own; UsageError where they contradict each other."""
    if chosen.log_dir is not None:
        if chosen.output_filename is not None:
            raise UsageError("--log-dir and --output-filename both name a folder for the output; give one of them")
        chosen.output_filename = chosen.log_dir
    _settle_devices(chosen)
    _settle_nodes(chosen)
    if chosen.no_python and chosen.module:
        raise UsageError("--no-python runs a command and -m a Python module; give one of them")


def _settle_devices(chosen: argparse.Namespace) -> None:
    if chosen.gpus is None:
        return
    numbers = chosen.gpus.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers) or len({*numbers}) < len(numbers):
        raise UsageError(f"--gpus {chosen.gpus}: expected different numbers of GPUs, such as 0,1")
    if chosen.n is None and chosen.nproc_per_node is None:
        chosen.nproc_per_node = str(len(numbers))
    chosen.env.append(f"CUDA_VISIBLE_DEVICES={chosen.gpus}")


def _settle_nodes(chosen: argparse.Namespace) -> None:
    least, colon, most = (chosen.nnodes or "").partition(":")
    if colon and least != most:
        raise UsageError(
            f"--nnodes {chosen.nnodes}: launchers of nodes that come and go do not find each other; give one number, "
            "or start all nodes from one (-H a:8,b:8 --elastic --max-restarts 3), which goes on without lost ones"
        )
    chosen.nnodes = least or None
    if chosen.rdzv_backend not in (None, *_RENDEZVOUS):
        raise UsageError(
            f"--rdzv-backend {chosen.rdzv_backend}: launchers meet at the address of node 0 (--rdzv-endpoint), without "
            f"another service; give {' or '.join(_RENDEZVOUS)}, or leave it out"
        )
    if chosen.standalone:
        if chosen.nnodes not in (None, "1"):
            raise UsageError(f"--standalone is a job of one node, and --nnodes says {chosen.nnodes}; give one of them")
        chosen.nnodes = None
        chosen.nproc_per_node = chosen.nproc_per_node or (None if chosen.n else "1")
    elif chosen.rdzv_endpoint is not None and chosen.nnodes not in (None, "1"):
        _settle_endpoint(chosen)


def _settle_endpoint(chosen: argparse.Namespace) -> None:
    host, colon, port = chosen.rdzv_endpoint.rpartition(":")
    host, port = (host, port) if colon else (port, "")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16)):
        raise UsageError(f"--rdzv-endpoint {chosen.rdzv_endpoint}: expected the address of node 0, HOST or HOST:PORT")
    chosen.master_addr = chosen.master_addr or host
    chosen.master_port = chosen.master_port or int(port or 0)
    if chosen.node_rank is None:  # torchrun numbers nodes as they come; here node 0 is the one with that address
        if is_here(host):
            chosen.node_rank = 0
        elif chosen.nnodes == "2":
            chosen.node_rank = 1


def is_here(host: str) -> bool:
    """Whether an address or name is one of this machine's."""
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(_is_own(str(address)) for address in addresses)


def _is_own(address: str) -> bool:
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
