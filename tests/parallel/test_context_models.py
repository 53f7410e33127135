"""Whole models under context parallelism against the plain model on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, Config
from tests.parallel import context_models as models
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.state import RandomState
from unisono.parallel.context.context import Context, context_parallelize

Pools = Callable[[str, int], RankPool]

VOCABULARY = models.VOCABULARY
IGNORED = -100


def gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(Config(vocabulary=VOCABULARY, context=32, width=16, heads=4, layers=2, dropout=dropout))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt with dropout": lambda: gpt(0.2),
    "rotary": models.Rotary,
    "masked": lambda: models.Rotary(masked=True),
    "recomputed": lambda: models.Rotary(recompute=True),
    "reshaping": models.Reshaping,
    "torch's causal encoder": lambda: models.Encoder(causal=True),
    "torch's encoder with padding": lambda: models.Encoder(causal=False),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return BUILDERS[name]().double()


def batch_of(length: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (3, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORED
    return tokens[:, :-1], targets


def trained(
    model: nn.Module, length: int, context: Context | None, state: RandomState
) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Losses, the gradients of the first step, and the parameters after two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for step in range(2):
        inputs, targets = batch_of(length, step)
        counted = (targets != IGNORED).sum()
        state.step = step
        with state:
            outputs = model(inputs)
            mine = targets if context is None else context.shard_targets(targets)
            summed = F.cross_entropy(outputs.flatten(0, 1), mine.flatten(), ignore_index=IGNORED, reduction="sum")
            loss = summed / counted
            optimizer.zero_grad()
            loss.backward()
        total = loss.detach().clone()
        if context is not None:
            context.comm.all_reduce(total)
            for parameter in model.parameters():
                context.comm.all_reduce(parameter.grad)
        if step == 0:
            gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(total))
    return losses, gradients, [parameter.detach() for parameter in model.parameters()]


def random_state(model: nn.Module) -> RandomState:
    state = RandomState(5)
    state.name_modules(model)
    return state


def plainly(reference: nn.Module, length: int) -> tuple[Any, torch.Tensor]:
    """What the plain model comes to, and what it then makes of the first batch."""
    came_to = trained(reference, length, None, random_state(reference))
    return came_to, evaluated(reference, length)


@torch.no_grad()
def evaluated(model: nn.Module, length: int) -> torch.Tensor:
    return model.eval()(batch_of(length, 0)[0])


def check_model(comm: Communicator, name: str, kind: str, length: int) -> None:
    reference = built(name)
    expected, outputs = comm.broadcast_object(plainly(reference, length) if comm.rank == 0 else None)
    model = built(name)
    state = random_state(model)
    context = context_parallelize(model, Mesh((comm.size,), ("cp",)), kind)
    found = trained(model, length, context, state)
    names = [parameter for parameter, _ in reference.named_parameters()]
    assert [parameter for parameter, _ in model.named_parameters()] == names
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
    for parameter, mine, theirs in zip(names * 2, found[1] + found[2], expected[1] + expected[2], strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, parameter=parameter: f"{parameter}: {text}"
        )
    torch.testing.assert_close(context.join(evaluated(model, length), length), outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_model(pools: Pools, kind: str, name: str) -> None:
    if name in ("gpt", "masked"):
        pools("gloo", 2).run(check_model, name, kind, 16)
    pools("gloo", 4).run(check_model, name, kind, 13)


def check_full_sequences(comm: Communicator, kind: str, rows: int) -> None:
    """A class a sentence: tokens are gathered after the blocks, and ranks take samples to the loss."""
    torch.manual_seed(3)
    reference = models.Pooled().double()
    torch.manual_seed(3)
    model = models.Pooled().double()
    context = context_parallelize(model, Mesh((comm.size,), ("cp",)), kind)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (rows, 11), generator=generator)
    targets = torch.randint(VOCABULARY, (rows,), generator=generator)
    F.cross_entropy(reference(tokens), targets).backward()
    context.expect(tokens, targets)
    assert context.is_full
    assert context.dims == (0,)
    outputs, mine = model(tokens), context.shard_targets(targets)
    assert len(outputs) == len(mine) == context.num_samples(rows)
    (F.cross_entropy(outputs, mine, reduction="sum") / rows).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        context.comm.all_reduce(parameter.grad)
        torch.testing.assert_close(
            parameter.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_targets_of_full_sequences(pools: Pools, kind: str) -> None:
    pools("gloo", 2).run(check_full_sequences, kind, 5)
    pools("gloo", 4).run(check_full_sequences, kind, 3)  # fewer samples than ranks


def test_one_rank(pools: Pools) -> None:
    pools("gloo", 1).run(check_model, "gpt with dropout", "ring", 9)


def check_order_of_hooks(comm: Communicator) -> None:
    model = gpt()
    seen: list[int] = []
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda block, args: seen.append(args[0].shape[1]))
    context_parallelize(model, Mesh((2,), ("cp",)))
    model(torch.ones(2, 8, dtype=torch.long))
    assert seen == [4, 4]


def test_other_strategies_see_the_split_sequence(pools: Pools) -> None:
    pools("gloo", 2).run(check_order_of_hooks)


# ---- refusals ----------------------------------------------------------------------------------------------------


class WithMemory(nn.Module):
    """Blocks that are given another sequence, which may be as long as a rank's share of the first. prefix: they attend
    to their own tokens as well, in one call."""

    class Block(nn.Module):
        def __init__(self, prefix: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.prefix = prefix

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            memory = torch.cat([memory, x], 1) if self.prefix else memory
            return self.linear(x) + F.scaled_dot_product_attention(x[:, None], memory[:, None], memory[:, None])[:, 0]

    def __init__(self, share: int, prefix: bool = False) -> None:
        super().__init__()
        self.share = share
        self.blocks = nn.ModuleList(self.Block(prefix) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x[:, : self.share]
        for block in self.blocks:
            x = block(x, memory)
        return x


def check_refusals(comm: Communicator) -> None:
    mesh = Mesh((2,), ("cp",))
    tokens = torch.ones(2, 8, dtype=torch.long)
    hidden = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    refused: list[tuple[nn.Module, Any, str]] = [
        (models.Pooled(), tokens, "as the targets are of tokens"),
        (models.Counting(), tokens, "expected layers that work token by token"),
        (models.HandWritten(), tokens, r"block blocks.0 did not call F.scaled_dot_product_attention"),
        (WithMemory(4), hidden, "could not be distinguished"),
        (WithMemory(3, prefix=True), hidden, "keys that differ between ranks"),
    ]
    for model, inputs, words in refused:
        model.double()
        context_parallelize(model, mesh)
        with pytest.raises(UsageError, match=words):
            model(inputs if inputs.dtype == torch.long else inputs.double())
    model = gpt(0.1).double()
    context = context_parallelize(model, mesh)
    with pytest.raises(UsageError, match="run the model within a RandomState"):
        model(tokens)
    with pytest.raises(UsageError, match="one a token"):
        context.shard_targets(torch.ones(4))
    with pytest.raises(UsageError, match="expected one of ring, ulysses"):
        context_parallelize(gpt(), mesh, "star")
    with pytest.raises(UsageError, match=r"no list of repeated blocks.*must take \(batch, sequence, \.\.\.\)"):
        context_parallelize(nn.Linear(2, 2), mesh)
    original = F.scaled_dot_product_attention
    with contextlib.suppress(UsageError):
        model(tokens)
    assert F.scaled_dot_product_attention is original


def test_refusals(pools: Pools) -> None:
    pools("gloo", 2).run(check_refusals)
