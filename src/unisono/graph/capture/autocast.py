"""torch.autocast in a trace: the casts that it makes, as ops of the graph.

A trace has the ops that the model calls, before autocast changes the dtypes of what they are given. `insert_casts` runs
the graph once on tensors without data under the autocast of a device, records which operands it casts, and inserts
those casts. The policy is torch's own, and differs between CPUs and GPUs. As autocast does, a parameter is cast once,
anything else wherever it is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from unisono.graph.rules.call import tensors_of
from unisono.torch_compat import FakeTensorMode, TorchDispatchMode

_CASTS = tuple(f"aten.{name}" for name in ("to", "_to_copy", "type_as", "float", "half", "bfloat16"))
_ATTENTION = "aten.scaled_dot_product_attention"
WEIGHT_CAST = "unisono_weight_cast"  # in the meta of a node: it casts a parameter
INNER_CASTS = "unisono_inner_casts"  # bytes of the casts of results inside a composite op


class Autocast(NamedTuple):
    """The dtype of products, and the kind of device: "cpu" or "cuda"."""

    dtype: torch.dtype
    device: str

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """For the trace itself, whose tensors claim to be on the CPU."""
        with torch.autocast("cpu", dtype=self.dtype):
            yield

    @contextlib.contextmanager
    def of_device(self) -> Iterator[None]:
        """The policy of the device, which need not exist."""
        before = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        torch.set_autocast_enabled(self.device, True)
        torch.set_autocast_dtype(self.device, self.dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(self.device, before[0])
            torch.set_autocast_dtype(self.device, before[1])
            torch.clear_autocast_cache()


def insert_casts(graph: fx.Graph, parameters: set[str], autocast: Autocast) -> None:
    """Make casts nodes of the graph, and give every node the dtype that it then has. parameters: by node name."""
    device = torch.device(autocast.device)
    values: dict[fx.Node, Any] = {}
    of_parameters = {node for node in graph.nodes if node.name in parameters}  # and views of them
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    recorder = _Recorder()

    def on_device(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    # Without gradients: autograd needs the device itself.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), autocast.of_device():
        for node in list(graph.nodes):
            if node.op == "placeholder":
                values[node] = _mapped(on_device, node.meta.get("val"))
            if node.op != "call_function":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: values[given])
            kwargs = {**kwargs, "device": device} if "device" in kwargs else kwargs
            recorder.start()
            try:
                with recorder:
                    values[node] = node.target(*args, **kwargs)
            except Exception:  # an op that does not run without data has the dtypes of the trace
                values[node] = _mapped(on_device, node.meta.get("val"))
                continue
            node.meta["val"] = values[node]
            packet = str(getattr(node.target, "_overloadpacket", ""))
            if packet in _CASTS:
                continue
            given = {id(values[each]): each for each in node.all_input_nodes}
            node.meta[INNER_CASTS] = sum(size for key, (_, size) in recorder.casts.items() if key not in given)
            for key, (dtype, _) in recorder.casts.items():
                # Without the device no fused attention is chosen, and the one that is computes in float32.
                if key in given and (packet != _ATTENTION or dtype == autocast.dtype):
                    _cast(graph, node, given[key], dtype, values, of_parameters, made)
            if _is_view_of(values[node], [values[each] for each in node.all_input_nodes if each in of_parameters]):
                of_parameters.add(node)


def _cast(
    graph: fx.Graph,
    node: fx.Node,
    source: fx.Node,
    dtype: torch.dtype,
    values: dict[fx.Node, Any],
    of_parameters: set[fx.Node],
    made: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> None:
    """Let a node take a cast of one of its operands."""
    is_parameter = source.op == "placeholder" and source in of_parameters
    cast = made.get((source, dtype)) if is_parameter else None
    if cast is None:
        with graph.inserting_before(node):
            cast = graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
        values[cast] = values[source].to(dtype)
        cast.meta = {**node.meta, "val": values[cast], WEIGHT_CAST: source in of_parameters}
        cast.meta.pop(INNER_CASTS, None)
        made[source, dtype] = cast
    node.replace_input_with(source, cast)


class _Recorder(TorchDispatchMode):
    """The first cast of each tensor, by its id: the dtype, and the bytes of the result."""

    def start(self) -> None:
        self.casts: dict[int, tuple[torch.dtype, int]] = {}
        self._alive: list[Any] = []  # so that ids stay their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and result.dtype != args[0].dtype:
            self._alive.append(args[0])
            self.casts.setdefault(id(args[0]), (result.dtype, result.numel() * result.itemsize))
        return result


def _mapped(function: Any, value: Any) -> Any:
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else function(value)


def _is_view_of(value: Any, given: list[Any]) -> bool:
    storages = {each.untyped_storage()._cdata for tensors in given for each in tensors_of(tensors)}
    found = tensors_of(value)
    return bool(found) and all(each.untyped_storage()._cdata in storages for each in found)
