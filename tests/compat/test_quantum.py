"""What a DistributeQMachine records is what is computed: against dense matrices, and on ranks as alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import RankPool
from unisono.compat.vqnet import nn, tensor
from unisono.compat.vqnet.distributed.qubits_reorder import DistQuantumLayerAdjoint, DistributeQMachine
from unisono.compat.vqnet.qnn import vqc
from unisono.compat.vqnet.qnn.vqc import MeasureAll
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]
Found = tuple[np.ndarray, np.ndarray, np.ndarray]

PAULI = {
    "I": torch.eye(2, dtype=torch.complex128),
    "X": torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128),
    "Y": torch.tensor([[0, -1j], [1j, 0]], dtype=torch.complex128),
    "Z": torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128),
}


class Reuploading(nn.Module):
    """Angles of weights, of each sample, of both, of numbers; and gates that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qm = DistributeQMachine(3, dtype=9, grad_mode="adjoint")
        self.weights = nn.Parameter([5], dtype=7)
        self.measure = MeasureAll(
            obs=[
                {"X0 Z1": 0.5, "Y2": -1.0},
                "Z2",
                {"wires": [0, 1], "observables": ["x", "y"], "coefficient": [1, 2.0]},
            ]
        )

    def forward(self, x: Any) -> Any:
        self.qm.reset_states(x.shape[0])
        vqc.h(q_machine=self.qm, wires=0)
        vqc.rx(q_machine=self.qm, wires=1, params=x[:, 0])
        vqc.ry(q_machine=self.qm, wires=[2], params=x[:, [1]] * self.weights[0])
        vqc.u3(q_machine=self.qm, wires=0, params=self.weights[1:4], use_dagger=True)
        vqc.cnot(q_machine=self.qm, wires=[0, 2])
        if x[0, 1] > 0:
            vqc.crz(q_machine=self.qm, wires=[2, 1], params=torch.sin(self.weights[4]))
        vqc.x1(q_machine=self.qm, wires=1)
        vqc.rzz(q_machine=self.qm, wires=[0, 1], params=0.3)
        return self.measure(q_machine=self.qm)


def dense(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same by matrices of eight by eight, with torch's own gradients."""

    def on(*wires: tuple[int, torch.Tensor]) -> torch.Tensor:
        parts = dict(wires)
        return functools.reduce(torch.kron, [parts.get(wire, PAULI["I"]) for wire in range(3)])

    def turned(generator: torch.Tensor, angle: Any) -> torch.Tensor:
        return torch.matrix_exp(-0.5j * angle * generator)

    def phase(angle: torch.Tensor) -> torch.Tensor:
        return torch.diag(torch.stack([torch.ones_like(angle) + 0j, torch.exp(1j * angle)]))

    off, is_on = (PAULI["I"] + PAULI["Z"]) / 2, (PAULI["I"] - PAULI["Z"]) / 2
    hadamard = (PAULI["X"] + PAULI["Z"]) / 2**0.5
    theta, phi, lam = weights[1:4]
    u3 = phase(phi) @ turned(PAULI["Y"], theta) @ phase(lam)
    word = 0.5 * on((0, PAULI["X"]), (1, PAULI["Z"])) - on((2, PAULI["Y"]))
    measured = [word, on((2, PAULI["Z"])), on((0, PAULI["X"])) + 2 * on((1, PAULI["Y"]))]
    rows = []
    for sample in x:
        gates = [
            on((0, hadamard)),
            turned(on((1, PAULI["X"])), sample[0]),
            turned(on((2, PAULI["Y"])), sample[1] * weights[0]),
            on((0, u3.conj().T.resolve_conj().contiguous())),
            on((0, off)) + on((0, is_on), (2, PAULI["X"])),
        ]
        if x[0, 1] > 0:
            turn = turned(PAULI["Z"], torch.sin(weights[4]))
            gates.append(on((2, off)) + on((2, is_on), (1, turn)))
        gates += [turned(on((1, PAULI["X"])), torch.pi / 2), turned(on((0, PAULI["Z"]), (1, PAULI["Z"])), 0.3)]
        state = torch.zeros(8, dtype=torch.complex128)
        state[0] = 1
        for each in gates:
            state = each @ state
        rows.append(torch.stack([(state.conj() @ each @ state).real for each in measured]))
    return torch.stack(rows)


BATCHES = ([[0.3, 0.8], [1.1, -0.4], [-0.2, 0.6]], [[0.5, -0.9], [0.1, 0.2]], [[0.7, 0.4]])


def evaluated(comm: Any = None) -> list[Found]:
    """Outputs and gradients for three batches, which are of two forms and three sizes."""
    model = Reuploading()
    if comm is not None and comm.rank:
        torch.nn.init.zeros_(model.weights)  # rank 0's count
    layer = DistQuantumLayerAdjoint(model)
    found = []
    for rows in (*BATCHES, BATCHES[0]):
        x = tensor.QTensor(rows, requires_grad=True, dtype=7)
        model.weights.grad = None
        out = layer(x)
        (out * out).backward()
        assert x.grad is not None
        assert model.weights.grad is not None
        found.append((out.to_numpy(), model.weights.grad.numpy().copy(), x.grad.numpy()))
    assert len(model.qm._layers) == 3  # the first form was compiled once; a batch of one counts as shared angles
    assert len(copy.deepcopy(layer).vqc_module.qm.circuit) == 0
    return found


def test_values_and_gradients_are_those_of_dense_matrices() -> None:
    for rows, (out, of_weights, of_x) in zip((*BATCHES, BATCHES[0]), evaluated(), strict=True):
        weights = Reuploading().weights.detach().requires_grad_()
        x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
        expected = dense(weights, x)
        (expected * expected).sum().backward()
        assert weights.grad is not None
        assert x.grad is not None
        np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-12)
        np.testing.assert_allclose(of_weights, weights.grad.numpy(), atol=1e-11)
        np.testing.assert_allclose(of_x, x.grad.numpy(), atol=1e-11)


def different_batches(comm: Any) -> list[str]:
    layer = DistQuantumLayerAdjoint(Reuploading())
    output = []
    for x in (
        torch.full((2, 2), 0.5) if comm.rank else torch.full((3, 2), 0.5),
        torch.full((2, 2), 0.5 if comm.rank else -0.5),
        torch.full((2, 2), 0.5 + comm.rank),
    ):
        with pytest.raises(UsageError) as raised:
            layer(x.double())
        output.append(str(raised.value))
    return output


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_two_ranks_give_what_one_gives(pools: Pools, backend: str) -> None:
    alone = evaluated()
    for answer in pools(backend, 2).run(evaluated):
        for together, by_one in zip(answer, alone, strict=True):
            for found, expected in zip(together, by_one, strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-12)
    for output in pools(backend, 2).run(different_batches):
        assert "another number of samples" in output[0]
        assert "other gates" in output[1]
        assert "angles differ between ranks by up to 1.54" in output[2]


def test_a_machine_without_angles_of_its_own() -> None:
    machine = DistributeQMachine(2)
    machine.reset_states(3)
    vqc.x(machine, 0)
    vqc.swap(machine, [0, 1])
    out = MeasureAll({"Z0": 1, "Z1": 2.0})(machine)
    assert out.shape == (3, 1)
    np.testing.assert_allclose(out.to_numpy(), -1.0, atol=1e-6)  # type: ignore[attr-defined]
    assert MeasureAll("I")(machine).tolist() == [[1.0]] * 3
