"""Documents 001 and 004: torch.distributed's programs and fragments, with --compat torch where they ask for GPUs.

A fragment runs with the names that the document leaves to the reader (rank, backend, model); its own lines stay as they
are. Functions called run() are put into the document's template, in the place that it leaves for them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests.compat.programs.texts import Row, Size, block_with, cut, run
from tests.ranks import free_port

TORCH = ("--compat", "torch")
IMPORTS = "import os\nimport torch\nimport torch.distributed as dist\n"
ARGS = 'import argparse\nargs = argparse.Namespace(rank=int(os.environ["RANK"]))\nbackend = "gloo"\n'


def template(function: str, last: str = "") -> str:
    """The document's template with its function run(); last: lines in the place of those that start processes."""
    program = cut(block_with("001", "mp.set_start_method"), {"29500": str(free_port())})
    head, _, tail = program.partition("def run(rank, size):")
    tail = tail.split("\n\n", 1)[1]
    return head + function + "\n" + (tail.partition("    world_size = 2")[0] + last if last else tail)


def _as_printed(code: str, folder: Path) -> list[str]:
    """Lines of `python run.py`, which starts processes of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.py").write_text(code, encoding="utf-8")
    own = {**os.environ, "PYTHONUNBUFFERED": ""}  # processes that share a pipe would tear each other's lines
    ran = subprocess.run([sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, timeout=600, env=own)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def _lines(code: str, row: Row, folder: Path) -> list[list[str]]:
    return [text.splitlines() for text in run(code, row.ranks, row.options, folder, prelude=[])]


# ---- 001 -------------------------------------------------------------------------------------------------------------


def compare_template(row: Row, size: Size, folder: Path) -> str:
    assert _as_printed(cut(block_with("001", "mp.set_start_method"), {"29500": str(free_port())}), folder) == []
    return "python run.py starts two processes, which meet and end"


def compare_messages(row: Row, size: Size, folder: Path) -> str:
    """A run() whose two processes print the same number."""
    words, value = {
        "blocking": ('"阻塞点对点通信。', "1."),
        "non-blocking": ('"非阻塞点对点通信。', "1."),
        "all_reduce": ("All-Reduce 示例", "2."),
    }[row.title]
    text = "\n".join(_as_printed(template(block_with("001", words)), folder))
    assert text.count("has data") == text.count(f"tensor({value})") == 2, text  # lines of processes may mix
    return f"both processes have tensor({value})"


def compare_mpi(row: Row, size: Size, folder: Path) -> str:
    """The document's recipe: the last lines become init_process(0, 0, run, backend='mpi')."""
    function = block_with("001", "All-Reduce 示例")
    lines = _lines(template(function, "    init_process(0, 0, run, backend='mpi')\n"), row, folder)
    data = [re.findall(r"Rank  0  has data  tensor\((\d)\.\)", "\n".join(each)) for each in lines]
    assert data == [["2"], ["2"], ["1"], ["1"]], data  # rank is the 0 that was given; the group is of ranks 0 and 1
    return "ranks 0 and 1 have the sum of their group, 2 and 3 their own"


def compare_init(row: Row, size: Size, folder: Path) -> str:
    cuts = {
        "env://": {},
        "tcp://": {"10.1.1.20:23456": f"127.0.0.1:{free_port()}"},
        "file://": {"/mnt/nfs/sharedfile": str(folder / "sharedfile")},
    }[row.title]
    blocks = {"env://": "dist.init_process_group(backend, init_method='env://')"}
    code = cut(block_with("001", blocks.get(row.title, f"init_method='{row.title}")), cuts)
    code = IMPORTS + ARGS + code + "x = torch.ones(1)\ndist.all_reduce(x)\nprint(dist.get_rank(), x.item())\n"
    lines = _lines(code, row, folder) if row.title == "env://" else _by_hand(code, row.ranks, folder)
    assert lines == [[f"{rank} 4.0"] for rank in range(4)]
    return "four ranks meet, and add up to 4"


