"""Tensor parallelism: every layer is shared by the ranks of "tp", all of which see the same samples.

Two matrix products with something elementwise (or attention, head by head) in between need one sum at the end, if the
first matrix is sharded by columns and the second by rows (see `linear`):

    x  -- copy -->  f(x A_r)  -->  f(x A_r) B_r  -- all-reduce -->  y        rank r has A_r and B_r only
    dx <-- all-reduce --                          <-- copy --       dy

So a transformer's layer communicates four times a step: one all-reduce of its activations in the forward and one in the
backward, for attention and again for the MLP. With `sequence` the all-reduces are split in two halves, reduce-scatter
and all-gather, and what is between the halves (norms, dropouts, residuals) is sharded along the sequence: see
`sequence`.

`rules` gives which layers are sharded, and how. Parameters are sharded in place, and keep their names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.checks.parameter_reads import BORROWS, READ_BY_PARENT
from unisono.parallel.context.sequence import SequenceParallel
from unisono.parallel.layout import Split
from unisono.parallel.rules import published as published_rules
from unisono.parallel.rules.derived import derived
from unisono.parallel.rules.inferred import compressed, inferred
from unisono.parallel.rules.rules import Rules, Style, Styles, known, matched, only_exceptions, published
from unisono.parallel.rules.searched import searched_rules
from unisono.parallel.tensor import adapters, attention, convolution, custom_layers, user_hooks, vocabulary
from unisono.parallel.tensor.attention import ParallelMultiheadAttention
from unisono.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, features, is_linear, part_lengths
from unisono.parallel.tensor.logits import keep_in_shards
from unisono.parallel.tensor.parameter_shards import ParameterSharder, add_up, packed
from unisono.parallel.tensor.region import Region
from unisono.parallel.tensor.rule_checks import HEAD_SIZES, LINEAR_KINDS, is_rowwise, require_sound
from unisono.parallel.tensor.vocabulary import VocabParallelEmbedding

# Styles of modules whose inputs and outputs are full
_ALONE = ("vocab", "column_gather", "logits", "row_split", "experts", "replicate", "summed")
Regions = Callable[[str], Region]
_known: dict[int, tuple[nn.Module, dict[int, Rules]]] | None = None  # rules that a model shows, by ranks


def tensor_parallelize(
    model: nn.Module, mesh: Mesh, rules: Rules | None = None, sequence: bool = False
) -> SequenceParallel | None:
    """Share the model's layers between the ranks of the mesh's axis "tp", in place; returns what shards its sequences.

    Every rank passes the same full model and keeps its shards. Without rules, the model's own plan is used (Hugging
    Face), then what is known of its classes, then what its blocks show.
    """
    ranks = mesh.size("tp")
    styles = require_shareable(model, ranks, rules)
    if ranks == 1:
        return None
    parallel = SequenceParallel.of(model, styles, mesh) if sequence else None
    comm = mesh.comm("tp")
    plain = Region(comm)
    if parallel is not None:
        user_hooks.require_no_hooks_in_blocks(parallel.blocks.path, model)
    region_of = parallel.region_of if parallel else lambda name: plain
    user_hooks.guard_hooks(model, styles, region_of)
    _shard_model(model, styles, comm, region_of)
    if parallel is not None:
        parallel.install()
    return parallel


def _shard_model(model: nn.Module, styles: Styles, comm: Communicator, region_of: Regions) -> None:
    shards = ParameterSharder(comm.rank, comm.size)
    modules = dict(model.named_modules(remove_duplicate=False))
    heads = heads_of(model, styles, modules)
    made: dict[nn.Module, nn.Module] = {}
    for name, style in styles.items():
        module = modules.get(name)
        if module is None:
            _shard_parameter(name, modules, style, shards)
        elif module in heads:
            layer = ColumnParallelLinear.from_linear(module, region_of(name), gather_output=False, shards=shards)
            layer.register_forward_hook(_leaving(region_of(name)))
            keep_in_shards(layer, features(module)[1], comm)
            made[module] = _in_place_of(module, layer)
        elif convolution.is_shardable(module) and style.kind in convolution.KINDS:
            convolution.shard(module, style, region_of(name), shards)
            for parameter in module._parameters.values():
                if parameter is not None:
                    setattr(parameter, READ_BY_PARENT, style.kind == "channels")
        elif module not in made and style.kind in (*LINEAR_KINDS, "vocab"):
            style = Style("column_gather") if style.kind == "logits" else style
            made[module] = _sharded(name, module, style, region_of(name), shards)
        elif module not in made:
            if style.kind == "mla_kv":
                attention.share_rope_key(modules[name.rpartition(".")[0]], module, region_of(name))
            replacement = _replacement(module, style, region_of(name), shards)
            if replacement is not None:
                made[module] = _in_place_of(module, replacement)
    for parent in list(model.modules()):
        for child_name, child in parent._modules.items():
            if child in made:
                parent._modules[child_name] = made[child]
    _share_shards(model, shards, {*made.values()})


def heads_of(model: nn.Module, styles: Styles, modules: dict[str, nn.Module]) -> set[nn.Module]:
    """The layers that make logits: those that a rule or the model (Hugging Face) names, or that share their weight with
    an embedding."""
    declared = getattr(model, "get_output_embeddings", lambda: None)()
    tied = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    gathered = [modules[name] for name, style in styles.items() if style == Style("column_gather")]
    by_rule = [modules[name] for name, style in styles.items() if style.kind == "logits"]
    by_model = [head for head in gathered if head is declared or id(head.weight) in tied]
    return {head for head in (*by_rule, *by_model) if custom_layers.is_plain(head) and not user_hooks.has_hooks(head)}


def _sharded(name: str, module: nn.Module, style: Style, region: Region, shards: ParameterSharder) -> nn.Module:
    """A linear layer or embedding on this rank: a parallel layer, or the module itself where it is of another class."""
    hooked = user_hooks.has_hooks(module)
    split = None if style.kind == "vocab" else _feature_split(module, style, shards.ranks)
    if custom_layers.is_plain(module):
        layer = _in_place_of(module, _parallel_layer(module, style, region, shards))
    else:
        sharding = custom_layers.require_sharding(name, module, style, shards.ranks)
        custom_layers.shard_in_place(name, module, style, region, shards, sharding)
        layer = module
    if hooked and split is not None:
        user_hooks.show_full_tensors(layer, style, split, region)
    return layer


def _feature_split(module: nn.Module, style: Style, ranks: int) -> Split:
    inputs, outputs = features(module)
    return packed(0, [inputs] if is_rowwise(style) else part_lengths(outputs, style.parts), ranks)


def _in_place_of(module: nn.Module, layer: nn.Module) -> nn.Module:
    """The layer, with the hooks of the module that it replaces, and what a user has written on it."""
    user_hooks.carry_hooks(module, layer)
    for key, value in vars(module).items():
        if key not in vars(layer) and not key.startswith("_"):
            setattr(layer, key, value)
    return layer


def _leaving(region: Region) -> Callable[..., None]:
    return lambda *_: region.locate_outside()


def _parallel_layer(module: nn.Module, style: Style, region: Region, shards: ParameterSharder) -> nn.Module:
    match style.kind:
        case "column" | "column_gather" | "vocab_head" | "column_inside":
            gathers, is_inside = style.kind == "column_gather", style.kind == "column_inside"
            return ColumnParallelLinear.from_linear(
                module, region, gather_output=gathers, parts=style.parts, shards=shards, is_inside=is_inside
            )
        case "row" | "row_split" | "row_sum":
            parallel, is_inside = style.kind != "row_split", style.kind == "row_sum"
            return RowParallelLinear.from_linear(
                module, region, input_is_parallel=parallel, shards=shards, is_inside=is_inside
            )
    assert isinstance(module, nn.Embedding)
    return VocabParallelEmbedding.from_embedding(module, region.comm, shards=shards)


def _replacement(module: nn.Module, style: Style, region: Region, shards: ParameterSharder) -> nn.Module | None:
    """The module that replaces another; None where the module itself is changed."""
    match style.kind:
        case "heads" if isinstance(module, nn.MultiheadAttention):
            return ParallelMultiheadAttention.from_attention(module, region, shards)
        case "heads":
            attention.by_heads(module, style.attributes, region)
        case "sizes":
            attention.divide_sizes(module, style.attributes, region.comm.size)
        case "experts":
            _sum_experts(module, region)
        case "summed":
            for parameter in module.parameters():
                add_up(parameter, "tp")
    return None


def _shard_parameter(name: str, modules: dict[str, nn.Module], style: Style, shards: ParameterSharder) -> None:
    """Expert weights: (experts, outputs, inputs); parameters by channel."""
    owner_name, _, parameter_name = name.rpartition(".")
    owner = modules[owner_name]
    full: Any = getattr(owner, parameter_name)
    if style.kind == "summed":
        add_up(full, "tp")
        return
    if style.kind == "channels":
        shard = shards.shard(full, packed(style.dim, [full.shape[style.dim]], shards.ranks))
        setattr(shard, READ_BY_PARENT, True)
        setattr(owner, parameter_name, shard)
        return
    dim = 1 if style.kind == "column" else 2
    split = packed(dim, part_lengths(full.shape[dim], style.parts), shards.ranks)
    setattr(owner, parameter_name, shards.shard(full, split))


def _sum_experts(module: nn.Module, region: Region) -> None:
    """Every rank has a slice of every expert: tokens and their weights come in full, and the outputs are summed."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(map(region.enter_tokens, args)), {key: region.enter_tokens(value) for key, value in kwargs.items()}

    def leave(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return region.leave_tokens(output)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, prepend=True)


