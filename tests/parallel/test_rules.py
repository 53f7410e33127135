"""Rules: derived from a model's blocks where none are given, and refused where they cannot be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.test_tensor import encoder_batch, gpt, next_tokens, sentences, squares
from tests.parallel.training import check_training
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.parallel.rules.derived import _candidates
from unisono.parallel.rules.rules import known
from unisono.parallel.tensor.rule_checks import require_sound
from unisono.parallel.tensor.tensor_parallel import styles_of

Pools = Callable[[str, int], RankPool]

# ---- without rules ---------------------------------------------------------------------------------------------------


def test_gpt_without_rules(pools: Pools) -> None:
    """Attention and MLP are found in the blocks; the embeddings stay full."""
    found = pools("gloo", 4).run(check_training, gpt, sentences, next_tokens)[0]
    block = [
        "attention.qkv.weight",
        "attention.qkv.bias",
        "attention.out.weight",
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
    ]
    assert found["sharded"] == [f"blocks.{number}.{name}" for number in range(2) for name in block]


class GatedBlock(nn.Module):
    """Queries, keys and values apart with fewer key heads, a gated MLP in a module of its own."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads, self.n_kv_heads = 6, 2
            self.wq, self.wk, self.wv = nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(24, 8)
            self.wo = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.wq(x).unflatten(-1, (self.n_heads, 4)).transpose(1, 2)
            k, v = (w(x).unflatten(-1, (self.n_kv_heads, 4)).transpose(1, 2) for w in (self.wk, self.wv))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.wo(y.transpose(1, 2).flatten(2))

    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(24, 30), nn.Linear(24, 30), nn.Linear(30, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = GatedBlock.Attention(), GatedBlock.Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.feed(x)


def gated() -> nn.Module:
    return nn.Sequential(GatedBlock(), GatedBlock())


def test_gated_blocks_without_rules(pools: Pools) -> None:
    found = pools("gloo", 2).run(check_training, gated, encoder_batch, squares)[0]
    assert {"0.attention.wk.bias", "0.feed.up.weight", "1.feed.down.weight"} <= set(found["sharded"])


class Misleading(nn.Module):
    """By its shapes an MLP, but what stands in between is a norm over all hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(F.rms_norm(hidden, hidden.shape[-1:]))


class Interleaved(nn.Module):
    """Queries, keys and values in one layer, but head by head: cut in thirds it would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, 2)).permute(3, 0, 2, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("block", [Misleading, Interleaved])
def test_what_shapes_suggest_is_tried(block: type[nn.Module]) -> None:
    assert list(_candidates(block()))
    with pytest.raises(
        UsageError, match="Sequential defines no tensor-parallel plan, and none can be inferred from its blocks; pass"
    ):
        styles_of(nn.Sequential(block(), block()), 2)


# ---- what cannot be right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "ranks", "message"),
    [
        ({"*.fc3": "column"}, 2, "rule '\\*.fc3' matches no module of GPT; its modules are tokens, positions"),
        ({"*.fc1": "colum"}, 2, "rule '\\*.fc1': 'colum'; expected one of column, column_gather, row"),
        ({"*.fc1": "column:x"}, 2, "expected column:qkv, column:gate_up or column:4\\+1\\+1"),
        ({"*.fc1": "row:qkv"}, 2, "which is for expert weights; expected row"),
        ({"*.fc1": "row_split:qkv"}, 2, "only column, row and heads take more after a colon"),
        ({"*.norm1": "column"}, 2, "blocks.0.norm1 is column, but it is a LayerNorm; expected an nn.Linear"),
        ({"*.fc1": "vocab"}, 2, "blocks.0.fc1 is vocab, but it is a Linear; expected an nn.Embedding"),
        ({"*.attention": "heads:heads"}, 3, "blocks.0.attention has heads=4, which tp=3 does not divide"),
        ({"*.attention": "heads:nheads"}, 2, "has no whole number of that name; it has heads"),
        ({"*.fc1": "mla_kv"}, 2, "blocks.0.fc1: Block has no number qk_rope_head_dim, .* keep its layers full"),
        ({"*.fc1": "column:5+1"}, 2, None),
        ({"*.fc1": "column:7+4"}, 2, "96 features do not consist of parts of the proportions 7\\+4"),
        ({"*.tokens": "vocab"}, 2, "tokens and head share one weight, .* add 'head': 'column_gather'"),
        ({"blocks.0.fc1.weight": "column"}, 2, "is a parameter of shape \\(96, 24\\)"),
    ],
)
def test_rules_that_cannot_be_right(rules: dict[str, str], ranks: int, message: str | None) -> None:
    def check() -> None:
        model = gpt()
        require_sound(model, styles_of(model, ranks, rules), ranks)

    if message is None:
        check()
        return
    with pytest.raises(UsageError, match=message):
        check()


class BringsPlan(nn.Module):
    """A model with a tensor-parallel plan of its own, as those of Hugging Face have."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.tp_plan = {"tokens": "embedding_rowwise", "up": "colwise", "down": "rowwise"}
        self.tokens, self.up, self.down = nn.Embedding(8, 4, **options), nn.Linear(4, 8), nn.Linear(8, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_an_embedding_that_cannot_be_sharded_stays_replicated_under_the_plan_of_its_model(option: str) -> None:
    assert styles_of(BringsPlan(), 2)["tokens"].kind == "vocab"
    assert sorted(styles_of(BringsPlan(**{option: True}), 2)) == ["down", "up"]


def test_rules_of_known_classes_go_by_package_too() -> None:
    own = type("TransformerEncoderLayer", (nn.Module,), {"__module__": "mine"})()
    own.linear1, own.linear2 = nn.Linear(4, 8), nn.Linear(8, 4)
    assert known(nn.Sequential(own)) == {}
    assert known(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8)))["0.linear1"] == "column"
