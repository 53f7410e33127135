"""More families of random models: masked encoders, residual networks, recurrent cells, two towers, spectral layers,
layers with buffers that they update, models with several heads, and models that compute their own loss.
"""

from __future__ import annotations

from collections.abc import Callable

from random_parts import Source, activation, dropout, feed_forward, linear, module, norm
from random_training import Job


def _samples(source: Source) -> int:
    source.traits.samples = source.number(2, 3, 4, 4, 4, 5, 6, 7)
    return source.traits.samples


def _stack_of_numbers(layer: str, width: int, count: int, samples: int) -> tuple[list[str], list[str], list[str]]:
    """Lines of __init__, forward and batch: linear layers around a list of layers of one class."""
    init = [
        f"self.first = nn.Linear(5, {width})",
        f"self.layers = nn.ModuleList({layer}() for _ in range({count}))",
        f"self.last = nn.Linear({width}, 4)",
    ]
    forward = ["x = self.first(x)", "for layer in self.layers:", "    x = layer(x)", "return self.last(x)"]
    batch = [f"x = torch.randn({samples}, 5, generator=g)", f"y = torch.randn({samples}, 4, generator=g)"]
    return init, forward, batch


def _masked(source: Source) -> Job:
    """torch's encoder layers on padded sequences, with a mask among the inputs and the targets."""
    samples, length, heads, vocabulary = _samples(source), source.number(4, 6), 2, 11
    width, count, rate = heads * source.number(2, 4), source.number(2, 2, 3), source.pick("0.0", "0.0", "0.1")
    source.unfit("cp sp tp")
    options = source.pick("", ", norm_first=True", ', activation="gelu"', ", bias=False")
    layer = f"nn.TransformerEncoderLayer({width}, {heads}, {2 * width}, dropout={rate}, batch_first=True{options})"
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.positions = nn.Parameter(torch.randn({length}, {width}) * 0.1)",
    ]
    forward = ["x = self.tokens(tokens) + self.positions"]
    if source.chance(0.4):
        source.unfit("pp recompute")
        init.append(f"self.inner = nn.TransformerEncoder({layer}, {count}, enable_nested_tensor=False)")
        forward.append("x = self.inner(x, src_key_padding_mask=~mask)")
    else:
        source.traits.blocks = count
        init.append(f"self.layers = nn.ModuleList({layer} for _ in range({count}))")
        forward += ["for layer in self.layers:", "    x = layer(x, src_key_padding_mask=~mask)"]
    init.append(f"self.head = {linear(source, str(width), str(vocabulary))}")
    batch = [
        f"tokens = torch.randint({vocabulary}, ({samples}, {length}), generator=g)",
        f"lengths = torch.randint(1, {length + 1}, ({samples}, 1), generator=g)",
        f"mask = torch.arange({length}) < lengths",
        source.pick("x = (tokens, mask)", 'x = {"tokens": tokens, "mask": mask}'),
    ]
    if source.chance(0.3):
        forward += ["x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)", "return self.head(x)"]
        batch.append(f"y = torch.randint({vocabulary}, ({samples},), generator=g)")
        return Job(init, forward, batch, "classes", "tokens, mask", vocabulary)
    batch.append(f"labels = torch.randint({vocabulary}, ({samples}, {length}), generator=g)")
    each = "F.cross_entropy(out.transpose(1, 2), y[0], reduction='none')"
    losses = {
        f"({each} * y[1]).sum() / y[1].sum()": "y = (labels, mask)",
        f"{each}[y[1]].mean()": "y = (labels, mask)",
        "F.cross_entropy(out.flatten(0, 1), y.flatten())": "y = labels.masked_fill(~mask, -100)",
        f"(({each} * y[1]).sum(1) / y[1].sum(1)).mean()": "y = (labels, mask)",
    }
    loss = source.pick(*losses)
    forward.append("return self.head(x)")
    return Job(init, forward, [*batch, losses[loss]], "tokens", "tokens, mask", vocabulary, losses=(loss,))


