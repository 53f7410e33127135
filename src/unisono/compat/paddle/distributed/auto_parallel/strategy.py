"""Strategy: what the Engine is to do besides the marks. Data parallel by default."""

from __future__ import annotations

import difflib
from typing import Any

from unisono.compat.language import say
from unisono.errors import UsageError


class _Section:
    """Settings by name; one that is not known is refused."""

    _name: str

    def __init__(self, name: str, **defaults: Any) -> None:
        self.__dict__.update(defaults, _name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            known = [each for each in self.__dict__ if not each.startswith("_")]
            near = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                say(
                    f"strategy.{self._name}.{name} = {value!r}{meant}: Paddle has more settings; here "
                    f"{', '.join(known)} count, and for the rest there is uni.Plan, docs/parallel.md",
                    f"strategy.{self._name}.{name} = {value!r}：飞桨有更多设置；这里只有 {', '.join(known)}，"
                    "其余请用 uni.Plan，见 docs/parallel.md",
                )
            )
        self.__dict__[name] = value


class Strategy:
    """`sharding.enable`, `sharding.stage` and `sharding.degree`; `pipeline.enable`, `pipeline.accumulate_steps`,
    `pipeline.micro_batch_size` and `pipeline.schedule_mode`."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.auto_mode = "semi"
        self.sharding: Any = _Section("sharding", enable=False, stage=1, degree=-1)
        self.pipeline: Any = _Section(
            "pipeline", enable=False, schedule_mode="1F1B", micro_batch_size=1, accumulate_steps=1
        )
        for name, values in (config or {}).items():
            for key, value in values.items():
                setattr(getattr(self, name), key, value)

    def zero(self, ranks: int) -> int:
        """The stage of ZeRO; 0 where parameters are not shared."""
        if not self.sharding.enable:
            return 0
        if self.sharding.stage not in (1, 2, 3):
            raise UsageError(
                say(
                    f"strategy.sharding.stage={self.sharding.stage!r}: as in Paddle, 1, 2 or 3",
                    f"strategy.sharding.stage={self.sharding.stage!r}：与飞桨相同，应为 1、2 或 3",
                )
            )
        return int(self.sharding.stage)

    def shard(self, ranks: int) -> int:
        """Over how many data ranks parameters are shared; 0 for all of them."""
        degree = self.sharding.degree
        if not self.sharding.enable or degree in (-1, ranks):
            return 0
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 2 or ranks % degree:
            raise UsageError(
                say(
                    f"strategy.sharding.degree={degree!r} does not divide the {ranks} data ranks of the job, which "
                    "Paddle "
                    f"asserts too; give a divisor of {ranks}, at least 2",
                    f"strategy.sharding.degree={degree!r} 不能整除作业的 {ranks} 个数据并行进程，飞桨同样会断言失败；"
                    f"请给出 {ranks} 的约数，且不小于 2",
                )
            )
        return degree
