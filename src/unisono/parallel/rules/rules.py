"""Rules: which layers tensor parallelism shards, and how.

    {"*.fc1": "column", "*.fc2": "row", "*.attention": "heads:heads", "*.tokens": "vocab", "*.head": "column_gather"}

Patterns match module names as in a shell ("*.fc1" also matches a top-level fc1, "" the model itself); of several that
match the first counts. Values:

    column           nn.Linear (or Conv1D, or a convolution by channels) sharded by columns: its output is this rank's
                     shard
    column:qkv       ... whose output is queries, keys, values one after the other; column:gate_up likewise two, and
                     column:4+1+1 parts of those proportions. Each part is sharded.
    column_gather    sharded by columns, output gathered
    row              nn.Linear or a convolution sharded by rows: its input is this rank's shard, its output full
    row:gate_up      expert weights (experts, inputs, outputs) whose last dim is two parts one after the other
    row_split        sharded by rows; its input is full
    row_sum          sharded by rows between a column and a row layer: its input is a shard, its output full and
                     used by every rank with its own shards
    column_inside    sharded by columns, of an input that row_sum gave: its gradient is summed there
    channels         a parameter, a depthwise convolution or a norm of channels (BatchNorm, GroupNorm): each rank
                     has its channels (dim 0; channels:1 is dim 1), between a column and a row layer
    vocab            nn.Embedding sharded by rows of the vocabulary
    logits           the layer whose output is the model's, sharded by columns: F.cross_entropy in a loss is computed
                     from the shards, everything else is given gathered logits
    vocab_head       the layer that makes logits, sharded by columns; use vocab_parallel_cross_entropy on them
    heads:a,b        an attention module around column and row layers: it sees its own heads, and its numbers a and b
                     (how many heads there are) are divided by tp. Also for nn.MultiheadAttention, as "heads".
                     config.a is a number of an object that the module holds, which gets a copy of its own; =4@-2 is a
                     size of 4 that the module's code passes to reshapes as the last size but one.
    sizes:a,b        likewise, for a module that also uses its input in other ways: only the numbers are divided
    experts          a module around expert weights that are sharded themselves: its output is summed
    mla_kv           an nn.Linear of latent attention whose output is the latent, for a layer sharded by columns, and
                     a key that all heads share, as wide as the attention's qk_rope_head_dim
    summed           parameters that are replicated, but whose gradients are computed in parts (norms of single heads)
    replicate        leave it replicated. Rules of nothing else are exceptions from what the model brings or shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.errors import UsageError
from unisono.parallel.tensor import adapters

Rules = Mapping[str, str]

KINDS = (
    "column", "column_gather", "row", "row_split", "vocab", "vocab_head", "logits", "heads", "sizes", "experts",
    "mla_kv", "summed", "replicate", "row_sum", "column_inside", "channels",
)  # fmt: skip
_PARTS = {"": (1,), "qkv": (1, 1, 1), "gate_up": (1, 1)}

# The values that Hugging Face's plans use, in all their versions.
_PUBLISHED = {
    "colwise": "column",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "packed_colwise": "column:gate_up",
    "rowwise": "row",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "embedding_rowwise": "vocab",
    "packed_rowwise": "row:gate_up",
    "moe_tp_experts": "experts",
    "mla_kv_a_proj": "mla_kv",
    "replicated_with_grad_allreduce": "summed",
    "replicate": "replicate",
}

# Models that publish no plan, by the package and class of the module that the names are relative to.
_KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("torch", "TransformerEncoderLayer"): {"self_attn": "heads", "linear1": "column", "linear2": "row"},
    ("torch", "TransformerDecoderLayer"): {
        "self_attn": "heads",
        "multihead_attn": "heads",
        "linear1": "column",
        "linear2": "row",
    },
    ("transformers", "GPT2Model"): {"wte": "vocab"},
    ("transformers", "GPT2Block"): {
        "attn": "heads:num_heads,split_size",
        "attn.c_attn": "column:qkv",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
    },
    ("transformers", "BertLayer"): {
        "attention.self": "heads:num_attention_heads,all_head_size",
        "attention.self.query": "column",
        "attention.self.key": "column",
        "attention.self.value": "column",
        "attention.output.dense": "row",
        "intermediate.dense": "column",
        "output.dense": "row",
    },
}


@dataclass(frozen=True)
class Style:
    """One rule's value, read."""

    kind: str
    parts: tuple[int, ...] = (1,)
    attributes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, pattern: str, text: str) -> Style:
        kind, _, detail = text.partition(":")
        if kind not in KINDS:
            raise UsageError(f"rule {pattern!r}: {text!r}; expected one of {', '.join(KINDS)}")
        if kind in ("heads", "sizes"):
            return cls(kind, attributes=tuple(filter(None, detail.split(","))))
        if kind == "channels":
            return cls(kind, attributes=_dim(pattern, text, detail))
        if detail and kind not in ("column", "row"):
            raise UsageError(f"rule {pattern!r}: {text!r}; only column, row and heads take more after a colon")
        return cls(kind, parts=_parts(pattern, text, detail))

    @property
    def dim(self) -> int:
        """Of `channels`: which dim they are."""
        return int(self.attributes[0]) if self.attributes else 0

    def __str__(self) -> str:
        detail = ",".join(self.attributes) or "+".join(map(str, self.parts)) * (len(self.parts) > 1)
        return f"{self.kind}:{detail}" if detail else self.kind


