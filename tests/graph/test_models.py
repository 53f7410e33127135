"""Every op of the Hugging Face models has a rule, and every option of it is right, alone and two axes together."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import fx

from tests.graph import hugging_face
from tests.graph.simulation import check_option, fits, run_graph
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.rules import options, rule_of, target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState

_seen: set[str] = set()  # ops that another model had in the same way


@pytest.mark.parametrize("name", hugging_face.NAMES)
def test_every_option_of_every_op(name: str) -> None:
    torch.manual_seed(0)
    model = hugging_face.model(name).double()
    inputs, targets = hugging_face.batch(name)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    traced = trace(model, (inputs, targets), hugging_face.loss)
    without = sorted({str(op.target) for op in traced.ops if rule_of(op.target) is None})
    assert not without, f"ops without a rule: {', '.join(without)}"
    values = _values(traced, model, inputs, targets)
    rng = random.Random(0)
    one, two = Mesh.describe((2,), ("a",)), Mesh.describe((2, 2), ("a", "b"))
    tried = 0
    for node, given in run_graph(traced, values, RandomState(3)):
        plain = fx.map_arg((node.args, node.kwargs), lambda _: None)
        key = str((node.target, plain, [(v.shape, v.dtype) for v in given]))
        listed = options(node)
        if key in _seen or len(listed) < 2 or target_name(node.target) in ("getitem", "aten.empty_like.default"):
            continue
        _seen.add(key)
        for chosen in [(option,) for option in listed] + [tuple(rng.choices(listed, k=2)) for _ in range(2)]:
            mesh = one if len(chosen) == 1 else two
            if fits(node, chosen, given, mesh):
                try:
                    check_option(node, chosen, given, mesh)
                except Exception as error:
                    raise AssertionError(f"{node.format_node()} as {chosen}") from error
                tried += 1
    assert tried


def _values(traced: Trace, model: Any, inputs: dict[str, Any], targets: torch.Tensor) -> dict[str, torch.Tensor]:
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {node: held[name].detach() for node, name in (traced.parameters | traced.buffers).items()}
    given = dict(zip(traced.inputs + traced.targets, [*inputs.values(), targets], strict=True))
    return values | given | traced.constants
