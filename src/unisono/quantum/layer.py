"""A circuit as a layer of a network.

    layer = uq.Layer(circuit, observables=[uq.Z(0), "X1 X2"], comm=comm)
    out = layer(x)                  # (batch, observables); out.sum().backward() is the adjoint method

Over a communicator, every rank calls the layer with the same batch and gets the full output and the full gradient.
Ranks share each state; where the batch is large enough and their number is no power of two, groups of them share the
samples. With a mesh, its axes define who shares what:

    layer = uq.Layer(circuit, "Z0", mesh=uni.Mesh((2, 4), ("dp", "qubits")), batch_axis="dp", state_axis="qubits")

A circuit that measures in the middle, resets, or has gates under conditions is simulated with deferred measurement
(circuit/deferred.py): outputs and gradients are those of the mean over all outcomes. One with channels is simulated as
a density matrix (noise/density_gradients.py), exactly. With shots=1000, outputs are estimates from shots
(gradients/shot_estimates.py), and gradients come from shots by the parameter-shift rule.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.errors import MissingPackageError, UsageError
from unisono.quantum.arguments import require_comm, require_count, require_device, require_dtype, shown
from unisono.quantum.circuit.channels import Channel, StrengthChannel
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.deferred import deferred
from unisono.quantum.circuit.parameter import finite_vector, require_seed
from unisono.quantum.distributed.exchange import DEFAULT_CHUNK
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.distributed.memory import require_room
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.distributed.rank_groups import Grid, RankGroup, share, share_grid
from unisono.quantum.gradients.adjoint import gradients
from unisono.quantum.gradients.layer_outputs import Amplitudes, Output, output_of
from unisono.quantum.gradients.parameter_shift import finite_differences, parameter_shift, separated
from unisono.quantum.gradients.shot_estimates import ShotEstimates
from unisono.quantum.kernels.runner import require_kernel
from unisono.quantum.noise.density_gradients import MixedOutput, channels_apart, mixed_gradients
from unisono.quantum.noise.doubled import doubled
from unisono.quantum.observables.observable import observables as parsed
from unisono.quantum.schedule.logical_qubits import narrowest
from unisono.quantum.schedule.schedule import Schedule
from unisono.quantum.state import NORM_TOLERANCE, State, device_of, nodes_of
from unisono.torch_compat import is_functorch_wrapped
from unisono.torch_patches import original

METHODS = ("adjoint", "parameter-shift", "finite-diff")
MOST_SHOTS = 1 << 31
MOST_SPARE = 4  # wires that shots may add for deferred measurements; beyond, each shot is a trajectory
Start = torch.Tensor | None  # the amplitudes that a sample begins with, in the order of the circuit's wires
KEPT = 256 << 20  # bytes of final states that a forward keeps for its backward; beyond, circuits are run again


class Layer(nn.Module):
    """A circuit as a module: (batch, features) -> (batch, observables), or amplitudes or probabilities.

    Its parameter `weights` is trainable: the circuit's weight(i).

    Args:
        circuit: The circuit.
        observables: Of which expectation values are returned.
        comm: The ranks that share a state.
        dtype: Of amplitudes.
        diff: "adjoint" (the default), "parameter-shift" or "finite-diff"; with shots, "parameter-shift".
        output: "expectations", "state" or "probabilities".
        weights: Initial values; default: drawn uniformly from [0, 2 pi) with `seed`.
        device: Of states: a GPU with "cuda"; default: where the communicator's tensors are.
        kernel: That applies gates; default: the fastest that is available.
        seed: Of the initial weights and of shots.
        shots: Estimate outputs, and gradients by the parameter-shift rule, from so many shots for each basis that is
            measured. The shots of the k-th call depend on `seed` and k, not on the number of ranks; in a training step
            of unisono, on the step and the sample's global index, as dropout does.
        mesh: Ranks that share both the batch and the states.
        batch_axis: The axis of `mesh` along which samples are shared.
        state_axis: The axis of `mesh` along which states are.
    """

    def __init__(
        self,
        circuit: Circuit,
        observables: Any = (),
        comm: Communicator | None = None,
        *,
        dtype: torch.dtype = torch.complex64,
        diff: str | None = None,
        output: str = "expectations",
        weights: Any = None,
        device: torch.device | str | None = None,
        kernel: str = "auto",
        seed: int = 0,
        shots: int | None = None,
        mesh: Grid | None = None,
        batch_axis: str = "dp",
        state_axis: str = "qubits",
    ) -> None:
        super().__init__()
        require_comm(comm)
        require_dtype(dtype)
        require_kernel(kernel)
        require_circuit(circuit, "a layer")
        _check_axes(mesh, batch_axis, state_axis)
        if mesh is not None and comm is not None:
            raise UsageError("comm and mesh were both given; a mesh brings its own communicators")
        if diff is not None and (not isinstance(diff, str) or diff not in METHODS):
            raise UsageError(f"diff={diff!r}: expected one of {', '.join(METHODS)}")
        if shots is not None and diff not in (None, "parameter-shift"):
            raise UsageError(f"diff={diff!r} with shots: expected 'parameter-shift', or no diff")
        self.shots = None if shots is None else require_count("shots", shots, 1, MOST_SHOTS - 1)
        self.seed, self.calls = require_seed(seed), 0
        diff = diff or ("adjoint" if shots is None else "parameter-shift")
        self.circuit, self.comm, self.diff, self.kernel, self.dtype = circuit.copy(), comm, diff, kernel, dtype
        given = parsed(observables) if not isinstance(observables, tuple | list) or observables else ()
        self.output: Output = output_of(output, given, circuit.wires, dtype)
        if not circuit.is_unitary and isinstance(self.output, Amplitudes):
            raise UsageError(
                "a circuit that has channels or measurements has no single final state; use output='probabilities' or "
                "observables"
            )
        if shots is not None and isinstance(self.output, Amplitudes):
            raise UsageError("amplitudes cannot be estimated from shots; use output='probabilities' or observables")
        if diff == "parameter-shift" and not self.output.shiftable:
            raise UsageError("amplitudes have no parameter-shift rule; use diff='adjoint'")
        self._prepare_circuits()
        self.device = None if device is None else require_device(device)
        if (
            kernel == "auto"
            and device_of(comm, self.device).type == "cpu"
            and importlib.util.find_spec("numba") is None
        ):
            raise MissingPackageError("numba", "a quantum layer on the CPU (kernel='reference' is slow)", "quantum")
        self.features = circuit.features
        self.weights = nn.Parameter(_initial(weights, circuit, self.real_dtype, self.seed))
        self._programs: dict[tuple[int, bool, bool], QuantumProgram] = {}
        self._shares: dict[bool, RankGroup] = {}
        if mesh is not None:
            self._shares = dict.fromkeys((False, True), share_grid(mesh, self.wires, batch_axis, state_axis))
            self.comm = mesh.comm(batch_axis, state_axis)

    def _prepare_circuits(self) -> None:
        """What is simulated: the circuit and the one in which each angle is a weight of its own, in unitary form, or
        doubled for a density matrix; or both as they are, for trajectories."""
        noisy = any(isinstance(each.gate, Channel) for each in self.circuit.operations)
        by_shifts = self.shots is not None or self.diff == "parameter-shift"
        if by_shifts and any(isinstance(each.gate, StrengthChannel) for each in self.circuit.operations):
            raise UsageError(
                "a channel whose strength is a weight or a feature has no parameter-shift rule; use diff='adjoint' "
                "without shots, or give it a number"
            )
        self._circuits = [self.circuit]
        if self.diff == "parameter-shift":
            apart, self.angles = separated(self.circuit)
            self._circuits.append(apart)
        self.estimates = None
        if self.shots is not None and not isinstance(self.output, Amplitudes):
            self.estimates = ShotEstimates(self.output, self.shots)
        self.mixed: MixedOutput | None = None
        self.by_trajectories = noisy and self.shots is not None
        if noisy and self.shots is None and not isinstance(self.output, Amplitudes):
            self.mixed = MixedOutput(self.output)
            self._circuits = [doubled(each) for each in self._circuits]
        if not noisy and not self.circuit.is_unitary and not isinstance(self.output, Amplitudes):
            unitary = [deferred(each, self.output.mixed) for each in self._circuits]
            self.by_trajectories = self.shots is not None and unitary[0].wires > self.circuit.wires + MOST_SPARE
            if not self.by_trajectories:
                self._circuits = unitary

    @property
    def wires(self) -> int:
        """Of the states that are simulated: the circuit's, and those of deferred measurements; or of density matrices,
        as vectors."""
        return self._circuits[0].wires

    @property
    def real_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == torch.complex64 else torch.float64

    def forward(self, x: torch.Tensor | None = None, initial: torch.Tensor | None = None) -> torch.Tensor:
        """x: (batch, features), or (features,) for one sample, or None for a circuit without features.

        initial: 2^wires amplitudes of norm one to begin with instead of |0...0>, or (batch, 2^wires), one state for
        each sample; they may need gradients. Wire 0 is the most significant bit of their index."""
        start = None if initial is None else self._checked_initial(initial)
        if x is None:
            x = self.weights.new_zeros((1 if start is None or start.dim() == 1 else len(start), 0))
            if self.features:
                return self._refuse(x)
            return self(x, start) if start is not None and start.dim() == 2 else self(x, start)[0]
        if not isinstance(x, torch.Tensor) or x.is_complex():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise UsageError(f"input of type {kind}: expected a tensor of real numbers, (batch, {self.features})")
        if x.dim() == 1 and (start is None or start.dim() == 1):
            return self(x[None], start)[0]
        if x.dim() != 2 or x.shape[1] != self.features:
            return self._refuse(x)
        if start is not None and start.dim() == 2 and len(start) != len(x):
            raise UsageError(
                f"{len(start)} initial states for a batch of {len(x)}: expected one for each sample, or one"
            )
        if any(is_functorch_wrapped(each) for each in (self.weights, x, start) if each is not None):
            raise UsageError(
                "a quantum layer under torch.func (vmap, grad, jvp, ...): its kernels need real numbers; call it with "
                "(batch, features), which does all samples at once, and use autograd (backward, torch.autograd.grad)"
            )
        if start is not None:
            start = start.to(self.dtype).expand(len(x), -1)
        return _Evaluate.apply(self.weights, x, start, self, self._shot_keys(len(x)))

    def _checked_initial(self, initial: Any) -> torch.Tensor:
        size = 1 << self.circuit.wires
        if not isinstance(initial, torch.Tensor) or not (initial.is_complex() or initial.is_floating_point()):
            raise UsageError(f"initial={shown(initial)}: expected a tensor of {size} amplitudes, or of (batch, {size})")
        if initial.dim() not in (1, 2) or initial.shape[-1] != size:
            raise UsageError(f"initial of shape {tuple(initial.shape)}: expected ({size},) or (batch, {size})")
        if initial.requires_grad and self.mixed is not None:
            raise UsageError("initial amplitudes that need a gradient, and channels: expected one of them, not both")
        if initial.requires_grad and self.diff != "adjoint":
            raise UsageError(
                f"initial amplitudes that need a gradient, and diff={self.diff!r}: expected diff='adjoint'"
            )
        norms = torch.linalg.vector_norm(initial.detach(), dim=-1).reshape(-1)
        if not bool(((norms - 1).abs() <= NORM_TOLERANCE).all()):
            worst = norms[int((norms - 1).abs().nan_to_num(torch.inf).argmax())]
            raise UsageError(
                f"initial amplitudes of norm {worst:.6g}: expected 1; uq.amplitude_embedding divides by it"
            )
        return initial

    def _shot_keys(self, batch: int) -> np.ndarray:
        """Seeds of the shots of one call, (batch, 2)."""
        if self.shots is None:
            return np.zeros((batch, 2), dtype=np.int64)
        self.calls += 1
        if original(torch, "rand") is torch.rand:
            return np.stack([np.full(batch, self.calls), np.arange(batch)], axis=1)
        drawn = (torch.rand(batch, 2, dtype=torch.float64) * 2**53).long()  # by each sample's global index
        if self.comm is not None and self.comm.size > 1:
            drawn = self.comm.broadcast(drawn.to(self.comm.device)).cpu()
        return drawn.numpy()

    def plan(self) -> str:
        """What a forward will do: sweeps, exchanges, memory."""
        from unisono.quantum.schedule.forecast import Forecast

        return str(Forecast.of(Schedule.of(self._circuits[0], 1 << self.share(1).global_qubits), self.dtype))

    def share(self, batch: int) -> RankGroup:
        """Which ranks share a state, for a batch of this size."""
        several = require_count("batch", batch, 0) > 1
        if several not in self._shares:
            groups = self.comm.size if several and self.comm is not None else 1  # later batches may be larger
            least = narrowest(self._circuits[0].operations)
            self._shares[several] = share(self.comm, self.wires, batch=groups, narrowest=least)
        return self._shares[several]

    def run(self, given: tuple[Any, Any], ranks: RankGroup, start: Start = None, apart: bool = False) -> State:
        """The state that the circuit makes for one sample. apart: `given` has the varying angles, one by one."""
        program = self.program(ranks, apart, start is not None)
        return self.fresh(ranks, start).run(program, *_read_by(program, given))

    def evaluate(
        self, given: tuple[Any, Any], ranks: RankGroup, seed: tuple[int, ...], apart: bool, start: Start
    ) -> torch.Tensor:
        """The output for one sample, or an estimate from shots."""
        if self.estimates is not None and self.by_trajectories:
            return self.estimates.of_trajectories(self._circuits[apart], self.fresh(ranks, start), given, seed)
        state = self.run(given, ranks, start, apart)
        return self.read(state) if self.estimates is None else self.estimates.of_state(state, seed)

    def read(self, state: State) -> torch.Tensor:
        """The output for one sample, exactly."""
        return (self.mixed or self.output).read(state)

    def fresh(self, ranks: RankGroup, start: Start = None) -> State:
        """A state before the circuit, |0...0> or these amplitudes; spare wires are |0>."""
        state = State(self.wires, ranks.comm, dtype=self.dtype, device=self.device, kernel=self.kernel)
        if start is not None and self.mixed is not None:
            state.load_amplitudes(torch.outer(start, start.conj()).view(-1))
        elif start is not None:
            full = start.new_zeros((len(start), 1 << (self.wires - self.circuit.wires)))
            full[:, 0] = start
            state.load_amplitudes(full.view(-1))
        return state

    def require_gradient_room(self, ranks: RankGroup) -> None:
        """Refuse, before a forward allocates anything, what its backward would not find room for."""
        wires, device = self.wires, device_of(ranks.comm, self.device)
        what = "a state and its co-state, for gradients,"
        require_room(wires, ranks.global_qubits, self.dtype, device, DEFAULT_CHUNK, ranks.comm, what, states=2)

    def program(self, ranks: RankGroup, apart: bool = False, any_start: bool = False) -> QuantumProgram:
        """The circuit for this rank, its kernels ready. apart: with each varying angle as a weight of its own.
        any_start: from any state in the order of wires, not from |0...0>."""
        key = (ranks.global_qubits, apart, any_start)
        if key not in self._programs:
            circuit, order = self._circuits[apart], range(self.wires) if any_start else None
            schedule = Schedule.of(circuit, 1 << ranks.global_qubits, nodes=nodes_of(ranks.comm), start=order)
            made = QuantumProgram.of(schedule, ranks.comm.rank if ranks.comm else 0)
            made = made if self.mixed is None else channels_apart(made)
            axes, device = self.wires - ranks.global_qubits, device_of(ranks.comm, self.device)
            made.prepare(axes, self.dtype, device, self.kernel)
            self._programs[key] = made
        return self._programs[key]

    def extra_repr(self) -> str:
        return f"{self.circuit!r}, outputs={self.output.width}, dtype={self.dtype}, diff={self.diff!r}" + (
            f", shots={self.shots}" if self.shots is not None else ""
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        """A layer of its own over the same communicator."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        shared = ("comm", "_shares", "_programs")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.comm is not None:
            raise UsageError("a quantum layer over a communicator cannot be pickled; save its state_dict()")
        return self.__dict__

    def _refuse(self, x: torch.Tensor) -> torch.Tensor:
        raise UsageError(
            f"input of shape {tuple(x.shape)}: expected (batch, {self.features}) for the circuit's features"
        )


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, x: torch.Tensor, initial: Start, layer: Layer, keys: np.ndarray
    ) -> torch.Tensor:
        ctx.layer, ctx.keys = layer, keys
        ctx.save_for_backward(weights, x, *([] if initial is None else [initial]))
        ctx.kept = {}
        numbers, samples = _numbers(weights), _numbers(x)
        _require_finite(numbers, samples)
        ranks = layer.share(len(samples))
        room = KEPT // (torch.empty(0, dtype=layer.dtype).element_size() << layer.wires >> ranks.global_qubits)
        out = torch.zeros(len(samples), layer.output.width, dtype=layer.output.dtype)
        needed = any(ctx.needs_input_grad) and layer.diff == "adjoint"
        if needed and len(_mine(ranks, len(samples))):
            layer.require_gradient_room(ranks)
        for sample in _mine(ranks, len(samples)):
            given, start = (numbers, samples[sample]), None if initial is None else initial[sample]
            if layer.shots is not None:
                seed = (layer.seed, *keys[sample].tolist(), 0)
                out[sample] = layer.evaluate(given, ranks, seed, False, start)
                continue
            state = layer.run(given, ranks, start)
            out[sample] = layer.read(state)
            if needed and layer.mixed is None and len(ctx.kept) < max(1, room):
                ctx.kept[sample] = state
        return _gathered(out, layer, ranks).to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found = _Evaluate.gradients(ctx, gradient)
        if torch.is_grad_enabled():  # create_graph=True: what is done with the gradients may be differentiated
            found = _FirstOnly.apply(len(found), *found, gradient, *ctx.saved_tensors)
        return (*found, None, None, None)[:5]

    @staticmethod
    def gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of the weights, the samples and, if there are any, the initial amplitudes."""
        layer: Layer = ctx.layer
        weights, x, *more = ctx.saved_tensors
        numbers, samples = _numbers(weights), _numbers(x)
        ranks = layer.share(len(samples))
        found = [np.zeros(len(numbers)), np.zeros(samples.shape)]
        found += [np.zeros(each.shape, dtype=np.complex128) for each in more]
        for sample in _mine(ranks, len(samples)):
            given, start = (numbers, samples[sample]), more[0][sample] if more else None
            towards = gradient[sample].detach().cpu()
            if layer.diff == "adjoint" and layer.mixed is not None:
                program, state = layer.program(ranks, any_start=bool(more)), layer.fresh(ranks, start)
                parts = mixed_gradients(program, state, layer.mixed, towards, *given)
            elif layer.diff == "adjoint":
                state = ctx.kept.pop(sample, None) or layer.run(given, ranks, start)
                costate = layer.output.costate(state, torch.empty(0), towards)
                program = layer.program(ranks, any_start=bool(more))
                parts = gradients(program, state, costate, *given)
                if more and ctx.needs_input_grad[2]:
                    found[2][sample] = _of_initial(layer, program, costate)
            else:
                seed = (layer.seed, *ctx.keys[sample].tolist())
                parts = _by_running(layer, towards, given, ranks, seed, start)
            found[0] += parts[0]
            found[1][sample] = parts[1]
        together = torch.from_numpy(np.concatenate([each.reshape(-1).view(np.float64) for each in found]))
        if layer.comm is not None and layer.comm.size > 1:
            layer.comm.all_reduce(together)
        sizes = [each.size * each.itemsize // 8 for each in found]
        split = [
            torch.from_numpy(part.numpy().view(own.dtype).reshape(own.shape))
            for part, own in zip(together.split(sizes), found, strict=True)
        ]
        return tuple(part.to(given) for part, given in zip(split, ctx.saved_tensors, strict=True))


class _FirstOnly(torch.autograd.Function):
    """Gradients as they are, which raise when they are differentiated: torch would take them for constants."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.clone() for each in given[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise UsageError("the gradients of a quantum layer were differentiated; it has first derivatives only")


