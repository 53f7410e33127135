"""`vqnetrun`: every documented flag, on real ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.compat.programs.texts import examples
from tests.examples.runner import EXAMPLES, run_command
from unisono.compat import vqnetrun

PROGRAM = str(EXAMPLES / "seeds/000_vqnet/controller.py")
needs_the_command = pytest.mark.skipif(
    not Path(sys.executable).with_name("vqnetrun").exists(),
    reason="vqnetrun is not beside this Python; pip install -e . puts it there",
)


@pytest.mark.thorough
@needs_the_command
def test_ranks_from_a_hostfile_with_all_flags(tmp_path: Path) -> None:
    """One slot, and two ranks: the host's slots are taken twice, as VQNet's own examples want."""
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    flags = ["-np", "2", "-hostfile", "hosts", "--output-filename", "out", "--verbose", "--start-timeout", "60"]
    ran = run_command(["vqnetrun", *flags, "python", PROGRAM], tmp_path)
    for rank in range(2):
        reported = f"CommController(rank={rank}, size=2, backend="
        assert reported in ran.ranks[rank]
        assert reported in (tmp_path / "out" / f"rank.{rank}").read_text()
    assert "localhost" in ran.text  # --verbose tells what was checked


@pytest.mark.thorough
@needs_the_command
def test_a_program_of_the_document_by_its_own_command(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text(examples("000")[25][1])
    ran = run_command(["vqnetrun", "-n", "2", "python", "test.py"], tmp_path)
    assert [ran.ranks[rank].split() for rank in range(2)] == [["0"], ["1"]]


def test_help_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        vqnetrun.main(["-h"])
    assert ended.value.code == 0
    reported = capsys.readouterr().out
    for flag in ("-n", "-np", "-H", "--hosts", "-f", "--hostfile", "-hostfile", "--output-filename", "--verbose"):
        assert re.search(rf"(^|[ ,]){flag}\b", reported, re.MULTILINE), flag
    assert "--start-timeout" in reported
    assert vqnetrun.main(["-n", "2", "python", "nowhere.py"]) == 2
    assert "vqnetrun: script 'nowhere.py' does not exist" in capsys.readouterr().err
    assert vqnetrun.main(["-n", "2", "-H", "a:1", "-f", "hosts", "python", PROGRAM]) == 2
    assert "both name hosts" in capsys.readouterr().err
