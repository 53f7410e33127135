"""ZeRO in half precision: weights that autocast rounds at every use are gathered in halves, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.random.draw import Draw
from unisono.parallel.apply import parallelize
from unisono.parallel.master_weights import round_stochastically
from unisono.parallel.precision import Precision, rounded_weights
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.inventory import shapes_here
from unisono.verify import self_check

Pools = Callable[[str, int], RankPool]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 16, vocabulary: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def penalised(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert weight_of is not None
    return token_loss(logits, targets) + 1e-3 * weight_of().square().sum()


weight_of: Callable[[], torch.Tensor] | None = None


def batch(step: int, vocabulary: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocabulary, (8, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trainer_of(plan: str, precision: str | Precision = "bf16", width: int = 16, **options: Any) -> Trainer:
    given: dict[str, Any] = {"loss": token_loss, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)} | options
    return parallelize(lambda: Net(width), plan, precision=precision, seed=3, **given)


def sent(comm: Communicator, plan: str, precision: str) -> tuple[dict[str, float], int, int]:
    """Bytes of messages in a second step, for all ranks together; numbers of matrices' elements and of the others'."""
    trainer = trainer_of(plan, precision)
    matrices = set(rounded_weights(Net()))
    sizes = {name: parameter.numel() for name, parameter in Net().named_parameters()}
    trainer.step(batch(0))
    with traffic.counted() as seen:
        trainer.step(batch(1))
    gathered = seen.payload["all_gather"] * comm.size
    reduced = seen.payload["reduce_scatter"] + sum(
        each for op, each in seen.payload.items() if op == "all_reduce" and "zero" not in plan
    )
    many = sum(sizes[name] for name in matrices)
    return {"all_gather": gathered, "reduce": reduced}, many, sum(sizes.values()) - many


@pytest.mark.parametrize(("plan", "gathers"), [("dp=2,zero=1", 1), ("dp=2,zero=2", 1), ("dp=2,zero=3", 2)])
def test_two_bytes_a_weight_travel(pools: Pools, plan: str, gathers: int) -> None:
    for found, matrices, others in pools("gloo", 2).run(sent, plan, "bf16"):
        assert found["all_gather"] == gathers * (2 * matrices + 4 * others)
        assert found["reduce"] == 4 * (matrices + others)
    for found, matrices, others in pools("gloo", 2).run(sent, plan, "bf16,gather=fp32,reduce=bf16"):
        assert found["all_gather"] == gathers * 4 * (matrices + others)
        assert found["reduce"] == 2 * (matrices + others)


def losses_of(trainer: Trainer, steps: int = 3) -> list[float]:
    return [float(trainer.step(batch(step))) for step in range(steps)]


def require_equal(found: torch.Tensor, expected: torch.Tensor, where: object) -> None:
    """But for the last bit: torch's fused optimizers round the elements at the end of a shard, which fill no vector of
    the CPU, otherwise than those before them."""
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=1e-7 * float(expected.abs().max()), msg=str(where))


def agree_to_the_last_bit(comm: Communicator, precision: str, width: int, options: str) -> None:
    """On two ranks a sum has one order, so that nothing but an optimizer's rounding may differ."""
    plain = trainer_of("dp=2" + options, precision, width)
    expected = losses_of(plain)
    state = plain.state_dict()
    for stage in (1, 2, 3):
        trainer = trainer_of(f"dp=2,zero={stage}" + options, precision, width)
        assert losses_of(trainer) == pytest.approx(expected, rel=1e-6), stage
        assert trainer.model.blocks[0].up.weight.dtype == Precision.of(precision).dtype  # type: ignore[index, union-attr]
        assert shapes_here(trainer) == shapes_here(plain)  # of a checkpoint, which any plan can load
        found = trainer.state_dict()
        for name, tensor in state["model"].items():
            assert found["model"][name].dtype == torch.float32
            require_equal(found["model"][name], tensor, (stage, name))
        for name, entries in state["optimizer"]["state"].items():
            require_equal(found["optimizer"]["state"][name]["exp_avg"], entries["exp_avg"], (stage, name))
        assert float(trainer.evaluate(batch(9))) == pytest.approx(float(plain.evaluate(batch(9))), rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "width", "options"),
    [("bf16", 16, ""), ("bf16", 7, ""), ("fp16", 16, ""), ("bf16", 16, ",recompute=full")],
)
def test_gathering_halves_changes_nothing(pools: Pools, precision: str, width: int, options: str) -> None:
    pools("gloo", 2).run(agree_to_the_last_bit, precision, width, options)


