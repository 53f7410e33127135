"""`UnisonoStrategy`: the Trainer of Lightning, whose model runs under a plan.

    trainer = lightning.Trainer(strategy=UnisonoStrategy("dp=2,zero=3"), max_steps=1000, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(dataset, batch_size=64, shuffle=True))             # unisono run -n 2 train.py

Every rank runs Lightning's loop as the one process that the ranks stand for: the same global batches from the user's
DataLoader, without a DistributedSampler; `training_step` computes its loss on the outputs for the global batch. What
differs is the network that `training_step` calls: under the plan (parallel/loop.py) a rank computes its part of it and
of the samples, and has the outputs for all of them.

The plan is applied to the submodule that has all parameters, where there is one (`self.net = ...`): then `self(x)` and
`self.net(x)` both run it. Else it is applied to the LightningModule, and `training_step` must call `self(x)`.

Checkpoints hold the full weights and optimizer state, as those of one process: any plan, and Lightning without
unisono, resumes from them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.integrations.optimizer_template import OptimizerTemplate, follow
from unisono.parallel.apply import parallelize
from unisono.parallel.full_state import full_tensors_in, load_tensors
from unisono.parallel.trainer import Trainer as PlanTrainer
from unisono.parallel.trainer import takes_closure
from unisono.plan.plan import Plan
from unisono.train.data.reading import preserved_generators
from unisono.verify.self_check import plan_of_job

_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}


class UnisonoStrategy(Strategy):
    """plan: a Plan or its text, as "dp=2,zero=3", with pp=1. rules: which layers tp shards, if the model does not
    define it. example: a batch (inputs, targets) of the network, from which tp finds rules where it needs one."""

    def __init__(self, plan: Plan | str, *, rules: Any = None, example: tuple[Any, Any] | None = None) -> None:
        self._computes_in = "fp32"
        super().__init__()
        self.comm = world.world() if world.is_initialized() else world.init()
        self.plan = _supported(plan).fit(self.comm.size)
        self._rules, self._example = rules, example
        self.parallel: PlanTrainer | None = None  # set when the plan has been applied
        self._plan_module: LightningModule | None = None  # to which it was
        self._names: dict[str, str] = {}  # in the network, of entries of the module's state_dict
        rank_zero_only.rank = self.comm.rank  # type: ignore[attr-defined]
        self.cluster_environment = LightningEnvironment()  # given one, Lightning does not initialize MPI to ask it

    # ---- one process ---------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        if self.accelerator is not None and self.accelerator.name() == "cuda":
            return torch.device("cuda", self.comm.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return self.comm.rank == 0

    @property
    def global_rank(self) -> int:
        return self.comm.rank

    @property
    def local_rank(self) -> int:
        return self.comm.local_rank

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # What ranks log and compute in steps is of the global batch, the same on each: nothing is left to reduce.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor

    def barrier(self, name: str | None = None) -> None:
        self.comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.comm.broadcast_object(obj, src)

    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DataLoader):
            if isinstance(dataloader.sampler, DistributedSampler) and self.comm.size > 1:
                raise UsageError(
                    "a DataLoader with a DistributedSampler under UnisonoStrategy, whose ranks all read the same "
                    "global batches; leave out the sampler, and give the DataLoader the global batch size"
                )
            if os.environ.get("PL_SEED_WORKERS") == "1" and dataloader.worker_init_fn is None:
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # alike on all ranks
        return dataloader

    # ---- the plan ------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or PlanPrecision(self)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and precision_plugin.precision not in _PRECISIONS:
            raise UsageError(
                f"Trainer(precision={precision_plugin.precision!r}) with UnisonoStrategy; expected one of "
                f"{', '.join(map(repr, _PRECISIONS))}"
            )
        self._precision_plugin = None  # until Trainer gives one, for its precision=
        if precision_plugin is not None:
            self._computes_in = _PRECISIONS[precision_plugin.precision]
            self._precision_plugin = PlanPrecision(self)

    @property
    def _applied(self) -> PlanTrainer | None:
        return self.parallel if self._plan_module is self.lightning_module else None

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._applied is not None:
            raise UsageError(
                "fit was called a second time with the same UnisonoStrategy and LightningModule, which is under its "
                "plan; make a new LightningModule, Trainer and strategy, and resume with fit(..., ckpt_path=...)"
            )
        if self._applied is None:
            super().setup(trainer)
        else:  # validate, test or predict after fit
            assert self.accelerator is not None
            self.accelerator.setup(trainer)
            self.model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizer of the plain model, and put both under the plan."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        if len(self.optimizers) != 1 or not module.automatic_optimization:
            raise UsageError(
                f"configure_optimizers of {type(module).__name__} returned {len(self.optimizers)} optimizers, with "
                f"automatic_optimization={module.automatic_optimization}; under UnisonoStrategy expected one, and "
                "automatic optimization: use uni.parallelize in a loop of your own for others"
            )
        optimizer = self.optimizers[0]
        if takes_closure(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} evaluates the model several times in a step, which UnisonoStrategy does "
                "not support; use another optimizer, or uni.Engine"
            )
        network = _network_of(module)
        if network is module:
            _require_own_forward(module, str(self.plan))
        canonical = {id(each): name for name, each in (*network.named_buffers(), *network.named_parameters())}
        state = module.state_dict(keep_vars=True)
        self._names = {key: canonical[id(each)] for key, each in state.items() if id(each) in canonical}
        self._template = OptimizerTemplate(optimizer, network)
        _keep_metrics_apart(module)
        warnings.filterwarnings("ignore", r".*sync_dist=True", PossibleUserWarning)  # logged values are global
        with preserved_generators():
            self.parallel = parallelize(
                network,
                self.plan,
                loss=_no_loss,
                optimizer=self._template.make,
                example=self._example,
                rules=self._rules,
                seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
                precision=self._computes_in,
            )
        self._plan_module = module
        self.optimizers = [self.parallel.optimizer]
        for config in self.lr_scheduler_configs:
            follow(config.scheduler, self.parallel.optimizer)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _full(self) -> dict[str, torch.Tensor]:
        parallel = self._applied
        assert parallel is not None
        return full_tensors_in(parallel.model, dict(parallel.optimized()), parallel.mesh)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        parallel, module = self._applied, self.lightning_module
        if parallel is None:
            return super().lightning_module_state_dict()
        assert module is not None
        full = self._full()
        state: dict[str, Any] = {key: full[name] for key, name in self._names.items()}
        for name, child in module.named_children() if parallel.model is not module else ():
            if child is not parallel.model:  # has no parameters
                state |= child.state_dict(prefix=f"{name}.")
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        parallel = self._applied
        if parallel is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = checkpoint["state_dict"]
        missing = sorted(self._names.keys() - state.keys())
        if strict and missing:
            raise UsageError(f"the checkpoint has no {missing[0]}; is it of another model?")
        given = {name: state[key] for key, name in self._names.items() if key in state}
        load_tensors(parallel.model, dict(parallel.optimized()), parallel.mesh, self._full() | given)
        parallel.replicas.publish()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self._applied is None else self._template.full_state(self._applied)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._applied is not None
        self._template.load(self._applied, checkpoint["optimizer_states"][0])
        self._applied.steps = checkpoint["global_step"]

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class PlanPrecision(Precision):
    """What Lightning asks its precision plugin for, where gradients may be in shards: clipping, and the step."""

    def __init__(self, strategy: UnisonoStrategy) -> None:
        self._strategy = strategy

    @property
    def _parallel(self) -> PlanTrainer:
        assert self._strategy.parallel is not None
        return self._strategy.parallel

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The closure first: the plan's hooks expect the gradients before the step."""
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self._parallel.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._parallel.clip_grad_value_(clip_val)


