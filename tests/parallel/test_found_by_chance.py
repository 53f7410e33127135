"""Cases that random models under random plans have shown: each was a wrong number, a wait or a raw error once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.graph.capture.trace import trace
from unisono.parallel.apply import fitting_rules
from unisono.parallel.checks.samples import find_samples
from unisono.parallel.checks.tokenwise import require_tokenwise
from unisono.parallel.context.sequence import require_sound_blocks
from unisono.parallel.expert.expert import MoE
from unisono.parallel.share import run_on, shares
from unisono.parallel.task import Task
from unisono.parallel.tensor.tensor_parallel import require_shareable
from unisono.plan.plan import Plan
from unisono.verify.float64 import Float64Mode
from unisono.verify.mesh_program import ProgramSpec
from unisono.verify.self_check import parallelize
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
Mix = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.attention, self.norm, self.mix = Attention(), nn.LayerNorm(8), mix
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.mix(x))))


class Tower(nn.Module):
    def __init__(self, mix: Mix, after: Mix) -> None:
        super().__init__()
        self.table, self.blocks, self.head = (
            nn.Embedding(9, 8),
            nn.ModuleList([Block(mix), Block(mix)]),
            nn.Linear(8, 9),
        )
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x))


def apart(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


MIXES: dict[str, Mix] = {
    "shift": lambda x: x + x.roll(1, 1),
    "causal shift": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "maximum": lambda x: x - x.amax((1, 2), keepdim=True),
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "norm over tokens": lambda x: F.group_norm(x, 1, x.new_ones(6), x.new_zeros(6)),
}
RULES = {
    "*.attention": "heads:heads", "*.qkv": "column:qkv", "*.out": "row", "*.fc1": "column", "*.fc2": "row"
}  # fmt: skip
TOKENS = torch.arange(24).view(4, 6) % 9


def refusal(mix: Mix, after: Mix, word: str, tokens: torch.Tensor = TOKENS) -> str:
    torch.manual_seed(0)
    model = Tower(mix, after)
    styles = None
    if word == "sp":
        styles = require_shareable(model, 2, RULES)
        require_sound_blocks(model, styles)
    try:
        require_tokenwise(model, (tokens, tokens), word, styles)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MIXES)
def test_tokens_that_are_mixed_are_found(name: str) -> None:
    assert "blocks.0" in refusal(MIXES[name], apart, "cp") or "first block" in refusal(MIXES[name], apart, "cp")
    assert "sp gives a rank some of the tokens" in refusal(MIXES[name], apart, "sp")
    assert "from blocks.1" in refusal(apart, MIXES[name], "cp")
    assert refusal(apart, MIXES[name], "sp") == ""  # tokens are together again there


class Folded(Block):
    """Folds samples and tokens into one dim, as OPT does, and drops there."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attention(self.norm(x))
        return x + self.drop(self.fc2(F.gelu(self.fc1(y.flatten(0, 1))))).view_as(x)


def test_dropout_of_folded_tokens_is_refused_under_cp() -> None:
    model = Tower(apart, apart)
    model.blocks = nn.ModuleList([Folded(apart), Folded(apart)])
    with pytest.raises(UsageError, match=r"shape \(12, 8\), but cp draws its mask"):
        require_tokenwise(model, (TOKENS, TOKENS), "cp")
    for block in model.blocks:
        block.drop.p = 0.0  # type: ignore[union-attr]
    require_tokenwise(model, (TOKENS, TOKENS), "cp")


class Skips(Tower):
    """Adds what the first block gives to what the last one gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.blocks[0](self.table(x))
        return self.head(self.blocks[1](x) + first)


@pytest.mark.parametrize("word", ["cp", "sp"])
def test_shards_that_leave_the_blocks_are_found(word: str) -> None:
    """Under sp, and under cp where sequences have one target each, only what the last block gives is gathered."""
    model = Skips(apart, apart)
    targets = TOKENS if word == "sp" else TOKENS[:, 0]
    with pytest.raises(UsageError, match="some of the tokens"):
        require_tokenwise(model, (TOKENS, targets), word, require_shareable(model, 2, RULES))
    require_tokenwise(model, (TOKENS, TOKENS), "cp")  # every rank keeps its tokens to the end


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_positions_that_a_block_counts_from_0_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under cp a block has some of the tokens, and counts those: rotary embeddings turn by wrong angles."""

    def attend(self: Attention, x: torch.Tensor) -> torch.Tensor:
        heads = zip(("query", "key", "value"), self.qkv(x).chunk(3, -1), strict=True)
        given = {each: t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each, t in heads}
        given[name] = given[name] * (1 + torch.arange(x.shape[1], dtype=x.dtype)[:, None])
        return self.out(F.scaled_dot_product_attention(*given.values()).transpose(1, 2).flatten(2))

    assert refusal(apart, apart, "cp") == ""
    monkeypatch.setattr(Attention, "forward", attend)
    assert f"to the input of attention ({name})" in refusal(apart, apart, "cp")


