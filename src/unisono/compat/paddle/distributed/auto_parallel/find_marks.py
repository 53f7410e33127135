"""The mesh of the marks in a layer's forward, found by running it without values."""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.paddle.distributed.mesh import ProcessMesh
from unisono.compat.paddle.nn.layer import MarkFound, marked_parameters, waiting_for_marks
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.inputs import call
from unisono.parallel.meta.meta_tensors import meta_copy, to_meta


def mesh_of_marks(layer: torch.nn.Module, inputs: Any) -> ProcessMesh | None:
    """None where a forward on these inputs makes no mark."""
    for parameter in layer.parameters():
        if parameter in marked_parameters:
            return marked_parameters[parameter]
    copy: Any = meta_copy(layer)
    try:
        with no_side_effects(layer), waiting_for_marks(copy), torch.no_grad(), torch.device("meta"):
            call(copy, to_meta(inputs))
    except MarkFound as found:
        return found.mesh
    return None
