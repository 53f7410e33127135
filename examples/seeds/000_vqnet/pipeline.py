"""An AlexNet of two pipeline stages, trained to the parameters of one process.

Document 000, PipelineParallelTrainingWrapper: batches of 64 in microbatches of 32, 1F1B, Adam. The images are
scikit-learn's digits instead of CIFAR-10 (which pyvqnet.data.CIFAR10_Dataset reads where its files are), 32 pixels
wide instead of 224, and the linear layers are narrower.

vqnetrun -n 2 python examples/seeds/000_vqnet/pipeline.py
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import unisono as uni
import unisono.compat.vqnet as pyvqnet
from unisono.compat.vqnet.distributed import get_rank
from unisono.compat.vqnet.distributed.configs import comm as dist
from unisono.compat.vqnet.distributed.pp import PipelineParallelTrainingWrapper
from unisono.compat.vqnet.nn import Conv2D, CrossEntropyLoss, Linear, MaxPool2D, Module, Sequential
from unisono.compat.vqnet.nn import activation as F
from unisono.compat.vqnet.tensor import tensor

pipeline_parallel_size = 2
num_steps = 3


class Digits:
    """Pairs of an image (3, 32, 32) and its class."""

    def __init__(self, count: int) -> None:
        digits = load_digits()
        self.images = np.repeat((digits.images[:count] * 15.9).astype(np.uint8)[..., None], 3, axis=3)
        self.labels = digits.target[:count]
        self.transform = pyvqnet.data.TransformCompose(
            [
                pyvqnet.data.TransformResize(36),
                pyvqnet.data.TransformCenterCrop(32),
                pyvqnet.data.TransformToTensor(),
                pyvqnet.data.TransformNormalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), int(self.labels[index])


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        channels = [3, 8, 16, 32, 64, 64]
        conv = [
            Conv2D(input_channels=before, output_channels=after, kernel_size=(3, 3), stride=(1, 1), padding="same")
            for before, after in pairwise(channels)
        ]
        self.features = Sequential(
            *(conv[0], F.ReLu(), MaxPool2D([2, 2], [2, 2])),
            *(conv[1], F.ReLu(), MaxPool2D([2, 2], [2, 2])),
            *(conv[2], F.ReLu(), conv[3], F.ReLu()),
            *(conv[4], F.ReLu(), MaxPool2D([3, 3], [2, 2])),
        )
        self.cls = Sequential(Linear(64 * 3 * 3, 128), F.ReLu(), Linear(128, 64), F.ReLu(), Linear(64, 10))


def join_layers(vision_model: Model) -> list[Callable[[Any], Any]]:
    return [*vision_model.features, lambda x: tensor.flatten(x, 1), *vision_model.cls]


def of_one_process(layers: list[Callable[[Any], Any]], trainset: Digits, args: dict[str, Any]) -> list[float]:
    """The losses of the same layers, trained here by a plain loop on the same batches."""
    optimizer = torch.optim.Adam([p for each in layers if isinstance(each, Module) for p in each.parameters()], lr=1e-3)
    loader = uni.Loader(trainset, args["train_batch_size"], seed=args["seed"], drop_last=True)
    losses: list[float] = []
    while len(losses) < args["epochs"] * args["steps"]:
        for (x, labels), *_ in loader:
            for layer in layers:
                x = layer(x)
            loss = args["loss"](labels, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    pyvqnet.utils.set_random_seed(1)
    args: dict[str, Any] = {
        "backend": "nccl",
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 32,
        "epochs": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "local_rank": dist.get_local_rank(),
        "pipeline_parallel_size": pipeline_parallel_size,
        "seed": 42,
        "steps": num_steps,
        "loss": CrossEntropyLoss(),
    }
    os.environ["LOCAL_RANK"] = str(dist.get_local_rank())
    trainset = Digits(64 * num_steps)
    layers = join_layers(Model())
    alone = copy.deepcopy(layers)
    w = PipelineParallelTrainingWrapper(args, layers, trainset)

    for _ in range(args["epochs"]):
        w.train_batch()
    all_loss = w.loss_dict

    parameters = w.trainer.state_dict()["model"]  # whole, on every rank
    if get_rank() == 0:
        expected = of_one_process(alone, trainset, args)
        worst = max(abs(a - b) for a, b in zip(all_loss.values(), expected, strict=True))
        print(f"losses {[round(loss, 4) for loss in all_loss.values()]}, at most {worst:.1e} from one process's")
        assert worst < 1e-4
        assert expected[-1] < expected[0]
        own = torch.nn.Sequential(*[each if isinstance(each, Module) else torch.nn.Flatten() for each in alone])
        for name, value in own.state_dict().items():
            torch.testing.assert_close(parameters[name].cpu(), value, rtol=1e-3, atol=1e-4)
