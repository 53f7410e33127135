"""The document's SimpleModel and its data, and what one process makes of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono as uni

EPOCHS, BATCH = 4, 20


class SimpleModel(nn.Module):
    """One linear layer, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 1)
        self.register_buffer("cnt", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cnt += 1
        return torch.sigmoid(self.fc(x))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 10, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(2, (100, 1), generator=generator).double())


def trained_by_one() -> dict[str, torch.Tensor]:
    """The state after all epochs of an ordinary loop on one process."""
    torch.manual_seed(0)
    model = SimpleModel().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = uni.Loader(dataset(), BATCH, global_batches=True)
    while loader.epoch < EPOCHS:
        for data, label in loader:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy(model(data), label).backward()
            optimizer.step()
    return model.state_dict()


def deviation(state: dict[str, torch.Tensor]) -> float:
    """The worst difference from one process; more than rounding is an error."""
    alone = trained_by_one()
    assert state.keys() == alone.keys()
    worst = max((state[name] - alone[name]).abs().max().item() for name in alone)
    assert worst < 1e-12, f"deviates by {worst:.1e} from one process"
    return worst
