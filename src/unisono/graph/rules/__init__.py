"""The rules: which placements each op allows, a file an op family. `options(node)` lists them."""

from unisono.graph.rules import (
    attention,
    conv,
    elementwise,
    embedding,
    experts,
    factory,
    index,
    linear,
    loss,
    norm,
    reduce,
    shape,
)
from unisono.graph.rules.call import OpCall, tensors_of
from unisono.graph.rules.registry import options, rule, rule_of, target_name

FAMILIES = (attention, conv, elementwise, embedding, experts, factory, index, linear, loss, norm, reduce, shape)

__all__ = ["FAMILIES", "OpCall", "options", "rule", "rule_of", "target_name", "tensors_of"]
