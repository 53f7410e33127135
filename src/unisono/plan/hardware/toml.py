"""Hardware files: reading, with errors that name the file and the key, and writing.

    hardware = read_hardware("h100.toml")        # or the name of one that comes with unisono: read_hardware("h100")

A key of [machine] and [device] has the name of the field of `Hardware` that it fills; [efficiency] has curves, either
points (FLOPs of one call, share of the peak) or one share for all sizes.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from unisono.amounts import parse_amount
from unisono.errors import UsageError
from unisono.plan.hardware.spec import Curve, Hardware, Link
from unisono.regular_files import read_text

_LARGEST = 1 << 20  # bytes of a file
_MACHINES = Path(__file__).with_name("machines")

# Keys of each table and how each is read: the names of methods of `_TomlReader`.
_MACHINE = {"devices_per_node": "count", "nodes": "count", "cores": "count"}
_DEVICE = {
    "memory": "number",
    "memory_bandwidth": "number",
    "op_overhead": "number",
    "asynchronous": "flag",
    "overlap": "share",
    "margin": "margin",
    "flash": "flag",
    "dropout_mask": "number",
    "library_memory": "number",
}
_CURVES = ("matmul", "attention")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "exchange")
_LINK = ("bandwidth", "latency", "ranks", *_COLLECTIVES)
_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8")
_TABLES = ("machine", "device", "flops", "efficiency", "intra_node", "inter_node")
_KNOWN = {"machine": tuple(_MACHINE), "device": tuple(_DEVICE), "efficiency": (*_CURVES, "memory")}
_KNOWN |= {"intra_node": _LINK, "inter_node": _LINK}
_FORMER = ("ops", "attention", "attention_dropout")  # tables of older versions, whose [device] had more keys too
_WHOLE = ("flops", "efficiency")  # tables of which every value is written
_DEFAULTS = {field.name: field.default for field in fields(Hardware) if field.default is not MISSING}


def read_hardware(path: str | Path) -> Hardware:
    """The hardware of a TOML file, or of one that comes with unisono by its bare name (h100, a100, h200)."""
    file = Path(path)
    if not os.path.exists(file) and os.path.exists(_MACHINES / f"{path}.toml"):
        file = _MACHINES / f"{path}.toml"
    if not os.path.exists(file):
        known = ", ".join(sorted(each.stem for each in _MACHINES.glob("*.toml")))
        raise UsageError(f"hardware: there is no file {path}; give a TOML file, or one of: {known}")
    try:
        given = tomllib.loads(read_text(file, _LARGEST))
    except OSError as error:
        raise UsageError(f"hardware {file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"hardware {file}: not TOML: {str(error)[:200]}") from None
    return _TomlReader(str(file)).hardware(given)


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_hardware(hardware: Hardware, comment: str = "") -> str:
    """The text of a hardware file; fields with their default value are left out."""
    curves = {name: getattr(hardware, name) for name in _CURVES}
    tables: dict[str, dict[str, Any]] = {
        "machine": {key: getattr(hardware, key) for key in _MACHINE},
        "device": {key: getattr(hardware, key) for key in _DEVICE},
        "flops": hardware.flops,
        "efficiency": curves | {"memory": hardware.memory_efficiency},
        "intra_node": _link(hardware.intra_node),
        "inter_node": _link(hardware.inter_node),
    }
    lines = [f"# {comment}"] if comment else []
    lines.append(f'name = "{hardware.name}"')
    for table, values in tables.items():
        given = {key: value for key, value in values.items() if table in _WHOLE or value != _DEFAULTS.get(key)}
        if given or table in ("machine", "device", "flops"):
            lines += ["", f"[{table}]", *(f"{key} = {_text(value)}" for key, value in given.items())]
    return "\n".join(lines) + "\n"


def _link(link: Link) -> dict[str, Any]:
    ranks = {"ranks": link.ranks} if link.ranks else {}
    return {"bandwidth": link.bandwidth, "latency": link.latency} | ranks | dict(link.measured)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and value < 1e12 else f"{value:.5g}"
    return str(value)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _TomlReader:
    """Reads one file; every error names it and the key."""

    def __init__(self, file: str) -> None:
        self.file = file

    def hardware(self, given: dict[str, Any]) -> Hardware:
        self._known("", given, ("name", *_TABLES))
        for table in ("machine", "device", "flops", "intra_node", "inter_node"):
            if not isinstance(given.get(table), dict):
                self._fail(f"the table [{table}] is missing; see docs/planner.md for a complete file")
        for table, keys in _KNOWN.items():
            self._known(table, given.get(table, {}), keys)
        if not isinstance(given.get("name"), str):
            self._fail("name is missing; expected some text")
        efficiency = given.get("efficiency", {})
        return Hardware(
            name=given["name"],
            flops=self._flops(given["flops"]),
            intra_node=self._link(given, "intra_node"),
            inter_node=self._link(given, "inter_node"),
            matmul=self._curve(efficiency, "matmul"),
            attention=self._curve(efficiency, "attention" if "attention" in efficiency else "matmul"),
            source=self.file,
            memory_efficiency=self.share("efficiency", efficiency, "memory", True),
            **self._values("machine", given["machine"], _MACHINE),
            **self._values("device", given["device"], _DEVICE),
        )

    def _values(self, table: str, given: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
        """The fields that a table gives, and those that it must."""
        return {
            key: getattr(self, kind)(table, given, key)
            for key, kind in kinds.items()
            if key in given or key not in _DEFAULTS
        }

    def _fail(self, what: str) -> None:
        raise UsageError(f"hardware {self.file}: {what if len(what) < 600 else what[:300] + ' ... ' + what[-200:]}")

    def _known(self, table: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
        if not isinstance(given, dict):
            self._fail(f"{table} = {given!r}; expected a table [{table}]")
        for key in given:
            if key not in known:
                where = f"[{table}] {key}" if table else key
                if (table == "device" and re.search("_(overhead|rate)$", key)) or (not table and key in _FORMER):
                    self._fail(
                        f"{where} is no longer known: an older version of unisono wrote the file; measure the machine "
                        "again, with unisono bench hardware > FILE"
                    )
                self._fail(f"{where} is not known; known are {', '.join(known)}")

    def number(self, table: str, given: dict[str, Any], key: str) -> float:
        """A number such as 3.35e12 or "80 GiB": positive, or 0 too where the field has a default."""
        if key not in given:
            self._fail(f"[{table}] {key} is missing")
        value = given[key]
        if isinstance(value, str):
            value = self._with_unit(table, key, value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._fail(f'[{table}] {key} = {given[key]!r}; expected a number, or text such as "80 GiB"')
        may_be_zero = key == "latency" or (table == "device" and _DEFAULTS.get(key) is not None)
        if value < 0 or (value == 0 and not may_be_zero):
            self._fail(f"[{table}] {key} = {given[key]!r}; expected a positive number")
        return float(value)

    def _with_unit(self, table: str, key: str, text: str) -> float:
        value = parse_amount(text, "", "B", "B/s", "FLOP/s")
        if value is None:
            self._fail(f'[{table}] {key} = {text!r}; expected a number, or text such as "80 GiB"')
        assert value is not None
        return value

    def count(self, table: str, given: dict[str, Any], key: str) -> int:
        value = self.number(table, given, key)
        if value != int(value):
            self._fail(f"[{table}] {key} = {given[key]!r}; expected a whole number")
        return int(value)

    def share(self, table: str, given: dict[str, Any], key: str, positive: bool = False) -> float:
        value = self.number(table, {key: 1.0} | given, key)
        if value > 1 or (positive and value == 0):
            self._fail(f"[{table}] {key} = {value}; expected a share between 0 and 1")
        return value

    def margin(self, table: str, given: dict[str, Any], key: str) -> float:
        value = self.share(table, given, key)
        if value == 1:
            self._fail(f"[{table}] {key} = {given[key]!r} keeps all memory free; expected a share below 1")
        return value

    def flag(self, table: str, given: dict[str, Any], key: str) -> bool:
        if not isinstance(given[key], bool):
            self._fail(f"[{table}] {key} = {given[key]!r}; expected true or false")
        return bool(given[key])

    def _flops(self, given: dict[str, Any]) -> dict[str, float]:
        self._known("flops", given, _DTYPES)
        if not given:
            self._fail(f"[flops] is empty; give operations a second for at least one of {', '.join(_DTYPES)}")
        return {dtype: self.number("flops", given, dtype) for dtype in given}

    def _link(self, given: dict[str, Any], table: str) -> Link:
        values = given[table]
        measured = tuple((op, self._points(table, op, values[op])) for op in _COLLECTIVES if op in values)
        bandwidth, latency = self.number(table, values, "bandwidth"), self.number(table, values, "latency")
        ranks = self.count(table, values, "ranks") if measured or "ranks" in values else 0
        if measured and ranks < 2:
            self._fail(f"[{table}] ranks = {ranks}; {measured[0][0]} is measured between 2 or more")
        return Link(bandwidth, latency, measured, ranks)

    def _curve(self, given: dict[str, Any], key: str) -> Curve:
        value = given.get(key, 1.0)
        if not isinstance(value, list):
            return ((1.0, self.share("efficiency", {key: value}, key, True)),)
        points = self._points("efficiency", key, value)
        for _, share in points:
            self.share("efficiency", {key: share}, key, True)
        return points

    def _points(self, table: str, key: str, value: Any) -> Curve:
        points = []
        for point in value if isinstance(value, list) else [value]:
            if not isinstance(point, list) or len(point) != 2:
                self._fail(f"[{table}] {key}: {point!r}; expected points [size of a call, value]")
            points.append((self.number(table, {key: point[0]}, key), self.number(table, {key: point[1]}, key)))
        if not points or sorted(points) != points or len({size for size, _ in points}) != len(points):
            self._fail(f"[{table}] {key}: expected points whose sizes rise")
        return tuple(points)
