"""Every name of VQNet's document is here, where the document has it, and takes the arguments that it says."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

ROOT = "unisono.compat.vqnet"

# The document's signatures, as it writes them; without a default where it names none.
CONTROLLER = """
__init__(backend, rank=None, world_size=None)
getRank()
getSize()
getLocalRank()
barrier()
get_device_num()
allreduce(tensor, c_op="avg")
reduce(tensor, root=0, c_op="avg")
broadcast(tensor, root=0)
allgather(tensor)
send(tensor, dest)
recv(tensor, source)
split_group(rankL)
allreduce_group(tensor, c_op="avg", group=None)
reduce_group(tensor, root=0, c_op="avg", group=None)
broadcast_group(tensor, root=0, group=None)
allgather_group(tensor, group=None)
all_gather_group(tensor, group=None)
broadcast_model_params(model, root=0)
"""
OTHERS = """
distributed.ControlComm.get_rank()
distributed.ControlComm.get_local_rank()
distributed.ControlComm.init_group(rank_lists)
distributed.get_host_name()
distributed.datasplit.split_data(x_train, y_train, shuffle=False)
distributed.pp.PipelineParallelTrainingWrapper.__init__(args, join_layers, trainset)
distributed.pp.PipelineParallelTrainingWrapper.train_batch()
distributed.ZeroModelInitial.__init__(args, model, optimizer)
distributed.ZeroModelInitial.backward(loss)
distributed.ZeroModelInitial.step()
distributed.tensor_parallel.ColumnParallelLinear.__init__(input_size, output_size, weight_initializer, bias_initializer, use_bias, dtype, name, tp_comm)
distributed.tensor_parallel.RowParallelLinear.__init__(input_size, output_size, weight_initializer, bias_initializer, use_bias, dtype, name, tp_comm)
distributed.qubits_reorder.DistributeQMachine.__init__(num_wires, dtype, grad_mode)
distributed.qubits_reorder.DistributeQMachine.set_just_defined(just_defined)
distributed.qubits_reorder.DistributeQMachine.set_save_op_history_flag(save)
distributed.qubits_reorder.DistributeQMachine.set_qr_config(config)
distributed.qubits_reorder.DistributeQMachine.reset_states(batchsize)
distributed.qubits_reorder.DistQuantumLayerAdjoint.__init__(vqc_module, name)
qnn.vqc.MeasureAll.__init__(obs)
utils.set_random_seed(seed)
"""  # noqa: E501
# What its programs import or call besides.
USED = """
DEV_GPU_0 QTensor kcomplex64 kfloat32 kint64 tensor nn optim distributed
tensor.QTensor tensor.argmax tensor.sums tensor.broadcast_to tensor.tensor.QTensor tensor.tensor.to_tensor
tensor.tensor.zeros_like tensor.tensor.flatten tensor.QTensor.toGPU tensor.QTensor.to tensor.QTensor.reshape
nn.Module nn.Module.toGPU nn.Module.train nn.Sequential nn.CrossEntropyLoss nn.Linear nn.Conv2D nn.MaxPool2D
nn.Parameter nn.activation.ReLu optim.Adam
data.CIFAR10_Dataset data.TransformCenterCrop data.TransformCompose data.TransformNormalize data.TransformResize
data.TransformToTensor
distributed.CommController distributed.ControlComm.CommController distributed.configs.comm.get_local_rank
distributed.PipelineParallelTrainingWrapper distributed.ColumnParallelLinear distributed.RowParallelLinear
distributed.get_rank distributed.get_local_rank distributed.init_group distributed.split_data distributed.np
"""


def found(path: str) -> Any:
    """By attributes; modules that nobody has imported yet are imported on the way, as a program's import would."""
    value: Any = importlib.import_module(ROOT)
    module_path = ROOT
    for name in path.split("."):
        module_path = f"{module_path}.{name}"
        if not hasattr(value, name) and inspect.ismodule(value):
            importlib.import_module(module_path)
        value = getattr(value, name)
    return value


def takes_what_the_document_says(function: Any, signature: str) -> None:
    documented = eval(f"inspect.signature(lambda {signature}: None)", {"inspect": inspect})
    ours = list(inspect.signature(function).parameters.values())
    if ours[:1] and ours[0].name == "self":
        ours = ours[1:]
    assert [each.name for each in ours][: len(documented.parameters)] == list(documented.parameters)
    for own, theirs in zip(ours, documented.parameters.values(), strict=False):
        assert theirs.default in (inspect.Parameter.empty, own.default), own
    for own in ours[len(documented.parameters) :]:  # what the document has not must not be needed
        assert own.default is not inspect.Parameter.empty, own


LINES = [f"distributed.CommController.{line}" for line in CONTROLLER.split("\n") if line]
LINES += [line for line in OTHERS.split("\n") if line]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0].removeprefix("distributed."))
def test_a_documented_signature(line: str) -> None:
    path, _, rest = line.partition("(")
    takes_what_the_document_says(found(path), rest.removesuffix(")"))


def test_names_that_its_programs_use() -> None:
    missing = []
    for path in USED.split():
        try:
            found(path)
        except (AttributeError, ImportError):
            missing.append(path)
    assert missing == []
    with pytest.raises(ImportError):
        found("distributed.no_such_name")


@pytest.mark.parametrize("gate", ["rx", "ry", "rz", "cnot"])
def test_gates_take_a_machine_and_wires_by_name(gate: str) -> None:
    parameters = list(inspect.signature(found(f"qnn.vqc.{gate}")).parameters)
    assert {"q_machine", "params", "wires"} <= set(parameters)
