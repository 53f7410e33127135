"""Four ranks train a small GPT on the sources of Python's own standard library.

unisono run -n 4 examples/demo.py

Every rank takes its share of each batch; after backward the gradients are averaged. The batch is the same however many
ranks share it, so `-n 1`, `-n 2` and `-n 4` print the same losses (up to rounding).
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Config, complete
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import unisono as uni

BATCH = 32


def library_text(size: int = 2_000_000) -> torch.Tensor:
    """The beginning of Python's standard library, as bytes."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of one step, the same on every rank: inputs, and the bytes that follow each."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context - 1, (BATCH,), generator=generator)
    windows = text[starts[:, None] + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def average_gradients(model: torch.nn.Module, comm: uni.Communicator) -> None:
    flat = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
    comm.all_reduce(flat, "avg")
    for parameter, gradient in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.grad = gradient.view_as(parameter)


def main(steps: int) -> None:
    comm = uni.init()
    if BATCH % comm.size:
        raise SystemExit(f"the batch of {BATCH} cannot be shared evenly by {comm.size} ranks; use 1, 2, 4, 8, 16 or 32")
    text = library_text()
    torch.manual_seed(comm.rank)
    config = Config()
    model = GPT(config)
    comm.broadcast_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)

    console = Console(highlight=False)
    bar = Progress(
        TextColumn("training on {task.fields[ranks]} ranks"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        console=console,
        disable=comm.rank != 0,
        auto_refresh=False,
    )
    with bar:
        task = bar.add_task("", total=steps, ranks=comm.size, loss=float("nan"))
        for step in range(steps):
            inputs, targets = (part.chunk(comm.size)[comm.rank] for part in batch_of(text, step, config.context))
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, comm)
            optimizer.step()
            warmup.step()
            shown = comm.all_reduce(loss.detach(), "avg").item()
            bar.update(task, advance=1, loss=shown, refresh=step % 5 == 0 or step == steps - 1)
            if comm.rank == 0 and (step % 50 == 0 or step == steps - 1) and not console.is_terminal:
                print(f"step {step:4} loss {shown:.3f}", flush=True)

    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    same = all(torch.equal(weights, other) for other in comm.all_gather(weights))
    if comm.rank == 0:
        console.print(f"all {comm.size} ranks hold the same {weights.numel():,} parameters, bit for bit: {same}")
        console.print("what it has learned of Python:", style="bold")
        console.print(complete(model, b"def ", 160), markup=False)
    uni.shutdown()
    if not same:
        raise SystemExit("the ranks have parted: that must never happen")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
