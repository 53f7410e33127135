"""An MLP whose Adam state is sharded over two ranks (ZeRO 1), trained to the parameters of one process.

Document 000, ZeroModelInitial, with scikit-learn's digits instead of MNIST and narrower layers. As there, every
rank is given the full batch.

vqnetrun -n 2 python examples/seeds/000_vqnet/zero.py
"""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import unisono.compat.vqnet as pyvqnet
import unisono.compat.vqnet.nn as nn
import unisono.compat.vqnet.optim as optim
from unisono.compat.vqnet import kfloat32, kint64, tensor
from unisono.compat.vqnet.distributed import CommController, ZeroModelInitial, get_local_rank, get_rank

train_images_np = (load_digits().images[:640] / 16.0).astype(np.float32)
train_labels_np = load_digits().target[:640, None]
batch_size = 64


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8 * 8, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 32)
        self.fc4 = nn.Linear(32, 16)
        self.fc5 = nn.Linear(16, 10)
        self.ac = nn.activation.ReLu()

    def forward(self, x: pyvqnet.QTensor) -> Any:
        x = x.reshape([-1, 8 * 8])
        x = self.ac(self.fc1(x))
        x = self.fc2(x)
        x = self.fc3(x)
        x = self.fc4(x)
        return self.fc5(x)


def batches() -> Any:
    for i in range(len(train_images_np) // batch_size):
        rows = slice(i * batch_size, (i + 1) * batch_size)
        data_ = tensor.QTensor(train_images_np[rows], dtype=kfloat32)
        labels = tensor.QTensor(train_labels_np[rows], dtype=kint64)
        yield data_.to(get_local_rank() + 1000), labels.to(get_local_rank() + 1000)


def compute_acc(outputs: Any, labels: Any, correct: float, total: int) -> tuple[float, int]:
    predicted = pyvqnet.tensor.argmax(outputs, dim=1, keepdims=True)
    total += labels.size
    correct += pyvqnet.tensor.sums(predicted == labels).item()
    return correct, total


pyvqnet.utils.set_random_seed(get_rank())  # ranks start from rank 0's parameters, not from their own
model = Classifier()
model.to(get_local_rank() + 1000)

Comm_op = CommController("nccl")
Comm_op.broadcast_model_params(model, 0)
alone = copy.deepcopy(model)

criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=0.001)

args_ = {
    "train_batch_size": batch_size,
    "optimizer": {"type": "adam", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 1},
}

os.environ["LOCAL_RANK"] = str(get_local_rank())
model = ZeroModelInitial(args=args_, model=model, optimizer=optimizer)

losses = []
for epoch in range(3):
    model.train()
    correct, total = 0.0, 0
    for data_, labels in batches():
        outputs = model(data_)
        loss = criterion(labels, outputs)
        model.backward(loss)
        model.step()
        correct, total = compute_acc(outputs, labels, correct, total)
        losses.append(loss.item())
    print(f"rank {get_rank()} epoch {epoch + 1}: loss {losses[-1]:.4f} acc {100 * correct / total:.1f}%")

# One process, with all of Adam's state.
own = torch.optim.Adam(alone.parameters(), lr=0.001)
for step, (data_, labels) in enumerate([batch for _ in range(3) for batch in batches()]):
    own.zero_grad()
    loss = criterion(labels, alone(data_))
    loss.backward()
    own.step()
    assert abs(loss.item() - losses[step]) < 1e-5, (step, loss.item(), losses[step])
for mine, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(mine.data, theirs.data, rtol=1e-4, atol=1e-5)


def kept(of: torch.optim.Optimizer) -> int:
    return sum(value.numel() for state in of.state.values() for value in state.values() if value.dim())


print(f"rank {get_rank()} keeps {kept(model.optimizer)} of {kept(own)} numbers of Adam's state; parameters are equal")
assert kept(model.optimizer) < 1.2 * kept(own) / Comm_op.getSize()
assert losses[-1] < losses[0]
