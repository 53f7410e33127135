"""Feeds damaged and hostile files to all readers: each file must be read, or refused with an error of unisono.

    python tools/fuzz_readers.py --inputs 10000          # of each reader; prints a line for each, exits 1 on a fault
    python tools/fuzz_readers.py --reader qasm --first 812 --inputs 1      # one input again, which is printed
    python tools/fuzz_readers.py --self-check                # readers with planted faults, all of which must be found

An input is a file of the corpus, changed at random, the same in every run. A fault is any other exception, a process
that dies, more CPU time or memory than `_SECONDS` and `_BYTES`, a file opened outside of the input's folder, or code
that runs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import unisono as uni
from unisono.comm.signatures.plain_data import decoded, encoded
from unisono.comm.watchdog import flight_recorder
from unisono.errors import UnisonoError
from unisono.launch.hosts import assign_ranks, parse_file, parse_list
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.plan.plan import Plan
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.qasm import load_qasm
from unisono.quantum.state import State
from unisono.quantum.storage import load as load_state
from unisono.quantum.storage import save as save_state
from unisono.report.run_record import Run
from unisono.train.checkpoint.manifest import Manifest
from unisono.train.checkpoint.restoring import full_entry, read_entries
from unisono.train.checkpoint.weights import import_weights

_SECONDS = 5.0  # of CPU time that an input may take
_BYTES = 1 << 30  # that it may take beyond what the process has
_SCRIPT = "<script>alert(1)</script>"
_HOME = [str(Path(each).resolve()) for each in (sys.prefix, sys.base_prefix, Path(__file__).parent.parent)]
_RUNS = ("exec", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pickle.find_class")
_REACHES = ("socket.connect", "socket.bind", "ctypes.dlopen", "urllib.Request")

NUMBERS: list[Any] = [0, -1, 1, 2, 255, 2**31, 2**63, -(2**63), 10**30, 1.5, 1e308, float("inf"), float("nan")]
TEXTS = ["", "..", "../../secret", "/etc/passwd", "a\0b", "²", "n" * 5000, _SCRIPT, "'\"><b>", "{{ 7 * 7 }}", "float32"]
VALUES: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}, [[]], [1, 2], {"a": 1}, {"tensor": "model.weight"}]


@dataclass(frozen=True)
class Reader:
    """corpus: good files, which it reads; words: what may be inserted into them; read: writes and reads an input."""

    corpus: list[bytes]
    read: Callable[[Path, bytes, random.Random], None]
    words: list[str]
    is_json: bool = False


# ---- inputs ----------------------------------------------------------------------------------------------------------


def changed(reader: Reader, dice: random.Random) -> bytes:
    data = dice.choice(reader.corpus)
    if reader.is_json and dice.random() < 0.8:
        value = json.loads(data)
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            value = _changed_json(value, dice)
        return json.dumps(value).encode()
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        data = _changed_bytes(data, reader, dice)
    return data


def _changed_json(value: Any, dice: random.Random) -> Any:
    """With one node replaced, removed, repeated or added, at a random depth."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice([*value])
        match dice.randrange(8):
            case 0:
                return {other: each for other, each in value.items() if other != key}
            case 1:
                return value | {str(dice.choice(TEXTS)): dice.choice(VALUES)}
            case _:
                return value | {key: _changed_json(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * dice.choice((2, 3, 1000)) + value[at + 1 :]
            case _:
                return [*value[:at], _changed_json(value[at], dice), *value[at + 1 :]]
    return dice.choice(VALUES)


def _changed_bytes(data: bytes, reader: Reader, dice: random.Random) -> bytes:
    first = dice.randrange(len(data) + 1)
    last = min(len(data), first + dice.choice((1, 1, 4, 16, 64, 1024)))
    match dice.randrange(9):
        case 0:
            return data[:first] + bytes([dice.randrange(256)]) + data[first + 1 :]
        case 1:
            return data[:first] + data[last:]
        case 2:
            return data[:last] + data[first:last] * dice.choice((1, 2, 50)) + data[last:]
        case 3:
            return data[:first]
        case 4:
            other = dice.choice(reader.corpus)
            return data[:first] + other[dice.randrange(len(other) + 1) :]
        case 5:
            return data[:first] + str(dice.choice((*NUMBERS[:8], "9" * 5000, "1e999"))).encode() + data[first:]
        case 6:
            return data[:first] + dice.choice("([{-!\"'").encode() * dice.choice((1, 200, 20_000)) + data[first:]
        case _:
            return data[:first] + dice.choice(reader.words or TEXTS).encode() + data[first:]


# ---- readers ---------------------------------------------------------------------------------------------------------


def _manifest(folder: Path, data: bytes, dice: random.Random) -> None:
    text = data.decode("utf-8", "replace")
    signed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text})
    (folder / "manifest.json").write_bytes(data if dice.random() < 0.1 else signed.encode())
    manifest = Manifest.read(folder)
    if not manifest.faults(folder):
        read_entries(folder, manifest, [full_entry(name, manifest) for name in manifest.tensors])