def _residual(source: Source) -> Job:
    """Residual networks of convolutions whose blocks differ in stride and width."""
    samples, width = _samples(source), source.number(4, 8)
    source.unfit("tp recompute")
    norms = source.pick("nn.BatchNorm2d", "nn.BatchNorm2d", "lambda width: nn.GroupNorm(2, width)", "nn.InstanceNorm2d")
    if "Batch" in norms:
        source.unfit("microbatches")
    inner = source.pick(
        "nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)",
        "nn.Sequential(nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs), nn.Conv2d(inputs, outputs, 1))",
    )
    scale = source.pick("", "y = y * torch.sigmoid(self.squeeze(y.mean((2, 3))))[:, :, None, None]")
    source.define("norm_of", f"norm_of = {norms}")
    body = [
        "y = F.relu(self.norm1(self.conv1(x)))",
        "y = self.drop(self.norm2(self.conv2(y)))",
        *([scale] if scale else []),
        source.pick("return F.relu(y + self.short(x))", "y += self.short(x)\n        return y.relu_()"),
    ]
    init = [
        f"self.conv1, self.norm1 = {inner}, norm_of(outputs)",
        "self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), norm_of(outputs)",
        f"self.drop = {source.pick('nn.Identity()', 'nn.Dropout2d(0.2)', 'nn.Dropout(0.2)')}",
        "self.short = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)",
        *(["self.squeeze = nn.Linear(outputs, outputs)"] if scale else []),
    ]
    made = module("Residual", init, body).replace("__init__(self)", "__init__(self, inputs, outputs, stride=1)")
    source.define("Residual", made)
    blocks = [
        f"Residual({width}, {width})",
        f"Residual({width}, {2 * width}, 2)",
        f"Residual({2 * width}, {2 * width})",
    ]
    source.traits.blocks = len(blocks)
    init = [f"self.stem = nn.Conv2d(3, {width}, 3, padding=1)"]
    forward = ["x = self.stem(x)"]
    if source.chance(0.5):
        init.append(f"self.stages = nn.Sequential({', '.join(blocks)})")
        forward.append("x = self.stages(x)")
    else:
        init.append(f"self.stages = nn.ModuleList([{', '.join(blocks)}])")
        forward += ["for stage in self.stages:", "    x = stage(x)"]
    init.append(f"self.head = nn.Linear({2 * width}, 4)")
    forward.append("return self.head(x.mean((2, 3)))")
    batch = [f"x = torch.randn({samples}, 3, 8, 8, generator=g)", f"y = torch.randint(4, ({samples},), generator=g)"]
    return Job(init, forward, batch, "classes")


def _cells(source: Source) -> Job:
    """Recurrence written out, with states that are learned, given or kept on the side."""
    samples, length, width, vocabulary = _samples(source), source.number(3, 4, 5), source.number(4, 8), 11
    source.unfit("tp pp recompute cp")
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.head = nn.Linear({width}, {vocabulary})",
        f"self.drop = {dropout(source)}",
    ]
    x = f"x = torch.randint({vocabulary}, ({samples}, {length}), generator=g)"
    y = f"y = torch.randint({vocabulary}, ({samples}, {length}), generator=g)"
    match source.pick("cell", "learned_state", "given_state", "scan", "packed"):
        case "cell":
            init += [f"self.cell = nn.GRUCell({width}, {width})"]
            forward = [
                f"h, made = torch.zeros(len(x), {width}).to(self.head.weight), []",
                "for token in self.tokens(x).unbind(1):",
                "    h = self.cell(self.drop(token), h)",
                "    made.append(h)",
                "return self.head(torch.stack(made, 1))",
            ]
        case "learned_state":
            init += [
                f"self.rnn = nn.LSTM({width}, {width}, batch_first=True)",
                f"self.h0 = nn.Parameter(torch.randn(1, 1, {width}))",
                f"self.c0 = nn.Parameter(torch.zeros(1, 1, {width}))",
            ]
            forward = [
                "state = tuple(s.expand(-1, len(x), -1).contiguous() for s in (self.h0, self.c0))",
                "x, _ = self.rnn(self.tokens(x), state)",
                "return self.head(self.drop(x))",
            ]
        case "given_state":
            init.append(f"self.rnn = nn.GRU({width}, {width}, batch_first=True)")
            forward = ["x, last = self.rnn(self.tokens(x), state.transpose(0, 1).contiguous())", "return self.head(x)"]
            state = f"state = torch.randn({samples}, 1, {width}, generator=g)"
            wrapped = source.pick("x = (x, state)", 'x = {"x": x, "state": state}')
            return Job(init, forward, [x, y, state, wrapped], "tokens", "x, state", vocabulary)
        case "scan":
            init += [
                f"self.decay = nn.Parameter(torch.linspace(-1, 1, {width}))",
                f"self.mix = nn.Linear({width}, {width})",
            ]
            forward = [
                "x, h, made = self.mix(self.tokens(x)), 0, []",
                "for t in range(x.shape[1]):",
                "    h = torch.sigmoid(self.decay) * h + self.drop(x[:, t])",
                "    made.append(h)",
                "x = torch.stack(made, 1)",
                "return self.head(x)",
            ]
        case _:
            init.append(f"self.rnn = nn.GRU({width}, {width}, batch_first=True)")
            forward = [
                "packed = nn.utils.rnn.pack_padded_sequence(self.tokens(x), lengths, True, enforce_sorted=False)",
                "_, last = self.rnn(packed)",
                "return self.head(self.drop(last[-1]))",
            ]
            lengths = f"lengths = torch.randint(1, {length + 1}, ({samples},), generator=g)"
            y = f"y = torch.randint({vocabulary}, ({samples},), generator=g)"
            return Job(init, forward, [x, y, lengths, "x = (x, lengths)"], "classes", "x, lengths", vocabulary)
    return Job(init, forward, [x, y], "tokens", classes=vocabulary)


