"""Float8 beside bfloat16 on one GPU: steps of Llama blocks, compiled, and the losses of 200 steps on real text.

    python benchmarks/fp8_gpu.py [--json fp8.json] [--png fp8.png]

Speed: blocks of hidden 4096 and 14336, 32 heads, 4 of them, 4 x 4,096 tokens, AdamW, float32 parameters; the two
precisions take turns, step by step, and milliseconds are medians. Losses: 6 blocks of hidden 512 on bytes of Python's
standard library, the same batches for both. Exit status 1 if float8 is less than 1.2 times as fast. Takes about two
minutes, most of which is compiling.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import struct
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

GATE = 1.2
PRECISIONS = ("bf16", "fp8")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Without positions but those that causal attention shows."""

    def __init__(self, width: int, hidden: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def trainer_of(precision: str, lr: float, *sizes: int) -> Any:
    torch.manual_seed(0)
    model = Llama(*sizes).cuda()
    return uni.parallelize(
        model, "dp=1,compile", loss=token_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=lr, fused=True),
        precision=precision, check="off",
    )  # fmt: skip


def speed(rounds: int) -> dict[str, Any]:
    tokens = torch.randint(32000, (4, 4097), device="cuda")
    batch = tokens[:, :-1], tokens[:, 1:]
    trainers = {name: trainer_of(name, 1e-4, 4096, 14336, 32, 4, 32000) for name in PRECISIONS}
    times: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for number in range(rounds + 3):
        for name, trainer in trainers.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            trainer.step(batch)
            torch.cuda.synchronize()
            if number >= 3:
                times[name].append(1000 * (time.perf_counter() - start))
    taken = {name: statistics.median(each) for name, each in times.items()}
    return {"ms": taken, "ratio": taken["bf16"] / taken["fp8"], "layers": trainers["fp8"].float8}


def text() -> torch.Tensor:
    """Bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def losses(steps: int, length: int = 256, samples: int = 32) -> dict[str, list[float]]:
    data = text()
    found: dict[str, list[float]] = {}
    for name in PRECISIONS:
        trainer = trainer_of(name, 1e-3, 512, 1536, 8, 6, 256)
        generator = torch.Generator().manual_seed(0)
        curve = []
        for _ in range(steps):
            starts = torch.randint(len(data) - length - 1, (samples,), generator=generator)
            tokens = torch.stack([data[start : start + length + 1] for start in starts.tolist()]).long().cuda()
            curve.append(trainer.step((tokens[:, :-1], tokens[:, 1:])).detach())
        found[name] = torch.stack(curve).tolist()
    return found


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(curves: dict[str, list[float]], path: str) -> None:
    """Loss by step, bf16 in blue and fp8 in red; with axes where matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        _write_png(_lines(curves), path)
        return
    for name, curve in curves.items():
        pyplot.plot(curve, label=name, linewidth=1)
    pyplot.xlabel("step")
    pyplot.ylabel("loss")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)


def _lines(curves: dict[str, list[float]], height: int = 400, width: int = 800) -> torch.Tensor:
    image = torch.full((height, width, 3), 255, dtype=torch.uint8)
    values = torch.tensor(list(curves.values()))
    low, high = values.min(), values.max()
    for curve, colour in zip(values, ((31, 119, 180), (214, 39, 40)), strict=True):
        across = torch.linspace(0, len(curve) - 1, 4 * width)
        left = across.long().clamp(max=len(curve) - 2)
        y = torch.lerp(curve[left], curve[left + 1], across - left)
        rows = ((high - y) / (high - low) * (height - 5)).long() + 2
        columns = torch.linspace(0, width - 1, 4 * width).long()
        for down in (0, 1):
            image[rows + down, columns] = torch.tensor(colour, dtype=torch.uint8)
    return image


def _write_png(image: torch.Tensor, path: str) -> None:
    height, width, _ = image.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), image.flatten(1)], 1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes())
    parts = chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--png", metavar="FILE", help="draw the losses here")
    parser.add_argument("--rounds", type=int, default=15, help="steps that are measured (default: 15)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the loss curves (default: 200)")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("fp8_gpu.py needs a GPU", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    found = speed(chosen.rounds)
    print(found["layers"])
    print(
        f"bf16 {found['ms']['bf16']:.1f} ms, fp8 {found['ms']['fp8']:.1f} ms a step: {found['ratio']:.2f} times as fast"
    )
    gc.collect()
    torch.cuda.empty_cache()
    curves = losses(chosen.steps)
    ends = {name: statistics.mean(curve[-20:]) for name, curve in curves.items()}
    print(f"loss, mean of the last 20 of {chosen.steps} steps: bf16 {ends['bf16']:.4f}, fp8 {ends['fp8']:.4f}")
    if chosen.json:
        device = torch.cuda.get_device_name()
        Path(chosen.json).write_text(json.dumps({"device": device, **found, "losses": curves}, indent=1))
    if chosen.png:
        draw(curves, chosen.png)
    return 0 if found["ratio"] >= GATE else 1


if __name__ == "__main__":
    sys.exit(main())
