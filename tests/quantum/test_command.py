"""`unisono qsim`: real files, real ranks, the same answers on any number of them, and clear errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.quantum import dense
from tests.ranks import RankPool
from unisono.cli import main
from unisono.quantum import storage
from unisono.quantum.job import QuantumJob, read
from unisono.quantum.observables.observable import observable
from unisono.quantum.qasm import from_qasm

Pools = Callable[[str, int], RankPool]
TEXT = """OPENQASM 3.0;
include "stdgates.inc";
input float theta;
qubit[5] q;
h q[0];
for int i in [0:3] { cx q[i], q[i+1]; }
rx(theta) q[4]; ry(0.4) q[0]; crz(1.1) q[0], q[4]; h q[4];
"""
MEASURES = "bit[5] c; c = measure q;"
DYNAMIC = "bit d; d = measure q[0]; if (d) x q[1]; bit e = measure q[1];"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "circuit.qasm"
    path.write_text(TEXT)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    code = main(["qsim", *map(str, words), "--json"])
    assert code == 0
    return json.loads(capsys.readouterr().out)


def test_the_same_on_one_rank_and_many(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    words = [file, "--weights", "0.3", "--shots", 300, "--seed", 5, "--observable", "Z0 Z1", "--probabilities", "4,0"]
    words += ["--observable", "0.5 X0 Y4 - Z2", "--variance", "--state"]
    vector = dense.state(from_qasm(TEXT), [0.3])
    shown = [answer(capsys, *words), answer(capsys, *words, "-n", 3, "--save", tmp_path / "state")]
    for found, ranks in zip(shown, (1, 2), strict=True):
        assert found["ranks"] == ranks
        assert found["counts"] == shown[0]["counts"]
        for row in found["observables"]:
            made = observable(row["observable"])
            assert row["value"] == pytest.approx(dense.expectation(vector, made), abs=1e-12)
            assert row["variance"] == pytest.approx(dense.variance(vector, made), abs=1e-12)
        np.testing.assert_allclose(
            list(found["probabilities"].values()), dense.probabilities(vector, (4, 0)), atol=1e-12
        )
        amplitudes = [complex(*pair) for pair in found["state"].values()]
        np.testing.assert_allclose(amplitudes, vector, atol=1e-12)
    assert sum(shown[0]["counts"].values()) == 300
    assert "2 of 3 ranks" in shown[1]["note"]
    np.testing.assert_allclose(storage.load(tmp_path / "state").amplitudes().numpy(), vector, atol=1e-12)


def test_measured_bits(capsys: pytest.CaptureFixture[str], file: Path, pools: Pools) -> None:
    file.write_text(TEXT + MEASURES)
    found = answer(capsys, file, "--weights", "0", "--shots", 200, "--observable", "Z0 Z1", "--dtype", "complex64")
    assert set(map(len, found["counts"])) == {5}
    assert found["observables"][0]["value"] == pytest.approx(np.cos(0.4), abs=1e-6)
    file.write_text(TEXT + DYNAMIC)
    one = answer(capsys, file, "--weights", "0.2", "--shots", 40)["counts"]
    assert set(one) <= {"00", "01", "10", "11"}
    job = QuantumJob(from_qasm(TEXT + DYNAMIC), shots=40, weights=(0.2,))
    assert all(found["counts"] == one for found in pools("gloo", 2).run(read_job, job))


def read_job(comm: Any, job: QuantumJob) -> dict[str, Any]:
    return read(job, comm)


def test_plan_starts_nothing(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    words = [file, "--weights", "0", "--plan", "-n", 6, "--observable", "X0 X1"]
    found = answer(capsys, *words)
    assert found["ranks"] == 4
    assert found["exchanges"] <= found["exchanges_in_order"]
    assert found["exchanges_of_observables"] >= 0
    assert main(["qsim", *map(str, words)]) == 0
    shown = capsys.readouterr().out
    assert "exchanges" in shown
    assert "4 of 6 share the state" in shown


def test_shown_to_people(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert (
        main(["qsim", str(file), "--weights", "0.3", "--shots", "50", "--observable", "Z0", "--draw", "--state"]) == 0
    )
    shown = capsys.readouterr().out
    assert "RX(w0)" in shown
    assert "<Z0> = " in shown
    assert "5 wires, 9 operations" in shown
    assert "and 12 more" in shown
    assert main(["qsim", str(file), "--weights", "0.3", "--observable", "Z0", "--quiet"]) == 0
    assert re.fullmatch(r"<Z0> = \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shots", "10"], "reads 1 weights, but 0 were given"),
        (["--weights", "1,2", "--shots", "10"], "reads 1 weights, but 2 were given"),
        (["--weights", "1", "--shots", "10", "--seed", "-1"], "seed=-1: expected a whole number"),
        (["--weights", "a"], "--weights 'a': expected numbers"),
        (["--weights", "inf"], "expected finite numbers"),
        (["--weights", "1", "--shots", "0"], "--shots 0: expected at least 1"),
        (["--weights", "1", "-n", "0"], "-n 0"),
        (["--weights", "1", "--observable", "Z9"], "acts on wire 9, but the circuit has wires 0 to 4"),
        (["--weights", "1", "--observable", "Q"], "column 1"),
        (["--weights", "1", "--probabilities", "0,7"], "wire 7"),
        (["--weights", "1", "--probabilities", "zero"], "expected wires with commas"),
        (["--weights", "1"], "nothing is asked for"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], file: Path, words: list[str], message: str) -> None:
    assert main(["qsim", str(file), *words]) == 2
    assert message in capsys.readouterr().err


def test_bad_files(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text(TEXT + "cx q[0], q[5];")
    assert main(["qsim", str(file), "--shots", "1"]) == 2
    assert f"{file}:8:12: index 5 is out of range" in capsys.readouterr().err
    assert main(["qsim", str(file.with_name("absent.qasm")), "--shots", "1"]) == 2
    assert "cannot read" in capsys.readouterr().err
    file.write_text(TEXT + DYNAMIC)
    assert main(["qsim", str(file), "--weights", "0", "--observable", "Z0"]) == 2
    assert "only --shots" in capsys.readouterr().err


def test_too_large_a_state_is_refused_by_the_ranks(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text("OPENQASM 2.0; qreg q[50]; U(0.1,0,0) q[3];")
    assert main(["qsim", str(file), "--shots", "1", "-n", "2"]) == 2
    error = capsys.readouterr().err
    assert "a state of 50 wires" in error
    assert "ranks with as much free memory each would do" in error
