"""Hardware files: what is read, and what is refused with the file and the key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.plan.cost.collective import group
from unisono.plan.hardware.spec import Hardware, seconds_at, share_at
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.plan.plan import REPLICAS, Plan

GOOD = """
name = "test"
[machine]
devices_per_node = 4
[device]
memory = "16 GiB"
memory_bandwidth = 1e12
[flops]
float32 = "10 TFLOP/s"
[efficiency]
matmul = [[1e6, 0.1], [1e8, 0.5]]
[intra_node]
bandwidth = 1e11
latency = 1e-6
[inter_node]
bandwidth = 1e10
latency = 1e-5
"""


def read(folder: Path, text: str) -> Hardware:
    file = folder / "machine.toml"
    file.write_text(text)
    return read_hardware(file)


def test_a_whole_file(tmp_path: Path) -> None:
    hardware = read(tmp_path, GOOD)
    assert hardware.memory == 16 * 2**30
    assert hardware.peak("float32") == 1e13
    assert [share_at(hardware.matmul, size) for size in (1e5, 1e6, 1e7, 1e9)] == pytest.approx([0.01, 0.1, 0.3, 0.5])
    assert hardware.with_devices(16).nodes == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('memory = "16 GiB"', "", "[device] memory is missing"),
        ('memory = "16 GiB"', "memory = -1", "[device] memory = -1; expected a positive number"),
        ('memory = "16 GiB"', 'memory = "many"', "[device] memory = 'many'; expected a number"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = 0", "[device] memory_bandwidth = 0; expected a positive"),
        ("latency = 1e-6", "latency = 1e-6\nspeed = 3", "[intra_node] speed is not known; known are bandwidth"),
        ("latency = 1e-6", "", "[intra_node] latency is missing"),
        ("[flops]", "[flop]", "flop is not known"),
        (
            'memory = "16 GiB"',
            'memory = "16 GiB"\nunit_rate = 1e-6',
            "[device] unit_rate is no longer known: an older version of unisono wrote the file; measure the "
            "machine again, with unisono bench hardware > FILE",
        ),
        ('float32 = "10 TFLOP/s"', "float31 = 1e12", "[flops] float31 is not known"),
        ("devices_per_node = 4", "devices_per_node = 2.5", "expected a whole number"),
        ("[[1e6, 0.1], [1e8, 0.5]]", "[[1e8, 0.5], [1e6, 0.1]]", "sizes rise"),
        ("[[1e6, 0.1], [1e8, 0.5]]", "1.5", "expected a share between 0 and 1"),
        ("latency = 1e-6", "latency = 1e-6\nranks = 1\nsend = [[8, 1e-5]]", "ranks = 1; send is measured between 2"),
        (
            'memory = "16 GiB"',
            'memory = "16 GiB"\nmargin = 1',
            "margin = 1 keeps all memory free; expected a share below",
        ),
        (
            "[intra_node]",
            "[ops]\ngelu = [1e9, 1e9]\n[intra_node]",
            "ops is no longer known: an older version of unisono wrote the file",
        ),
        ('name = "test"', "name = ", "not TOML"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(caught.value)
    assert "machine.toml" in str(caught.value)


def test_machines_that_come_along_and_one_that_does_not() -> None:
    for name in ("h100", "h200", "a100"):
        assert read_hardware(name).devices_per_node == 8
    with pytest.raises(UsageError, match="there is no file b9000; give a TOML file, or one of: a100, h100, h200"):
        read_hardware("b9000")
    with pytest.raises(UsageError, match="12 devices do not fill nodes of 8"):
        read_hardware("h100").with_devices(12)


@pytest.mark.parametrize("name", ["h100", "tools/two_cores.toml"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    written = write_hardware(read_hardware(name))
    again = read(tmp_path, written)
    assert write_hardware(again) == written
    for field in fields(again):
        if field.name != "source":
            assert getattr(again, field.name) == getattr(read_hardware(name), field.name)


def test_groups_know_whether_they_cross_nodes(tmp_path: Path) -> None:
    hardware = read(tmp_path, GOOD).with_devices(16)
    plan = Plan(dp=2, tp=4, pp=2)
    assert not group(hardware, plan, "tp").crosses
    assert group(hardware, plan, "tp").bandwidth == 1e11
    assert group(hardware, plan, *REPLICAS).crosses
    assert group(hardware, plan, *REPLICAS).bandwidth == 1e10
    assert group(hardware, Plan(tp=8, dp=2), "tp").bandwidth == 4e10  # four adapters a node carry it
    ring = group(hardware, plan, "tp")
    assert ring.all_reduce(1e9) == pytest.approx(2 * (3e-6 + 0.75 * 1e-2))
    assert ring.all_gather(1e9) == pytest.approx(ring.reduce_scatter(1e9)) == pytest.approx(ring.all_reduce(1e9) / 2)


def test_measured_times_are_flat_below_and_straight_beyond() -> None:
    curve = ((1e3, 1e-4), (1e6, 1e-3))
    assert seconds_at(curve, 10) == 1e-4
    assert seconds_at(curve, 2e6) == pytest.approx(1e-3 + 9e-4 * 1e6 / (1e6 - 1e3))