def test_a_maximum_is_found_wherever_it_lies() -> None:
    """Also where all tokens are alike, so that any of them has it."""
    for moved in range(6):
        assert refusal(MIXES["maximum"], apart, "cp", TOKENS.roll(moved, 1))
    assert refusal(MIXES["maximum"], apart, "cp", torch.ones(4, 6, dtype=torch.int64))


@pytest.mark.parametrize("word", ["cp", "sp"])
def test_tokens_that_are_apart_are_let_pass(word: str) -> None:
    assert refusal(apart, apart, word) == ""


def test_blocks_without_attention_are_found_on_every_rank() -> None:
    """Before ranks talk: in a pipeline the stages without such a block would wait for the others."""
    model = Tower(apart, apart)
    model.blocks[1].attention = nn.Linear(8, 8)  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"block blocks\.1 did not call F\.scaled_dot_product_attention"):
        require_tokenwise(model, (TOKENS, TOKENS), "cp")


def test_buffers_keep_their_new_values_where_projections_are_unpacked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = trace(model, (torch.randn(6, 4), torch.randn(6, 4)), F.mse_loss, unpacked=True)
    assert set(found.changed.values()) <= {node.name for node in found.graph.nodes}


def test_a_constant_in_float32_does_not_keep_a_proof_in_float64_from_tracing() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    with Float64Mode(torch.float64):
        batch = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
        assert trace(nn.Linear(3, 3), batch, lambda o, y: F.cross_entropy(o, y, weight.to(o.dtype))).ops


# ---- among ranks ----------------------------------------------------------------------------------------------------


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.randint(4, (4,), generator=generator)


def by_place(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": rest}], lr=0.1)


def by_dims(parameters: Any) -> torch.optim.Optimizer:
    big, small = ([p for p in parameters if (p.ndim > 1) is is_big] for is_big in (True, False))
    return torch.optim.AdamW([{"params": big, "weight_decay": 0.3}, {"params": small, "weight_decay": 0.0}], lr=0.01)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))


def outcomes(comm: Communicator) -> list[str]:
    """What comes of each case; "" where it is equivalent."""

    def came(model: Callable[[], nn.Module], optimizer: Any, plan: Plan | ProgramSpec) -> str:
        try:
            verdict = verify_here(comm, Task(model, F.cross_entropy, optimizer, vectors), plan, 2)
        except UsageError as error:
            return str(error)
        return "" if verdict.equivalent else str(verdict)

    pipeline = Plan.parse("pp=2,microbatches=2")
    bare = [nn.Tanh, nn.Sigmoid]
    return [
        came(lambda: nn.Sequential(*(kind() for kind in bare), nn.Linear(6, 4)), by_dims, pipeline),
        came(deep, by_place, pipeline),
        came(deep, by_dims, pipeline),
        came(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), by_dims, ProgramSpec.parse("mp=2,unpack")),
    ]


def test_no_rank_waits_and_no_group_depends_on_the_stage(pools: Pools) -> None:
    for bare, placed, plain, unpacked in pools("gloo", 2).run(outcomes):
        assert "has no parameters" in bare
        assert "by its index in the list" in placed
        assert plain == unpacked == ""


class Encoder(nn.Module):
    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList([Weighing() for _ in range(2)] if needs_weights else layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=True)[0]


def check_dropped_weights(comm: Communicator, needs_weights: bool, plan: str) -> None:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randint(9, (3, 5), generator=drawn), torch.randint(9, (3, 5), generator=drawn)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    task = Task(partial(Encoder, needs_weights), loss, partial(torch.optim.SGD, lr=0.1), batch)
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, str(verdict.first_divergence)


