"""OpenQASM: what is read, what is refused and where, and that what is written reads back."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.deferred import deferred
from unisono.quantum.circuit.parameter import feature, weight
from unisono.quantum.qasm import QasmError, flow, from_qasm, load_qasm, subroutine
from unisono.quantum.qasm.catalogue import FILES
from unisono.quantum.qasm.reader import QasmParser
from unisono.quantum.shots import measured
from unisono.quantum.state import State

TWO = 'OPENQASM 2.0;\ninclude "qelib1.inc";\n'
THREE = 'OPENQASM 3.0;\ninclude "stdgates.inc";\n'


def same(left: np.ndarray, right: np.ndarray, phase: bool = True) -> bool:
    """Equal matrices, up to a global phase when `phase` is False."""
    turn = 1 if phase else np.exp(1j * np.angle(np.vdot(left, right)))
    return bool(np.allclose(left * turn, right, atol=1e-9))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), version=st.sampled_from([2, 3]))
def test_round_trip_keeps_the_unitary(n: int, seed: int, version: int) -> None:
    circuit = random_circuit(n, 8, seed, controls=3)
    read = from_qasm(circuit.to_qasm(version))
    assert read.wires == n
    assert same(dense.unitary(read), dense.unitary(circuit), phase=version == 3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_round_trip_of_free_angles(seed: int) -> None:
    circuit = random_circuit(3, 10, seed, weights=4, features=3, arrays=False)
    weights, features = np.random.default_rng(seed).normal(size=(2, 4))
    read = from_qasm(circuit.to_qasm(3))
    assert (read.weights, read.features) == (circuit.weights, circuit.features)
    assert same(dense.unitary(read, weights, features), dense.unitary(circuit, weights, features))


def test_round_trip_of_named_gates_is_exact() -> None:
    circuit = Circuit(3, bits=3).h(0).cnot(0, 1).rx(2, 0.1 + 1e-17).ry(1, math.pi / 3).rz(0, -1e-7).u3(1, 1, 2, 3).t(2)
    circuit.toffoli(0, 1, 2).cswap(0, 1, 2).crz(0, 1, 0.25).cphase(1, 2, math.pi / 8).swap(0, 2).cry(2, 0, -0.3)
    circuit.rzz(0, 1, 0.4).rxx(1, 2, 0.5).ryy(0, 2, 0.6).rzx(2, 1, 0.7).rot(0, 1.1, 1.2, 1.3).iswap(0, 2).sx(1).sxdg(1)
    circuit.barrier(0, 2).measure(0, 2).reset(1).measure(1, 0)
    for version in (2, 3):
        assert from_qasm(circuit.to_qasm(version)) == circuit
    free = Circuit(2).rx(0, 0.5 * weight(2) - feature(1) + 0.25).apply("y", 1, controls={0: 0})
    assert from_qasm(free.to_qasm(3)) == free


@pytest.mark.parametrize("version", [2, 3])
def test_round_trip_of_conditions(version: int) -> None:
    circuit = Circuit(3).h(0).measure(0).apply("x", 1, condition={0: 1}).measure(1)
    circuit.apply("rz", 2, 0.5, controls={0: 0}, condition={1: 0})
    read = from_qasm(circuit.to_qasm(version))
    found, expected = dense.branches(read), dense.branches(circuit)
    assert [(round(chance, 12), bits) for chance, bits, _ in found] == [
        (round(chance, 12), bits) for chance, bits, _ in expected
    ]
    assert all(
        same(a[:, None], b[:, None], phase=version == 3) for (_, _, a), (_, _, b) in zip(found, expected, strict=True)
    )
    own = from_qasm(TWO + "qreg q[2]; creg c[1]; h q; measure q[0] -> c[0]; if(c==1) measure q[1] -> c[0];")
    assert {bits: round(sum(c for c, b, _ in dense.branches(own) if b == bits), 9) for bits in ((0,), (1,))} == {
        (0,): 0.75, (1,): 0.25,
    }  # fmt: skip
    assert 60 < int(measured(own, 400, seed=2).sum()) < 140
    both = Circuit(1, bits=2).apply("x", 0, condition={0: 1, 1: 0})
    assert from_qasm(both.to_qasm(3)) == both
    with pytest.raises(UsageError, match="several bits"):
        both.to_qasm(2)


def test_every_gate_of_the_libraries() -> None:
    angles = (0.3, -0.7, 1.9, 0.4)
    for head, library in ((TWO, "qelib1.inc"), (THREE, "stdgates.inc")):
        for name, known in FILES[library].items():
            written = f"({', '.join(map(str, angles[: known.parameters]))})" if known.parameters else ""
            wires = ", ".join(f"q[{wire}]" for wire in range(known.operands))
            circuit = from_qasm(f"{head}qreg q[{known.operands}]; {name}{written} {wires};")
            assert circuit.wires == known.operands
            assert len(circuit) == (2 if known.special == "cu" else 1)


@pytest.mark.parametrize(("name", "wires"), [("rccx", 3), ("rc3x", 4)])
def test_toffolis_up_to_phases(name: str, wires: int) -> None:
    operands = ", ".join(f"q[{wire}]" for wire in range(wires))
    found = dense.unitary(from_qasm(f"{TWO}qreg q[{wires}]; {name} {operands};"))
    toggle = dense.unitary(Circuit(wires).apply("x", wires - 1, controls=range(wires - 1)))
    np.testing.assert_allclose(np.abs(found), toggle.real, atol=1e-12)


def test_openqasm_2_program(tmp_path: Path) -> None:
    path = tmp_path / "teleport.qasm"
    path.write_text(
        TWO
        + """
        // a comment
        gate bell(a) p, q { h p; cx p, q; /* inner */ rz(a/2 - pi^2 + sin(0.5)) q; barrier p, q; }
        qreg q[3]; qreg r[2];
        creg c0[1]; creg c1[1];
        u3(0.3,0.2,0.1) q[0];
        bell(1.5) q[1], q[2];
        cx q[0], q[1]; h q[0];
        measure q[0] -> c0[0];
        measure q[1] -> c1[0];
        if (c0==1) z q[2];
        if(c1==1) x q[2];
        h r;
        cx r, q[2];
        """.replace("cx r, q[2];", "CX r[0], r[1];")
    )
    circuit = load_qasm(path)
    assert (circuit.wires, circuit.bits) == (5, 2)
    assert circuit.counts() == {"u3": 1, "h": 4, "cx": 3, "rz": 1, "measure": 2, "z": 1, "x": 1}
    (rz,) = (each for each in circuit.operations if each.name == "rz")
    assert rz.parameters[0].constant == pytest.approx(0.75 - math.pi**2 + math.sin(0.5))
    assert [each.condition for each in circuit.operations if each.condition] == [((0, 1),), ((1, 1),)]


def test_register_comparison_has_bit_zero_least_significant() -> None:
    circuit = from_qasm(TWO + "qreg q[1]; creg c[3]; if (c==6) x q[0];")
    assert circuit.operations[0].condition == ((0, 0), (1, 1), (2, 1))


def test_broadcast() -> None:
    circuit = from_qasm(
        TWO + "qreg a[3]; qreg b[3]; creg c[3]; h a; cx a, b; cx a[0], b; barrier a, b[1]; measure b -> c;"
    )
    assert [each.wires for each in circuit.operations[3:9]] == [(0, 3), (1, 4), (2, 5), (0, 3), (0, 4), (0, 5)]
    assert circuit.operations[9].targets == (0, 1, 2, 4)
    assert [each.bits for each in circuit.operations[10:]] == [(0,), (1,), (2,)]


def test_openqasm_3_program() -> None:
    circuit = from_qasm(
        THREE
        + """
        #pragma anything at all
        input float[64] theta;
        input angle phi;
        const int n = 4;
        const float step = pi / n;
        qubit[n] q; qubit extra;
        bit[n] c; bit flag;
        gate twist(a) p, r { ctrl @ rx(2*a) p, r; inv @ s r; pow(2) @ t p; gphase(a); }
        for int i in [0:n-2] { twist(step * i) q[i], q[i+1]; }
        for uint i in {0, 3} rx(theta/2 - i) q[i];
        @annotated by somebody
        ctrl @x extra, q[0];
        negctrl(2) @ ctrl @ p(phi) q[0], q[1], q[2], q[3];
        let middle = q[1:2];
        h middle; reset q[-1];
        c[0:1] = measure middle;
        flag = measure extra;
        if (flag) { x q[0]; z q[1]; } else { y q[0]; }
        if (c[0] == 0 && !flag) x q[3];
        if (c == 5) h extra;
        barrier;
        """
    )
    assert (circuit.wires, circuit.bits, circuit.weights) == (5, 5, 2)
    assert circuit.counts() == {
        "crx": 3, "sdg": 3, "t": 6, "gphase": 3, "rx": 2, "cx": 1, "cccp": 1, "h": 3, "reset": 1, "measure": 3,
        "x": 2, "z": 1, "y": 1, "barrier": 1,
    }  # fmt: skip
    by_name = {each.name: each for each in circuit.operations}
    assert by_name["p"].controls == ((0, 0), (1, 0), (2, 1))
    assert by_name["y"].condition == ((4, 0),)
    assert by_name["rx"].parameters[0] == 0.5 * weight(0) - 3
    assert [each.condition for each in circuit.operations if each.condition][-2:] == [
        ((0, 0), (4, 0)),
        ((0, 1), (1, 0), (2, 1), (3, 0)),
    ]
    assert by_name["reset"].targets == (3,)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ctrl @ U(0.3, 0.2, 0.1) q[0], q[1];", "p(0.15) q[0]; cu(0.3, 0.2, 0.1, 0) q[0], q[1];"),
        ("ctrl @ u3(0.3, 0.2, 0.1) q[0], q[1];", "p(-0.15) q[0]; cu(0.3, 0.2, 0.1, 0) q[0], q[1];"),
        ("ctrl @ gphase(0.4) q[1];", "p(0.4) q[1];"),
        ("pow(3) @ sx q[0];", "inv @ sx q[0]; x q[0]; x q[0]; x q[0]; x q[0];"),
        ("pow(0.5) @ z q[0];", "s q[0];"),
        ("pow(-2) @ t q[0];", "sdg q[0];"),
        ("pow(0.5) @ rx(0.6) q[0];", "rx(0.3) q[0];"),
        ("inv @ ctrl @ s q[0], q[1];", "cp(-pi/2) q[0], q[1];"),
        ("gate g(a) p { U(a, 0, 0) p; } ctrl @ g(0.8) q[0], q[1];", "p(0.4) q[0]; cry(0.8) q[0], q[1];"),
        ("negctrl @ x q[0], q[1];", "x q[0]; cx q[0], q[1]; x q[0];"),
    ],
)
def test_modifiers_are_exact_in_phase(source: str, expected: str) -> None:
    left, right = (dense.unitary(from_qasm(f"{THREE}qubit[2] q; {text}")) for text in (source, expected))
    assert same(left, right, phase=True)


def test_definitions_of_known_gates_become_one_operation() -> None:
    text = "gate rzz(t) a,b { cx a,b; u1(t) b; cx a,b; } qreg q[2]; rzz(0.3) q[0],q[1];"
    circuit = from_qasm(TWO + text)
    assert circuit.counts() == {"rzz": 1}
    other = from_qasm(TWO + text.replace("u1(t)", "u1(2*t)"))
    assert other.counts() == {"cx": 2, "p": 1}


def test_include_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.inc").write_text('include "qelib1.inc"; gate twice a { h a; h a; }')
    path = tmp_path / "main.qasm"
    path.write_text('OPENQASM 2.0; include "mine.inc"; qreg q[1]; twice q[0];')
    assert load_qasm(path).counts() == {"h": 2}
    (tmp_path / "loop.inc").write_text('include "loop.inc";')
    path.write_text('OPENQASM 2.0; include "loop.inc";')
    with pytest.raises(QasmError, match=r"loop.inc:1:9: include 'loop.inc' includes itself"):
        load_qasm(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_qasm(tmp_path / "absent.qasm")


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("OPENQASM 4.0;", "1:10", "version 4.0"),
        ("OPENQASM 2.0;", "1:14", "declares no qubits"),
        ("OPENQASM 2.0;\nqreg q[2];\nh q[0];", "3:1", "gate 'h' is not defined; is `include \"qelib1.inc\";` missing"),
        (TWO + "qreg q[2];\nfoo q[0];", "4:1", "gate 'foo' is not defined"),
        (TWO + "qreg q[2];\ncx q[0], q[2];", "4:12", "index 2 is out of range; the register has 2"),
        (TWO + "qreg q[2];\ncx q[0], q[0];", "4:1", "names a qubit twice"),
        (TWO + "qreg q[2];\ncx q[0];", "4:1", "acts on 2 qubits here, but got 1"),
        (TWO + "qreg q[2];\nrx q[0];", "4:1", "takes 1 angles, but got 0"),
        (TWO + "qreg q[2];\nrx(1, 2) q[0];", "4:1", "takes 1 angles, but got 2"),
        (TWO + "qreg q[2];\nrx(1/0) q[0];", "4:5", "cannot compute '/'"),
        (TWO + "qreg q[2];\nrx(ln(-1)) q[0];", "4:4", "cannot compute 'ln'"),
        (TWO + "qreg q[2];\nrx(foo) q[0];", "4:4", "'foo' is not defined"),
        (TWO + "qreg q[2];\nrx(2*) q[0];", "4:6", "expected a number"),
        (TWO + "qreg q[2];\nh q[0]", "4:7", "expected ';', but found the end of the file"),
        (TWO + "qreg q[2];\nh q[0;", "4:6", "expected ']', but found ';'"),
        (TWO + "qreg q[2]\nh q[0];", "4:1", "expected ';', but found 'h'"),
        (TWO + "qreg q[2];\nqreg q[3];", "4:6", "'q' is already declared"),
        (TWO + "qreg q[0];", "3:8", "a register of 0"),
        (TWO + "qreg q[2]; creg c[1];\nmeasure q -> c;", "4:9", "2 qubits are measured into 1 bits"),
        (TWO + "qreg q[2]; qreg r[3];\ncx q, r;", "4:1", r"registers of different sizes: \[2, 3\]"),
        (TWO + "qreg q[1]; creg c[2];\nh c[0];", "4:3", "'c' is no qubit"),
        (TWO + "qreg q[1]; creg c[2];\nif(c==4) h q[0];", "4:7", "2 bits are never 4"),
        (TWO + "gate g a { h a;\nqreg q[1];", "3:10", "this block is never closed"),
        (TWO + "gate g a { h b; }\nqreg q[1];", "3:14", "'b' is not defined"),
        (TWO + "gate g a { measure a; }", "3:12", "cannot stand inside a gate"),
        (TWO + "gate g a, a { h a; }", "3:6", "uses a name twice"),
        (TWO + "qreg q[1];\nh q[0]; ~ h", "4:9", "expected a statement, but found '~'"),
        (TWO + "qreg q[1];\nh q[0]; ´", "4:9", "'´' is not OpenQASM"),
        (TWO + "qreg q[1];\n/* no end", "4:1", "a comment that never ends"),
        ('OPENQASM 2.0;\ninclude "other.inc";', "2:9", "include 'other.inc': no such file"),
        (THREE + "qubit[2] q;\nswitch (1) { }", "4:1", "'switch' is not in the part"),
        (THREE + "qubit[2] q;\npow(0.5) @ h q[0];", "4:12", "expected a whole number"),
        (THREE + "qubit[2] q;\nctrl(0) @ h q[0];", "4:1", "expected a number of 1 or more"),
        (THREE + "qubit[2] q; bit c;\nc = 1;", "4:5", "can only be assigned a measurement"),
        (THREE + "qubit[2] q; bit[2] c;\nif (c) x q[0];", "4:5", "a register is compared with =="),
        (THREE + "qubit[2] q; bit[2] c;\nif (c == 1) x q[0]; else h q[0];", "4:4", "one bit only"),
        (THREE + "qubit q; bit c;\nif (c) { c = measure q; x q; }", "4:4", "under its own condition"),
        (TWO + "qreg q[2]; creg c[2];\nif(c==1) measure q -> c;", "4:3", "under its own condition"),
        (THREE + "qubit q;\nq[0];", "4:1", "gate 'q' is not defined"),
        (THREE + "input float a;\nqubit q;\nrx(sin(a)) q;", "5:4", "'sin' of an input is not affine"),
        (THREE + "input float a;\nqubit q;\nrx(a*a) q;", "5:5", "not affine"),
        (THREE + "qubit[3] q;\nx q[1:7];", "4:7", "index 7 is out of range"),
        (THREE + "qubit q;\nx q[0];", "4:4", "single qubit and has no elements"),
        (TWO + "gate g a { h a; }\ngate g a { x a; }", "4:6", "gate 'g' is already defined"),
        (TWO + "qreg q[1];\nmeasure q[0];", "4:13", "expected '->', but found ';'"),
        (THREE + "qubit q;\nrx(10**400) q;", "4:6", "a number of 1329 bits, which is too large"),
        (THREE + "qubit q;\nrx(10**10**10) q;", "4:6", "cannot compute"),
        ("qubit[2] q;", "1:1", "'qubit' is a word of OpenQASM 3; a text of it begins with `OPENQASM 3.0;`"),
    ],
)
def test_errors_name_line_and_column(text: str, where: str, message: str) -> None:
    with pytest.raises(QasmError, match=f"^qasm:{where}: .*{message}"):
        from_qasm(text)


def test_a_gate_means_what_it_meant_when_it_was_defined() -> None:
    """A text may define a gate of the standard files anew; nothing that was defined before changes, or calls itself."""
    text = TWO + "gate g a { h a; } gate h a { x a; h a; } gate rccx a, b, c { cx a, c; } qreg q[3]; g q[0]; h q[1];"
    circuit = from_qasm(text + " rccx q[0], q[1], q[2];")
    assert [(each.name, each.wires) for each in circuit.operations] == [
        ("h", (0,)), ("x", (1,)), ("h", (1,)), ("x", (0, 2)),
    ]  # fmt: skip


def test_what_would_never_end_is_refused() -> None:
    for text, message in (
        ("qubit q; for int i in [0:1000000000000] x q;", "a loop of 1000000000001 iterations"),
        ("qubit q; pow(1000000000000) @ x q;", r"pow\(1e\+12\) of 'x': at most"),
        (f"qubit q; rx({'(' * 9000}1{')' * 9000}) q;", "nested too deeply"),
    ):
        with pytest.raises(QasmError, match=rf"^qasm:3:\d+: .*{message}"):
            from_qasm(THREE + text)


def test_writer_refuses() -> None:
    with pytest.raises(UsageError, match="bind the circuit first"):
        Circuit(1).rx(0, weight(0)).to_qasm(2)
    with pytest.raises(UsageError, match="version 4"):
        Circuit(1).to_qasm(4)


def test_integers_divide_as_the_version_says() -> None:
    two = from_qasm(TWO + "qreg q[1]; rx(1/2) q[0];")
    three = from_qasm(THREE + "qubit q; rx(3/2) q; rx(3.0/2) q; rx(2**3) q;")
    assert two.operations[0].parameters[0].constant == 0.5
    assert [each.parameters[0].constant for each in three.operations] == [1, 1.5, 8]


def test_subroutines_become_the_operations_they_stand_for() -> None:
    read = from_qasm(
        THREE
        + """
        const int n = 3;
        def half(float x) -> float { return x / 2; }
        def level(int k) -> int { if (k == 0) return 1; else return k * level(k - 1); }
        def entangle(qubit[2] pair, angle theta, int times) {
            for int i in [1:times] { rx(half(theta) * i) pair[0]; cx pair[0], pair[1]; }
            if (times > 1 && !(times == 5)) { z pair[1]; } else { y pair[1]; }
        }
        def read(qubit a) -> bit { h a; return measure a; }
        def both(qubit[2] a) -> bit[2] { bit[2] own; own = measure a; reset a[0]; return own; }
        qubit[n] q; bit[2] c; input float w;
        entangle(q[0:1], w, 2);
        entangle(q[1:2], 0.5 - 1, 1);
        rz(level(3)) q[2];
        c[1] = read(q[2]);
        if (c[1]) { c[0] = read(q[0]); }
        bit[2] d = both(q[1:2]);
        """
    )
    expected = Circuit(3, bits=4).rx(0, 0.5 * weight(0)).cnot(0, 1).rx(0, weight(0)).cnot(0, 1).z(1)
    expected.rx(1, -0.25).cnot(1, 2).y(2).rz(2, 6).h(2).measure(2, 1).apply("h", 0, condition={1: 1})
    expected.append(replace(Circuit(3, bits=4).measure(0, 0).operations[0], condition=((1, 1),)))
    assert read == expected.measure(1, 2).measure(2, 3).reset(1)


def test_loops_arrays_and_variables() -> None:
    read = from_qasm(
        THREE
        + """
        qubit[2] q; int i = 0; float total;
        array[float[64], 3] angles = {0.1, 0.2, 0.3};
        array[int[8], 2, 2] m = {{0, 1}, {1, 0}};
        while (i < 10) {
            i += 1;
            if (i == 2) continue;
            if (i > sizeof(angles)) { break; }
            angles[i - 1] = angles[i - 1] * 2;
            rx(angles[i - 1]) q[m[i % 2][1]];
            total = total + i;
        }
        for float a in angles ry(a) q[m[1, 1]];
        while (false) if (i == 0) { x q[0]; } else { y q[0]; }
        rz(total) q[0];
        """
    )
    expected = Circuit(2).rx(0, 0.2).rx(0, 0.6).ry(0, 0.2).ry(0, 0.2).ry(0, 0.6).rz(0, 4)
    assert [(each.name, each.targets) for each in read.operations] == [
        (each.name, each.targets) for each in expected.operations
    ]
    np.testing.assert_allclose([each.angles() for each in read.operations], [e.angles() for e in expected.operations])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(qubit a) { h a; }\nqubit q;\nf(q, q);", "qasm:5:1: 'f' takes 1 arguments, but got more"),
        ("def f(qubit a) { h a; }\nqubit[2] q;\nf(q);", "qasm:5:3: parameter 'a' is one qubit, but 'q' has 2"),
        ("def f(qubit a, qubit b) { cx a, b; }\nqubit q;\nf(q, q);", "qasm:5:1: 'f' is given a qubit twice"),
        ("def f(int n) -> int { return f(n + 1); }\nqubit q;\nrx(f(0)) q;", "called 64 subroutines deep"),
        ("def f(qubit a) { h b; }\nqubit q;\nf(q);", "qasm:3:20: 'b' is not defined"),
        ("def f(qubit a) -> bit { h a; }\nqubit q; bit c;\nc = f(q);", "qasm:3:30: 'f' ends without a 'return'"),
        ("def f(qubit a) { h a; }\nqubit q; bit c;\nc = f(q);", "qasm:5:5: 'f' returns no bits"),
        ("def f(array[int, 2] a) { }\nqubit q;", "qasm:3:7: 'array' as a type in a subroutine is not read"),
        ("qubit q; bit c;\nwhile (c) { x q; }", "qasm:4:1: a 'while' on measured bits ends with their measurement"),
        ("qubit q; bit c;\nwhile (!c) { c = measure q; h q; }", "qasm:4:1: a bit that is asked for is written"),
        (
            "qubit q; bit c;\nwhile (!c) { h q; c = measure q;\nif (c) x q; }",
            "qasm:5:4: a bit that is asked for is written",
        ),
        (
            "qubit q; bit c;\nif (!c) { h q; c = measure q;\nif (c) x q; }",
            "qasm:5:4: a bit that is asked for is written",
        ),
        ("qubit q;\nwhile (true) { }", "qasm:4:1: a loop of more than 65536 iterations"),
        ("qubit q; bit c; int i = 0; c = measure q;\nif (c) { i = 1; }", "qasm:4:10: 'i' is declared outside"),
        ("qubit q; array[int, 2] a = {1, 2, 3};", "qasm:3:28: 3 elements for an array of 2"),
        ("qubit q; array[int, 2] a; rx(a[2]) q;", "qasm:3:32: index 2 is out of range; the array has 2"),
        ("qubit q;\nbreak;", "qasm:4:1: 'break' outside of a loop"),
        ("return;", "qasm:3:1: 'return' outside of a subroutine"),
    ],
)
def test_subroutines_and_loops_that_cannot_be_read(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "65536" in message:
        monkeypatch.setattr(flow, "_LONGEST_WHILE", 100)
        message = message.replace("65536", "100")
    with pytest.raises(QasmError, match=re.escape(message)):
        from_qasm(THREE + text)


DOUBLING = "".join(f"gate g{n} a {{ g{n - 1} a; g{n - 1} a; }}\n" for n in range(1, 40))
EXPANDING = {
    "nested loops": "qubit q;\nfor int i in [1:9999] { for int j in [1:9999] {\nx q; } }",
    "loops without operations": "qubit q;\nfor int i in [1:9999] { for int j in [1:9999] { } }",
    "doubling gates": f"gate g0 a {{ x a; }}\n{DOUBLING}qubit q; g39 q;",
    "doubling subroutines": "def fib(int n) -> int { if (n < 2) { return n; } return fib(n - 1) + fib(n - 2); }\n"
    "qubit q;\nrx(fib(40)) q;",
    "powers of registers": "qubit[4096] q;\npow(100000) @ x q;",
    "doubling aliases": "qubit[64] q0;\n" + "".join(f"let q{n} = q{n - 1} ++ q{n - 1};\n" for n in range(1, 40)),
    "barriers of many qubits": "qubit[4096] q;\nfor int i in [1:9999] barrier q;",
    "arrays of many dimensions": "qubit q;\narray[int, 4096, 4096, 4096] a;",
    "registers": "qubit q;\nfor int i in [1:9999] { for int j in [1:9999] { bit[4096] b; } }",
    "many controls": "qubit[2000] q; qubit[2000] p; qubit t;\nfor int i in [1:9999] "
    "ctrl(2000) @ x " + ", ".join(f"q[{n}]" for n in range(2000)) + ", t;",
}  # fmt: skip


@pytest.mark.parametrize("text", EXPANDING.values(), ids=EXPANDING.keys())
def test_short_texts_that_stand_for_too_much_are_refused_at_their_line(text: str) -> None:
    with pytest.raises(QasmError, match=r"^qasm:\d+:\d+: what the text asks .* more than 20000 steps .*higher limit="):
        from_qasm(THREE + text, limit=20_000)


EMPTY = {
    "gates": f"gate g0 a {{ }}\n{DOUBLING}qubit q; g39 q;",
    "subroutines": "def g0(qubit a) { }\n"
    + "".join(f"def g{n}(qubit a) {{ g{n - 1}(a); g{n - 1}(a); }}\n" for n in range(1, 40))
    + "qubit q;\ng39(q);",
}


@pytest.mark.parametrize("text", EMPTY.values(), ids=EMPTY.keys())
def test_calls_that_make_nothing_are_refused_soon(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is what takes the time: 29 s for the text of gates, when a call cost two steps."""
    calls: list[str] = []

    def count(owner: Any, name: str) -> None:
        known = getattr(owner, name)

        def counted(*given: Any) -> Any:
            calls.append(name)
            return known(*given)

        monkeypatch.setattr(owner, name, counted)

    count(QasmParser, "expand")
    count(subroutine, "_run")
    with pytest.raises(QasmError, match="more than 200000 steps"):
        from_qasm(THREE + text, limit=200_000)
    assert len(calls) < 200_000 / 100


