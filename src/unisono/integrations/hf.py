"""`UnisonoTrainer`: the Trainer of transformers, whose steps run under a plan.

    trainer = UnisonoTrainer(model, args, train_dataset=dataset, data_collator=collator, plan="dp=2,zero=3")
    trainer.train()                                    # unisono run -n 2 train.py

Every rank runs the loop of transformers.Trainer as the one process that the ranks stand for: the same sampler, the same
global batches, the same schedule, logs and callbacks. What differs is below the loop:

    accelerate           is set up for one process, whatever the launcher's environment says (`_one_process`)
    training_step        `Trainer.backward` of unisono: a rank computes its part of the batch and of the model
    clipping             by the norm of the full model's gradients
    checkpoints          hold the full weights and optimizer state, in the files and formats of transformers.Trainer: it
                         and UnisonoTrainer under any plan resume from each other's checkpoints

The plan is applied at the start of training (`_wrap_model`), when transformers has made the optimizer for the plain
model: the optimizer under the plan is that one with other parameters (optimizer_template.py).

Note: the loss. A model that computes its loss gets `num_items_in_batch`, the number of labels in all batches that are
accumulated, and divides its sum by it. unisono records that part of the forward (parallel/loss/model_loss.py); the
number must not be an input of the model there, as inputs are split among ranks. A hook adds it to each call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.integrations.optimizer_template import OptimizerTemplate, follow
from unisono.parallel.inputs import as_inputs
from unisono.parallel.loss.model_loss import is_label, own_loss
from unisono.parallel.share import first_batch_size
from unisono.parallel.trainer import Trainer as PlanTrainer
from unisono.plan.plan import Plan
from unisono.train.checkpoint.weights import SAFE_WEIGHTS, export_pretrained, export_weights, import_weights
from unisono.train.data.reading import preserved_generators
from unisono.verify.self_check import check_level, parallelize, plan_of_job

_LAUNCHER = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # accelerate reads


class UnisonoTrainer(Trainer):
    """transformers.Trainer under a plan: the losses and weights of one process with the same arguments.

    plan: a Plan or its text, as "dp=2,zero=3", with pp=1. check: how the plan is proved before training, as for
    uni.Engine. rules: which layers tp shards, if the model does not define it. All other arguments are those of
    transformers.Trainer; `per_device_train_batch_size` and `per_device_eval_batch_size` are global: the batch of the
    one process, which the ranks share.
    """

    model: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        plan: Plan | str,
        check: str = "auto",
        rules: Any = None,
        **named: Any,
    ) -> None:
        self.comm = _joined()
        self.plan = _supported(plan).fit(self.comm.size)
        self._check, self._rules = check, rules
        check_level(check)
        args = TrainingArguments("tmp_trainer") if args is None else args
        _require_supported(args)
        _one_process(args, self.comm)
        self.parallel: PlanTrainer | None = None  # set when the plan has been applied
        self._num_items: Any = None  # for the model's next call
        self._calls = 0  # of training_step since the last update
        super().__init__(model, args, *positional, **named)
        self._overrides_loss = type(self).compute_loss is not Trainer.compute_loss
        if self._overrides_loss and self.plan.cp > 1:
            raise UsageError(
                f"plan {self.plan} with a compute_loss of your own, which under cp would see a rank's tokens only; "
                "pass compute_loss_func= instead, or use cp=1"
            )

    # ---- one process ---------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        # The plan's trainer casts and places; accelerate would read and load the optimizer's state to place it.
        return super()._build_accelerator_args(**given) | {"mixed_precision": "no", "device_placement": False}

    def _get_dataloader(self, *given: Any, **named: Any) -> Any:
        with _process_0():  # workers are seeded by it, and all ranks must read the same
            return super()._get_dataloader(*given, **named)

    # ---- the plan ------------------------------------------------------------------------------------------------

    @property
    def _applied(self) -> PlanTrainer | None:
        """The plan's trainer of the present model; None before training, and when model_init has made another."""
        return self.parallel if self.parallel is not None and self.parallel.model is self.model else None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training and self._applied is None:
            self._apply()
        elif training and _plain(self.optimizer) is not self.parallel.optimizer:  # type: ignore[union-attr]
            raise UsageError(
                "the optimizer was replaced after the plan had been applied to the model, and would not get the "
                "gradients; make a new UnisonoTrainer"
            )
        return self.model

    def _apply(self) -> None:
        """Put the model and the optimizer that transformers has made under the plan."""
        self._template = OptimizerTemplate(_plain(self.optimizer), self.model)
        if hasattr(self.model, "num_parameters"):
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        if self.model_accepts_loss_kwargs:
            self._add_num_items()
        with preserved_generators():
            example = self._prepare_inputs(self._example())
            self._num_items = self._get_num_items_in_batch([example], self.args.device)
            self.model.train()
            self.parallel = parallelize(
                self.model,
                self.plan,
                loss=self._loss if self._takes_labels or self._overrides_loss else own_loss,
                optimizer=self._template.make,
                example=None if self._overrides_loss else self._pair(example),
                rules=self._rules,
                seed=self.args.seed,
                precision="bf16" if self.args.bf16 else "fp32",
                check="off" if self._overrides_loss else self._check,
            )
            self._num_items = None
        self.optimizer = self.parallel.optimizer
        if self.lr_scheduler is not None:  # given by the user
            follow(self.lr_scheduler, self.optimizer)

    def _example(self) -> Any:
        """A batch of the first samples: in the order of training, samplers would draw random numbers."""
        loader = self.get_train_dataloader()
        size = max(self._train_batch_size, 2 * self.plan.dp * self.plan.microbatches)
        dataset: Any = loader.dataset
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            samples = [dataset[index] for index in range(min(size, len(dataset)))]
        elif iter(dataset) is dataset:
            raise UsageError(
                f"train_dataset is a {type(dataset).__name__}, which can be read once only; expected one that starts "
                "again when it is iterated over again, as the plan is tried on its first samples before training"
            )
        else:
            samples = list(itertools.islice(dataset, size))
        if not samples:
            raise UsageError("train_dataset is empty; expected at least one sample")
        return loader.collate_fn(samples)

    # ---- the loss ------------------------------------------------------------------------------------------------

    @property
    def _takes_labels(self) -> bool:
        """Whether the loss is computed from the model's outputs, and not by the model."""
        return self.compute_loss_func is not None or self.label_smoother is not None

    def _pair(self, inputs: Any) -> tuple[dict[str, Any], Any]:
        """A batch as (inputs, targets)."""
        inputs = as_inputs(inputs)
        labels = inputs.pop("labels", None) if self._takes_labels else None
        return inputs, labels

    def _loss(self, outputs: Any, labels: Any) -> torch.Tensor:
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels, num_items_in_batch=self._num_items)
        assert self.label_smoother is not None
        return self.label_smoother(
            outputs, labels, shift_labels=self._loss_shifts_labels, num_items_in_batch=self._num_items
        )

    def _add_num_items(self) -> None:
        def added(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = {} if self._num_items is None else {"num_items_in_batch": self._num_items}
            return args, given | kwargs

        self.model.register_forward_pre_hook(added, with_kwargs=True)  # a function: copies of the model share it

    @contextlib.contextmanager
    def _counting(self, num_items: Any) -> Iterator[None]:
        self._num_items = num_items
        try:
            yield
        finally:
            self._num_items = None

    # ---- training ------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Loss and gradients of one of the batches that are accumulated for an update."""
        parallel = self._applied
        assert parallel is not None
        # Random numbers go by the step: those of batches that are accumulated must differ.
        parallel.steps = self.state.global_step * self.args.gradient_accumulation_steps + self._calls
        self._calls = 0 if self.accelerator.sync_gradients else self._calls + 1
        if self._overrides_loss:
            self._require_a_sample_each(inputs)
            with contextlib.nullcontext() if self.accelerator.sync_gradients else parallel.no_sync():
                return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        scale = 1.0
        if self.compute_loss_func is None and (not self.model_accepts_loss_kwargs or num_items_in_batch is None):
            scale = 1 / self.current_gradient_accumulation_steps
        optimized = [parameter for _, parameter in parallel.optimized()]
        # Copies: the next backward writes to the buffers that these are views of.
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in optimized]
        for parameter in optimized:
            parameter.grad = None
        with self._counting(num_items_in_batch):
            loss = parallel.backward(self._pair(self._prepare_inputs(inputs)))
        for parameter, earlier in zip(optimized, before, strict=True):
            if parameter.grad is not None and scale != 1:
                parameter.grad.mul_(scale)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        return loss * scale

    def _require_a_sample_each(self, inputs: Any) -> None:
        if self.plan.dp > 1 and (size := first_batch_size(as_inputs(inputs))) < self.plan.dp:
            raise UsageError(
                f"a batch with {size} samples for {self.plan.dp} data ranks, and a compute_loss of your own, which "
                "calls the model on each; expected a sample for each: use dataloader_drop_last=True, or "
                "compute_loss_func="
            )

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        assert self.parallel is not None
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self.parallel is not None
        return self.parallel.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        name = getattr(self.model, "main_input_name", "input_ids")
        if self._applied is None or name not in inputs or not hasattr(self, "_num_parameters"):
            return super().floating_point_ops(inputs)
        return 6 * inputs[name].numel() * self._num_parameters

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch; under dp each rank computes its part."""
        parallel = self._applied
        config = getattr(self.model, "config", None)
        feeds_labels = getattr(config, "is_encoder_decoder", False)  # to the decoder
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        is_split = parallel is not None and self.plan.dp * self.plan.cp > 1
        if not is_split or self._overrides_loss or feeds_labels or not (has_labels or not self.can_return_loss):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # on every rank
        assert parallel is not None
        inputs = self._prepare_inputs(inputs)
        loss = None
        if has_labels:
            with self._counting(self._get_num_items_in_batch([inputs], self.args.device)):
                loss = parallel.evaluate(self._pair(inputs))
        if prediction_loss_only:
            return loss, None, None
        ignored = (
            getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if ignore_keys is None else ignore_keys
        )
        outputs = parallel.predict({name: value for name, value in inputs.items() if not is_label(name)})
        logits: Any = outputs
        if isinstance(outputs, Mapping):
            logits = tuple(value for name, value in outputs.items() if name not in (*ignored, "loss"))
        labels = tuple(inputs[name] for name in self.label_names) if has_labels else None
        return loss, _only(logits), _only(labels)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the full model as a folder that from_pretrained reads; every rank calls it."""
        parallel, folder = self._applied, Path(output_dir or self.args.output_dir or ".")
        if parallel is None:
            super().save_model(output_dir, _internal_call)
            self.comm.barrier()
            return
        folder.mkdir(parents=True, exist_ok=True)
        if callable(getattr(getattr(self.model, "config", None), "save_pretrained", None)):
            export_pretrained(parallel, folder)
        else:
            export_weights(parallel, folder / SAFE_WEIGHTS)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        self.comm.barrier()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.comm.barrier()  # the others may go on to read it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        parallel = self._applied
        assert parallel is not None
        state = self._template.full_state(parallel)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        parallel = self._applied
        assert parallel is not None
        paths = [Path(checkpoint or "") / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if checkpoint is None or not all(path.is_file() for path in paths):
            return
        state, schedule = (torch.load(path, map_location="cpu", weights_only=True) for path in paths)
        self._template.load(parallel, state)
        self.lr_scheduler.load_state_dict(schedule)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the generators of all ranks are in the same state
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        parallel = self._applied
        if parallel is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif hasattr(self.model, "peft_config"):
            raise UsageError(
                f"adapters cannot be read from {resume_from_checkpoint} into a model under plan {self.plan}; make a "
                "new UnisonoTrainer and resume with it, or leave out load_best_model_at_end"
            )
        else:
            import_weights(parallel, resume_from_checkpoint, strict=False)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def _only(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) and len(values) == 1 else values


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _plain(optimizer: Any) -> Optimizer:
    """The optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


# ---- accelerate, for one process -------------------------------------------------------------------------------------


def _joined() -> Communicator:
    """The world. Where accelerate has made a process group, as it does for TrainingArguments, that is ended first."""
    if PartialState._shared_state and dist.is_initialized() and not world.is_initialized():
        dist.destroy_process_group()
    return world.world() if world.is_initialized() else world.init()


def _one_process(args: TrainingArguments, comm: Communicator) -> None:
    """Have accelerate and `args` see one process on this rank's device. Its index is the rank's: the first one logs and
    saves."""
    device = torch.device("cpu")
    if torch.cuda.is_available() and not args.use_cpu:
        device = torch.device("cuda", comm.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    AcceleratorState._reset_state(reset_partial_state=True)
    kept = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        state = PartialState(cpu=device.type == "cpu")
    finally:
        os.environ.update(kept)
    if state.distributed_type != DistributedType.NO:
        raise UsageError(
            f"accelerate was set up for {state.distributed_type}, but under UnisonoTrainer each rank is one process to "
            "it; leave out ACCELERATE_* and SageMaker variables of the environment"
        )
    state.device, state.process_index, state.local_process_index = device, comm.rank, comm.local_rank
    args.distributed_state = state
    args._n_gpu = int(device.type == "cuda")
    args.__dict__["_setup_devices"] = device  # a cached property


@contextlib.contextmanager
def _process_0() -> Iterator[None]:
    state = PartialState()
    index, state.process_index = state.process_index, 0
    try:
        yield
    finally:
        state.process_index = index


# ---- what cannot be right --------------------------------------------------------------------------------------------


def _supported(plan: Plan | str) -> Plan:
    plan = plan_of_job(plan)
    if plan == "auto":
        raise UsageError('UnisonoTrainer(plan="auto"): expected a plan, as "dp=2,zero=3"; uni.Engine searches for one')
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if plan.pp > 1:
        raise UsageError(
            f"UnisonoTrainer(plan={str(plan)!r}): its loop calls the model, of which a rank has some stages only with "
            f"pp={plan.pp}; use a plan with pp=1, or uni.Engine, which takes the same model and data collator"
        )
    return plan


_REFUSED: dict[str, tuple[Callable[[TrainingArguments], Any], str]] = {
    "fp16=True": (lambda args: args.fp16, "use bf16=True: the scaling of fp16's loss is not supported here"),
    "fp16_full_eval or bf16_full_eval": (
        lambda args: args.fp16_full_eval or args.bf16_full_eval,
        "leave it out: evaluation runs in the precision of training",
    ),
    "torch_compile=True": (lambda args: args.torch_compile, 'put it into the plan, as plan="dp=2,compile"'),
    "deepspeed=...": (lambda args: args.deepspeed, "leave it out: the plan shards the model, as zero=1, 2 or 3"),
    "fsdp=...": (lambda args: args.fsdp, 'leave it out: plan="dp=2,zero=3" is fully sharded data parallelism'),
    "parallelism_config=...": (lambda args: args.parallelism_config, "leave it out: the plan says how to parallelize"),
    "auto_find_batch_size=True": (
        lambda args: args.auto_find_batch_size,
        "give per_device_train_batch_size: ranks run out of memory at different times",
    ),
    "save_on_each_node=True": (
        lambda args: args.save_on_each_node,
        "leave it out: checkpoints are written once, to a folder that all hosts share",
    ),
    "neftune_noise_alpha=...": (
        lambda args: args.neftune_noise_alpha is not None,
        "leave it out: its noise is scaled by the length of a rank's sequences",
    ),
}


def _require_supported(args: TrainingArguments) -> None:
    for what, (is_given, advice) in _REFUSED.items():
        if is_given(args):
            raise UsageError(f"TrainingArguments({what}) with UnisonoTrainer: {advice}")