def _of_initial(layer: Layer, program: QuantumProgram, costate: State) -> np.ndarray:
    """From the co-state that was walked back to the beginning; each rank of a state reports its share of all of it."""
    costate.layout, costate.index_map = program.schedule.start, GlobalIndexMap(costate.global_qubits)
    full = costate.amplitudes().view(1 << layer.circuit.wires, -1)[:, 0]
    return (2 * full.to(torch.complex128).cpu() / (1 << costate.global_qubits)).numpy()


def _by_running(
    layer: Layer, gradient: torch.Tensor, at: tuple, ranks: RankGroup, seed: tuple[int, ...], start: Start
) -> tuple:
    """Gradients of Re <gradient, output>; every rank of a state has them in full, so each reports its share."""
    number = count(1)

    def evaluate(*numbers: np.ndarray) -> float:
        apart = len(numbers) == 1  # angles; else weights and features
        given = (numbers[0], () if apart else numbers[1])
        output = layer.evaluate(given, ranks, (*seed, next(number)), apart, start)
        return float((gradient.conj() * output).real.double().sum())

    weights, features = at[0].copy(), at[1].copy()
    if layer.diff == "parameter-shift":
        found = parameter_shift(layer.angles, evaluate, weights, features)
    else:
        step = 1e-6 if layer.dtype == torch.complex128 else 1e-3
        found = finite_differences(evaluate, weights, features, step)
    return found[0] / (1 << ranks.global_qubits), found[1] / (1 << ranks.global_qubits)