def test_a_text_may_be_as_long_as_it_likes() -> None:
    assert len(from_qasm(THREE + "qubit q;" + "x q;" * 5000, limit=1).operations) == 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OPENQASM 0x10;", "qasm:1:10: version 0x10 is not read"),
        ("OPENQASM 1e999;", "version 1e999 is not read"),
        (THREE + "qubit q;\nrx(" + "9" * 5000 + ") q;", "qasm:4:4: a number of 5000 digits"),
        (THREE + "qubit q;\nrx(0x) q;", "qasm:4:5: expected"),
        (THREE + "qubit q;\nrx(0x_) q;", "qasm:4:4: cannot compute"),
        (THREE + "qubit q;\nrx(1e999) q;", "gives inf"),
        (THREE + "gate g a { }\nqubit q;\npow(1e300) @ g q;", "qasm:5:14: pow"),
        (THREE + "input float weight_" + "9" * 5000 + ";\nqubit q;", "qasm:3:13: input"),
        (THREE + "qubit q;\nfor int i in [0:1" + "0" * 300 + "] x q;", "a loop of 1"),
        (THREE + "qubit q;\n" + "n" * 100_000 + " q;", "is not defined, and stdgates.inc"),
        (THREE + 'for int i in [0:1] { include "qelib1.inc"; include "a"; }', "outside of loops"),
        (THREE + "for int i in [0:1] { input float a; }", "'input' stands outside of loops"),
    ],
)
def test_odd_numbers_versions_and_names(text: str, message: str) -> None:
    with pytest.raises(QasmError, match=re.escape(message)) as caught:
        from_qasm(text)
    assert len(str(caught.value)) < 700


