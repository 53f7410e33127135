"""Bad input: errors that name the key and what is accepted, before any rank joins or waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from unisono.comm.rendezvous import world
from unisono.compat.vqnet import nn, optim
from unisono.compat.vqnet.distributed import (
    ColumnParallelLinear,
    CommController,
    PipelineParallelTrainingWrapper,
    ZeroModelInitial,
    split_data,
)
from unisono.compat.vqnet.distributed.qubits_reorder import DistQuantumLayerAdjoint, DistributeQMachine
from unisono.compat.vqnet.qnn.vqc import MeasureAll, cnot, rx, u3, x1
from unisono.errors import UsageError

ADAM = {"type": "Adam", "params": {"lr": 0.001}}
PIPELINE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "pipeline_parallel_size": 2,
    "optimizer": ADAM,
    "loss": nn.CrossEntropyLoss(),
}
ZERO: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": ADAM}


def without(args: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name != key}


@pytest.mark.parametrize("key", PIPELINE)
def test_a_key_of_the_pipeline_is_missing(key: str) -> None:
    with pytest.raises(UsageError, match=rf"the key '{key}' \(.*\) is missing; known are train_batch_size"):
        PipelineParallelTrainingWrapper(without(PIPELINE, key), [nn.Linear(2, 2)] * 2, [])
    assert not world.is_initialized()


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"optimizer": {"type": "Lion"}}, "type 'Lion' is unknown; expected one of adam, adamw, adamax, adagrad"),
        ({"optimizer": {"params": {}}}, r"the key 'type' \(adam \| adamw"),
        ({"optimizer": {"type": "sgd", "params": {"learning_rate": 1}}}, "unknown key 'learning_rate'; known are lr"),
        ({"optimizer": "Adam"}, "expected a dictionary of type .* not a str"),
        ({"optimizer": {"type": "adam", "params": {"lr": "fast"}}}, "params of adam: lr='fast' is refused"),
        ({"optimizer": {"type": "adam", "params": {"eps": 1, "lr": -1}}}, "lr=-1 is refused: Invalid learning rate"),
        ({"optimizer": {"type": "sgd", "params": {"nesterov": True}}}, "nesterov=True is refused: Nesterov momentum"),
        ({"train_batch_size": 0}, "train_batch_size=0; expected a whole number of at least 1"),
        ({"gradient_clipping": "much"}, "gradient_clipping='much'; expected a number above 0"),
        ({"gradient_clipping": True}, "gradient_clipping=True; expected a number above 0"),
        ({"zero": 1}, "unknown key 'zero'; known are train_batch_size"),
        ({"loss": 3}, "loss is a int; expected a loss"),
        ({"backend": "smoke"}, "backend 'smoke': expected one of mpi, nccl, gloo"),
    ],
)
def test_a_pipelines_settings_are_wrong(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        PipelineParallelTrainingWrapper({**PIPELINE, **changes}, [nn.Linear(2, 2)] * 2, [])
    assert not world.is_initialized()


@pytest.mark.parametrize("layers", [[], nn.Linear(2, 2), 7])
def test_a_pipeline_needs_a_list_of_layers(layers: Any) -> None:
    with pytest.raises(UsageError, match=r"join_layers is .*; expected a list of layers"):
        PipelineParallelTrainingWrapper(PIPELINE, layers, [])
    assert not world.is_initialized()


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        (without(ZERO, "zero_optimization"), "the key 'zero_optimization' .* is missing"),
        (without(ZERO, "optimizer"), "the key 'optimizer' .* is missing"),
        ({**ZERO, "zero_optimization": {}}, r"the key 'stage' \(1, 2 or 3\) is missing"),
        ({**ZERO, "zero_optimization": {"stage": 4}}, "stage=4; expected 1, 2 or 3"),
        ({**ZERO, "optimizer": {"type": "Lion"}}, "type 'Lion' is unknown"),
        ([], "expected a dictionary .* not a list"),
    ],
)
def test_zeros_settings_are_wrong(args: Any, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        ZeroModelInitial(args, nn.Linear(2, 2))
    assert not world.is_initialized()


@pytest.mark.parametrize(
    ("model", "optimizer", "reported"),
    [
        (7, None, "the model is a int; expected a Module"),
        (nn.activation.ReLu(), None, "ReLu has no parameters to train"),
        (nn.Linear(2, 2), "adam", "the optimizer is a str; expected one that was made for the model's"),
        (nn.Linear(2, 2), optim.Adam, "the optimizer is a class, Adam; expected one"),
    ],
)
def test_zeros_model_and_optimizer_are_wrong(model: Any, optimizer: Any, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        ZeroModelInitial(ZERO, model, optimizer)
    assert not world.is_initialized()


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"input_size": 0}, "ColumnParallelLinear: size 0; expected input_size and output_size"),
        ({"output_size": "2"}, "size '2'"),
        ({"weight_initializer": 5}, "weight_initializer=5; expected a function"),
        ({"dtype": 5}, r"dtype=5 is torch.int64; .* expected floats or complex"),
    ],
)
def test_a_shared_layer_is_described_wrongly(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        ColumnParallelLinear(**{"input_size": 2, "output_size": 2, **options})
    assert not world.is_initialized()


def test_data_that_cannot_be_split() -> None:
    for given in (None, 5, np.array(5), {1, 2}):
        with pytest.raises(UsageError, match=r"split_data: y_train is .*; expected an array, a tensor or a list"):
            split_data([1, 2], given)


def test_a_backend_that_is_none() -> None:
    with pytest.raises(UsageError, match="backend 'grpc': expected one of mpi, nccl, gloo"):
        CommController("grpc")


@pytest.mark.parametrize(
    ("obs", "reported"),
    [
        ({"Q5": 1.0}, "the key 'Q5' of obs does not parse .* Pauli string of I, X, Y, Z, each with its wire"),
        ({"X": 1.0}, "the key 'X' of obs does not parse .*has no wire"),
        ({"X1": "much"}, "the key 'X1' of obs has 'much'; expected a real number"),
        ({"wires": [0], "observables": ["X"]}, "lacks the key 'coefficient'; expected wires, observables, coefficient"),
        ({"wires": [0, 1], "observables": ["X"], "coefficient": [1, 2]}, "wires has 2, observables has 1"),
        ({"wires": [0], "observables": ["Q"], "coefficient": [1]}, "the key 'Q0' of obs does not parse"),
        ({"wires": [], "observables": [], "coefficient": []}, "no wires; expected a Pauli string"),
        (
            {"wires": torch.tensor([0.5]), "observables": ["X"], "coefficient": [1]},
            "the key 'X0.5' of obs does not parse",
        ),
        ({"wires": 0, "observables": "X", "coefficient": 1, "wire": 1}, "unknown key 'wire' of obs; expected wires"),
        ("X0 + ", "does not parse"),
        ([], "expected a Pauli string"),
        (5, "expected a Pauli string"),
    ],
)
def test_an_observable_does_not_parse(obs: Any, reported: str) -> None:
    with pytest.raises(UsageError, match=reported):
        MeasureAll(obs=obs)


def test_observables_by_wires_that_are_an_array_or_a_tensor() -> None:
    for wires in (np.array([0, 1]), torch.tensor([0, 1])):
        made = MeasureAll({"wires": wires, "observables": ["X", "Y"], "coefficient": wires + 1})
        assert str(made.observables[0]) == "X0 + 2 Y1"


def test_wires_that_are_no_lists() -> None:
    machine = DistributeQMachine(3)
    machine.reset_states(np.int64(2))  # type: ignore[arg-type]
    for wires in ([0, 1], np.array([0, 1]), torch.tensor([0, 1]), range(2)):
        cnot(q_machine=machine, wires=wires)  # type: ignore[arg-type]
    for wire in (2, np.int64(2), torch.tensor(2), [np.int64(2)]):
        rx(q_machine=machine, wires=wire, params=0.1)  # type: ignore[arg-type]
    assert len({str(each) for each in machine.circuit.operations[:4]}) == 1
    assert [each.targets for each in machine.circuit.operations[4:]] == [(2,)] * 4


def test_a_machine_is_used_wrongly() -> None:
    machine = DistributeQMachine(3)
    machine.reset_states(2)
    for act, reported in (
        (lambda: rx(q_machine=machine, wires=0), "rx takes 1 angles, but params is None"),
        (lambda: cnot(q_machine=machine, wires=[0, 1], params=0.1), "cx takes no angles"),
        (lambda: rx(q_machine=machine, wires=0, params=torch.zeros(3)), r"shape \(3,\); expected \(1,\).*\(2, 1\)"),
        (lambda: u3(q_machine=machine, wires=0, params=torch.zeros(2)), r"expected \(3,\) for all samples"),
        (lambda: rx(q_machine=machine, wires=3, params=0.1), "wires 0 to 2"),
        (lambda: rx(q_machine=machine, wires="0", params=0.1), "rx: wires='0'; expected a whole number"),  # type: ignore[arg-type]
        (lambda: rx(q_machine=machine, wires=1.0, params=0.1), "rx: wires=1.0; expected a whole number"),  # type: ignore[arg-type]
        (lambda: rx(q_machine=machine, wires=True, params=0.1), "rx: wires=True; expected a whole number"),
        (lambda: rx(q_machine=machine, wires=torch.tensor(0.5), params=0.1), "wires=tensor.*expected a whole number"),  # type: ignore[arg-type]
        (lambda: rx(q_machine=machine, wires=0, params="a"), "rx: params='a'; expected real angles"),
        (lambda: rx(q_machine=machine, wires=0, params=[None]), r"rx: params=\[None\]; expected real angles"),
        (lambda: x1(q_machine=machine, wires=0, params=0.1), "takes no params"),
        (lambda: cnot(q_machine=machine, wires=[1]), r"cx: wires=\[1\]; expected 2 different wires"),
        (lambda: cnot(q_machine=machine, wires=[1, 1]), r"cx: wires=\[1, 1\]; expected 2 different wires"),
        (lambda: rx(q_machine=machine, wires=[0, 1], params=0.1), r"rx: wires=\[0, 1\]; expected one wire"),
        (lambda: rx(q_machine=7, wires=0, params=0.1), "q_machine is a int; expected a DistributeQMachine"),  # type: ignore[arg-type]
        (lambda: machine.set_qr_config({"qubit": 3}), r"the key 'global_qubit' \(log2 of the ranks\) is missing"),
        (lambda: machine.set_qr_config({"qubit": 4, "global_qubit": 1}), "qubit=4, but the machine has num_wires=3"),
        (lambda: machine.set_qr_config({"qubit": 3, "global_qubit": 3}), "fewer than the 3 qubits"),
        (lambda: machine.reset_states(0), r"reset_states\(0\)"),
        (lambda: DistributeQMachine(3, grad_mode="shift"), "grad_mode='shift'; expected '' or 'adjoint'"),
        (lambda: DistributeQMachine(3, dtype=6), "expected kcomplex64 or kcomplex128"),
        (lambda: DistQuantumLayerAdjoint(nn.Linear(2, 2)), "has no DistributeQMachine"),
        (lambda: DistQuantumLayerAdjoint(machine), "grad_mode=''; expected .*'adjoint'"),
        (lambda: MeasureAll("X7")(machine), "acts on wire 7, but the circuit has wires 0 to 2"),
    ):
        with pytest.raises(UsageError, match=reported):
            act()
    assert len(machine.circuit) == 0


def test_vqnets_optimizers_are_torchs() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    adam = optim.Adam(parameters, lr=0.1, beta1=0.8, epsilon=1e-6)
    assert {key: adam.defaults[key] for key in ("lr", "betas", "eps")} == {
        "lr": 0.1,
        "betas": (0.8, 0.999),
        "eps": 1e-6,
    }