def _share_shards(model: nn.Module, shards: ParameterSharder, layers: set[nn.Module]) -> None:
    """Modules that only hold a parameter that a layer elsewhere uses hold its shard from now on."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in shards.made:
                if module in layers:
                    raise UsageError(
                        f"tp: {path} uses its {name}, of shape {tuple(parameter.shape)}, in full, and shares it with a "
                        'layer whose rule shards it; give both the rule "replicate", or use tp=1'
                    )
                module._parameters[name] = shards.made[parameter][1]
                setattr(module, BORROWS, True)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it would reach past the layers' forward for their weights


# ---- the style of each module ----------------------------------------------------------------------------------------


def require_shareable(model: nn.Module, ranks: int, rules: Rules | None = None) -> Styles:
    """How each module is to be sharded; UsageError where so many ranks cannot share it, as with heads that they do not
    divide."""
    styles = styles_of(model, ranks, rules)
    require_sound(model, styles, ranks)
    return styles


def styles_of(model: nn.Module, ranks: int, rules: Rules | None = None) -> Styles:
    """How each module of the model is to be sharded, by its name."""
    if rules is not None and not only_exceptions(rules):
        styles = matched(model, rules)
        _follow_ties(model, styles, explicit=True)
        return styles
    styles = _brought(model)
    if not styles and ranks > 1:
        styles = matched(model, _derived(model, ranks))
    if all(style.kind == "replicate" for style in styles.values()):
        other = next((name for name, module in model.named_modules() if adapters.is_other(module)), None)
        if other is not None:
            raise UsageError(
                f"tp={ranks}: {other} has an adapter that is not sharded, and no layers are left that can be sharded "
                "without it; use LoRA as peft has it by default (no DoRA, nothing merged or quantized), or no tp"
            )
        raise UsageError(
            f"{type(model).__name__} defines no tensor-parallel plan, and none can be inferred from its blocks; pass "
            "an example for a search, or rules such as "
            '{"*.fc1": "column", "*.fc2": "row", "*.qkv": "column:qkv", "*.out": "row", "*.attention": "heads:heads"}'
        )
    _find_attentions(model, styles)
    styles |= matched(model, rules or {})
    _follow_ties(model, styles, explicit=False)
    return styles


def _brought(model: nn.Module) -> Styles:
    theirs = published(model)
    styles = _of_layers(model, matched(model, theirs if theirs is not None else known(model), every=False))
    vectors = {name for name, parameter in model.named_parameters() if parameter.dim() == 1}
    by_channel = {name: Style("channels") for name in styles.keys() & vectors if styles[name].kind == "column"}
    styles |= by_channel  # a number for each head, such as an attention sink
    return {name: style for name, style in styles.items() if style.kind != "vocab" or _is_sharded(model, name)}


def _of_layers(model: nn.Module, styles: Styles) -> Styles:
    """The styles of a base model's layers, where adapters have been added to them. Layers with others than LoRA stay
    replicated, and with them what shares their weights; where other layers' shards depend on theirs, none holds."""
    modules = dict(model.named_modules())
    others = [name for name in styles if name in modules and adapters.is_other(modules[name])]
    if any(styles[name].kind not in _ALONE for name in others):
        return {}
    theirs = {parameter for name in others for parameter in modules[name].parameters()}
    return {
        layer: style
        for name, style in styles.items()
        if name not in others and getattr(modules.get(name), "weight", None) not in theirs
        for layer in (adapters.layers_of(name, modules[name]) if name in modules else (name,))
    }


