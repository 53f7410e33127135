"""Hardware: what the planner has to know of a machine, read from a TOML file.

    hardware = Hardware.read("h100.toml")        # or the name of one that comes with unisono: Hardware.read("h100")

A device computes at `flops[dtype]` times an efficiency that depends on how much there is to compute: small products
do not fill a device. `efficiency.matmul` and `efficiency.attention` are therefore points (FLOPs of one call, share of
the peak), between which the planner interpolates over the logarithm; a single number is the same share everywhere.
`unisono bench hardware` measures all of it.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.plan.curve import Curve
from unisono.plan.matrices import Matrices

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("KMGTP", start=1)}
_MACHINES = Path(__file__).with_name("machines")


@dataclass(frozen=True)
class Link:
    """How devices talk: an all-reduce of few bytes takes `latency` a step, and many pass at `bandwidth` bytes a second,
    as each device sends and receives at once."""

    bandwidth: float
    latency: float
    measured: tuple[tuple[str, Curve], ...] = ()  # of a collective: (bytes, seconds), between `ranks` ranks
    ranks: int = 0


@dataclass(frozen=True)
class Hardware:
    """A machine of nodes with equal devices."""

    name: str
    devices_per_node: int
    memory: float  # bytes of a device
    flops: dict[str, float]  # peak operations a second, by dtype
    memory_bandwidth: float  # bytes a second
    intra_node: Link
    inter_node: Link
    matmul: Curve = ((1.0, 1.0),)  # share of the peak that a product of so many operations reaches
    attention: Curve = ((1.0, 1.0),)
    memory_efficiency: float = 1.0  # share of the bandwidth that elementwise work reaches
    together: float = 1.0  # share of these rates that ops reach in a step, where one follows another
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)  # of an op: bytes a second, forward, backward
    optimizer_rate: float = 0.0  # bytes a second that an optimizer passes; 0: as other elementwise work
    looped_optimizer_rate: float = 0.0  # ... one that torch steps parameter by parameter; 0: the same
    piece_rate: float = 0.0  # bytes a second of copies into ZeRO's messages and out of them; 0: as other copies
    unit_rate: float = 0.0  # ... in ZeRO's third stage, whose blocks get new memory for every use; 0: as a transpose
    op_overhead: float = 0.0  # seconds that an op takes beside its work, forward or backward
    asynchronous: bool = False  # whether that is the time of a host which runs ahead while the device works
    message_overhead: float = 0.0  # seconds that a message takes of that host, with the copies around it
    # Seconds that a parameter takes of the host, by the stages of ZeRO: in a backward, and after it.
    gradient_overhead: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    parameter_overhead: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    dropout_overhead: float = 0.0  # seconds that a dropout takes beside its work: it finds out what to draw
    matrices: dict[str, Matrices] = field(default_factory=dict)  # of attention, and of attention_dropout; else by FLOPs
    # As `matmul` and `attention`, for a dtype (matmul_float32), or of a backward's products (matmul_backward).
    curves: dict[str, Curve] = field(default_factory=dict)
    step_overhead: float = 0.0  # seconds that a step takes beside its ops
    microbatch_overhead: float = 0.0  # seconds that each further microbatch, or each of a stage, takes beside its ops
    stage_overhead: float = 0.0  # seconds that a stage's forward of a microbatch takes beside its blocks
    post_overhead: float = 0.0  # seconds that a rank takes itself to begin a send or a receive between stages
    recompute_overhead: float = 0.0  # seconds that a block, or a core, takes more where it is computed again
    split_overhead: float = 0.0  # seconds that a layer takes more where a pipeline runs its backward in halves
    overlap: float = 1.0  # share of a gradient's travel that can hide behind the backward
    margin: float = 0.05  # share of the memory that allocators cannot use: fragments and context
    flash: bool = True  # whether attention keeps no matrix of queries by keys
    library_memory: float = 0.0  # bytes that the device's libraries keep once they have computed
    dropout_mask: float = 0.0  # bytes that a dropout keeps for an element; unisono draws again on GPUs
    nodes: int | None = None
    cores: int | None = None  # that the devices of a node are: where they are more than that, they take turns
    source: str = field(default="", compare=False)

    @classmethod
    def read(cls, path: str | Path) -> Hardware:
        """The hardware of a TOML file, or of one that comes with unisono by its bare name (h100, a100, h200)."""
        file = Path(path)
        if not file.is_file() and (_MACHINES / f"{path}.toml").is_file():
            file = _MACHINES / f"{path}.toml"
        if not file.is_file():
            known = ", ".join(sorted(each.stem for each in _MACHINES.glob("*.toml")))
            raise UsageError(f"hardware: there is no file {path}; give a TOML file, or one of: {known}")
        try:
            return cls.parse(file.read_text(), str(file))
        except UnicodeDecodeError as error:
            raise UsageError(f"hardware {file}: not TOML: {error}") from None

    @classmethod
    def parse(cls, text: str, source: str) -> Hardware:
        """The hardware that the text of such a file tells of; `source` is what complaints call it."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"hardware {source}: not TOML: {error}") from None
        return _Reader(source).hardware(table)

    def peak(self, dtype: str) -> float:
        if dtype in self.flops:
            return self.flops[dtype]
        fallback = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "float32")
        if fallback in self.flops:
            return self.flops[fallback]
        raise UsageError(
            f"hardware {self.source or self.name}: no flops.{dtype}, in which the model computes; known are "
            f"{', '.join(self.flops)}"
        )

    def curve(self, kind: str, dtype: str) -> Curve:
        """What share of the peak `matmul` or `attention` reaches."""
        return self.curves.get(f"{kind}_{dtype}", self.attention if kind == "attention" else self.matmul)

    def with_devices(self, devices: int) -> Hardware:
        """The same kind of machine with so many devices."""
        if devices < 1:
            raise UsageError(f"devices={devices}: expected at least 1")
        most = None if self.nodes is None else self.nodes * self.devices_per_node
        if most is not None and devices > most:
            raise UsageError(
                f"{devices} devices are asked for, but {self.source or self.name} has {self.nodes} nodes x "
                f"{self.devices_per_node} = {most}; ask for fewer, or raise machine.nodes"
            )
        if devices > self.devices_per_node and devices % self.devices_per_node:
            raise UsageError(
                f"{devices} devices do not fill nodes of {self.devices_per_node}; use a multiple of "
                f"{self.devices_per_node}"
            )
        return replace(self, nodes=math.ceil(devices / self.devices_per_node))

    def turns(self, devices: int) -> float:
        """How many devices share a core, where so many of them compute."""
        here = min(devices, self.devices_per_node)
        return 1.0 if self.cores is None else max(here / self.cores, 1.0)

    @property
    def usable_memory(self) -> float:
        return self.memory * (1 - self.margin)


