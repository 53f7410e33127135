"""States on disk: saved by some ranks, resumed by others; damage is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantum import dense
from tests.quantum.circuits import random_circuit
from tests.ranks import RankPool
from unisono.errors import CheckpointError, UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.state import State
from unisono.quantum.storage import DamagedStateError, load, save

Pools = Callable[[str, int], RankPool]


def save_half(comm: Any, path: str) -> None:
    save(State(7, comm, kernel="reference").run(random_circuit(7, 30, 1)), path)


def resume(comm: Any, path: str) -> np.ndarray:
    return load(path, comm, kernel="reference").run(random_circuit(7, 30, 2)).amplitudes().numpy()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 8), (1, 4), (8, 1)])
def test_saved_by_some_ranks_and_resumed_by_others(pools: Pools, tmp_path: Path, before: int, after: int) -> None:
    pools("gloo", before).run(save_half, str(tmp_path / "half"))
    assert len(list((tmp_path / "half").glob("*.npy"))) == before
    expected = dense.state(random_circuit(7, 30, 1) + random_circuit(7, 30, 2))
    for amplitudes in pools("gloo", after).run(resume, str(tmp_path / "half")):
        np.testing.assert_allclose(amplitudes, expected, atol=1e-12)


def test_measured_bits_and_further_draws_are_kept(tmp_path: Path) -> None:
    first = Circuit(3, bits=1).h(0).h(1).measure(0, 0)
    second = Circuit(3, bits=2).h(2).measure(1, 1)
    for seed in range(5):
        state = State(3, seed=seed, dtype=torch.complex64, kernel="reference").run(first)
        save(state, tmp_path / f"{seed}")
        loaded = load(tmp_path / f"{seed}", kernel="reference")
        assert loaded.dtype == torch.complex64
        assert loaded.run(second).bits == state.run(second).bits
        assert torch.equal(loaded.amplitudes(), state.amplitudes())


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(State(5).run(random_circuit(5, 20, 3)), path)
    with pytest.raises(UsageError, match="exists; pass overwrite=True"):
        save(State(5), path)
    array = np.load(path / "000000.npy")
    array[3] += 1e-9
    np.save(path / "000000.npy", array)
    with pytest.raises(DamagedStateError, match="damaged: the amplitudes from 0 on"):
        load(path)
    np.save(path / "000000.npy", array[:4])
    with pytest.raises(DamagedStateError, match=r"has 192 bytes and not 512 or more"):
        load(path)
    np.save(path / "000000.npy", array.reshape(2, 16))
    with pytest.raises(DamagedStateError, match=r"shape \(2, 16\), but the manifest has complex128 \(32,\)"):
        load(path)
    (path / "000000.npy").write_bytes(b"nothing")
    with pytest.raises(DamagedStateError, match=r"000000\.npy"):
        load(path)


def test_a_manifest_that_is_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        load(path)
    save(State(3), path)
    good = json.loads((path / "manifest.json").read_text())
    for change, words in (
        ({"format": "other"}, "has the format 'other'"),
        ({"layout": [0, 0, 1]}, "contradicts itself"),
        ({"draws": {"bit_generator": "PCG64"}}, "cannot be read"),
        ({"draws": 7}, "cannot be read"),
        ({"bits": [1]}, "cannot be read"),
        ({"norm": None}, "cannot be read"),
    ):
        (path / "manifest.json").write_text(json.dumps(good | change))
        with pytest.raises(DamagedStateError, match=words):
            load(path)
    (path / "manifest.json").write_text('{"format"')
    with pytest.raises(DamagedStateError, match="cannot be read"):
        load(path)


def test_overwriting_leaves_the_new_state(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(State(4), path)
    save(State(4).run(Circuit(4).x(1)), path, overwrite=True)
    assert load(path).amplitudes().abs().argmax() == 4
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_one_of_two_states_is_there_whenever_a_job_is_killed(tmp_path: Path) -> None:
    """A process is killed at each rename and removal of a save that replaces another."""
    program = """
import os, shutil, sys
from pathlib import Path
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.state import State
from unisono.quantum.storage import save
path = Path(sys.argv[1])
for last in range(20):
    folder = path / str(last) / "state"
    save(State(3, kernel="reference"), folder)
    child = os.fork()
    if not child:
        left = [last]
        def end(event, _):
            if event in ("os.rename", "os.rmdir", "shutil.rmtree", "os.remove"):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
        sys.addaudithook(end)
        save(State(3, kernel="reference").run(Circuit(3).x(1)), folder, overwrite=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    codes = [int(line) for line in run.stdout.split()]
    assert codes.count(9) >= 4
    assert codes[-1] == 0
    found = [int(load(tmp_path / str(last) / "state").amplitudes().abs().argmax()) for last in range(20)]
    assert set(found) == {0, 2}
    save(State(3), tmp_path / "0" / "state", overwrite=True)  # what is left is no obstacle


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        save(State(5), disk / "state")
        with pytest.raises(CheckpointError, match=r"was not saved in .*No space left on device.*is not changed"):
            save(State(13), disk / "state", overwrite=True)
        assert load(disk / "state").wires == 5
        assert [each.name for each in disk.iterdir()] == ["state"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_pipes_and_sizes_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(State(3), path)
    good = json.loads((path / "manifest.json").read_text())
    more = {"wires": 40, "layout": [*range(40)], "block": 1 << 20, "digests": [""] * (1 << 20)}
    for change, words in (
        (more, "000000.npy has 256 bytes and not 17592186044416 or more"),
        ({"wires": 10**9}, "contradicts itself"),
        ({"block": 0}, "contradicts itself"),
        ({"held": -1}, "contradicts itself"),
        ({"dtype": []}, "cannot be read"),
        ({"norm": float("inf")}, "cannot be read"),
    ):
        (path / "manifest.json").write_text(json.dumps(good | change))
        with pytest.raises(DamagedStateError, match=words):
            load(path)
    (path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DamagedStateError, match="cannot be read"):
        load(path)
    (path / "manifest.json").write_text(json.dumps(good))
    (path / "000000.npy").unlink()
    os.mkfifo(path / "000000.npy")
    with pytest.raises(DamagedStateError, match=r"000000\.npy has 0 bytes"):
        load(path)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(DamagedStateError, match="it is not a regular file"):
        load(path)