@pytest.mark.parametrize(
    ("needs_weights", "plan"), [(False, "tp=2,sp"), (True, "tp=2"), (False, "tp=2"), (True, "tp=2,sp")]
)
def test_torchs_attention_drops_the_same_weights_whoever_has_them(pools: Pools, needs_weights: bool, plan: str) -> None:
    pools("gloo", 2).run(check_dropped_weights, needs_weights, plan)


class Shared(nn.Module):
    """The same block in two places, each of which drops other weights."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
        self.blocks, self.head = nn.ModuleList([block, nn.Linear(6, 6), block]), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Masking(nn.Module):
    """Makes its mask for the tokens that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, x, x, attn_mask=unseen, need_weights=False)[0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Masking(), Masking()]), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).expand(-1, 2, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)


def check_shared_and_masked(comm: Communicator) -> str:
    sgd = partial(torch.optim.SGD, lr=0.1)
    verdict = verify_here(comm, Task(Shared, F.cross_entropy, sgd, vectors), ProgramSpec.parse("mp=2,full"), 2)
    assert verdict.equivalent, verdict
    with pytest.raises(UsageError) as caught:  # a mask of one token fits any number of them, and would mask nothing
        verify_here(comm, Task(Masked, F.cross_entropy, sgd, vectors), Plan.parse("tp=2,sp"), 1)
    return str(caught.value)


def test_blocks_in_two_places_and_masks_of_a_shard(pools: Pools) -> None:
    for reported in pools("gloo", 2).run(check_shared_and_masked):
        assert "attn_mask of shape (1, 1) for 2 queries and 2 keys" in reported


def test_a_part_without_samples_that_a_model_cannot_run() -> None:
    empty, one = shares(torch.randn(1, 2, 4), 2)[::-1]
    norm = nn.InstanceNorm1d(2, affine=True)
    with pytest.raises(UsageError, match="fewer samples in the batch than ranks and microbatches"), run_on(empty):
        norm(empty.batch)
    with run_on(one):
        assert norm(one.batch).shape == (1, 2, 4)
    with pytest.raises(ValueError, match="a fault of its own"), run_on(one):
        raise ValueError("a fault of its own")


class InPlace(nn.Module):
    """Changes in place what its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.fc1, self.fc2, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(1).repeat(1, 3, 1)
        h = self.fc1(x)
        h *= 0.5
        h = self.fc2(h.relu_())
        h += x
        logits: torch.Tensor = self.head(h.mean(1))
        return logits.add_(0.1).mul_(2)


def check_in_place(comm: Communicator) -> None:
    rules = {"fc1": "column", "fc2": "row", "head": "column_gather"}
    task = Task(InPlace, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), vectors, rules=rules)
    verdict = verify_here(comm, task, Plan.parse("tp=2"), 2)
    assert verdict.equivalent, verdict


def test_what_sharded_layers_give_can_be_changed_in_place(pools: Pools) -> None:
    pools("gloo", 2).run(check_in_place)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8, sparse=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x).mean(1)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (TOKENS + seed) % 9, torch.arange(4)


def check_sparse(comm: Communicator, plan: str) -> None:
    task = Task(Sparse, F.cross_entropy, partial(torch.optim.SGD, lr=0.1, momentum=0.9), tokens)
    task = replace(task, rules={"blocks.0": "column_gather"} if "tp" in plan else None)
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, verdict


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_sparse_gradients_are_compared(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(check_sparse, plan)


class Recomputed(nn.Module):
    """Drops in front of blocks that are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def check_recomputed(comm: Communicator) -> None:
    rules = {"blocks.*.0": "column", "blocks.*.2": "row"}
    task = Task(Recomputed, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), vectors, rules=rules)
    verdict = verify_here(comm, task, Plan.parse("tp=2,microbatches=2,recompute=full"), 2)
    assert verdict.equivalent, verdict


def test_a_recomputation_inside_a_region_leaves_it_for_the_next_microbatch(pools: Pools) -> None:
    pools("gloo", 2).run(check_recomputed)


