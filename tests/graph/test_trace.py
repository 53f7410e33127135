"""The trace: what it finds, what it says about it, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.graph import hugging_face
from tests.graph.tasks import TASKS, Encoder
from unisono.errors import UsageError
from unisono.graph.capture.trace import trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Config


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.max_pool2d(self.second(x), 2).mean((2, 3)))


class Mixture(nn.Module):
    """Views, in-place changes, a tied weight, a no_grad region, constants and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.seen.add_(1)
        x = self.tokens(tokens) * scale
        x[:, 0] = 0.5
        a, b, c = self.up(x).split(4, -1)
        with torch.no_grad():
            gate = torch.sigmoid(self.up(x))[..., :8]
        y = torch.cat([a * b, F.gelu(c)], -1).softmax(-1) + gate + torch.arange(8)
        return {"logits": self.head(y), "scale": scale}


def _token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


TOKENS = torch.randint(10, (4, 6), generator=torch.Generator().manual_seed(0))
SIZES = Config(vocabulary=10, context=6, width=16, heads=4, layers=2, dropout=0.0)
CASES: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (lambda: GPT(SIZES), (TOKENS, TOKENS), _token_loss),
    "convolutions": (Convolutions, (torch.randn(4, 3, 8, 8), torch.arange(4)), F.cross_entropy),
    "mixture": (Mixture, ({"tokens": TOKENS, "scale": 2.0}, TOKENS), _token_loss),
}  # fmt: skip


def _run(model: nn.Module, example: tuple[Any, Any], loss: Any) -> torch.Tensor:
    inputs, targets = example
    return loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_autograd_and_torchs_counter(name: str) -> None:
    build, example, loss = CASES[name]
    model = build()
    traced = trace(model, example, loss)
    there = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in there:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as counter,
    ):
        _run(model, example, loss)
    assert traced.saved == sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    attention = sum(op.flops for op in traced.ops if "attention" in op.name)  # which torch does not count on CPUs
    assert traced.flops - attention == counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_what_the_model_does(name: str) -> None:
    build, example, loss = CASES[name]
    model = build()
    traced = trace(model, example, loss)
    held = {**dict(model.named_parameters()), **{key: b.clone() for key, b in model.named_buffers()}}
    inputs = list(example[0].values()) if isinstance(example[0], dict) else [example[0]]
    values = {node: held[key] for node, key in (traced.parameters | traced.buffers).items()} | traced.constants
    values |= dict(zip(traced.inputs, [v for v in inputs if isinstance(v, torch.Tensor)], strict=True))
    values |= dict(zip(traced.targets, [example[1]], strict=True))
    module = torch.fx.GraphModule(nn.Module(), traced.graph)
    (result,) = module(*(values[node.name] for node in traced.graph.nodes if node.op == "placeholder"))
    expected = _run(model, example, loss)
    torch.testing.assert_close(result, expected)
    ours = torch.autograd.grad(result, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "parts"), [("gpt2", 3), ("mixtral", 2), ("example", 3), ("encoder", 3)])
def test_unpacked_projections_compute_the_same(name: str, parts: int) -> None:
    torch.manual_seed(0)
    if name == "example":
        model, example, loss = CASES["gpt"][0](), ({"tokens": TOKENS}, TOKENS), _token_loss
    elif name == "encoder":
        x, targets = TASKS["encoder"].batch(0)
        model, example, loss = Encoder(), ({"x": x}, targets), F.cross_entropy
    else:
        model, example, loss = hugging_face.model(name).eval(), hugging_face.batch(name), hugging_face.loss
    model.eval()
    traced = trace(model, example, loss, unpacked=True)
    words = ("c_attn", "gate_up", "qkv", "in_proj")
    packed = [name for name in dict(model.named_parameters()) if any(word in name for word in words)]
    assert sorted(shard.parameter for shard in traced.packed_slices.values()) == sorted(packed * parts)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {node: held[key].detach() for node, key in (traced.parameters | traced.buffers).items()} | traced.constants
    for node, shard in traced.packed_slices.items():
        values[node] = values[node].narrow(shard.dim, shard.start, shard.length)
    values |= dict(zip(traced.inputs + traced.targets, [*example[0].values(), example[1]], strict=True))
    module = torch.fx.GraphModule(nn.Module(), traced.graph)
    (result,) = module(*(values[node.name] for node in traced.graph.nodes if node.op == "placeholder"))
    torch.testing.assert_close(result, _run(model, example, loss).detach())


