"""The report of a real run, looked at in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono.nn as unn
from tests.ranks import RankPool
from tests.train.test_engine import data, engine, known_machine
from unisono import cli
from unisono.comm.communicator import Communicator
from unisono.report import charts
from unisono.report.page import _memory, as_page
from unisono.report.program_listing import programs
from unisono.report.run_record import Run

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

# Run inside the page: what a person would see of it, after clicking the first picture that is folded away.
LOOK = """
<script>
window.addEventListener('load', () => {
  const folded = document.querySelector('#loss details');
  folded.querySelector('summary').click();
  const shown = () => [...document.querySelectorAll('#program details[open] .line')].filter(
    line => line.getBoundingClientRect().height > 5).map(line => line.innerText);
  const program = shown();
  document.querySelector('#find').value = 'all_to_all blocks.0.experts';
  document.querySelector('#find').dispatchEvent(new Event('input'));
  const found = shown();
  const line = document.querySelector('#loss polyline').getBoundingClientRect();
  const bars = [...document.querySelectorAll('#memory rect')].map(bar => bar.getBoundingClientRect().width);
  const seen = {
    unfolded: folded.open,
    line: [Math.round(line.width), Math.round(line.height)],
    bars: bars.filter(width => width > 1).length,
    cut: [...document.querySelectorAll('.timeline')].map(box => box.scrollWidth - box.clientWidth),
    charts: [...document.querySelectorAll('svg.chart')].map(each => each.parentElement)
      .map(box => box.scrollWidth - box.clientWidth),
    boxes: document.querySelectorAll('#pipeline rect[fill="#3b6fb6"] title').length,
    ranks: [...document.querySelectorAll('#run svg text[font-weight]')].map(text => text.textContent),
    output: [...document.querySelectorAll('#communication td:first-child')].map(cell => cell.textContent),
    wide: document.documentElement.scrollWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    program: program.length,
    found: found,
    asked: performance.getEntriesByType('resource').length,
  };
  parent.postMessage(seen, '*');
});
</script>
"""

# A desktop in the light and a phone in the dark, in one browser: frames have widths and colours of their own.
FRAMES = """<!doctype html><body><script>
const seen = {};
window.addEventListener('message', told => {
  for (const frame of document.querySelectorAll('iframe'))
    if (frame.contentWindow === told.source) seen[frame.id] = told.data;
  if (Object.keys(seen).length === 2) document.body.innerHTML = '<pre id="seen">' + JSON.stringify(seen) + '</pre>';
});
</script>
<iframe id="desktop" src="page.html" style="width: 1200px; height: 900px; color-scheme: light"></iframe>
<iframe id="phone" src="page.html" style="width: 390px; height: 844px; color-scheme: dark"></iframe>
</body>"""
WIDTHS = {"desktop": 1200, "phone": 390}


PLAN = "dp=2,pp=2,ep=2,microbatches=2"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = unn.MoE(8, 16, experts=4, top_k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.norm(x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reported(comm: Communicator, folder: str) -> None:
    trained = engine(PLAN, model=lambda: Mixture().double())
    trained.dataloader(data(), batch_size=8)
    with known_machine():
        trained.predicted()
    trained.fit(data(), max_steps=4, epochs=2, batch_size=8, save=folder, progress=False)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, pools: Callable[[str, int], RankPool]) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    pools("gloo", 4).run(reported, str(folder))
    return folder


def test_the_page_and_the_trace_tell_the_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run_folder), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    page = (run_folder / "report.html").read_text()
    assert PLAN in page
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"
    trace = json.loads((run_folder / "report.trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1, 2, 3}
    forwards = [event for event in trace if event["name"].startswith("forward ")]
    assert len(forwards) == 4 * 2
    assert all(event["dur"] > 0 for event in forwards)


def test_memory_and_bytes_in_the_ledger_are_those_of_the_plan(run_folder: Path) -> None:
    run = Run.read(run_folder)
    report_text = [run.ranks[rank] for rank in range(4)]
    for rank in report_text:
        assert rank["memory"]["gradients"] == pytest.approx(rank["memory"]["parameters"], rel=0.05)  # packed
        assert rank["memory"]["optimizer"] == pytest.approx(2 * rank["memory"]["parameters"], rel=0.02)  # Adam
        assert rank["memory"]["activations"] > 0
    assert report_text[0]["memory"]["parameters"] == report_text[1]["memory"]["parameters"], (
        "two replicas of the first stage"
    )
    assert report_text[0]["collectives"]["all_to_all"]["payload"] > 0
    stages = run.predicted["memory_by_stage"]
    assert len(stages) == 2
    rows = _memory(run)
    for rank, stage in enumerate((0, 0, 1, 1)):
        assert rows[f"rank {rank} predicted"]["parameters"] == stages[stage]["parameters"]
        assert rows[f"rank {rank}"]["parameters"] == pytest.approx(stages[stage]["parameters"], rel=0.02)
    assert stages[0]["parameters"] != stages[1]["parameters"]


def test_the_program_of_a_mixture_has_a_page(run_folder: Path) -> None:
    page = (run_folder / "program.html").read_text()
    assert "blocks.0.experts" in page
    assert page.count("all_to_all</b> over ep ranks (0,1)") == 5


def test_each_stage_has_its_program_as_it_ran(run_folder: Path) -> None:
    first, last = programs(Run.read(run_folder))
    assert (first.title, last.title) == ("rank 0, stage 0", "rank 2, stage 1")
    shape = "f64[2,8,8]"  # a microbatch of a data rank
    for program, peer in ((first, 2), (last, 0)):
        output = [(row.name, row.shape, row.phase) for row in program.rows if row.where.startswith(f"to rank {peer} ")]
        heard = [row.shape for row in program.rows if row.where.startswith(f"from rank {peer} ")]
        assert [each[:2] for each in output] == [("send", shape)] * 2, "activations, or gradients, of two microbatches"
        assert heard == [shape] * 2
        ops = {(row.name, row.where) for row in program.rows if row.kind == "op"}
        own, foreign = ("blocks.0", "blocks.1") if program is first else ("blocks.1", "blocks.0")
        assert ("layer_norm", f"{own}.norm") in ops
        assert ("layer_norm", f"{foreign}.norm") not in ops
        sent = [row for row in program.rows if row.name == "all_to_all" and f" {own}.experts (" in row.where]
        assert len([row for row in sent if row.phase == "forward"]) == 3, "how many come, there and back"
        assert all("among ranks 0, 1" in row.where if program is first else "2, 3" in row.where for row in sent)
        assert sum(row.name == "all_to_all" and row.phase == "backward" for row in program.rows) >= 2
    parts = [row.name for row in last.rows if row.kind == "part"]
    assert parts == [
        f"{what} of microbatch {number} on stage 1" for number in (0, 1) for what in ("forward", "backward")
    ]


def test_a_start_that_resumes_leaves_the_reasons_of_the_one_that_searched(run_folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run_folder, again)
    last = json.loads((again / "run.json").read_text())["starts"][-1]
    searched = {**last, "predicted": {"why": [["tp=2", "+26% (smaller products)"]]}}
    for plan, reasons in ((last["plan"], 1), ("dp=4", 0)):
        resumed = {**last, "plan": plan, "predicted": {"why": []}}
        (again / "run.json").write_text(json.dumps({"starts": [searched, resumed]}))
        assert as_page(Run.read(again)).count("+26% (smaller products)") == reasons


def test_figures_of_an_earlier_plan_are_left_out(run_folder: Path, tmp_path: Path) -> None:
    """A start that was killed has written none of its own."""
    again = tmp_path / "again"
    shutil.copytree(run_folder, again)
    starts = json.loads((again / "run.json").read_text())["starts"]
    (again / "run.json").write_text(json.dumps({"starts": [*starts, {**starts[-1], "plan": "dp=4"}]}))
    assert set(Run.read(run_folder).ranks) == {0, 1, 2, 3}
    assert Run.read(again).ranks == {}


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine; install it to look at the page")
def test_a_browser_draws_it(run_folder: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(run_folder), "-o", str(tmp_path / "page.html")]) == 0
    page = tmp_path / "page.html"
    page.write_text(page.read_text().replace("</body>", LOOK + "</body>"))
    (tmp_path / "frames.html").write_text(FRAMES)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--window-size=1700,1000", "--virtual-time-budget=2000", "--dump-dom"]
    shown = subprocess.run([*words, (tmp_path / "frames.html").as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    assert found, shown.stderr[-2000:]
    for where, seen in json.loads(html.unescape(found[1])).items():
        assert seen["unfolded"]
        assert min(seen["line"]) > 20, "the loss is a line with width and height"
        assert seen["bars"] >= 4 * 4
        assert seen["boxes"] == 2 * 2 * 2, "two pictures of two ranks with two forwards"
        assert len(seen["charts"]) == 4
        assert not any(seen["charts"]), "whole on a desk and on a phone"
        assert len(seen["cut"]) == 2
        assert all((sharded > 0) == (where == "phone") for sharded in seen["cut"]), (
            "whole on a desk, to be pushed on a phone"
        )
        assert seen["ranks"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
        assert "all_reduce" in seen["output"]
        assert seen["program"] > 20
        assert 3 <= len(seen["found"]) < 20
        assert all("all_to_all" in line and "blocks.0.experts" in line for line in seen["found"])
        assert seen["asked"] == 0
        assert seen["wide"] <= WIDTHS[where], "nothing sticks out sideways"
        assert (seen["paper"] == "rgb(20, 22, 26)") == (where == "phone")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"starts": [')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "cannot be read as the record of a run" in capsys.readouterr().err


def test_a_long_run_is_drawn_with_its_spikes() -> None:
    curve = [(float(step), 1.0 / (1 + step)) for step in range(100_000)]
    curve[71_234] = (71_234.0, 9.0)
    kept = charts.thinned(curve)
    assert len(kept) <= 1002
    assert (kept[0], kept[-1]) == (curve[0], curve[-1])
    assert curve[71_234] in kept
    assert kept == sorted(kept)
    assert len(charts.line_chart({"loss": curve, "short": curve[:3]}, "loss")) < 300_000
