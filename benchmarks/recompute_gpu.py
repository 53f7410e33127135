"""What recomputation saves and costs: a Hugging Face Llama on one GPU under every setting.

    python benchmarks/recompute_gpu.py [--json out.json] [--compile]

hidden 2048, 16 layers, batch of 8 x 1,024 tokens, bfloat16, AdamW; without transformers, the same layers written here.
Settings take turns, step by step, so that all of them see the same GPU: milliseconds of a step are medians. Activations
are the peak of a step less the state (parameters, gradients and optimizer state). `sac` is torch's
create_selective_checkpoint_contexts around every block, with products and attention kept; with --compile, where plans
have `compile`, it is left out. Takes about a minute (two with --compile).
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import unisono as uni
from unisono.parallel.blocks import find_blocks

WAYS = ("none", "selective", "attention", "full")
SAVES, SLOWER = 0.3, 0.04  # of activation bytes, and of a step's time: what selective must and may


# ---- the model -------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """As in Hugging Face's models: in float32, one op after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)
        rate = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(length).float(), rate).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build(chosen: argparse.Namespace) -> nn.Module:
    width, length = chosen.hidden, chosen.length
    if importlib.util.find_spec("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=width, intermediate_size=chosen.intermediate, num_hidden_layers=chosen.layers,
            num_attention_heads=16, vocab_size=chosen.vocabulary, max_position_embeddings=length, use_cache=False,
            attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config)
    return Llama(chosen.vocabulary, width, chosen.intermediate, 16, chosen.layers, length)


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


# ---- measuring -------------------------------------------------------------------------------------------------------


def with_contexts(model: nn.Module) -> None:
    """torch's own selective checkpoint around every block."""
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    kept |= {
        getattr(aten, f"_scaled_dot_product_{kind}").default
        for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    }

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    for block in find_blocks(model).modules:
        block.forward = functools.partial(run, block.forward)


class Measured:
    def __init__(self, way: str, chosen: argparse.Namespace, batch: torch.Tensor) -> None:
        torch.manual_seed(0)
        model = build(chosen).to(torch.bfloat16).to(batch.device)
        if way == "sac":
            with_contexts(model)
        plan = uni.Plan(recompute="none" if way == "sac" else way, compile=chosen.compile)
        self.way, self.batch = way, batch
        self.trainer = uni.parallelize(
            model, plan, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), check="off"
        )
        self.seconds: list[float] = []
        self.peak = 0
        self.loss = 0.0

    def step(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.loss = self.trainer.step((self.batch, self.batch)).item()
        end.record()
        torch.cuda.synchronize()
        self.seconds.append(start.elapsed_time(end) / 1e3)

    def measure_peak(self, others: int) -> None:
        """others: bytes of the other settings' models, which are on the GPU too."""
        torch.cuda.reset_peak_memory_stats()
        self.trainer.step((self.batch, self.batch))
        self.peak = torch.cuda.max_memory_allocated() - others

    @property
    def state(self) -> int:
        parameters = list(self.trainer.model.parameters())
        held = [value for state in self.trainer.optimizer.state.values() for value in state.values()]
        gradients = [each.grad for each in parameters if each.grad is not None] or parameters
        return sum(each.nbytes for each in (*parameters, *gradients, *held) if isinstance(each, torch.Tensor))


def measure(way: str, chosen: argparse.Namespace, batch: torch.Tensor) -> Measured:
    before = torch.cuda.memory_allocated()
    made = Measured(way, chosen, batch)
    for _ in range(3):
        made.step()
    made.seconds = []
    made.measure_peak(before)
    gc.collect()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path)
    add("--compile", action="store_true")
    add("--steps", type=int, default=20)
    for name, default in (("hidden", 2048), ("intermediate", 5632), ("layers", 16), ("vocabulary", 32000)):
        add(f"--{name}", type=int, default=default)
    add("--batch", type=int, default=8)
    add("--length", type=int, default=1024)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a CUDA device")
    batch = torch.randint(chosen.vocabulary, (chosen.batch, chosen.length), device="cuda")
    ways = WAYS if chosen.compile else (*WAYS, "sac")
    uni.init()
    models = [measure(way, chosen, batch) for way in ways]
    for _ in range(chosen.steps):
        for each in models:
            each.step()
    rows = [
        {
            "recompute": each.way,
            "ms": 1e3 * statistics.median(each.seconds),
            "peak_gib": each.peak / 2**30,
            "activations_gib": (each.peak - each.state) / 2**30,
            "loss": each.loss,
        }
        for each in models
    ]
    for row in rows:
        row["time"] = row["ms"] / rows[0]["ms"] - 1
        row["saved"] = 1 - row["activations_gib"] / rows[0]["activations_gib"]
    table = Table("recompute", "step", "", "peak", "activations", "saved", "loss")
    for row in rows:
        table.add_row(
            row["recompute"], f"{row['ms']:.1f} ms", f"{row['time']:+.1%}", f"{row['peak_gib']:.2f} GiB",
            f"{row['activations_gib']:.2f} GiB", f"{row['saved']:.0%}", f"{row['loss']:.6f}",
        )  # fmt: skip
    Console(highlight=False, width=120).print(table)
    if chosen.json is not None:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "compile": chosen.compile}
        chosen.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    selective = next(row for row in rows if row["recompute"] == "selective")
    is_met = selective["saved"] >= SAVES and selective["time"] <= SLOWER
    print(f"selective saves {selective['saved']:.0%} for {selective['time']:+.1%}: {'as wanted' if is_met else 'NOT'}")
    uni.shutdown()
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
