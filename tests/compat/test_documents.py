"""The documents' programs, as printed, against one device; `python -m tests.compat.documents` prints the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.compat.documents import ROWS
from tests.compat.programs.paddle import PADDLE, paddle_cuts, printed
from tests.compat.programs.texts import FULL, Row, Size, cut, examples, fences, program_under, run

# One of each kind in the default run: groups, streams, a launched script, marks in a loop whose loss is recorded, and
# the Engine with its metrics.
QUICK = {"20: allreduce_group", "streams and nccl", "a launched script", "marks PP", "Engine MP"}
HAS_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible, which is then used")


def _cases() -> list[object]:
    return [pytest.param(row, id=row.name, marks=_marks(row)) for row in ROWS]


def _marks(row: Row) -> list[pytest.MarkDecorator]:
    marks = [] if row.title in QUICK else [pytest.mark.thorough]
    return [*marks, HAS_GPU] if "torch" in row.options else marks


@pytest.mark.parametrize("row", _cases())
def test_a_program_gives_the_result_of_one_card(row: Row, tmp_path: Path) -> None:
    if "mpi" in row.options:
        pytest.importorskip("mpi4py")
    row.compare(row, Size(), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("row", [row for row in ROWS if row.title in ("manual DP", "marks MP", "Engine PP")])
def test_after_the_documents_number_of_batches(row: Row, tmp_path: Path) -> None:
    row.compare(row, FULL, tmp_path)


@pytest.mark.thorough
def test_in_float32_as_printed(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.title == "manual MP")
    row.compare(row, Size(dtype="float32"), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("section", ["2.2.4.1.3", "2.2.4.2.2", "2.2.4.3.4"])
def test_without_seeds_ranks_agree(section: str, tmp_path: Path) -> None:
    """Programs draw their samples from NumPy, and seed nothing: ranks that hold one model must read the same ones."""
    code = cut(program_under("002", section), paddle_cuts(1, 6))
    first, second = map(printed, run(code, 2, PADDLE, tmp_path, prelude=[]))
    assert first == second
    assert len(first) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("section", "ranks", "drawn"),
    [
        ("2.1.2", 1, ["single_main_program"]),
        ("2.2.4.2.6", 2, ["d2s_mp_serial_main_program_0", "d2s_mp_main_program_1"]),
        ("2.2.4.2.7", 2, ["d2s_pp_serial_main_program_1", "d2s_pp_main_program_0"]),
        ("2.2.4.3.4", 2, ["pp_serial_main_program_0", "pp_main_program_1"]),
    ],
)
def test_programs_are_printed_and_drawn(section: str, ranks: int, drawn: list[str], tmp_path: Path) -> None:
    """As the document says: with the comments before print and dump_prog taken away."""
    code = cut(program_under("002", section), paddle_cuts(1, 1))
    code = re.sub(
        r"^( *)# ?((?:print|dump_prog|from paddle|def dump_prog| +offline_graph).*)$", r"\1\2", code, flags=re.M
    )
    for text in run(code, ranks, PADDLE, tmp_path):
        assert "cross_entropy" in text or "matmul" in text or "mm" in text
    for name in drawn:
        graph = (tmp_path / f"{name}.dot").read_text()
        assert graph.count("->") > 3


def test_every_program_of_002_is_a_row() -> None:
    programs = [each for each in fences("002") if each.language == "python" and "train_model()" in each.code]
    assert len(programs) == 16
    unedited = {row.section for row in ROWS if row.document == "002" and not row.edits}
    assert unedited == {each.heading.split()[0] for each in programs}


def test_every_program_of_000_is_a_row() -> None:
    titles = [f"{number}: {name}" for number, (name, _) in enumerate(examples("000"), 1)]
    assert len(titles) == 33
    assert titles == [row.title for row in ROWS if row.document == "000" and not row.edits]


def test_cuts_must_be_there() -> None:
    with pytest.raises(AssertionError, match="not in the program"):
        cut(program_under("002", "2.1.1"), {"inner_size=1024000": "inner_size=64"})
