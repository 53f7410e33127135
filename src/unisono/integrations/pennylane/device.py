"""The PennyLane device `unisono.qubit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pennylane as qml
import torch
from pennylane.devices import Device, ExecutionConfig
from pennylane.devices.modifiers import simulator_tracking, single_tape_support
from pennylane.devices.preprocess import (
    decompose,
    device_resolve_dynamic_wires,
    no_sampling,
    null_postprocessing,
    validate_adjoint_trainable_params,
    validate_device_wires,
    validate_measurements,
    validate_observables,
)
from pennylane.exceptions import DeviceError
from pennylane.math import Interface
from pennylane.measurements import ExpectationMP, SampleMeasurement, StateMeasurement
from pennylane.transforms import broadcast_expand, defer_measurements, split_non_commuting
from pennylane.transforms.core import transform

from unisono.errors import UsageError
from unisono.integrations.pennylane.jacobian import jacobian, jvp, vjp
from unisono.integrations.pennylane.measurement import SHADOWS, analytic, observable_of, sampled
from unisono.integrations.pennylane.operators import (
    GATE_SET,
    batched_parameters,
    is_batchable,
    is_differentiable,
    is_native,
)
from unisono.integrations.pennylane.simulator import Job, JobBatch, Simulator
from unisono.integrations.ranks import job_communicator, shared_generator
from unisono.quantum.arguments import DTYPES, require_device, shown
from unisono.quantum.kernels.runner import require_kernel

NAME = "unisono.qubit"
WITH_BATCHES = (Interface.NUMPY, Interface.AUTOGRAD, Interface.TORCH)  # whose derivatives of batches are not expanded


@simulator_tracking
@single_tape_support
class UnisonoQubit(Device):
    """State vectors by unisono.quantum, on one process or sharded over the ranks of a job.

    wires: their number or labels; None takes those of each circuit. ranks: how many ranks share each state, all of the
    job (the default) or 1; every rank runs the same QNodes and has all results. c_dtype: np.complex64 or np.complex128.
    device: where states are, "cpu" or "cuda". seed: of samples, as for numpy.random.default_rng; the same seed gives
    the same samples on any number of ranks."""

    def __init__(
        self,
        wires: Any = None,
        *,
        shots: Any = None,
        ranks: int | None = None,
        c_dtype: Any = np.complex128,
        seed: Any = "global",
        device: torch.device | str | None = None,
        kernel: str = "auto",
    ) -> None:
        super().__init__(wires=wires, shots=shots)
        if self.wires is not None and not len(self.wires):
            raise UsageError(f"wires={wires!r}: expected 1 or more")
        comm = job_communicator(ranks)
        require_kernel(kernel)
        place = comm.device if device is None and comm is not None else require_device(device or "cpu")
        self._simulator = Simulator(comm, _dtype(c_dtype), place, kernel)
        self._rng = shared_generator(seed, comm)

    @property
    def name(self) -> str:
        return NAME

    @property
    def ranks(self) -> int:
        """How many ranks share each state."""
        return 1 if self._simulator.comm is None else self._simulator.comm.size

    @property
    def c_dtype(self) -> type:
        return np.complex64 if self._simulator.dtype == torch.complex64 else np.complex128

    # ---- what it accepts ----------------------------------------------------------------------------------------

    def setup_execution_config(self, config: ExecutionConfig | None = None, circuit: Any = None) -> ExecutionConfig:
        config = config or ExecutionConfig()
        for option in config.device_options:
            raise DeviceError(f"device option {option!r}: {NAME} has none; give it to qml.device(...)")
        method = "adjoint" if config.gradient_method == "best" else config.gradient_method
        adjoint = method == "adjoint"
        updated: dict[str, Any] = {"gradient_method": method, "convert_to_numpy": True}
        for name in ("use_device_gradient", "use_device_jacobian_product"):
            if getattr(config, name) is None:
                updated[name] = adjoint
        if adjoint and circuit is not None and config.interface in WITH_BATCHES and _has_trainable_batch(circuit):
            updated["use_device_jacobian_product"] = True  # see _runs_batch
        if config.grad_on_execution is None:
            updated["grad_on_execution"] = False  # a vector-Jacobian product costs one walk, a Jacobian several
        if config.mcm_config.mcm_method not in (None, "deferred"):
            raise DeviceError(
                f"mcm_method={str(config.mcm_config.mcm_method)!r}: {NAME} defers mid-circuit measurements; use "
                "mcm_method='deferred', or leave it out"
            )
        return replace(config, mcm_config=replace(config.mcm_config, mcm_method="deferred"), **updated)

    def preprocess_transforms(self, execution_config: ExecutionConfig | None = None) -> Any:
        config = execution_config or ExecutionConfig()
        adjoint = config.gradient_method == "adjoint"
        pipeline = qml.CompilePipeline()
        pipeline.add_transform(defer_measurements, allow_postselect=False)
        pipeline.add_transform(
            decompose,
            stopping_condition=_native_and_differentiable if adjoint else is_native,
            device_wires=self.wires,
            target_gates=GATE_SET,
            name=NAME,
        )
        pipeline.add_transform(device_resolve_dynamic_wires, wires=self.wires, allow_resets=False)
        pipeline.add_transform(validate_device_wires, self.wires, name=NAME)
        pipeline.add_transform(
            validate_measurements, analytic_measurements=_is_analytic, sample_measurements=_is_sampled, name=NAME
        )
        pipeline.add_transform(expand_batches, execution_config=config)
        pipeline.add_transform(split_shots)
        if adjoint:
            pipeline.add_transform(no_sampling, name=f"adjoint + {NAME}")
            pipeline.add_transform(
                validate_measurements, analytic_measurements=_is_expectation, name=f"adjoint + {NAME}"
            )
            pipeline.add_transform(validate_observables, _has_costate, name=f"adjoint + {NAME}")
            pipeline.add_transform(validate_adjoint_trainable_params)
        return pipeline

    def supports_derivatives(self, execution_config: ExecutionConfig | None = None, circuit: Any = None) -> bool:
        """By the adjoint method: of expectation values, without shots; no derivatives of derivatives."""
        if execution_config is None:
            return True
        if execution_config.derivative_order > 1:
            return False
        if execution_config.gradient_method not in ("adjoint", "best"):
            return False
        if circuit is None:
            return True
        if execution_config.gradient_method == "best" and any(
            mp.obs is not None and any(map(qml.math.requires_grad, mp.obs.data)) for mp in circuit.measurements
        ):
            return False  # parameter-shift has these derivatives, too
        return not circuit.shots and all(_is_expectation(mp) and _has_costate(mp.obs) for mp in circuit.measurements)

    def supports_vjp(self, execution_config: ExecutionConfig | None = None, circuit: Any = None) -> bool:
        return self.supports_derivatives(execution_config, circuit)

    def supports_jvp(self, execution_config: ExecutionConfig | None = None, circuit: Any = None) -> bool:
        return self.supports_derivatives(execution_config, circuit)

    # ---- running ------------------------------------------------------------------------------------------------

    def execute(self, circuits: Any, execution_config: ExecutionConfig | None = None) -> Any:
        config = execution_config or ExecutionConfig()
        self._simulator.forget()
        results = tuple(self._execute(each, keep=bool(each.shots or config.use_device_gradient)) for each in circuits)
        if not config.use_device_gradient:
            self._simulator.forget()
        return results

    def compute_derivatives(self, circuits: Any, execution_config: ExecutionConfig | None = None) -> Any:
        return tuple(jacobian(self._simulator, self._jobs(each), each) for each in circuits)

    def execute_and_compute_derivatives(self, circuits: Any, execution_config: ExecutionConfig | None = None) -> Any:
        results = tuple(self._execute(each, keep=True) for each in circuits)
        return results, self.compute_derivatives(circuits, execution_config)

    def compute_vjp(self, circuits: Any, cotangents: Any, execution_config: ExecutionConfig | None = None) -> Any:
        pairs = zip(circuits, cotangents, strict=True)
        return tuple(vjp(self._simulator, self._jobs(each), each, given) for each, given in pairs)

    def execute_and_compute_vjp(
        self, circuits: Any, cotangents: Any, execution_config: ExecutionConfig | None = None
    ) -> Any:
        results = tuple(self._execute(each, keep=True) for each in circuits)
        return results, self.compute_vjp(circuits, cotangents, execution_config)

    def compute_jvp(self, circuits: Any, tangents: Any, execution_config: ExecutionConfig | None = None) -> Any:
        pairs = zip(circuits, tangents, strict=True)
        return tuple(jvp(self._simulator, self._jobs(each), each, given) for each, given in pairs)

    def execute_and_compute_jvp(
        self, circuits: Any, tangents: Any, execution_config: ExecutionConfig | None = None
    ) -> Any:
        results = tuple(self._execute(each, keep=True) for each in circuits)
        return results, self.compute_jvp(circuits, tangents, execution_config)

    def _jobs(self, circuit: Any) -> JobBatch:
        return self._simulator.prepare(circuit, self.wires)

    def _execute(self, circuit: Any, *, keep: bool) -> Any:
        jobs = self._jobs(circuit)
        results = [self._sample(job, circuit, keep) for job in jobs.samples]
        return results[0] if jobs.size is None else _stacked(results)

    def _sample(self, job: Job, circuit: Any, keep: bool) -> Any:
        state = self._simulator.state(job, keep=keep)
        if circuit.shots:
            return sampled(self._simulator, job, circuit, state, self._rng)
        found = analytic(self._simulator, job, circuit.measurements, state)
        return found[0] if len(found) == 1 else tuple(found)


@transform
def expand_batches(tape: Any, *, execution_config: ExecutionConfig) -> Any:
    """A tape for each sample of a batch that the device does not run as it is."""
    if not any(map(batched_parameters, tape.operations)) or _runs_batch(tape, execution_config):
        return (tape,), null_postprocessing
    return broadcast_expand(tape)


def _runs_batch(tape: Any, config: ExecutionConfig) -> bool:
    """Whether the device runs a batch as it is: without shots, where only angles are batched, and where PennyLane can
    use the derivatives. It multiplies Jacobians with respect to numbers only; products are the device's own."""
    if tape.shots or not all(map(is_batchable, tape.operations)):
        return False
    if config.gradient_method != "adjoint":
        return True
    if config.interface not in WITH_BATCHES:
        return False
    return bool(config.use_device_jacobian_product) or not _has_trainable_batch(tape)