# ---- the file --------------------------------------------------------------------------------------------------------

_REQUIRED: dict[str, tuple[str, ...]] = {
    "": ("name",),
    "machine": ("devices_per_node",),
    "device": ("memory", "memory_bandwidth"),
    "intra_node": ("bandwidth", "latency"),
    "inter_node": ("bandwidth", "latency"),
}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "exchange")
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "machine": ("nodes", "cores"),
    "device": (
        "op_overhead",
        "asynchronous",
        "message_overhead",
        "gradient_overhead",
        "parameter_overhead",
        "dropout_overhead",
        "step_overhead",
        "microbatch_overhead",
        "stage_overhead",
        "post_overhead",
        "split_overhead",
        "recompute_overhead",
        "overlap",
        "margin",
        "flash",
        "dropout_mask",
        "library_memory",
        "optimizer_rate",
        "looped_optimizer_rate",
        "piece_rate",
        "unit_rate",
    ),
    "efficiency": (
        "matmul",
        "attention",
        "memory",
        "together",
        "matmul_float32",
        "attention_float32",
        "matmul_backward",
    ),
    "intra_node": ("ranks", *_COLLECTIVES),
    "inter_node": ("ranks", *_COLLECTIVES),
}
_FORMER = {  # that files of older versions have: what is measured in its place has other units
    "device": ("matrix_overhead",),
    "efficiency": ("attention_dropout", "attention_dropout_backward"),
}
_OTHER_CURVES = ("_float32", "_backward")
_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8")
_MATRICES = ("attention", "attention_dropout")
_TABLES = ("machine", "device", "flops", "efficiency", "ops", *_MATRICES, "intra_node", "inter_node")