class Balanced(nn.Module):
    """Experts with a capacity, which is of the full batch under any plan, and an output made of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.experts, self.head = (
            nn.Embedding(9, 8),
            MoE(8, 16, experts=4, top_k=2, capacity_factor=1.0),
            nn.Linear(8, 9),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(self.experts(self.table(x)))
        return out, out.softmax(-1).mean(0).log().sum()


def with_balance(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten()) + 0.1 * outputs[1]


def test_outputs_of_all_samples_are_found_beside_experts_with_a_capacity() -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    with pytest.raises(UsageError, match=r"output\[1\] is of shape \(\) for any number of samples"):
        find_samples(model, (TOKENS, TOKENS), loss=with_balance)
    assert find_samples(model, (TOKENS, TOKENS), loss=lambda outputs, targets: outputs[0].sum()) is not None
    assert model.experts.capacity_factor == 1.0


class Normed(nn.Module):
    """torch's first weight_norm keeps a tensor with a history on its layer, which copy.deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.blocks = nn.ModuleList(nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def check_copies(comm: Communicator, plan: str) -> str:
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    trainer = parallelize(Normed(), plan, loss=F.cross_entropy, optimizer=optimizer, check="full")
    trainer.step(vectors(0))
    return trainer.proof


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_tensors_with_a_history_are_copied_for_the_self_check(pools: Pools, plan: str) -> None:
    for proof in pools("gloo", 2).run(check_copies, plan):
        assert "proved on your model" in proof


def by_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()


