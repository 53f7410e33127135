"""What the command refuses, before anything starts, in one line and with code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from tests.launch.harness import Run
from unisono import cli
from unisono.launch import environment


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["-n", "2", "missing.py"], "script 'missing.py' does not exist"),
        (["-n", "2", "."], "'.' is not a file"),
        (
            ["-n", "2", "cells.ipynb"],
            "'cells.ipynb' is a notebook, and ranks run Python scripts; write one by `jupyter",
        ),
        (["-n", "2", "train.sh"], "'train.sh' is a shell script, and ranks run Python; use --no-python bash train.sh"),
        (["-n", "2"], "nothing to run"),
        (["-n", "2", "--"], "nothing to run"),
        (["-n", "2", "python"], "nothing to run"),
        (["-n", "2", "python", "-O", "ok.py"], "python option '-O' cannot be passed"),
        (["-n", "2", "/usr/bin/absent/python3", "ok.py"], "ranks run"),
        (["-n", "2", "-m", "no_such_module_here"], "no module named 'no_such_module_here'"),
        (["-n", "2", "-m", "../x"], "no module named '../x'"),
        (["ok.py"], "how many ranks?"),
        (["ok.py", "-n", "2"], "options come before the script"),
        (["-n", "0", "ok.py"], "-n 0"),
        (["-n", "-2", "ok.py"], "-n -2"),
        (["-H", "a:2,b:2", "-n", "5", "ok.py"], "more ranks than the hosts have slots (a:2, b:2: 4)"),
        (["-H", "a:2", "-f", "hosts", "ok.py"], "give one of them"),
        (["-f", "no-hosts", "ok.py"], "hostfile 'no-hosts' cannot be read"),
        (["-hostfile", "no-hosts", "ok.py"], "hostfile 'no-hosts' cannot be read"),
        (["-n", "1", "--start-timeout", "0", "ok.py"], "--start-timeout 0"),
        (["-n", "1", "--timeout", "-1", "ok.py"], "--timeout -1"),
        (["-n", "1", "--timeout", "inf", "ok.py"], "--timeout inf: must be above 0 seconds, 1e+09 at most"),
        (["-H", "a", "--start-timeout", "inf", "ok.py"], "--start-timeout inf"),
        (["-n", "1", "--max-restarts", "-1", "ok.py"], "--max-restarts -1"),
        (["-n", "2", "--elastic", "ok.py"], "--elastic continues by restarting"),
        (["-n", "2", "--min-ranks", "1", "ok.py"], "give --elastic too"),
        (["-n", "2", "--max-restarts", "1", "--elastic", "--min-ranks", "3", "ok.py"], "between 1 and the 2 ranks"),
        (["-n", "2", "--max-restarts", "1", "--elastic", "--backend", "mpi", "ok.py"], "--elastic does not work with"),
        (["--elastic", "2:1", "--max-restarts", "1", "ok.py"], "expected the least and the greatest number of ranks"),
        (["--elastic", "2:4", "-n", "3", "--max-restarts", "1", "ok.py"], "--elastic 2:4 and -n 3 contradict"),
        (["-n", "1", "--master-port", "70000", "ok.py"], "--master-port 70000"),
        (["-n", "1", "--env", "SURELY_NOT_SET_HERE", "ok.py"], "write NAME=VALUE"),
        (["-n", "1", "--ssh", "ssh 'x", "ok.py"], "cannot be read"),
        (["-n", "1", "--output-filename", "ok.py/x", "ok.py"], "no directory can be made"),
    ],
)
def test_refusals(
    arguments: list[str],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("ok.py", "cells.ipynb", "train.sh"):
        (tmp_path / name).write_text("print('never')")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert output in captured.err
    assert captured.err.count("\n") == 1


def test_an_unknown_option_and_a_bad_backend(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run", "--nonsense", "x.py"], ["run", "--backend", "smoke", "x.py"], [], ["dance"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
    assert "smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("run -n two ok.py", "argument -n/-np: 'two': expected a whole number"),
        ("run -n 2 --timeout soon ok.py", "argument --timeout: 'soon': expected a number"),
        ("qsim circuit.qasm --shots many", "argument --shots: 'many': expected a whole number"),
        ("bench", "the following arguments are required: comm|hardware; one of comm, hardware, each with --help"),
    ],
)
def test_what_is_no_number_or_missing(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {reason}\n")


@pytest.mark.parametrize("words", ["--help", "run --help", "completion bash"])
def test_a_reader_that_has_gone_is_no_error(words: str) -> None:
    import os

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        command = [sys.executable, "-m", "unisono", *words.split()]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


SAYS_AND_WORKS = """
import os, pathlib
for line in range(3000):
    print("line", line)
