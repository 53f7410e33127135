"""The parts that random models are made of: layers in the many spellings in which people write them.

Each function draws one spelling, adds the class that it needs to the source, and returns the expression that makes the
layer. A layer of a sequence model takes and gives (samples, tokens, width).
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, field


@dataclass
class Traits:
    """What is known of a model while it is drawn, for plans that it can be trained under."""

    samples: int = 0
    length: int = 0  # tokens of a sequence that runs through the blocks; 0: there is none
    heads: int = 0
    blocks: int = 0  # of which a pipeline makes stages
    experts: bool = False
    # Words of plans that are refused: dp, tp, pp, cp, sp, ep, zero, zero3, microbatches, recompute (that is, full).
    unfit: set[str] = field(default_factory=set)


class Source:
    """The text of a model while it is being drawn."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self.parts: dict[str, str] = {}  # definitions by name, in the order in which they are needed
        self.traits = Traits()
        self.is_tame = self.chance(0.7)  # without what most plans refuse

    def unfit(self, words: str) -> None:
        """Notes that plans with these words are refused for what was just drawn."""
        self.traits.unfit.update(words.split())

    def pick(self, *options: str) -> str:
        return self._random.choice(options)

    def number(self, *options: int) -> int:
        return self._random.choice(options)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def define(self, name: str, code: str) -> str:
        self.parts.setdefault(name, textwrap.dedent(code).strip("\n"))
        return name


# ---- linear layers, norms, dropout -----------------------------------------------------------------------------------


def linear(source: Source, inputs: str, outputs: str, odd: float = 0.12) -> str:
    """A linear layer; sometimes a subclass, a parametrized or a normed one."""
    plain = f"nn.Linear({inputs}, {outputs})"
    if not source.chance(odd / 4 if source.is_tame else odd):
        return plain if source.chance(0.8) else f"nn.Linear({inputs}, {outputs}, bias=False)"
    match source.pick(
        "scaled", "weight_norm", "old_weight_norm", "spectral", "old_spectral", "lora", "symmetric", "hook"
    ):
        case "scaled":
            source.define(
                "ScaledLinear",
                """
                class ScaledLinear(nn.Linear):
                    def forward(self, x):
                        return F.linear(x, self.weight * 0.5, self.bias)
                """,
            )
            return f"ScaledLinear({inputs}, {outputs})"
        case "weight_norm":
            return f"nn.utils.parametrizations.weight_norm({plain})"
        case "old_weight_norm":
            return f"nn.utils.weight_norm({plain})"
        case "spectral":
            source.unfit("tp microbatches recompute")
            return f"nn.utils.parametrizations.spectral_norm({plain})"
        case "old_spectral":
            source.unfit("tp microbatches recompute")
            return f"nn.utils.spectral_norm({plain})"
        case "lora":
            source.define(
                "LoRA",
                """
                class LoRA(nn.Module):
                    def __init__(self, inputs, outputs, rank=2):
                        super().__init__()
                        self.base = nn.Linear(inputs, outputs)
                        self.base.requires_grad_(False)
                        self.a = nn.Parameter(torch.randn(rank, inputs) * 0.1)
                        self.b = nn.Parameter(torch.zeros(outputs, rank) + 0.01)

                    def forward(self, x):
                        return self.base(x) + x @ self.a.T @ self.b.T
                """,
            )
            return f"LoRA({inputs}, {outputs})"
        case "hook":
            source.define(
                "hooked",
                """
                def hooked(layer):
                    layer.register_forward_hook(lambda module, inputs, output: output * 0.5)
                    return layer
                """,
            )
            return f"hooked({plain})"
        case _:
            source.define(
                "Halved",
                """
                class Halved(nn.Module):
                    def forward(self, weight):
                        return weight - 0.5 * weight.mean(1, keepdim=True)


                def halved(layer):
                    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
                    return layer
                """,
            )
            return f"halved({plain})"


