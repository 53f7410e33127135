"""A compiled Llama on one GPU: unisono with `compile` against a plain loop whose blocks and loss are compiled.

    python benchmarks/compile_gpu.py [--runs 3] [--json out.json]

A Hugging Face Llama of 0.95 billion parameters (hidden 2048, 16 layers), batch 8 x 1,024 tokens, bfloat16 by autocast
from float32 parameters, fused AdamW. Every row is a process of its own, and rows take turns: the medians of all runs
are shown, and their spread. Gate: time and peak memory at most 1.02 times those of the plain loop, for one device,
microbatches=2 and recompute=full.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS = [
    "plain eager",
    "plain compiled",
    "unisono dp=1",
    "unisono compile",
    "plain compiled, microbatches=2",
    "unisono compile,microbatches=2",
    "plain compiled, recompute=full",
    "unisono compile,recompute=full",
    "unisono compile,recompute=selective",
    "unisono recompute=selective",
]
PAIRS = [(1, 3), (4, 5), (6, 7)]
GATE = 1.02
BATCH, TOKENS, VOCABULARY = 8, 1024, 32000
WARM_UP, STEPS = 4, 10


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config)


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain(row: str) -> Any:
    """A step of a loop as users write it."""
    from torch.utils.checkpoint import checkpoint

    made = model()
    measured_loss = loss
    layers: Any = made.model.layers
    if "compiled" in row:
        measured_loss = torch.compile(loss)
        for layer in layers:
            layer.forward = torch.compile(layer.forward)
    if "recompute" in row:
        for layer in layers:
            inner = layer.forward
            layer.forward = lambda *args, inner=inner, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)
    parts = 2 if "microbatches" in row else 1
    stepping = optimizer(made.parameters())
    inputs, targets = batch()

    def step() -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                value = measured_loss(made(input_ids=x).logits, y) / parts
            value.backward()
            total += value.detach()
        stepping.step()
        stepping.zero_grad()
        return total

    return step


def planned(row: str) -> Any:
    import unisono as uni

    plan = row.removeprefix("unisono ")
    inputs, targets = batch()
    made = model()
    trainer = uni.parallelize(made, plan, loss=loss, optimizer=optimizer, precision="bf16", check="off")
    given = ({"input_ids": inputs}, targets)

    def step() -> torch.Tensor:
        value = trainer.step(given)
        step.note = str(trainer.compilation or "")  # type: ignore[attr-defined]
        return value

    return step


def measure(row: str) -> dict[str, Any]:
    step = plain(row) if row.startswith("plain") else planned(row)
    began = time.perf_counter()
    values = [float(step()) for _ in range(WARM_UP)]
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {
        "row": row,
        "ms": statistics.median(times) * 1e3,
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
        "losses": values,
        "first steps": first,
        "note": getattr(step, "note", ""),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="", help="parts of rows' names, separated by ;")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.row:
        print("RESULT " + json.dumps(measure(options.row)), flush=True)
        return 0
    wanted = [row for row in ROWS if not options.rows or any(part in row for part in options.rows.split(";"))]
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in wanted}
    for _ in range(options.runs):
        for row in wanted:
            ran = subprocess.run([sys.executable, __file__, "--row", row], capture_output=True, text=True, check=False)
            result = next((line for line in ran.stdout.splitlines() if line.startswith("RESULT ")), None)
            if result is None:
                print(f"{row} failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}", flush=True)
                continue
            found[row].append(json.loads(result.removeprefix("RESULT ")))
            last = found[row][-1]
            print(f"{row:36} {last['ms']:8.1f} ms {last['GiB']:6.2f} GiB  first steps {last['first steps']:5.1f} s  "
                  f"losses {last['losses'][0]:.4f} {last['losses'][-1]:.4f}  {last['note']}", flush=True)  # fmt: skip
            if "Warning" in ran.stderr and "cannot be compiled" in ran.stderr:
                print(ran.stderr[-1500:])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    medians = {row: _median(runs) for row, runs in found.items() if runs}
    for row, (ms, gib, spread) in medians.items():
        print(f"{row:36} {ms:8.1f} ms (spread {spread:.1%}) {gib:6.2f} GiB")
    is_met = True
    for base, ours in PAIRS:
        if ROWS[base] in medians and ROWS[ours] in medians:
            (ms, gib, _), (our_ms, our_gib, _) = medians[ROWS[base]], medians[ROWS[ours]]
            is_met &= our_ms <= GATE * ms and our_gib <= GATE * gib
            print(f"{ROWS[ours]}: {our_ms / ms:.3f} of its time, {our_gib / gib:.3f} of its memory")
    return 0 if is_met else 1


def _median(runs: list[dict[str, Any]]) -> tuple[float, float, float]:
    times = [run["ms"] for run in runs]
    middle = statistics.median(times)
    return middle, statistics.median(run["GiB"] for run in runs), (max(times) - min(times)) / middle


if __name__ == "__main__":
    sys.exit(main())