pathlib.Path(f"done{os.environ['RANK']}").touch()
"""


@pytest.mark.parametrize("target", ["stdout", "both"])
def test_a_job_outlives_a_full_disk_for_its_output(target: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SAYS_AND_WORKS)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "run", "-n", "2", "work.py"],
            cwd=tmp_path,
            stdout=full,
            stderr=full if target == "both" else subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0
    assert {each.name for each in tmp_path.glob("done*")} == {"done0", "done1"}
    if target == "stdout":
        assert done.stderr == (
            "the output of ranks cannot be written: No space left on device; the job continues, and lines are lost "
            "until there is room\n"
        )


def test_an_answer_that_cannot_be_written_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "unisono", "completion", "bash"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "unisono: the output cannot be written: No space left on device; make room, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize(("words", "names"), [("", "run, bench, doctor, verify, plan"), ("bench", "comm, hardware")])
def test_a_missing_subcommand_is_answered_by_those_there_are(
    words: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert f"; one of {names}" in capsys.readouterr().err


def test_version_and_a_light_import(tmp_path: Path) -> None:
    assert Run(["--version"], tmp_path, anew=True).finish().stdout == f"unisono {unisono.__version__}\n"
    code = "import sys, unisono, unisono.cli; print({'torch', 'mpi4py', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_relative_folders_of_the_python_path_travel_as_absolute_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reported = environment.forwarded({"PYTHONPATH": "lib:/opt/lib:", "PYTHONHASHSEED": "1", "HOME": "x"})
    assert reported == {"PYTHONPATH": f"{tmp_path}/lib:/opt/lib:{tmp_path}", "PYTHONHASHSEED": "1"}


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("run --no-raze -n 2 ok.py", "--no-race"),
        ("run --max-restart=2 -n 2 ok.py --no-raze", "--max-restarts"),
        ("verify --plna dp=2 task.py:task", "--plan"),
        ("plan --hardwrae machine.toml task.py:task", "--hardware"),
        ("explain --paln dp=2 task.py:task", "--plan"),
        ("report --outptu page.html run", "--output"),
        ("qsim --shot 3 circuit.qasm", "--shots"),
        ("bench comm --backend gloo --ronuds 3", "--rounds"),
        ("--verison", "--version"),
        ("verfy task.py:task", "verify"),
        ("bench hardwrae", "hardware"),
        ("run --backend gllo ok.py", "gloo"),
    ],
)
def test_the_nearest_option_is_suggested(words: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f" (did you mean {near}?)\n")


def test_doctor_keeps_brackets_and_checks_every_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json
    from importlib import metadata

    from unisono.comm import doctor

    found = list(doctor._extras())
    assert {"[mpi]", "[quantum]"} <= {each.what for each in found}
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    lacking = list(doctor._extras())
    assert {each.fix for each in lacking} == {f"pip install 'unisono{each.what}'" for each in found}
    monkeypatch.setattr(doctor, "examine", lambda: iter(lacking))
    assert cli.main(["doctor"]) == 0
    assert "→ pip install 'unisono[mpi]'" in capsys.readouterr().out
    assert cli.main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["fix"] == lacking[0].fix


def test_doctor_knows_which_torch_is_tested() -> None:
    from unisono.comm import doctor

    assert doctor._torch("2.10.1+cpu").state == doctor.BAD
    assert doctor._torch("2.13.1+cu130").text == "2.13.1+cu130"
    assert doctor._torch("2.14.0").text == "2.14.0: newer than 2.13, the newest that unisono is tested with"
    workflow = (Path(__file__).resolve().parents[2] / ".github" / "workflows" / "release.yml").read_text()
    versions = re.findall(r'"(2\.\d+)\.\d+"', workflow)
    assert max([int(part) for part in version.split(".")] for version in versions) == doctor.NEWEST_TORCH


@pytest.mark.thorough  # ranks start
def test_the_bench_of_collectives_writes_a_file_and_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import json

    monkeypatch.chdir(tmp_path)
    words = ["bench", "comm", "-n", "2", "--backends", "gloo", "--sizes", "1K", "--ops", "all_reduce", "--rounds", "1"]
    assert cli.main([*words, "--json", "a.json"]) == 0
    assert capsys.readouterr().out.endswith("wrote a.json\n")
    assert cli.main([*words, "--json", "b.json", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    found = [json.loads((tmp_path / name).read_text())["figures"] for name in ("a.json", "b.json")]
    assert [each["op"] for each in found[0]] == [each["op"] for each in found[1]] == ["all_reduce"] * 2
    assert cli.main([*words, "--quiet"]) == 2
    assert "no file is named; add --json FILE" in capsys.readouterr().err


def test_nothing_is_suggested_for_an_option_like_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--zzzqq", "ok.py"])
    assert capsys.readouterr().err.endswith("unisono run: error: unrecognized arguments: --zzzqq\n")
