"""Many ranks, one gradient: a layer on several ranks gives the outputs and gradients of one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.quantum.layer import Layer
from unisono.quantum.observables.observable import X, Y, Z

Pools = Callable[[str, int], RankPool]
Found = tuple[np.ndarray, np.ndarray, np.ndarray]


def evaluate(comm: Any, kernel: str, mesh: Any = None) -> Found:
    circuit = random_circuit(6, 50, 11, weights=4, features=2)
    observables = [Z(0), X(1) @ Y(5) - 0.5 * Z(2), X(0) @ X(1) @ X(2)]
    layer = Layer(circuit, observables, comm, dtype=torch.complex128, kernel=kernel, mesh=mesh)
    x = torch.tensor([[0.3, -0.7], [1.1, 0.2], [0.0, 0.9]], dtype=torch.float64, requires_grad=True)
    out = layer(x)
    (out * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sum().backward()
    assert layer.weights.grad is not None
    assert x.grad is not None
    return out.detach().numpy(), layer.weights.grad.numpy(), x.grad.numpy()


@functools.cache
def one_process() -> Found:
    return evaluate(None, "reference")


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.filterwarnings("ignore:.*ranks")
@pytest.mark.parametrize(("backend", "size", "kernel"), [("gloo", 2, "cpu"), ("mpi", 2, "cpu")])
def test_outputs_and_gradients_do_not_depend_on_the_number_of_ranks(
    pools: Pools, backend: str, size: int, kernel: str
) -> None:
    alone = one_process()
    for answer in pools(backend, size).run(evaluate, kernel):
        for found, expected in zip(answer, alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-11)


def evaluate_on_meshes(comm: Any) -> list[Found]:
    """Samples and states over two axes, in each shape and order of them; then only a part of the mesh's axes."""
    shapes = [((2, 2), ("dp", "qubits")), ((2, 2), ("qubits", "dp")), ((4, 1), ("dp", "qubits"))]
    found = [evaluate(None, "reference", Mesh(*each).connect()) for each in shapes]
    found.append(evaluate(None, "reference", Mesh((2, 1, 2), ("tp", "dp", "qubits")).connect()))
    return found


@pytest.mark.filterwarnings("ignore:.*ranks")
def test_batch_and_state_over_the_axes_of_one_mesh(pools: Pools) -> None:
    alone = one_process()
    for answers in pools("gloo", 4).run(evaluate_on_meshes):
        for answer in answers:
            for found, expected in zip(answer, alone, strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-12)


def evaluate_own_batches(comm: Any) -> list[np.ndarray]:
    """Each group of an axis has its own part of the batch, and gradients are added up over the other axis by hand."""
    mesh = Mesh((2, 2), ("dp", "qubits")).connect()
    groups, samples = mesh.comm("qubits"), mesh.comm("dp")
    circuit = random_circuit(6, 50, 11, weights=4, features=2)
    layer = Layer(circuit, [Z(0), X(0) @ X(1) @ X(2)], groups, dtype=torch.complex128, kernel="reference")
    layer(BATCH[samples.rank :: samples.size]).sum().backward()
    assert layer.weights.grad is not None
    return [samples.all_reduce(layer.weights.grad).numpy()]


BATCH = torch.tensor([[0.3, -0.7], [1.1, 0.2], [0.0, 0.9], [-0.4, 0.6]], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*ranks")
def test_a_layer_over_one_axis_in_any_data_parallelism(pools: Pools) -> None:
    circuit = random_circuit(6, 50, 11, weights=4, features=2)
    alone = Layer(circuit, [Z(0), X(0) @ X(1) @ X(2)], dtype=torch.complex128, kernel="reference")
    alone(BATCH).sum().backward()
    assert alone.weights.grad is not None
    for (found,) in pools("gloo", 4).run(evaluate_own_batches):
        np.testing.assert_allclose(found, alone.weights.grad.numpy(), atol=1e-12)


def refused_meshes(comm: Any) -> list[str]:
    output = []
    mesh = Mesh((3, 1), ("qubits", "dp")).connect()
    for options in ({"mesh": mesh}, {"mesh": mesh, "comm": comm}, {"mesh": mesh, "state_axis": "dp"}, {"mesh": 3}):
        with pytest.raises(UsageError) as raised:
            Layer(random_circuit(4, 5, 1), "Z0", **options)
        output.append(str(raised.value))
    return output


def test_meshes_that_cannot_serve(pools: Pools) -> None:
    for output in pools("gloo", 3).run(refused_meshes):
        for text, words in zip(output, ("has 3 ranks", "both given", "two axes", "of type int"), strict=True):
            assert words in text
