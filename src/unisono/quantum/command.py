"""`unisono qsim`: an OpenQASM file on one rank or many; its options, its output and its exit code."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from unisono.amounts import format_seconds
from unisono.errors import LaunchError, UsageError

_MOST_ROWS = 20  # of outcomes, amplitudes and probabilities on the screen; JSON has them all
_LARGEST_STATE = 16  # wires whose amplitudes are printed


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("qsim", help="simulate an OpenQASM circuit", allow_abbrev=False)
    add = parser.add_argument
    add("circuit", metavar="circuit.qasm", help="OpenQASM 2, or the common part of 3")
    add("-n", "-np", dest="n", type=int, default=1, metavar="N", help="ranks (default: 1)")
    add("--backend", choices=("gloo", "nccl", "mpi"), help="default: gloo")
    add(
        "--shots", type=int, metavar="K", help="read the measured bits, or all wires where nothing is measured, K times"
    )
    add(
        "--observable",
        action="append",
        default=[],
        metavar="WORDS",
        help='such as "Z0 Z1" or "0.5 X0 + Z2"; repeatable',
    )
    add("--variance", action="store_true", help="of the observables too")
    add("--probabilities", metavar="WIRES", help="of reading these wires, such as 0,3,4")
    add("--state", action="store_true", help=f"print the amplitudes (up to {_LARGEST_STATE} wires)")
    add("--save", metavar="FOLDER", help="save the state there")
    add("--weights", default="", metavar="A,B,...", help="values of a text's inputs, in their order")
    add("--features", default="", metavar="A,B,...", help="values of inputs called feature_0, feature_1, ...")
    add("--seed", type=int, default=0, help="of shots and measurements (default: 0)")
    add("--dtype", choices=("complex64", "complex128"), default="complex128")
    add("--plan", action="store_true", help="print what it would take on N ranks, and run nothing")
    add("--draw", action="store_true", help="draw the circuit")
    add("--json", action="store_true", help="print everything as JSON")
    add("--quiet", action="store_true", help="print the results alone, without the line about the circuit")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    from unisono.quantum.job import QuantumJob
    from unisono.quantum.qasm import load_qasm

    if chosen.n < 1:
        raise UsageError(f"-n {chosen.n}: expected at least 1 rank")
    circuit = load_qasm(chosen.circuit)
    job = QuantumJob(
        circuit,
        tuple(chosen.observable),
        shots=chosen.shots,
        probabilities=_wires(chosen.probabilities),
        variance=chosen.variance,
        state=chosen.state,
        save=chosen.save,
        weights=_numbers("--weights", chosen.weights),
        features=_numbers("--features", chosen.features),
        seed=chosen.seed,
        dtype=chosen.dtype,
    )
    job.check()
    if chosen.state and circuit.wires > _LARGEST_STATE:
        raise UsageError(f"--state of {circuit.wires} wires: at most {_LARGEST_STATE} are printed; use --save")
    if chosen.draw and not chosen.json:
        print(circuit.draw())
    if chosen.plan:
        plan = job.plan(chosen.n)
        print(json.dumps(plan, indent=1) if chosen.json else plan["text"])
        return 0
    if chosen.draw and not job.asks_something:
        return 0
    if not job.asks_something:
        raise UsageError("nothing is asked for; add --shots K, --observable, --probabilities, --state or --save")
    found = _found(job, chosen.n, chosen.backend)
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        _show(chosen.circuit, found, chosen.quiet)
    return 0


def _found(job: Any, ranks: int, backend: str | None) -> dict[str, Any]:
    from unisono.launch.spawn import spawn
    from unisono.quantum.circuit.circuit import Circuit
    from unisono.quantum.job import QuantumJob, on_rank, read

    if ranks == 1 and backend is None:
        return read(job, None)
    # Kernels that are not in the cache yet are compiled here, once, instead of on every rank.
    read(QuantumJob(Circuit(6).h(0).cnot(0, 1), ("X0 Z1",), dtype=job.dtype), None)
    try:
        return spawn(on_rank, ranks, backend, (job,))[0]
    except LaunchError as error:
        mark = "unisono.errors.UsageError: "
        refusals = [line for line in str(error).splitlines() if line.startswith(mark)]
        if not refusals:
            raise
        raise UsageError(refusals[-1].removeprefix(mark)) from None


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(item) for item in text.split(",") if item.strip())
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers with commas between them") from None
    if not all(map(math.isfinite, numbers)):
        raise UsageError(f"{option} {text!r}: expected finite numbers")
    return numbers


def _wires(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise UsageError(f"--probabilities {text!r}: expected wires with commas between them, such as 0,3,4") from None


def _show(name: str, found: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        ranks = f"{found['ranks']} ranks" if found["ranks"] > 1 else "one rank"
        print(
            f"{name}: {found['wires']} wires, {found['operations']} operations, depth {found['depth']}; {ranks}, "
            f"{found['dtype']}, {format_seconds(found['seconds'])}"
        )
        if found.get("note"):
            print(found["note"])
    for each in found.get("observables", ()):
        variance = f"   variance {each['variance']:.9g}" if "variance" in each else ""
        print(f"<{each['observable']}> = {each['value']:.12g}{variance}")
    _table("outcome", found.get("counts"), lambda value: f"{value:>8d}", _bar)
    _table("reading", found.get("probabilities"), lambda value: f"{value:.9f}", _bar)
    _table("basis state", found.get("state"), lambda value: f"{value[0]:+.9f} {value[1]:+.9f}i", lambda *_: "")
    if "saved" in found and not quiet:
        print(f"the state is in {found['saved']}")


def _table(title: str, entries: dict[str, Any] | None, shown: Any, bar: Any) -> None:
    if entries is None:
        return
    print(title)
    listed = list(entries.items())
    total = sum(entries.values()) if title != "basis state" else 1
    for key, value in listed[:_MOST_ROWS]:
        print(f"  {key}  {shown(value)} {bar(value, total)}".rstrip())
    if len(listed) > _MOST_ROWS:
        print(f"  ... and {len(listed) - _MOST_ROWS} more; --json lists them all")


def _bar(value: float, total: float) -> str:
    return "█" * round(40 * value / total) if total else ""