def _towers(source: Source) -> Job:
    """Two towers whose embeddings the loss compares, sample by sample or all with all."""
    samples, width = _samples(source), source.number(4, 8)
    source.unfit("pp recompute microbatches")
    shares = source.chance(0.3)
    init = [
        f"self.left = nn.Sequential(nn.Linear(5, {width}), {feed_forward(source, width)})",
        "self.right = self.left"
        if shares
        else f"self.right = nn.Sequential(nn.Linear(5, {width}), {feed_forward(source, width)})",
        "self.scale = nn.Parameter(torch.tensor(1.0))",
    ]
    forward = ["a, b = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)"]
    batch = [f"{each} = torch.randn({samples}, 5, generator=g)" for each in "ab"]
    batch += [
        source.pick("x = (a, b)", 'x = {"a": a, "b": b}'),
        f"y = torch.rand({samples}, generator=g).round() * 2 - 1",
    ]
    kind = source.pick("apart", "apart", "contrastive", "matrix")
    if kind == "apart":
        losses = (
            "F.cosine_embedding_loss(out[0], out[1], y)",
            "F.triplet_margin_loss(out[0], out[1], out[1].detach() * y[:, None])",
            "((out[0] * out[1]).sum(-1) - y).pow(2).mean()",
        )
        forward.append(source.pick("return a * self.scale, b", "return [a * self.scale, b]"))
        return Job(init, forward, batch, "own", "a, b", losses=losses)
    source.unfit("tp")
    inner = "out" if kind == "matrix" else "(out[0] @ out[1].t())"
    forward.append("return self.scale.exp() * a @ b.t()" if kind == "matrix" else "return a * self.scale, b")
    losses = (
        f"F.cross_entropy({inner}, torch.arange(len(y)))",
        f"-F.logsigmoid({inner} * (2 * torch.eye(len(y)).to(y) - 1)).sum() / len(y)",
    )
    return Job(init, forward, batch, "own", "a, b", losses=losses, wrapper=source.pick("", "uni.BatchLoss"))


def _spectral(source: Source) -> Job:
    """Layers with complex parameters between Fourier transforms."""
    samples, width, count = _samples(source), source.number(4, 8), source.number(2, 3)
    source.unfit("tp cp sp")
    source.traits.blocks = count
    modes = width // 2 + 1
    init = [
        f"self.weight = nn.Parameter(torch.randn({modes}, dtype=torch.complex64) / {modes})",
        f"self.norm = {norm(source, str(width))}",
    ]
    body = [
        f"y = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n={width})",
        f"return x + {activation(source)}(self.norm(y))",
    ]
    if source.chance(0.4):
        init[0] = f"self.weight = nn.Parameter(torch.randn({modes}, {modes}, dtype=torch.complex64) / {modes})"
        body[0] = f"y = torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n={width})"
    source.define("Spectral", module("Spectral", init, body))
    init, forward, batch = _stack_of_numbers("Spectral", width, count, samples)
    if source.chance(0.3):
        init[-1] = f"self.last = nn.Linear({width}, 4, dtype=torch.complex64)"
        forward[-1] = "return self.last(torch.complex(x, x.flip(-1)).to(self.last.weight.dtype))"
        losses = (
            "(out - y).abs().pow(2).mean()",
            "F.mse_loss(torch.view_as_real(out)[..., 0], y) + out.imag.pow(2).mean()",
        )
        return Job(init, forward, batch, "own", losses=losses)
    return Job(init, forward, batch, "numbers")