def norm(source: Source, width: str) -> str:
    match source.pick("layer", "layer", "layer", "rms", "hand", "scale", "none", "plain"):
        case "layer":
            return f"nn.LayerNorm({width})"
        case "plain":
            return f"nn.LayerNorm({width}, elementwise_affine=False)"
        case "rms":
            return f"nn.RMSNorm({width})"
        case "hand":
            source.define(
                "Norm",
                """
                class Norm(nn.Module):
                    def __init__(self, width, eps=1e-6):
                        super().__init__()
                        self.weight = nn.Parameter(torch.zeros(width))
                        self.eps = eps

                    def forward(self, x):
                        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
                        return (y * (1 + self.weight.float())).type_as(x)
                """,
            )
            return f"Norm({width})"
        case "scale":
            source.define(
                "ScaleNorm",
                """
                class ScaleNorm(nn.Module):
                    def __init__(self, width):
                        super().__init__()
                        self.scale = nn.Parameter(torch.tensor(float(width) ** 0.5))

                    def forward(self, x):
                        return self.scale * F.normalize(x, dim=-1)
                """,
            )
            return f"ScaleNorm({width})"
        case _:
            return "nn.Identity()"


def dropout(source: Source, likely: float = 0.3) -> str:
    if not source.chance(likely):
        return "nn.Identity()"
    match source.pick("plain", "plain", "plain", "path", "noise", "alpha", "tokens"):
        case "path":
            source.define(
                "DropPath",
                """
                class DropPath(nn.Module):
                    def forward(self, x):
                        if not self.training:
                            return x
                        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8)
                        return x * kept / 0.8
                """,
            )
            return "DropPath()"
        case "noise":
            source.define(
                "Noise",
                """
                class Noise(nn.Module):
                    def forward(self, x):
                        return x + 0.1 * torch.randn_like(x) if self.training else x
                """,
            )
            return "Noise()"
        case "alpha":
            return "nn.AlphaDropout(0.1)"
        case "tokens":
            return "nn.Dropout1d(0.2)"
        case _:
            return "nn.Dropout(0.2)"


def activation(source: Source) -> str:
    return source.pick("F.gelu", "F.relu", "F.silu", "torch.tanh", "F.leaky_relu", "F.softplus", "F.mish")


# ---- attention -------------------------------------------------------------------------------------------------------

_ROTARY = {
    "functions": """
        def rotate(x):
            a, b = x.chunk(2, -1)
            return torch.cat((-b, a), -1)


        def rotary(q, k):
            t, d = q.shape[-2], q.shape[-1]
            angle = torch.outer(torch.arange(t, device=q.device).float(), 100.0 ** (-torch.arange(0, d, 2).float() / d))
            angle = torch.cat((angle, angle), -1).to(q.dtype)
            return q * angle.cos() + rotate(q) * angle.sin(), k * angle.cos() + rotate(k) * angle.sin()
        """,
    "cached": """
        @functools.lru_cache(maxsize=None)
        def table(t, d):
            angle = torch.outer(torch.arange(t).float(), 100.0 ** (-torch.arange(0, d, 2).float() / d))
            return angle.cos(), angle.sin()


        def turn(x, cos, sin):
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


        def rotary(q, k):
            cos, sin = (each.to(q.dtype) for each in table(q.shape[-2], q.shape[-1]))
            return turn(q, cos, sin), turn(k, cos, sin)
        """,
    "complex": """
        def turn(x):
            t, d = x.shape[-2], x.shape[-1]
            angle = torch.outer(torch.arange(t).float(), 100.0 ** (-torch.arange(0, d, 2).float() / d))
            turns = torch.polar(torch.ones_like(angle), angle)
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


        def rotary(q, k):
            return turn(q), turn(k)
        """,
}

_BIAS = {
    "alibi": """
        @functools.lru_cache
        def alibi(heads, t):
            slopes = torch.tensor([2.0 ** (-(h + 1)) for h in range(heads)])
            away = torch.arange(t)[None, :] - torch.arange(t)[:, None]
            return (slopes[:, None, None] * away).tril() + torch.full((t, t), -1e9).triu(1)
        """,
    "window": """
        def window(t, size=3):
            away = torch.arange(t)[:, None] - torch.arange(t)[None, :]
            return (away >= 0) & (away < size)
        """,
}


