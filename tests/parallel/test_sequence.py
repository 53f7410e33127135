"""Sequence parallelism against the plain model, and what it says against plain tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.parallel.test_tensor import (
    GPT_RULES,
    Mlp,
    counted_step,
    encoder,
    encoder_batch,
    gpt,
    gpt_of_twelve_heads,
    next_tokens,
    sentences,
    squares,
)
from tests.parallel.training import check_training, seeded, tp_mesh
from tests.ranks import RankPool, RemoteError
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize

Pools = Callable[[str, int], RankPool]

MLP_ONLY = {"*.fc1": "column", "*.fc2": "row"}
IN_BLOCKS = GPT_RULES | {"*.tokens": "replicate", "*.head": "replicate"}


def gpt_with_dropout() -> nn.Module:
    return gpt(4, 0.2)


def encoder_with_dropout() -> nn.Module:
    return encoder(0.2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gpt(pools: Pools, size: int) -> None:
    """Eleven tokens divide by none of the sizes."""
    build = gpt_of_twelve_heads if size == 3 else gpt
    found = pools("gloo", size).run(check_training, build, sentences, next_tokens, GPT_RULES, True)[0]
    assert {"blocks.0.norm1.weight", "blocks.0.attention.out.bias", "blocks.1.fc2.bias"} <= set(found["summed"])
    assert not {"norm.weight", "positions.weight", "tokens.weight"} & set(found["summed"])
    assert not set(found["sharded"]) & set(found["summed"])


@pytest.mark.parametrize(
    ("build", "sequence"),
    [(gpt_with_dropout, True), (encoder_with_dropout, False), (gpt_with_dropout, False), (encoder_with_dropout, True)],
)
def test_dropout_masks_do_not_depend_on_tp(pools: Pools, build: Callable[[], nn.Module], sequence: bool) -> None:
    """Residuals, attention weights, and in torch's encoder also between the MLP's layers: a piece of 30 features."""
    is_gpt = build is gpt_with_dropout
    batch, objective, rules = (sentences, next_tokens, GPT_RULES) if is_gpt else (encoder_batch, squares, None)
    pools("gloo", 4).run(check_training, build, batch, objective, rules, sequence)


def short_sentences() -> torch.Tensor:
    return torch.randint(0, 37, (3, 4))


def test_fewer_tokens_than_ranks(pools: Pools) -> None:
    pools("gloo", 4).run(check_training, gpt, short_sentences, next_tokens, GPT_RULES, True)


def test_torch_encoder(pools: Pools) -> None:
    found = pools("gloo", 4).run(check_training, encoder, encoder_batch, squares, None, True)[0]
    assert "layers.0.self_attn.out_proj.bias" in found["summed"]


def test_modules_that_need_all_tokens_run_on_the_full_sequence(pools: Pools) -> None:
    """Attention without rules, and an MLP whose features are gathered: their own parameters have full gradients."""
    gathering = {"*.fc1": "column_gather", "*.fc2": "row_split", "*.tokens": "vocab", "*.head": "column_gather"}
    found = pools("gloo", 4).run(check_training, gpt_with_dropout, sentences, next_tokens, MLP_ONLY, True)[0]
    assert "blocks.0.norm1.weight" in found["summed"]
    assert "blocks.0.attention.qkv.weight" not in found["summed"]
    with pytest.raises(RemoteError, match=r"blocks\.0\.fc1: column_gather inside a block"):
        pools("gloo", 2).run(check_training, gpt, sentences, next_tokens, gathering, True)


def check_traffic(comm: Communicator) -> None:
    mesh = tp_mesh(comm)
    plain, sequence = seeded(gpt), seeded(gpt)
    tensor_parallelize(plain, mesh, IN_BLOCKS)
    tensor_parallelize(sequence, mesh, IN_BLOCKS, sequence=True)
    by_tensor, by_sequence = (counted_step(model, mesh, even_tokens) for model in (plain, sequence))
    batch, length, width, layers = 3, 12, 24, 2
    activations = batch * length * width * 8
    # Each all-reduce is a reduce-scatter and an all-gather; besides there are the gradient's gather at the entry and
    # the activations' at the exit, each half an all-reduce.
    assert by_sequence.calls == {"reduce_scatter": 4 * layers, "all_gather": 4 * layers + 2}
    half = activations * (comm.size - 1) / comm.size
    assert by_tensor.sent == pytest.approx(4 * layers * 2 * half)
    assert by_sequence.sent == pytest.approx(by_tensor.sent + 2 * half)


def even_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def test_says_as_much_as_plain_tensor_parallelism(pools: Pools) -> None:
    pools("gloo", 4).run(check_traffic)


def check_shapes(comm: Communicator) -> list[tuple[int, ...]]:
    model = seeded(gpt)
    tensor_parallelize(model, tp_mesh(comm), IN_BLOCKS, sequence=True)
    seen = []
    for module in (model.blocks[0].norm2, model.blocks[0].fc1, model.blocks[1], model.norm):
        module.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model(torch.zeros(2, 5, dtype=torch.long))
    return seen


def test_activations_between_regions_are_shards(pools: Pools) -> None:
    shapes = pools("gloo", 2).run(check_shapes)
    assert shapes[0] == [(2, 3, 24), (2, 5, 48), (2, 5, 24), (2, 5, 24)]
    assert shapes[1] == [(2, 2, 24), (2, 5, 48), (2, 5, 24), (2, 5, 24)]


class Translator(nn.Module):
    """torch's decoder, which attends to what another layer makes of a second sequence; both are one batch here."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.source = source
        self.read = nn.Linear(24, 24)
        layer = nn.TransformerDecoderLayer(24, 4, 30, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.decoder(x[:, self.source :], memory=self.read(x[:, : self.source]))
        return y


class Conditioned(nn.Module):
    """Blocks that add a condition of the sample to every token."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition(x.mean(1))
        for block in self.blocks:
            x = block(x, condition)
        return x


class ConditionedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.fc2(self.fc1(self.norm(x)).relu()) * condition[:, None]
        return y


def twelve_of_the_source() -> nn.Module:
    return Translator(12)


def as_many_of_the_source_as_a_rank_has() -> nn.Module:
    return Translator(4)


def twelve_tokens() -> torch.Tensor:
    return torch.randn(3, 12, 24, dtype=torch.float64)


def nineteen_tokens() -> torch.Tensor:
    return torch.randn(3, 19, 24, dtype=torch.float64)


def test_a_second_sequence(pools: Pools) -> None:
    """It is not sharded, also where its length is that of a rank's shard."""
    pools("gloo", 2).run(check_training, twelve_of_the_source, nineteen_tokens, squares, None, True)
    pools("gloo", 2).run(check_training, as_many_of_the_source_as_a_rank_has, twelve_tokens, squares, None, True)


def test_tensors_beside_the_tokens_get_their_gradients_of_all_ranks(pools: Pools) -> None:
    pools("gloo", 2).run(check_training, Conditioned, twelve_tokens, squares, MLP_ONLY, True)


class NormedMemory(nn.Module):
    """Blocks that make something of the second sequence before they attend to it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(NormedMemoryBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, x = self.read(x[:, :4]), x[:, 4:]
        for block in self.blocks:
            x = block(x, memory)
        return x


class NormedMemoryBlock(ConditionedBlock):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.fc2(self.fc1(self.norm(memory)).mean(1, keepdim=True) * self.fc1(x))
        return y


def test_what_is_made_of_a_second_sequence_is_not_taken_for_tokens(pools: Pools) -> None:
    with pytest.raises(RemoteError, match="could not be distinguished; pad it to another length, or leave sp out"):
        pools("gloo", 2).run(check_training, NormedMemory, twelve_tokens, squares, MLP_ONLY, True)


class Stack(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Mlp(), *middle) for _ in range(2))


def refusals(comm: Communicator) -> list[str]:
    mesh = tp_mesh(comm)
    mlp = {"*.fc1": "column", "*.fc2": "row"}
    cases = [
        (Mlp(), mlp),
        (Stack(nn.Linear(8, 8)), mlp),
        (Stack(nn.BatchNorm1d(7)), mlp),
        (Stack(nn.Conv1d(7, 7, 1)), mlp),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False), None),
    ]
    messages = []
    for model, rules in cases:
        with pytest.raises(UsageError) as caught:
            tensor_parallelize(model, mesh, rules, sequence=True)
        messages.append(str(caught.value))
    return messages


def test_refusals(pools: Pools) -> None:
    messages = pools("gloo", 2).run(refusals)[0]
    expected = [
        "Mlp has none; leave sequence out",
        "blocks.0.1 a shard of the sequence, as no rule shards it; if it works token by token, say so with "
        'the rule {"*.1": "replicate"}',
        "blocks.0.1 takes means over all tokens",
        "blocks.0.1 a shard of the sequence",
        "layers.0.self_attn has the sequence in dim 0",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
