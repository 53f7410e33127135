"""What random jobs have beside a plain model: odd features of strangers' code, losses and optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from random_parts import Source


@dataclass
class Job:
    """What a family draws: the body of the model's class, a batch, and what its outputs and targets are."""

    init: list[str]
    forward: list[str]
    batch: list[str]  # lines that define x and y from the generator g
    outputs: str  # "tokens", "classes", "numbers" or "own": what losses fit
    arguments: str = "x"
    classes: int = 4
    plain: bool = True  # whether the model gives one tensor
    losses: tuple[str, ...] = ()  # instead of those for these outputs
    wrapper: str = ""  # a function that the loss is given to
    batch_dim: str = "0"


# ---- odd features ----------------------------------------------------------------------------------------------------

# Branches are not taken by a mean, which after a norm is 0 but for rounding.
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
    "branches by data": ([], ["if x.pow(3).mean() > 0.1:", "    x = x * 1.5"]),
    "branches by sample": ([], ["x = torch.where(x.flatten(1)[:, 0].view(-1, *[1] * (x.ndim - 1)) > 0, x * 1.5, x)"]),
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


_UNFIT = {  # words of plans that are refused for them
    "mixes samples": "dp microbatches",
    "reads the batch size": "dp microbatches",
    "counts steps": "microbatches",
    "running mean": "dp cp microbatches",
    "branches by data": "dp cp microbatches zero3",
    "branches by sample": "cp",
    "vmap": "tp recompute",
    "drops whole layers": "pp",
    "max over dim 1": "cp",
    "sum over dim 1": "cp",
    "rolls": "cp",
}


def add_odd_features(source: Source, made: Job) -> None:
    last = made.forward[-1]
    if source.chance(0.1 if source.is_tame else 0.4) and ("(x" in last or "x @" in last):
        name = source.pick(*_ODD)
        init, lines = _ODD[name]
        if name == "gradient reversal":
            source.define("Reverse", _REVERSE)
        source.unfit(_UNFIT.get(name, ""))
        made.init += init
        made.forward[-1:] = [f"# {name}" if lines else f"# ({name})", *lines, last]
    if source.chance(0.12) and made.outputs != "own" and not made.losses:
        _more_outputs(source, made)


def _more_outputs(source: Source, made: Job) -> None:
    """Outputs beside the predictions: regularisers, task weights, penalties; or predictions in a dictionary."""
    value = made.forward[-1].removeprefix("return ")
    made.plain = False
    weight = "sum(p.pow(2).sum() for p in self.parameters() if p.ndim > 1)"
    kinds = [
        "dict",
        "tuple",
        "tasks",
        "weight_view",
        "input_view",
        *([] if source.is_tame else ["weights", "entropy", "penalty", "own_loss"]),
    ]
    kind = source.pick(*kinds, *["input_penalty"] * (made.outputs == "numbers" and not source.is_tame))
    source.unfit({"weights": "tp zero3 pp", "tasks": "pp", "weight_view": "pp", "input_view": "pp cp"}.get(kind, ""))
    source.unfit("dp microbatches cp" if kind in ("entropy", "penalty", "own_loss") else "")
    match kind:
        case "dict":
            made.forward[-1:] = [f"out = {value}", 'return {"logits": out}']
        case "tuple":
            made.forward[-1:] = [f"out = {value}", "return out, out.detach().mean()"]
        case "weights":
            made.forward[-1:] = [f"out = {value}", f"return out, 1e-3 * {weight}"]
        case "tasks":
            made.init.append("self.log_variance = nn.Parameter(torch.zeros(2))")
            made.forward[-1:] = [f"out = {value}", "return out, self.log_variance"]
        case "weight_view":
            made.init.append("self.table = nn.Parameter(torch.randn(4, 3) * 0.1)")
            made.forward[-1:] = [
                f"out = {value}",
                f"return out, {source.pick('self.table', 'self.table[0]', 'self.table.T')}",
            ]
        case "input_view":
            argument = made.arguments.split(",")[0]
            made.forward[:0] = [f"given = {argument}"]
            made.forward[-1:] = [f"out = {value}", "return out, given.flatten(1)[:, :2]"]
        case "entropy":
            made.forward[-1:] = [f"out = {value}", "return out, out.softmax(-1).mean(0).log().sum()"]
        case "penalty":
            made.forward[-1:] = [
                f"out = {value}",
                "inner = torch.autograd.grad(out.sum(), x, create_graph=True)[0] if x.requires_grad else x.detach()",
                "return out, inner.flatten(1).pow(2).sum(1)",
            ]
        case "input_penalty":
            made.forward[:0] = ["x = given = x.detach().requires_grad_()"]
            inner = "torch.autograd.grad(out.sum(), given, create_graph=True)[0]"
            made.forward[-1:] = [f"out = {value}", f"return out, {inner}.flatten(1).pow(2).sum(1)"]
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


def draw_loss(source: Source, made: Job) -> str:
    value = source.pick(*(made.losses or _LOSSES[made.outputs]))
    value = value if made.losses else value.format(classes=made.classes)
    lines = ["def loss(out, y):"]
    last = made.forward[-1]
    if '"logits"' in last and not made.losses:
        lines.append('    out = out["logits"]')
    elif not made.plain:
        lines.append("    out, extra = out")
        match last:
            case "return out, self.log_variance":
                value = f"({value}) * torch.exp(-extra[0]) + extra.sum()"
            case "return out, out.detach().mean()":
                pass
            case _ if "self.table" in last:
                value = f"{value} + 0.1 * extra.pow(2).sum()"
            case _ if "given.flatten" in last:
                value = f"{value} + 0.1 * extra.to(out).mean()"
            case _:
                value = f"{value} + 0.1 * extra.mean()"
    return "\n".join([*lines, f"    return {value}\n\n"])


OPTIMIZERS = [
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
    "three_groups(parameters)",
    "hooked_step(torch.optim.AdamW(parameters, lr=1e-2))",
    "torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)",
]
_RARELY_SHARDED = ("torch.optim.LBFGS", "torch.optim.Adafactor", "hooked_step")
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
_THREE_GROUPS = """
def three_groups(parameters):
    parameters = list(parameters)
    options = ({"lr": 0.0}, {"lr": 0.1, "momentum": 0.9}, {"weight_decay": 0.1})
    groups = [{"params": parameters[n::3], **options[n]} for n in range(min(3, len(parameters)))]
    return torch.optim.SGD(groups, lr=0.05)
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


_OWN_OPTIMIZERS = (
    ("Lion", _LION),
    ("grouped", _GROUPED),
    ("three_groups", _THREE_GROUPS),
    ("hooked_step", _HOOKED_STEP),
)


def draw_optimizer(source: Source, known: list[str]) -> str:
    made = source.pick(*(each for each in known if not source.is_tame or not each.startswith(_RARELY_SHARDED)))
    if made.startswith(_RARELY_SHARDED):
        source.unfit("zero zero3 tp pp ep")
    for name, code in _OWN_OPTIMIZERS:
        if made.startswith(name):
            source.define(name, code)
    return f"def optimizer(parameters):\n    return {made}\n\n"
