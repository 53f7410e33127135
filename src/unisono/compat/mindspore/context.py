"""MindSpore's settings: set_context and set_auto_parallel_context.

    mode, device_target, device_id   taken as they are: a net is always traced, and runs on the devices that there are
    save_graphs, save_graphs_path    whether and where each rank's program is written (ir.py)
    parallel_mode                    stand_alone, data_parallel, semi_auto_parallel, auto_parallel
    search_mode                      sharding_propagation, recursive_programming, dynamic_programming: uni.to_static's
                                     search="propagate", "recursive", "dynamic"
    dataset_strategy, full_batch     whether a rank's batch is its part of the global one, or all of it
    device_num                       must be the number of ranks
    enable_parallel_optimizer        optimizer state is shared out among the ranks of the data axis: ZeRO 1
    gradients_mean                   the loss is that of the global batch; see below

A setting that would change the result and is not here is refused; one that only says how, such as a fusion of
collectives, is taken and ignored.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from unisono.comm.rendezvous import world
from unisono.compat.language import say
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.errors import UsageError

__getattr__ = missing_names(__name__)

GRAPH_MODE = 0
PYNATIVE_MODE = 1


class ParallelMode:
    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


SEARCHES = {
    "sharding_propagation": "propagate",
    "recursive_programming": "recursive",
    "dynamic_programming": "dynamic",
}
_PLAIN: dict[str, Any] = {
    "mode": PYNATIVE_MODE,
    "device_target": "CPU",
    "device_id": 0,
    "save_graphs": 0,
    "save_graphs_path": ".",
}
_PLAIN_IGNORED = (
    "max_device_memory", "memory_optimize_level", "max_call_depth", "enable_graph_kernel", "graph_kernel_flags",
    "enable_compile_cache", "compile_cache_path", "runtime_num_threads", "deterministic", "pynative_synchronize",
    "mempool_block_size", "enable_reduce_precision", "ascend_config", "gpu_config", "jit_syntax_level",
    "inter_op_parallel_num", "precompile_only", "print_file_path", "env_config_path", "reserve_class_name_in_scope",
)  # fmt: skip
_PARALLEL: dict[str, Any] = {
    "device_num": None,
    "global_rank": None,
    "gradients_mean": False,
    "parallel_mode": ParallelMode.STAND_ALONE,
    "search_mode": "recursive_programming",
    "dataset_strategy": "data_parallel",
    "enable_parallel_optimizer": False,
    "pipeline_stages": 1,
    "grad_accumulation_step": 1,
}
_PARALLEL_IGNORED = (
    "gradient_fp32_sync", "loss_repeated_mean", "parameter_broadcast", "all_reduce_fusion_config", "comm_fusion",
    "enable_alltoall", "communi_parallel_mode", "optimizer_weight_shard_size", "optimizer_weight_shard_aggregated_save",
    "parallel_optimizer_config", "sharding_propagation", "fusion_threshold",
)  # fmt: skip
_STRATEGIES_WRITTEN = (
    "set_context(save_graphs=2) writes the strategies of every op",
    "set_context(save_graphs=2) 会写出各算子的策略",
)
# what to use instead, in English and in Chinese
_REFUSED = {
    "strategy_ckpt_load_file": (
        "strategies are not read from files: write them as .shard(...) in the net",
        "策略不从文件读取，请在网络中写成 .shard(...)",
    ),
    "strategy_ckpt_save_file": _STRATEGIES_WRITTEN,
    "strategy_ckpt_config": _STRATEGIES_WRITTEN,
    "pipeline_config": (
        "stages of a pipeline are uni.Plan(pp=...) of uni.parallelize",
        "流水线的阶段请用 uni.parallelize 的 uni.Plan(pp=...)",
    ),
    "group_ckpt_save_file": (
        "checkpoints with integrated_save=True, the default, have whole tensors",
        "integrated_save=True（默认）的检查点含有完整的张量",
    ),
}


@dataclass
class _Settings:
    plain: dict[str, Any] = field(default_factory=lambda: dict(_PLAIN))
    parallel: dict[str, Any] = field(default_factory=lambda: dict(_PARALLEL))


_settings = _Settings()


def set_context(**kwargs: Any) -> None:
    for name, value in kwargs.items():
        if name in _PLAIN_IGNORED:
            continue
        _require_known("set_context", name, _PLAIN, _PLAIN_IGNORED)
        _settings.plain[name] = value
    if _settings.plain["mode"] not in (GRAPH_MODE, PYNATIVE_MODE):
        raise UsageError(
            say(
                f"set_context(mode={kwargs.get('mode')!r}): expected GRAPH_MODE or PYNATIVE_MODE",
                f"set_context(mode={kwargs.get('mode')!r})：应为 GRAPH_MODE 或 PYNATIVE_MODE",
            )
        )
    level = _settings.plain["save_graphs"]
    if level not in (0, 1, 2, 3):  # False and True are 0 and 1
        raise UsageError(
            say(
                f"set_context(save_graphs={level!r}): expected 0, 1, 2 or 3 (which adds a drawing)",
                f"set_context(save_graphs={level!r})：应为 0、1、2 或 3（3 另外画图）",
            )
        )


def get_context(attr_key: str) -> Any:
    _require_known("get_context", attr_key, _PLAIN, ())
    return _settings.plain[attr_key]


def set_auto_parallel_context(**kwargs: Any) -> None:
    given = dict(kwargs)
    if "auto_parallel_search_mode" in given:
        given["search_mode"] = given.pop("auto_parallel_search_mode")
    if "full_batch" in given:
        given["dataset_strategy"] = "full_batch" if given.pop("full_batch") else "data_parallel"
    for name, value in given.items():
        if name in _REFUSED:
            raise UsageError(
                say(
                    f"set_auto_parallel_context({name}=...) has no counterpart here: {_REFUSED[name][0]}",
                    f"set_auto_parallel_context({name}=...) 在这里没有对应：{_REFUSED[name][1]}",
                )
            )
        if name in _PARALLEL_IGNORED:
            continue
        _require_known("set_auto_parallel_context", name, _PARALLEL, _PARALLEL_IGNORED)
        _require_value(name, value)
        _settings.parallel[name] = value


def get_auto_parallel_context(attr_key: str) -> Any:
    if attr_key == "full_batch":
        return _settings.parallel["dataset_strategy"] == "full_batch"
    attr_key = "search_mode" if attr_key == "auto_parallel_search_mode" else attr_key
    _require_known("get_auto_parallel_context", attr_key, _PARALLEL, ())
    return _settings.parallel[attr_key]


def reset_auto_parallel_context() -> None:
    _settings.parallel = dict(_PARALLEL)


def reset_context() -> None:
    """All settings as in a new process."""
    _settings.plain = dict(_PLAIN)
    reset_auto_parallel_context()


def has_strategies() -> bool:
    """Whether `.shard(...)` of ops counts: in MindSpore's two modes of operator-level parallelism, on many ranks."""
    counts = _settings.parallel["parallel_mode"] in (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
    return counts and world.is_initialized() and world.world().size > 1


def _require_known(function: str, name: str, known: dict[str, Any], ignored: tuple[str, ...]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, (*known, *ignored), 1)
        if close:
            hint = say(f"; did you mean {close[0]}?", f"；是否想写 {close[0]}？")
        else:
            hint = say(f"; expected {', '.join(known)}", f"；应为 {', '.join(known)} 之一")
        raise UsageError(
            say(
                f"{function}({name}): unisono does not have this setting of MindSpore{hint}",
                f"{function}({name})：unisono 没有 MindSpore 的这个设置{hint}",
            )
        )


_CHOICES: dict[str, tuple[str, ...]] = {"parallel_mode": ParallelMode.MODE_LIST, "search_mode": tuple(SEARCHES)}


def _require_value(name: str, value: Any) -> None:
    where = f"set_auto_parallel_context({name}={value!r})"
    if name in _CHOICES and value not in _CHOICES[name]:
        close = difflib.get_close_matches(str(value), _CHOICES[name], 1)
        hint = say(f"did you mean {close[0]!r}? ", f"是否想写 {close[0]!r}？") if close else ""
        raise UsageError(
            say(
                f"{where}: {hint}expected one of {', '.join(_CHOICES[name])}",
                f"{where}：{hint}应为 {', '.join(_CHOICES[name])} 之一",
            )
        )
    if value == ParallelMode.HYBRID_PARALLEL:
        raise UsageError(
            say(
                f"{where}: MindSpore leaves the collectives of this mode to the net, and nothing here would "
                "check them; use semi_auto_parallel with .shard(...), or auto_parallel",
                f"{where}：MindSpore 在此模式下由网络自己做集合通信，这里无法检查；请用 semi_auto_parallel 和 "
                ".shard(...)，或用 auto_parallel",
            )
        )
    if name in ("pipeline_stages", "grad_accumulation_step") and value != 1:
        raise UsageError(
            say(
                f"{where}: MindSpore would cut the net or the batch; here that is uni.Plan(pp=..., "
                "microbatches=...) of uni.parallelize, and this setting must be 1",
                f"{where}：MindSpore 会切分网络或批；这里请用 uni.parallelize 的 uni.Plan(pp=..., "
                "microbatches=...)，此设置须为 1",
            )
        )
    if name == "dataset_strategy":
        _require_dataset_strategy(where, value)


def _require_dataset_strategy(where: str, value: Any) -> None:
    if value in ("data_parallel", "full_batch"):
        return
    numbers = isinstance(value, tuple | list) and all(
        isinstance(each, tuple | list) and all(isinstance(n, int) and n > 0 for n in each) for each in value
    )
    if not numbers or not value:
        raise UsageError(
            say(
                f"{where}: expected 'data_parallel', 'full_batch', or for each column the number of shards "
                "along each dim, such as ((8, 1), (8, 1))",
                f"{where}：应为 'data_parallel'、'full_batch'，或每一列各维的切分数，如 ((8, 1), (8, 1))",
            )
        )
