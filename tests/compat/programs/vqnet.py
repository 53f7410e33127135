"""Document 000: VQNet's 33 programs. What they print is checked against what ranks gave, and training and circuits
against the same program on one rank. Files of MNIST and CIFAR-10 are drawn: small, and in their authors' formats."""

from __future__ import annotations

import ast
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.compat.programs.texts import Row, Size, cut, examples, run

VQNET = ("--as", "pyvqnet")
CLOSE = 2e-5  # of losses: the programs compute in float32
ROUNDED = 2e-4  # of sums of numbers that are printed with four digits
_TENSOR = re.compile(r"QTensor\((\[\[.*?\]\])", re.S)
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]\d+)?(?:[-+]\d+\.?\d*j)?")
Tensors = list[np.ndarray]


@dataclass(frozen=True)
class Example(Row):
    """number: which of the document's programs. show: what is printed at its end, where it prints nothing itself."""

    number: int = 0
    show: str = ""
    expect: Any = None

    @property
    def code(self) -> str:
        return cut(examples("000")[self.number][1], self.cuts)


# ---- ranks, hosts, parts ---------------------------------------------------------------------------------------------


def compare_values(row: Example, size: Size, folder: Path) -> str:
    """expect: of a rank and the number of ranks, the value that is shown at the end."""
    texts = run(row.code, row.ranks, row.options, folder, "float32", show=row.show)
    for rank, text in enumerate(texts):
        shown = ast.literal_eval(text.partition("shown: ")[2])
        assert shown == row.expect(rank, row.ranks), f"{row.name}: rank {rank} has {shown}"
    return f"{row.show} as expected on every rank"


def compare_lines(row: Example, size: Size, folder: Path) -> str:
    """expect: of a rank and the number of ranks, the lines that it prints."""
    texts = run(row.code, row.ranks, row.options, folder, prelude=[])
    for rank, text in enumerate(texts):
        lines = [line for line in text.splitlines() if "Comm_OP =" not in line and "UserWarning" not in line]
        assert lines == row.expect(rank, row.ranks), f"{row.name}: rank {rank} prints {lines}"
    return f"{len(row.expect(0, row.ranks))} lines as expected on every rank"


def _rank_lines(rank: int, ranks: int) -> list[str]:
    return [f"rank: {rank}, size {ranks}"]


def _host_lines(rank: int, ranks: int) -> list[str]:
    return [*_rank_lines(rank, ranks), f"LocalRank {rank} hosts name {socket.gethostname()}"]


def _own_part(rank: int, ranks: int) -> list[Any]:
    np.random.seed(0)  # as the prelude does in every rank
    x, y = np.random.randint(255, size=(100, 5)), np.random.randint(2, size=(100, 1))
    return [np.array_split(each, ranks)[rank].tolist() for each in (x, y)]


# ---- collectives -----------------------------------------------------------------------------------------------------


def tensors(text: str) -> Tensors:
    """The tensors that a rank prints, one after the other."""
    return [np.array([complex(each) for each in _NUMBER.findall(found)]) for found in _TENSOR.findall(text)]


def compare_tensors(row: Example, size: Size, folder: Path) -> str:
    """expect: of what ranks print first, and a rank, what it prints later."""
    found = [tensors(text) for text in run(row.code, row.ranks, row.options, folder, prelude=[])]
    firsts = [each[0] for each in found]
    for rank, (_, *later) in enumerate(found):
        expected = row.expect(firsts, rank)
        assert len(later) == len(expected), f"{row.name}: rank {rank} prints {len(later)} tensors"
        for value, right in zip(later, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=0, atol=ROUNDED, err_msg=f"{row.name}, rank {rank}")
    return "what is printed afterwards follows from what ranks print before"


def _summed(firsts: Tensors, rank: int) -> Tensors:
    return [np.sum(firsts, axis=0)]


def _gathered(firsts: Tensors, rank: int) -> Tensors:
    return [np.concatenate(firsts)]


