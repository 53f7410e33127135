"""from_pretrained in the function that builds a model: no rank ever holds the full model, by what the kernel counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as uni

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.thorough


def save_model(folder: Path) -> int:
    """Two folders, of a model in several files and of a tiny one; the bytes of the first."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    for name, width in (("tiny", 32), ("model", 768)):
        sizes = {"vocab_size": 2 * width, "hidden_size": width, "intermediate_size": 11 * width // 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=8, **heads))
        model.save_pretrained(folder / name, max_shard_size="40MB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 3
    return sum(each.numel() * each.element_size() for each in model.parameters())


def resident(which: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM), also of files that are mapped."""
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def loaded(folder: str, plan: str) -> uni.Engine:
    ids = torch.zeros(2, 8, dtype=torch.long)
    engine = uni.Engine(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(folder),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=plan,
        check="off",
    )
    return engine.prepare(({"input_ids": ids, "labels": ids}, ()))


def peak_of_loading(folder: str, plan: str) -> tuple[int, int, str]:
    """(bytes that the process had more at most, bytes of parameters in the end, why it was built in full)."""
    comm = uni.init()
    loaded(f"{folder}/tiny", plan)  # modules that are imported on the way are no part of it
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    engine = loaded(f"{folder}/model", plan)
    peak = resident("VmHWM") - before
    held = sum(each.untyped_storage().nbytes() for each in engine.ready.model.parameters())
    return peak, held, engine.ready.note


def test_no_rank_ever_holds_the_full_model(tmp_path: Path) -> None:
    (full,) = uni.spawn(save_model, 1, args=(tmp_path,))  # memory that this process has freed is not counted again
    assert full > 200e6
    found: dict[str, list[Any]] = {}
    for plan in ("dp=2,zero=3", "tp=2", "dp=2"):
        found[plan] = uni.spawn(peak_of_loading, 2, args=(str(tmp_path), plan))
    print({plan: [round(peak / full, 2) for peak, _, _ in of_ranks] for plan, of_ranks in found.items()})
    for plan in ("dp=2,zero=3", "tp=2"):
        for peak, held, note in found[plan]:
            assert not note, "built shard by shard"
            assert held < 0.55 * full
            assert peak < 0.9 * full  # its half, a few tensors, and what malloc keeps: 0.6 to 0.83
    assert all(peak > 0.95 * full for peak, _, _ in found["dp=2"])  # one that holds it is seen