def _safetensors(folder: Path, data: bytes, dice: random.Random) -> None:
    """Also with the length of the header put right, so that the header itself is read."""
    if dice.random() < 0.7:
        header, _, rest = data[8:].rpartition(b"}}")
        data = (len(header) + 2).to_bytes(8, "little") + header + b"}}" + rest
    (folder / "w.safetensors").write_bytes(data)
    import_weights(nn.Linear(3, 2), folder / "w.safetensors", strict=dice.random() < 0.5)


def _state(folder: Path, data: bytes, dice: random.Random) -> None:
    (folder / "manifest.json").write_bytes(data)
    if dice.random() < 0.2:
        array = bytearray((folder / "000000.npy").read_bytes())
        array[dice.randrange(128)] = dice.randrange(256)  # its header, which NumPy reads
        (folder / "000000.npy").write_bytes(array)
    load_state(folder, kernel="reference")


def _hardware(folder: Path, data: bytes, dice: random.Random) -> None:
    (folder / "machine.toml").write_bytes(data)
    hardware = read_hardware(folder / "machine.toml")
    hardware.with_devices(2).short_of(1e12)
    write_hardware(hardware)


def _plan(folder: Path, data: bytes, dice: random.Random) -> None:
    plan = Plan.parse(data.decode("utf-8", "replace"))
    assert Plan.parse(str(plan)) == plan
    plan.fit(plan.world)
    assert plan.shape


def _hosts(folder: Path, data: bytes, dice: random.Random) -> None:
    (folder / "hosts").write_bytes(data)
    if dice.random() < 0.3:
        assign_ranks(parse_list(data.decode("utf-8", "replace").strip()), 2)
    else:
        assign_ranks(parse_file(folder / "hosts"), 2)


def _qasm(folder: Path, data: bytes, dice: random.Random) -> None:
    (folder / "circuit.qasm").write_bytes(data)
    circuit = load_qasm(folder / "circuit.qasm", limit=20_000)
    assert circuit.wires > 0


def _run(folder: Path, data: bytes, dice: random.Random) -> None:
    """One JSON value has the files of a run folder; the page must not have what was written into any of them."""
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        files = {"run.json": data.decode("utf-8", "replace")}
    (folder / "ranks").mkdir(exist_ok=True)
    for name, content in files.items() if isinstance(files, dict) else ():
        if name in ("run.json", "steps.jsonl", "ranks/0.json", "ranks/1.json", "program.html"):
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
    from unisono.report.command import pages

    page, _ = pages(Run.read(folder))
    assert _SCRIPT not in page, "the page has a script that was in the run folder"


# ---- corpora ---------------------------------------------------------------------------------------------------------

QASM = (
    b'OPENQASM 2.0; include "qelib1.inc"; qreg q[3]; creg c[3]; gate g(a) p, r { rx(a/2) p; cx p, r; u3(a,-a^2,pi) r; }'
    b"\nh q; g(0.5) q[0], q[1]; if(c==3) x q[2]; barrier q; measure q -> c; reset q[0];",
    b'OPENQASM 3.0; include "stdgates.inc"; include "more.inc"; input float t; const int n = 4; qubit[n] q; bit[2] c;\n'
    b"def f(qubit a, angle b) -> bit { rz(b) a; return measure a; } array[float[64], 2, 2] m = {{1, 2}, {3, 4}};\n"
    b"for int i in [0:2:n - 1] { ctrl(2) @ pow(2) @ inv @ x q[0], q[1], q[2]; rx(m[1][0] * t / 3) q[i]; }\n"
    b"int k = 0; while (k < 3) { k += 1; if (k == 2) continue; own q[k]; } let a = q[0:1] ++ q[3];\n"
    b"c[0] = f(q[0], 0.1); if (c[0] && !c[1]) { negctrl @ U(1, 2, 3) a[0], a[1]; } else { y q; } gphase(pi);\n"
    b"c = measure q[0:1];",
)
_QASM_WORDS = """include "../secret"; |include "/etc/passwd"; |include "circuit.qasm"; |for |while |if |def |gate |qubit
|bit |measure |reset |barrier |let |array|const |input |return |break;|continue;|ctrl @ |inv @ |pow(2) @ |++|->|[|]|{|}
|(|)|;|**|pi|sin(|float(|q[0]|q[0:3]|0x|1e9|2**1024|4096|OPENQASM |/*|//|pragma |@note |true|sizeof(|weight_0|&&"""