def test_files_outside_of_the_folder_are_not_included(tmp_path: Path) -> None:
    (tmp_path / "secret.inc").write_text("token of somebody")
    folder = tmp_path / "circuits"
    (folder / "gates").mkdir(parents=True)
    (folder / "link.inc").symlink_to(tmp_path / "secret.inc")
    (folder / "gates" / "own.inc").write_text("gate own a { h a; }")
    os.mkfifo(folder / "pipe.inc")
    circuit = folder / "circuit.qasm"
    for name, message in (
        ("../secret.inc", "is outside of"),
        (str(tmp_path / "secret.inc"), "is outside of"),
        ("link.inc", "is outside of"),
        ("pipe.inc", "it is not a regular file"),
        ("gates", "Is a directory"),
        ("./circuit.qasm", "includes itself"),
        ("n" * 5000, "no such file"),
        ("a\0b", "no such file"),
    ):
        circuit.write_text(f'{THREE}include "{name}";\nqubit q; own q;')
        with pytest.raises(QasmError, match=message) as caught:
            load_qasm(circuit)
        assert "token of somebody" not in str(caught.value)
    circuit.write_text(f'{THREE}include "gates/own.inc";\nqubit q; own q;')
    assert len(load_qasm(circuit).operations) == 1


def test_a_pipe_or_a_device_is_no_circuit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.qasm")
    for path in (tmp_path / "pipe.qasm", "/dev/zero", tmp_path, "a\0b", "n" * 5000):
        with pytest.raises(UsageError, match="cannot read"):
            load_qasm(path)


