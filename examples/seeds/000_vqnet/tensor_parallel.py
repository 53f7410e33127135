"""A classifier whose linear layers two ranks share, by rows and by columns, trained to the losses of one process.

Document 000, ColumnParallelLinear and RowParallelLinear (one program for both), with scikit-learn's digits in the place
of MNIST and narrower layers.

vqnetrun -n 2 python examples/seeds/000_vqnet/tensor_parallel.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import unisono.compat.vqnet as pyvqnet
import unisono.compat.vqnet.nn as nn
import unisono.compat.vqnet.optim as optim
from unisono.compat.vqnet import kfloat32, kint64, tensor
from unisono.compat.vqnet.distributed import CommController, get_local_rank, get_rank
from unisono.compat.vqnet.distributed.tensor_parallel import ColumnParallelLinear, RowParallelLinear

Comm_OP = CommController("nccl")

train_images_np = (load_digits().images[:640] / 16.0).astype(np.float32)
train_labels_np = load_digits().target[:640, None]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = RowParallelLinear(8 * 8, 128, tp_comm=Comm_OP)  # the input is whole
        self.fc2 = ColumnParallelLinear(128, 64, tp_comm=Comm_OP)
        self.fc3 = RowParallelLinear(64, 32, tp_comm=Comm_OP)  # the input is a shard
        self.fc4 = ColumnParallelLinear(32, 16, tp_comm=Comm_OP)
        self.fc5 = RowParallelLinear(16, 10, tp_comm=Comm_OP)
        self.ac = nn.activation.ReLu()

    def forward(self, x: pyvqnet.QTensor) -> Any:
        x = x.reshape([-1, 8 * 8])
        x = self.ac(self.fc1(x))
        x = self.fc2(x)
        x = self.fc3(x)
        x = self.fc4(x)
        return self.fc5(x)


def full(model: Classifier) -> torch.nn.Module:
    """The same classifier on one process, made of all ranks' shards."""
    layers: list[torch.nn.Module] = []
    for sharded in (model.fc1, model.fc2, model.fc3, model.fc4, model.fc5):
        layer = torch.nn.Linear(sharded.in_features, sharded.out_features)
        by_columns = isinstance(sharded, ColumnParallelLinear)
        shards = Comm_OP.comm.all_gather(sharded.weight.detach())
        bias = torch.cat(Comm_OP.comm.all_gather(sharded.bias.detach())) if by_columns else sharded.bias.detach()
        layer.load_state_dict({"weight": torch.cat(shards, 0 if by_columns else 1), "bias": bias})
        layers += [layer, torch.nn.ReLU()] if sharded is model.fc1 else [layer]
    return torch.nn.Sequential(torch.nn.Flatten(), *layers).to(sharded.weight.device)


def trained(model: torch.nn.Module) -> tuple[list[float], float]:
    """The losses of two epochs, and the accuracy in the last."""
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=0.001)
    batch_size = 64
    losses = []
    for _ in range(2):
        model.train()
        correct, total = 0.0, 0
        for i in range(len(train_images_np) // batch_size):
            rows = slice(i * batch_size, (i + 1) * batch_size)
            data_ = tensor.QTensor(train_images_np[rows], dtype=kfloat32).to(get_local_rank() + 1000)
            labels = tensor.QTensor(train_labels_np[rows], dtype=kint64).to(get_local_rank() + 1000)
            optimizer.zero_grad()
            outputs = model(data_)
            loss = criterion(labels, outputs)
            loss.backward()
            optimizer.step()
            predicted = pyvqnet.tensor.argmax(outputs, dim=1, keepdims=True)
            total += labels.size
            correct += pyvqnet.tensor.sums(predicted == labels).item()
            losses.append(loss.item())
    return losses, 100 * correct / total


model = Classifier()
model.to(get_local_rank() + 1000)
Comm_OP.broadcast_model_params(model, 0)
alone = full(model)

losses, accuracy = trained(model)
expected, _ = trained(alone)
worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
print(f"rank {get_rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy {accuracy:.1f}%, {worst:.1e} from one's")
assert worst < 1e-4
assert losses[-1] < losses[0]
