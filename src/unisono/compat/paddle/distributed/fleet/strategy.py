"""DistributedStrategy: the degrees of parallelism and what goes with them; checked when they are set."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from unisono.compat.language import say
from unisono.compat.paddle.distributed.environment import Degrees
from unisono.errors import UsageError

_HYBRID = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree", "order")
_PIPELINE = ("accumulate_steps", "micro_batch_size", "schedule_mode", "enable_partial_send_recv", "p2p_cache_shape")
_SCHEDULES = {"1F1B": "1f1b", "FThenB": "f-then-b", "F-then-B": "f-then-b"}


class DistributedStrategy:
    """hybrid_configs has the degrees, pipeline_configs the microbatches."""

    def __init__(self) -> None:
        self._hybrid: dict[str, Any] = {"dp_degree": -1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}
        self._pipeline: dict[str, Any] = {"accumulate_steps": 1, "micro_batch_size": 1, "schedule_mode": "1F1B"}

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            near = difflib.get_close_matches(name, ("hybrid_configs", "pipeline_configs"), 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                say(
                    f"DistributedStrategy.{name} = {value!r}{meant}: Paddle has more settings; here hybrid_configs and "
                    "pipeline_configs count, and for the rest there is uni.Plan, docs/parallel.md",
                    f"DistributedStrategy.{name} = {value!r}：飞桨有更多设置；这里只有 hybrid_configs 和 "
                    "pipeline_configs，"
                    "其余请用 uni.Plan，见 docs/parallel.md",
                )
            )
        super().__setattr__(name, value)

    @property
    def hybrid_configs(self) -> dict[str, Any]:
        return dict(self._hybrid)

    @hybrid_configs.setter
    def hybrid_configs(self, given: Mapping[str, Any]) -> None:
        _require_known("hybrid_configs", given, _HYBRID)
        if given.get("sep_degree", 1) not in (1, -1):
            raise UsageError(
                say(
                    "hybrid_configs: sep_degree splits sequences in Paddle; here use uni.Plan(cp=...), "
                    "docs/strategies/context.md",
                    "hybrid_configs：飞桨的 sep_degree 切分序列；这里请用 uni.Plan(cp=...)，见 "
                    "docs/strategies/context.md",
                )
            )
        self._hybrid.update(given)

    @property
    def pipeline_configs(self) -> dict[str, Any]:
        return dict(self._pipeline)

    @pipeline_configs.setter
    def pipeline_configs(self, given: Mapping[str, Any]) -> None:
        _require_known("pipeline_configs", given, _PIPELINE)
        self._pipeline.update(given)

    @property
    def schedule(self) -> str:
        """The pipeline's schedule, by unisono's name."""
        return schedule_named(self._pipeline["schedule_mode"])

    def degrees(self, ranks: int) -> Degrees:
        """For a job of so many ranks; dp_degree -1 is what remains."""
        names = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree")
        dp, mp, pp, sharding = (self._hybrid[name] for name in names)
        for name, value in zip(names, (dp, mp, pp, sharding), strict=True):
            if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and (name, value) != (names[0], -1)):
                raise UsageError(
                    say(
                        f"hybrid_configs: {name}={value!r}; as in Paddle, a whole number of at least 1",
                        f"hybrid_configs：{name}={value!r}；与飞桨相同，应为不小于 1 的整数",
                    )
                )
        rest = mp * pp * sharding
        dp = max(ranks // rest, 1) if dp == -1 else dp
        found = Degrees(dp, mp, pp, sharding)
        if found.ranks != ranks:
            shown = f"dp_degree={dp}, mp_degree={mp}, pp_degree={pp}, sharding_degree={sharding}"
            raise UsageError(
                say(
                    f"hybrid_configs: {shown} need {found.ranks} ranks, but {ranks} are running; Paddle would stop "
                    "in an "
                    f"assertion: start {found.ranks} with unisono run -n {found.ranks}, or give degrees whose "
                    "product is "
                    f"{ranks}",
                    f"hybrid_configs：{shown} 需要 {found.ranks} 个进程，而作业有 {ranks} 个；飞桨会断言失败：请用 "
                    f"unisono run -n {found.ranks} 启动，或使各并行度的乘积为 {ranks}",
                )
            )
        return found


def schedule_named(mode: str) -> str:
    if mode not in _SCHEDULES:
        raise UsageError(
            say(
                f"schedule_mode={mode!r}: Paddle has more; here it is one of {', '.join(_SCHEDULES)}, and uni.Plan has "
                "others",
                f"schedule_mode={mode!r}：飞桨支持更多；这里为 {', '.join(_SCHEDULES)} 之一，其它见 uni.Plan",
            )
        )
    return _SCHEDULES[mode]


def _require_known(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                say(
                    f"{what} has {name!r}{meant}; Paddle would refuse what it does not know too, and here it is one of "
                    f"{', '.join(known)}",
                    f"{what} 中的 {name!r}{meant} 不认识；飞桨同样会拒绝未知的键，这里为 {', '.join(known)} 之一",
                )
            )