def by_samples(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / len(targets)


def sequences(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(9, (2, 5, 8), generator=torch.Generator().manual_seed(seed)).unbind(0)  # type: ignore[return-value]


def check_sizes(comm: Communicator, plan: str) -> None:
    for loss in (by_tokens, by_samples):
        rules = RULES if "tp" in plan else None
        task = Task(partial(Tower, apart, apart), loss, partial(torch.optim.SGD, lr=0.1), sequences, rules)
        if "cp" in plan and loss is by_samples:
            with pytest.raises(UsageError, match="along dim 1"):
                verify_here(comm, task, Plan.parse(plan), 2)
            continue
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
        assert verdict.equivalent, verdict


@pytest.mark.parametrize("plan", ["dp=2,zero=3,microbatches=2", "tp=2,microbatches=2", "pp=2,microbatches=3", "cp=2"])
def test_losses_may_divide_sums_by_sizes_of_the_batch(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(check_sizes, plan)


class Positions(nn.Embedding):
    """Is given tokens, of which it counts the positions."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(tokens.shape[1], device=self.weight.device).expand(tokens.shape) + 2)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), Positions(16, 8)
        self.fc1, self.fc2, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(tokens)
        return self.head(x + self.fc2(F.gelu(self.fc1(x)))).transpose(1, 2)


class Neighbours(nn.Module):
    """Divides by the number of near samples, of which few samples have none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = torch.cdist(x, x)
        near = (distances < distances.median()).to(x.dtype)
        return self.fc2((near / near.sum(1, keepdim=True)) @ self.fc1(x).relu())


def check_shared_by_inference(comm: Communicator, model: type[nn.Module], batch: Any) -> None:
    task = Task(model, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), batch)
    verdict = verify_here(comm, task, Plan.parse("tp=2"), 2)
    assert verdict.equivalent, verdict


def sentences(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens


@pytest.mark.parametrize(("model", "batch"), [(Counting, "sentences"), (Neighbours, "vectors")])
def test_a_layer_that_does_not_work_on_shards_stays_replicated(
    pools: Pools, model: type[nn.Module], batch: str
) -> None:
    pools("gloo", 2).run(check_shared_by_inference, model, globals()[batch])


class Carried(nn.Module):
    """Adds its first hidden state after every block, round the blocks; a block drops, and is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(6, 8), nn.Parameter(torch.full((3,), 0.1))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for block, weight in zip(self.blocks, self.mix, strict=True):
            x = block(x) + weight * first
        return self.head(x)


def check_carried(comm: Communicator) -> None:
    """Several times: what a recomputation must not meet is a tensor with the id of one that is gone."""
    task = Task(Carried, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), vectors)
    for _ in range(3):
        verdict = verify_here(comm, task, Plan.parse("pp=2,microbatches=4,recompute=full"), 3)
        assert verdict.equivalent, verdict


def test_a_recomputation_takes_no_tensor_for_one_that_was_carried_round_the_blocks(pools: Pools) -> None:
    pools("gloo", 2).run(check_carried)


def frozen_in_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    model[0].bias.requires_grad_(False)
    return model


def check_frozen(comm: Communicator) -> None:
    task = Task(frozen_in_part, F.cross_entropy, partial(torch.optim.Adagrad, lr=0.1), vectors)
    for plan in ("dp=2", "dp=2,zero=1", "dp=2,zero=3"):
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
        assert verdict.equivalent, verdict


def test_states_of_frozen_parameters_are_no_result(pools: Pools) -> None:
    pools("gloo", 2).run(check_frozen)


# ---- outputs in containers, gradients in the forward pass ------------------------------------------------------------


@dataclass
class Inner:
    score: torch.Tensor


@dataclass
class Answer:
    logits: torch.Tensor
    inner: Inner


class Answers(nn.Module):
    def __init__(self, contain: Callable[[torch.Tensor, torch.Tensor], Any] = lambda x, y: Answer(x, Inner(y))) -> None:
        super().__init__()
        self.blocks, self.contain = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), contain

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.contain(x, x.sum(1))


def of_answer(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits, y) + out.inner.score.pow(2).mean()


def answers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=g), torch.randint(4, (5,), generator=g)


def in_dataclasses(comm: Communicator) -> None:
    task = Task(Answers, of_answer, partial(torch.optim.SGD, lr=0.1), answers)
    for plan in ("dp=2", "dp=2,zero=3", "pp=2,microbatches=2", "dp=2,microbatches=2"):
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
        assert verdict.equivalent, (plan, verdict)
    x, y = answers(0)
    trainer = parallelize(Answers, "dp=2", loss=of_answer, optimizer=task.optimizer, example=(x, y))
    assert trainer.predict(x).inner.score.shape == (5,)
    assert trainer.model(x).logits.shape == (5, 4)
    hidden = partial(Answers, lambda x, y: SimpleNamespace(logits=x, inner=SimpleNamespace(score=y)))
    trainer = parallelize(hidden, "dp=2", loss=of_answer, optimizer=task.optimizer)
    with pytest.raises(UsageError, match="is a SimpleNamespace, and tensors in it are those of a data rank's"):
        trainer.model(x)


def test_outputs_in_dataclasses(pools: Pools) -> None:
    pools("gloo", 2).run(in_dataclasses)


class Penalised(Answers):
    def forward(self, x: torch.Tensor) -> Any:
        given = x.detach().requires_grad_()
        out = super().forward(given)
        return out, torch.autograd.grad(out.sum(), given, create_graph=True)[0].pow(2).sum(1)


def penalised(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[0], y) + out[1].mean()


def gradients_in_forward(comm: Communicator) -> None:
    task = Task(
        partial(Penalised, lambda x, _: x), penalised, partial(torch.optim.SGD, lr=0.1), answers, name="penalised"
    )
    with pytest.raises(UsageError, match="takes gradients in its forward pass"):
        verify_here(comm, task, Plan.parse("pp=2"), 1)
    assert verify_here(comm, task, Plan.parse("dp=2"), 1).equivalent


def test_gradients_in_the_forward_pass_of_a_pipeline_are_refused(pools: Pools) -> None:
    pools("gloo", 2).run(gradients_in_forward)


class PartsOfBlocks(Tower):
    """Never calls its blocks, but what is in them."""

    def __init__(self) -> None:
        super().__init__(apart, apart)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block.attention(block.norm(x))  # type: ignore[operator]
            x = x + block.fc2(F.gelu(block.fc1(x)))  # type: ignore[operator]
        return self.head(x)


class ListsOfParts(PartsOfBlocks):
    """Its blocks are lists, which cannot be called, as those of x-transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(8), Attention(), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))])
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for norm, attention, mlp in self.blocks:  # type: ignore[misc]
            x = x + attention(norm(x))
            x = x + mlp(x)
        return self.head(x)


def came_of(comm: Communicator, model: type[nn.Module], plan: str) -> str:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    task = Task(model, loss, partial(torch.optim.SGD, lr=0.1), lambda seed: (TOKENS, TOKENS))
    try:
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
    except UsageError as error:
        return str(error)
    return "equivalent" if verdict.equivalent else str(verdict)