def _is_sharded(model: nn.Module, name: str) -> bool:
    """Whether an embedding can be sharded; one that cannot stays replicated."""
    module = model.get_submodule(name)
    return not isinstance(module, nn.Embedding) or not vocabulary.option_beyond_lookup(module)


@contextlib.contextmanager
def deriving_once() -> Iterator[None]:
    """In the block, in which nobody changes a model but to shard it, what its modules show is found once: each that
    checks the model asks for it, and so does what shards it."""
    global _known
    before, _known = _known, {} if _known is None else _known
    try:
        yield
    finally:
        _known = before


def _derived(model: nn.Module, ranks: int) -> Rules:
    if _known is None:
        return derived(model, ranks, _sharded_alone)
    _, found = _known.setdefault(id(model), (model, {}))
    if ranks not in found:
        found[ranks] = derived(model, ranks, _sharded_alone)
    return found[ranks]


def shows_by_running(model: nn.Module) -> bool:
    """Whether only what its modules do with values shows how they can be sharded."""
    return not _brought(model)


def fitting_rules(model: nn.Module, ranks: int, rules: Rules | None, example: tuple[Any, Any] | None) -> Rules | None:
    """The rules to use. Where none are given and the model shows none, they are searched for in its graph, for which an
    example of (inputs, targets) is needed; None where the model shows its own."""
    if ranks == 1 or example is None or (rules is not None and not only_exceptions(rules)):
        return rules
    if isinstance(model, nn.Linear | nn.Embedding):
        raise UsageError(
            f"tp: the model is one {type(model).__name__}, and a layer is sharded within a module that has it; "
            "wrap it: nn.Sequential(layer)"
        )
    try:
        is_published = published(model) is not None
    except UsageError as unknown:
        found = inferred(model, ranks, example[0], _sharded_alone, _named(matched(model, rules or {})))
        if found is None or not found.rules:
            raise unknown from None
        return compressed(found.rules, model)
    if is_published and _brought(model):
        return _tried_rules(model, ranks, rules, example)
    found = inferred(model, ranks, example[0], _sharded_alone, _named(_brought(model) | matched(model, rules or {})))
    if found is not None and any(text != "replicate" for text in found.rules.values()):
        return compressed(found.rules, model)
    try:
        styles_of(model, ranks, rules)
        return rules
    except UsageError as error:
        try:
            searched = searched_rules(model, ranks, example, _sharded_alone)
            return {**(rules or {}), **searched} if searched else rules
        except UsageError as untraceable:
            raise UsageError(f"{error} (its graph cannot be searched: {untraceable})") from None