class _Reader:
    """Reads one file; every complaint names it and the key."""

    def __init__(self, file: str) -> None:
        self.file = file

    def hardware(self, given: dict[str, Any]) -> Hardware:
        self._known("", given, (*_REQUIRED[""], *_TABLES))
        for table in ("machine", "device", "flops", "intra_node", "inter_node"):
            if not isinstance(given.get(table), dict):
                self._fail(f"the table [{table}] is missing; see docs/planner.md for a whole file")
        for table in ("machine", "device", "efficiency", "intra_node", "inter_node"):
            self._known(table, given.get(table, {}), (*_REQUIRED.get(table, ()), *_OPTIONAL.get(table, ())))
        if not isinstance(given.get("name"), str):
            self._fail("name is missing; expected some text")
        machine, device = given["machine"], given["device"]
        efficiency = given.get("efficiency", {})
        return Hardware(
            name=given["name"],
            devices_per_node=self._count("machine", machine, "devices_per_node"),
            nodes=self._count("machine", machine, "nodes") if "nodes" in machine else None,
            cores=self._count("machine", machine, "cores") if "cores" in machine else None,
            memory=self._number("device", device, "memory"),
            memory_bandwidth=self._number("device", device, "memory_bandwidth"),
            flops=self._flops(given["flops"]),
            intra_node=self._link(given, "intra_node"),
            inter_node=self._link(given, "inter_node"),
            matmul=self._curve(efficiency, "matmul"),
            attention=self._curve(efficiency, "attention" if "attention" in efficiency else "matmul"),
            memory_efficiency=self._share("efficiency", efficiency, "memory", 1.0, positive=True),
            together=self._share("efficiency", efficiency, "together", 1.0, positive=True),
            rates=self._rates(given.get("ops", {})),
            optimizer_rate=self._number("device", device, "optimizer_rate", 0.0),
            looped_optimizer_rate=self._number("device", device, "looped_optimizer_rate", 0.0),
            piece_rate=self._number("device", device, "piece_rate", 0.0),
            unit_rate=self._number("device", device, "unit_rate", 0.0),
            op_overhead=self._number("device", device, "op_overhead", 0.0),
            asynchronous=self._flag("device", device, "asynchronous", False),
            message_overhead=self._number("device", device, "message_overhead", 0.0),
            gradient_overhead=self._each_stage(device, "gradient_overhead"),
            parameter_overhead=self._each_stage(device, "parameter_overhead"),
            dropout_overhead=self._number("device", device, "dropout_overhead", 0.0),
            matrices={table: self._matrices(table, given[table]) for table in _MATRICES if table in given},
            curves={key: self._curve(efficiency, key) for key in efficiency if key.endswith(_OTHER_CURVES)},
            step_overhead=self._number("device", device, "step_overhead", 0.0),
            microbatch_overhead=self._number("device", device, "microbatch_overhead", 0.0),
            stage_overhead=self._number("device", device, "stage_overhead", 0.0),
            post_overhead=self._number("device", device, "post_overhead", 0.0),
            split_overhead=self._number("device", device, "split_overhead", 0.0),
            recompute_overhead=self._number("device", device, "recompute_overhead", 0.0),
            overlap=self._share("device", device, "overlap", 1.0),
            margin=self._margin(device),
            flash=self._flag("device", device, "flash", True),
            dropout_mask=self._number("device", device, "dropout_mask", 0.0),
            library_memory=self._number("device", device, "library_memory", 0.0),
            source=self.file,
        )

    def _fail(self, what: str) -> None:
        raise UsageError(f"hardware {self.file}: {what}")

    def _known(self, table: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
        if not isinstance(given, dict):
            self._fail(f"{table} = {given!r}; expected a table [{table}]")
        for key in given:
            if key not in known:
                where = f"[{table}] {key}" if table else key
                if key in _FORMER.get(table, ()):
                    self._fail(
                        f"{where} is no longer known: an older version of unisono wrote the file; measure the machine "
                        "again, with unisono bench hardware > FILE"
                    )
                self._fail(f"{where} is not known; known are {', '.join(known)}")

    def _number(self, table: str, given: dict[str, Any], key: str, default: float | None = None) -> float:
        """A positive number, such as 3.35e12 or "80 GiB"; where there is a default, 0 too."""
        if key not in given:
            if default is None:
                self._fail(f"[{table}] {key} is missing")
            assert default is not None
            return default
        value = given[key]
        if isinstance(value, str):
            value = self._with_unit(table, key, value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._fail(f'[{table}] {key} = {given[key]!r}; expected a number, or text such as "80 GiB"')
        if value < 0 or (value == 0 and default is None):
            self._fail(f"[{table}] {key} = {given[key]!r}; expected a positive number")
        return float(value)

    def _with_unit(self, table: str, key: str, text: str) -> float:
        match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGTP]i?|)(?:B|B/s|FLOP/s)?\s*", text)
        if match is None:
            self._fail(f'[{table}] {key} = {text!r}; expected a number, or text such as "80 GiB"')
        assert match is not None
        try:
            return float(match[1]) * _UNITS[match[2]]
        except ValueError:
            return math.nan

    def _count(self, table: str, given: dict[str, Any], key: str) -> int:
        value = self._number(table, given, key)
        if value != int(value):
            self._fail(f"[{table}] {key} = {given[key]!r}; expected a whole number")
        return int(value)

    def _share(self, table: str, given: dict[str, Any], key: str, default: float, *, positive: bool = False) -> float:
        value = self._number(table, given, key, default)
        if value > 1 or (positive and value == 0):
            self._fail(f"[{table}] {key} = {value}; expected a share between 0 and 1")
        return value

    def _margin(self, device: dict[str, Any]) -> float:
        value = self._share("device", device, "margin", 0.05)
        if value == 1:
            self._fail(f"[device] margin = {device['margin']!r} keeps all memory free; expected a share below 1")
        return value

    def _flag(self, table: str, given: dict[str, Any], key: str, default: bool) -> bool:
        value = given.get(key, default)
        if not isinstance(value, bool):
            self._fail(f"[{table}] {key} = {value!r}; expected true or false")
        return bool(value)

    def _flops(self, given: dict[str, Any]) -> dict[str, float]:
        self._known("flops", given, _DTYPES)
        if not given:
            self._fail(f"[flops] is empty; give operations a second for at least one of {', '.join(_DTYPES)}")
        return {dtype: self._number("flops", given, dtype) for dtype in given}

    def _link(self, given: dict[str, Any], table: str) -> Link:
        values = given[table]
        measured = tuple((op, self._points(table, op, values[op])) for op in _COLLECTIVES if op in values)
        if "latency" not in values:
            self._fail(f"[{table}] latency is missing")
        ranks = self._count(table, values, "ranks") if measured or "ranks" in values else 0
        if measured and ranks < 2:
            self._fail(f"[{table}] ranks = {ranks}; {measured[0][0]} is measured between 2 or more")
        return Link(
            self._number(table, values, "bandwidth"),
            self._number(table, values, "latency", default=0.0),
            measured,
            ranks,
        )

    def _rates(self, given: dict[str, Any]) -> dict[str, tuple[float, float]]:
        if not isinstance(given, dict):
            self._fail(f"ops = {given!r}; expected a table [ops]")
        rates = {}
        for op, pair in given.items():
            if not isinstance(pair, list) or len(pair) != 2:
                self._fail(f"[ops] {op} = {pair!r}; expected [bytes a second forward, bytes a second backward]")
            rates[op] = (self._number("ops", {op: pair[0]}, op), self._number("ops", {op: pair[1]}, op))
        return rates

    def _matrices(self, table: str, given: dict[str, Any]) -> Matrices:
        self._known(table, given, ("call", "forward", "backward", "softmax_width"))
        for key in ("forward", "backward"):
            if key not in given:
                self._fail(f"[{table}] {key} is missing; expected points [elements of a matrix, seconds]")
        forward, backward = (self._points(table, key, given[key]) for key in ("forward", "backward"))
        call, width = (self._each(table, given, key, 2, "forward and backward") for key in ("call", "softmax_width"))
        return Matrices(call, forward, backward, width)

    def _each_stage(self, device: dict[str, Any], key: str) -> tuple[float, ...]:
        return self._each("device", device, key, 4, "seconds for the stages 0 to 3 of ZeRO")

    def _each(self, table: str, given: dict[str, Any], key: str, count: int, of: str) -> tuple[float, ...]:
        values = given.get(key, [0.0] * count)
        if not isinstance(values, list) or len(values) != count:
            self._fail(f"[{table}] {key} = {values!r}; expected {count} numbers, {of}")
        return tuple(self._number(table, {key: value}, key, 0.0) for value in values)

    def _curve(self, given: dict[str, Any], key: str) -> Curve:
        value = given.get(key, 1.0)
        if not isinstance(value, list):
            return ((1.0, self._share("efficiency", {key: value}, key, 1.0, positive=True)),)
        points = self._points("efficiency", key, value)
        for _, share in points:
            self._share("efficiency", {key: share}, key, 1.0, positive=True)
        return points

    def _points(self, table: str, key: str, value: Any) -> Curve:
        points = []
        for point in value if isinstance(value, list) else [value]:
            if not isinstance(point, list) or len(point) != 2:
                self._fail(f"[{table}] {key}: {point!r}; expected points [size of a call, value]")
            points.append((self._number(table, {key: point[0]}, key), self._number(table, {key: point[1]}, key)))
        if not points or sorted(points) != points or len({size for size, _ in points}) != len(points):
            self._fail(f"[{table}] {key}: expected points whose sizes rise")
        return tuple(points)
