"""Random training jobs, as source text: models, losses, optimizers and batches as strangers write them.

`job(seed)` has the text of a Python file that defines `task`, a uni.Task, and what plans should know of it. The same
seed gives the same text. Sizes are tiny and come from a few numbers, so that samples, tokens, heads and widths are
often equal: code that tells a dim by its size is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from random_architectures import MORE_FAMILIES
from random_parts import Source, Traits, activation, block, dropout, embedding, feed_forward, linear, module, moe, norm
from random_training import OPTIMIZERS, Job, add_odd_features, draw_loss, draw_optimizer

_HEADER = '''"""Random job {seed} ({family})."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
'''


class Drawn(NamedTuple):
    text: str  # of a Python file
    traits: Traits


def job(seed: int, family: str | None = None) -> Drawn:
    source = Source(seed)
    drawn = source.pick(*(name for name, weight in FAMILIES.items() for _ in range(weight)))
    family = family or drawn
    made = _FAMILIES[family](source)
    add_odd_features(source, made)
    loss = draw_loss(source, made)
    is_sparse = any("sparse=True" in line for line in made.init)
    optimizer = draw_optimizer(source, OPTIMIZERS[:2] if is_sparse else OPTIMIZERS)
    clip = "None" if is_sparse else source.pick("None", "None", "0.1", "1.0")
    lines = [_HEADER.format(seed=seed, family=family)]
    lines += [f"\n{code}\n" for code in source.parts.values()]
    lines.append(_class(made))
    lines.append(_model(source))
    lines.append(loss)
    lines.append(optimizer)
    lines.append(_batch(made))
    options = f"clip={clip}" if made.batch_dim == "0" else f"clip={clip}, batch_dim={made.batch_dim}"
    given = f"{made.wrapper}(loss)" if made.wrapper else "loss"
    lines.append(f"task = uni.Task(model=model, loss={given}, optimizer=optimizer, batch=batch, {options})\n")
    return Drawn("\n".join(lines), source.traits)


def _class(made: Job) -> str:
    init = "\n".join(f"        {line}" for line in made.init)
    forward = "\n".join(f"        {line}" for line in made.forward)
    return (
        f"\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n\n"
        f"    def forward(self, {made.arguments}):\n{forward}\n\n"
    )


def _model(source: Source) -> str:
    lines = ["def model():", "    net = Net()"]
    if source.chance(0.12):
        freeze = source.pick(
            "next(net.parameters()).requires_grad_(False)",
            "[p.requires_grad_(False) for n, p in net.named_parameters() if n.endswith('bias')]",
            "[p.requires_grad_(False) for p in list(net.parameters())[::3]]",
        )
        lines.append(f"    {freeze}")
    if source.chance(0.08):
        lines.append("    for p in net.parameters():\n        if p.ndim > 1:\n            nn.init.normal_(p, std=0.2)")
    if source.chance(0.05):
        lines.append("    net.apply(lambda m: m.register_forward_pre_hook(lambda module, args: None))")
    if not source.is_tame and source.chance(0.1):
        source.unfit("dp tp cp zero microbatches")
        lines.append(
            "    for p in filter(lambda p: p.requires_grad, net.parameters()):\n"
            "        p.register_hook(lambda g: g.clamp(-0.5, 0.5))"
        )
    return "\n".join([*lines, "    return net\n\n"])


def _batch(made: Job) -> str:
    lines = ["def batch(seed):", "    g = torch.Generator().manual_seed(seed)"]
    return "\n".join([*lines, *(f"    {line}" for line in made.batch), "    return x, y\n\n"])


# ---- families --------------------------------------------------------------------------------------------------------


def _samples(source: Source) -> int:
    source.traits.samples = source.number(2, 4, 4, 4, 4, 5, 6, 8, 3)
    return source.traits.samples


def _body(source: Source, count: int, layer: Callable[[], str]) -> tuple[list[str], list[str]]:
    """A stack of layers, and how the model runs x through it."""
    name = source.pick("blocks", "layers", "h", "stack")
    layers = [layer()] * count if source.chance(0.7) else [layer() for _ in range(count)]
    same = len(set(layers)) == 1
    made = f"nn.ModuleList({layers[0]} for _ in range({count}))" if same else f"nn.ModuleList([{', '.join(layers)}])"
    loop = [f"for layer in self.{name}:", "    x = layer(x)"]
    source.traits.blocks = count
    if not same:
        source.unfit("pp sp cp recompute")
    kinds = ["list", "list", "list", "list", "sequential", "skips", "first", "weighted", "residual", "named"]
    kinds += ["shared", "shared_part"]
    kind = source.pick(*kinds, *([] if source.is_tame else ["twice", "exit"]))
    source.unfit(
        {
            "twice": "pp",
            "shared": "pp",
            "shared_part": "pp",
            "exit": "pp zero3 microbatches dp cp",
            "named": "cp sp recompute",
        }.get(kind, "")
    )
    match kind:
        case "sequential":
            return [f"self.{name} = nn.Sequential({', '.join(layers)})"], [f"x = self.{name}(x)"]
        case "twice":
            return [f"self.{name} = {made}"], [f"for layer in [*self.{name}, *self.{name}]:", "    x = layer(x)"]
        case "shared":  # one layer several times
            return [f"shared = {layers[0]}", f"self.{name} = nn.ModuleList([shared] * {count})"], loop
        case "shared_part" if same and layers[0].startswith(("Block", "Layer", "MLP")):  # the first layer's, in all
            shared = [
                "for layer in self.{0}:",
                "    child = next(iter(layer._modules))",
                "    layer._modules[child] = self.{0}[0]._modules[child]",
            ]
            return [f"self.{name} = {made}", *(line.format(name) for line in shared)], loop
        case "skips":
            skips = ["saved = []", f"for layer in self.{name}:", "    saved.append(x)", "    x = layer(x)"]
            return [f"self.{name} = {made}"], [*skips, "while saved:", "    x = x + 0.1 * saved.pop()"]
        case "first":
            first = [
                "first = x",
                f"for layer, weight in zip(self.{name}, self.mix):",
                "    x = layer(x) + weight * first",
            ]
            return [f"self.{name} = {made}", f"self.mix = nn.Parameter(torch.full(({count},), 0.1))"], first
        case "weighted":
            sums = ["every = [x]", f"for layer in self.{name}:", "    every.append(layer(every[-1]))"]
            combine = "x = (torch.stack(every) * self.mix.softmax(0).view(-1, *[1] * x.ndim)).sum(0)"
            return [f"self.{name} = {made}", f"self.mix = nn.Parameter(torch.zeros({count + 1}))"], [*sums, combine]
        case "exit":
            return [f"self.{name} = {made}"], [*loop, "    if x.abs().mean() > 2:", "        break"]
        case "residual":
            return [f"self.{name} = {made}"], [f"for layer in self.{name}:", "    x = x + 0.5 * layer(x)"]
        case "named":
            init = [f"self.{name}{number} = {each}" for number, each in enumerate(layers)]
            return init, [f"x = self.{name}{number}(x)" for number in range(count)]
        case _:
            return [f"self.{name} = {made}"], loop


def _language(source: Source) -> Job:
    heads = source.number(2, 2, 4)
    width = heads * source.number(2, 4, 4)
    length, samples, vocabulary = source.number(4, 6, 8), _samples(source), source.number(8, 11, 16)
    source.traits.length = length
    has_experts = source.chance(0.25)
    init = [f"self.tokens = {embedding(source, vocabulary, width)}"]
    forward = ["x = self.tokens(x)"]
    match source.pick("embedding", "embedding", "parameter", "sines", "none", "dropped"):
        case "embedding":
            init.append(f"self.positions = nn.Embedding(16, {width})")
            forward = ["t = x.shape[1]", *forward, "x = x + self.positions(torch.arange(t, device=x.device))"]
        case "parameter":
            init.append(f"self.positions = nn.Parameter(torch.randn(1, 16, {width}) * 0.1)")
            forward.append("x = x + self.positions[:, : x.shape[1]]")
        case "sines":
            init.append(
                f'self.register_buffer("sines", torch.sin(torch.arange(16)[:, None] / torch.arange(1, {width + 1})))'
            )
            forward.append("x = x + self.sines[: x.shape[1]]")
        case "dropped":
            source.unfit("cp")
            init += [f"self.positions = nn.Embedding({length}, {width})", "self.table_drop = nn.Dropout(0.2)"]
            forward.append("x = x + self.table_drop(self.positions.weight)")
    if source.chance(0.2):
        init.append("self.embed_drop = nn.Dropout(0.1)")
        forward.append("x = self.embed_drop(x)")
    made_body = _body(source, source.number(2, 2, 3, 4), lambda: block(source, width, heads, has_experts=has_experts))
    init, forward = init + made_body[0], forward + made_body[1]
    init.append(f"self.norm = {norm(source, str(width))}")
    forward.append("x = self.norm(x)")
    batch = [f"x = torch.randint({vocabulary}, ({samples}, {length}), generator=g)"]
    match source.pick("head", "head", "tied", "tied_weight", "pooled", "last", "scaled"):
        case "pooled" | "last" as kind:
            source.unfit("cp")
            pooled = "x.mean(1)" if kind == "pooled" else source.pick("x[:, -1]", "x[:, 0]", "x.amax(1)")
            init.append(f"self.head = {linear(source, str(width), '4')}")
            forward.append(f"return self.head({pooled})")
            batch.append(f"y = torch.randint(4, ({samples},), generator=g)")
            return Job(init, forward, batch, "classes")
        case "tied" if "Sequential" not in init[0]:
            init += [
                f"self.head = nn.Linear({width}, {vocabulary}, bias=False)",
                "self.head.weight = self.tokens.weight",
            ]
            forward.append("return self.head(x)")
        case "tied_weight" if "Sequential" not in init[0]:
            forward.append(source.pick("return F.linear(x, self.tokens.weight)", "return x @ self.tokens.weight.T"))
        case "scaled":
            init += [f"self.head = nn.Linear({width}, {vocabulary})", "self.scale = nn.Parameter(torch.tensor(1.0))"]
            forward.append("return self.head(x) * self.scale")
        case _:
            init.append(f"self.head = {linear(source, str(width), str(vocabulary))}")
            forward.append("return self.head(x)")
    batch.append(f"y = torch.randint({vocabulary}, ({samples}, {length}), generator=g)")
    return Job(init, forward, batch, "tokens", classes=vocabulary)


def _vectors(source: Source) -> Job:
    inputs, width, samples = source.number(4, 5, 8), source.number(4, 8, 8, 12), _samples(source)

    def layer() -> str:
        name = f"Layer{len(source.parts)}"
        kind = source.pick("mlp", "mlp", "residual", "batch_norm", "group_norm", "plain", "bilinear", "buffer")
        hidden = feed_forward(source, width)
        w = str(width)
        init, body = (
            [f"self.inner = {hidden}", f"self.norm = {norm(source, w)}"],
            ["return x + self.inner(self.norm(x))"],
        )
        match kind:
            case "mlp":
                return hidden
            case "batch_norm":
                source.unfit("microbatches")
                options = source.pick("", ", momentum=None", ", affine=False", ", track_running_stats=False")
                init[1] = f"self.norm = nn.BatchNorm1d({width}{options})"
            case "group_norm":
                init[1] = f"self.norm = nn.GroupNorm(2, {width})"
            case "plain":
                act = source.pick("nn.ReLU(inplace=True)", "nn.Tanh()", "nn.GELU()")
                return f"nn.Sequential({linear(source, w, w)}, {act}, {dropout(source)})"
            case "bilinear":
                init, body = [f"self.inner = nn.Bilinear({w}, {w}, {w})"], ["return x + torch.tanh(self.inner(x, x))"]
            case "buffer":
                init.append(f'self.register_buffer("order", torch.arange({w}).flip(0))')
                body = ["return self.inner(x[:, self.order]) + x"]
        source.define(name, module(name, init, body))
        return f"{name}()"

    init = [f"self.first = {linear(source, str(inputs), str(width))}"]
    body = _body(source, source.number(2, 3, 4), layer)
    init, forward = init + body[0], [f"x = {activation(source)}(self.first(x))", *body[1]]
    init.append(f"self.last = {linear(source, str(width), '4')}")
    forward.append("return self.last(x)")
    batch = [f"x = torch.randn({samples}, {inputs}, generator=g)"]
    kind = source.pick("classes", "classes", "numbers")
    y = (
        f"y = torch.randint(4, ({samples},), generator=g)"
        if kind == "classes"
        else f"y = torch.randn({samples}, 4, generator=g)"
    )
    return Job(init, forward, [*batch, y], kind)


def _images(source: Source) -> Job:
    samples, width = _samples(source), source.number(4, 8)
    batch = [f"x = torch.randn({samples}, 3, 8, 8, generator=g)", f"y = torch.randint(4, ({samples},), generator=g)"]
    match source.pick("convolutions", "convolutions", "patches", "unet"):
        case "patches":
            init = [
                f"self.patch = nn.Conv2d(3, {width}, 4, 4)",
                f"self.cls = nn.Parameter(torch.randn(1, 1, {width}) * 0.1)",
            ]
            init.append(f"self.positions = nn.Parameter(torch.randn(1, 5, {width}) * 0.1)")
            forward = ["x = self.patch(x).flatten(2).transpose(1, 2)"]
            forward += ["x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.positions"]
            body = _body(source, 2, lambda: block(source, width, 2))
            init += [*body[0], f"self.head = nn.Linear({width}, 4)"]
            return Job(
                init,
                [*forward, *body[1], source.pick("return self.head(x[:, 0])", "return self.head(x.mean(1))")],
                batch,
                "classes",
            )
        case "unet":
            source.unfit("pp tp recompute")
            init = [
                f"self.down1 = nn.Conv2d(3, {width}, 3, padding=1)",
                f"self.down2 = nn.Conv2d({width}, {2 * width}, 3, stride=2, padding=1)",
                f"self.up = nn.ConvTranspose2d({2 * width}, {width}, 2, stride=2)",
                f"self.out = nn.Conv2d({2 * width}, 4, 1)",
            ]
            forward = [
                "a = F.relu(self.down1(x))",
                "b = F.relu(self.down2(a))",
                "return self.out(torch.cat((self.up(b), a), 1))",
            ]
            return Job(init, forward, [batch[0], f"y = torch.randn({samples}, 4, 8, 8, generator=g)"], "numbers")
    options = source.pick("", ", groups=2", ", bias=False", ', padding_mode="circular"')
    norms = source.pick(
        "nn.BatchNorm2d({w})", "nn.GroupNorm(2, {w})", "nn.InstanceNorm2d({w}, affine=True)", "nn.Identity()"
    ).format(w=width)
    source.define(
        "ConvBlock",
        f"""
        class ConvBlock(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d({width}, {width}, 3, padding=1{options})
                self.norm = {norms}
                self.drop = {source.pick("nn.Identity()", "nn.Dropout2d(0.2)", "nn.Dropout(0.2)")}

            def forward(self, x):
                y = F.relu(self.norm(self.conv(x)){source.pick("", ", inplace=True")})
                return {source.pick("x + ", "")}self.drop(y)
        """,
    )
    if "Batch" in norms:
        source.unfit("microbatches")
    source.unfit("tp")
    body = _body(source, source.number(2, 3), lambda: "ConvBlock()")
    init = [f"self.stem = nn.Conv2d(3, {width}, 3, padding=1)", *body[0], f"self.head = nn.Linear({width}, 4)"]
    pool = source.pick("x.mean((2, 3))", "F.adaptive_avg_pool2d(x, 1).flatten(1)", "F.max_pool2d(x, 8).flatten(1)")
    return Job(init, ["x = self.stem(x)", *body[1], f"return self.head({pool})"], batch, "classes")


def _recurrent(source: Source) -> Job:
    samples, length, width, vocabulary = _samples(source), source.number(4, 6), source.number(4, 8), 11
    cell = source.pick("nn.RNN", "nn.GRU", "nn.LSTM")
    source.unfit("tp pp recompute")
    dropped = [] if source.is_tame else [", num_layers=2, dropout=0.2"]
    options = source.pick("", ", num_layers=2", ", bidirectional=True", *dropped)
    doubled = 2 * width if "bidirectional" in options else width
    init = [
        f"self.tokens = {embedding(source, vocabulary, width)}",
        f"self.rnn = {cell}({width}, {width}, batch_first=True{options})",
        f"self.drop = {dropout(source)}",
        f"self.head = nn.Linear({doubled}, {vocabulary})",
    ]
    forward = ["x, state = self.rnn(self.tokens(x))", "return self.head(self.drop(x))"]
    batch = [f"{each} = torch.randint({vocabulary}, ({samples}, {length}), generator=g)" for each in "xy"]
    if source.chance(0.3):
        forward[1] = "return self.head(self.drop(x[:, -1]))"
        batch[1] = f"y = torch.randint({vocabulary}, ({samples},), generator=g)"
        return Job(init, forward, batch, "classes", classes=vocabulary)
    return Job(init, forward, batch, "tokens", classes=vocabulary)


def _time_major(source: Source) -> Job:
    """(tokens, samples, width) inside, as torch's recurrent layers and its language-model tutorial have it."""
    samples, length, width, vocabulary = _samples(source), source.number(4, 6, 8), source.number(4, 8), 11
    source.unfit("tp pp recompute")
    rate = source.pick("0.0", "0.2")
    inner = source.pick(
        f"nn.TransformerEncoder(nn.TransformerEncoderLayer({width}, 2, {2 * width}, dropout={rate}), 2)",
        f"nn.GRU({width}, {width})",
        f"nn.LSTM({width}, {width}, num_layers=2)",
    )
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.positions = nn.Parameter(torch.randn(16, 1, {width}) * 0.1)",
        f"self.drop = nn.Dropout({source.pick('0.0', '0.2')})",
        f"self.inner = {inner}",
        f"self.head = nn.Linear({width}, {vocabulary})",
    ]
    turned = source.is_tame or source.chance(0.5)
    forward = [f"x = self.tokens(x{'.t()' if turned else ''})", "x = self.drop(x + self.positions[: len(x)])"]
    forward.append("x = self.inner(x)" if "Transformer" in inner else "x, _ = self.inner(x)")
    forward.append(f"return self.head(x){'.transpose(0, 1)' if turned else ''}")
    shape = f"({samples}, {length})" if turned else f"({length}, {samples})"
    return Job(
        init,
        forward,
        [f"{each} = torch.randint({vocabulary}, {shape}, generator=g)" for each in "xy"],
        "tokens",
        classes=vocabulary,
    )


def _pair(source: Source) -> Job:
    samples, width, vocabulary = _samples(source), source.number(4, 8), 11
    there, here = source.number(4, 6), source.number(4, 6)
    source.unfit("pp recompute")
    if source.chance(0.5):
        source.unfit("tp")
        inner = f"nn.Transformer({width}, 2, 1, 1, {2 * width}, dropout={source.pick('0.0', '0.1')}, batch_first=True)"
        init = [f"self.inner = {inner}"]
        mask = "nn.Transformer.generate_square_subsequent_mask(b.shape[1])"
        masked = source.pick("", f", tgt_mask={mask}")
        forward = [f"y = self.inner(self.tokens(a), self.tokens(b){masked})"]
    else:
        source.define(
            "Cross",
            f"""
            class Cross(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.q, self.kv = nn.Linear({width}, {width}), nn.Linear({width}, {2 * width})
                    self.o = nn.Linear({width}, {width})
                    self.mlp = {feed_forward(source, width)}

                def forward(self, x, memory):
                    q = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
                    k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.kv(memory).chunk(2, -1))
                    x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
                    return x + self.mlp(x)
            """,
        )
        init = [
            f"self.encoder = nn.ModuleList([{block(source, width, 2)}])",
            "self.decoder = nn.ModuleList([Cross(), Cross()])",
        ]
        forward = [
            "memory, y = self.tokens(a), self.tokens(b)",
            "for layer in self.encoder:",
            "    memory = layer(memory)",
        ]
        forward += ["for layer in self.decoder:", "    y = layer(y, memory)"]
    init += [f"self.tokens = nn.Embedding({vocabulary}, {width})", f"self.head = nn.Linear({width}, {vocabulary})"]
    inputs = [
        f"{name} = torch.randint({vocabulary}, ({samples}, {size}), generator=g)"
        for name, size in (("a", there), ("b", here))
    ]
    wrapped = source.pick("x = (a, b)", 'x = {"a": a, "b": b}')
    y = f"y = torch.randint({vocabulary}, ({samples}, {here}), generator=g)"
    return Job(init, [*forward, "return self.head(y)"], [*inputs, wrapped, y], "tokens", "a, b", vocabulary)


def _decoder(source: Source) -> Job:
    """As Hugging Face writes decoders: positions are computed once, and given to every block."""
    heads, size = source.number(2, 4), source.number(2, 4)
    width, length, samples = heads * size, source.number(4, 8, 8), _samples(source)
    vocabulary, count, groups = source.number(8, 16), source.number(2, 3, 4), source.number(heads, heads, 2)
    source.traits.length, source.traits.heads, source.traits.blocks = length, groups, count
    given, passed = source.pick("x, cos, sin|cos, sin", "x, positions=None|positions=positions").split("|")
    _define_decoder_layer(source, width, heads, groups, given, passed)
    init = [
        f"self.embed_tokens = {embedding(source, vocabulary, width)}",
        f"self.layers = nn.ModuleList(DecoderLayer() for _ in range({count}))",
        f"self.norm = {norm(source, str(width))}",
        f"self.lm_head = nn.Linear({width}, {vocabulary}, bias=False)",
        f'self.register_buffer("inverse", 100.0 ** (-torch.arange(0, {size}, 2).float() / {size}), persistent=False)',
    ]
    if source.chance(0.3) and "Sequential" not in init[0]:
        init.append("self.lm_head.weight = self.embed_tokens.weight")
    forward = [
        "angle = torch.outer(torch.arange(x.shape[1], device=x.device).to(self.inverse.dtype), self.inverse)",
        "angle = torch.cat((angle, angle), -1)" + source.pick("", "[None, None]"),
        "x = self.embed_tokens(x)",
        "cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)",
        *(["positions = (cos, sin)"] if "positions" in passed else []),
        "for layer in self.layers:",
        f"    x = layer(x, {passed})",
        "x = self.norm(x)",
        "return self.lm_head(x)",
    ]
    batch = [f"{each} = torch.randint({vocabulary}, ({samples}, {length}), generator=g)" for each in "xy"]
    return Job(init, forward, batch, "tokens", classes=vocabulary)


def _define_decoder_layer(source: Source, width: int, heads: int, groups: int, given: str, passed: str) -> None:
    size, bias, drop = width // heads, source.pick("True", "False"), source.pick("", "", "0.1")
    mlp_layer = moe(source, width) if source.chance(0.25) else feed_forward(source, width)
    init = [
        f"self.{name}_proj = nn.Linear({width}, {outputs}, bias={bias})"
        for name, outputs in (("q", width), ("k", groups * size), ("v", groups * size), ("o", width))
    ]
    body = ["cos, sin = positions"] if "positions" in passed else []
    body.append(f"shape = (*x.shape[:-1], -1, {size})")
    body += [f"{name} = self.{name}_proj(x).view(shape).transpose(1, 2)" for name in "qkv"]
    body.append("q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin")
    source.define(
        "rotate",
        """
        def rotate(x):
            a, b = x.chunk(2, -1)
            return torch.cat((-b, a), -1)
        """,
    )
    options = f", dropout_p={drop} if self.training else 0.0" if drop else ""
    if groups != heads and source.chance(0.5):
        body.append(f"k, v = (y.repeat_interleave({heads // groups}, dim=1) for y in (k, v))")
    elif groups != heads:
        options += ", enable_gqa=True"
    body.append(f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{options})")
    body.append("return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))")
    source.define("SelfAttention", module("SelfAttention", init, body, given))
    init = [
        "self.self_attn = SelfAttention()",
        f"self.mlp = {mlp_layer}",
        f"self.input_layernorm = {norm(source, str(width))}",
        f"self.post_attention_layernorm = {norm(source, str(width))}",
    ]
    body = [f"x = x + self.self_attn(self.input_layernorm(x), {passed})"]
    body.append("return x + self.mlp(self.post_attention_layernorm(x))")
    source.define("DecoderLayer", module("DecoderLayer", init, body, given))


_FAMILIES: dict[str, Callable[[Source], Job]] = {
    "language": _language,
    "decoder": _decoder,
    "vectors": _vectors,
    "images": _images,
    "recurrent": _recurrent,
    "time_major": _time_major,
    "pair": _pair,
    **MORE_FAMILIES,
}
FAMILIES = {
    "language": 8,
    "decoder": 5,
    "vectors": 5,
    "images": 3,
    "recurrent": 2,
    "time_major": 1,
    "pair": 1,
    **dict.fromkeys(MORE_FAMILIES, 1),
}  # how often