def _mine(ranks: RankGroup, batch: int) -> range:
    """The samples of this rank's group; surplus ranks have none."""
    return range(ranks.group, batch, ranks.groups) if ranks.group >= 0 else range(0)


def _gathered(out: torch.Tensor, layer: Layer, ranks: RankGroup) -> torch.Tensor:
    """Every sample's output on every rank; a group's own rank 0 sends it."""
    if layer.comm is None or (ranks.groups == 1 and layer.comm.size == 1 << ranks.global_qubits):
        return out
    if ranks.comm is not None and ranks.comm.rank:
        out.zero_()
    layer.comm.all_reduce(out)
    return out


def _read_by(program: QuantumProgram, given: tuple[Any, Any]) -> tuple[Any, Any]:
    """The weights and features that a program reads: operations that never happen are not in it."""
    return given[0][: program.schedule.weights], given[1][: program.schedule.features]


def _numbers(values: torch.Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()


def _require_finite(weights: np.ndarray, samples: np.ndarray) -> None:
    """On all ranks alike, before any group begins with its samples."""
    for what, values in (("weights", weights), ("inputs", samples)):
        if not np.isfinite(values).all():
            index = tuple(int(axis[0]) for axis in np.nonzero(~np.isfinite(values)))
            raise UsageError(
                f"the {what} of a quantum layer are {values[index]} at {list(index)}: expected finite angles"
            )


def _check_axes(mesh: Grid | None, batch_axis: str, state_axis: str) -> None:
    for name, axis, usual in (("batch_axis", batch_axis, "dp"), ("state_axis", state_axis, "qubits")):
        if not isinstance(axis, str):
            raise UsageError(f"{name}={shown(axis)}: expected the name of an axis of the mesh")
        if mesh is None and axis != usual:
            raise UsageError(f"{name}={axis!r} without a mesh: expected mesh= with such an axis, or no {name}")


def _initial(weights: Any, circuit: Circuit, dtype: torch.dtype, seed: int) -> torch.Tensor:
    if weights is None:
        generator = torch.Generator().manual_seed(seed)
        return (2 * math.pi * torch.rand(circuit.weights, generator=generator, dtype=torch.float64)).to(dtype)
    given = weights.detach() if isinstance(weights, torch.Tensor) else weights
    return torch.from_numpy(finite_vector("weights", given, circuit.weights)).to(dtype)
