"""Names of VQNet's that are not here: one sentence, with the nearest name that is and what works instead.

__getattr__ = missing_names(__name__, globals())        # at the end of a module
"""

from __future__ import annotations

import difflib
import dis
import sys
from collections.abc import Callable, Mapping
from typing import Any

from unisono.compat.language import say
from unisono.errors import UsageError

_ROOT = "unisono.compat.vqnet"
_OTHERS = {f"{_ROOT}.seed": "pyvqnet.utils"}  # modules that VQNet calls otherwise


class MissingName(UsageError, AttributeError):
    """A name of VQNet's that unisono.compat.vqnet does not have."""


class MissingImport(UsageError, ImportError):
    """The same, where a program imports it."""


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
    parts = shown.split(".")
    for length in range(len(parts), 1, -1):
        found = ELSEWHERE.get(".".join(parts[:length]))
        if found is not None:
            return say(
                f"{name} is not in unisono.compat.vqnet; {found[0]}", f"unisono.compat.vqnet 中没有 {name}；{found[1]}"
            )
    listed = [each for each in known if not each.startswith("_")]
    near = difflib.get_close_matches(parts[-1], listed, 1, cutoff=0.7)
    meant = (f" (did you mean {near[0]}?)", f"（是否想写 {near[0]}？）") if near else ("", "")
    return say(
        f"{name} is not one of the names that unisono.compat.vqnet has{meant[0]}; torch's own functions and modules "
        "take QTensors and work in a pyvqnet.nn.Module, so use torch's instead",
        f"unisono.compat.vqnet 中没有 {name}{meant[1]}；torch 自己的函数和模块接受 QTensor，也可用在 pyvqnet.nn.Module "
        "中，请用 torch 的",
    )


def missing_names(module: str, known: dict[str, Any]) -> Callable[[str], Any]:
    """A module's __getattr__."""

    def missing(name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself, such as __path__
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = explain(f"{vqnet_name(module)}.{name}", known)
        raise MissingImport(text) if _is_import() else MissingName(text)

    return missing


def _is_import() -> bool:
    """Whether `from module import name` asks, which would replace an AttributeError's text by its own."""
    frame = sys._getframe(2)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM" if frame.f_lasti >= 0 else False
