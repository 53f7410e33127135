"""The compilers of a region's graph: inductor, or AOTAutograd alone, which runs the traced operations one by one.

Between forward and backward a compiler may choose to compute something again instead of keeping it. Ops of unisono are
kept always: they draw random numbers, communicate, or depend on the step that runs.
"""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from unisono.errors import UsageError

BACKEND = "UNISONO_COMPILE_BACKEND"  # a variable of the environment: inductor or aot_eager
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_OPS = "unisono"


def backend_for(device: torch.device) -> str:
    """The name of the backend; UsageError where there is no compiler for it."""
    chosen = os.environ.get(BACKEND, "inductor")
    if chosen not in ("inductor", "aot_eager"):
        raise UsageError(f"{BACKEND}={chosen}; expected inductor or aot_eager")
    if chosen == "inductor" and device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UsageError(
            "compile on CPUs needs a C++ compiler, and none of c++, g++ and clang++ was found; install g++, or leave "
            "compile out of the plan"
        )
    return chosen


@cache
def compiler(backend: str) -> Compiler:
    return _inductor() if backend == "inductor" else _aot_eager()


def _inductor() -> Compiler:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class KeepOps(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            keep_ops(graph)

        def uuid(self) -> Any:
            return "ops of unisono are kept, 1"  # in the keys of inductor's cache

    keeping = KeepOps()

    def compile_graph(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with config.patch(joint_custom_pre_pass=keeping):
            return compile_fx(graph_module, inputs)  # type: ignore[return-value]

    return compile_graph


def _aot_eager() -> Compiler:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        keep_ops(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    compiled: Compiler = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return compiled


def keep_ops(graph: fx.Graph) -> None:
    """Mark the results of unisono's ops in a graph of forward and backward as such that are kept."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", None) == _OPS:
            for each in (node, *node.users):
                if each is node or each.target is operator.getitem:
                    each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