@pytest.mark.parametrize(
    ("model", "plan", "outcome"),
    [
        (PartsOfBlocks, "tp=2", "equivalent"),
        (PartsOfBlocks, "tp=2,sp", "does not call blocks.0 to blocks.1 as modules"),
        (PartsOfBlocks, "cp=2", "does not call blocks.0 to blocks.1 as modules"),
        (ListsOfParts, "tp=2", "equivalent"),
        (ListsOfParts, "dp=2,zero=3", "equivalent"),
        (ListsOfParts, "tp=2,sp", "ListsOfParts has none; leave sequence out"),
        (ListsOfParts, "cp=2", "has no list of repeated blocks"),
    ],
)
def test_blocks_that_are_not_called(pools: Pools, model: type[nn.Module], plan: str, outcome: str) -> None:
    for got in pools("gloo", 2).run(came_of, model, plan):
        assert outcome in got


class Phase(nn.Module):
    """All its parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=4)


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Phase() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def complex_stage(comm: Communicator) -> None:
    task = Task(Phases, F.cross_entropy, partial(torch.optim.AdamW, lr=0.1), answers)
    verdict = verify_here(comm, task, Plan.parse("pp=2,microbatches=2"), 2)
    assert verdict.equivalent, verdict


def test_a_stage_whose_parameters_are_all_complex(pools: Pools) -> None:
    pools("gloo", 2).run(complex_stage)


class RepeatsBeforeItsBlocks(nn.Module):
    """A call that may read values, before the blocks: later stages are sent its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).repeat_interleave(2, dim=-1)
        for block in self.blocks:
            x = x + block(x)
        return x


def repeats_before_its_blocks(comm: Communicator) -> None:
    task = Task(RepeatsBeforeItsBlocks, F.cross_entropy, partial(torch.optim.AdamW, lr=0.1), answers)
    verdict = verify_here(comm, task, Plan.parse("pp=2,microbatches=2"), 2)
    assert verdict.equivalent, verdict


def test_calls_that_read_values_before_the_blocks_keep_their_gradients(pools: Pools) -> None:
    pools("gloo", 2).run(repeats_before_its_blocks)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.leaky_relu(self.gate(x)) * self.up(x))


class OddVocabulary(nn.Module):
    """tp=2 gives one rank six rows of the embedding and the other five, which tips the balance of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(11, 4), Gated(), nn.Linear(4, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(x)))


def odd_vocabulary(comm: Communicator) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    task = Task(OddVocabulary, loss, partial(torch.optim.AdamW, lr=0.1), lambda seed: (TOKENS % 11, TOKENS % 11))
    verdict = verify_here(comm, task, Plan.parse("tp=2,pp=2,microbatches=2"), 2)
    assert verdict.equivalent, verdict


def test_stages_are_the_same_for_ranks_with_uneven_shards(pools: Pools) -> None:
    pools("gloo", 4).run(odd_vocabulary)


class ComplexHead(nn.Module):
    """A complex layer whose input needs a gradient: both products of its backward take a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(torch.complex(x, x.flip(-1)).to(self.head.weight.dtype)).abs()


def complex_head(comm: Communicator) -> None:
    task = Task(ComplexHead, F.cross_entropy, partial(torch.optim.AdamW, lr=0.1), answers)
    verdict = verify_here(comm, task, Plan.parse("tp=2"), 2)
    assert verdict.equivalent, verdict


def test_a_complex_layer_that_is_sharded(pools: Pools) -> None:
    pools("gloo", 2).run(complex_head)


