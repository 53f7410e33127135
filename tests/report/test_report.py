"""The report of a real run, looked at in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.train.test_engine import data, engine, stopped
from unisono import cli
from unisono.comm.communicator import Communicator
from unisono.report.page import _memory, as_page
from unisono.report.run import Run

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

# Run inside the page: what a person would see of it, after clicking the first picture that is folded away.
LOOK = """
<script>
window.addEventListener('load', () => {
  const folded = document.querySelector('#loss details');
  folded.querySelector('summary').click();
  const line = document.querySelector('#loss polyline').getBoundingClientRect();
  const bars = [...document.querySelectorAll('#memory rect')].map(bar => bar.getBoundingClientRect().width);
  const seen = {
    unfolded: folded.open,
    line: [Math.round(line.width), Math.round(line.height)],
    bars: bars.filter(width => width > 1).length,
    boxes: document.querySelectorAll('#pipeline rect[fill="#3b6fb6"] title').length,
    ranks: [...document.querySelectorAll('#run svg text[font-weight]')].map(text => text.textContent),
    said: [...document.querySelectorAll('#said td:first-child')].map(cell => cell.textContent),
    wide: document.documentElement.scrollWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    asked: performance.getEntriesByType('resource').length,
  };
  document.body.innerHTML = '<pre id="seen">' + JSON.stringify(seen) + '</pre>';
});
</script>
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, pools: Callable[[str, int], RankPool]) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    pools("gloo", 4).run(stopped, "dp=2,pp=2,microbatches=2", str(folder), 4)
    return folder


def test_the_page_and_the_trace_tell_the_run(run_folder: Path) -> None:
    assert cli.main(["report", str(run_folder)]) == 0
    page = (run_folder / "report.html").read_text()
    assert "dp=2,pp=2,microbatches=2" in page
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"
    trace = json.loads((run_folder / "report.trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1, 2, 3}
    forwards = [event for event in trace if event["name"].startswith("forward ")]
    assert len(forwards) == 4 * 2
    assert all(event["dur"] > 0 for event in forwards)


def test_memory_and_bytes_in_the_ledger_are_those_of_the_plan(run_folder: Path) -> None:
    told = [json.loads((run_folder / "ranks" / f"{rank}.json").read_text()) for rank in range(4)]
    for rank in told:
        assert rank["memory"]["gradients"] == pytest.approx(rank["memory"]["parameters"], rel=0.05)  # packed
        assert rank["memory"]["optimizer"] == pytest.approx(2 * rank["memory"]["parameters"], rel=0.02)  # Adam
        assert rank["memory"]["activations"] > 0
    assert told[0]["memory"] == told[1]["memory"], "two replicas of the first stage"
    assert told[0]["collectives"]["all_reduce"]["payload"] >= told[0]["memory"]["gradients"]


def foretold(comm: Communicator, plan: str, folder: str) -> None:
    trained = engine(plan)
    trained.dataloader(data(), batch_size=8)
    trained.foreseen()
    trained.fit(data(), batch_size=8, save=folder, progress=False)


def test_each_rank_has_its_own_prediction_beside_what_was_measured(
    tmp_path: Path, pools: Callable[[str, int], RankPool]
) -> None:
    pools("gloo", 4).run(foretold, "dp=2,pp=2,microbatches=2", str(tmp_path))
    run = Run.read(tmp_path)
    stages = run.predicted["memory_by_stage"]
    assert len(stages) == 2
    rows = _memory(run)
    for rank, stage in enumerate((0, 0, 1, 1)):
        assert rows[f"rank {rank} predicted"]["parameters"] == stages[stage]["parameters"]
        assert rows[f"rank {rank}"]["parameters"] == pytest.approx(stages[stage]["parameters"], rel=0.02)
    assert stages[0]["parameters"] != stages[1]["parameters"]
    assert "a stage each" in as_page(run)
    zero = replace(run, starts=[{**run.starts[-1], "plan": "dp=4,zero=3"}], program="<p>one</p>")
    assert "zero=3 keeps state in pieces" in as_page(zero)


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine; install it to look at the page")
@pytest.mark.parametrize(("size", "dark"), [("1200,900", False), ("390,844", True)])
def test_a_browser_draws_it(run_folder: Path, tmp_path: Path, size: str, dark: bool) -> None:
    assert cli.main(["report", str(run_folder), "-o", str(tmp_path / "page.html")]) == 0
    page = tmp_path / "page.html"
    page.write_text(page.read_text().replace("</body>", LOOK + "</body>"))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += [f"--window-size={size}", "--virtual-time-budget=2000", "--dump-dom"]
    words += ["--blink-settings=preferredColorScheme=0"] if dark else []
    shown = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    assert found, shown.stderr[-2000:]
    seen = json.loads(found[1])
    assert seen["unfolded"]
    assert min(seen["line"]) > 20, "the loss is a line with width and height"
    assert seen["bars"] >= 4 * 4
    assert seen["boxes"] == 2 * 2 * 2, "two pictures of two ranks with two forwards"
    assert seen["ranks"] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert "all_reduce" in seen["said"]
    assert seen["asked"] == 0
    assert seen["wide"] <= max(500, int(size.split(",")[0])), "nothing sticks out sideways"
    assert (seen["paper"] == "rgb(20, 22, 26)") == dark


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"starts": [')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "cannot be read as the record of a run" in capsys.readouterr().err