# Lines of a layer's __init__ and forward that update buffers, and words of plans that are refused for them.
_UPDATES: dict[str, tuple[list[str], list[str], str]] = {
    "counter": (['self.register_buffer("calls", torch.zeros(()))'], ["self.calls += 1"], "microbatches recompute"),
    "annealed": (
        ['self.register_buffer("calls", torch.zeros(()))'],
        ["self.calls += 1", "x = x * (1 + 1 / self.calls)"],
        "microbatches recompute",
    ),
    "average of weights": (
        ['self.register_buffer("average", torch.zeros_like(self.inner.weight))'],
        [
            "if self.training:",
            "    self.average.lerp_(self.inner.weight.detach(), 0.1)",
            "x = x + 0.1 * F.linear(x, self.average)",
        ],
        "tp microbatches recompute zero3",
    ),
    "replaced": (
        ['self.register_buffer("calls", torch.zeros((), dtype=torch.long))'],
        ["self.calls = self.calls + 1"],
        "microbatches recompute",
    ),
    "running mean": (
        ['self.register_buffer("mean", torch.zeros({w}))'],
        ["if self.training:", "    self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))", "x = x - self.mean"],
        "dp microbatches recompute",
    ),
    "seen": (
        ['self.register_buffer("seen", torch.zeros({w}, dtype=torch.bool))'],
        ["self.seen |= (x > 0).any(0)"],
        "dp microbatches recompute",
    ),
    "last": (['self.register_buffer("kept", torch.zeros(1, {w}))'], ["self.kept = x[:1].detach()"], "dp microbatches"),
    "plain": (["self.calls = 0"], ["self.calls += 1", "x = x * (1 + 0.1 / self.calls)"], "microbatches recompute"),
}


def _updating(source: Source) -> Job:
    """Layers that keep count: of calls, of averages of their weights or of their samples."""
    samples, width, count = _samples(source), source.number(4, 8), source.number(2, 3, 4)
    init, body, unfit = _UPDATES[source.pick(*_UPDATES)]
    source.unfit(unfit)
    source.traits.blocks = count
    w = str(width)
    init = [f"self.inner = nn.Linear({w}, {w})", f"self.drop = {dropout(source)}", *(line.format(w=w) for line in init)]
    made = module("Updating", init, [*body, f"return x + self.drop({activation(source)}(self.inner(x)))"])
    source.define("Updating", made)
    return Job(*_stack_of_numbers("Updating", width, count, samples), "numbers")


_HEADS = """
import dataclasses


@dataclasses.dataclass
class Heads:
    kind: torch.Tensor
    size: torch.Tensor
"""


def _several_heads(source: Source) -> Job:
    """Several outputs in a structure of its own, each with targets of its own and often a weight a sample."""
    samples, width = _samples(source), source.number(4, 8)
    source.unfit("pp recompute")
    init = [
        f"self.body = nn.Sequential(nn.Linear(5, {width}), {feed_forward(source, width)})",
        f"self.kind = {linear(source, str(width), '3')}",
        f"self.size = nn.Linear({width}, 1)",
    ]
    forms = {
        "dict": 'return {"kind": self.kind(x), "size": self.size(x).squeeze(-1)}',
        "tuple": "return self.kind(x), self.size(x)[:, 0]",
        "nested": 'return {"kind": [self.kind(x)], "rest": (self.size(x)[:, 0],)}',
        "named": "return Heads(self.kind(x), self.size(x)[:, 0])",
        "dataclass": "return Heads(self.kind(x), self.size(x)[:, 0])",
    }
    form = source.pick(*forms)
    if form == "named":
        source.define("Heads", 'import collections\n\nHeads = collections.namedtuple("Heads", "kind size")')
    if form == "dataclass":
        source.define("Heads", _HEADS)
    kind, size = {
        "dict": ('out["kind"]', 'out["size"]'),
        "tuple": ("out[0]", "out[1]"),
        "nested": ('out["kind"][0]', 'out["rest"][0]'),
        "named": ("out.kind", "out.size"),
        "dataclass": ("out.kind", "out.size"),
    }[form]
    batch = [
        f"x = torch.randn({samples}, 5, generator=g)",
        f"kind, size = torch.randint(3, ({samples},), generator=g), torch.randn({samples}, generator=g)",
        f'y = {{"kind": kind, "size": size, "weight": torch.rand({samples}, generator=g)}}',
    ]
    each = f"F.cross_entropy({kind}, y['kind'], reduction='none')"
    losses = (
        f"F.cross_entropy({kind}, y['kind']) + 0.5 * F.mse_loss({size}, y['size'])",
        f"({each} * y['weight']).mean() + F.smooth_l1_loss({size}, y['size'])",
        f"({each} * y['weight']).sum() / y['weight'].sum() + ({size} - y['size']).pow(2).mean()",
        f"F.cross_entropy({kind}, F.one_hot(y['kind'], 3).to({size}) * 0.9 + 0.03) + {size}.pow(2).mean()",
        f"F.cross_entropy({kind}, y['kind'], ignore_index=0, label_smoothing=0.1)"
        f" + (({size} - y['size']).pow(2) * (y['kind'] > 0)).sum() / (y['kind'] > 0).sum().clamp(min=1)",
        f"F.nll_loss({kind}.log_softmax(-1), y['kind'], weight=torch.tensor([0.5, 1.0, 2.0]).to({size}))",
    )
    return Job(init, ["x = self.body(x)", forms[form]], batch, "own", losses=losses)