def _supported(plan: Plan | str) -> Plan:
    plan = plan_of_job(plan)
    if plan == "auto":
        raise UsageError('UnisonoStrategy(plan="auto"): expected a plan, as "dp=2,zero=3"; uni.Engine searches for one')
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if plan.pp > 1 or plan.microbatches > 1 or plan.cp > 1:
        raise UsageError(
            f"UnisonoStrategy(plan={str(plan)!r}): training_step calls the model, on full sequences of the global "
            "batch; use a plan with pp=1, cp=1 and microbatches=1, and accumulate_grad_batches of Trainer"
        )
    return plan


def _no_loss(outputs: Any, targets: Any) -> torch.Tensor:
    raise UsageError("the loss is computed by training_step under UnisonoStrategy; call Trainer.fit")


def _network_of(module: LightningModule) -> nn.Module:
    """The submodule that has all parameters and buffers of the module; or the module itself."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    having = [child for child in module.children() if next(child.parameters(), None) is not None]
    with_buffers = [child for child in module.children() if next(child.buffers(), None) is not None]
    return having[0] if len(having) == 1 and not own and with_buffers in ([], having) else module


def _require_own_forward(module: LightningModule, plan: str) -> None:
    """Of a module with several networks: each must be called by `forward`, which runs on a rank's samples."""
    inside: list[bool] = []

    def enter(*_: Any) -> None:
        inside.append(True)

    def leave(*_: Any) -> None:
        inside.pop()

    def require(name: str, *_: Any) -> None:
        if not inside and torch.is_grad_enabled():
            raise UsageError(
                f"training_step called self.{name} under plan {plan}, which is applied to all of "
                f"{type(module).__name__}; expected self(...), whose forward calls it, or one submodule that has all "
                "parameters"
            )

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None:
            child.register_forward_pre_hook(partial(require, name))


def _keep_metrics_apart(module: nn.Module) -> None:
    """Metrics of torchmetrics have seen the global batch on every rank: they must not add up over ranks."""
    for each in module.modules():
        if hasattr(each, "sync_on_compute"):
            each.sync_on_compute = False  # type: ignore[assignment]
