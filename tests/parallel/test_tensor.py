"""Tensor parallelism against the plain model: outputs, gradients, steps, what is sharded and what is communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, Config
from tests.parallel.training import check_training, close, seeded, tp_mesh
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.apply import parallelize
from unisono.parallel.layout import full_tensor_of, layout_of
from unisono.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize
from unisono.parallel.tensor.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

Pools = Callable[[str, int], RankPool]

GPT_RULES = {
    "*.attention": "heads:heads",
    "*.qkv": "column:qkv",
    "*.out": "row",
    "*.fc1": "column",
    "*.fc2": "row",
    "*.tokens": "vocab",
    "*.head": "column_gather",
}
MLP_RULES = {"*.fc1": "column", "*.fc2": "row"}
VOCABULARY = 37


class Mlp(nn.Module):
    def __init__(self, hidden: int = 22) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, hidden)
        self.fc2 = nn.Linear(hidden, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def gpt(heads: int = 4, dropout: float = 0.0) -> GPT:
    return GPT(Config(vocabulary=VOCABULARY, context=16, width=24, heads=heads, layers=2, dropout=dropout))


def gpt_of_twelve_heads() -> GPT:
    return gpt(12)


def rows() -> torch.Tensor:
    return torch.randn(6, 10, dtype=torch.float64)


def sentences() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, 12))


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def next_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def next_tokens_of_shards(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


# ---- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_mlp(pools: Pools, size: int, optimizer: str) -> None:
    """22 hidden units on 3 and 4 ranks: uneven pieces."""
    found = pools("gloo", size).run(check_training, Mlp, rows, squares, MLP_RULES, False, optimizer)[0]
    assert found == {"sharded": ["fc1.weight", "fc1.bias", "fc2.weight"], "summed": []}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gpt_with_tied_embeddings(pools: Pools, size: int) -> None:
    """A vocabulary of 37 divides by none of the sizes."""
    build = gpt_of_twelve_heads if size == 3 else gpt
    found = pools("gloo", size).run(check_training, build, sentences, next_tokens, GPT_RULES)[0]
    assert "tokens.weight" in found["sharded"]
    assert "blocks.1.attention.qkv.bias" in found["sharded"]
    assert "blocks.1.attention.out.bias" not in found["sharded"]


@pytest.mark.parametrize("size", [2, 4])
def test_gpt_whose_logits_stay_in_shards(pools: Pools, size: int) -> None:
    rules = GPT_RULES | {"*.head": "vocab_head"}
    pools("gloo", size).run(check_training, gpt, sentences, next_tokens, rules, False, "AdamW", next_tokens_of_shards)


def encoder(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 4, 30, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_batch() -> torch.Tensor:
    return torch.randn(3, 9, 24, dtype=torch.float64)


def test_torch_encoder_without_rules(pools: Pools) -> None:
    found = pools("gloo", 4).run(check_training, encoder, encoder_batch, squares)[0]
    assert "layers.1.self_attn.in_proj_weight" in found["sharded"]
    assert "layers.1.self_attn.out_proj.weight" in found["sharded"]


def check_evaluation(comm: Communicator) -> None:
    """Torch's fast path reads weights without calling the layers."""
    plain, parallel = seeded(encoder).eval(), seeded(encoder).eval()
    tensor_parallelize(parallel, tp_mesh(comm))
    torch.manual_seed(0)
    x, padding = encoder_batch(), torch.arange(9)[None] > torch.tensor([[8], [5], [3]])
    with torch.no_grad():
        expected = plain(x, src_key_padding_mask=padding)
        close(parallel(x, src_key_padding_mask=padding)[~padding], expected[~padding], "the output in evaluation")


def test_torch_encoder_in_evaluation(pools: Pools) -> None:
    pools("gloo", 2).run(check_evaluation)