def test_ops_know_where_they_come_from() -> None:
    traced = trace(Mixture(), ({"tokens": TOKENS}, TOKENS), _token_loss)
    linear = next(op for op in traced.ops if op.name == "linear")
    assert (linear.path, linear.line.partition(":")[0]) == ("up", "test_trace.py")
    assert set(traced.parameters.values()) == {"tokens.weight", "up.weight", "up.bias"}
    assert traced.inputs == ("tokens",)
    assert traced.specs[traced.outputs[0]][0].shape == ()
    (buffer,) = traced.buffers
    assert list(traced.changed) == [buffer]
    assert "linear_1" not in traced.tracked or traced.node("detach_default") is not None
    assert not any(str(op.target).endswith("_.default") for op in traced.ops)


def test_running_statistics_are_values_of_their_own() -> None:
    for norm in (nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)):
        traced = trace(norm, (torch.zeros(2, 4, 6), None))
        assert {"running_mean", "running_var"} <= {traced.buffers[name] for name in traced.changed}


@pytest.mark.thorough
def test_a_model_that_no_memory_holds() -> None:
    """GPT-3 with 12 of its 96 layers: 22 billion parameters. (All 96: see docs/graph.md.)"""
    sizes = {"hidden_size": 12288, "num_hidden_layers": 12, "num_attention_heads": 96, "vocab_size": 50257}
    with torch.device("meta"):
        model = hugging_face.model("gpt2", **sizes, max_position_embeddings=2048)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    traced = trace(model, ({"input_ids": tokens}, tokens), hugging_face.loss)
    count = sum(torch.Size(traced.specs[node][0].shape).numel() for node in traced.parameters)
    assert 22e9 < count < 23e9
    attention = 12 * 4 * 2048 * 2048 * 12288
    # Every parameter but those of lookups, norms and biases meets every token once.
    assert traced.flops == pytest.approx(2 * 2048 * count + attention, rel=0.01)
    assert next(model.parameters()).is_meta


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Aliasing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y.view(-1)
        y.add_(1)
        return row + y.view(-1)


class Picking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


def test_what_cannot_be_traced_is_named() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(
        UsageError, match=r"test_trace.py:\d+: `if x.sum\(\) > 0:`: a branch depends on the val.*need no trace"
    ):
        trace(Branching(), (x, None))
    with pytest.raises(UsageError, match=r"add_.*at test_trace.py:\d+ changes a tensor in place of which view is"):
        trace(Aliasing(), (x, None))
    with pytest.raises(UsageError, match=r"expected \(inputs, targets\)"):
        trace(Branching(), x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"test_trace.py:\d+: how large the result of aten.index.Tensor is depends"):
        trace(Picking(), (x, None))
    with pytest.raises(UsageError, match=r"got .*If it fails so on a batch too, fix that"):
        trace(nn.Linear(3, 4), (x, None))


def test_a_trace_that_fails_says_nothing_but_why(capfd: pytest.CaptureFixture[str]) -> None:
    for model in (Branching(), nn.Linear(3, 4)):
        with pytest.raises(UsageError):
            trace(model, (torch.randn(4, 4), None))
    assert capfd.readouterr().err == ""


class Told(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("the model's own words", file=sys.stderr)
        return x * 2


def test_what_a_model_says_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    trace(Told(), (torch.randn(4, 4), None))
    assert "the model's own words" in capfd.readouterr().err


class Counting(nn.Linear):
    """Keeps the number of runs, and masks that it has made, in plain attributes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.runs = 0
        self.mask: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        self.seen.append(x)
        return super().forward(x) * self.mask


def test_attributes_that_no_op_depends_on_are_left_alone() -> None:
    model = Counting()
    assert trace(model, (torch.randn(4, 4), None)).lost == ()
    assert (model.runs, model.seen) == (0, [])
