"""A task as the planner sees it, and which plans it allows.

profile = Planner(task, hardware).profile     # traced without being allocated
plan = choose(task, world, hardware)          # by prediction alone; Engine(plan="auto") races the best (auto.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unisono.amounts import parse_bytes
from unisono.errors import UsageError
from unisono.graph.capture.autocast import WEIGHT_CAST, Autocast
from unisono.graph.capture.trace import Trace, trace
from unisono.mesh.named_groups import NamedParameters
from unisono.parallel.apply import refuse_what_cannot_be_right
from unisono.parallel.blocks import Blocks, find_blocks
from unisono.parallel.checks.optimizer_scope import OptimizerScope, optimizer_scope
from unisono.parallel.compile.cuda_graph import require_capturable_plan
from unisono.parallel.expert.even_experts import evenly_visited
from unisono.parallel.expert.expert import MoE
from unisono.parallel.master_weights import AT_ONCE, RoundedStep
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.parallel.pipeline.rehearsal import rehearse
from unisono.parallel.pipeline.split import blocks_of
from unisono.parallel.precision import HALF_DTYPES, Precision
from unisono.parallel.rules.rules import Styles
from unisono.parallel.rules.sharded_dims import sharded_dims
from unisono.parallel.share import batch_size_of
from unisono.parallel.task import Task
from unisono.parallel.tensor.tensor_parallel import deriving_once, fitting_rules, heads_of, require_shareable
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.plan.profile.from_trace import Subject, read
from unisono.plan.profile.model_profile import ModelProfile, OptimizerState, Segment, Weight
from unisono.plan.schedules.schedule import schedule
from unisono.plan.search import search
from unisono.plan.search.partition import chunks_of
from unisono.plan.search.search import Search
from unisono.simulate.sketch import to_try_out, without_memory

_TRACED_SAMPLES = 2  # of the batch: some models treat a single sample in another way


class Planner:
    """A task that is planned for: its model without memory, its profile, and what it allows."""

    def __init__(
        self,
        task: Task,
        hardware: Hardware,
        batch: int | None = None,
        *,
        precision: str | Precision | None = None,
        cudagraph: bool = False,
        keeps_gathered: bool = True,
    ) -> None:
        """precision: in place of the task's. cudagraph: steps are to be a CUDA graph. keeps_gathered: under sp, what a
        column-parallel layer has gathered stays until its backward."""
        task = task if precision is None else replace(task, precision=precision)
        self.task = task
        self.hardware = hardware
        if task.batch_dim != 0:
            raise UsageError(
                f"batch_dim={task.batch_dim!r}: plans are searched for batches with samples first; give the plan, or "
                "transpose the batch"
            )
        self.precision = Precision.of(task.precision)
        self.model = without_memory(task)
        self.precision.require_dtypes(self.model, task.optimizer)
        example = task.batch(0)
        self.batch = batch_size_of(example) if batch is None else batch
        if self.batch < 1:
            raise UsageError(f"batch={self.batch}: expected at least 1 sample")
        self._samples = min(_TRACED_SAMPLES, batch_size_of(example), self.batch)
        self._example = _first_samples(example, self._samples)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(f"{type(self.model).__name__} has no parameters to train, so there is nothing to plan for")
        self._probe = task.optimizer(NamedParameters.of(self.model))
        self._keeps_gathered, self._is_captured = keeps_gathered, cudagraph
        self._tp_refusals: dict[int, str | None] = {}
        self._pp_refusals: dict[int, str | None] = {}
        self.profile = self._profile()

    def _profile(self) -> ModelProfile:
        weights = dict(_weights(self.model, self._styles(), self.precision))
        blocks = _blocks(self.model)
        short, repeats = self._short
        subject = Subject(
            name=self.task.name or type(self.model).__name__,
            batch=self.batch,
            samples=self._samples,
            weights=weights,
            blocks=blocks.path if blocks else "",
            names=blocks.names if blocks else (),
            count=len(blocks.modules) - repeats + 1 if blocks else 0,
            optimizer=self._optimizer_state(),
            flash=self.hardware.flash,
            keeps_gathered=self._keeps_gathered,
            mask_bytes=self.hardware.dropout_mask,
            repeats=repeats,
            recomputes=blocks is not None and _is_repeated(self.model, blocks),
            clips=self.task.clip is not None,
        )
        with evenly_visited(short):
            traced = trace(short.train(), self._example, self.task.loss, autocast=self._autocast)
        profile = read(traced, subject)
        self._wide_use = _wide_use(traced, weights)
        experts = [module.experts for module in self.model.modules() if isinstance(module, MoE)]
        if experts and blocks:
            profile = _with_traffic(profile, blocks)
        return replace(profile, expert_count=min(experts, default=0))

    @property
    def _autocast(self) -> Autocast | None:
        """That of the trainer, on the kind of device that is planned for."""
        half = self.precision.dtype
        return None if half is None else Autocast(half, "cuda" if self.hardware.asynchronous else "cpu")

    def search(self, world: int) -> Search:
        return Search(self.profile, world, self.hardware, self.allows)

    # ---- what the task allows ------------------------------------------------------------------------------------

    def allows(self, plan: Plan) -> str | None:
        """Why the task cannot run under a plan; None where it can."""
        if self._refused_at_once(plan.microbatches > 1, plan.pp > 1, plan.sequence):
            return self._refused_at_once(plan.microbatches > 1, plan.pp > 1, plan.sequence)
        if plan.pp > 1 and self._pp_refusal(plan):
            return self._pp_refusal(plan)
        if plan.tp > 1 and self._tp_refusal(plan.tp):
            return self._tp_refusal(plan.tp)
        if plan.sequence and not self._has_repeated_blocks:
            return "sp: the model has no list of blocks of one class, between which it would share sequences"
        if plan.cp > 1 and self._cp_refusal(plan):
            return self._cp_refusal(plan)
        if self._is_captured:
            try:
                require_capturable_plan(plan)
            except UsageError as error:
                return str(error)
        if plan.zero and self._wide_use:
            return (
                f"precision={self.precision.name}: ZeRO gathers {self._wide_use} in half precision, but the model uses "
                "it in float32; precision with gather=fp32 allows it"
            )
        return self._optimizer_refusal(plan)

    @cache  # noqa: B019 (a planner lives as long as its command)
    def _refused_at_once(self, microbatches: bool, pipeline: bool, sequence: bool) -> str | None:
        """What `parallelize` refuses before ranks compute, for plans of this kind (but for too many stages)."""
        kind = Plan(
            tp=2 if sequence else 1,
            sequence=sequence,
            microbatches=2 if microbatches else 1,
            pp=2 if pipeline and len(self.profile.blocks) > 1 else 1,
        )
        try:
            refuse_what_cannot_be_right(kind, self.model)
        except UsageError as error:
            return str(error)
        return None

    def _pp_refusal(self, plan: Plan) -> str | None:
        """What stages say that cannot run, as where tensors go round the blocks. Of blocks that are alike two tell."""
        short, repeats = self._short
        stages = 2 if repeats > 1 else plan.pp * chunks_of(plan)
        if stages not in self._pp_refusals:
            try:
                rehearse(short, schedule("1f1b", stages, 1), self._example[0])
                self._pp_refusals[stages] = None
            except UsageError as error:
                self._pp_refusals[stages] = str(error)
        return self._pp_refusals[stages]

    @cached_property
    def _short(self) -> tuple[nn.Module, int]:
        return _shortened(self.model, _blocks(self.model))

    @cached_property
    def _has_repeated_blocks(self) -> bool:
        try:
            return bool(find_blocks(self.model).modules)
        except UsageError:
            return False

    def _tp_refusal(self, tp: int) -> str | None:
        if tp not in self._tp_refusals:
            try:
                with deriving_once():
                    require_shareable(self._shareable, tp, self._rules(tp))
                self._tp_refusals[tp] = self._more_than_share(tp)
            except UsageError as error:
                self._tp_refusals[tp] = str(error)
        return self._tp_refusals[tp]

    def _more_than_share(self, tp: int) -> str | None:
        """Layers may be sharded unevenly, but beyond their length ranks would hold nothing."""
        segments = (self.profile.before, *set(self.profile.blocks), self.profile.after)
        sharded = [weight.shape[weight.tp_dim] for s in segments for weight in s.weights if weight.tp_dim is not None]
        longest = max(sharded, default=0)
        return f"tp={tp}: no layer has more than {longest} rows or columns to share" if tp > longest > 0 else None

    def _cp_refusal(self, plan: Plan) -> str | None:
        if not any(work.is_core for block in self.profile.blocks for work in block.ops):
            return "cp: no block calls F.scaled_dot_product_attention"
        if self.profile.has_experts:
            return "cp: experts under cp are not planned for"
        if plan.context == "ulysses" and self._heads and self._heads % (plan.cp * plan.tp):
            return f"ulysses: {self._heads} heads for cp={plan.cp} x tp={plan.tp}"
        return None

    @cached_property
    def _heads(self) -> int:
        names = ("heads", "num_heads", "n_head", "num_attention_heads", "nhead")
        found = [getattr(m, n) for m in self.model.modules() for n in names if type(getattr(m, n, None)) is int]
        return min(found, default=0)

    def _optimizer_refusal(self, plan: Plan) -> str | None:
        reach = self._reach
        name = type(self._probe).__name__
        if reach is OptimizerScope.TENSOR and (plan.tp > 1 or plan.ep > 1):
            return f"{name} needs full parameters, which tp and ep shard"
        if reach is OptimizerScope.MODEL and (plan.zero or plan.tp > 1 or plan.pp > 1 or plan.ep > 1):
            return f"{name} needs the full model; only dp, cp and microbatches leave it one"
        return None

    @cached_property
    def _reach(self) -> OptimizerScope:
        return optimizer_scope(self._probe, self.task.optimizer)

    def assumptions(self, *, compile: bool = False) -> list[str]:
        """What predictions leave out, a sentence each."""
        found = []
        name = self.precision.name
        if self.profile.dtype not in self.hardware.flops and self.profile.dtype in ("bfloat16", "float16"):
            other = "float16" if self.profile.dtype == "bfloat16" else "bfloat16"
            known = other if other in self.hardware.flops else "float32"
            found.append(f"{self.hardware.name} has no flops.{self.profile.dtype}: those of {known} are assumed")
        if name == "fp8" and self.precision.float8(self.model).chosen:
            found.append("precision=fp8: linear layers are counted as those of bf16, which keep and take more")
        if compile:
            found.append(
                "compile: memory and times are those of eager steps; compiled regions keep what the compiler's "
                "partitioner chooses, and fuse ops, which was not traced"
            )
        return found

    # ---- what the model shows ------------------------------------------------------------------------------------

    @cached_property
    def _shareable(self) -> nn.Module:
        return to_try_out(self.task, self.model)

    @cache  # noqa: B019
    def _rules(self, tp: int) -> Any:
        return fitting_rules(self._shareable, tp, self.task.rules, self._example)

    def _styles(self) -> Styles:
        """How tp would shard, for the smallest tp that can; nothing where none can."""
        for tp in (2, 3, 5, 7):
            try:
                return require_shareable(self._shareable, tp, self._rules(tp))
            except UsageError:
                continue
        return {}

    def _optimizer_state(self) -> OptimizerState:
        """Of the tensors that the optimizer updates: parameters, or copies of them (see _weights)."""
        dtype = next((p.dtype for p in self.model.parameters() if p.requires_grad), torch.float32)
        rounding = self.precision.rounding if self.precision.master is None else None
        if dtype in HALF_DTYPES and rounding is not None:
            state, _ = _measured_state(self.task.optimizer, dtype, rounding)
            wide, temporary = _measured_state(self.task.optimizer, torch.float32)
            # Parameter, gradient and state in float32, of some parameters at a time; and in half, read and written.
            temporary += 8.0 + wide
            traffic = 2 * (3 * dtype.itemsize + 2 * state)
            return OptimizerState(state, state, temporary, AT_ONCE, traffic, traffic)
        is_copied = dtype in HALF_DTYPES and self.precision.dtype is not None  # without ZeRO, too
        sharded, wide = _measured_state(self.task.optimizer, torch.promote_types(dtype, torch.float32))
        plain, temporary = (sharded, wide) if is_copied else _measured_state(self.task.optimizer, dtype)
        wider = 12.0 + 2 * sharded
        traffic = wider if is_copied else 3 * dtype.itemsize + 2 * plain
        return OptimizerState(
            plain,
            sharded,
            max(temporary, wide),
            traffic=wider if dtype in HALF_DTYPES else traffic,
            plain_traffic=traffic,
        )


def _with_traffic(profile: ModelProfile, blocks: Blocks) -> ModelProfile:
    """With what goes to experts: every token of a sample, as often as it visits one."""
    made: dict[tuple[int, int], Segment] = {}
    segments = []
    for segment, block in zip(profile.blocks, blocks.modules, strict=True):
        visits = sum(module.top_k for module in block.modules() if isinstance(module, MoE))
        if (id(segment), visits) not in made:
            made[id(segment), visits] = replace(segment, expert_traffic=visits * profile.hidden)
        segments.append(made[id(segment), visits])
    return replace(profile, blocks=tuple(segments))


def choose(
    task: Task,
    world: int,
    hardware: Hardware,
    batch: int | None = None,
    *,
    precision: str | Precision | None = None,
    memory: str | float | None = None,
    compile: bool = False,
) -> Plan:
    """The fastest plan that fits `world` devices.

    Args:
        task: The job.
        world: Devices to plan for.
        hardware: The machine.
        batch: Samples of a step; default: those of the task's batch.
        precision: As for uni.parallelize; default: the task's.
        memory: The most that a rank may need, in bytes or as "80GiB", in place of what the hardware has.
        compile: Whether the plan is to be compiled. Memory and times are those of eager steps.
    """
    planner = Planner(task, hardware, batch, precision=precision)
    plan = search.choose(planner.profile, world, limited(hardware, memory), planner.allows)
    return plan.but(compile=compile)


def limited(hardware: Hardware, memory: str | float | None, name: str = "memory=") -> Hardware:
    """The machine with another limit on the memory of a rank. name: of the argument, for errors."""
    if memory is None:
        return hardware
    found = parse_bytes(memory) if isinstance(memory, str) else float(memory)
    if found is None or not 0 < found < float("inf"):
        raise UsageError(f"{name}{memory}: expected the memory that a rank may need, as 80GiB or 80GB")
    return replace(hardware, limit=found)


# ---- looking at a model ----------------------------------------------------------------------------------------------


def _first_samples(example: Any, samples: int) -> Any:
    given = batch_size_of(example)
    return pytree.tree_map(
        lambda leaf: leaf[:samples] if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == given else leaf,
        example,
    )


def _blocks(model: nn.Module) -> Blocks | None:
    """Those between which a pipeline is split."""
    try:
        return blocks_of(model)
    except UsageError:
        return None


def _is_repeated(model: nn.Module, blocks: Blocks) -> bool:
    """Whether recomputation takes the same blocks, which must be of one class."""
    try:
        return find_blocks(model).modules == blocks.modules
    except UsageError:
        return False


def _shortened(model: nn.Module, blocks: Blocks | None) -> tuple[nn.Module, int]:
    """A model with two of its blocks, where all are alike, and how often the second of them is in the model."""
    if blocks is None or not blocks.path or len(blocks.modules) < 4 or len(set(map(_look, blocks.modules))) > 1:
        return model, 1
    short = deep_copy(model) if next(model.parameters()).is_meta else model
    holder = short.get_submodule(blocks.path)
    if short is model or not isinstance(holder, nn.ModuleList):
        return model, 1
    del holder[2:]
    return short, len(blocks.modules) - 1


def _look(module: nn.Module) -> tuple[object, ...]:
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return (type(module), parameters, tuple((name, type(child)) for name, child in module.named_modules()))


def _weights(model: nn.Module, styles: Styles, precision: Precision) -> Iterator[tuple[str, Weight]]:
    """Every parameter, with the dim that tp shards, and the dtypes in which a trainer holds it."""
    sharded = sharded_dims(model, styles)
    gathered = _gathered(model, styles)
    rounded = precision.gathered(model)
    masters = precision.masters(model, rounded)
    copied = masters.copies if masters is not None else {}
    experts = {id(p) for module in model.modules() if isinstance(module, MoE) for p in _expert_parameters(module)}
    for name, parameter in model.named_parameters():
        is_half = parameter.dtype in HALF_DTYPES
        has_copy = (is_half and precision.master is not None) or name in rounded
        yield (
            name,
            Weight(
                name,
                tuple(parameter.shape),
                parameter.itemsize,
                sharded[name].dim if name in sharded else None,
                id(parameter) in experts,
                id(parameter) in gathered,
                not parameter.requires_grad,
                gradient_itemsize=4 if is_half and precision.dtype is not None else parameter.itemsize,
                zero_itemsize=rounded[name].itemsize if name in rounded else parameter.itemsize,
                sent_itemsize=precision.reduce_dtype.itemsize if precision.reduce_dtype is not None else 0,
                master=copied[name].itemsize if name in copied else 0,
                zero_master=torch.float32.itemsize if has_copy else 0,
            ),
        )


def _wide_use(traced: Trace, weights: Mapping[str, Weight]) -> str:
    """A parameter that ZeRO would gather in half precision, but that the model uses in another."""
    for op in traced.ops:
        for name in op.inputs if op.bytes_moved and not op.node.meta.get(WEIGHT_CAST) else ():
            weight = weights.get(traced.parameters.get(name, ""))
            if weight is not None and weight.gathered_itemsize < weight.itemsize:
                return weight.name
    return ""


def _gathered(model: nn.Module, styles: Styles) -> set[int]:
    """Weights of layers that gather what they give; heads whose logits stay sharded do not."""
    modules = dict(model.named_modules(remove_duplicate=False))
    heads = heads_of(model, styles, modules)
    layers = [modules[name] for name, style in styles.items() if style.kind == "column_gather"]
    return {id(layer.weight) for layer in layers if layer not in heads}


def _expert_parameters(module: MoE) -> Iterator[nn.Parameter]:
    for name, parameter in module.named_parameters(recurse=False):
        if name != "router":
            yield parameter


def _measured_state(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, rounding: str | None = None
) -> tuple[float, float]:
    """Bytes of state for an element, and of temporaries while stepping: of a matrix that it is tried on. rounding: of
    steps without master weights."""
    parameter = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = make(NamedParameters([parameter]))
    parameter.grad = torch.zeros_like(parameter)
    if rounding is not None:
        RoundedStep(optimizer, [("parameter", parameter)], rounding, lambda: (0, 0))
    try:
        optimizer.step()
    except (RuntimeError, TypeError):
        return 2.0 * dtype.itemsize, float(dtype.itemsize)  # it needs a closure, or more: as Adam
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    state = sum(value.numel() * value.itemsize for value in tensors if value.numel() > 1) / parameter.numel()
    return state, float(dtype.itemsize) if len([v for v in tensors if v.numel() > 1]) > 1 else 0.0