def check_attention(comm: Communicator, options: dict[str, Any], calls: dict[str, Any]) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 4, **options)

    plain, parallel = seeded(Around), seeded(Around)
    tensor_parallelize(parallel, tp_mesh(comm), {"*.attention": "heads"})
    torch.manual_seed(0)
    length, keys = 5, 7
    shape = (lambda n: (2, n)) if options.get("batch_first") else (lambda n: (n, 2))
    query = torch.randn(*shape(length), 24, dtype=torch.float64, requires_grad=True)
    key = torch.randn(*shape(keys), options.get("kdim", 24), dtype=torch.float64)
    value = torch.randn(*shape(keys), options.get("vdim", 24), dtype=torch.float64)
    calls = dict(calls)
    if calls.pop("mask", None):
        calls["attn_mask"] = torch.randn(2 * 4, length, keys, dtype=torch.float64)
        calls["key_padding_mask"] = torch.tensor([[False] * keys, [False] * 4 + [True] * 3])
    outcomes = []
    for model in (plain, parallel):
        out, weights = model.attention(query, key, value, **calls)
        loss = out.square().sum() + (weights.pow(3).sum() if weights is not None else 0)
        (grad,) = torch.autograd.grad(loss, query)
        outcomes.append((out, weights, grad))
    for got, expected, what in zip(outcomes[1], outcomes[0], ("output", "weights", "gradient"), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            close(got, expected, what)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, {}),
        ({"batch_first": True}, {"need_weights": False, "mask": True}),
        ({"batch_first": True, "bias": False}, {"average_attn_weights": False, "mask": True}),
        ({"kdim": 10, "vdim": 14}, {"need_weights": False}),
    ],
)
def test_multihead_attention(pools: Pools, options: dict[str, Any], calls: dict[str, Any]) -> None:
    pools("gloo", 2).run(check_attention, options, calls)


# ---- layers by hand ------------------------------------------------------------------------------------------------


def check_layers(comm: Communicator, gather: bool) -> None:
    torch.manual_seed(1)
    plain = [nn.Linear(5, 11), nn.Linear(11, 3)]
    torch.manual_seed(1)
    column = ColumnParallelLinear(5, 11, gather_output=gather, comm=comm)
    row = RowParallelLinear(11, 3, input_is_parallel=not gather, comm=comm)
    mesh = tp_mesh(comm)
    x = torch.randn(2, 5)
    torch.testing.assert_close(row(column(x).tanh()), plain[1](plain[0](x).tanh()))
    for mine, theirs in ((column, plain[0]), (row, plain[1])):
        assert torch.equal(full_tensor_of(mine.weight, layout_of(mine.weight), mesh), theirs.weight)
        assert torch.equal(full_tensor_of(mine.bias, layout_of(mine.bias), mesh), theirs.bias)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_layers_have_the_parameters_of_plain_ones(pools: Pools, size: int, gather: bool) -> None:
    pools("gloo", size).run(check_layers, gather)


def check_initialisers(comm: Communicator) -> None:
    def count(weight: torch.Tensor) -> None:
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))

    column = ColumnParallelLinear(3, 5, init=count, bias_init=nn.init.ones_, comm=comm, dtype=torch.float64)
    first = 3 if comm.rank else 0
    assert column.weight.dtype == torch.float64
    assert column.weight[0, 0] == first * 3
    assert (column.bias == 1).all()
    embedding = VocabParallelEmbedding(5, 2, padding_idx=4, init=count, comm=comm)
    out = embedding(torch.tensor([0, 3, 4]))
    assert out.tolist() == [[0, 1], [6, 7], [8, 9]]
    out.sum().backward()
    assert embedding.weight.grad.sum(1).tolist() == ([2, 0] if comm.rank else [2, 0, 0])


def test_initialisers_see_the_full(pools: Pools) -> None:
    pools("gloo", 2).run(check_initialisers)


def check_more_ranks_than_rows(comm: Communicator) -> None:
    torch.manual_seed(1)
    plain = nn.Embedding(2, 3), nn.Linear(3, 2)
    torch.manual_seed(1)
    embedding, head = VocabParallelEmbedding(2, 3, comm=comm), ColumnParallelLinear(3, 2, comm=comm)
    tokens, targets = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])
    expected = F.cross_entropy(plain[1](plain[0](tokens)), targets)
    loss = vocab_parallel_cross_entropy(head(embedding(tokens)), targets, comm)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    full = full_tensor_of(embedding.weight.grad, layout_of(embedding.weight), tp_mesh(comm))
    torch.testing.assert_close(full, plain[0].weight.grad)


