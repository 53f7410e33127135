"""What programs look like: the published quickstart, op by op, in text, page, drawing and files; no rank runs."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.graph.tasks import TASKS
from unisono.amounts import format_ranks
from unisono.cli import main
from unisono.graph.capture.trace import trace
from unisono.graph.placement.find import find
from unisono.graph.program.binding import _NATIVE, native
from unisono.graph.program.lowering import Lowered, lower
from unisono.graph.render.dump import save
from unisono.graph.render.html import as_page
from unisono.graph.render.listing import CollectiveStep, ListedInput, ListedOp, listing_of
from unisono.graph.render.svg import as_svg
from unisono.graph.render.text import as_text
from unisono.mesh.mesh import Mesh

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICKSTART, GPT = f"{EXAMPLES / 'quickstart.py'}:quickstart", f"{EXAMPLES / 'gpt.py'}:tiny"


@pytest.fixture(scope="module")
def quickstart() -> Lowered:
    task = TASKS["quickstart"]
    mesh = Mesh.describe((2, 4), ("dp", "mp"))
    found = find(trace(task.model(), task.batch(0), task.loss), mesh, fully_use_devices=True)
    return lower(found.trace, found, mesh)


def test_the_quickstart_is_as_published(quickstart: Lowered) -> None:
    text = as_text(listing_of(quickstart))
    lines = [line.partition("|")[2].strip() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("matmul = "))
    assert lines[start].endswith("strategy ((2,4),(4,1))")
    assert lines[start + 1] == "f32[8,8] f32[8,16] -> f32[8,16]   [S0,S1] [R,S0] -> [S0,P]"
    assert lines[start + 2] == "# quickstart.py:30"
    assert lines[start + 4] == "forward: reduce_scatter over mp (0,1,2,3): (8,16) -> (8,4), sum, shards dim 1, 384 B"
    assert lines[start + 5] == "backward: all_gather over mp (0,1,2,3): (8,4) -> (8,16), gathers dim 1, 384 B"
    assert lines[start + 6] == "relu = relu(matmul_moved)   strategy ((2,4))"
    assert lines[start + 7] == "f32[8,4] -> f32[8,4]   [S0,S1] -> [S0,S1]"
    assert lines[start + 9].endswith("strategy ((2,4),(4,1))")
    assert lines[start + 10].startswith("f32[8,4] f32[4,16] -> f32[8,16]")
    between = lines[start : start + 10]
    assert sum("reduce_scatter over" in line for line in between) == 1
    assert not any("all_reduce" in line for line in between)
    assert "f32[16,32] f32[32,16] -> f32[16,16]" in text  # the serial program beside it


def test_large_groups_are_written_as_ranges() -> None:
    assert format_ranks((4, 5, 6, 7)) == "4,5,6,7"
    assert format_ranks(range(0, 64, 8)) == "0,8,16,24,32,40,48,56"
    assert format_ranks(range(1024)) == "0-1023"
    assert format_ranks(range(644, 780, 8)) == "644-772 step 8"
    assert format_ranks([*range(4), *range(16, 20), *range(32, 36)], ", ") == "0-3, 16-19, 32-35"
    assert format_ranks([first + i for first in range(0, 1024, 32) for i in range(4)]) == "0-3,32-35,...,992-995"
    assert format_ranks([*range(0, 40, 8), *range(100, 140, 8)]) == "0-32 step 8,100-132 step 8"
    assert format_ranks([0, 1, 3, 4, 6, 9, 10, 12, 15]) == "0-1,3-4,6,9-10,12,15"


def test_every_rank_has_its_own_groups(quickstart: Lowered) -> None:
    reported = listing_of(quickstart, rank=5)
    assert reported.forward[0].ranks == (4, 5, 6, 7)
    assert reported.sums[0].ranks == (1, 5)
    assert {collective.kind for collective in reported.forward} == {"reduce_scatter", "all_reduce"}


MARK = "<i onclick=\"'>"


def _marked(value: Any) -> Any:
    """With a mark in every text but the kinds of collectives, which are words of ours."""
    if isinstance(value, str):
        return value + MARK
    if isinstance(value, list | tuple):
        return type(value)(_marked(each) for each in value)
    if isinstance(value, ListedOp | ListedInput | CollectiveStep):
        names = [each.name for each in fields(value) if each.name not in ("kind", "axes", "ranks", "before", "after")]
        return replace(value, **{name: _marked(getattr(value, name)) for name in names})
    return value


def test_names_and_lines_of_a_program_are_text_on_its_pages(quickstart: Lowered) -> None:
    listing = listing_of(quickstart, rank=3)
    for name in ("given", "lines", "sums", "updates", "about", "outputs", "order"):
        setattr(listing, name, _marked(getattr(listing, name)))
    for page in (as_page(listing, title=MARK), as_svg(listing, title=MARK)):
        assert "&lt;i" in page
        assert "<i " not in page
        assert 'onclick="' not in page


def test_a_page_stands_alone(quickstart: Lowered) -> None:
    page = as_page(listing_of(quickstart, rank=3), title="a <title>")
    assert "a &lt;title&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert not re.search(r'(src|href)="|https?://', page)
    assert page.count('class="row op"') == len(list(quickstart.computes))
    assert page.count('class="row move"') == len(list(quickstart.moves))


def test_a_drawing_shows_collectives_in_colour(quickstart: Lowered) -> None:
    drawing = as_svg(listing_of(quickstart))
    assert drawing.count("<circle") == len(list(quickstart.computes))
    assert drawing.count(">reduce_scatter<") == 3  # the legend and two moves
    assert "#2f9e44" in drawing


def test_graphs_are_saved_after_each_pass(quickstart: Lowered, tmp_path: Path) -> None:
    save(quickstart, tmp_path, range(8))
    assert len(list(tmp_path.glob("rank_*/*"))) == 8 * 6
    assert "strategy (2, 4)" in (tmp_path / "rank_0" / "1_marks.txt").read_text()
    assert "strategy ((2,4),(4,1))" in (tmp_path / "rank_0" / "2_propagation.txt").read_text()
    assert "f32[8,8] f32[8,16] -> f32[8,16]" in (tmp_path / "rank_7" / "3_local.txt").read_text()
    assert "(4,5,6,7)" in (tmp_path / "rank_7" / "4_collectives.txt").read_text()
    assert "v_relu = f_relu(v_matmul_moved)" in (tmp_path / "rank_0" / "5_program.py").read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", QUICKSTART, "--mesh", "dp=2,mp=4,full", "--rank", "6"]) == 0
    assert "over mp (4,5,6,7)" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["explain", QUICKSTART, "--mesh", "dp=2,mp=4,full", "--rank", "6", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["rank"], listed["mesh"]) == (6, {"dp": 2, "mp": 4})
    assert any(each["kind"] == "all_reduce" and each["ranks"] == [2, 6] for each in listed["sums"])
    assert {"name", "serial", "distributed", "forward", "backward"} <= listed["lines"][0].keys()
    assert main(["explain", QUICKSTART, "--plan", "dp=2", "--html", str(page)]) == 0
    assert "rank 0 of 2" in page.read_text()
    assert main(["explain", QUICKSTART, "--mesh", "dp=2,mp=4", "--svg", str(page / "no.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["explain", QUICKSTART, "--plan", "dp=2,ep=2"]) == 2
    assert "ep=2 shards experts, but Net has no uni.nn.MoE, and no experts of Hugging Face" in capsys.readouterr().err
    assert main(["explain", QUICKSTART, "--mesh", "dp=2", "--rank", "2"]) == 2
    assert "ranks 0 to 1" in capsys.readouterr().err


@pytest.mark.thorough
def test_verify_takes_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", QUICKSTART, "--program", "dp=2,mp=2", "-n", "2"]) == 2
    assert "program dp=2,mp=2 needs 4 ranks, but there are 2" in capsys.readouterr().err
    assert main(["verify", GPT, "--program", "dp=1", "--steps", "1", "--json"]) == 0
    assert '"equivalent": true' in capsys.readouterr().out


def test_native_calls_are_the_ops() -> None:
    """A binding that took its arguments, or their defaults, in another way would show here."""
    x, square = torch.rand(4, 6, dtype=torch.float64) + 0.1, torch.rand(4, 4, dtype=torch.float64)
    index = torch.tensor([[0, 1], [2, 0]])
    special = {
        "layer_norm": (x, [6]), "rms_norm": (x, [6]), "group_norm": (x, 2), "embedding": (x, index), "linear": (x, x),
        "addmm": (square, square, square), "transpose": (x, 0, 1), "permute": (x, [1, 0]), "t": (x,),
        "reshape": (x, [2, 12]), "view": (x, [2, 12]), "expand": (x, [2, 4, 6]), "unsqueeze": (x, 1),
        "squeeze": (x[:1], 0), "select": (x, 1, 2), "split_with_sizes": (x, [1, 3]), "cat": ([x, x], 1),
        "stack": ([x, x], 1), "mean.dim": (x, [1], True), "sum.dim_IntList": (x, [0]), "pow": (x, 2.5),
        "softmax": (x, 1, torch.float32), "log_softmax": (x, -1),
        "conv2d": (x.view(1, 1, 4, 6), x.view(4, 1, 2, 3)[:, :, :1]),
        "conv1d": (x.view(1, 4, 6), x.view(2, 4, 3)), "clamp": (x, 0.3), "where": (x > 0.5, x, -x),
        "masked_fill": (x, x > 0.5, 3.0), "argmax": (x, 1), "topk": (x, 2), "cumsum": (x, 1),
        "index_select": (x, 1, index[0]),
        "gather": (x, 1, index), "logical_not": (x > 0.5,), "bitwise_and": (index, index),
        "batch_norm": (x, None, None, None, None, True, 0.1, 1e-5, False),
        "scaled_dot_product_attention": (x.view(1, 1, 4, 6),) * 3, "bmm": (square[None], square[None]),
    }  # fmt: skip
    for target in _NATIVE:
        name = str(target).removeprefix("aten.")
        op, overload = name.split(".")[:2]
        given = special.get(name, special.get(op))
        if given is None and overload == "Scalar":
            given = (x, 0.5)
        elif given is None:
            tensors = [argument for argument in target._schema.arguments if str(argument.type) == "Tensor"]
            given = (square,) * len(tensors)
        torch.testing.assert_close(native(target)(*given), target(*given), rtol=0, atol=0, msg=str(target))
