"""Mixtures of experts: the quick form against the naive one, and sharded over ranks against one process."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.nn import MoE
from unisono.parallel.context.context import Context, context_parallelize
from unisono.parallel.expert import expert as experts
from unisono.parallel.expert.expert import collect_aux, expert_parallelize, naive_moe, needs_full_batch
from unisono.parallel.expert.grouped import Groups
from unisono.parallel.layout import full_tensor_of, layout_of
from unisono.torch_compat import TorchDispatchMode

Pools = Callable[[str, int], RankPool]

WIDTH = 8
VOCABULARY = 11
AXES = ("dp", "ep", "cp")

OPTIONS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "top 1": {"top_k": 1},
    "capacity": {"capacity_factor": 0.7},
    "capacity, top 1": {"capacity_factor": 1.0, "top_k": 1, "bias": False},
    "auxiliary": {"aux_weight": 0.3},
    "all": {"aux_weight": 0.3, "capacity_factor": 0.6, "top_k": 3, "gated": True, "activation": "silu"},
}


def moe(**options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(WIDTH, 12, 5, dtype=torch.float64, **options)


BFLOAT16 = {**OPTIONS, "unused experts": {"top_k": 1}, "no bias": {"bias": False, "gated": True}}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BFLOAT16)
def test_grouped_experts_are_those_of_the_loop(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, to rounding, forward and backward, with what autocast does to both."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    torch.manual_seed(1)
    layer = MoE(16, 24, 5, **BFLOAT16[name]).to(device)
    if name == "unused experts":
        with torch.no_grad():
            layer.router.weight[1:4] = 0
            layer.router.weight[0], layer.router.weight[4] = 1.0, -1.0
    x = torch.randn(3, 41, 16, device=device)
    outcomes, groups = [], []
    run = Groups.run
    monkeypatch.setattr(Groups, "run", lambda *args: groups.append(1) or run(*args))
    for is_grouped in (True, False, True):
        monkeypatch.setattr(experts, "can_be_grouped", lambda *_, answer=is_grouped: answer)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = layer(leaf)
            aux = collect_aux(layer)
        ((out.float() ** 2).sum() + (0.0 if aux is None else aux)).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        outcomes.append({"out": out.float().detach(), "input": leaf.grad, **gradients})
    assert len(groups) == 2
    for key, grouped in outcomes[0].items():
        assert torch.equal(grouped, outcomes[2][key]), key
        scale = float(outcomes[1][key].abs().max())
        torch.testing.assert_close(grouped, outcomes[1][key], rtol=0, atol=0.02 * scale, msg=key)


@pytest.mark.parametrize("counts", [[3, 0, 8, 17], [0, 0, 0, 0], [28, 0, 0, 0], [0, 0, 0, 28], [1, 1, 1, 1]])
def test_rows_of_groups(counts: list[int]) -> None:
    visits = 28
    groups = Groups.of(torch.tensor(counts), visits)
    ends = groups.ends.tolist()
    starts = [0, *ends[:-1]]
    assert len(set(groups.rows.tolist())) == visits
    assert all(start % 8 == 0 and end - start >= 8 for start, end in zip(starts, ends, strict=True))
    assert len(groups.choice) == ends[-1]
    assert groups.choice.argmax(1).tolist() == [e for e in range(4) for _ in range(ends[e] - starts[e])]
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    for row, number in zip(groups.rows.tolist(), expert, strict=False):
        assert starts[number] <= row < ends[number]
    assert all(starts[-1] <= row < ends[-1] for row in groups.rows[len(expert) :].tolist())


# ---- one rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_naive_and_quick(name: str) -> None:
    layer = moe(**OPTIONS[name])
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    outcomes = []
    for run in (layer, lambda x: naive_moe(layer, x)):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out = run(leaf)
        aux = collect_aux(layer)
        ((out**2).sum() + (0.0 if aux is None else aux)).backward()
        outcomes.append([out, leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for quick, naive in zip(*outcomes, strict=True):
        torch.testing.assert_close(quick, naive, rtol=1e-11, atol=1e-13)


def test_capacity_drops_the_last_comers() -> None:
    layer = MoE(2, 4, 2, top_k=1, capacity_factor=1.0, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[5.0, 0.0], [0.0, 5.0]]))
    first, second = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()
    out = layer(torch.stack([first, first, first, second]))  # four tokens, two experts: room for two in each
    assert [bool((row != 0).any()) for row in out] == [True, True, False, True]


def test_first_choices_come_first() -> None:
    layer = MoE(2, 4, 2, top_k=2, capacity_factor=0.5, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[5.0, 0.0], [0.0, 5.0]]))
    one, other = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    routes = layer.route(torch.stack([one, other]))  # each expert has room for one, and is one token's first choice
    assert routes.made.tolist() == [0, 2]


def test_auxiliary_loss_by_hand() -> None:
    layer = moe(aux_weight=0.5, top_k=2)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    layer(x)
    probability = layer.router(x).softmax(-1)
    visits = torch.zeros(5, dtype=torch.float64)
    for token in probability:
        for expert in token.topk(2).indices:
            visits[expert] += 1
    expected = 0.5 * 5 * sum(visits[e] / 14 * probability[:, e].mean() for e in range(5))
    assert math.isclose(layer.aux_loss.item(), expected.item(), rel_tol=1e-12)
    assert collect_aux(layer) is not None
    assert collect_aux(layer) is None
    copy.deepcopy(layer)


def test_balanced_routing_gives_the_lowest_loss() -> None:
    layer = moe(aux_weight=1.0, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(torch.randn(10, WIDTH, dtype=torch.float64))
    assert math.isclose(layer.aux_loss.item(), 1.0, rel_tol=1e-12)


def test_complaints() -> None:
    for options, words in [
        ({"top_k": 6}, "expected 1 to 5"),
        ({"capacity_factor": 0.0}, "above 0"),
        ({"activation": "swish"}, "expected one of gelu"),
    ]:
        with pytest.raises(UsageError, match=words):
            moe(**options)
    assert needs_full_batch(nn.Sequential(moe(), moe(aux_weight=0.1), moe(capacity_factor=1.0))) == ["1", "2"]


# ---- many ranks --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, recompute: bool, **options: Any) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.moe = MoE(WIDTH, 12, 5, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + (checkpoint(self.moe, x, use_reentrant=False) if self.recompute else self.moe(x))


class Model(nn.Module):
    def __init__(self, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute, **options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(options: dict[str, Any]) -> Model:
    torch.manual_seed(2)
    return Model(**options).double()


def summed_gradients(model: nn.Module, mesh: Mesh) -> None:
    for parameter in model.parameters():
        axes = [axis for axis in layout_of(parameter).summed if axis in mesh.names]
        if mesh.size(*axes) > 1:
            mesh.comm(*axes).all_reduce(parameter.grad)


def trained(
    model: Model, rows: int, mesh: Mesh | None, context: Context | None = None
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The losses, and by name the gradients of the first step and the parameters after three, all of them in full."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, seen = [], []

    def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if mesh is None:
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}
        layouts = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
        return {name: full_tensor_of(tensor, layouts[name], mesh).clone() for name, tensor in tensors.items()}

    for step in range(3):
        tokens = torch.randint(VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(step))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        total = targets.numel()
        if mesh is not None:
            share = slice(*bounds(rows, mesh.index("dp", "ep"), mesh.size("dp", "ep")))
            inputs, targets = inputs[share], targets[share]
        outputs = model(inputs)
        if context is not None:
            targets = context.shard_targets(targets)
        loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / total
        aux = collect_aux(model)
        loss = loss if aux is None else loss + aux
        optimizer.zero_grad()
        loss.backward()
        value = loss.detach().clone()
        if mesh is not None:
            mesh.comm().all_reduce(value)
            summed_gradients(model, mesh)
        if step == 0:
            seen.append(full({name: parameter.grad for name, parameter in model.named_parameters()}))  # type: ignore[misc]
        optimizer.step()
        losses.append(float(value))
    return losses, [*seen, full(dict(model.named_parameters()))]


def bounds(rows: int, index: int, ranks: int) -> tuple[int, int]:
    starts = [len(part) for part in torch.arange(rows).tensor_split(ranks)]
    return sum(starts[:index]), sum(starts[: index + 1])


def check_ranks(comm: Communicator, shape: tuple[int, int, int], options: dict[str, Any], rows: int) -> None:
    reference = built(options)
    expected = trained(reference, rows, None)
    model = built(options)
    mesh = Mesh(shape, AXES)
    expert_parallelize(model, mesh)
    context = context_parallelize(model, mesh) if mesh.size("cp") > 1 else None
    assert model.blocks[0].moe.up.shape[0] == len(range(5)[slice(*bounds(5, mesh.index("ep"), mesh.size("ep")))])
    found = trained(model, rows, mesh, context)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert list(mine) == list(theirs)
        for name in theirs:
            torch.testing.assert_close(
                mine[name], theirs[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1)])
def test_ranks(pools: Pools, shape: tuple[int, int, int], name: str) -> None:
    pools("gloo", math.prod(shape)).run(check_ranks, shape, OPTIONS[name], 6)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    OPS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        is_sized = name == "repeat_interleave.Tensor" and (kwargs or {}).get("output_size") is not None
        self.found[name] += name.startswith(self.OPS) and not is_sized
        return func(*args, **(kwargs or {}))


def reads_of_a_layer(comm: Communicator, ranks: int, options: dict[str, Any]) -> dict[str, int]:
    model = nn.Sequential(moe(**options))
    expert_parallelize(model, Mesh((1, ranks, 1), AXES))
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    lists: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        patch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or tolist(tensor))
        (model(x) ** 2).sum().backward()
    return {**+reads.found, "lists": len(lists)}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_is_waited_for_once(pools: Pools, ranks: int, name: str) -> None:
    """For the counts of its experts, and for the sizes of messages."""
    assert pools("gloo", ranks).run(reads_of_a_layer, ranks, OPTIONS[name]) == [{"lists": 1}] * ranks


def test_rank_without_samples(pools: Pools) -> None:
    pools("gloo", 4).run(check_ranks, (1, 4, 1), OPTIONS["all"], 3)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
@pytest.mark.parametrize("name", ["dropless", "auxiliary"])
def test_with_context_parallelism(pools: Pools, name: str, shape: tuple[int, int, int]) -> None:
    pools("gloo", 4).run(check_ranks, shape, OPTIONS[name], 4)


def test_recomputed(pools: Pools) -> None:
    pools("gloo", 2).run(check_ranks, (1, 2, 1), {**OPTIONS["all"], "recompute": True}, 4)


def check_refusals(comm: Communicator) -> None:
    with pytest.raises(UsageError, match=r"has no uni.nn.MoE, and no experts of Hugging Face"):
        expert_parallelize(nn.Linear(2, 2), Mesh((1, 2, 1), AXES))
    with pytest.raises(UsageError, match=r"use ep=1 or less"):
        expert_parallelize(MoE(2, 2, 1, top_k=1), Mesh((1, 2, 1), AXES))
    with pytest.raises(UsageError, match=r"blocks.0.moe has a capacity"):
        expert_parallelize(Model(capacity_factor=1.0), Mesh((1, 1, 2), AXES))


def test_refusals(pools: Pools) -> None:
    pools("gloo", 2).run(check_refusals)


# ---- experts of Hugging Face ---------------------------------------------------------------------------------------


def stacked() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=WIDTH, intermediate_size=12, num_local_experts=5, experts_implementation="eager")
    experts = MixtralExperts(config).double()
    torch.manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def compare_stacked(comm: Communicator, most: int) -> None:
    """All tokens visit experts below `most`: some ranks may be visited by none."""
    mesh = Mesh((1, comm.size, 1), AXES)
    torch.manual_seed(2)
    x = torch.randn(comm.size, 4, WIDTH, dtype=torch.float64)
    index = torch.randint(most, (comm.size, 4, 2))
    weight = torch.rand(comm.size, 4, 2, dtype=torch.float64)
    plain, full = stacked(), x.clone().requires_grad_()
    expected = plain(full.flatten(0, 1), index.flatten(0, 1), weight.flatten(0, 1)).view_as(x)
    expected.square().sum().backward()
    experts, mine = stacked(), x[comm.rank].clone().requires_grad_()
    expert_parallelize(experts, mesh)
    out = experts(mine, index[comm.rank], weight[comm.rank])
    out.square().sum().backward()
    torch.testing.assert_close(out, expected[comm.rank])
    assert full.grad is not None
    torch.testing.assert_close(mine.grad, full.grad[comm.rank])
    for (name, parameter), (_, other) in zip(experts.named_parameters(), plain.named_parameters(), strict=True):
        assert parameter.grad is not None, name
        assert parameter.shape[0] < other.shape[0]
        torch.testing.assert_close(full_tensor_of(parameter.grad, layout_of(parameter), mesh), other.grad)


@pytest.mark.parametrize("most", [5, 1])
def test_experts_of_hugging_face_over_ranks(pools: Pools, most: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pools("gloo", 2).run(compare_stacked, most)
