"""Compiled regions: the result of one device under every strategy, one graph for alike blocks, and eager where a region
cannot be compiled.

Most plans are compiled by AOTAutograd without inductor, which takes seconds instead of minutes: graphs, custom ops and
random numbers are the same.
"""

from __future__ import annotations

import copy
import gc
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from examples.gpt import GPT, Config
from tests.parallel.models import llama
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.compile import eager_op, regions
from unisono.verify.verify import verify_here

BACKEND = "UNISONO_COMPILE_BACKEND"
PLANS = [
    "dp=2,zero=3",
    "tp=2,sp",
    "cp=2,recompute=full",
    "dp=2,zero=1,recompute=full",
    "tp=2,recompute=full,microbatches=2",
    "tp=2,sp,recompute=selective",
    "cp=2,context=ulysses,zero=2",
    "pp=2,microbatches=4,schedule=zb1p",
    "pp=2,chunks=2,microbatches=2,schedule=interleaved,recompute=full",
]
LLAMA_PLANS = ["tp=2,sp", "cp=2,zero=3", "pp=2,microbatches=2"]


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(BACKEND, "aot_eager")
    yield
    torch._dynamo.reset()


def _token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _tokens(seed: int, samples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (samples, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _gpt(dropout: float = 0.1) -> GPT:
    return GPT(Config(64, 16, 32, 4, 4, dropout=dropout))


def _gpt_task() -> uni.Task:
    return uni.Task(_gpt, _token_loss, _adam, _tokens)


def _llama_task() -> uni.Task:
    def batch(seed: int) -> tuple[Any, torch.Tensor]:
        inputs, targets = _tokens(seed)
        return {"input_ids": inputs % 17}, targets % 17

    return uni.Task(llama, _token_loss, _adam, batch)


def _verified(comm: Communicator, task: Callable[[], uni.Task], plan: str) -> tuple[bool, str, str]:
    os.environ[BACKEND] = "aot_eager"
    torch.set_num_threads(1)
    verdict = verify_here(comm, task(), uni.Plan.parse(plan), steps=2)
    return verdict.equivalent, verdict.compilation, str(verdict)


def _is_all_compiled(compilation: str) -> bool:
    found = re.match(r"compiled (\d+) of (\d+) regions", compilation)
    return found is not None and found[1] == found[2] and "eagerly" not in compilation


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_changes_nothing(pools: Callable[[str, int], RankPool], plan: str) -> None:
    for is_equivalent, compilation, verdict in pools("gloo", 2).run(_verified, _gpt_task, f"{plan},compile"):
        assert is_equivalent, verdict
        assert _is_all_compiled(compilation), compilation


@pytest.mark.thorough
@pytest.mark.parametrize("plan", LLAMA_PLANS)
def test_a_llama_of_hugging_face(pools: Callable[[str, int], RankPool], plan: str) -> None:
    for is_equivalent, compilation, verdict in pools("gloo", 2).run(_verified, _llama_task, f"{plan},compile"):
        assert is_equivalent, verdict
        assert _is_all_compiled(compilation), compilation


def _trained(
    plan: str, model: Callable[[], nn.Module] = _gpt, samples: tuple[int, ...] = (6, 6, 6), **options: Any
) -> tuple[list[float], uni.Trainer]:
    torch.manual_seed(0)
    options = {"check": "off", "dtype": torch.float64, **options}
    trainer = uni.parallelize(model(), plan, loss=_token_loss, optimizer=_adam, **options)
    return [trainer.step(_tokens(seed, count)).item() for seed, count in enumerate(samples)], trainer


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("plan", ["compile,recompute=selective", "compile,microbatches=2,recompute=full"])
def test_inductor_gives_the_losses_of_one_device_with_its_dropout_masks(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.delenv(BACKEND)
    expected, _ = _trained("dp=1")
    losses, trainer = _trained(plan)
    assert trainer.compilation is not None
    assert not trainer.compilation.failures
    assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough
def test_alike_blocks_share_a_graph_and_batches_of_any_size_take_two() -> None:
    losses, trainer = _trained("compile", samples=(6, 6, 5, 4, 3, 6))
    expected, _ = _trained("dp=1", samples=(6, 6, 5, 4, 3, 6))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trainer.compilation is not None
    assert len(trainer.compilation.regions) == 5  # four blocks and a norm
    assert not trainer.compilation.failures
    assert trainer.compilation.graphs <= 2 * 3  # two for all blocks, for the norm and for the loss


def test_two_models_in_one_process_do_not_share_graphs() -> None:
    """Guards of one would pass for the other."""
    trainers = []
    for seed in (1, 2):
        torch.manual_seed(0)
        trainers.append(
            uni.parallelize(
                _gpt(), "compile", loss=_token_loss, optimizer=_adam, seed=seed, check="off", dtype=torch.float64
            )
        )
    losses = [[trainer.step(_tokens(step)).item() for trainer in trainers] for step in range(3)]
    for number, seed in enumerate((1, 2)):
        expected, _ = _trained("dp=1", seed=seed)
        assert [each[number] for each in losses] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how", ["model", "blocks", "module.compile()"])
def test_a_compiled_model_is_recognised(how: str) -> None:
    def model() -> nn.Module:
        made = _gpt()
        if how == "model":
            return torch.compile(made)  # type: ignore[return-value]
        for number, block in enumerate(made.blocks):
            if how == "blocks":
                made.blocks[number] = torch.compile(block)  # type: ignore[assignment]
            else:
                block.compile()
        return made

    losses, trainer = _trained("dp=1", model)
    expected, plain = _trained("dp=1")
    assert trainer.plan.compile
    assert _is_all_compiled(str(trainer.compilation))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())


class _Noisy(nn.Module):
    """A block that no graph can have: it draws in place, or looks at a value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "normal_":
            return y + torch.empty_like(y).normal_() * 0.1
        if self.kind == "rand":
            return y + torch.rand(y.shape, dtype=y.dtype) * 0.1
        return y * 2 if float(y.detach().sum()) > 0 else y


@pytest.mark.parametrize("kind", ["normal_", "value", "rand"])
def test_a_block_that_cannot_be_compiled_runs_eagerly_with_one_warning(kind: str) -> None:
    def trained(plan: str) -> tuple[list[float], uni.Trainer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Noisy(kind) for _ in range(3)))
        trainer = uni.parallelize(model, plan, loss=F.mse_loss, optimizer=_adam, check="off", dtype=torch.float64)
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return [trainer.step((x, x)).item() for _ in range(3)], trainer

    expected, _ = trained("dp=1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, trainer = trained("compile")
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trainer.compilation is not None
    shown = [str(each.message) for each in caught if "runs eagerly" in str(each.message)]
    if kind == "rand":
        assert not trainer.compilation.failures
    else:
        assert len(trainer.compilation.failures) == 3
        assert len(shown) == 1
        assert kind == "value" or "normal_" in shown[0]


class _Choosing(nn.Module):
    """Looks at values, as experts do to learn which samples are theirs: no graph can have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.detach()[:, 0] > 0).tolist()
        return torch.stack([self.layers[int(each)](sample) for each, sample in zip(chosen, x, strict=True)])


class _BlockWithAChoice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.choose = nn.LayerNorm(8), _Choosing()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.choose(self.norm(x))
        return x + self.mlp(x)


def _trained_with_choices(comm: Communicator, plan: str) -> tuple[list[float], int, str, list[str]]:
    """The losses, how many calls of the last step ran compiled, what is reported, and the warnings."""
    os.environ[BACKEND] = "aot_eager"
    torch.manual_seed(0)
    model = nn.Sequential(*(_BlockWithAChoice() for _ in range(3)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = uni.parallelize(model, plan, loss=F.mse_loss, optimizer=_adam, check="off", dtype=torch.float64)
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        losses = [trainer.step((x, x)).item() for _ in range(3)]
        calls = 0
        own = regions.Runners.__call__

        def counting(self: regions.Runners, modes: Any) -> Callable[..., Any]:
            nonlocal calls
            calls += 1
            return own(self, modes)

        regions.Runners.__call__ = counting  # type: ignore[method-assign]
        try:
            losses.append(trainer.step((x, x)).item())
        finally:
            regions.Runners.__call__ = own  # type: ignore[method-assign]
    shown = [str(each.message) for each in caught if "compiled" in str(each.message)]
    return losses, calls, str(trainer.compilation or ""), shown


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "dp=2,zero=3,recompute=full"])
def test_a_block_that_cannot_be_one_graph_is_compiled_by_its_modules(
    pools: Callable[[str, int], RankPool], plan: str
) -> None:
    """Under ZeRO 3, too, which watches what a first step looks at: from the second on, it knows."""
    pool = pools("gloo", 2)
    expected = [losses for losses, *_ in pool.run(_trained_with_choices, plan)]
    for losses, calls, report, shown in pool.run(_trained_with_choices, f"{plan},compile"):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        assert calls >= 3 * 2 + 1, report  # of each block the norm and the mlp; the loss
        assert report.startswith("compiled 6 of 9 regions"), report
        assert "0.choose runs eagerly" in report
        assert len(shown) == 1
        assert "0 cannot be compiled as one graph, and its modules are compiled one by one" in shown[0]


def test_graphs_of_eager_calls_are_freed_with_their_forward() -> None:
    _, trainer = _trained("compile")
    gc.collect()
    assert not eager_op._kept
    trainer.loss.trust()
    outputs = trainer.model(_tokens(7)[0])
    assert eager_op._kept
    del outputs
    gc.collect()
    assert not eager_op._kept


def test_without_a_compiler_a_plan_with_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler, .* install g\+\+, or leave compile out of the plan"):
        _trained("compile")


def test_an_engine_compiles_also_a_plan_that_it_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = _tokens(0)
    engine = uni.Engine(_gpt(), _token_loss, _adam, plan="auto", compile=True, check="off")
    history = engine.fit(torch.utils.data.TensorDataset(inputs, targets), epochs=1, batch_size=3)
    assert engine.plan.compile
    assert "compiled 5 of 5 regions" in capsys.readouterr().out
    assert len(history.losses) == 2


def test_compile_is_a_word_of_plans() -> None:
    assert str(uni.Plan.parse("dp=2,zero=3,compile")) == "dp=2,zero=3,compile"
    with pytest.raises(UsageError, match="compile=1; expected True or False"):
        uni.Plan(compile=1)  # type: ignore[arg-type]


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def test_dropouts_that_functions_of_torch_call_are_those_of_one_device() -> None:
    """F.multi_head_attention_forward is one call in Dynamo's graph, and calls attention and dropout itself."""
    losses = []
    for plan in ("dp=1", "compile"):
        torch.manual_seed(0)
        trainer = uni.parallelize(
            _Encoder(), plan, loss=F.cross_entropy, optimizer=_adam, check="off", dtype=torch.float64
        )
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(6, 7, 16, dtype=torch.float64, generator=generator)
        y = torch.randint(5, (6,), generator=generator)
        losses.append([trainer.step((x, y)).item() for _ in range(3)])
    assert trainer.compilation is not None
    assert not trainer.compilation.failures
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    # Inductor writes these into comments of the code that it generates for GPUs: a second line would be code.
    assert eager_op._calls
    assert not any("\n" in key for key in eager_op._calls)


class _Dropped(nn.Module):
    def __init__(self, drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    F.dropout(x, 0.3, True, True)
    return x


@torch.compile(backend="aot_eager")
def _compiled_by_the_user(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(1.5 * x, 0.3, True)


def _two_calls(x: torch.Tensor) -> torch.Tensor:
    return x * torch.randint(3, (4, 8)) + torch.randint(3, 4, (8,))


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def _of_blocks(*drops: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*map(_Dropped, drops))


def _hooked(trainer: uni.Trainer, step: int) -> None:
    if step == 1:
        trainer.model[1].linear.register_forward_hook(lambda module, args, output: _scaled(output))  # type: ignore[index, union-attr]


def _unchanged(trainer: uni.Trainer, step: int) -> None:
    pass


@pytest.mark.parametrize(
    ("model", "before"),
    [
        pytest.param(_of_blocks(*[nn.Dropout(0.3)] * 3), _unchanged, id="one dropout for all blocks"),
        pytest.param(_of_blocks(*map(nn.Dropout, (0.1, 0.2, 0.3))), _unchanged, id="several rates"),
        pytest.param(_of_blocks(_in_place, _in_place), _unchanged, id="in place"),
        pytest.param(_of_blocks(_two_calls, _two_calls), _unchanged, id="calls of the same numbers"),
        pytest.param(_of_blocks(_compiled_by_the_user), _unchanged, id="in a function that the user has compiled"),
        pytest.param(_of_blocks(nn.Tanh(), nn.Tanh()), _hooked, id="a hook that comes later"),
    ],
)
def test_what_one_graph_must_not_mean_for_all(
    model: Callable[[], nn.Module], before: Callable[[uni.Trainer, int], None]
) -> None:
    losses: dict[str, list[float]] = {"dp=1": [], "compile": []}
    for plan, found in losses.items():
        torch.manual_seed(0)
        trainer = uni.parallelize(
            copy.deepcopy(model()), plan, loss=F.mse_loss, optimizer=_adam, check="off", dtype=torch.float64
        )
        for step in range(3):
            before(trainer, step)
            x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            found.append(trainer.step((x, x)).item())
    assert _is_all_compiled(str(trainer.compilation))
    assert losses["compile"] == pytest.approx(losses["dp=1"], rel=1e-12)


def test_hooks_that_copy_saved_tensors_are_refused() -> None:
    trainer = uni.parallelize(
        _of_blocks(nn.Dropout(0.3))(), "compile", loss=F.mse_loss, optimizer=_adam, check="off", dtype=torch.float64
    )
    x = torch.randn(4, 8, dtype=torch.float64)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
    with hooks, pytest.raises(UsageError, match=r"saved_tensors_hooks .* around a compiled region have copied"):
        trainer.step((x, x))