def one_device(steps: int) -> list[float]:
    """torch alone: autocast, and the full batch."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp2(comm: Communicator, steps: int) -> tuple[list[float], int]:
    """torch's FSDP2 with its own mixed precision: the losses, and the bytes that all ranks gather in the last step."""
    torch.manual_seed(3)
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (comm.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gathered = [], 0
    function = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    plain = getattr(dist, function)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += max(each.nbytes for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        return plain(*args, **kwargs)

    setattr(dist, function, counting)
    try:
        for step in range(steps):
            gathered = 0
            inputs, targets = (each.chunk(comm.size)[comm.rank] for each in batch(step))
            optimizer.zero_grad()
            loss = token_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(comm.all_reduce(loss.detach().clone()) / comm.size))
    finally:
        setattr(dist, function, plain)
    return losses, gathered


def beside_fsdp2(comm: Communicator) -> tuple[list[float], list[float], int, int]:
    theirs, gathered = fsdp2(comm, 3)
    trainer = trainer_of("dp=2,zero=3")
    ours = losses_of(trainer, 2)
    with traffic.counted() as seen:
        ours.append(float(trainer.step(batch(2))))
    return ours, theirs, seen.payload["all_gather"] * comm.size, gathered


def test_beside_autocast_and_fsdp2(pools: Pools) -> None:
    expected = one_device(3)
    for ours, theirs, gathered, gathered_by_fsdp2 in pools("gloo", 2).run(beside_fsdp2):
        assert ours == pytest.approx(expected, rel=1e-3)
        assert ours == pytest.approx(theirs, rel=1e-2)
        # FSDP2 rounds norms, biases and the embedding too.
        vectors = sum(p.numel() for name, p in Net().named_parameters() if name not in rounded_weights(Net()))
        assert gathered == gathered_by_fsdp2 + 2 * 2 * vectors


def proved(comm: Communicator, plan: str, precision: str, dtype: torch.dtype | None) -> str:
    trainer = self_check.parallelize(
        Net,
        plan,
        loss=token_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        precision=precision,
        dtype=dtype,
        example=batch(0),
        check="full",
    )
    trainer.step(batch(0))
    return trainer.proof


@pytest.mark.parametrize(
    ("plan", "precision", "dtype"),
    [
        ("dp=2,zero=1", "bf16", None),
        ("dp=2,zero=3", "bf16", None),
        ("dp=2", "bf16", torch.bfloat16),
        ("dp=2,zero=3", "bf16", torch.bfloat16),
        ("dp=2,zero=1", "bf16,master=none", torch.bfloat16),
    ],
)
def test_a_run_proves_itself(pools: Pools, plan: str, precision: str, dtype: torch.dtype | None) -> None:
    for proof in pools("gloo", 2).run(proved, plan, precision, dtype):
        assert f"plan {plan} proved" in proof


def sums_in_halves(comm: Communicator, plan: str) -> None:
    wide, halves = trainer_of(plan, "bf16"), trainer_of(plan, "bf16,reduce=bf16")
    differ = []
    for trainer in (wide, halves):
        trainer.zero_grad()
        trainer.backward(batch(3))
    for (name, one), (_, other) in zip(wide.optimized(), halves.optimized(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == torch.float32
        assert (one.grad - other.grad).norm() <= 1e-2 * one.grad.norm(), name
        differ.append(not torch.equal(one.grad, other.grad))
    assert any(differ)
    expected = losses_of(wide)
    assert losses_of(halves) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1,microbatches=2", "dp=2,zero=2,microbatches=2", "dp=2,zero=3"])
def test_gradients_are_summed_in_halves_by_choice(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(sums_in_halves, plan)


def test_weights_that_every_use_rounds() -> None:
    assert rounded_weights(Net()) == [
        "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight", "head.weight"
    ]  # fmt: skip
    tied = Net()
    tied.head.weight = tied.tokens.weight
    assert "head.weight" not in rounded_weights(tied)
    assert "tokens.weight" not in rounded_weights(tied)
    attention = nn.MultiheadAttention(8, 2)
    assert rounded_weights(attention) == ["in_proj_weight", "out_proj.weight"]


def reads_a_weight(comm: Communicator, plan: str) -> None:
    global weight_of
    trainer = trainer_of(plan, loss=penalised)
    weight_of = lambda: trainer.model.head.weight  # type: ignore[assignment, union-attr, return-value] # noqa: E731
    with pytest.raises(UsageError, match=r"the loss reads head.weight other than .* ZeRO gathers it in bf16; use"):
        trainer.step(batch(0))
    other = trainer_of(plan, "bf16,gather=fp32", loss=penalised)
    weight_of = lambda: other.model.head.weight  # type: ignore[assignment, union-attr, return-value] # noqa: E731
    other.step(batch(0))


def test_a_weight_that_is_read_in_float32(pools: Pools) -> None:
    pools("gloo", 2).run(reads_a_weight, "dp=2,zero=1")


def test_bad_precisions() -> None:
    assert Precision.of("bf16,reduce=bf16,gather=fp32") == Precision("bf16", gather="fp32", reduce="bf16")
    with pytest.raises(UsageError, match='reduce="bf16" with precision="fp32"'):
        Precision.of("fp32,reduce=bf16")
    with pytest.raises(UsageError, match="reduce='fp16'; expected"):
        Precision.of("bf16,reduce=fp16")
    with pytest.raises(UsageError, match="'gathr'; expected gather=half"):
        Precision.of("bf16,gathr=fp32")
    assert Precision.of("bf16, reduce = bf16") == Precision("bf16", reduce="bf16")
    for given, refusal in (
        ("bf16,least=12", "least=12 has no effect with bf16"),
        ("fp32,gather=fp32", "gather=fp32 has no effect with fp32"),
        ("bf16,reduce=bf16,reduce=fp32", "has reduce twice"),
    ):
        with pytest.raises(UsageError, match=refusal):
            Precision.of(given)
    wrong: list[dict[str, Any]] = [
        {"name": ["bf16"]}, {"name": "fp8", "least": "a"}, {"name": "fp16", "init_scale": -1},
        {"name": "fp16", "growth_interval": 0.5}, {"name": "bf16", "init_scale": 8.0},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(UsageError):
            Precision(**options)


# ---- bfloat16 parameters ---------------------------------------------------------------------------------------------

PLANS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"]


def fine_tuned(plan: str, precision: str, lr: float = 1e-3, **options: Any) -> Trainer:
    """A model that was loaded in bfloat16."""
    given: dict[str, Any] = {"loss": token_loss, "optimizer": lambda p: torch.optim.AdamW(p, lr=lr)} | options
    return parallelize(lambda: Net(), plan, precision=precision, seed=3, dtype=torch.bfloat16, **given)


def with_masters(steps: int, lr: float = 1e-3) -> list[float]:
    """torch alone: a bfloat16 model under autocast, and float32 copies of its parameters."""
    torch.manual_seed(3)
    model = Net().bfloat16()
    copies = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=lr)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_loss(model(inputs), targets)
        loss.backward()
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.grad.float()
        optimizer.step()
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            parameter.data.copy_(copy.detach())
        losses.append(loss.item())
    return losses


def trained_alike(comm: Communicator, precision: str) -> list[list[float]]:
    """Under every plan the same numbers: on two ranks a sum has one order."""
    found, first = [], None
    for plan in PLANS:
        trainer = fine_tuned(plan, precision, lr=3e-2)
        assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
        found.append(losses_of(trainer))
        state = trainer.state_dict()
        first = state if first is None else first
        assert {t.dtype for t in state["model"].values()} == {
            torch.bfloat16 if "master=none" in precision else torch.float32
        }
        for name, tensor in first["model"].items():
            require_equal(state["model"][name], tensor, (plan, name))
        for name, entries in first["optimizer"]["state"].items():
            assert entries.keys() == state["optimizer"]["state"][name].keys()
            for key in entries.keys() - {"step"}:
                require_equal(state["optimizer"]["state"][name][key], entries[key], (plan, name, key))
    return found


@pytest.mark.parametrize("precision", ["bf16", "bf16,master=none", "bf16,master=none,rounding=kahan"])
def test_bfloat16_parameters_under_every_plan(pools: Pools, precision: str) -> None:
    for losses in pools("gloo", 2).run(trained_alike, precision):
        assert all(each == pytest.approx(losses[0], rel=1e-6) for each in losses)
        assert losses[0] == pytest.approx(with_masters(3, lr=3e-2), rel=5e-3)
        assert losses[0] != pytest.approx(with_masters(3, lr=0.0), rel=1.5e-2)


def learned(comm: Communicator, precision: str, plan: str) -> float:
    """The loss on one batch after steps that are far smaller than the last bit of most weights."""
    trainer = fine_tuned(plan, precision, lr=2e-5)
    for _ in range(40):
        trainer.step(batch(0))
    return float(trainer.evaluate(batch(0)))


@pytest.mark.thorough
def test_small_steps_are_not_lost(pools: Pools) -> None:
    pool = pools("gloo", 2)
    nearest = pool.run(learned_in_place)[0]
    masters, stochastic, kahan = (
        pool.run(learned, f"bf16{each}", "dp=2,zero=1")[0]
        for each in ("", ",master=none", ",master=none,rounding=kahan")
    )
    start = with_masters(1)[0]
    assert start - masters > 5 * abs(start - nearest)
    assert kahan == pytest.approx(masters, abs=0.2 * (start - masters))
    assert stochastic == pytest.approx(masters, abs=0.5 * (start - masters))


def learned_in_place(comm: Communicator) -> float:
    """The same in place and rounded to nearest, as torch's optimizers do."""
    trainer = parallelize(
        lambda: Net(), "dp=2", loss=token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-5), seed=3,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for _ in range(40):
        trainer.step(batch(0))
    return float(trainer.evaluate(batch(0)))


def test_stochastic_rounding_has_the_right_mean() -> None:
    words = Draw((1, 2), (40_000,), {}).words(torch.device("cpu"))
    for value in (1.0 + 2.0**-9, -3.0 - 2.0**-10, 1e-3, 0.0):
        rounded = round_stochastically(torch.full((40_000,), value), words)
        assert rounded.float().mean().item() == pytest.approx(value, rel=1e-4)
        assert len(rounded.unique()) <= 2
    assert round_stochastically(torch.tensor([torch.inf]), words[:1]).item() == torch.inf
    assert round_stochastically(torch.tensor([torch.nan]), words[:1]).isnan().all()


def other_plans(comm: Communicator, plan: str, precision: str) -> torch.Tensor:
    """What three steps have added to the parameters."""
    trainer = fine_tuned(
        plan, precision, example=batch(0), clip=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    )
    before = trainer.state_dict()["model"]
    losses_of(trainer)
    after = trainer.state_dict()["model"]
    return torch.cat([(after[name].float() - before[name].float()).flatten() for name in sorted(before)])


@pytest.mark.parametrize("precision", ["bf16", "bf16,master=none"])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2", "pp=2,microbatches=2,zero=1", "tp=2,zero=1"])
def test_bfloat16_parameters_beside_other_strategies(pools: Pools, plan: str, precision: str) -> None:
    expected = pools("gloo", 2).run(other_plans, "dp=2", precision)[0]
    found = pools("gloo", 2).run(other_plans, plan, precision)[0]
    assert expected.norm() > 0.1
    assert (found - expected).norm() < 0.1 * expected.norm(), float((found - expected).norm() / expected.norm())


def state_goes_on(comm: Communicator, precision: str) -> None:
    going_on = fine_tuned("dp=2,zero=3", precision)
    losses_of(going_on, 2)
    other = fine_tuned("dp=2", precision)
    other.load_state_dict(going_on.state_dict())
    assert float(other.step(batch(2))) == float(going_on.step(batch(2)))
    assert float(other.step(batch(3))) == float(going_on.step(batch(3)))


@pytest.mark.parametrize("precision", ["bf16", "bf16,master=none,rounding=kahan"])
def test_state_of_bfloat16_parameters(pools: Pools, precision: str) -> None:
    pools("gloo", 2).run(state_goes_on, precision)


def own_loop(comm: Communicator, plan: str) -> None:
    trainer, reference = fine_tuned(plan, "bf16"), fine_tuned(plan, "bf16")
    for step in range(2):
        inputs, targets = batch(step)
        trainer.optimizer.zero_grad()
        token_loss(trainer.model(inputs), targets).backward()
        trainer.optimizer.step()
        reference.step(batch(step))
    pairs = zip(trainer.optimized(), reference.optimized(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2"])
def test_bfloat16_parameters_in_a_loop_of_ones_own(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(own_loop, plan)


def refused(comm: Communicator) -> None:
    with pytest.raises(UsageError, match=r"tokens.weight is bfloat16, but LBFGS evaluates the model several times"):
        fine_tuned("dp=1", "bf16", optimizer=torch.optim.LBFGS)
    with pytest.raises(UsageError, match="master=None updates bfloat16 parameters, but the model has none"):
        trainer_of("dp=1", "bf16,master=none")
    with pytest.raises(UsageError, match=r"precision=fp16 keeps parameters in float32, but tokens.weight is"):
        fine_tuned("dp=1", "fp16")
    with pytest.raises(UsageError, match="rounding='up'; expected one of stochastic, kahan"):
        Precision.of("bf16,master=none,rounding=up")
    with pytest.raises(UsageError, match="rounding=kahan is of parameters without master weights, but master=fp32"):
        Precision.of("bf16,rounding=kahan")
    with pytest.raises(UsageError, match='master=None with precision="fp16"'):
        Precision.of("fp16,master=none")


def test_what_bfloat16_parameters_cannot_have(pools: Pools) -> None:
    pools("gloo", 1).run(refused)
