"""The hardware file of a machine that has been measured, as text."""

from __future__ import annotations

import platform
from typing import Any

import torch

from unisono.plan.measure import Figures


def written(figures: Figures, ranks: int, is_gpu: bool) -> str:
    """A hardware file."""
    device = torch.cuda.get_device_properties(0) if is_gpu else None
    name = device.name if device else f"{ranks} ranks on {platform.machine()} cores"
    memory = device.total_memory if device else _host_memory() * figures["hosts"] / ranks
    main = "bfloat16" if is_gpu else "float32"
    backward = figures.get("backward", ())
    peaks = {dtype: max(rate for _, rate in (*points, *backward)) for dtype, points in figures["flops"].items()}
    link = _link(figures, ranks)
    lines = [
        f"# Measured by `unisono bench hardware` with torch {torch.__version__}.",
        f'name = "{name}"',
        "",
        "[machine]",
        f"devices_per_node = {max(torch.cuda.device_count(), 1) if is_gpu else ranks}",
        *([] if is_gpu else [f"cores = {figures['cores']}"]),
        "",
        "[device]",
        f"memory = {memory:.4g}",
        f"memory_bandwidth = {figures['bandwidth']:.4g}",
        f"op_overhead = {figures['overhead']:.3g}",
        *([] if not is_gpu else ["asynchronous = true", f"library_memory = {figures['library']:.4g}"]),
        *_of_host(figures),
        *([f"dropout_overhead = {figures['dropout']:.3g}"] if "dropout" in figures else []),
        f"step_overhead = {figures.get('step', 0.0):.3g}",
        f"microbatch_overhead = {figures.get('microbatch', 0.0):.3g}",
        *(f"{key}_overhead = {figures[key]:.3g}" for key in ("stage", "post") if key in figures),
        f"split_overhead = {figures.get('split', 0.0):.3g}",
        f"recompute_overhead = {figures.get('recompute', 0.0):.3g}",
        f"optimizer_rate = {figures['optimizer']:.4g}",
        *([] if is_gpu else [f"looped_optimizer_rate = {figures['looped']:.4g}"]),
        *(f"{key} = {figures[key]:.4g}" for key in ("piece_rate", "unit_rate") if key in figures),
        f"overlap = {0.8 if is_gpu else 0.0}  # on CPUs messages take the time of the cores that compute",
        "margin = 0.05",
        f"dropout_mask = {0 if is_gpu else 4}",
        "",
        "[flops]",
        *(f"{dtype} = {peak:.4g}" for dtype, peak in peaks.items()),
        "",
        "[efficiency]",
        f"matmul = {_curve(figures['flops'][main], peaks[main])}",
        *([f"matmul_backward = {_curve(figures['backward'], peaks[main])}"] if "backward" in figures else []),
        *([f"attention = {_curve(figures['attention'], peaks[main])}"] if "attention" in figures else []),
        *([] if not is_gpu else _of_float32(figures, peaks["float32"])),
        "memory = 1.0",
        *([f"together = {figures['together']:.4f}"] if "together" in figures else []),
        "",
        "[ops]  # bytes a second, forward and backward",
        *(f"{op} = [{ahead:.4g}, {back:.4g}]" for op, (ahead, back) in figures["ops"].items()),
        "",
        *(line for kind, measured in figures.get("matrices", {}).items() for line in _matrices(kind, measured)),
        "[intra_node]",
        *link,
        "",
        "[inter_node]  # not measured: as within the node",
        *link[:2],
    ]
    return "\n".join(lines) + "\n"


def _of_host(figures: Figures) -> list[str]:
    lines = []
    if "message" in figures:
        lines.append(f"message_overhead = {figures['message']:.3g}")
    for key in ("gradient", "parameter"):
        if key in figures:
            lines.append(f"{key}_overhead = [{', '.join(f'{value:.3g}' for value in figures[key])}]  # by ZeRO's stage")
    return lines


def _matrices(kind: str, measured: dict[str, list[Any]]) -> list[str]:
    return [
        f"[{kind}]  # seconds of a call, and of each matrix of queries by keys by its elements",
        *(f"{key} = [{', '.join(f'{each:.3g}' for each in measured[key])}]" for key in ("call", "softmax_width")),
        *(f"{key} = {_points(measured[key])}" for key in ("forward", "backward")),
        "",
    ]


def _of_float32(figures: Figures, peak: float) -> list[str]:
    return [
        f"matmul_float32 = {_curve(figures['flops']['float32'], peak)}",
        f"attention_float32 = {_curve(figures['attention_float32'], peak)}",
    ]


def _link(figures: Figures, ranks: int) -> list[str]:
    links = figures["links"]
    if not links:
        return ["bandwidth = 1e11  # not measured: one rank", "latency = 1e-5"]
    small, large = links["all_gather"][0], links["all_gather"][-1]
    bandwidth = (ranks - 1) / ranks * large[0] / max(large[1] - small[1], 1e-9)
    lines = [f"bandwidth = {bandwidth:.4g}", f"latency = {small[1] / (ranks - 1):.3g}", f"ranks = {ranks}"]
    for name, points in links.items():
        lines.append(f"{name} = {_points(points)}")
    return lines


def _curve(points: list[tuple[float, float]], peak: float) -> str:
    return "[" + ", ".join(f"[{size:.4g}, {min(rate / peak, 1.0):.4f}]" for size, rate in points) + "]"


def _points(points: list[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{size:.0f}, {seconds:.3g}]" for size, seconds in points) + "]"


def _host_memory() -> float:
    with open("/proc/meminfo") as file:
        return float(file.readline().split()[1]) * 1024
