"""A job of which one rank does something else than the others."""

from __future__ import annotations

import time

import torch

import unisono as uni


def main(scenario: str, timeout: float, odd: int, **seat: object) -> None:
    comm = uni.init(timeout=timeout, **seat)  # type: ignore[arg-type]
    x = torch.ones(1024)
    comm.all_reduce(x)
    if comm.rank != odd:
        comm.all_reduce(x)  # LINE: all
        comm.barrier()
    elif scenario == "op":
        comm.broadcast(x)  # LINE: op
        comm.barrier()
    elif scenario == "shape":
        comm.all_reduce(torch.ones(512))  # LINE: shape
        comm.barrier()
    elif scenario == "order":
        comm.barrier()  # LINE: order
        comm.all_reduce(x)
    elif scenario == "exit":
        pass
    elif scenario == "sleep":
        time.sleep(1000)  # LINE: sleep
    elif scenario == "raise":
        raise ValueError("bad sample 17")  # LINE: raise
    elif scenario == "torch":
        torch.distributed.broadcast(x, 0)  # LINE: torch
        torch.distributed.broadcast(x, odd - 1)
    elif scenario == "torch shape":
        torch.distributed.all_reduce(torch.ones(512))  # LINE: torch shape
    elif scenario == "receive":
        comm.recv(x, 0)  # LINE: receive
    if scenario != "exit":
        time.sleep(1000)