def _own_loss(source: Source) -> Job:
    """As Hugging Face's models: labels are an input, and the loss an output."""
    samples, length, vocabulary = _samples(source), source.number(4, 6), 11
    width = source.number(4, 8)
    source.unfit("pp cp sp recompute")
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.body = {feed_forward(source, width)}",
        f"self.head = {linear(source, str(width), str(vocabulary))}",
    ]
    value = source.pick(
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
        "F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
        "F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)",
        "F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)",
    )
    forward = [
        "logits = self.head(self.body(self.tokens(x)))",
        f"loss = {value}",
        'return {"loss": loss, "logits": logits}',
    ]
    batch = [
        f"x = torch.randint({vocabulary}, ({samples}, {length}), generator=g)",
        f"labels = torch.randint({vocabulary}, ({samples}, {length}), generator=g)",
        'x, y = {"x": x, "labels": labels}, ' + source.pick("labels", "None", "{}"),
    ]
    return Job(init, forward, batch, "own", "x, labels", losses=('out["loss"]', 'out["loss"] * 2'))


def _batch_second(source: Source) -> Job:
    """Batches with samples along dim 1, or with tensors without samples beside them."""
    samples, length, width, vocabulary = _samples(source), source.number(3, 4, 6), source.number(4, 8), 11
    source.unfit("tp pp cp sp recompute")
    if source.chance(0.3):
        init = [f"self.first = nn.Linear(6, {width})", f"self.head = nn.Linear({width}, 4)"]
        forward = ["x = torch.tanh(self.first(x.index_add(1, edges[1], x[:, edges[0]])))", "return self.head(x)"]
        batch = [
            f"x = torch.randn({samples}, 6, generator=g)",
            f"edges = torch.randint(6, (2, {source.number(3, 4, samples)}), generator=g)",
            'x = {"x": x, "edges": edges}',
            f"y = torch.randint(4, ({samples},), generator=g)",
        ]
        return Job(init, forward, batch, "classes", "x, edges", batch_dim='({"x": 0, "edges": None}, 0)')
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.inner = {source.pick(f'nn.GRU({width}, {width})', f'nn.LSTM({width}, {width}, num_layers=2)')}",
        f"self.drop = {source.pick('nn.Identity()', 'nn.Dropout(0.2)')}",
        f"self.head = nn.Linear({width}, {vocabulary})",
    ]
    forward = ["x, state = self.inner(self.drop(self.tokens(x)))"]
    batch = [f"x = torch.randint({vocabulary}, ({length}, {samples}), generator=g)"]
    if source.chance(0.5):
        forward.append("return self.head(self.drop(x))")
        batch.append(f"y = torch.randint({vocabulary}, ({length}, {samples}), generator=g)")
        return Job(init, forward, batch, "tokens", classes=vocabulary, batch_dim="1")
    forward.append("return self.head(self.drop(x[-1]))")
    batch.append(f"y = torch.randint({vocabulary}, ({samples},), generator=g)")
    return Job(init, forward, batch, "classes", classes=vocabulary, batch_dim="(1, 0)")


MORE_FAMILIES: dict[str, Callable[[Source], Job]] = {
    "masked": _masked,
    "residual": _residual,
    "cells": _cells,
    "towers": _towers,
    "spectral": _spectral,
    "updating": _updating,
    "several_heads": _several_heads,
    "own_loss": _own_loss,
    "batch_second": _batch_second,
}