def test_more_ranks_than_rows(pools: Pools) -> None:
    pools("gloo", 4).run(check_more_ranks_than_rows)


def check_cross_entropy(comm: Communicator, smoothing: float, reduction: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    full = (torch.randn(4, 5, VOCABULARY, dtype=dtype) * 30).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (4, 5))
    targets[1, 2:] = -1
    mine = full.detach().tensor_split(comm.size, -1)[comm.rank].clone().requires_grad_()
    expected = F.cross_entropy(
        full.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=smoothing, reduction=reduction
    )
    with traffic.counted() as seen:
        got = vocab_parallel_cross_entropy(mine, targets, comm, -1, smoothing, reduction, vocabulary=VOCABULARY)
        got.sum().backward()
    expected.sum().backward()
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.flatten(), expected.flatten(), **tolerance)
    torch.testing.assert_close(mine.grad, full.grad.tensor_split(comm.size, -1)[comm.rank], **tolerance)
    # The maximum, then the sum of exponentials and the target's logit (and with smoothing the sum of all logits).
    assert seen.calls == {"all_reduce": 2}
    wire = 8 if dtype == torch.float64 else 4
    assert seen.payload["all_reduce"] == targets.numel() * wire * (4 if smoothing else 3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cross_entropy_never_gathers_logits(pools: Pools, smoothing: float, reduction: str, dtype: torch.dtype) -> None:
    pools("gloo", 4).run(check_cross_entropy, smoothing, reduction, dtype)


# ---- communication -------------------------------------------------------------------------------------------------


def counted_step(model: nn.Module, mesh: Mesh, objective: Callable[..., torch.Tensor]) -> traffic.Traffic:
    torch.manual_seed(0)
    tokens = sentences()
    objective(model, tokens).backward()  # groups are made at first use
    with traffic.counted() as seen:
        objective(model, tokens).backward()
    return seen


def check_traffic(comm: Communicator) -> None:
    model = seeded(gpt)
    mesh = tp_mesh(comm)
    tensor_parallelize(model, mesh, GPT_RULES | {"*.tokens": "replicate", "*.head": "replicate"})
    seen = counted_step(model, mesh, next_tokens)
    batch, length, width, layers = 3, 11, 24, 2
    activations = batch * length * width * 8
    assert seen.calls == {"all_reduce": 4 * layers}
    assert seen.payload["all_reduce"] == 4 * layers * activations
    assert seen.sent == pytest.approx(4 * layers * activations * 2 * (comm.size - 1) / comm.size)


def test_bytes_a_step(pools: Pools) -> None:
    """Four all-reduces of the activations a layer: forward and backward, attention and MLP."""
    pools("gloo", 4).run(check_traffic)


def check_order(comm: Communicator) -> None:
    """Autograd takes, of what is ready, the highest number first: the sum starts, the weight follows, then the wait."""
    layers = [ColumnParallelLinear(4, 6, comm=comm) for _ in range(2)]
    x = torch.ones(3, 4, requires_grad=True) * 1
    for y in [layer(x) for layer in layers]:  # they share their input, and so the sum of its gradient
        (start, _), (late, _), *_ = y.grad_fn.next_functions
        wait = start.next_functions[0][0]
        assert wait._sequence_nr() < late._sequence_nr() < start._sequence_nr()
    frozen = ColumnParallelLinear(4, 6, comm=comm).requires_grad_(False)
    frozen(x).sum().backward()


def test_weight_gradients_are_made_while_the_inputs_gradient_travels(pools: Pools) -> None:
    pools("gloo", 2).run(check_order)


class Lending(nn.Module):
    """The second layer adds the bias of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.bias = self.up.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def check_shared_bias(comm: Communicator) -> None:
    rules = {"up": "column", "down": "row"}
    with pytest.raises(UsageError, match=r"down uses its bias, of shape \(8,\), in full, and shares it with a layer"):
        parallelize(Lending(), "tp=2", loss=F.mse_loss, optimizer=torch.optim.SGD, rules=rules)
    comm.barrier()


def test_a_parameter_that_another_layer_uses_in_full_is_refused(pools: Pools) -> None:
    pools("gloo", 2).run(check_shared_bias)
