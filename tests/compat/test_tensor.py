"""QTensor, its numbers of dtypes and devices, layers, losses and images: what needs one process only."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono.compat.vqnet as pyvqnet
from unisono.compat.vqnet import nn, tensor
from unisono.errors import UsageError


def test_a_qtensor_is_a_tensor_that_answers_to_both_names() -> None:
    q = tensor.QTensor([[1.0, 2.0, 3.0]], requires_grad=True).toGPU(pyvqnet.DEV_GPU_0 + 5).to(1007)
    assert isinstance(q, torch.Tensor)
    assert (q.size, q.size(), q.size(1), q.shape) == (3, (1, 3), 3, (1, 3))
    wide = tensor.broadcast_to(q, [2, 3])
    wide.requires_grad = True  # it is so already, by what it was made of
    (wide * wide).backward()  # from ones
    assert q.grad is not None
    assert q.grad.tolist() == [[4.0, 8.0, 12.0]]
    assert wide.grad is not None
    assert wide.grad.tolist() == [[2.0, 4.0, 6.0]] * 2
    assert type(wide + 1) is tensor.QTensor
    assert type(tensor.plain({"a": [wide]})["a"][0]) is torch.Tensor
    for twin in (
        copy.deepcopy(tensor.QTensor([5.0], requires_grad=True)),
        pickle.loads(pickle.dumps(tensor.ones([1]))),
    ):
        assert type(twin) is tensor.QTensor
    assert tensor.QTensor(q).data_ptr() != q.data_ptr()
    assert tensor.sums(tensor.argmax(q, dim=1, keepdims=True) == tensor.QTensor([[2]])).item() == 1
    for reduced in (tensor.sums, tensor.mean, tensor.argmax):
        assert reduced(q, None, True).shape == (1, 1)  # type: ignore[operator]


def test_dtypes_by_number() -> None:
    assert tensor.QTensor([1 + 2j], dtype=8).dtype == torch.complex64 == pyvqnet.kcomplex64
    assert tensor.QTensor(np.arange(3), dtype=pyvqnet.kint64).astype(6).dtype == torch.float32
    assert tensor.zeros([2], dtype=9).dtype == torch.complex128
    with pytest.raises(UsageError, match=r"dtype=12: expected a torch dtype or one of 0 \(bool\).*9 \(complex128\)"):
        tensor.QTensor([1.0], dtype=12)
    assert tensor.QTensor([1.0]).to(device=1000).device == nn.Linear(1, 1).to(device=1000).weight.device
    with pytest.raises(UsageError, match="device 7: expected 0 for the CPU, or 1000"):
        tensor.QTensor([1.0]).to(7)


def test_layers_take_vqnets_arguments() -> None:
    layer = nn.Linear(3, 2, weight_initializer=lambda shape: np.full(shape, 0.5), bias_initializer=torch.nn.init.ones_)
    assert layer(torch.ones(1, 3)).tolist() == [[2.5, 2.5]]
    assert isinstance(layer, nn.Module)
    convolved = nn.Conv2D(3, 4, kernel_size=(3, 3), padding="same")(torch.ones(1, 3, 8, 8))
    assert nn.MaxPool2D([3, 3], [2, 2])(convolved).shape == (1, 4, 3, 3)
    assert nn.Sequential(layer, nn.activation.ReLu()).to(1000).toCPU()[0] is layer
    assert nn.Parameter([4, 2]).shape == (4, 2)
    with pytest.raises(UsageError, match=r"gave a tensor of shape \(2, 3, 1\); expected \(2, 3\)"):
        nn.Linear(3, 2, weight_initializer=lambda shape: np.zeros([*shape, 1]))
    with pytest.raises(UsageError, match="padding='same': expected 'valid'"):
        nn.MaxPool2D(2, 2, padding="same")


def test_losses_take_the_target_first() -> None:
    logits, classes = torch.randn(4, 3), torch.tensor([[0], [2], [1], [1]])
    loss = nn.CrossEntropyLoss()(classes, logits)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, classes[:, 0]))
    with pytest.raises(UsageError, match="The target is first"):
        nn.CrossEntropyLoss()(logits, classes)


class Harmful:
    def __reduce__(self) -> object:
        return print, ("called",)


def test_cifar10_from_its_files(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels, images = draw.integers(0, 10, 6), draw.integers(0, 256, (6, 3072)).astype(np.uint8)
    binary = np.concatenate([labels[:, None], images], axis=1).astype(np.uint8)
    (tmp_path / "bin" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "bin" / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(binary.tobytes())
    (tmp_path / "py").mkdir()
    (tmp_path / "py" / "test_batch").write_bytes(pickle.dumps({b"data": images, b"labels": labels.tolist()}))
    transform = pyvqnet.data.TransformCompose(
        [
            pyvqnet.data.TransformResize(40),
            pyvqnet.data.TransformCenterCrop(32),
            pyvqnet.data.TransformToTensor(),
            pyvqnet.data.TransformNormalize([0.5] * 3, [0.5] * 3),
        ]
    )
    train = pyvqnet.data.CIFAR10_Dataset(str(tmp_path / "bin"), transform=transform)
    test = pyvqnet.data.CIFAR10_Dataset(str(tmp_path / "py"), mode="test", layout="CHW")
    assert len(train) == len(test) == 6
    assert train[3][0].shape == (3, 32, 32)
    assert -1 <= float(train[3][0].min()) < float(train[3][0].max()) <= 1
    np.testing.assert_array_equal(test[5][0], images[5].reshape(3, 32, 32))
    assert [train[i][1] for i in range(6)] == [test[i][1] for i in range(6)] == labels.tolist()
    with pytest.raises(UsageError, match="has no files test_batch"):
        pyvqnet.data.CIFAR10_Dataset(str(tmp_path / "bin"), mode="test")
    (tmp_path / "py" / "test_batch").write_bytes(pickle.dumps({b"data": Harmful()}))
    with pytest.raises(UsageError, match="which no batch of CIFAR-10 does"):
        pyvqnet.data.CIFAR10_Dataset(str(tmp_path / "py"), mode="test")


def test_transforms_that_cannot_be() -> None:
    for make, reported in (
        (lambda: pyvqnet.data.TransformResize(0), r"TransformResize\(0\): expected a whole number"),
        (lambda: pyvqnet.data.TransformCenterCrop([4]), r"TransformCenterCrop\(\[4\]\): expected a whole number"),
        (
            lambda: pyvqnet.data.TransformNormalize([0.5], [0.0]),
            r"std=\[0\.0\]\): expected a mean and a deviation above",
        ),
    ):
        with pytest.raises(UsageError, match=reported):
            make()


def test_star_imports_leave_a_programs_own_names_alone() -> None:
    names: dict[str, Any] = {"data": 1, "device": 2, "time": 3, "group": 4}
    program = """
from unisono.compat.vqnet import *
from unisono.compat.vqnet.distributed import *
from unisono.compat.vqnet.utils import set_random_seed
made = tensor.QTensor(np.ones(2), dtype=kfloat32)
ranks = get_rank(), get_local_rank()
"""
    exec(program, names)
    assert [names[each] for each in ("data", "device", "time", "group")] == [1, 2, 3, 4]
    assert names["made"].dtype == torch.float32
    assert names["ranks"] == (0, 0)
    assert names["CommController"] is pyvqnet.distributed.CommController