def attention(source: Source, width: int, heads: int) -> str:
    """Self-attention in one of the spellings that people use."""
    spelling = source.pick("fused", "fused", "separate", "separate", "grouped", "torch", "einsum", "hand", "linear")
    if spelling in ("torch", "einsum", "hand", "linear"):
        source.unfit("cp sp" if spelling == "torch" else "cp")
    if spelling == "torch":
        source.define(
            "TorchAttention",
            """
            class TorchAttention(nn.Module):
                def __init__(self, width, heads, dropout=0.0):
                    super().__init__()
                    self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)

                def forward(self, x):
                    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                    return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            """,
        )
        return f"TorchAttention({width}, {heads}{', 0.1' if source.chance(0.3) else ''})"
    if spelling == "linear":
        source.define(
            "LinearAttention",
            """
            class LinearAttention(nn.Module):
                def __init__(self, width, heads):
                    super().__init__()
                    self.heads = heads
                    self.qkv = nn.Linear(width, 3 * width)
                    self.out = nn.Linear(width, width)

                def forward(self, x):
                    b, t, w = x.shape
                    q, k, v = (y.view(b, t, self.heads, -1) for y in self.qkv(x).chunk(3, -1))
                    q, k = F.elu(q) + 1, F.elu(k) + 1
                    kv = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
                    total = torch.einsum("bthd,bthd->bth", q, k.cumsum(1))
                    y = torch.einsum("bthd,bthde->bthe", q, kv) / total[..., None]
                    return self.out(y.reshape(b, t, w))
            """,
        )
        return f"LinearAttention({width}, {heads})"
    if spelling == "einsum":
        source.define(
            "EinsumAttention",
            """
            class EinsumAttention(nn.Module):
                def __init__(self, width, heads):
                    super().__init__()
                    d = width // heads
                    self.q = nn.Parameter(torch.randn(width, heads, d) / width**0.5)
                    self.k = nn.Parameter(torch.randn(width, heads, d) / width**0.5)
                    self.v = nn.Parameter(torch.randn(width, heads, d) / width**0.5)
                    self.o = nn.Parameter(torch.randn(heads, d, width) / width**0.5)

                def forward(self, x):
                    q, k, v = (torch.einsum("btw,whd->bthd", x, p) for p in (self.q, self.k, self.v))
                    score = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
                    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
                    weight = score.masked_fill(mask, float("-inf")).softmax(-1)
                    return torch.einsum("bhts,bshd,hdw->btw", weight, v, self.o)
            """,
        )
        return f"EinsumAttention({width}, {heads})"
    return _projected_attention(source, spelling, width, heads)


