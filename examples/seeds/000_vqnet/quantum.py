"""A model of 10 qubits whose state two ranks share, with gradients by the adjoint method.

Document 000, DistributeQMachine and DistQuantumLayerAdjoint. <X5> is that of one qubit, for the CNOT is elsewhere: it
is checked against matrices of two by two, and so is its gradient; and both against the same circuit on one process.

vqnetrun -n 2 python examples/seeds/000_vqnet/quantum.py
"""

from __future__ import annotations

from typing import Any

import torch

import unisono.compat.vqnet as pyvqnet
from unisono.compat.vqnet import tensor
from unisono.compat.vqnet.distributed import get_rank
from unisono.compat.vqnet.distributed.qubits_reorder import DistQuantumLayerAdjoint, DistributeQMachine
from unisono.compat.vqnet.qnn.vqc import MeasureAll, cnot, rx, ry, rz
from unisono.quantum import Layer

pyvqnet.utils.set_random_seed(123)

qubit = 10


class QModel(pyvqnet.nn.Module):
    def __init__(self, num_wires: int, dtype: Any, grad_mode: str = "") -> None:
        super().__init__()
        self.qm = DistributeQMachine(num_wires, dtype=dtype, grad_mode=grad_mode)
        self.qm.set_just_defined(True)
        self.qm.set_save_op_history_flag(True)
        self.qm.set_qr_config({"qubit": num_wires, "global_qubit": 1})  # log2 of the number of ranks
        self.params = pyvqnet.nn.Parameter([qubit])
        self.measure = MeasureAll(obs={"X5": 1.0})

    def forward(self, x: Any) -> Any:
        self.qm.reset_states(x.shape[0])
        for i in range(qubit):
            rx(q_machine=self.qm, params=self.params[i], wires=i)
            ry(q_machine=self.qm, params=self.params[3], wires=i)
            rz(q_machine=self.qm, params=self.params[4], wires=i)
        cnot(q_machine=self.qm, wires=[0, 1])
        return self.measure(q_machine=self.qm)


def by_hand(params: torch.Tensor) -> torch.Tensor:
    """<X5> of rz(p4) ry(p3) rx(p5) |0>."""
    paulis = torch.tensor([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]], dtype=torch.complex128)
    state = torch.tensor([1, 0], dtype=torch.complex128)
    for pauli, angle in zip(paulis, params[[5, 3, 4]], strict=True):
        state = torch.cos(angle / 2) * state - 1j * torch.sin(angle / 2) * (pauli @ state)
    return (state.conj() @ paulis[0] @ state).real


input_x = tensor.QTensor([[0.1, 0.2, 0.3]], requires_grad=True).toGPU(pyvqnet.DEV_GPU_0 + get_rank())
input_x = tensor.broadcast_to(input_x, [2, 3])
input_x.requires_grad = True

quantum_model = QModel(num_wires=qubit, dtype=pyvqnet.kcomplex64, grad_mode="adjoint").toGPU(
    pyvqnet.DEV_GPU_0 + get_rank()
)

adjoint_model = DistQuantumLayerAdjoint(quantum_model)
adjoint_model.train()

batch_y = adjoint_model(input_x)
batch_y.backward()
print(batch_y)

params = quantum_model.params.detach().double().cpu().requires_grad_()
expected = by_hand(params)
(2 * expected).backward()  # two samples, alike
torch.testing.assert_close(batch_y.detach().cpu().double(), expected.detach().expand(2, 1), rtol=0, atol=1e-6)
torch.testing.assert_close(quantum_model.params.grad.cpu().double(), params.grad, rtol=0, atol=1e-6)

# What was recorded, on this process alone: a plain layer, whose weights are the gates' angles in their order.
order = [index for i in range(qubit) for index in (i, 3, 4)]
alone = Layer(quantum_model.qm.circuit, "X5", weights=quantum_model.params[order])
value = alone()
(2 * value).sum().backward()
gradient = torch.zeros(qubit).index_add(0, torch.tensor(order), alone.weights.grad)
torch.testing.assert_close(batch_y.detach().cpu(), value.detach().expand(2, 1), rtol=0, atol=1e-6)
torch.testing.assert_close(quantum_model.params.grad.cpu(), gradient, rtol=0, atol=1e-6)
print(f"rank {get_rank()}: <X5> and its gradient are those of one process, and of one qubit by hand")
