"""paddle.distributed.fleet.meta_parallel: layers that ranks share, and layers of a pipeline.

A parallel layer is made whole, as one device has it, and says how it is to be sharded; the plan of
fleet.distributed_model does it. So it composes with all that a plan has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from unisono.compat.language import say
from unisono.compat.paddle.nn.layer import Layer
from unisono.compat.paddle.nn.layers import Embedding, Linear
from unisono.compat.paddle.paddle_names import missing_names
from unisono.errors import UsageError


class ColumnParallelLinear(Linear):
    """A Linear of which each mp rank computes a part of the outputs; with gather_output, all ranks have all of them."""

    HAS_TRANSPOSED_WEIGHT = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, weight_attr, None if has_bias else False, name)
        self.rule = "column_gather" if gather_output else "column"


class RowParallelLinear(Linear):
    """A Linear of which each mp rank takes a part of the inputs, and the parts of the outputs are summed."""

    HAS_TRANSPOSED_WEIGHT = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, weight_attr, None if has_bias else False, name)
        self.rule = "row" if input_is_parallel else "row_split"


class VocabParallelEmbedding(Embedding):
    """An Embedding of which each mp rank has a part of the rows."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, weight_attr: Any = None, mp_group: Any = None, name: Any = None
    ) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.rule = "vocab"


def rules_of(model: nn.Module) -> dict[str, str]:
    """How the parallel layers of a model are to be sharded, by name."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    return {name: module.rule for name, module in model.named_modules() if isinstance(module, kinds)}


# ---- pipelines -------------------------------------------------------------------------------------------------------


class LayerDesc:
    """A layer to be made: layer_func(*inputs, **kwargs)."""

    def __init__(self, layer_func: Callable[..., nn.Module], *inputs: Any, **kwargs: Any) -> None:
        if not callable(layer_func):
            raise UsageError(
                say(
                    f"LayerDesc({layer_func!r}): as in Paddle, give a class of layers and its arguments",
                    f"LayerDesc({layer_func!r})：与飞桨相同，请给出层的类及其参数",
                )
            )
        self.layer_func, self.inputs, self.kwargs = layer_func, inputs, kwargs

    def build_layer(self) -> nn.Module:
        return self.layer_func(*self.inputs, **self.kwargs)


class PipelineLayer(Layer):
    """Layers one after the other, in stages of as many layers each ("uniform"), or of as many of one class
    ("layer:Linear")."""

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Any = None,
        seg_method: str = "uniform",
        recompute_interval: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise UsageError(
                say(
                    "PipelineLayer without num_stages: as in Paddle, give the number of stages, which is pp_degree",
                    "PipelineLayer 没有给出 num_stages：与飞桨相同，请给出阶段数，即 pp_degree",
                )
            )
        if recompute_interval or kwargs:
            given = ", ".join(["recompute_interval"] * bool(recompute_interval) + list(kwargs))
            raise UsageError(
                say(
                    f"PipelineLayer({given}): Paddle recomputes or interleaves with it; here use uni.Plan(pp=..., "
                    "recompute=, schedule=), docs/parallel.md",
                    f"PipelineLayer({given})：飞桨用它做重计算或交错；这里请用 uni.Plan(pp=..., recompute=, "
                    "schedule=)，"
                    "见 docs/parallel.md",
                )
            )
        self.num_stages = num_stages if num_stages is not None else int(topology.get_dim("pipe"))
        self.loss_fn = loss_fn
        self.descs = list(layers)
        self.run_function = nn.Sequential(*map(_built, self.descs))
        self.boundaries = _boundaries(list(self.run_function), self.num_stages, seg_method)

    def forward(self, x: Any) -> Any:
        return self.run_function(x)


class _Function(Layer):
    """A function among the layers of a pipeline."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


def _built(given: Any) -> nn.Module:
    made = given.build_layer() if isinstance(given, LayerDesc) else given
    return made if isinstance(made, nn.Module) else _Function(made)


def _boundaries(layers: list[nn.Module], stages: int, method: str) -> tuple[int, ...]:
    """The first layer of every stage."""
    if method == "uniform":
        if len(layers) < stages:
            raise _too_few(len(layers), stages)
        least, more = divmod(len(layers), stages)
        return tuple(least * stage + min(stage, more) for stage in range(stages))
    wanted = re.fullmatch(r"layer:(.+)", method)
    if wanted is None:
        raise UsageError(
            say(
                f'PipelineLayer(seg_method={method!r}): Paddle and unisono take "uniform" and "layer:ClassName"',
                f'PipelineLayer(seg_method={method!r})：飞桨和 unisono 均接受 "uniform" 和 "layer:类名"',
            )
        )
    found = [number for number, layer in enumerate(layers) if re.search(wanted[1], type(layer).__name__)]
    if len(found) < stages or len(found) % stages:
        raise _too_few(len(found), stages)
    each = len(found) // stages
    return (0, *(found[stage * each] for stage in range(1, stages)))


def _too_few(layers: int, stages: int) -> UsageError:
    return UsageError(
        say(
            f"PipelineLayer: {layers} layers do not make {stages} stages; Paddle refuses it too: use fewer stages, or "
            "list the layers in smaller parts",
            f"PipelineLayer：{layers} 个层无法分成 {stages} 个阶段；飞桨同样会拒绝：请减少阶段数，或把层拆得更细",
        )
    )


__getattr__ = missing_names(__name__)
