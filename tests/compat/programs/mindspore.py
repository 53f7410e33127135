"""Document 003: MindSpore's program; its losses are those of one device, its graphs those that the document prints."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from tests.compat.programs.texts import Row, Size, cut, fences, run

MINDSPORE = ("--as", "mindspore")
# The document prints the parts of one program, without the lines that import what they use.
MINDSPORE_IMPORTS = """
import mindspore as ms
import mindspore.dataset as ds
from mindspore import Parameter, ops
from mindspore.common.initializer import initializer
from mindspore.communication import get_rank, init
from mindspore.nn import Cell, Momentum, MSELoss
from mindspore.train import LossMonitor, Model, ModelCheckpoint
"""
SWAPPED = "get_dataset(var_single_batch_size, var_step_per_epoch, var_in_dim, var_out_dim)"
IN_ORDER = "get_dataset(var_single_batch_size, var_in_dim, var_out_dim, var_step_per_epoch)"
_LOSS = re.compile(r"epoch: (\d+) step: (\d+), loss is (\S+)")
# An op of a graph: its kind, its name in the net, its strategy, and the types of its inputs and outputs.
_OP = re.compile(r"= (\w+)\(.*\{instance name: (\w+)\}.*\{in_strategy: (.*)\}\n\s+: (.*)")
_SUM = re.compile(r"= (AllReduce|ReduceScatter|StridedSlice)\((?:.*group_ranks: ([\d-]+))?.*\n\s+: (.*)")


def mindspore_program() -> str:
    return MINDSPORE_IMPORTS + "\n".join(each.code for each in fences("003") if each.language == "python")


def compare_refusal(row: Row, size: Size, folder: Path) -> str:
    """As printed: one sentence that says which arguments are swapped."""
    reported = ""
    try:
        run(mindspore_program(), row.ranks, row.options, folder / "device", "float32")
    except AssertionError as error:
        reported = str(error)
    sentences = re.findall(r"UsageError: (MatMul \(matmul\) of Net takes .*)", reported)
    assert sentences, reported or f"{row.name}: the program ran, though its dataset does not fit its net"
    for words in (
        "takes an input of 32 columns",
        "column 'input' of the dataset has shape (2, 4)",
        "var_step_per_epoch=4 as in_dim, var_in_dim=32 as out_dim and var_out_dim=16 as step_per_epoch",
        f"call {IN_ORDER}",
    ):
        assert words in sentences[-1], sentences[-1]
    return f"refused: {sentences[-1]}"


def compare_quickstart(row: Row, size: Size, folder: Path) -> str:
    """Losses against one device; strategies, shapes and groups against what the document prints of its graphs."""
    code = cut(mindspore_program(), row.cuts)
    (alone,) = run(code, 1, row.options, folder / "one" / "device", "float32")
    found = [_LOSS.findall(text) for text in run(code, row.ranks, row.options, folder / "device", "float32")]
    assert len(found[0]) == 20
    assert all(each == found[0] for each in found), f"{row.name}: ranks print different losses"
    losses = [float(loss) for *_, loss in found[0]]
    worst = max(abs(loss - float(right)) for loss, (*_, right) in zip(losses, _LOSS.findall(alone), strict=True))
    assert worst <= 1e-6, f"{row.name}: off by {worst:.1e} from one device"
    assert all(after < before for before, after in itertools.pairwise(losses))
    shown = compare_graphs(folder)
    for rank in range(row.ranks):
        assert (folder / "device" / str(rank) / "CKP-5_4.ckpt").exists()
    return f"{len(losses)} losses, falling, equal on {row.ranks} ranks, off by {worst:.0e} from one device; {shown}"


def compare_graphs(folder: Path) -> str:
    begin, execute = (each.code for each in fences("003") if "primitive_attrs" in each.code)
    graphs = folder / "saved_graph" / "rank_0"
    (our_begin,), (our_execute,) = (list(graphs.glob(f"{name}_*.ir")) for name in ("step_parallel_begin", "18_execute"))
    texts = [path.read_text(encoding="utf-8") for path in (our_begin, our_execute)]
    for theirs, ours in zip((begin, execute), texts, strict=True):
        expected = _OP.findall(theirs)
        assert [name for _, name, *_ in expected] == ["matmul", "relu", "matmul2"]
        assert _OP.findall(ours) == expected
    (_, group, reduced), (_, _, sliced) = _SUM.findall(execute)
    before, after = reduced.partition(" -> ")[0], sliced.rpartition(" -> ")[2]
    assert _SUM.findall(texts[1])[0] == ("ReduceScatter", group, f"{before} -> {after}")
    return "strategies and shapes of the document, its AllReduce and StridedSlice as one ReduceScatter"


ROWS = [
    Row("003", "as printed", "swapped arguments", compare_refusal, 8, MINDSPORE),
    Row("003", "in order", "the quickstart", compare_quickstart, 8, MINDSPORE, {SWAPPED: IN_ORDER}, 1),
]
