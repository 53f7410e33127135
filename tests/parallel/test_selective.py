"""recompute=selective: the same gradients bit for bit, a third less activations, no module or collective run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.parallel.live import Allocated
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.recomputation.recompute import recompute
from unisono.plan.cost.memory import saved_by
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.profile.model_profile import Setting
from unisono.planner.planner import Planner
from unisono.torch_compat import TorchDispatchMode
from unisono.verify.verify import verify_here

SAMPLES, LENGTH, LAYERS = 2, 32, 3
TOKENS = torch.randint(64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def _llama(dtype: torch.dtype = torch.float32, key_value_heads: int = 4) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=64,
        num_key_value_heads=key_value_heads, max_position_embeddings=64, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def _loss(model: nn.Module) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=next(model.parameters()).dtype == torch.float32):
        logits = model(TOKENS).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), TOKENS[:, 1:].flatten())


def _kept(model: nn.Module) -> int:
    """Bytes between forward and backward."""
    with Allocated() as allocated:
        loss = _loss(model)
    kept = allocated.alive
    loss.backward()
    del loss
    assert allocated.alive == 0
    return kept


@pytest.mark.parametrize("key_value_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_llama_keeps_less_than_70_percent(dtype: torch.dtype, key_value_heads: int) -> None:
    plain, model = _llama(dtype, key_value_heads), recompute(_llama(dtype, key_value_heads), "selective")
    assert _kept(model) <= 0.7 * _kept(plain)
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name  # type: ignore[arg-type]


def test_casts_of_autocast_are_kept_once() -> None:
    """Layers that share an input cast it one by one: queries, keys and values, and the two of the MLP."""
    plain, model = _llama(), recompute(_llama(), "selective")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        kept = [_kept(each) for each in (model, model, plain, plain)]
    hidden = SAMPLES * LENGTH * 64 * 2  # bytes of a residual stream in bfloat16
    assert kept[0] == kept[1]
    assert kept[2] - kept[1] >= LAYERS * 9 * hidden  # three casts; the normalised values, of two; the MLP, of 5.5
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name  # type: ignore[arg-type]


def test_later_steps_keep_as_little() -> None:
    """They note only what the first has found worth it."""
    plain, model = _llama(torch.bfloat16), recompute(_llama(torch.bfloat16), "selective")
    kept = [_kept(model) for _ in range(3)]
    assert kept[1] == kept[2] <= kept[0] <= 0.7 * _kept(plain)
    for _ in range(2):
        _loss(plain).backward()
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name  # type: ignore[arg-type]


def test_forwards_without_a_backward_leave_nothing() -> None:
    """As in a loop that validates without no_grad. The second forward is the first that knows the ops."""
    model = recompute(_llama(), "selective")
    _loss(model).backward()
    with Allocated() as allocated:
        _loss(model)
    assert allocated.alive == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_model_knows_what_is_kept(dtype: torch.dtype) -> None:
    task = uni.Task(
        lambda: _llama(dtype),
        lambda out, targets: F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten()),
        lambda parameters: torch.optim.AdamW(parameters),
        lambda step: (TOKENS, TOKENS),
    )
    profile = Planner(task, read_hardware("h100")).profile
    none, selective = (
        sum(saved_by(profile, block, Setting(SAMPLES, 1, 1, 1, False, way)) for block in profile.blocks)
        for way in ("none", "selective")
    )
    measured = _kept(_llama(dtype)) - _kept(recompute(_llama(dtype), "selective"))
    assert none - selective == pytest.approx(measured, rel=0.02)


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_products_and_attention_run_once() -> None:
    counted = []
    for way in ("none", "selective", "full"):
        model = recompute(_llama(), way)
        with _Ops() as ops:
            _loss(model).backward()
        counted.append(ops.counted)
    none, selective, full = counted
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    for op in ("aten.mm", attention, "aten.rsqrt", "aten.cat"):
        assert none[op] == selective[op]
    assert full[attention] == 2 * none[attention]
    assert selective["aten.silu"] == 2 * none["aten.silu"] == 2 * LAYERS


class Changing(nn.Module):
    """Changes its tensors in place, as models do."""

    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.later = later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.later:
            x = x * 1.0  # of this block alone
            hidden = x.double().pow(2).mul(0.1).float()
            out = hidden + self.down(F.relu_(self.up(self.norm(hidden))))
            x += 1.0
            return out
        hidden = F.relu(self.up(self.norm(x)), inplace=True)
        hidden = hidden * 2.0
        hidden += 1.0
        hidden = F.gelu(hidden).add_(torch.exp(-hidden))
        x = x.clone()
        x += self.down(hidden)
        return x


@pytest.mark.parametrize("later", [False, True])
def test_tensors_that_change_in_place(later: bool) -> None:
    gradients = []
    x = torch.randn(3, 8)
    for way in ("none", "selective"):
        torch.manual_seed(0)
        model = recompute(nn.Sequential(*(Changing(later) for _ in range(3))), way)
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))  # type: ignore[arg-type]


class Float32Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.linear((wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype))


def test_a_change_after_the_block_is_an_error() -> None:
    model = recompute(nn.Sequential(Float32Norm(), Float32Norm()), "selective")
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True) * 1.0
    out = model[0](x)
    x.add_(1.0)
    with pytest.raises(UsageError, match="changed in place after the block"):
        out.sum().backward()


def test_a_graph_may_be_run_twice_and_differentiated() -> None:
    found = []
    for way in ("none", "selective"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)]
        model = recompute(nn.Sequential(*blocks), way)
        x = torch.randn(3, 8, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_compiled_blocks_stay_compiled() -> None:
    """What the compiler saves is its own choice, and kept."""
    found = []
    x = torch.randn(3, 8)
    for way in ("none", "selective"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)]
        graphs: list[Any] = []

        def compiler(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        for block in blocks:
            block.forward = torch.compile(block.forward, backend=compiler)  # type: ignore[method-assign]
        model = recompute(nn.Sequential(*blocks), way)
        model(x).square().sum().backward()
        assert len(graphs) == 2
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))  # type: ignore[arg-type]


def test_hooks_around_the_model_get_what_is_kept() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    plain, model = _llama(), recompute(_llama(), "selective")
    _loss(plain).backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.clone()):
        _loss(model).backward()
    kept = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in packed}
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    activations = sum(size for storage, size in kept.items() if storage not in parameters)
    assert activations <= 0.7 * _kept(_llama())
    for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name  # type: ignore[arg-type]


def test_a_model_without_blocks_is_one_region() -> None:
    torch.manual_seed(0)
    model = recompute(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.SiLU(), nn.Linear(8, 2)), "selective"
    )
    x = torch.randn(5, 8)
    with _Ops() as ops:
        model(x).square().sum().backward()
    assert ops.counted["aten.silu"] == 2


@pytest.mark.thorough
def test_collectives_are_not_issued_twice(pools: Callable[[str, int], RankPool]) -> None:
    none, selective, full = pools("gloo", 2).run(_traffic)[0]
    assert none == selective
    assert sum(full.values()) > sum(none.values())


class Averaging(nn.Module):
    """Scales by a sum over ranks that no autograd function makes."""

    def __init__(self, comm: uni.Communicator, how: str) -> None:
        super().__init__()
        self.linear, self.comm, self.how = nn.Linear(8, 8), comm, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach() * 2.0
        if self.how == "unisono":
            self.comm.all_reduce(scale)
        else:
            torch.distributed.all_reduce(scale)
        return self.linear(x) * scale


def test_sums_over_ranks_are_not_taken_for_what_they_were(pools: Callable[[str, int], RankPool]) -> None:
    for same in pools("gloo", 2).run(_averaged):
        assert same == [True, True]


def _averaged(comm: uni.Communicator) -> list[bool]:
    same = []
    for how in ("unisono", "torch"):
        gradients = []
        for way in ("none", "selective"):
            torch.manual_seed(0)
            model = recompute(nn.Sequential(Averaging(comm, how), Averaging(comm, how)), way)
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(comm.rank))).sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        same.append(all(torch.equal(one, two) for one, two in zip(*gradients, strict=True)))
    return same


def _traffic(comm: uni.Communicator) -> list[dict[str, int]]:
    from tests.equivalence import tasks

    found = []
    for way in ("none", "selective", "full"):
        task = tasks.gpt
        trainer = uni.parallelize(
            task.model, f"tp=2,sp,recompute={way}", loss=task.loss, optimizer=task.optimizer, rules=task.rules,
            example=task.batch(0), check="off",
        )  # fmt: skip
        trainer.step(task.batch(0))
        with traffic.counted() as seen:
            trainer.step(task.batch(1))
        found.append(dict(seen.calls))
    return found


def _without_blocks(comm: Communicator) -> bool:
    """Parts of different classes, which ZeRO 3 gathers and frees one by one."""

    def model() -> nn.Module:
        norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
        return nn.Sequential(norm, nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)

    task = uni.Task(model, nn.functional.cross_entropy, lambda parameters: torch.optim.Adam(parameters), batch)
    return verify_here(comm, task, uni.Plan(dp=2, zero=3, recompute="selective"), 2).equivalent


def test_parameters_that_zero_3_frees_are_not_read_again(pools: Callable[[str, int], RankPool]) -> None:
    assert all(pools("gloo", 2).run(_without_blocks))


class _Written(nn.Module):
    """Changes a tensor after it was saved: the backward sees the changed one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x)) * 2.0
        z = y.square()
        y.data.clamp_(max=0.5)
        return z + F.silu(y)