def _dim(pattern: str, text: str, detail: str) -> tuple[str, ...]:
    if detail and not detail.isdigit():
        raise UsageError(f"rule {pattern!r}: {text!r}; expected channels or, for another dim, channels:1")
    return (detail,) if detail else ()


def _parts(pattern: str, text: str, detail: str) -> tuple[int, ...]:
    if detail in _PARTS:
        return _PARTS[detail]
    words = detail.split("+")
    if not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"rule {pattern!r}: {text!r}; expected column:qkv, column:gate_up or column:4+1+1")
    return tuple(int(word) for word in words)


def only_exceptions(rules: Rules) -> bool:
    """Whether the rules do no more than to keep modules replicated: the others go by what the model brings."""
    return bool(rules) and all(text == "replicate" for text in rules.values())


Styles = dict[str, Style]  # by the name of a module, or of a parameter


def matched(model: nn.Module, rules: Rules, *, every: bool = True) -> Styles:
    """The style that the rules give each module. With `every`, a rule that matches nothing is an error."""
    read = {pattern: Style.parse(pattern, text) for pattern, text in rules.items()}
    names = [name for name, _ in model.named_modules() if name]
    root = {"": read.pop("")} if "" in read else {}
    styles, used = _matches(names, read)
    # Expert weights and their like are parameters without a layer of their own: what matches no module may be one.
    rest = {pattern: style for pattern, style in read.items() if pattern not in used}
    more, also_used = _matches([name for name, _ in model.named_parameters(remove_duplicate=False)], rest)
    unused = [pattern for pattern in rest if pattern not in also_used]
    if every and unused:
        raise UsageError(
            f"rule {unused[0]!r} matches no module of {type(model).__name__}; "
            f"its modules are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
        )
    return root | styles | more


def _matches(names: list[str], rules: Mapping[str, Style]) -> tuple[Styles, set[str]]:
    styles: Styles = {}
    used = set()
    for name in names:
        for pattern, style in rules.items():
            if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern):
                used.add(pattern)
                styles.setdefault(name, style)
    return styles, used


def published(model: nn.Module) -> dict[str, str] | None:
    """The model's own tensor-parallel plan, where it brings one, as rules. A model with adapters brings that of the
    model that they were added to."""
    inside, base = adapters.base_model(model)
    if inside:
        theirs = published(base)
        return None if theirs is None else {f"{inside}.{pattern}": rule for pattern, rule in theirs.items()}
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
        prefix = getattr(model, "base_model_prefix", "")
        if plan and prefix and hasattr(model, prefix):
            plan = {f"{prefix}.{pattern}": style for pattern, style in plan.items()}
    if not plan or not isinstance(plan, Mapping):
        return None
    for pattern, style in plan.items():
        if style not in _PUBLISHED:
            raise UsageError(
                f"{type(model).__name__}'s own tensor-parallel plan has {style!r} for {pattern}, which unisono does "
                "not know; pass rules"
            )
    return {pattern: _PUBLISHED[style] for pattern, style in plan.items()}


def known(model: nn.Module) -> dict[str, str]:
    """Rules for the layers that unisono knows by their class, where its parts are of that package too: others may have
    the same names and compute something else."""
    rules = {}
    within = {inner for module in model.modules() if adapters.is_other(module) for inner in module.modules()}
    for name, module in model.named_modules():
        if module in within:
            continue
        if type(module) is nn.MultiheadAttention and "forward" not in vars(module) and name:
            rules[name] = "heads"
        package = type(module).__module__.partition(".")[0]
        for theirs in _together(_KNOWN.get((package, type(module).__name__), {}), package):
            if all(_is_of_package(module, relative, package) for relative in theirs):
                rules |= {f"{name}.{relative}".lstrip("."): text for relative, text in theirs.items()}
    return rules


def _together(rules: dict[str, str], package: str) -> list[dict[str, str]]:
    """Rules of which some would be no plan. An attention of torch is one module, and stands apart from the layers
    around it; where a block of another package is not as known, all of it is left to the search."""
    if package != "torch":
        return [rules]
    apart = {name: text for name, text in rules.items() if text == "heads"}
    return [*({name: text} for name, text in apart.items()), {n: t for n, t in rules.items() if n not in apart}]


def _is_of_package(module: nn.Module, relative: str, package: str) -> bool:
    """Whether a module and those on the way to the one of the relative name run the forward of their own class in the
    package; the last may be any layer, as rules for layers are checked by themselves."""
    around = relative.split(".")[:-1]
    modules = [module]
    for child in around:
        if not hasattr(modules[-1], child):
            return False
        modules.append(getattr(modules[-1], child))
    last = getattr(modules[-1], relative.rpartition(".")[2], None)
    last = adapters.without_adapters(last) if isinstance(last, nn.Module) else last
    if isinstance(last, nn.Module) and any(True for _ in last.children()):
        modules.append(last)
    return all(type(each).__module__.partition(".")[0] == package and "forward" not in vars(each) for each in modules)
