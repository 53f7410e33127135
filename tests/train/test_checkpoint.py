"""Checkpoints on one process: what is kept, what is found broken, what is refused. Real files, real full disks."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from unisono.errors import CheckpointError, UsageError
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.manifest import Manifest
from unisono.train.checkpoint.restoring import full_entry, read_entries


def make(width: int = 4, optimizer: Any = torch.optim.AdamW, **options: Any) -> Trainer:
    return uni.parallelize(
        lambda: nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2)),
        "dp=1",
        loss=F.cross_entropy,
        optimizer=lambda parameters: optimizer(parameters, lr=0.1),
        **options,
    )


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A world of one in this process, which must be gone when later tests fork ranks from it."""
    yield
    uni.shutdown()


@pytest.fixture
def trainer() -> Trainer:
    made = make()
    made.step(batch(0))
    return made


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}" / "rank-00000.safetensors"


def test_the_newest_stay(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 3, 12):
        checkpoints.save(trainer, step, wait=step != 5)
    assert checkpoints.steps() == [5, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "step-00000005", "step-00000012"]
    checkpoints.save(trainer, 12, {"again": True})
    assert checkpoints.load(trainer).data_state == {"again": True}


def adam_with_tensors(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(lr))


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS, adam_with_tensors]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_state_of_optimizers_comes_back(optimizer: Any, tmp_path: Path) -> None:
    one, other = make(optimizer=optimizer), make(optimizer=optimizer, seed=5)
    for number in range(2):
        one.step(batch(number))
    uni.Checkpoints(tmp_path).save(one, 2)
    uni.Checkpoints(tmp_path).load(other)
    assert [float(one.step(batch(n))) for n in (2, 3)] == [float(other.step(batch(n))) for n in (2, 3)]
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def test_scales_and_generators_come_back(tmp_path: Path) -> None:
    one, other = make(precision="fp16"), make(precision="fp16", seed=5)
    assert one.scaler is not None
    assert other.scaler is not None
    one.scaler.value, one.skipped, one.steps = 128.0, 3, 7
    torch.manual_seed(17)
    uni.Checkpoints(tmp_path).save(one, 7)
    drawn = torch.rand(4)
    uni.Checkpoints(tmp_path).load(other)
    assert (other.scaler.value, other.skipped, other.steps, other.random.seed) == (128.0, 3, 7, 0)
    assert torch.equal(torch.rand(4), drawn)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "does not match its checksum": flip,
    "truncated or overwritten": lambda path: os.truncate(path, path.stat().st_size - 1),
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("words", DAMAGES)
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_damage_is_named_and_the_one_before_is_taken(trainer: Trainer, tmp_path: Path, file: str, words: str) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1, "first")
    trainer.step(batch(1))
    checkpoints.save(trainer, 2, "second")
    DAMAGES[words](tmp_path / "step-00000002" / file)
    restored = checkpoints.load(make())
    assert (restored.step, restored.data_state) == (1, "first")
    assert "step-00000002" in restored.note
    assert file in restored.note
    if file != "manifest.json":
        assert words in restored.note
        with pytest.raises(CheckpointError, match=rf"step-00000002 is damaged: {file}.*{words}"):
            checkpoints.load(make(), 2)
    flip(file_of(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is intact: step-00000002 .*; step-00000001 "):
        checkpoints.newest_good()


def swap_blocks(path: Path) -> None:
    """The last two runs of 64 bytes: every byte is still there."""
    content = path.read_bytes()
    path.write_bytes(content[:-128] + content[-64:] + content[-128:-64])


def as_before(folder: Path) -> None:
    """The checkpoint as earlier versions of unisono wrote it."""
    manifest = Manifest.read(folder)
    for name, about in manifest.files.items():
        checksum = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        manifest.files[name] = {"bytes": about["bytes"], "sha256": checksum}
    sharded = [state for state in manifest.optimizer["state"].values() if "sharded_tensor" in state["exp_avg"]]
    assert sharded
    for state in sharded:
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = {"laid": state[key]["sharded_tensor"]}
    manifest.write(folder)


@pytest.mark.parametrize("damage", [flip, swap_blocks])
@pytest.mark.parametrize("is_old", [False, True])
def test_damage_is_found_by_today_s_checksum_and_by_that_of_old_files(
    trainer: Trainer, tmp_path: Path, damage: Any, is_old: bool
) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1)
    (about,) = Manifest.read(tmp_path / "step-00000001").files.values()
    assert sorted(about) == ["bytes", "xxh3_128"]
    if is_old:
        as_before(tmp_path / "step-00000001")
    restored = make(seed=5)
    checkpoints.load(restored)
    for (_, one), (_, other) in zip(trainer.optimized(), restored.optimized(), strict=True):
        states = trainer.optimizer.state[one], restored.optimizer.state[other]
        assert all(torch.equal(states[0][key], states[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert all(
        torch.equal(value, restored.model.state_dict()[name]) for name, value in trainer.model.state_dict().items()
    )
    damage(file_of(tmp_path, 1))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        checkpoints.load(restored)


def test_a_checksum_of_an_unknown_kind_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1)
    checkpoints.save(trainer, 2)
    manifest = Manifest.read(tmp_path / "step-00000002")
    manifest.files["rank-00000.safetensors"] = {"bytes": 1, "crc64": "00"}
    manifest.write(tmp_path / "step-00000002")
    words = r"a checksum 'crc64'; expected xxh3_128 or sha256: was it saved by a newer version"
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(tmp_path / "step-00000002")
    restored = checkpoints.load(trainer)
    assert restored.step == 1
    assert "'crc64'" in restored.note


def test_what_a_killed_job_left_is_no_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1)
    half = tmp_path / ".writing-00000002-abcd"
    shutil.copytree(tmp_path / "step-00000001", half)
    (tmp_path / "step-00000001").rename(tmp_path / ".replaced-step-00000001")  # killed between two renames
    again = uni.Checkpoints(tmp_path)
    assert again.load(trainer).step == 1
    assert half.exists()  # who only reads may do so beside a job that writes
    again.save(trainer, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "step-00000001", "step-00000002"]


def test_a_manifest_that_lies_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    """Also with a checksum that fits: files outside of the folder are not opened."""
    uni.Checkpoints(tmp_path).save(trainer, 1)
    folder = tmp_path / "step-00000001"
    manifest = Manifest.read(folder)
    manifest.files["../../secret"] = {"bytes": 0, "sha256": ""}
    manifest.write(folder)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        Manifest.read(folder)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _resigned(folder: Path, change: Any) -> None:
    """A manifest with a checksum that fits, whatever was changed."""
    file = folder / "manifest.json"
    body = json.loads(json.loads(file.read_text())["body"])
    text = change if isinstance(change, str) else json.dumps(change(body) or body)
    file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}))