def _tried_rules(model: nn.Module, ranks: int, rules: Rules | None, example: tuple[Any, Any]) -> Rules | None:
    """What a model publishes; with sums of gradients that it left out, or inferred rules where it does not hold."""
    try:
        styles = require_shareable(model, ranks, rules)
    except UsageError:
        return rules
    tried = published_rules.tried(model, ranks, styles, example[0], _sharded_alone)
    if tried.fails:
        found = inferred(model, ranks, example[0], _sharded_alone, _named(matched(model, rules or {})))
        return rules if found is None or not found.rules else compressed(found.rules, model)
    if not tried.sums:
        return rules
    return _named(styles) | dict.fromkeys(tried.sums, "summed")


def _named(styles: Styles) -> dict[str, str]:
    return {name: str(style) for name, style in styles.items()}


def _sharded_alone(module: nn.Module, rules: Rules, comm: Any) -> None:
    """Share one module by rules, without a mesh."""
    styles = matched(module, rules)
    require_sound(module, styles, comm.size)
    region = Region(comm)
    _shard_model(module, styles, comm, lambda name: region)


def _find_attentions(model: nn.Module, styles: Styles) -> None:
    """Published plans name layers only: a module with a head size around column and row layers is an attention."""
    for name, module in model.named_modules():
        inside = {styles[child].kind for child in _children(name, module) if child in styles}
        if "mla_kv" in inside:
            continue  # full layers there read the input too, and heads are counted by their width
        if name not in styles and {"column", "row"} <= inside and any(hasattr(module, size) for size in HEAD_SIZES):
            styles[name] = Style("heads")


def _children(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]


def _follow_ties(model: nn.Module, styles: Styles, *, explicit: bool) -> None:
    """Layers that share a weight are sharded alike: where nobody gave rules, the others follow the one that has one."""
    inner = adapters.inner_modules(model)
    layers = {
        name: adapters.without_adapters(module)
        for name, module in model.named_modules()
        if (is_linear(module) or isinstance(module, nn.Embedding)) and module not in inner
    }
    for name in [name for name in styles if name in layers and not is_rowwise(styles[name])]:
        for other, module in layers.items():
            if module is layers[name] or module.weight is not layers[name].weight or styles[name].kind == "replicate":
                continue
            is_full = other in styles and styles[other].kind == "replicate"
            if other in styles and not is_full:
                continue
            if explicit:
                raise UsageError(
                    f"{name} and {other} share one weight, but the rules shard {name} only; "
                    f"add {other!r}: {'vocab' if isinstance(module, nn.Embedding) else 'column_gather'!r}"
                )
            if is_full:
                styles[name] = styles[other]
            else:
                styles[other] = Style("vocab" if isinstance(module, nn.Embedding) else "column_gather")