class TokenDropping(Tower):
    """In training its blocks see some of the tokens, and attention written out multiplies by as many."""

    class Written(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out((q @ k.transpose(-1, -2)).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__(apart, apart)
        for block in self.blocks:
            block.attention = self.Written()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x[:, :5] if self.training else x)
        return F.pad(self.head(x), (0, 0, 0, 6 - x.shape[1]))


def test_a_model_may_leave_tokens_out_in_training(pools: Pools) -> None:
    assert pools("gloo", 2).run(came_of, TokenDropping, "tp=2") == ["equivalent"] * 2


# ---- rounding, random numbers ----------------------------------------------------------------------------------------


class Separable(nn.Module):
    """Convolutions with biases that BatchNorm takes away again: their gradients are rounding."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Sequential(nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs), nn.Conv2d(inputs, outputs, 1)),
            nn.BatchNorm2d(outputs),
        )
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(0.2)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)
        self.squeeze = nn.Linear(outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.drop(self.norm2(self.conv2(y)))
        y = y * torch.sigmoid(self.squeeze(y.mean((2, 3))))[:, :, None, None]
        y += self.short(x)
        return y.relu_()


class Separables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList([Separable(8, 8), Separable(8, 16, 2), Separable(16, 16)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def seven_images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(7, 3, 8, 8, generator=g), torch.randint(4, (7,), generator=g)


def rounding_is_no_fault(comm: Communicator) -> None:
    task = Task(
        Separables,
        partial(F.cross_entropy, reduction="sum"),
        partial(torch.optim.AdamW, lr=1e-2),
        seven_images,
    )
    verdict = verify_here(comm, task, Plan.parse("dp=2,zero=2"), 2)
    assert verdict.equivalent, verdict


def test_gradients_that_are_rounding_are_no_fault(pools: Pools) -> None:
    pools("gloo", 2).run(rounding_is_no_fault)


DRAWS: dict[str, Mix] = {
    "cauchy_": lambda x: x + torch.tanh(torch.empty_like(x).cauchy_(0.5, 2)),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(0.1, 0.5).tanh(),
    "geometric_": lambda x: x + 0.1 * torch.empty_like(x).geometric_(0.3),
}
UNFOLLOWED: dict[str, Mix] = {
    "poisson": lambda x: x + 0.1 * torch.poisson(x.detach().abs()),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 4), torch.full_like(x, 0.5)),
    "_standard_gamma": lambda x: x * torch.distributions.Gamma(2.0, 1.0).sample(),
    "_sample_dirichlet": lambda x: x * torch.distributions.Beta(2.0, 1.0).sample(),
}


class Drawing(nn.Module):
    def __init__(self, draw: Mix) -> None:
        super().__init__()
        self.blocks, self.draw = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.draw(x)


def follows(comm: Communicator, name: str, plan: str) -> None:
    task = Task(partial(Drawing, DRAWS[name]), F.cross_entropy, partial(torch.optim.SGD, lr=0.1), answers)
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("cauchy_", "dp=2"),
        ("log_normal_", "dp=2,zero=3"),
        ("geometric_", "pp=2,microbatches=2"),
        *(
            pytest.param(name, plan, marks=pytest.mark.thorough)
            for name, *plans in (
                ("cauchy_", "dp=2,zero=3", "pp=2,microbatches=2"),
                ("log_normal_", "dp=2", "pp=2,microbatches=2"),
                ("geometric_", "dp=2", "dp=2,zero=3"),
            )
            for plan in plans
        ),
    ],
)
def test_random_functions_of_torch_are_followed(pools: Pools, name: str, plan: str) -> None:
    pools("gloo", 2).run(follows, name, plan)


def unfollowed(comm: Communicator) -> None:
    for name, draw in UNFOLLOWED.items():
        task = Task(partial(Drawing, draw), F.cross_entropy, partial(torch.optim.SGD, lr=0.1), answers)
        for plan in ("dp=2", "pp=2,microbatches=2"):
            with pytest.raises(UsageError, match=f"torch.{name} draws from torch's own generator"):
                verify_here(comm, task, Plan.parse(plan), 1)
            comm.barrier()
        assert torch.isfinite(F.cross_entropy(task.model()(answers(0)[0]), answers(0)[1]))


def test_other_random_functions_of_torch_are_refused(pools: Pools) -> None:
    pools("gloo", 2).run(unfollowed)


class BranchingByFeature(nn.Module):
    """Asks for one feature between two layers, with the same answer for all that it is given at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)
        with torch.no_grad():
            self.first.bias.fill_(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.where(x[:, :1] > 0, x * 1.5, x))


def rules_of_branching(comm: Communicator) -> dict[str, str]:
    torch.manual_seed(0)
    return dict(fitting_rules(BranchingByFeature(), 2, None, vectors(0)))


def test_a_feature_that_decides_is_not_left_to_each_rank(pools: Pools) -> None:
    for rules in pools("gloo", 2).run(rules_of_branching):
        assert rules.get("first") != "column", rules
        assert rules, "layers may be sharded and gathered"