def _dump() -> bytes:
    """As torch's flight recorder writes it."""
    entry = {
        "frames": [{"name": "train", "filename": "train.py", "line": 3}],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "state": "started",
        "retired": False,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 300]],
        "input_dtypes": ["Float"],
    }
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return pickle.dumps({"version": "2.10", "pg_config": groups, "entries": [entry, entry]}, 2)


def _flight(folder: Path, data: bytes, dice: random.Random) -> None:
    (folder / "rank_0").write_bytes(data)
    flight_recorder.explain({0: folder / "rank_0"})


_DATA_WORDS = [
    *(letter + "\1" + "\0" * 7 for letter in "Isbyvtzrnoleda@"),
    *(letter + "\xff" * 8 for letter in "ifIsbtled@"),
    *("l" + "\1" + "\0" * 7) * 3, "N", "T", "b" + "\0" * 8, ("l" + "\1" + "\0" * 7) * 2000,
]  # fmt: skip


def _data(folder: Path, data: bytes, dice: random.Random) -> None:
    """What is read can be written again, and is then read as the same bytes."""
    written = encoded(decoded(data, 0, "the input"))
    assert encoded(decoded(written, 0, "the input")) == written


def _messages() -> list[bytes]:
    shared = [1, -1, 2**63, -(10**30), 0.5, float("nan"), complex(1, -0.0), "text", b"bytes", None, True, False]
    tensors = [torch.ones(3, 2), torch.zeros((), dtype=torch.bfloat16), torch.tensor([True, False]), torch.empty(0, 4)]
    places = (
        torch.Size([2, 3]),
        range(7),
        torch.float8_e4m3fn,
        torch.device("cuda", 1),
        {1, (2, "3")},
        frozenset({b"4"}),
    )
    return [encoded([shared, shared]), encoded({"tensors": tensors, ("a", 1): places, 2: {}}), encoded([[[[[]]]]])]