def _by_hand(code: str, ranks: int, folder: Path) -> list[list[str]]:
    """Processes that are started one by one with their ranks, as the document's that have no launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(code, encoding="utf-8")
    words = [sys.executable, "program.py"]
    started = [
        subprocess.Popen(words, cwd=folder, env={**os.environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    return [each.communicate(timeout=300)[0].splitlines() for each in started]


def compare_streams(row: Row, size: Size, folder: Path) -> str:
    code = IMPORTS + 'rank = int(os.environ["RANK"])\n' + block_with("001", 'init_process_group("nccl", rank=rank')
    first, second = _lines(code, row, folder)
    assert [line for line in first if "unisono" not in line] == ["tensor([101])"], first
    assert second == []
    return "rank 0 prints tensor([101]), the document's value with wait_stream"


def compare_launch(row: Row, size: Size, folder: Path) -> str:
    """--local-rank is passed, set_device and the context of a device are taken, DDP gets its device_ids."""
    parts = [block_with("001", "add_argument"), "import torch\n", block_with("001", "torch.cuda.set_device")]
    parts += [block_with("001", "with torch.cuda.device").replace("...", "print(args.local_rank)")]
    parts += [block_with("001", "YOUR BACKEND").replace("YOUR BACKEND", "nccl")]
    parts += ["torch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1).to(args.local_rank)\n"]
    parts += [block_with("001", "torch.nn.parallel.DistributedDataParallel(model")]
    parts += ["model(torch.full((1, 2), args.local_rank + 1.0).cuda()).sum().backward()\n"]
    parts += ["print(model.module.weight.grad.tolist())\n"]
    for rank, lines in enumerate(_lines("\n".join(parts), row, folder)):
        assert [line for line in lines if "unisono" not in line] == [str(rank), "[[1.5, 1.5]]"], lines
    return "every rank has its local rank, and the mean of both gradients"


# What the document takes from elsewhere: MNIST by torchvision, here 32 drawn samples, and the network of an example.
TORCHVISION = """
import torch
from types import SimpleNamespace
class MNIST(torch.utils.data.Dataset):
    def __init__(self, *args, **kwargs):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(512, 12, generator=draw)
        self.y = self.x[:, :3].argmax(1)
    def __len__(self):
        return len(self.y)
    def __getitem__(self, index):
        return self.x[index], self.y[index]
datasets = SimpleNamespace(MNIST=MNIST)
transforms = SimpleNamespace(Compose=list, ToTensor=lambda: None, Normalize=lambda *_: None)
"""
NET = """
from math import ceil
from random import Random
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torchvision import datasets, transforms
def Net():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3), nn.LogSoftmax(1))
"""


def compare_sgd(row: Row, size: Size, folder: Path) -> str:
    """Both processes' losses, against one process that computes with the samples of both."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torchvision.py").write_text(TORCHVISION, encoding="utf-8")
    helpers = [block_with("001", words) for words in ("class DataPartitioner", "划分MNIST", "梯度平均。")]
    function = cut(block_with("001", "分布式同步SGD示例"), {"range(10)": "range(4)"})
    text = "\n".join(_as_printed(template("\n".join([NET, *helpers, function])), folder))
    lines = re.findall(r"Rank +(\d) , epoch +(\d) : +([\d.]+)", text)
    found = np.array([[float(loss) for rank, _, loss in sorted(lines) if rank == each] for each in "01"])
    expected = _sgd_alone("\n".join([NET, *helpers]), folder)
    worst = float(np.abs(found - expected).max())
    assert worst <= 1e-6, f"{row.name}: off by {worst:.1e} from one process"
    assert (found[:, -1] < found[:, 0]).all()
    return f"losses of 4 epochs equal to one process's, off by {worst:.0e}; last {found[0, -1]:.6f}"


