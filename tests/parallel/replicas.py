"""Models, batches and a plain training loop that strategies are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.mesh.mesh import Mesh
from unisono.parallel.loss.loss import GlobalLoss
from unisono.parallel.share import shares

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between tied embeddings, a number, a parameter of one row, one that is used now and then, one never."""

    def __init__(self, words: int = 13, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.row = nn.Parameter(torch.randn(1, width))
        self.rare = nn.Parameter(torch.randn(3, width))
        self.never = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.row
        for block in self.blocks:
            y = block(y)
        is_rare = (x == 0).any(1)
        if bool(is_rare.any()):
            y = y + is_rare[:, None, None] * self.rare.sum(0)
        return self.head(y) * self.temperature


def net(seed: int = 1, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randint(1, 13, (rows, 4), generator=generator)
    if step != 1:
        inputs[0, 0] = 0  # only who has this row uses `rare`; in step 1 nobody
    targets = torch.randint(0, 13, (rows, 4), generator=generator)
    targets[-1, 1:] = -100
    return inputs, targets


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    o = torch.optim
    return {
        "sgd": lambda p: o.SGD(p, lr=0.1),
        "momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": lambda p: o.Adam(p, lr=0.01, amsgrad=True),
        "adamw": lambda p: o.AdamW(p, lr=0.01, weight_decay=0.1),
        "nadam": lambda p: o.NAdam(p, lr=0.01),
        "radam": lambda p: o.RAdam(p, lr=0.01),
        "adamax": lambda p: o.Adamax(p, lr=0.01),
        "rmsprop": lambda p: o.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        "rprop": lambda p: o.Rprop(p, lr=0.01),
        "adagrad": lambda p: o.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        "adadelta": lambda p: o.Adadelta(p, lr=1.0),
        "asgd": lambda p: o.ASGD(p, lr=0.1),
        "adafactor": lambda p: o.Adafactor(p, lr=0.01),
        "muon": lambda p: o.Muon([matrix for matrix in p if matrix.ndim == 2], lr=0.01),
    }


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def plain(make: Callable[[Any], torch.optim.Optimizer], rows: int, steps: int = STEPS) -> dict[str, Any]:
    """What one process gets: losses, the last gradients, parameters, optimizer state by name."""
    model = net()
    optimizer = make(list(model.parameters()))
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, rows)
        model.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        losses.append(float(value.detach()))
        if step < steps - 1:
            optimizer.step()
    gradients = gradients_of(model)
    optimizer.step()
    state = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "parameters": dict(model.named_parameters()), "state": state}


def run_step(
    model: nn.Module,
    mesh: Mesh,
    step: int,
    rows: int,
    microbatches: int,
    hold: Callable[[], Any],
) -> float:
    """Forward and backward of this rank's share, in microbatches; the global loss."""
    comm = mesh.comm("dp")
    mine = shares(batch(step, rows), comm.size)[comm.rank].batch
    parts = [part.batch for part in shares(mine, microbatches)]
    normaliser = GlobalLoss(loss, comm)
    normaliser.prepare([(torch.zeros(*inputs.shape, 13, dtype=torch.float64), targets) for inputs, targets in parts])
    partials = []
    for number, (inputs, targets) in enumerate(parts):
        if number < microbatches - 1:
            with hold():
                partials.append(normaliser(model(inputs), targets))
                partials[-1].backward()
        else:
            partials.append(normaliser(model(inputs), targets))
            partials[-1].backward()
    return float(normaliser.total(partials))


def same(mine: Any, theirs: Any, what: str) -> None:
    """Equal to 1e-9; None only where the other is None."""
    if theirs is None or mine is None:
        assert mine is theirs, f"{what}: {mine} and {theirs}"
        return
    mine, theirs = torch.as_tensor(mine), torch.as_tensor(theirs)
    assert mine.shape == theirs.shape, f"{what}: {mine.shape} and {theirs.shape}"
    torch.testing.assert_close(
        mine.double(), theirs.double(), rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )
