"""StepTrace: torch's profiler over some steps of a run, a trace for each rank; device_peak: FLOPs a second of a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.plan.hardware.toml import read_hardware

_FORM = re.compile(r"(\d+)(?:\.\.(\d+))?")
_KNOWN_GPUS = ("h200", "h100", "a100")  # files of plan/hardware/machines, by a part of the device's name


class StepTrace:
    """`fit(profile_steps="10..12")`: traces of these steps, counted from 1, in `profile/` of the run folder."""

    def __init__(self, steps: str | None, folder: Path | None, rank: int) -> None:
        self._first, self._last = (0, 0) if steps is None else steps_of(steps)
        self._folder, self._rank = folder, rank
        self._profiler: Any = None

    def before(self, step: int) -> None:
        if step == self._first:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            # acc_events: without it torch warns that it keeps the events of one cycle, and there is only one
            self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True, acc_events=True)
            self._profiler.start()

    def after(self, step: int) -> str:
        """After the last of the steps: write the trace; returns where it is."""
        if step != self._last or self._profiler is None or self._folder is None:
            return ""
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        steps = f"{self._first}-{self._last}" if self._last > self._first else str(self._first)
        path = self._folder / "profile" / f"steps-{steps}.rank-{self._rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"the profile of steps {steps} was not written to {path}: {error}"
        return f"profile of steps {steps}: {path}, and one for each other rank; open it in https://ui.perfetto.dev"

    def stop(self) -> None:
        """At the end of the run: drop a trace whose last step did not come."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def steps_of(text: Any) -> tuple[int, int]:
    """The first and the last step of "10..12", or of "10"."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(f'fit(profile_steps={text!r}): expected steps, counted from 1, as "10..12" or "10"')
    return first, last


def device_peak(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """FLOPs a second of matrix products by the vendor's figures, of GPUs that come with unisono."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    machine = next((each for each in _KNOWN_GPUS if each in name), None)
    if machine is None:
        return None
    return read_hardware(machine).flops.get(str(dtype or torch.float32).removeprefix("torch."))