def _projected_attention(source: Source, spelling: str, width: int, heads: int) -> str:
    """Linear projections to heads, positions, a product with softmax, and a projection back."""
    name = f"Attention{len(source.parts)}"
    groups = source.number(1, 2) if spelling == "grouped" else heads
    positions = source.pick("", "", "rotary", "rotary", "bias") if width // heads % 2 == 0 else ""
    if positions:
        source.unfit("cp")  # they are counted inside the blocks
    if groups == 1:
        source.unfit("tp")
    if positions == "rotary":
        source.define("rotary", _ROTARY[source.pick(*_ROTARY)])
    bias = source.pick(*_BIAS, "relative") if positions == "bias" else ""
    if bias in _BIAS:
        source.define(bias, _BIAS[bias])
    by_hand = spelling == "hand" or (bias == "relative" and source.chance(0.5))
    drop = source.chance(0.2)
    lines = [f"self.heads, self.groups, self.width = {heads}, {groups}, {width // heads}"]
    inner, shared = str(width), str(groups * (width // heads))
    if spelling == "fused":
        lines.append(f"self.{source.pick('qkv', 'c_attn', 'in_proj')} = nn.Linear({width}, 3 * {width})")
    else:
        names = source.pick("q_proj k_proj v_proj", "wq wk wv", "query key value").split()
        bias_word = source.pick("", ", bias=False")
        for each, size in zip(names, (inner, shared, shared), strict=True):
            lines.append(f"self.{each} = nn.Linear({width}, {size}{bias_word})")
    out = source.pick("o_proj", "out", "proj", "c_proj", "dense")
    lines.append(f"self.{out} = {linear(source, inner, inner, odd=0.05)}")
    if bias == "relative":
        lines.append("self.relative = nn.Embedding(31, self.heads)")
    if spelling == "hand" and source.chance(0.5):
        lines.append('self.register_buffer("mask", torch.ones(1, 1, 32, 32).tril().bool(), persistent=False)')
    normed = source.chance(0.15)
    if normed:
        lines += ["self.q_norm = nn.LayerNorm(self.width)", "self.k_norm = nn.LayerNorm(self.width)"]
    lines.append(f"self.dropout = nn.Dropout({0.1 if drop else 0.0})")

    body = ["b, t, w = x.shape"]
    if spelling == "fused":
        projection = lines[1].split(" = ")[0]
        body.append(
            source.pick(
                f"q, k, v = {projection}(x).view(b, t, 3, self.heads, self.width).unbind(2)",
                f"q, k, v = (y.view(b, t, self.heads, -1) for y in {projection}(x).split(w, dim=-1))",
                f"q, k, v = (y.view(b, t, -1, self.width) for y in {projection}(x).chunk(3, dim=-1))",
                f"q, k, v = {projection}(x).view(b, t, self.heads, 3 * self.width).chunk(3, dim=-1)",
            )
        )
    else:
        shape = source.pick(
            "b, t, -1, self.width", "b, t, {}, self.width", "b, t, {}, -1", "*x.shape[:2], {}, self.width"
        )
        for short, each, count in zip("qkv", names, ("self.heads", "self.groups", "self.groups"), strict=True):
            body.append(f"{short} = self.{each}(x).{source.pick('view', 'reshape')}({shape.format(count)})")
    body.append("q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)")
    if normed:
        body.append("q, k = self.q_norm(q), self.k_norm(k)")
    if positions == "rotary":
        body.append("q, k = rotary(q, k)")
    if spelling == "grouped":
        repeat = "k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))"
        expand = (
            "k, v = (y[:, :, None].expand(b, self.groups, self.heads // self.groups, t, self.width)"
            ".reshape(b, self.heads, t, self.width) for y in (k, v))"
        )
        body.append(source.pick(repeat, expand))
    mask = _mask(source, bias, body, has_buffer=any("register_buffer" in line for line in lines))
    if by_hand:
        body.append("score = (q @ k.transpose(-2, -1)) * self.width**-0.5")
        if bias in ("alibi", "relative"):
            body.append(f"score = score + {mask}")
        else:
            low = source.pick("-torch.inf", "-1e9", "torch.finfo(x.dtype).min")
            body.append(f"score = score.masked_fill(~{mask}, {low})")
        body.append("y = self.dropout(score.softmax(-1)) @ v")
    elif bias:
        body.append(f"y = F.scaled_dot_product_attention(q, k, v, attn_mask={mask})")
    else:
        dropped = ", dropout_p=0.1 if self.training else 0.0" if drop else ""
        body.append(f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{dropped})")
    merge = source.pick("y.transpose(1, 2).reshape(b, t, -1)", "y.transpose(1, 2).contiguous().view(b, t, w)")
    body.append(f"return self.{out}({merge})")
    source.define(name, module(name, lines, body))
    return f"{name}()"


def _mask(source: Source, bias: str, body: list[str], has_buffer: bool) -> str:
    if bias == "alibi":
        return "alibi(self.heads, t).to(x)"
    if bias == "window":
        return "window(t)"
    if bias == "relative":
        body.append("away = torch.arange(t, device=x.device)[:, None] - torch.arange(t, device=x.device)[None, :] + 15")
        return "self.relative(away).permute(2, 0, 1)[None]"
    return "self.mask[:, :, :t, :t]" if has_buffer else "torch.ones(t, t, dtype=torch.bool, device=x.device).tril()"


def module(name: str, init: list[str], forward: list[str], arguments: str = "x") -> str:
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init]
    lines += ["", f"    def forward(self, {arguments}):"] + [f"        {line}" for line in forward]
    return "\n".join(lines)


# ---- feed-forward layers and blocks ----------------------------------------------------------------------------------


def feed_forward(source: Source, width: int) -> str:
    name = f"MLP{len(source.parts)}"
    hidden = source.number(2, 3, 4) * width // source.number(1, 2)
    act = activation(source)
    w, h = str(width), str(hidden)
    first, second = source.pick("fc1 fc2", "up down", "c_fc c_proj", "w1 w2", "linear1 linear2").split()
    match source.pick(
        "plain", "plain", "sequential", "gated", "packed", "interleaved", "parameters", "in_place", "tied"
    ):
        case "sequential":
            return f"nn.Sequential({linear(source, w, h)}, nn.GELU(), {dropout(source)}, {linear(source, h, w)})"
        case "gated":
            init = [
                f"self.gate = {linear(source, w, h)}",
                f"self.up = nn.Linear({w}, {h})",
                f"self.down = nn.Linear({h}, {w})",
            ]
            body = [f"return self.down({act}(self.gate(x)) * self.up(x))"]
        case "packed":
            init = [
                f"self.gate_up = nn.Linear({w}, 2 * {h}, bias=False)",
                f"self.down = nn.Linear({h}, {w}, bias=False)",
            ]
            body = ["gate, up = self.gate_up(x).chunk(2, dim=-1)", f"return self.down({act}(gate) * up)"]
        case "interleaved":
            init = [f"self.both = nn.Linear({w}, 2 * {h})", f"self.down = nn.Linear({h}, {w})"]
            body = ["y = self.both(x)", f"return self.down({act}(y[..., ::2]) * y[..., 1::2])"]
        case "parameters":
            init = [
                f"self.a = nn.Parameter(torch.randn({w}, {h}) / {w}**0.5)",
                f"self.b = nn.Parameter(torch.randn({h}, {w}) / {h}**0.5)",
                f"self.c = nn.Parameter(torch.zeros({w}))",
            ]
            body = [f"return torch.matmul({act}(x @ self.a), self.b) + self.c"]
        case "in_place":
            init = [
                f"self.{first} = nn.Linear({w}, {h})",
                f"self.{second} = nn.Linear({h}, {w})",
                f"self.drop = {dropout(source)}",
            ]
            body = [f"h = self.{first}(x)", "h *= 0.5", "h = h.relu_()", f"return self.drop(self.{second}(h))"]
        case "tied":
            init = [f"self.{first} = nn.Linear({w}, {h})"]
            body = [f"return F.linear({act}(self.{first}(x)), self.{first}.weight.t())"]
        case _:
            init = [
                f"self.{first} = {linear(source, w, h)}",
                f"self.{second} = {linear(source, h, w)}",
                f"self.drop = {dropout(source)}",
            ]
            body = [f"return self.drop(self.{second}({act}(self.{first}(x))))"]
    source.define(name, module(name, init, body))
    return f"{name}()"


def block(source: Source, width: int, heads: int, mixer: str | None = None, has_experts: bool = False) -> str:
    """A residual block of attention (or another mixer of tokens) and a feed-forward layer."""
    name = f"Block{len(source.parts)}"
    mixer = mixer or attention(source, width, heads)
    source.traits.heads = heads
    mlp_layer = moe(source, width) if has_experts else feed_forward(source, width)
    attn, mlp = source.pick("attn mlp", "attention feed_forward", "self_attn ffn", "mixer mlp").split()
    init = [
        f"self.{attn} = {mixer}",
        f"self.{mlp} = {mlp_layer}",
        f"self.norm1 = {norm(source, str(width))}",
        f"self.norm2 = {norm(source, str(width))}",
        f"self.drop = {dropout(source, 0.2)}",
    ]
    match source.pick("pre", "pre", "pre", "post", "parallel", "scaled", "sandwich", "in_place", "checkpoint"):
        case "post":
            body = [f"x = self.norm1(x + self.drop(self.{attn}(x)))", f"return self.norm2(x + self.{mlp}(x))"]
        case "parallel":
            body = ["h = self.norm1(x)", f"return x + self.drop(self.{attn}(h) + self.{mlp}(h))"]
        case "scaled":
            init.append(f"self.gamma = nn.Parameter(torch.full(({width},), 0.1))")
            body = [
                f"x = x + self.gamma * self.{attn}(self.norm1(x))",
                f"return x + self.drop(self.gamma * self.{mlp}(self.norm2(x)))",
            ]
        case "sandwich":
            body = [f"x = x + self.norm1(self.{attn}(x))", f"return x + self.norm2(self.{mlp}(x))"]
        case "in_place":
            body = [f"x = x + self.{attn}(self.norm1(x))", f"h = self.{mlp}(self.norm2(x))", "h += x", "return h"]
        case "checkpoint":
            source.define("checkpoint", "from torch.utils.checkpoint import checkpoint")
            body = [
                f"x = x + self.{attn}(self.norm1(x))",
                f"return x + checkpoint(self.{mlp}, self.norm2(x), use_reentrant=False)",
            ]
        case _:
            body = [
                f"x = x + self.drop(self.{attn}(self.norm1(x)))",
                f"return x + self.drop(self.{mlp}(self.norm2(x)))",
            ]
    source.define(name, module(name, init, body))
    return f"{name}()"


def moe(source: Source, width: int) -> str:
    options = source.pick("", ", gated=True", ", aux_weight=0.01", ", capacity_factor=1.0", ", bias=False")
    source.traits.experts = True
    if "aux" in options or "capacity" in options:
        source.unfit("microbatches pp sp cp" if "capacity" in options else "microbatches pp sp")
    if source.chance(0.35):
        return stacked_experts(source, width)
    return f"uni.nn.MoE({width}, {2 * width}, experts=4, top_k={source.number(1, 2)}{options})"


def stacked_experts(source: Source, width: int) -> str:
    """A router and experts whose weights are stacked, as transformers writes them."""
    source.unfit("tp sp")
    source.define(
        "Experts",
        """
        class Experts(nn.Module):
            _is_expert_parallel = False

            def __init__(self, width, hidden, experts):
                super().__init__()
                self.num_experts = experts
                self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
                self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

            def forward(self, hidden_states, top_k_index, top_k_weights):
                out = torch.zeros_like(hidden_states)
                visited = F.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
                for expert in range(self.num_experts):
                    choice, token = torch.where(visited[expert])
                    gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
                    made = F.linear(F.silu(gate) * up, self.down_proj[expert])
                    out.index_add_(0, token, (made * top_k_weights[token, choice, None]).to(out.dtype))
                return out
        """,
    )
    source.define(
        "SparseMLP",
        """
        class SparseMLP(nn.Module):
            def __init__(self, width, hidden, experts, top_k):
                super().__init__()
                self.top_k = top_k
                self.gate = nn.Linear(width, experts, bias=False)
                self.experts = Experts(width, hidden, experts)

            def forward(self, x):
                tokens = x.reshape(-1, x.shape[-1])
                weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, dim=-1)
                weights = weights / weights.sum(-1, keepdim=True)
                return self.experts(tokens, chosen, weights).view_as(x)
        """,
    )
    return f"SparseMLP({width}, {2 * width}, 4, {source.number(1, 2)})"


# ---- embeddings ------------------------------------------------------------------------------------------------------


def embedding(source: Source, vocabulary: int, width: int) -> str:
    kinds = ["plain", "plain", "plain", "plain", "scaled", "padding", "small"]
    kind = source.pick(*kinds, *([] if source.is_tame else ["max_norm", "sparse", "by_freq"]))
    match kind:
        case "scaled":
            source.define(
                "ScaledEmbedding",
                """
                class ScaledEmbedding(nn.Embedding):
                    def __init__(self, *sizes, scale=3.0):
                        super().__init__(*sizes)
                        self.register_buffer("scale", torch.tensor(scale), persistent=False)

                    def forward(self, tokens):
                        return super().forward(tokens) * self.scale
                """,
            )
            return f"ScaledEmbedding({vocabulary}, {width})"
        case "padding":
            return f"nn.Embedding({vocabulary}, {width}, padding_idx=0)"
        case "max_norm":
            source.unfit("dp cp microbatches")
            return f"nn.Embedding({vocabulary}, {width}, max_norm=1.0)"
        case "sparse":
            source.unfit("dp cp zero")
            return f"nn.Embedding({vocabulary}, {width}, sparse=True)"
        case "by_freq":
            source.unfit("dp cp tp microbatches")
            return f"nn.Embedding({vocabulary}, {width}, scale_grad_by_freq=True)"
        case "small":
            return f"nn.Sequential(nn.Embedding({vocabulary}, 4), nn.Linear(4, {width}, bias=False))"
        case _:
            return f"nn.Embedding({vocabulary}, {width})"