@transform
def split_shots(tape: Any) -> Any:
    """With shots, a tape for each set of observables that can be measured together; they share the state."""
    if not tape.shots or any(isinstance(mp, SHADOWS) for mp in tape.measurements):
        return (tape,), null_postprocessing
    return split_non_commuting(tape)


def _native_and_differentiable(op: Any) -> bool:
    return is_native(op) and is_differentiable(op)


def _has_trainable_batch(tape: Any) -> bool:
    return any(qml.math.requires_grad(data) for op in tape.operations for data in batched_parameters(op))


def _stacked(results: list[Any]) -> Any:
    """The results of a batch from those of its samples: an array for each measurement, its first axis the batch."""
    if isinstance(results[0], tuple):
        return tuple(_stacked(list(each)) for each in zip(*results, strict=True))
    return np.stack(results)


def _is_expectation(mp: Any) -> bool:
    return isinstance(mp, ExpectationMP)


def _is_analytic(mp: Any) -> bool:
    return isinstance(mp, StateMeasurement)


def _is_sampled(mp: Any) -> bool:
    return isinstance(mp, (SampleMeasurement, *SHADOWS))


def _has_costate(obs: Any) -> bool:
    return observable_of(obs, {label: number for number, label in enumerate(obs.wires)}) is not None


def _dtype(c_dtype: Any) -> torch.dtype:
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    name = str(c_dtype).removeprefix("torch.") if isinstance(c_dtype, torch.dtype) else _numpy_name(c_dtype)
    if name not in names:
        raise UsageError(f"c_dtype={shown(c_dtype)}: expected np.complex64 or np.complex128")
    return names[name]


def _numpy_name(c_dtype: Any) -> str:
    try:
        return np.dtype(c_dtype).name
    except TypeError:
        return ""
