"""Names of VQNet's that are not here: what works instead, or the nearest name that is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.compat.language import say
from unisono.compat.missing import answer_with, longest_prefix, nearest

_ROOT = "unisono.compat.vqnet"
_OTHERS = {f"{_ROOT}.seed": "pyvqnet.utils"}  # modules that VQNet calls otherwise

# What VQNet has under a name, and what to use here, in English and in Chinese.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "pyvqnet.qnn.pq3": ("use unisono.quantum, docs/quantum.md", "请用 unisono.quantum，见 docs/quantum.md"),
    "pyvqnet.qnn.QuantumLayer": (
        "use unisono.quantum.Layer, a module of torch, docs/quantum.md",
        "请用 unisono.quantum.Layer（torch 模块），见 docs/quantum.md",
    ),
    "pyvqnet.qnn.vqc.QMachine": (
        "use pyvqnet.distributed.qubits_reorder.DistributeQMachine, which also runs on one rank",
        "请用 pyvqnet.distributed.qubits_reorder.DistributeQMachine，单进程也可运行",
    ),
    "pyvqnet.qnn.vqc.QModule": (
        "use pyvqnet.nn.Module with a DistributeQMachine",
        "请用 pyvqnet.nn.Module 和 DistributeQMachine",
    ),
    "pyvqnet.optim.Rotosolve": (
        "use optim.Adam: gradients of circuits are exact here",
        "请用 optim.Adam：这里线路的梯度是精确的",
    ),
    "pyvqnet.data.data_generator": (
        "use torch.utils.data.DataLoader(TensorDataset(x, y), batch_size, shuffle=True)",
        "请用 torch.utils.data.DataLoader(TensorDataset(x, y), batch_size, shuffle=True)",
    ),
    "pyvqnet.utils.initializer": (
        "give a layer a function of torch.nn.init, such as torch.nn.init.xavier_normal_",
        "请把 torch.nn.init 的函数（如 torch.nn.init.xavier_normal_）传给层",
    ),
    "pyvqnet.utils.storage": (
        "use torch.save(model.state_dict(), path) and model.load_state_dict(torch.load(path))",
        "请用 torch.save(model.state_dict(), path) 和 model.load_state_dict(torch.load(path))",
    ),
    "pyvqnet.tensor.topK": (
        "use torch.topk(t, k, dim), which gives values and indices",
        "请用 torch.topk(t, k, dim)，它给出值和下标",
    ),
    "pyvqnet.tensor.median": (
        "use torch.median (the lower of two) or torch.quantile(t, 0.5) (their mean)",
        "请用 torch.median（取较小者）或 torch.quantile(t, 0.5)（取均值）",
    ),
    "pyvqnet.xtensor": ("use pyvqnet.tensor", "请用 pyvqnet.tensor"),
}


def vqnet_name(module: str) -> str:
    """A module's name as VQNet's programs write it."""
    shown = _OTHERS.get(module, module)
    return "pyvqnet" + shown.removeprefix(_ROOT) if shown.startswith(_ROOT) else shown


def explain(name: str, known: Mapping[str, Any]) -> str:
    """The sentence for a full name such as pyvqnet.tensor.topK. known: the names of the module it was looked for in."""
    shown = name.replace("pyvqnet.tensor.tensor.", "pyvqnet.tensor.")
    found = longest_prefix(shown, ELSEWHERE)
    if found is not None:
        use, use_zh = found[1]
        return say(f"{name} is not in unisono.compat.vqnet; {use}", f"unisono.compat.vqnet 中没有 {name}；{use_zh}")
    near = nearest(shown.rpartition(".")[2], known, cutoff=0.7)
    meant = (f" (did you mean {near}?)", f"（是否想写 {near}？）") if near else ("", "")
    return say(
        f"{name} is not one of the names that unisono.compat.vqnet has{meant[0]}; torch's own functions and modules "
        "take QTensors and work in a pyvqnet.nn.Module, so use torch's instead",
        f"unisono.compat.vqnet 中没有 {name}{meant[1]}；torch 自己的函数和模块接受 QTensor，也可用在 pyvqnet.nn.Module "
        "中，请用 torch 的",
    )


def missing_names(module: str) -> Callable[[str], Any]:
    """A module's __getattr__."""
    return answer_with(lambda name, known: explain(f"{vqnet_name(module)}.{name}", known), module)