def _sgd_alone(code: str, folder: Path) -> np.ndarray:
    """Mean losses of both parts, by epoch: gradients are of the mean over both parts' batches."""
    names: dict[str, object] = {}
    sys.path.insert(0, str(folder))
    try:
        exec("import torch\n" + code, names)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("torchvision", None)
    before = torch.get_rng_state()
    torch.manual_seed(1234)
    data = names["datasets"].MNIST()  # type: ignore[attr-defined]
    divided = names["DataPartitioner"](data, [0.5, 0.5])  # type: ignore[operator]
    loaders = [torch.utils.data.DataLoader(divided.use(part), batch_size=64, shuffle=True) for part in (0, 1)]
    model = names["Net"]()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    epochs = []
    for _ in range(4):
        state = torch.get_rng_state()
        batches = []
        for loader in loaders:  # processes begin with the same seed, and draw the same order
            torch.set_rng_state(state)
            batches.append(list(loader))
        sums = np.zeros(2)
        for pair in zip(*batches, strict=True):
            optimizer.zero_grad()
            losses = [nn.functional.nll_loss(model(x), y) for x, y in pair]
            (sum(losses) / 2).backward()
            optimizer.step()
            sums += [loss.item() for loss in losses]
        epochs.append(sums / len(batches[0]))
    torch.set_rng_state(before)
    return np.array(epochs).T


def compare_ring(row: Row, size: Size, folder: Path) -> str:
    code = IMPORTS + 'dist.init_process_group("gloo")\n' + block_with("001", "环形reduce实现")
    code += "mine = torch.arange(3.0) + dist.get_rank()\ntotal = torch.zeros(3)\nallreduce(mine, total)\n"
    code += "print(total.tolist())\n"
    assert _lines(code, row, folder) == [["[6.0, 10.0, 14.0]"]] * 4
    return "every rank has the sum of all four"


# ---- 004 -------------------------------------------------------------------------------------------------------------


def compare_dp(row: Row, size: Size, folder: Path) -> str:
    code = "import torch\nmodel = torch.nn.Linear(2, 1)\nplain = model\n" + block_with("004", "nn.DataParallel(model)")
    code += "x = torch.ones(3, 2).cuda()\nprint(torch.equal(model(x), plain(x)))\n"
    assert _lines(code, row, folder) == [["True"]]
    return "the outputs of the model itself"


def compare_ddp(row: Row, size: Size, folder: Path) -> str:
    """On two ranks with batches of 25: the parameters of one rank with batches of 50."""
    program = block_with("004", "torch.nn.parallel")
    saved = []
    for ranks, code in ((2, program), (1, cut(program, {"batch_size = 25": "batch_size = 50"}))):
        run(code, ranks, row.options, folder / str(ranks), "float32")
        saved.append(torch.load(folder / str(ranks) / "99.ckpt"))
    assert int(saved[0].pop("cnt")) == int(saved[1].pop("cnt")) == 200
    worst = max(float((saved[0][name] - value).abs().max()) for name, value in saved[1].items())
    assert worst <= 1e-5, f"{row.name}: off by {worst:.1e} from one rank"
    return f"the saved parameters after 100 epochs equal to one rank's, off by {worst:.0e}"


ROWS_001 = [
    Row("001", "设置模板", "the template", compare_template),
    *(
        Row("001", section, title, compare_messages)
        for section, title in (("点对点", "blocking"), ("点对点", "non-blocking"), ("集合通信", "all_reduce"))
    ),
    Row("001", "MPI后端", "the recipe of MPI", compare_mpi, 4, (*TORCH, "--backend", "mpi")),
    *(Row("001", "初始化方法", title, compare_init, 4) for title in ("env://", "tcp://", "file://")),
    Row("001", "同步和异步", "streams and nccl", compare_streams, 2, TORCH),
    Row("001", "Launch utility", "a launched script", compare_launch, 2, TORCH),
    Row("001", "分布式训练", "synchronous SGD", compare_sgd),
    Row("001", "Ring-Allreduce", "allreduce", compare_ring, 4),
]
ROWS_004 = [
    Row("004", "DP", "DataParallel", compare_dp, 1, TORCH),
    Row("004", "DDP", "DDP", compare_ddp, 2, TORCH),
]