LIES: dict[str, Any] = {
    "nested too deeply": "[" * 100_000 + "]" * 100_000,
    "an unknown key": lambda body: body.update(more=1),
    "no seed": lambda body: body.pop("seed"),
    "no fingerprint": lambda body: body.pop("fingerprint"),
    "a list": lambda body: [body],
    "steps in words": lambda body: body["trainer"].update(steps="three"),
    "a model without dtypes": lambda body: body.update(model={"0.weight": [[4, 3]]}),
    "chunks that are numbers": lambda body: body["tensors"]["model.0.weight"].update(chunks=[1]),
    "a shape that takes all memory": lambda body: body["tensors"]["model.0.weight"].update(shape=[1 << 40]),
    "a chunk behind the end": lambda body: body["tensors"]["model.0.weight"]["chunks"][0].__setitem__(4, 1 << 40),
    "a negative chunk": lambda body: body["tensors"]["model.0.weight"]["chunks"][0].__setitem__(3, -48),
    "the folder above": lambda body: body["files"].update({"..": {"bytes": 4096, "sha256": ""}}),
    "a file with a NUL": lambda body: body["files"].update({"a\0b": {"bytes": 0, "sha256": ""}}),
    "a file without a checksum": lambda body: body["files"]["rank-00000.safetensors"].pop("xxh3_128"),
    "a file with two checksums": lambda body: body["files"]["rank-00000.safetensors"].update(sha256=""),
    "a checksum that is a number": lambda body: body["files"]["rank-00000.safetensors"].update(xxh3_128=3),
    "files without sizes": lambda body: body.update(files={name: {} for name in body["files"]}),
    "no groups": lambda body: body["optimizer"].pop("groups"),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_a_manifest_of_any_form_is_damage(trainer: Trainer, tmp_path: Path, change: Any) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(trainer, step)
    _resigned(tmp_path / "step-00000002", change)
    restored = checkpoints.load(trainer)
    assert restored.step == 1
    assert "went back to step 1, because step-00000002 is damaged: manifest.json" in restored.note


def test_state_that_no_save_writes_is_an_error_in_words(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    for change in (
        lambda body: body.update(extra={"tensor": "model.none"}),
        lambda body: body.update(extra={"dict": 3}),
        lambda body: body.update(extra={"dict": [], "tuple": []}),
        lambda body: body.update(extra=[{"tensor": "random.0.cpu"}] * 1000),
        lambda body: body["optimizer"]["state"]["0.weight"].update(step={"sharded_tensor": "nowhere"}),
    ):
        checkpoints.save(trainer, 1)
        _resigned(tmp_path / "step-00000001", change)
        with pytest.raises(CheckpointError):
            checkpoints.load(trainer)


def test_pipes_and_odd_names_in_the_folder(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path, keep=None)
    for step in (1, 2, 3):
        checkpoints.save(trainer, step)
    for name in ("step-²", "step-", "step-00000009x", "step-4", "step-" + "9" * 200):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("")
    assert checkpoints.steps() == [1, 2, 3]
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "step-00000003" / "manifest.json")
    file_of(tmp_path, 2).unlink()
    os.mkfifo(file_of(tmp_path, 2))
    _resigned(tmp_path / "step-00000002", lambda body: body["files"]["rank-00000.safetensors"].update(bytes=0))
    restored = checkpoints.load(trainer)
    assert restored.step == 1
    os.mkfifo(tmp_path / "w.safetensors")
    os.mkfifo(tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        with pytest.raises(UsageError, match=r"cannot be read: it is not a regular file"):
            uni.import_weights(trainer, tmp_path / name)


def test_pickles_in_the_folder_do_not_run(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path / "run")
    checkpoints.save(trainer, 1)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    folder = tmp_path / "run" / "step-00000001"
    for name in (".metadata", "__0_0.distcp", "rank-00000.pt", "manifest.pkl"):  # where torch's own reader would look
        (folder / name).write_bytes(bomb)
    checkpoints.load(make())
    (folder / "manifest.json").write_bytes(bomb)
    file_of(tmp_path / "run", 1).write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoints.load(make())
    weights = tmp_path / "weights.pt"
    for content in (bomb, b"nonsense"):
        weights.write_bytes(content)
        with pytest.raises(UsageError, match="not a file of weights"):
            uni.import_weights(make().model, weights)
    torch.save({"w": Bomb(tmp_path / "ran")}, weights)
    with pytest.raises(UsageError, match="not a file of weights"):
        uni.import_weights(make().model, weights)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have


def test_another_model_is_refused_and_nothing_changes(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path)
    checkpoints.save(trainer, 1)
    other = make(width=5)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"another model: 0\.bias was float32\[4\] and is float32\[5\]"):
        checkpoints.load(other)
    with pytest.raises(CheckpointError, match="another model"):
        uni.Checkpoints(tmp_path).save(other, 2)
    with pytest.raises(CheckpointError, match="float64"):
        checkpoints.load(make(dtype=torch.float64))
    assert checkpoints.steps() == [1]
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_bad_requests(trainer: Trainer, tmp_path: Path) -> None:
    checkpoints = uni.Checkpoints(tmp_path / "none")
    assert checkpoints.newest_good() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoints.load(trainer)
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        checkpoints.load(trainer, 3)
    with pytest.raises(UsageError, match="'newest' or a step"):
        checkpoints.load(trainer, "best")
    with pytest.raises(UsageError, match="keep=0"):
        uni.Checkpoints(tmp_path, keep=0)
    with pytest.raises(UsageError, match=r"extra\.f is of type function"):
        checkpoints.save(trainer, 1, extra={"f": make})


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(full_disk: Path, wait: bool) -> None:
    small = make()
    checkpoints = uni.Checkpoints(full_disk)
    checkpoints.save(small, 1)
    (full_disk / "filler").write_bytes(bytes(220_000))
    make_large(small)
    words = r"step 2 was not saved .* No space left .* free; earlier checkpoints are intact"
    if not wait:
        checkpoints.save(small, 2, wait=False)
    with pytest.raises(CheckpointError, match=words):
        checkpoints.save(small, 2, wait=wait)  # that does not wait tells of the one before
    assert checkpoints.steps() == [1]
    assert sorted(path.name for path in full_disk.iterdir()) == ["filler", "run.lock", "step-00000001"]
    assert checkpoints.load(small).step == 1
    (full_disk / "filler").unlink()
    checkpoints.save(small, 3, wait=wait)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]


