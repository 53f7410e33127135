"""A static pipeline of two stages on a GPU, whose forward makes tensors; started by `unisono run -n 2`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

WORDS, WIDTH, LENGTH = 32, 16, 12


class Net(nn.Module):
    """Positions by torch.arange, a mask by torch.ones, a shift by torch.zeros: each on the device of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        seen = torch.ones(LENGTH, LENGTH, dtype=x.dtype, device=x.device).tril()
        x = torch.tanh(self.mix(seen / seen.sum(1, keepdim=True) @ x))
        return self.head(x) + torch.zeros(WORDS, dtype=x.dtype, device=x.device)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double().to(DEVICE)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = net()
    optimizer = adam(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model.state_dict()


def main() -> None:
    comm = uni.init()
    mesh = uni.Mesh((2,), ("pp",))
    model = net()
    uni.mark(model, "head", mesh.at(pp=1))
    program = uni.to_static(model, mesh=mesh, loss=loss, optimizer=adam, example=batch(0), microbatches=2)
    losses = [program(batch(step)).item() for step in range(3)]
    held = {parameter.device.type for parameter in program.trainer.model.parameters() if not parameter.is_meta}
    expected, parameters = alone(3)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    found = {name: value.to(DEVICE) for name, value in program.state_dict()["model"].items()}
    torch.testing.assert_close(found, dict(parameters), rtol=1e-9, atol=1e-11)
    full = net()
    full.load_state_dict(found)
    inputs = batch(9)[0]
    torch.testing.assert_close(program.predict(inputs).to(DEVICE), full(inputs).detach(), rtol=1e-9, atol=1e-11)
    print(f"rank {comm.rank}: parameters on {held}, as one {DEVICE} device")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if __name__ == "__main__":
    main()
