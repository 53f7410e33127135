"""Names of Paddle's that are not here: what Paddle has there, and what works instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unisono.compat.language import say
from unisono.compat.missing import answer_with, longest_prefix, nearest

_ROOT = "unisono.compat.paddle"

# What Paddle does under a name, and what to use here, in English and in Chinese.
ELSEWHERE: dict[str, tuple[str, str, str, str]] = {
    "paddle.amp": (
        "trains in half precision",
        'use uni.Engine(..., precision="bf16"), docs/training.md',
        "用半精度训练",
        '请用 uni.Engine(..., precision="bf16")，见 docs/training.md',
    ),
    "paddle.vision": (
        "has datasets, transforms and models of images",
        "use torchvision's, which give torch tensors",
        "提供图像数据集、变换和模型",
        "请用 torchvision，它给出 torch 张量",
    ),
    "paddle.jit": (
        "compiles and saves a model",
        "use paddle.distributed.to_static for a program on ranks, or compile=True in a plan, docs/compile.md",
        "编译并保存模型",
        "请用 paddle.distributed.to_static，或在方案中写 compile，见 docs/compile.md",
    ),
    "paddle.Model": (
        "trains with fit and evaluate",
        "use uni.Engine, which has both, docs/training.md",
        "用 fit 和 evaluate 训练",
        "请用 uni.Engine，见 docs/training.md",
    ),
    "paddle.hub": (
        "loads published models",
        "use Hugging Face's hub, docs/huggingface.md",
        "加载已发布的模型",
        "请用 Hugging Face，见 docs/huggingface.md",
    ),
    "paddle.inference": (
        "deploys a saved model",
        "export weights with uni.export_weights",
        "部署已保存的模型",
        "请用 uni.export_weights 导出权重",
    ),
    "paddle.distributed.launch": (
        "starts a program on ranks",
        "start it with: unisono run --as paddle -n 2 program.py",
        "在多个进程上启动程序",
        "请用 unisono run --as paddle -n 2 program.py 启动",
    ),
    "paddle.distributed.spawn": (
        "starts a function on ranks",
        "use uni.spawn(function, 2), or unisono run --as paddle -n 2 program.py",
        "在多个进程上启动函数",
        "请用 uni.spawn(function, 2) 或 unisono run --as paddle -n 2 program.py",
    ),
    "paddle.distributed.rpc": (
        "calls functions of other processes",
        "use uni.init() and its communicator, docs/communication.md",
        "调用其它进程的函数",
        "请用 uni.init() 的通信器，见 docs/communication.md",
    ),
    "paddle.optimizer.lr": (
        "has schedules of the learning rate",
        "give a number and change it with optimizer.set_lr(value)",
        "提供学习率策略",
        "请给出数值，并用 optimizer.set_lr(value) 修改",
    ),
    "paddle.nn.ClipGradByGlobalNorm": (
        "clips gradients by their norm",
        "use uni.Engine(..., clip=1.0) or uni.parallelize(..., clip=1.0)",
        "按范数裁剪梯度",
        "请用 uni.Engine(..., clip=1.0) 或 uni.parallelize(..., clip=1.0)",
    ),
}


def paddle_name(name: str) -> str:
    """A module's name as Paddle's programs write it."""
    return "paddle" + name.removeprefix(_ROOT) if name.startswith(_ROOT) else name


def explain(name: str, known: Mapping[str, Any]) -> str:
    """The sentence for a full name such as paddle.vision. known: the names of the module it was looked for in."""
    found = longest_prefix(name, ELSEWHERE)
    if found is not None:
        at, (does, use, does_zh, use_zh) = found
        return say(
            f"{name} is not in unisono.compat.paddle: in Paddle {at} {does}; here {use}",
            f"unisono.compat.paddle 中没有 {name}：飞桨的 {at} {does_zh}；{use_zh}",
        )
    owner, _, last = name.rpartition(".")
    near = nearest(last, known)
    meant = (f" (did you mean {owner}.{near}?)", f"（是否想写 {owner}.{near}？）") if near else ("", "")
    return say(
        f"{name} is not in unisono.compat.paddle, which has the names of docs/paddle.md{meant[0]}; where Paddle has "
        "more, torch's own functions take these tensors and layers too",
        f"unisono.compat.paddle 中没有 {name}，已有的名字见 docs/zh/paddle.md{meant[1]}；飞桨的其它功能可直接用 "
        "torch 的函数，"
        "它们接受这里的张量和层",
    )


def missing_names(module: str) -> Callable[[str], Any]:
    """A module's __getattr__."""
    return answer_with(lambda name, known: explain(f"{paddle_name(module)}.{name}", known), module)