def readers(folder: Path) -> dict[str, tuple[Path, Reader]]:
    """With a folder for each of them that holds what belongs to its input."""
    weights = nn.Linear(3, 2)
    trainer = uni.parallelize(
        lambda: nn.Linear(3, 2), "dp=1", loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.AdamW(p)
    )
    trainer.step((torch.ones(2, 3), torch.ones(2, 2)))
    uni.Checkpoints(folder / "saved").save(trainer, 1, {"epoch": 1}, {"list": [1, (2.0, "a")]})
    uni.shutdown()
    (folder / "saved" / "step-00000001").rename(folder / "manifest")
    body = json.loads((folder / "manifest" / "manifest.json").read_text())["body"].encode()
    uni.export_weights(weights, folder / "w.safetensors")
    save_state(State(4, seed=1, kernel="reference").run(Circuit(4).h(0)), folder / "state")
    machines = (Path(uni.__file__).parent / "plan" / "hardware" / "machines").glob("*.toml")
    plans = [b"dp=4,tp=2,pp=2,zero=1,shard=2,sp,microbatches=8,schedule=interleaved,chunks=2,boundaries=0+2+5+7"]
    plans += [b"dp=2,ep=2,cp=2,zero=3,context=ulysses,recompute=auto:12GiB,offload,compile", b"recompute=*.mlp+*.attn"]
    hosts = [b"# nodes\nnode0 slots=4\nnode1 slots=2  # slow\n\n::1 slots=1\n", b"a\na\nb\n", b"a:2,b:2,[::1]:4"]
    run = json.dumps(run_files()).encode()
    for name in ("safetensors", "hardware", "plan", "hosts", "qasm", "run", "flight", "data"):
        (folder / name).mkdir()
    (folder / "qasm" / "more.inc").write_text("gate own a { h a; }")
    (folder / "secret").write_text("gate secret a { h a; }")
    made = {
        "manifest": Reader([body], _manifest, [], True),
        "safetensors": Reader([(folder / "w.safetensors").read_bytes()], _safetensors, []),
        "state": Reader([(folder / "state" / "manifest.json").read_bytes()], _state, [], True),
        "hardware": Reader(
            [file.read_bytes() for file in sorted(machines)],
            _hardware,
            ["[device]", "[[flops]]", "a.b.c = 1\n", "nan", "1979-05-27", "= [[1, 2]]", '"80 GiB"', "0x_", "'''"],
        ),
        "plan": Reader(plans, _plan, ["dp=", "recompute=auto:", "boundaries=", "²", "٣", ",", "+", "=", "GiB", *TEXTS]),
        "hosts": Reader(hosts, _hosts, ["slots=", "slots=²", ":", "#", "-oProxyCommand=x", "localhost", "\n", *TEXTS]),
        "qasm": Reader([*QASM], _qasm, _QASM_WORDS.split("|") + TEXTS),
        "run": Reader([run], _run, [], True),
        "flight": Reader([_dump()], _flight, ["\x96", "\x80\x04", "cos\nsystem\n(S'true'\ntR", "r", "X", "R", *TEXTS]),
        "data": Reader(_messages(), _data, _DATA_WORDS),
    }
    return {name: (folder / name, reader) for name, reader in made.items()}


def run_files() -> dict[str, Any]:
    start = {"model": {"name": "GPT", "parameters": 1000}, "plan": "pp=2,microbatches=2", "world": 2, "backend": "gloo"}
    start |= {"steps": 3, "epochs": 1, "batch_size": 8, "seed": 0, "python": "3.11", "torch": "2.13", "first_step": 0}
    start |= {"time": 1.7e9, "predicted": {"seconds": 0.1, "why": [["dp=2", "needs more memory"]]}}
    steps = [{"step": n, "loss": 1.0 / n, "rate": 0.1, "seconds": 0.1, "validation_loss": 1.0} for n in (1, 2, 3)]
    line = {"kind": "op", "phase": "forward", "name": "linear", "path": "0.mlp", "shape": "f32[2, 3]"}
    sent = {"kind": "communication", "phase": "forward", "name": "send", "path": "1", "shape": "f32[2]", "ranks": [1]}
    part = {"kind": "part", "name": "forward", "microbatch": 0, "stage": 0}
    files: dict[str, Any] = {
        "run.json": {"starts": [start]},
        "steps.jsonl": "\n".join(map(json.dumps, steps)),
        "program.html": "<p>program</p>",
    }
    for rank in (0, 1):
        files[f"ranks/{rank}.json"] = {
            "memory": {"parameters": 100, "activations": 50},
            "collectives": {"send": {"calls": 1, "payload": 8, "sent": 8}},
            "coordinate": {"pp": rank},
            "step": {"began": 1.0, "ended": 2.0},
            "spans": [[kind, rank, each, 1.0 + each, 1.5 + each] for each in (0, 1) for kind in "FB"],
            "program": [part, line, sent | {"bytes": 8}],
        }
    return files


# ---- the guards ------------------------------------------------------------------------------------------------------


class Fault(BaseException):
    """What must not happen; no `except Exception` of a reader hides it."""


