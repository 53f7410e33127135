"""The Chinese words of changes.py's page."""

from __future__ import annotations

TITLES = {
    "By hand (2.2.4.1)": "手动（2.2.4.1）",
    "By marks, the model itself runs (2.2.4.2.1 to 2.2.4.2.4)": "用标记，动态图（2.2.4.2.1 至 2.2.4.2.4）",
    "By marks, as a program (2.2.4.2.5 to 2.2.4.2.8; ours, Paddle's cells are those of the document's text)": (
        "用标记，静态图（2.2.4.2.5 至 2.2.4.2.8；表是我们的，飞桨一栏取自文档正文）"
    ),
    "By the Engine (2.2.4.3)": "用 Engine（2.2.4.3）",
    "Fully automatic (2.2.2; ours, the document has no program of it)": (
        "全自动（2.2.2；表是我们的，文档没有相应的程序）"
    ),
}

COLUMNS = ("`__init__` 的改动", "`forward` 的改动", "环境、策略", "包装", "数据加载", "训练循环", "行数", "程序")

# the words of cells, longest first
WORDS = {
    "loss treated specially": "loss 需特殊处理",
    "loss on one rank": "loss 只在一个进程上",
    "model parallel": "模型并行",
    "data parallel": "数据并行",
    "group sharded": "分组切分",
    "searched for": "自动搜索",
    "microbatches": "微批",
    "one device": "单卡",
    "to follow": "待补充",
    "ordinary": "普通",
    "pipeline": "流水线",
    "executor": "Executor",
    "special": "特殊",
    "2 marks": "2 个标记",
    "3 marks": "3 个标记",
    "gone": "不需要",
    "mesh": "网格",
    "plan": "方案",
    "rules": "规则",
    "yes": "有",
    "no": "无",
}

INTRODUCTION = """\
# 需要改动什么：文档 002

本页由 `python examples/seeds/002_paddle/changes.py --write` 生成；请修改该程序，不要修改本页。

文档用多种方式训练同一个网络，并逐表总结每种方式要求对单卡代码做哪些改动。下面五张表中，
三张是文档的（手动、标记、Engine），文档没有给出表的两种方式由我们补上。每格为**飞桨（取自文档）/ unisono**，
unisono 一栏由程序读取 `examples/seeds/002_paddle` 中的程序得出：
每个程序与 `single.py` 对照，其网络与普通网络对照。行数：网络和训练部分新增的行，
以及 `single.py` 中去掉的行。
它们都给出单卡的 loss 和参数：
"""

PRINTED = """
它打印 27 行，含各自的 loss 和偏差。float64 下最大偏差为 3e-16；按文档自己的宽度运行
（`--full --batches 2`，102,400，float32）时为 2e-6。
"""

DIFFERENCES = """\
## 不同之处

- 用标记时，飞桨在动态图下保留普通的训练循环；这里一步是一次调用 `trainer.step(batch)`，
  因此那里也可以有微批、调度和分组切分。
- 策略就是方案、网格或标记；不需要设置环境（只有像 `manual_mp.py` 那样自己通信的程序才需要 `uni.init`）。
- 标记写在模型旁边（`uni.mark(model, name, ...)`），所以 `forward` 保持原样。飞桨的写法（在 `forward` 中标记）也可以：
  `uni.shard_tensor(self.linear1.weight, mesh, [uni.Shard(0)])`。名为 `dp` 的轴不需要标记就切分批。
- 每个进程得到全局的批并取自己的一份；`uni.Loader` 和 `engine.dataloader` 只读取那一份。
- 每个进程上都有 loss，流水线也是，且是整个批的 loss。
- 用标记的流水线有微批和调度（1F1B、F-then-B 等），动态图和静态图都可以。
- 用标记的分组切分是在网格旁写 `zero=1`、`2` 或 `3`，用于 `uni.apply_marks` 和 `uni.to_static`。
- 这里都不需要 GPU。

## 2.2.3.5 节的显存表

GPT-3 175B，一个样本，一层和全部 96 层的激活，取自对模型的追踪：
"""

REMARK = """\
文档的数字为每层 2736、552、342、102 和 48 MB，以及 256.5、51.75、32.0625、9.5625 和 4.5 GB。关于重新计算的部分，
文档预计为 2.7%（选择性重计算），与这里相同；完全重计算时文档预计为几十倍，而这里是再做一次前向：一步的三分之一。
"""
