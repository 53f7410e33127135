"""Tensor-parallel rules inferred from a model's data flow, whatever its modules are called, and proved.

Where the outputs of some linear layers reach other linear layers and nothing else, the first can be sharded by columns
and the second by rows, if what is between treats shards of the features alike: an activation, a product with a gate,
attention head by head. Such a set is a stretch:

    q, k, v -> o        up, gate -> down        convolution -> convolution        (see dataflow)

A layer inside a stretch that takes its features and gives some to it, as Mamba's projection to B, C and time steps, is
sharded by rows, its output summed and used on (row_sum), or by columns (column_inside). Parameters that meet only the
stretch's tensors, such as Mamba's A and D, a depthwise convolution, a BatchNorm or a scale for each head, are sharded
by channels.

Whether a stretch can be sharded is not guessed from the ops in between: the module that contains it is sharded between
simulated ranks and must give the outputs and gradients of the full one (see trial), on the inputs that it was called
with. A module that counts its heads must count fewer; which numbers these are is found by trial too. Modules that are
built alike are proved once.

What is left: embeddings of tokens are sharded by rows, the layer whose output is the model's by columns, and large
layers in between by columns with their output gathered.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.meta.meta_tensors import realised_copy
from unisono.parallel.rules.dataflow import INPUT, TOKENS, Dataflow, Parts, as_float64, is_layer, recorded, synthetic
from unisono.parallel.rules.rules import Style
from unisono.parallel.rules.trial import Shard, Trial, simulated_ranks
from unisono.parallel.tensor import adapters, vocabulary
from unisono.parallel.tensor.convolution import is_channelwise, is_convolution
from unisono.parallel.tensor.custom_layers import is_plain, require_sharding
from unisono.parallel.tensor.linear import features, is_linear
from unisono.parallel.tensor.user_hooks import has_hooks

_INNER = 3  # layers inside a stretch
_LARGE = 0.02  # of a model's parameters: a layer worth gathering for
_EMBEDDING = 0.01  # of a model's parameters: an embedding worth sharding
_NUMBERS = 6  # numbers of a module of which all subsets are tried
_ATTEMPTS = 200  # ways to shard one module
_PROVABLE = 10**9  # parameters of a module that is tried

Rules = dict[str, str]


@dataclass(frozen=True)
class Stretch:
    """Layers whose outputs reach only `rows`, which nothing else reaches."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inner: tuple[str, ...] = ()  # layers that it both reaches and passes

    @property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        return self.columns, self.rows, self.inner

    @property
    def layers(self) -> tuple[str, ...]:
        return self.columns + self.inner + self.rows

    def conflicts(self, other: Stretch) -> bool:
        return bool({*self.layers} & {*other.layers})


@dataclass
class Inference:
    """Rules by module name, and why layers are left replicated."""

    rules: Rules
    flow: Dataflow
    reasons: dict[str, str] = field(default_factory=dict)


def inferred(model: nn.Module, ranks: int, inputs: Any, shard: Shard, given: Rules | None = None) -> Inference | None:
    """Rules for layers for which none are given; None where the model cannot be run to see its data flow.

    shard(module, rules, comm) shards a module between the ranks of a communicator.
    """
    with no_side_effects(model):
        flow = recorded(model, inputs)
        return None if flow is None else _Inferring(model, ranks, flow, shard, given or {}).inference()