def compare_groups(row: Example, size: Size, folder: Path) -> str:
    texts = run(row.code, row.ranks, row.options, folder, prelude=[])
    for rank, text in enumerate(texts):
        assert re.findall(r"ranks=(\[.*?\])", text) == ["[0, 1]", "[2, 3]"], text
        assert re.findall(r"Communicator\(rank=(\d), size=(\d)", text) == [(str(rank % 2), "2")], text
    return "every rank has the communicator of its own group"


# ---- training --------------------------------------------------------------------------------------------------------

SHORTER = {"epochs = 5": "epochs = 1", "step % 50 == 0": "step % 2 == 0", "{loss.item():.4f}": "{loss.item():.9f}"}
_LOSS = re.compile(r"Loss: ([\d.]+) acc ([\d.]+)")


def compare_training(row: Example, size: Size, folder: Path) -> str:
    """The losses and accuracies that are printed, against one rank's."""
    draw_mnist(folder)
    runs = [
        [np.array(_LOSS.findall(text), dtype=float) for text in _training(row.code, ranks, row.options, folder)]
        for ranks in (1, row.ranks)
    ]
    (expected,), found = runs
    assert len(expected) == 5, f"{row.name}: {len(expected)} lines of losses"
    worst = max(float(np.abs(each - expected).max()) for each in found)
    assert worst <= CLOSE, f"{row.name}: off by {worst:.1e} from one rank"
    assert expected[-1, 0] < 0.5 * expected[0, 0]
    return f"{len(expected)} losses, falling, and accuracies equal to one rank's on every rank, off by {worst:.0e}"


def _training(code: str, ranks: int, options: Sequence[str], folder: Path, show: str = "") -> list[str]:
    return run(code, ranks, options, folder / f"on {ranks}", "float32", show=show)


def compare_pipeline(row: Example, size: Size, folder: Path) -> str:
    """loss_dict on every rank, against a pipeline of one stage on one rank."""
    found = []
    for ranks in (1, row.ranks):
        draw_cifar(folder / f"on {ranks}" / "cifar10-data" / "cifar-10-batches-bin")
        code = cut(row.code, {"pipeline_parallel_size = 2": f"pipeline_parallel_size = {ranks}"})
        texts = _training(code, ranks, row.options, folder, "list(all_loss.values())")
        found.append([ast.literal_eval(text.partition("shown: ")[2]) for text in texts])
    (expected,), losses = found
    worst = max(abs(value - right) for each in losses for value, right in zip(each, expected, strict=True))
    assert len(expected) == 4
    assert len({*expected}) == 4
    assert worst <= CLOSE, f"{row.name}: off by {worst:.1e} from one rank"
    return f"{len(expected)} losses equal to one rank's on every rank, off by {worst:.0e}"


