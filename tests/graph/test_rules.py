"""Rules of ops that the Hugging Face models do not have, and of arguments that they do not pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.graph.simulation import check_option, fits, run_graph, run_shards
from unisono.graph.capture.trace import trace
from unisono.graph.rules import options, rule_of, target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState

X = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGE = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([[0, 3], [5, -100], [2, 2], [-100, 1]])
HEADS = torch.randn(2, 4, 6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

CASES: dict[str, Callable[[], Any]] = {
    "products": lambda: (X @ X[0].T, torch.einsum("bij,bkj->bik", X, X), torch.bmm(X, X.mT), X[0] @ X[0, 0]),
    "baddbmm": lambda: (torch.baddbmm(X[:, :1], X, X[:, :6]), torch.addmm(X[0, 0], X[0], X[1, :6])),
    "shapes": lambda: (X.movedim(0, 2), X.unflatten(1, (2, 4)), X[:, None].squeeze(1), X.flip(1), X.roll(1, 2)),
    "named": lambda: (X[:2].squeeze(0), X.roll(3), X.repeat_interleave(2), F.prelu(IMAGE, X[:, 0, 0])),
    "masks": lambda: (X.index_put((X > 0,), X[0, 0, 0]), IMAGE.index_put((IMAGE[..., 0] > 0,), X[0, 0, :1])),
    "joins": lambda: (torch.stack([X, X], 1), X.chunk(2, 1)[1], X.unbind(2)[1], X.repeat(1, 2, 1), X.tril()),
    "repeats": lambda: (X.repeat_interleave(2, 1), F.pad(X, (0, 0, 1, 1)), X.unfold(1, 4, 2)),
    "pads": lambda: F.pad(X, (1, 0), value=2.0) + F.pad(X, (1, 0), mode="replicate"),
    "reductions": lambda: (X.var(1), X.var((0, 2), keepdim=True), X.amax(1), X.logsumexp(2), X.mean(), X.sum(0)),
    "norms": lambda: (F.group_norm(IMAGE, 2), F.instance_norm(IMAGE), F.rms_norm(X, [6]), X.log_softmax(1)),
    "batch_norm": lambda: F.batch_norm(IMAGE, None, None, IMAGE[0, :, 0, 0], IMAGE[1, :, 0, 0], training=True),
    "convolutions": lambda: (F.conv2d(IMAGE, IMAGE[:, :, :3, :3], IMAGE[0, 0, 0, :4]), F.conv1d(X, X[:2, :, :3])),
    "pools": lambda: (F.max_pool2d(IMAGE, 2), F.adaptive_avg_pool2d(IMAGE, 2), F.avg_pool1d(X, 2)),
    "losses": lambda: (F.mse_loss(X, X + 1), F.l1_loss(X, X * 2, reduction="sum"), F.kl_div(X, X.exp())),
    "cross_entropy": lambda: (
        F.cross_entropy(X[:, :, :2], LABELS, label_smoothing=0.1),
        F.cross_entropy(X[:, :, :2], LABELS, X[0, :, 0].exp()),
        F.cross_entropy(X[:, :, :2], LABELS, reduction="none"),
        F.cross_entropy(X[:, :, :2], LABELS.clamp(min=0), reduction="sum", ignore_index=2),
        F.cross_entropy(X, X.softmax(1)),
        F.nll_loss(X[:, :, :2].log_softmax(1), LABELS, X[0, :, 0].exp()),
    ),
    "attention": lambda: (
        F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True),
        F.scaled_dot_product_attention(HEADS, HEADS[:, :2], HEADS[:, :2], enable_gqa=True, scale=0.3),
        F.scaled_dot_product_attention(HEADS, HEADS, HEADS, HEADS @ HEADS.mT, dropout_p=0.3),
        F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True, dropout_p=0.3),
    ),
    "lookups": lambda: (
        F.embedding(LABELS.clamp(min=0), X[0], padding_idx=3),
        F.embedding(LABELS.clamp(min=0), X[0], scale_grad_by_freq=True),
        X.gather(1, LABELS.clamp(min=0)[:, :, None].expand(4, 2, 6)),
        X.index_select(1, LABELS[0]),
        X.index_add(1, LABELS[0], X[:, :2]),
        X.scatter_add(1, LABELS.clamp(min=0)[:, :, None].expand(4, 2, 6), X[:, :2]),
        X[:, LABELS[0]],
        X[LABELS[0].clamp(max=3)[:, None], :, LABELS[2]],
    ),
    "factories": lambda: (X + torch.arange(1, 13, 2), X * X.new_full((8, 6), 2.0), X + torch.ones_like(X)),
    "random": lambda: (X + torch.randn_like(X), X * torch.rand(8, 6, dtype=X.dtype), F.dropout(X, 0.4)),
    "elements": lambda: (X.clamp(-1, 1), torch.where(X > 0, X, X.exp()), X.masked_fill(X < 0, 0.0)),
}  # fmt: skip


class _Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        names = ("X", "IMAGE", "LABELS", "HEADS")
        return type(self.function)(self.function.__code__, globals() | dict(zip(names, tensors, strict=True)))()


@pytest.mark.parametrize("name", CASES)
def test_options_give_the_op(name: str) -> None:
    torch.manual_seed(0)
    given = (X, IMAGE, LABELS, HEADS)
    traced = trace(_Of(CASES[name]), (given, None))
    values = dict(zip(traced.inputs, given, strict=True)) | traced.constants
    one, two = Mesh.describe((2,), ("a",)), Mesh.describe((2, 2), ("a", "b"))
    rng = random.Random(0)
    for node, tensors in run_graph(traced, values, RandomState(3)):
        assert rule_of(node.target) is not None, f"no rule for {node.target}"
        listed = options(node)
        if len(listed) < 2 or target_name(node.target) == "getitem":
            continue
        for chosen in [(option,) for option in listed] + [tuple(rng.choices(listed, k=2)) for _ in range(3)]:
            mesh = one if len(chosen) == 1 else two
            if fits(node, chosen, tensors, mesh):
                try:
                    check_option(node, chosen, tensors, mesh)
                except Exception as error:
                    raise AssertionError(f"{node.format_node()} as {chosen}") from error


def test_dropout_draws_what_the_running_model_draws() -> None:
    """A trace's dropouts give the masks of the model itself under a RandomState."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(0.5)).double()
    traced = trace(model, (X, None))
    held = dict(model.named_parameters())
    values = {node: held[key].detach() for node, key in traced.parameters.items()} | {traced.inputs[0]: X}
    state = RandomState(seed=3)
    state.name_modules(model)
    with state:
        expected = model(X)
    ops = list(run_graph(traced, values, RandomState(seed=3)))
    node, given = ops[-1]
    mesh = Mesh.describe((1,), ("one",))
    result = run_shards(node, [options(node)[0]], [{(0,): given[0]}], mesh, RandomState(seed=3))[(0,)][0]
    torch.testing.assert_close(result, expected.detach())