REPEAT = """
qubit[2] q; bit[2] c;
h q[0]; c[0] = measure q[0];
while (c[0]) { reset q[0]; h q[0]; x q[1]; c[0] = measure q[0]; }
c[1] = measure q[1];
"""


def test_while_on_measured_bits() -> None:
    """Repeat until 0: the number of repetitions is odd in a third of the shots, and no shot ends with a 1."""
    circuit = from_qasm(THREE + REPEAT)
    bits = measured(circuit, 3000, seed=3)
    assert not bits[:, 0].any()
    assert abs(float(bits[:, 1].double().mean()) - 1 / 3) < 5 * (2 / 9 / 3000) ** 0.5
    with pytest.raises(UsageError, match="a 'while' on measured bits has no unitary form"):
        deferred(circuit)
    with pytest.raises(UsageError, match="a 'while' on measured bits is unrolled when it is read"):
        circuit.to_qasm(3)


def repeated(comm: Any) -> np.ndarray:
    return measured(from_qasm(THREE + REPEAT), 300, comm=comm, seed=3).numpy()


def test_two_ranks_repeat_as_one(pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(repeated):
        np.testing.assert_array_equal(found, repeated(None))


def test_a_while_that_goes_on_is_an_error() -> None:
    circuit = from_qasm(THREE + "qubit q; bit c; x q; c = measure q; while (c) { c = measure q; }")
    with pytest.raises(UsageError, match="has not ended after 128 repetitions"):
        measured(circuit, 10)
    with pytest.raises(UsageError, match="has not ended after 128 repetitions"):
        State(1).run(circuit)


PEERS = [
    """qubit[3] q; h q; ctrl @ ctrl @ x q[0], q[1], q[2]; negctrl @ ry(0.3) q[2], q[0]; inv @ s q[1];
    pow(2) @ t q[0]; ctrl(2) @ rz(pi / 3) q[2], q[1], q[0]; ctrl @ gphase(0.4) q[1];
    cu(0.1, 0.2, 0.3, 0.4) q[0], q[2];""",
    """gate turn(a, b) p, r { rx(a / 2) p; cx p, r; u2(b, -a) r; } qubit[2] left; qubit[2] right;
    turn(0.5, pi) left[0], right[1]; turn(0.1, 0.2) left, right;
    let half = right[0:1]; ry(0.7) half[1]; cphase(0.6) left[0], right[1]; swap left[1], right[0];""",
    """qubit[2] q; U(0.1, 0.2, 0.3) q[0]; u3(0.4, 0.5, 0.6) q[1]; crz(0.2) q[0], q[1]; p(-0.3) q;
    sx q[0]; inv @ sx q[1]; cy q[1], q[0]; ch q[0], q[1]; swap q[0], q[1];""",
]


@pytest.mark.parametrize("program", PEERS, ids=["modifiers", "definitions", "gates"])
def test_programs_mean_what_qiskit_reads(program: str) -> None:
    """Qiskit's own importer is another implementation of the language; it drops phases of the full state."""
    pytest.importorskip("qiskit_qasm3_import", reason="qiskit-qasm3-import is not installed")
    from qiskit import qasm3
    from qiskit.quantum_info import Operator

    theirs = Operator(qasm3.loads(THREE + program).reverse_bits()).data
    assert same(dense.unitary(from_qasm(THREE + program)), theirs, phase=False)
