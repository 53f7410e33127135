"""What strangers may have written into a run folder, and what must not be in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.fuzz_readers import run_files
from unisono.errors import UsageError
from unisono.report.command import pages
from unisono.report.run_record import Run

SCRIPT = "<script>alert(1)</script>"
PROGRAM = """
import argparse, sys, torch
import unisono as uni
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--token")
parser.add_argument("folder")
chosen = parser.parse_args()
data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
engine = uni.Engine(lambda: nn.Linear(3, 2), loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p))
engine.fit(data, batch_size=8, save=chosen.folder, profile_steps="2..3", progress=False)
from unisono import cli
sys.exit(cli.main(["report", chosen.folder]))
"""


def write(folder: Path, files: dict[str, Any]) -> Path:
    (folder / "ranks").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_program_in_the_report_is_in_a_sandbox(tmp_path: Path) -> None:
    page, _ = pages(Run.read(write(tmp_path, run_files() | {"program.html": f"{SCRIPT}<p>program</p>"})))
    (frame,) = re.findall(r"<iframe[^>]*>", page)
    assert 'sandbox="allow-scripts"' in frame
    assert SCRIPT not in page
    assert "default-src 'none'" in page


def test_actions_that_are_none_are_not_drawn(tmp_path: Path) -> None:
    """Of a measured step, what stands in the pictures is text of ours and numbers."""
    for which in range(5):
        files = run_files()
        files["ranks/0.json"]["spans"][0][which] = SCRIPT
        page, trace = pages(Run.read(write(tmp_path, files)))
        assert SCRIPT not in page
        assert SCRIPT not in trace


def test_a_plan_that_nobody_could_draw_is_refused(tmp_path: Path) -> None:
    for plan in ("dp=1000000000000", "pp=2,microbatches=1000000000000"):
        files = run_files()
        files["run.json"]["starts"][0]["plan"] = plan
        with pytest.raises(UsageError, match="none is drawn"):
            Run.read(write(tmp_path, files))


def test_neither_command_lines_nor_environments_are_in_a_run_folder(tmp_path: Path) -> None:
    """Nor in the report, the traces, the checkpoints and the logs, whatever their format."""
    secrets = ["s3cret-0n-the-line", "s3cret-1n-the-environment"]
    environment = os.environ | {"MY_API_TOKEN": secrets[1]}
    folder = tmp_path / "run"
    command = [sys.executable, "-c", PROGRAM, "--token", secrets[0], str(folder)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"run.json", "steps.jsonl", "report.html", "0.json", "manifest.json"} <= {file.name for file in files}
    assert any("profile" in str(file) for file in files)
    for file in files:
        for secret in secrets:
            assert secret.encode() not in file.read_bytes(), file