class Guard:
    """Watches one input: time, memory, the files that are opened, and code that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        self.is_on = False
        self.seen = ""
        sys.addaudithook(self._heard)
        signal.signal(signal.SIGPROF, self._late)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _BYTES, resource.RLIM_INFINITY))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.is_on, self.seen = True, ""
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.is_on = False
        if self.seen:
            raise Fault(self.seen)

    def _late(self, *_: Any) -> NoReturn:
        raise Fault(f"it took more than {_SECONDS:g} s")

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or self.seen:
            return
        if event in _RUNS or event in _REACHES:
            self.seen = f"{event} {str(args)[:200]}"
        elif event in ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"):
            path = args[0]
            if isinstance(path, str | bytes | os.PathLike) and not self._may_open(os.fsdecode(path), event, args):
                self.seen = f"{event} of {os.fsdecode(path)[:200]!r}"

    def _may_open(self, path: str, event: str, args: tuple[Any, ...]) -> bool:
        self.is_on = False  # resolving a path opens others
        try:
            full = os.path.realpath(path) if "\0" not in path else self.folder
        finally:
            self.is_on = True
        is_read = event == "open" and not (len(args) > 2 and isinstance(args[2], int) and args[2] & os.O_ACCMODE)
        return full.startswith(self.folder) or (is_read and full.startswith(tuple(_HOME))) or full == "/dev/null"


def fault_of(reader: Reader, guard: Guard, kept: Path, folder: Path, number: int, name: str) -> str:
    """Feed one input; what went wrong, or ""."""
    dice = random.Random(f"{name} {number}")
    data = changed(reader, dice)
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    try:
        with guard.on():
            reader.read(folder, data, dice)
    except UnisonoError as error:
        return "" if len(str(error)) < 3000 else f"an error of {len(str(error))} characters"
    except Fault as fault:
        return str(fault)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
    return ""


def fuzz(name: str, kept: Path, reader: Reader, first: int, inputs: int, is_shown: bool) -> tuple[list[str], float]:
    """The faults of a reader, which runs in a process of its own, and the CPU seconds that it took."""
    shared = mmap.mmap(-1, 8)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        warnings.simplefilter("ignore")
        folder = kept.with_name(f"{name}-input")
        folder.mkdir()
        for good in reader.corpus:  # lazy imports are no fault
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            with contextlib.suppress(UnisonoError):
                reader.read(folder, good, random.Random(0))
        guard, found = Guard(folder), []
        for number in range(first, first + inputs):
            shared[:] = number.to_bytes(8, "little")
            if is_shown:
                print(changed(reader, random.Random(f"{name} {number}")))
            fault = fault_of(reader, guard, kept, folder, number, name)
            found += [f"{name} {number}: {fault}"] if fault else []
        with os.fdopen(write, "w") as out:
            out.write("\n".join(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        found = [line for line in lines.read().split("\n") if line]
    _, status, usage = os.wait4(child, 0)
    if status:
        number = int.from_bytes(shared[:], "little")
        found.append(f"{name} {number}: the process ended with {os.waitstatus_to_exitcode(status)}")
    return found, usage.ru_utime + usage.ru_stime


# ---- planted faults --------------------------------------------------------------------------------------------------


def _spins(*_: Any) -> None:
    while True:
        time.monotonic()


PLANTED: dict[str, Callable[..., None]] = {
    "raises": lambda folder, data, dice: int("x"),
    "spins": _spins,
    "allocates": lambda folder, data, dice: bytearray(4 * _BYTES),
    "reaches": lambda folder, data, dice: (folder.parent / "secret").read_bytes(),
    "runs": lambda folder, data, dice: exec("1"),
    "dies": lambda folder, data, dice: os.kill(os.getpid(), signal.SIGSEGV),
}


def _is_found(name: str, read: Callable[..., None], folder: Path) -> bool:
    (folder / name).mkdir()
    planted = Reader([b"good"], lambda *given: None if given[1] == b"good" else read(*given), ["x"])
    return bool(fuzz(name, folder / name, planted, 0, 3, False)[0])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="of each reader")
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--reader", action="append", help="only this one; may be repeated")
    parser.add_argument("--self-check", action="store_true")
    chosen = parser.parse_args(arguments)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files are many, and small
    folder = Path(tempfile.mkdtemp(prefix="fuzz-readers-", dir=memory))
    try:
        if chosen.self_check:
            (folder / "secret").write_text("secret")
            missed = [name for name, read in PLANTED.items() if not _is_found(name, read, folder)]
            print(f"planted faults that were missed: {', '.join(missed) or 'none'} of {len(PLANTED)}")
            return int(bool(missed))
        all_found = 0
        known = readers(folder)
        for name in chosen.reader or known:
            found, seconds = fuzz(name, *known[name], chosen.first, chosen.inputs, chosen.inputs == 1)
            print(f"{name}: {chosen.inputs} inputs, {len(found)} faults, {seconds:.0f} s of CPU time", flush=True)
            for fault in found[:20]:
                print(f"  {fault}")
            all_found += len(found)
        return int(bool(all_found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
