"""Random training jobs, as source text: models, losses, optimizers and batches as strangers write them.

`job(seed)` is the text of a Python file that defines `task`, a uni.Task. The same seed gives the same text. Sizes are
tiny and come from a few numbers, so that samples, tokens, heads and widths are often equal: code that tells a dim by
its size is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from random_parts import Source, activation, block, dropout, embedding, feed_forward, linear, module, norm

_HEADER = '''"""Random job {seed} ({family})."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
'''


@dataclass
class Job:
    """What a family draws: the body of the model's class, a batch, and what its outputs and targets are."""

    init: list[str]
    forward: list[str]
    batch: list[str]  # lines that define x and y from the generator g
    outputs: str  # "tokens", "classes" or "numbers": what losses fit
    arguments: str = "x"
    classes: int = 4
    plain: bool = True  # whether the model gives one tensor
    wrap: list[str] = field(default_factory=list)  # lines after the model is made


def job(seed: int, family: str | None = None) -> str:
    source = Source(seed)
    drawn = source.pick(*(name for name, weight in FAMILIES.items() for _ in range(weight)))
    family = family or drawn
    made = _FAMILIES[family](source)
    _odd_features(source, made)
    loss = _loss(source, made)
    is_sparse = any("sparse=True" in line for line in made.init)
    optimizer = _optimizer(source, _OPTIMIZERS[:2] if is_sparse else _OPTIMIZERS)
    clip = "None" if is_sparse else source.pick("None", "None", "0.1", "1.0")
    lines = [_HEADER.format(seed=seed, family=family)]
    lines += [f"\n{code}\n" for code in source.parts.values()]
    lines.append(_class(made))
    lines.append(_model(source, made))
    lines.append(loss)
    lines.append(optimizer)
    lines.append(_batch(made))
    lines.append(f"task = uni.Task(model=model, loss=loss, optimizer=optimizer, batch=batch, clip={clip})\n")
    return "\n".join(lines)


def _class(made: Job) -> str:
    init = "\n".join(f"        {line}" for line in made.init)
    forward = "\n".join(f"        {line}" for line in made.forward)
    return (
        f"\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n\n"
        f"    def forward(self, {made.arguments}):\n{forward}\n\n"
    )


def _model(source: Source, made: Job) -> str:
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
    if source.chance(0.05):
        lines.append(
            "    for p in filter(lambda p: p.requires_grad, net.parameters()):\n"
            "        p.register_hook(lambda g: g.clamp(-0.5, 0.5))"
        )
    lines += [f"    {line}" for line in made.wrap]
    return "\n".join([*lines, "    return net\n\n"])


def _batch(made: Job) -> str:
    lines = ["def batch(seed):", "    g = torch.Generator().manual_seed(seed)"]
    return "\n".join([*lines, *(f"    {line}" for line in made.batch), "    return x, y\n\n"])


# ---- families --------------------------------------------------------------------------------------------------------


def _samples(source: Source) -> int:
    return source.number(2, 4, 4, 4, 4, 5, 6, 8, 3)


def _body(source: Source, count: int, layer: Callable[[], str]) -> tuple[list[str], list[str]]:
    """A stack of layers, and how the model runs x through it."""
    name = source.pick("blocks", "layers", "h", "stack")
    layers = [layer()] * count if source.chance(0.7) else [layer() for _ in range(count)]
    same = len(set(layers)) == 1
    made = f"nn.ModuleList({layers[0]} for _ in range({count}))" if same else f"nn.ModuleList([{', '.join(layers)}])"
    loop = [f"for layer in self.{name}:", "    x = layer(x)"]
    match source.pick(
        "list", "list", "list", "list", "sequential", "twice", "skips", "first", "weighted", "exit", "residual", "named"
    ):
        case "sequential":
            return [f"self.{name} = nn.Sequential({', '.join(layers)})"], [f"x = self.{name}(x)"]
        case "twice":
            return [f"self.{name} = {made}"], [f"for layer in [*self.{name}, *self.{name}]:", "    x = layer(x)"]
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
    has_experts = source.chance(0.15)
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
            init += [f"self.positions = nn.Embedding({length}, {width})", "self.table_drop = nn.Dropout(0.2)"]
            forward.append("x = x + self.table_drop(self.positions.weight)")
    if source.chance(0.2):
        init.append("self.embed_drop = nn.Dropout(0.1)")
        forward.append("x = self.embed_drop(x)")
    made_body = _body(source, source.number(2, 2, 3), lambda: block(source, width, heads, has_experts=has_experts))
    init, forward = init + made_body[0], forward + made_body[1]
    init.append(f"self.norm = {norm(source, str(width))}")
    forward.append("x = self.norm(x)")
    batch = [f"x = torch.randint({vocabulary}, ({samples}, {length}), generator=g)"]
    match source.pick("head", "head", "tied", "tied_weight", "pooled", "last", "scaled"):
        case "pooled" | "last" as kind:
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
    body = _body(source, source.number(2, 3), lambda: "ConvBlock()")
    init = [f"self.stem = nn.Conv2d(3, {width}, 3, padding=1)", *body[0], f"self.head = nn.Linear({width}, 4)"]
    pool = source.pick("x.mean((2, 3))", "F.adaptive_avg_pool2d(x, 1).flatten(1)", "F.max_pool2d(x, 8).flatten(1)")
    return Job(init, ["x = self.stem(x)", *body[1], f"return self.head({pool})"], batch, "classes")


def _recurrent(source: Source) -> Job:
    samples, length, width, vocabulary = _samples(source), source.number(4, 6), source.number(4, 8), 11
    cell = source.pick("nn.RNN", "nn.GRU", "nn.LSTM")
    options = source.pick("", ", num_layers=2", ", num_layers=2, dropout=0.2", ", bidirectional=True")
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
    rate = source.pick("0.0", "0.2")
    inner = source.pick(
        f"nn.TransformerEncoder(nn.TransformerEncoderLayer({width}, 2, {2 * width}, dropout={rate}), 2)",
        f"nn.GRU({width}, {width})",
        f"nn.LSTM({width}, {width}, num_layers=2, dropout=0.2)",
    )
    init = [
        f"self.tokens = nn.Embedding({vocabulary}, {width})",
        f"self.positions = nn.Parameter(torch.randn(16, 1, {width}) * 0.1)",
        f"self.drop = nn.Dropout({source.pick('0.0', '0.2')})",
        f"self.inner = {inner}",
        f"self.head = nn.Linear({width}, {vocabulary})",
    ]
    turned = source.chance(0.5)
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
    if source.chance(0.5):
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


_FAMILIES: dict[str, Callable[[Source], Job]] = {
    "language": _language,
    "vectors": _vectors,
    "images": _images,
    "recurrent": _recurrent,
    "time_major": _time_major,
    "pair": _pair,
}
FAMILIES = {"language": 9, "vectors": 5, "images": 3, "recurrent": 2, "time_major": 1, "pair": 1}  # how often


# ---- odd features ----------------------------------------------------------------------------------------------------

# Lines for __init__, and lines for x before the last line of forward (there, x is what the head is given).
_ODD: dict[str, tuple[list[str], list[str]]] = {
    "mixes samples": ([], ["x = x - x.mean(0, keepdim=True)"]),
    "reads the batch size": ([], ["x = x / x.shape[0] ** 0.5"]),
    "counts steps": (['self.register_buffer("steps", torch.zeros((), dtype=torch.long))'], ["self.steps += 1"]),
    "running mean": (
        ['self.register_buffer("running", torch.zeros(()))'],
        [
            "with torch.no_grad():",
            "    self.running.lerp_(x.mean().to(self.running.dtype), 0.1)",
            "x = x - self.running",
        ],
    ),
    "branches by data": ([], ["if x.mean() > 0:", "    x = x * 1.5"]),
    "branches by sample": ([], ["x = torch.where(x.flatten(1).mean(1).view(-1, *[1] * (x.ndim - 1)) > 0, x * 1.5, x)"]),
    "bool buffer": (['self.register_buffer("flag", torch.tensor(True))'], ["x = torch.where(self.flag, x, -x)"]),
    "complex buffer": (
        ['self.register_buffer("phase", torch.tensor(0.6 + 0.8j))'],
        ["x = (x * self.phase).real + (x * self.phase).imag"],
    ),
    "gradient reversal": (["self.reverse = Reverse.apply"], ["x = x + 0.1 * self.reverse(x)"]),
    "vmap": ([], ["x = torch.vmap(lambda row: row * 1.5 + row.mean())(x)"]),
    "rounds": ([], ["x = x + ((x * 8).round() / 8 - x).detach()"]),
    "unused parameter": (["self.unused = nn.Parameter(torch.randn(3))"], []),
    "unused layer": (["self.unused = nn.Linear(3, 3)"], []),
    "scalar parameter": (["self.gain = nn.Parameter(torch.tensor(1.5))"], ["x = x * self.gain"]),
    "teacher": ([], ["with torch.no_grad():", "    mean = x.mean(-1, keepdim=True)", "x = x - mean"]),
    "drops whole layers": ([], ["if torch.rand(()) < 0.5:", "    x = x * 0.5"]),
    "permutes features": ([], ["x = x[..., torch.randperm(x.shape[-1])]"]),
    "sorts": ([], ["x = x.sort(-1).values"]),
    "parameter list": (
        ["self.gains = nn.ParameterList([torch.ones(1), torch.ones(1)])"],
        ["x = x * self.gains[0] + self.gains[1]"],
    ),
    "in place": ([], ["x = x.clone()", "x[:, 0] = 0", "x.mul_(1.5)"]),
    "max over dim 1": ([], ["x = x - x.amax(1, keepdim=True)"]),
    "sum over dim 1": ([], ["x = x + x.cumsum(1)"]),
    "rolls": ([], ["x = x + x.roll(1, 1)"]),
    "cache on self": (
        ["self.cache = {}"],
        [
            "if x.shape not in self.cache:",
            "    self.cache[x.shape] = torch.ones(x.shape[-1]).to(x)",
            "x = x * self.cache[x.shape]",
        ],
    ),
    "random table": ([], ["x = x + 0.1 * torch.randn(x.shape[-1]).to(x)"]),
    "dropout of weights": (
        ["self.mixing = nn.Parameter(torch.ones(4))"],
        ["x = x * F.dropout(self.mixing, 0.25, self.training).sum()"],
    ),
    "full backward hook": (["self.register_full_backward_hook(lambda module, into, out: None)"], []),
    "state dict hook": (["self.register_load_state_dict_pre_hook(lambda *args: None)"], []),
}
_REVERSE = """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient
"""


def _odd_features(source: Source, made: Job) -> None:
    last = made.forward[-1]
    if source.chance(0.3) and ("(x" in last or "x @" in last):
        name = source.pick(*_ODD)
        init, lines = _ODD[name]
        if name == "gradient reversal":
            source.define("Reverse", _REVERSE)
        made.init += init
        made.forward[-1:] = [f"# {name}" if lines else f"# ({name})", *lines, last]
    if source.chance(0.15):
        _more_outputs(source, made)


def _more_outputs(source: Source, made: Job) -> None:
    """Outputs beside the predictions: regularisers, task weights, penalties; or predictions in a dictionary."""
    value = made.forward[-1].removeprefix("return ")
    made.plain = False
    weight = "sum(p.pow(2).sum() for p in self.parameters() if p.ndim > 1)"
    match source.pick("dict", "tuple", "weights", "tasks", "entropy", "penalty", "own_loss"):
        case "dict":
            made.forward[-1:] = [f"out = {value}", 'return {"logits": out}']
        case "tuple":
            made.forward[-1:] = [f"out = {value}", "return out, out.detach().mean()"]
        case "weights":
            made.forward[-1:] = [f"out = {value}", f"return out, 1e-3 * {weight}"]
        case "tasks":
            made.init.append("self.log_variance = nn.Parameter(torch.zeros(2))")
            made.forward[-1:] = [f"out = {value}", "return out, self.log_variance"]
        case "entropy":
            made.forward[-1:] = [f"out = {value}", "return out, out.softmax(-1).mean(0).log().sum()"]
        case "penalty":
            made.forward[-1:] = [
                f"out = {value}",
                "inner = torch.autograd.grad(out.sum(), x, create_graph=True)[0] if x.requires_grad else x.detach()",
                "return out, inner.flatten(1).pow(2).sum(1)",
            ]
        case "own_loss":
            made.forward[-1:] = [f"out = {value}", "return out, out.logsumexp(-1).pow(2).mean()"]


# ---- losses and optimizers -------------------------------------------------------------------------------------------

_LOSSES = {
    "tokens": [
        "F.cross_entropy(out.flatten(0, 1), y.flatten())",
        "F.cross_entropy(out.flatten(0, 1), y.flatten())",
        "F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))",
        "F.cross_entropy(out.transpose(1, 2), y)",
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=3)",
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)",
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction='sum')",
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction='sum') / y.numel()",
        "F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())",
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 1.5, {classes}).to(out))",
        "(F.cross_entropy(out.transpose(1, 2), y, reduction='none') * (y > 2)).sum() / (y > 2).sum()",
        "F.cross_entropy(out.transpose(1, 2), y, reduction='none').sum(1).mean()",
        "F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten())",
        "F.cross_entropy(out.flatten(0, 1), y.flatten()) + 1e-3 * out.logsumexp(-1).pow(2).mean()",
        "-(out.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)).mean()",
        "nn.CrossEntropyLoss()(out.view(-1, {classes}), y.view(-1))",
    ],
    "classes": [
        "F.cross_entropy(out, y)",
        "F.cross_entropy(out, y)",
        "nn.CrossEntropyLoss(label_smoothing=0.1)(out, y)",
        "F.cross_entropy(out, y, ignore_index=1)",
        "F.cross_entropy(out, y, reduction='sum')",
        "F.cross_entropy(out, y, reduction='sum') / len(y)",
        "F.cross_entropy(out, y, weight=torch.linspace(0.5, 1.5, {classes}).to(out))",
        "F.binary_cross_entropy_with_logits(out, F.one_hot(y, {classes}).to(out))",
        "F.mse_loss(out.softmax(-1), F.one_hot(y, {classes}).to(out))",
        "F.multi_margin_loss(out, y)",
        "((1 - out.softmax(-1).gather(1, y[:, None])[:, 0]) ** 2 * F.cross_entropy(out, y, reduction='none')).mean()",
        "F.cross_entropy(out @ out.t(), torch.arange(len(out)))",
        "F.kl_div(out.log_softmax(-1), F.one_hot(y, {classes}).to(out), reduction='batchmean')",
    ],
    "numbers": [
        "F.mse_loss(out, y)",
        "F.l1_loss(out, y)",
        "F.smooth_l1_loss(out, y)",
        "F.huber_loss(out, y, reduction='sum')",
        "((out - y) ** 2).mean()",
        "((out - y) ** 2).sum() / out.shape[0]",
        "(out - y).flatten(1).norm(dim=1).mean()",
        "(out - y).pow(2).mean().sqrt()",
        "((out - y).abs() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)",
    ],
}


def _loss(source: Source, made: Job) -> str:
    value = source.pick(*_LOSSES[made.outputs]).format(classes=made.classes)
    lines = ["def loss(out, y):"]
    last = made.forward[-1]
    if '"logits"' in last:
        lines.append('    out = out["logits"]')
    elif not made.plain:
        lines.append("    out, extra = out")
        match last:
            case "return out, self.log_variance":
                value = f"({value}) * torch.exp(-extra[0]) + extra.sum()"
            case "return out, out.detach().mean()":
                pass
            case _:
                value = f"{value} + 0.1 * extra.mean()"
    return "\n".join([*lines, f"    return {value}\n\n"])


_OPTIMIZERS = [
    "torch.optim.SGD(parameters, lr=0.1)",
    "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.AdamW(parameters, lr=1e-2)",
    "torch.optim.AdamW(parameters, lr=1e-2)",
    "torch.optim.AdamW(parameters, lr=1e-2)",
    "torch.optim.Adam(parameters, lr=1e-2, amsgrad=True)",
    "torch.optim.AdamW(parameters, lr=1e-2, fused=True)",
    "torch.optim.RMSprop(parameters, lr=1e-2, centered=True)",
    "torch.optim.Adagrad(parameters, lr=1e-2)",
    "torch.optim.Adadelta(parameters, lr=0.5)",
    "torch.optim.NAdam(parameters, lr=1e-2)",
    "torch.optim.Adamax(parameters, lr=1e-2)",
    "torch.optim.Adafactor(parameters, lr=1e-2)",
    "torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)",
    "Lion(parameters, lr=1e-2)",
    "grouped(parameters)",
    "hooked_step(torch.optim.AdamW(parameters, lr=1e-2))",
    "torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)",
]
_LION = """
class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m, (a, b) = state["momentum"], group["betas"]
                p.add_(torch.tanh(100 * (m * a + p.grad * (1 - a))), alpha=-group["lr"])
                m.mul_(b).add_(p.grad, alpha=1 - b)
"""
_GROUPED = """
def grouped(parameters):
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 2e-2}], lr=1e-2)
"""
_HOOKED_STEP = """
def hooked_step(optimizer):
    def shrink(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.div_(p.norm().clamp(min=1.0))

    optimizer.register_step_post_hook(shrink)
    return optimizer
"""


def _optimizer(source: Source, known: list[str]) -> str:
    made = source.pick(*known)
    for name, code in (("Lion", _LION), ("grouped", _GROUPED), ("hooked_step", _HOOKED_STEP)):
        if made.startswith(name):
            source.define(name, code)
    return f"def optimizer(parameters):\n    return {made}\n\n"