def draw_mnist(folder: Path) -> None:
    """For programs that run in a folder within: the document names the files in two ways."""
    draw = np.random.default_rng(0)
    centres = draw.integers(0, 255, (10, 28, 28))
    places = [(folder / "data" / "MNIST_data", ".")]
    places += [(folder / f"on {ranks}" / "data" / "MNIST" / "raw", "-") for ranks in (1, 2)]
    for name, count in (("train", 640), ("t10k", 64)):
        labels = draw.integers(0, 10, count).astype(np.uint8)
        images = np.clip(centres[labels] + draw.normal(0, 30, (count, 28, 28)), 0, 255).astype(np.uint8)
        for place, mark in places:
            place.mkdir(parents=True, exist_ok=True)
            header = struct.pack(">IIII", 2051, count, 28, 28)
            (place / f"{name}-images{mark}idx3-ubyte").write_bytes(header + images.tobytes())
            (place / f"{name}-labels{mark}idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def draw_cifar(folder: Path) -> None:
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    records = draw.integers(0, 256, (256, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    for name in ("data_batch_1", "test_batch"):
        (folder / f"{name}.bin").write_bytes(records.tobytes())


# ---- circuits --------------------------------------------------------------------------------------------------------


def compare_circuit(row: Example, size: Size, folder: Path) -> str:
    """Values and gradients against one rank, where global_qubit is 0."""
    show = "[batch_y.tolist(), quantum_model.params.grad.tolist()]"
    found = []
    for ranks in (1, row.ranks):
        code = cut(row.code, {'"global_qubit": 1': f'"global_qubit": {ranks - 1}'})
        texts = _training(code, ranks, row.options, folder, show)
        found.append([ast.literal_eval(text.partition("shown: ")[2]) for text in texts])
    (expected,), shown = found
    assert np.abs(expected[1]).max() > 0.01
    worst = max(float(np.abs(np.subtract(each[part], expected[part])).max()) for each in shown for part in (0, 1))
    assert worst <= 1e-5, f"{row.name}: off by {worst:.1e} from one rank"
    return f"values and 10 gradients equal to one rank's on every rank, off by {worst:.0e}"


# ---- rows ------------------------------------------------------------------------------------------------------------

Compare = Callable[[Example, Size, Path], str]


def _example(number: int, compare: Compare, expect: Any = None, ranks: int = 2, show: str = "", **own: Any) -> Example:
    title = f"{number + 1}: {examples('000')[number][0]}"
    return Example("000", "example", title, compare, ranks, VQNET, number=number, show=show, expect=expect, **own)


ROWS = [
    _example(0, compare_lines, _rank_lines),
    *(_example(number, compare_lines, _host_lines, 4) for number in range(1, 6)),
    _example(6, compare_values, lambda rank, ranks: (rank, ranks), show="(Comm_OP.getRank(), Comm_OP.getSize())"),
    _example(7, compare_values, lambda rank, ranks: rank, show="Comm_OP.getRank()"),
    _example(8, compare_values, lambda rank, ranks: ranks, show="Comm_OP.getSize()"),
    _example(9, compare_values, lambda rank, ranks: rank, show="Comm_OP.getLocalRank()"),
    _example(10, compare_values, lambda rank, ranks: None, show="Comm_OP.barrier()"),
    _example(11, compare_values, lambda rank, ranks: True, 1, show="type(Comm_OP.get_device_num()) is int"),
    _example(12, compare_tensors, _summed),
    _example(13, compare_tensors, lambda firsts, rank: [np.mean(firsts, axis=0) if rank == 1 else firsts[0]]),
    _example(14, compare_tensors, lambda firsts, rank: [firsts[1]]),
    _example(15, compare_tensors, _gathered),
    *(_example(number, compare_tensors, lambda firsts, rank: [firsts[0] * rank]) for number in (16, 17)),
    _example(18, compare_groups, ranks=4),
    _example(19, compare_tensors, _summed),
    _example(20, compare_tensors, lambda firsts, rank: [np.sum(firsts, axis=0) if rank == 0 else firsts[1]]),
    _example(21, compare_tensors, lambda firsts, rank: [firsts[0]]),
    _example(22, compare_tensors, lambda firsts, rank: [np.concatenate(firsts), firsts[rank], np.concatenate(firsts)]),
    _example(23, compare_values, _own_part, show="[x_train.tolist(), y_train.tolist()]"),
    *(_example(number, compare_lines, lambda rank, ranks: [str(rank)]) for number in (24, 25)),
    _example(26, compare_tensors, lambda firsts, rank: [firsts[1] if rank == 1 else firsts[0] + firsts[2]], 3),
    _example(
        27,
        compare_pipeline,
        cuts={
            "num_steps = 1000": "num_steps = 2",
            '"epochs":5': '"epochs":2',
            "TransformResize(256)": "TransformResize(40)",
            "TransformCenterCrop(224)": "TransformCenterCrop(32)",
            "64 * 27 * 27": "64 * 3 * 3",
        },
    ),
    *(_example(number, compare_training, cuts=SHORTER) for number in (28, 29, 30)),
    *(_example(number, compare_circuit) for number in (31, 32)),
]
