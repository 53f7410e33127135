"""Drawings: what stands where in the text, and that the SVG is well formed and shows the same."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.quantum.circuits import random_circuit
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import pauli_rotation
from unisono.quantum.circuit.parameter import feature, weight


def lines(circuit: Circuit, width: int = 120) -> list[str]:
    return circuit.draw(width=width).split("\n")


def test_text() -> None:
    circuit = Circuit(3).h(0).cnot(0, 1).apply("rz", 2, math.pi / 2, controls={0: 0}).swap(0, 2)
    assert lines(circuit) == [
        "0: ─H──●─────○─────×──",
        "       │     │     │",
        "1: ────X─────┼─────┼──",
        "             │     │",
        "2: ───────RZ(π/2)──×──",
    ]


def test_angles_and_labels() -> None:
    drawn = Circuit(2).rx(0, 2 * weight(3) - feature(0) + 1 / 3).ry(1, -3 * math.pi / 4).rz(1, 0.123456).draw()
    assert "RX(2*w3-x0+0.3333)" in drawn
    assert "RY(-3π/4)" in drawn
    assert "RZ(0.1235)" in drawn
    drawn = Circuit(3).pauli_rotation("XZ", (0, 2), weight(0)).sdg(1).unitary(np.eye(4), (0, 1)).draw()
    assert "[X](w0)" in drawn
    assert "S†" in drawn
    assert "UNITARY:1" in drawn


def test_a_condition_stands_right_of_its_measurement() -> None:
    top, _, low = lines(Circuit(2).h(0).measure(0).apply("x", 1, condition={0: 1}))
    assert low.index("X?c0") > top.index("M0")
    circuit = Circuit(2, bits=1).apply(pauli_rotation("XY"), (0, 1), 0.5, condition={0: 0})
    circuit.apply("gphase", (), 0.25, condition={0: 1}).apply("gphase", (), 0.125, controls={1: 0})
    for kind in ("text", "svg"):
        assert all(label in circuit.draw(kind) for label in ("[X](0.5)?!c0", "PHASE(0.25)?c0", "○PHASE(0.125)"))


def test_wrapped() -> None:
    circuit = Circuit(2)
    for _ in range(30):
        circuit.h(0).cnot(0, 1)
    drawn = circuit.draw(width=60)
    assert max(map(len, drawn.split("\n"))) <= 60
    assert drawn.count("H") == 30
    assert len(drawn.split("\n\n")) > 2


@pytest.mark.parametrize("seed", range(3))
def test_svg_shows_every_operation(seed: int) -> None:
    circuit = random_circuit(5, 40, seed, weights=3).measure(0).reset(1).barrier()
    tree = ElementTree.fromstring(circuit.draw("svg"))
    space = "{http://www.w3.org/2000/svg}"
    circles = tree.findall(f"{space}circle")
    controls = sum(len(each.controls) for each in circuit.operations)
    toggles = sum(each.name == "x" and bool(each.controls) for each in circuit.operations)
    assert len(circles) == controls + toggles
    names = [text.text for text in tree.findall(f"{space}text")]
    assert names.count("q0") == names.count("q4") >= 1
    assert "M0" in names
    assert "|0>" in names
    boxes = [each for each in circuit.operations if each.name in ("h", "u3", "rx", "unitary")]
    assert len(tree.findall(f"{space}rect")) > len(boxes)


def test_bad_kind() -> None:
    with pytest.raises(UsageError, match="'png'"):
        Circuit(1).draw("png")


def test_empty() -> None:
    assert lines(Circuit(2)) == ["0: ─", "", "1: ─"]
    ElementTree.fromstring(Circuit(2).draw("svg"))


def test_figures_of_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    circuit = Circuit(3, 1).h(0).cnot(0, 1).apply("rz", 2, math.pi / 2, controls={0: 0}).swap(0, 2).barrier()
    circuit.depolarizing((0, 2), 0.1).measure(1, 0)
    figure = circuit.draw("mpl")
    texts = [each.get_text() for each in figure.axes[0].texts]
    assert texts == ["q0", "q1", "q2", "H", "RZ(π/2)", "DEPOL(0.1):0", "DEPOL(0.1):1", "M0"]
    figure.canvas.draw()
    narrow = random_circuit(3, 40, seed=1).draw("mpl", width=400)
    assert len([each for each in narrow.axes[0].texts if each.get_text() == "q0"]) > 1
    assert narrow.get_size_inches()[0] < 8
