"""The user's loss, compiled; also where its means are over the global batch.

Dynamo traces the loss as the user wrote it. Under a plan that splits the batch, means of a loss divide by counts of the
global batch, which LossNormalizer, a mode of torch, does (loss/normalizers.py). So the mode is put into the graph: the
compiler calls the graph's functions under it, and what it divides by are outputs of an op, `unisono::loss_total`, that
are known when the graph runs. What this part of the batch counts is a further output of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from unisono.parallel.compile import rewrite
from unisono.parallel.compile.regions import (
    Compilation,
    Runners,
    can_be_compiled,
    modes_in_graph,
    plain_for_dynamo,
)
from unisono.parallel.loss.normalizers import Count, LossNormalizer
from unisono.torch_compat import RegionCall

_running: list[CompiledLoss] = []


class CompiledLoss:
    """loss(outputs, targets), compiled where that is possible."""

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor], compilation: Compilation) -> None:
        self.loss = self.__wrapped__ = loss
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)
        self._name = f"the loss {self.__name__}"
        self._compilation = compilation
        self._runners = Runners(self._compile)
        self._modes: Sequence[TorchFunctionMode] = ()
        self._normalizer: LossNormalizer | None = None
        self.totals: Sequence[Count] = ()  # of the call that runs
        self._counts: torch.Tensor | None = None

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        modes = modes_in_graph()
        if modes is None or self._name in self._compilation.failures or not can_be_compiled((outputs, targets)):
            return self.loss(outputs, targets)
        self._compilation.has_begun = False
        try:
            return self._run(outputs, targets, modes)
        except Exception as error:
            if self._compilation.has_begun:
                raise
            self._compilation.note_failure(self._name, error)
        return self.loss(outputs, targets)

    def _run(self, outputs: Any, targets: Any, modes: Sequence[TorchFunctionMode]) -> torch.Tensor:
        self._modes = modes
        self._normalizer = next((mode for mode in modes if isinstance(mode, LossNormalizer)), None)
        self.totals = () if self._normalizer is None else self._normalizer.agreed_totals()
        normalizer = self._normalizer
        _running.append(self)
        try:
            with plain_for_dynamo(), RegionCall():
                value: torch.Tensor = self._runners(modes)(self.loss, outputs, targets)
        finally:
            _running.pop()
        if normalizer is not None:
            assert self._counts is not None
            normalizer.counts += list(self._counts.unbind())
        return value

    def _compile(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend. Under a LossNormalizer the graph has one more output: the counts."""
        normalizer = self._normalizer
        if normalizer is None:
            rewrite.trace_under(graph_module, self._modes)
            return self._compilation.compile_graph(graph_module, inputs)
        traced = normalizer.for_trace(_total_in_graph)
        device = next(leaf.device for leaf in inputs if isinstance(leaf, torch.Tensor))

        def counted() -> torch.Tensor:
            counts = [torch.as_tensor(each, dtype=torch.float64, device=device) for each in traced.counts]
            traced.counts.clear()
            return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.float64, device=device)

        rewrite.trace_under(graph_module, [traced if mode is normalizer else mode for mode in self._modes])
        graph = graph_module.graph
        output = graph.output_node()
        with graph.inserting_before(output):
            counts = graph.call_function(fx.node.has_side_effect(counted))
            graph.output((*output.args[0], counts))  # type: ignore[misc]
        graph.erase_node(output)
        graph_module.recompile()
        compiled = self._compilation.compile_graph(graph_module, inputs)

        def run(*args: Any) -> Any:
            *results, self._counts = compiled(*args)
            return results

        return run


def _total_in_graph(like: torch.Tensor, number: int) -> torch.Tensor:
    found: torch.Tensor = torch.ops.unisono.loss_total(like.detach(), number)
    return found


@torch.library.custom_op("unisono::loss_total", mutates_args=())
def _loss_total(like: torch.Tensor, number: int) -> torch.Tensor:
    """A count of the global batch, by which the loss that runs divides."""
    total = _running[-1].totals[number]
    if isinstance(total, torch.Tensor):
        return total.detach().to(like.device, _divisor_dtype(like), copy=True).reshape(())
    return torch.full((), float(total), dtype=_divisor_dtype(like), device=like.device)


@_loss_total.register_fake
def _(like: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty((), dtype=_divisor_dtype(like), device=like.device)


def _divisor_dtype(like: torch.Tensor) -> torch.dtype:
    """A compiler divides in the kernel that computes the gradient of each logit: in float64 only where they are."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