class _Inferring:
    def __init__(self, model: nn.Module, ranks: int, flow: Dataflow, shard: Shard, given: Rules) -> None:
        self._model, self._ranks, self._flow, self._shard = model, ranks, flow, shard
        inner = adapters.inner_modules(model)
        self._modules = {name: module for name, module in model.named_modules() if module not in inner}
        self._parameters = dict(model.named_parameters())
        self._rules: Rules = dict(given)
        self._given = given
        self._reasons: dict[str, str] = {}
        self._proved: dict[Any, Rules | None] = {}  # by what modules that are built alike have in common
        names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self._owned = {
            name
            for name, module in self._modules.items()
            if is_layer(module)
            and names[id(module.weight)] == 1
            and not any(f"{name}.{own}" in flow.used_elsewhere for own, _ in module.named_parameters())
        }

    def inference(self) -> Inference:
        self._shard_stretches()
        self._shard_ends()
        return Inference(self._rules, self._flow, self._reasons)

    # ---- stretches ---------------------------------------------------------------------------------------------------

    def _shard_stretches(self) -> None:
        """Small ones first: the residual stream, which reaches nearly every layer, comes last and conflicts by then."""
        left = sorted(self._stretches(), key=lambda each: len(each.layers))
        accepted: list[Stretch] = []
        while left:
            chosen: list[Stretch] = []
            for each in left:
                if not any(each.conflicts(other) for other in (*accepted, *chosen)):
                    chosen.append(each)
            if not chosen:
                return
            left = [each for each in left if each not in chosen]
            by_host: dict[str, list[Stretch]] = defaultdict(list)
            for each in chosen:
                by_host[self._host(each)].append(each)
            for host, stretches in by_host.items():
                accepted += self._shard_in(host, stretches)

    def _stretches(self) -> Iterator[Stretch]:
        """Connected sets of layers' outputs and the layers that they reach."""
        groups = _Groups()
        layers = {*self._flow.sources}
        for layer, sources in self._flow.sources.items():
            for source in sources & layers:
                groups.join(("out", source), ("in", layer))
        for source in self._flow.outputs & layers:
            groups.join(("out", source), ("in", ""))
        for group in groups.all():
            columns = [name for side, name in group if side == "out"]
            rows = [name for side, name in group if side == "in"]
            order = list(self._flow.sources)
            inner = {*columns} & {*rows}
            sides = ({*columns} - inner, {*rows} - inner, inner)
            if all(sides[:2]) and len(inner) <= _INNER and all(self._can_shard(name) for name in (*columns, *rows)):
                stretch = Stretch(*(tuple(sorted(names, key=order.index)) for names in sides))
                if self._divides(stretch) and all(is_plain(self._modules[name]) for name in inner):
                    yield stretch

    def _can_shard(self, name: str) -> bool:
        module = self._modules.get(name)
        if name not in self._owned or module is None or name in self._given:
            return False
        return is_linear(module) or (is_convolution(module) and not has_hooks(module))

    def _divides(self, stretch: Stretch) -> bool:
        outputs = [features(self._modules[name])[1] for name in stretch.columns]
        inputs = [features(self._modules[name])[0] for name in stretch.rows]
        return all(length % self._ranks == 0 for length in (*outputs, *inputs))

    def _host(self, stretch: Stretch) -> str:
        """The smallest module that contains the stretch and is called."""
        return self._called(stretch.layers)

    def _called(self, names: Sequence[str]) -> str:
        """The smallest module that contains these layers, and is called."""
        words = [name.split(".")[:-1] for name in names]
        shared = [same[0] for same in itertools.takewhile(lambda each: len({*each}) == 1, zip(*words, strict=False))]
        while shared and ".".join(shared) not in self._flow.calls:
            shared.pop()
        return ".".join(shared)

    def _shard_in(self, host: str, stretches: list[Stretch]) -> list[Stretch]:
        """Add rules for those of the stretches that can be sharded, together if possible; gives them."""
        for some in ([stretches], [[each] for each in stretches])[: 2 if len(stretches) > 1 else 1]:
            found = [each for group in some if self._shard_group(host, group) for each in group]
            if found:
                return found
        for each in stretches:
            self._reasons |= dict.fromkeys(
                each.layers, f"{type(self._modules[host]).__name__} does not work on a part of the features or heads"
            )
        return []

    def _shard_group(self, host: str, stretches: list[Stretch]) -> bool:
        relative = [
            Stretch(*(tuple(_relative(host, name) for name in names) for names in each.sides)) for each in stretches
        ]
        key = (form(self._modules[host]), tuple(relative))
        if key not in self._proved:
            self._proved[key] = self._proof(host, relative)
        rules = self._proved[key]
        if rules is not None:
            self._rules |= {f"{host}.{name}".strip("."): text for name, text in rules.items()}
        return rules is not None

    def _proof(self, host: str, stretches: list[Stretch]) -> Rules | None:
        """Rules relative to the host under which simulated ranks give what it gives."""
        module = self._modules[host]
        if sum(map(torch.numel, module.parameters())) > _PROVABLE:
            return None
        real = realised_copy(module)
        if real is None:
            return None
        real = real.double().cpu().eval()
        given = synthetic(self._flow.calls[host], torch.Generator().manual_seed(0))
        used = self._flow.used.get(host)
        trial = Trial(real, simulated_ranks(self._ranks), tree_map(as_float64, given), self._shard, used)
        for rules in itertools.islice(self._attempts(host, module, stretches), _ATTEMPTS):
            sums = trial.needed_sums(rules)
            if sums is None:
                continue
            proved = rules | dict.fromkeys(sums, "summed")
            if (not sums or trial.needed_sums(proved) == []) and trial.holds_with_other_values(proved):
                return proved
        return None

    # ---- ways to shard a module --------------------------------------------------------------------------------------

    def _attempts(self, host: str, module: nn.Module, stretches: list[Stretch]) -> Iterator[Rules]:
        columns = [name for each in stretches for name in each.columns]
        rows = [name for each in stretches for name in each.rows]
        within = [name for each in stretches for name in each.inner]
        full = frozenset(f"{host}.{name}".strip(".") for name in (*columns, *within))
        sizes = [size for size in self._flow.sizes if size.origins & full and not size.origins & self._others(full)]
        layers = [self._layer_rules(host, name) for name in columns]
        owners = [""] if module is not self._model else []
        inner = _relative(host, self._called([f"{host}.{name}".strip(".") for name in columns]))
        owners = [inner, *owners] if inner else owners
        owners = [] if within else owners
        channels = self._channel_rules(host, full, [*columns, *rows, *within], sizes)
        ways = [
            dict(zip(within, kinds, strict=True)) | chosen
            for chosen in ([{}, channels] if channels else [{}])
            for kinds in itertools.product(*(self._inner_rules(host, name) for name in within))
        ]
        for owner, divided in self._divisions(module, owners, sizes, [*columns, *rows]):
            for texts, way in itertools.product(itertools.product(*layers), ways):
                rules = {**dict(zip(columns, texts, strict=True)), **dict.fromkeys(rows, "row"), **way}
                for inside, attributes in divided.items():
                    rules[inside] = f"sizes:{','.join(attributes)}"
                if owner is not None:
                    rules[owner] = f"heads:{','.join(divided.get(owner, []))}".removesuffix(":")
                yield {name: rules[name] for name in sorted(rules)}

    def _inner_rules(self, host: str, name: str) -> list[str]:
        inputs, outputs = features(self._modules[f"{host}.{name}".strip(".")])
        kinds = (("row_sum", inputs), ("column_inside", outputs))
        return [kind for kind, length in kinds if length % self._ranks == 0]

    def _channel_rules(self, host: str, stretch: frozenset[str], layers: list[str], sizes: list[Any]) -> Rules:
        """Rules for parameters that meet nothing but the stretch's tensors, and have a dim as long as they."""
        lengths = {size.value for size in sizes if size.value > 1}
        for name in layers:
            full = f"{host}.{name}".strip(".")
            inputs, outputs = features(self._modules[full])
            lengths |= {inputs} if full not in stretch else {outputs}
            for parts in self._flow.parts.get(full, []) if full in stretch else ():
                lengths |= {outputs // sum(parts) * part for part in parts}
        rules: Rules = {}
        for name, others in self._flow.met.items():
            layer, _, _ = name.rpartition(".")
            if not others & stretch or others - stretch - {INPUT, TOKENS} or layer in stretch:
                continue
            parameter, relative = self._parameters.get(name), _relative(host, name)
            if parameter is None or not f"{name}.".startswith(f"{host}." if host else ""):
                continue
            dims = [dim for dim, size in enumerate(parameter.shape) if size in lengths and size % self._ranks == 0]
            if dims and is_channelwise(self._modules[layer]):
                rules[_relative(host, layer)] = "channels"
            elif dims:
                rules[relative] = f"channels:{dims[0]}" if dims[0] else "channels"
        return rules

    def _others(self, names: frozenset[str]) -> frozenset[str]:
        return frozenset(self._flow.sources) - names

    def _layer_rules(self, host: str, name: str) -> list[str]:
        """A layer whose output is split into parts is sharded part by part, if at all."""
        full = f"{host}.{name}".strip(".")
        length = features(self._modules[full])[1]
        seen = [parts for parts in self._flow.parts.get(full, []) if self._are_divisible(length, parts)]
        return [*(f"column:{'+'.join(map(str, parts))}" for parts in seen), "column"]

    def _are_divisible(self, length: int, parts: Parts) -> bool:
        unit, rest = divmod(length, sum(parts))
        return not rest and all(unit * part % self._ranks == 0 for part in parts)

    def _divisions(
        self, module: nn.Module, owners: list[str], sizes: list[Any], layers: list[str]
    ) -> Iterator[tuple[str | None, dict[str, list[str]]]]:
        """Which numbers to divide: none, some of its attributes, or sizes wherever they come from. One of the owners
        may see its input in this rank's width, which a module with a norm or residual of its own cannot."""
        if not sizes:
            yield None, {}
            return
        lengths = {size.value for size in sizes}
        lengths |= {length for name in layers for length in features(module.get_submodule(name))}
        numbers = _numbers(module, {length for length in lengths if self._can_divide(length)})
        subsets = [some for count in range(len(numbers)) for some in itertools.combinations(numbers, count)]
        for some in (tuple(numbers), *subsets):
            for owner in (*owners, None):
                divided: dict[str, list[str]] = defaultdict(list)
                for inside, attribute in some:
                    divided[inside].append(attribute)
                yield owner, dict(divided)
        literal = list(dict.fromkeys(f"={size.value}@{size.index}" for size in sizes if self._can_divide(size.value)))
        for owner in (*owners, None) if literal else ():
            yield owner, {owner or "": literal}

    def _can_divide(self, length: int) -> bool:
        return length > 0 and length % self._ranks == 0

    # ---- embeddings, the head and the rest ---------------------------------------------------------------------------

    def _shard_ends(self) -> None:
        total = sum(map(torch.numel, self._model.parameters())) or 1
        tied = self._shard_tied()
        for name, module in self._modules.items():
            if not is_layer(module) or name in self._rules or name in tied:
                continue
            share = sum(map(torch.numel, module.parameters())) / total
            if isinstance(module, nn.Embedding):
                self._shard_embedding(name, module, share)
            elif name not in self._owned:
                self._reasons[name] = "its weight is used outside its own forward"
            elif name in self._flow.sources and is_linear(module):
                self._shard_linear(name, module, share)

    def _shard_linear(self, name: str, module: nn.Module, share: float) -> None:
        inputs, outputs = features(module)
        if self._is_head(name) and outputs >= self._ranks and share >= _LARGE:
            self._shard_alone(name, module, "logits")
        elif share >= _LARGE and outputs % self._ranks == 0:
            self._shard_alone(name, module, "column_gather")
        elif share >= _LARGE and inputs % self._ranks == 0:
            self._shard_alone(name, module, "row_split")

    def _shard_alone(self, name: str, module: nn.Module, rule: str) -> None:
        """Give one layer a rule, unless what a user has made of it (a forward of its own) does not work on shards."""
        try:
            if isinstance(module, nn.Embedding):
                vocabulary.require_plain(module)
            if not is_plain(module):
                require_sharding(name, module, Style(rule), self._ranks)
            self._rules[name] = rule
        except UsageError as error:
            self._reasons[name] = str(error)

    def _is_head(self, name: str) -> bool:
        """Whether its output reaches the model's output and no other layer."""
        return name in self._flow.outputs and not any(name in sources for sources in self._flow.sources.values())

    def _shard_embedding(self, name: str, module: nn.Embedding, share: float) -> None:
        if TOKENS not in self._flow.sources.get(name, ()):
            self._reasons[name] = "nn.Embedding whose rows are positions"
        elif name not in self._owned:
            self._reasons[name] = "nn.Embedding whose weight is used outside its own forward"
        elif share < _EMBEDDING:
            self._reasons[name] = "nn.Embedding that is small"
        else:
            self._shard_alone(name, module, "vocab")

    def _shard_tied(self) -> set[str]:
        """An embedding and the heads that share its weight, where nothing else uses it; names that are tied."""
        sharing: dict[int, list[str]] = defaultdict(list)
        for name, module in self._modules.items():
            if is_layer(module):
                sharing[id(module.weight)].append(name)
        tied: set[str] = set()
        for names in sharing.values():
            if len(names) < 2:
                continue
            tied |= {*names}
            modules = [self._modules[name] for name in names]
            is_used_elsewhere = any(f"{name}.weight" in self._flow.used_elsewhere for name in names)
            embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
            others = [name for name, module in zip(names, modules, strict=True) if module not in embeddings]
            is_given_otherwise = any(self._rules.get(name, "vocab") != "vocab" for name in names)
            if not embeddings or is_used_elsewhere or is_given_otherwise:
                reason = "its weight is shared with another layer" + " and used outside" * is_used_elsewhere
                self._reasons |= dict.fromkeys(names, reason)
                continue
            self._rules |= {name: "vocab" for name in names if name not in others}
            self._rules |= {name: "logits" if self._is_head(name) else "column_gather" for name in others}
        return tied


class _Groups:
    """Sets of things that are joined directly or by others."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def join(self, one: Any, other: Any) -> None:
        self._parent[self._root(one)] = self._root(other)

    def _root(self, one: Any) -> Any:
        while self._parent.setdefault(one, one) != one:
            one = self._parent[one]
        return one

    def all(self) -> list[list[Any]]:
        found: dict[Any, list[Any]] = defaultdict(list)
        for one in list(self._parent):
            found[self._root(one)].append(one)
        return list(found.values())


def _relative(host: str, name: str) -> str:
    return name[len(host) :].strip(".")


def form(module: nn.Module) -> Any:
    """What modules that are built alike have in common."""
    shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    classes = tuple((name, type(each), is_linear(each)) for name, each in module.named_modules())
    settings = tuple((name, *_settings(each)) for name, each in module.named_modules())
    return shapes, classes, settings


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes by which a module may compute something else than another of its class: numbers, flags, functions."""
    found: list[tuple[str, Any]] = []
    for key, value in vars(module).items():
        if key in ("layer_idx", "training") or isinstance(value, nn.Module | torch.Tensor):
            continue
        if value is None or isinstance(value, int | float | str | FunctionType | BuiltinFunctionType):
            found.append((key, value))
        elif isinstance(value, tuple | list) and all(isinstance(each, int | float | str) for each in value):
            found.append((key, tuple(value)))
    return found


# ---- numbers that a module counts by ---------------------------------------------------------------------------------


def _numbers(module: nn.Module, lengths: set[int]) -> list[tuple[str, str]]:
    """Attributes with one of these values, as (name of the module in it, attribute): those its code reads, if it can be
    seen which; with too many of them, those with most divisors in common come first."""
    found: list[tuple[str, str]] = []
    for name, inner in module.named_modules():
        if is_layer(inner):
            continue
        read = _names_read(type(inner))
        for attribute, value in _attributes(inner):
            if value in lengths and attribute.rpartition(".")[2] in read:
                found.append((name, attribute))
    return found[:_NUMBERS]


def _attributes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers of a module, and of the plain objects (configurations) that it holds."""
    for key, value in vars(module).items():
        if type(value) is int:
            yield key, value
        elif key.startswith("_") or isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
            continue
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", number) for inner, number in value.items() if type(number) is int)
        elif hasattr(value, "__dict__"):
            yield from ((f"{key}.{inner}", number) for inner, number in vars(value).items() if type(number) is int)


def _names_read(cls: type) -> set[str]:
    """Names and strings in the code of a class's methods, but for its constructor."""
    names: set[str] = set()
    for each in cls.__mro__:
        if each in (nn.Module, object):
            continue
        for key, function in vars(each).items():
            code = getattr(_function_behind(function), "__code__", None)
            if key != "__init__" and code is not None:
                names |= set(_names_in(code))
    return names


def _function_behind(value: Any) -> Any:
    """The function behind a property, a static method or a decorator."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _names_in(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif hasattr(constant, "co_names"):
            yield from _names_in(constant)


# ---- patterns --------------------------------------------------------------------------------------------------------


def compressed(rules: Rules, model: nn.Module) -> Rules:
    """The same rules with a pattern for the numbered modules of a list, where that means the same."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in rules.items():
        grouped[re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), text].append(name)
    found: Rules = {}
    for (pattern, text), members in grouped.items():
        matching = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)}
        found |= {pattern: text} if len(members) > 1 and matching == {*members} else dict.fromkeys(members, text)
    return found