def test_changes_through_data_are_seen() -> None:
    gradients = []
    for policy in ("none", "selective"):
        torch.manual_seed(0)
        model = nn.Sequential(_Written())
        if policy == "selective":
            recompute(model, "selective")
        model(torch.randn(64, 16)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert expected is not None
        assert found is not None
        assert torch.equal(expected, found)


class _Varying(nn.Module):
    """Runs other ops in every step, some of which have the same names and shapes as those of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.steps = nn.Linear(16, 64), nn.Linear(64, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = self.up(x)
        first, second = (F.silu(hidden), hidden.exp()) if self.steps % 4 < 2 else (hidden.exp(), F.silu(hidden))
        if self.steps == 3:
            hidden.data.mul_(0.5)
        gated = first * (second if self.steps % 2 else first) + (hidden if self.steps < 5 else second).sin()
        if self.steps in (4, 6):
            gated = gated.mul_(2.0) * hidden.cos()
        return x + self.down(gated * hidden.detach().tanh().requires_grad_(self.steps == 7))


def test_blocks_that_run_other_ops_in_every_step() -> None:
    made = []
    for policy in ("none", "selective"):
        torch.manual_seed(0)
        model = recompute(nn.Sequential(_Varying(), _Varying()), policy)
        gradients = []
        for _ in range(9):
            model.zero_grad()
            model(torch.randn(8, 16)).sum().backward()
            gradients += [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        made.append(gradients)
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))