def make_large(trainer: Trainer) -> None:
    """The same model with more to save: state that takes room."""
    trainer.step(batch(1))
    for state in trainer.optimizer.state.values():
        state["history"] = torch.zeros(20_000)


def test_a_folder_that_cannot_be_written(trainer: Trainer, full_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"was not saved in .*Not a directory.*there is no earlier one"):
        uni.Checkpoints(tmp_path / "file").save(trainer, 1)
    uni.Checkpoints(full_disk).save(trainer, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(full_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"step 2 .*Read-only file system.*earlier checkpoints are intact"):
        uni.Checkpoints(full_disk).save(trainer, 2)
    assert uni.Checkpoints(full_disk).load(trainer).step == 1


def test_export_and_import(trainer: Trainer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    uni.export_weights(trainer, tmp_path / "w.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.safetensors"]
    loaded = load_file(tmp_path / "w.safetensors")
    state = trainer.model.state_dict()
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    uni.Checkpoints(tmp_path / "run").save(trainer, 1)
    torch.save(state, tmp_path / "w.pt")
    uni.export_weights(trainer.model, tmp_path / "module.safetensors")
    assert (tmp_path / "module.safetensors").read_bytes() == (tmp_path / "w.safetensors").read_bytes()
    for source in ("w.safetensors", "module.safetensors", "w.pt", "run/step-00000001", state):
        for target in (make(seed=3), make(seed=3).model):
            uni.import_weights(target, tmp_path / source if isinstance(source, str) else source)
            module = target.model if isinstance(target, Trainer) else target
            assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    folder, manifest = _opened(tmp_path / "run")
    entries = {name: full_entry(f"model.{name}", manifest) for name in manifest.model}
    read_entries(folder, manifest, list(entries.values()))
    assert all(torch.equal(entry.tensor, state[name]) for name, entry in entries.items())
    with pytest.raises(UsageError, match=r"is of shape \(4, 3\) .*expected \(5, 3\)"):
        uni.import_weights(make(width=5), tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"does not have 2\.weight"):
        uni.import_weights(trainer, {name: value for name, value in state.items() if name != "2.weight"})
    with pytest.raises(UsageError, match="has more, which the model does not have"):
        uni.import_weights(trainer, {**state, "more": torch.zeros(1)})
    file = file_of(tmp_path / "run", 1)
    flipped = bytearray(file.read_bytes())
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"is damaged: rank-00000\.safetensors does not match"):
        uni.export_weights(file.parent, tmp_path / "damaged.safetensors")
    assert not (tmp_path / "damaged.safetensors").exists()
    os.truncate(tmp_path / "w.safetensors", 40)
    with pytest.raises(CheckpointError, match="is damaged"):
        uni.import_weights(trainer, tmp_path / "w.safetensors")


def _opened(run: Path) -> tuple[Path, Manifest]:
    folder = run / "step-00000001"
    assert json.loads((folder / "manifest.json").read_text())["sha256"]
    return folder, Manifest.read(folder)
