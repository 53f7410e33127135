"""The Hardware of a machine whose figures have been measured."""

from __future__ import annotations

import platform
from typing import Any

import torch

from unisono.plan.hardware.spec import AttentionTime, Curve, Hardware, Link

Figures = dict[str, Any]  # by name, as `machine.measured` and the modules beside it give them

_SECONDS = ("step", "microbatch", "stage", "post", "split", "recompute", "dropout", "message")  # ..._overhead
_OF_STAGES = ("gradient", "parameter")  # ..._overhead, by ZeRO's stage


def hardware_of(figures: Figures, ranks: int, is_gpu: bool) -> Hardware:
    device = torch.cuda.get_device_properties(0) if is_gpu else None
    main = "bfloat16" if is_gpu else "float32"
    backward = figures.get("backward", ())
    peaks = {dtype: max(rate for _, rate in (*points, *backward)) for dtype, points in figures["flops"].items()}
    others = {"matmul_backward": (backward, main)}
    if is_gpu:
        others["matmul_float32"] = (figures["flops"]["float32"], "float32")
        others["attention_float32"] = (figures["attention_float32"], "float32")
    link = _link(figures["links"], ranks)
    return Hardware(
        name=device.name if device else f"{ranks} ranks on {platform.machine()} cores",
        devices_per_node=max(torch.cuda.device_count(), 1) if is_gpu else ranks,
        cores=None if is_gpu else figures["cores"],
        memory=float(device.total_memory) if device else _host_memory() * figures["hosts"] / ranks,
        memory_bandwidth=figures["bandwidth"],
        op_overhead=figures["overhead"],
        asynchronous=is_gpu,
        library_memory=figures.get("library", 0.0),
        optimizer_rate=figures["optimizer"],
        looped_optimizer_rate=figures.get("looped", 0.0),
        overlap=0.8 if is_gpu else 0.0,  # on CPUs messages take the time of the cores that compute
        dropout_mask=0.0 if is_gpu else 4.0,
        flops=peaks,
        together=figures.get("together", 1.0),
        rates=figures["ops"],
        attention_times={kind: _attention(of_kind) for kind, of_kind in figures.get("matrices", {}).items()},
        curves={name: _curve(points, peaks[dtype]) for name, (points, dtype) in others.items() if points},
        intra_node=link,
        inter_node=Link(link.bandwidth, link.latency),  # not measured: as within the node
        matmul=_curve(figures["flops"][main], peaks[main]),
        attention=_curve(figures.get("attention", figures["flops"][main]), peaks[main]),
        **_measured(figures),
    )


def _measured(figures: Figures) -> dict[str, Any]:
    """The fields that are figures as they are, where those have been measured."""
    seconds = {f"{name}_overhead": figures[name] for name in _SECONDS if name in figures}
    by_stage = {f"{name}_overhead": tuple(figures[name]) for name in _OF_STAGES if name in figures}
    return seconds | by_stage | {name: figures[name] for name in ("piece_rate", "unit_rate") if name in figures}


def _attention(measured: dict[str, list[Any]]) -> AttentionTime:
    return AttentionTime(*(tuple(measured[key]) for key in ("call", "forward", "backward", "softmax_width")))


def _link(measured: dict[str, list[tuple[float, float]]], ranks: int) -> Link:
    if not measured:
        return Link(1e11, 1e-5)  # one rank: nothing is measured
    small, large = measured["all_gather"][0], measured["all_gather"][-1]
    bandwidth = (ranks - 1) / ranks * large[0] / max(large[1] - small[1], 1e-9)
    curves = tuple((name, tuple(points)) for name, points in measured.items())
    return Link(bandwidth, small[1] / (ranks - 1), curves, ranks)


def _curve(points: list[tuple[float, float]], peak: float) -> Curve:
    """(operations of a call, operations a second) as shares of the peak."""
    return tuple((size, min(rate / peak, 1.0)) for size, rate in points)


def _host_memory() -> float:
    with open("/proc/meminfo") as file:
        return float(file.readline().split()[1]) * 1024
