"""DistributeQMachine: records the gates of a forward, and runs them on all ranks when it is measured.

Each forward is recorded anew, so a circuit may depend on the data. What is recorded is the circuit's form, in which
every angle stands for an entry of a vector: those that all samples share are the circuit's weights, those that each
sample has of its own are its features. Both vectors are stacked from the very tensors that the gates were given, so
that autograd carries the adjoint method's gradients back to wherever they came from. Circuits of one form are compiled
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch.func import functional_call

from unisono.comm.communicator import Communicator
from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import joined_if_many, world_size
from unisono.compat.vqnet.distributed.settings import Settings
from unisono.compat.vqnet.dtype import Dtype, dtype_of, kcomplex64
from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.qnn.vqc.gate import Wires
from unisono.compat.vqnet.tensor.qtensor import plain, wrapped
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.gates import CONTROLLED, gate
from unisono.quantum.circuit.parameter import Affine, feature, weight
from unisono.quantum.layer import Layer
from unisono.quantum.observables.observable import PauliSum

ADJOINT = "adjoint"
_GRAD_MODES = ("", ADJOINT)
_KEPT = 8  # compiled circuits of different forms
_TOLERANCE = {torch.complex64: 1e-5, torch.complex128: 1e-10}


def _wires_of(kind: str, wires: Any) -> tuple[int, ...]:
    """Wires as numbers: of a number, a list, an array or a tensor."""
    listed = list(wires) if getattr(wires, "ndim", 1) and hasattr(wires, "__iter__") else [wires]
    positions = tuple(position for position in map(whole_number, listed) if position is not None)
    if len(positions) != len(listed):
        raise UsageError(
            say(
                f"{kind}: wires={wires!r}; expected a whole number, or a list of them",
                f"{kind}：wires={wires!r}；应为整数，或整数列表",
            )
        )
    return positions


def _require_wires(kind: str, positions: tuple[int, ...]) -> None:
    below, controls = CONTROLLED.get(kind, (kind, 0))
    wanted = gate(below).targets + controls
    if len(positions) != wanted or len(set(positions)) != wanted:
        several = say(f"{wanted} different wires", f"{wanted} 个不同的 wire")
        different = several if wanted > 1 else say("one wire", "一个 wire")
        raise UsageError(
            say(
                f"{kind}: wires={list(positions)}; expected {different}",
                f"{kind}：wires={list(positions)}；应为{different}",
            )
        )


class DistributeQMachine(Module):
    """`num_wires` qubits whose state is sharded over all ranks; every rank records the same gates on the same batch.

    How many qubits ranks share follows from how many ranks run; `set_qr_config` checks what the program says of it.
    """

    def __init__(self, num_wires: int, dtype: Dtype = kcomplex64, grad_mode: str = "") -> None:
        super().__init__()
        if grad_mode not in _GRAD_MODES:
            raise UsageError(
                say(
                    f"DistributeQMachine: grad_mode={grad_mode!r}; expected '' or {ADJOINT!r}",
                    f"DistributeQMachine：grad_mode={grad_mode!r}；应为 '' 或 {ADJOINT!r}",
                )
            )
        self.dtype = dtype_of(dtype)
        if self.dtype not in _TOLERANCE:
            raise UsageError(
                say(
                    f"DistributeQMachine: dtype {self.dtype}; expected kcomplex64 or kcomplex128",
                    f"DistributeQMachine：dtype 为 {self.dtype}；应为 kcomplex64 或 kcomplex128",
                )
            )
        self.num_wires, self.grad_mode = num_wires, grad_mode
        self.just_defined, self.save_op_history = False, True
        self.qr_config: dict[str, int] = {}
        self._layers: dict[Any, tuple[Any, Layer]] = {}
        self.batchsize = 1
        self.circuit = Circuit(num_wires)
        self.reset_states(1)

    # ---- VQNet's settings: kept for programs that set them -------------------------------------------------------

    def set_just_defined(self, just_defined: bool) -> None:
        self.just_defined = bool(just_defined)

    def set_save_op_history_flag(self, save: bool) -> None:
        """Gates are recorded in any case."""
        self.save_op_history = bool(save)

    def set_qr_config(self, config: Mapping[str, int]) -> None:
        """{"qubit": all qubits, "global_qubit": those that ranks share}."""
        where = "DistributeQMachine, set_qr_config"
        settings = Settings(where, config, {"qubit": "all qubits", "global_qubit": "log2 of the ranks"})
        qubits, shared = settings.count("qubit"), settings.count("global_qubit", least=0)
        if qubits != self.num_wires:
            raise UsageError(
                say(
                    f"{where}: qubit={qubits}, but the machine has num_wires={self.num_wires}",
                    f"{where}：qubit={qubits}，而机器的 num_wires={self.num_wires}",
                )
            )
        if shared >= qubits:
            raise UsageError(
                say(
                    f"{where}: global_qubit={shared}; expected fewer than the {qubits} qubits",
                    f"{where}：global_qubit={shared}；应少于 {qubits} 个量子比特",
                )
            )
        ranks = world_size()
        if 2**shared != ranks:
            raise UsageError(
                say(
                    f"{where}: global_qubit={shared} is for {2**shared} ranks, but {ranks} run; give "
                    f"global_qubit={ranks.bit_length() - 1}, or start the program with unisono run -n {2**shared}",
                    f"{where}：global_qubit={shared} 需要 {2**shared} 个进程，但有 {ranks} 个；请用 "
                    f"global_qubit={ranks.bit_length() - 1}，或用 unisono run -n {2**shared} 启动程序",
                )
            )
        self.qr_config = {"qubit": qubits, "global_qubit": shared}

    # ---- recording -----------------------------------------------------------------------------------------------

    def reset_states(self, batchsize: int) -> None:
        """Begin anew, with so many samples in |0...0>."""
        if isinstance(batchsize, bool) or not isinstance(batchsize, Integral) or batchsize < 1:
            raise UsageError(
                say(
                    f"DistributeQMachine: reset_states({batchsize!r}); expected a number of samples",
                    f"DistributeQMachine：reset_states({batchsize!r})；应为样本数",
                )
            )
        self.batchsize = int(batchsize)
        self.circuit = Circuit(self.num_wires)
        self._form: list[tuple[Any, ...]] = []
        self._shared: list[torch.Tensor] = []  # angles that are the same for all samples
        self._own: list[torch.Tensor] = []  # (samples,) each

    def record(self, kind: str, wires: Wires, params: Any, use_dagger: bool) -> None:
        """Add a gate; see `qnn.vqc`."""
        positions = _wires_of(kind, wires)
        _require_wires(kind, positions)
        values, is_own = self._values(kind, params)
        kept = self._own if is_own else self._shared
        stand_for = feature if is_own else weight
        angles: list[Affine] = [stand_for(len(kept) + number) for number in range(len(values))]
        added = Circuit(self.num_wires).apply(kind, positions, *angles)
        self.circuit.compose(added.inverse() if use_dagger else added)
        kept.extend(values)
        self._form.append((kind, positions, bool(use_dagger), is_own))

    def _values(self, kind: str, params: Any) -> tuple[list[torch.Tensor], bool]:
        """A gate's angles, one after the other, and whether each sample has its own."""
        count = gate(CONTROLLED[kind][0] if kind in CONTROLLED else kind).parameters
        if params is None or not count:
            if (params is None) == (not count):
                return [], False
            if count:
                raise UsageError(
                    say(
                        f"{kind} takes {count} angles, but params is None",
                        f"{kind} 接受 {count} 个角度，而 params 为 None",
                    )
                )
            raise UsageError(
                say(f"{kind} takes no angles, but params are given", f"{kind} 不接受角度，而给出了 params")
            )
        try:
            given = plain(params) if isinstance(params, torch.Tensor) else torch.as_tensor(params, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                say(f"{kind}: params={params!r}; expected real angles", f"{kind}：params={params!r}；应为实数角度")
            ) from None
        if given.is_complex():
            raise UsageError(
                say(
                    f"{kind}: params are {given.dtype}; expected real angles",
                    f"{kind}：params 的类型为 {given.dtype}；应为实数角度",
                )
            )
        if given.numel() == count:
            return list(given.reshape(-1)), False
        if given.dim() and len(given) == self.batchsize and given.numel() == count * self.batchsize:
            return list(given.reshape(self.batchsize, count).unbind(1)), True
        raise UsageError(
            say(
                f"{kind}: params of shape {tuple(given.shape)}; expected ({count},) for all samples, or ("
                f"{self.batchsize}, {count}) with a row for each of the {self.batchsize} samples of "
                "reset_states",
                f"{kind}：params 的形状为 {tuple(given.shape)}；应为 ({count},)（对所有样本），或 ("
                f"{self.batchsize}, {count})（reset_states 的 {self.batchsize} 个样本各一行）",
            )
        )

    # ---- running -------------------------------------------------------------------------------------------------

    def measure(self, observables: tuple[PauliSum, ...]) -> torch.Tensor:
        """Expectation values of what was recorded, (samples, observables), on every rank."""
        comm = joined_if_many()
        real = torch.float32 if self.dtype == torch.complex64 else torch.float64
        home = next((each.device for each in (*self._own, *self._shared)), torch.device("cpu"))
        samples = self.batchsize if self._own else 1  # all samples are alike where none has angles of its own
        shared = torch.stack([each.to(home, real) for each in self._shared]) if self._shared else torch.zeros(0)
        own = torch.stack([each.to(home, real) for each in self._own], 1) if self._own else torch.zeros(samples, 0)
        shared, own = shared.to(home, real), own.to(home, real)
        if comm is not None and comm.size > 1:
            self._require_agreement(comm, observables, shared, own)
        layer = self._layer(observables, comm)
        values = functional_call(layer, {"weights": shared}, (own,))
        return wrapped(values.expand(self.batchsize, -1))

    def _layer(self, observables: tuple[PauliSum, ...], comm: Communicator | None) -> Layer:
        key = (tuple(self._form), tuple(map(id, observables)), comm)
        if key not in self._layers:
            if len(self._layers) == _KEPT:
                del self._layers[next(iter(self._layers))]
            zeros = [0.0] * len(self._shared)
            layer = Layer(self.circuit, list(observables), comm, dtype=self.dtype, weights=zeros)
            self._layers[key] = (observables, layer)  # which keeps their ids theirs
        return self._layers[key][1]

    def _require_agreement(
        self, comm: Communicator, observables: tuple[PauliSum, ...], shared: torch.Tensor, own: torch.Tensor
    ) -> None:
        """Refuse, on every rank, circuits or angles that differ between ranks: they share one state."""
        form = repr((self._form, [(each.terms, str(each)) for each in observables], self.batchsize))
        digest = int.from_bytes(hashlib.sha256(form.encode()).digest()[:7], "big")
        digests = [int(each) for each in comm.all_gather(torch.tensor([digest], device=comm.device))]
        different = [rank for rank, each in enumerate(digests) if each != digests[0]]
        if different:
            raise UsageError(
                say(
                    f"DistributeQMachine: rank {different[0]} recorded other gates than rank 0, or on another "
                    "number of samples; all ranks share one state, so give all of them the same batch",
                    f"DistributeQMachine：{different[0]} 号进程记录的门或样本数与 0 号进程不同；所有进程共有一"
                    "个态，请给出相同的批",
                )
            )
        values = torch.cat([shared.detach(), own.detach().reshape(-1)]).to(comm.device, torch.float64)
        if not len(values):
            return
        if not bool(values.isfinite().all()):
            raise UsageError(
                say(
                    "DistributeQMachine: an angle is nan or infinite; expected finite real angles",
                    "DistributeQMachine：有角度为 nan 或无穷；应为有限的实数",
                )
            )
        highest, lowest = comm.all_reduce(values.clone(), "max"), comm.all_reduce(values.clone(), "min")
        apart = float((highest - lowest).max())
        if not apart <= _TOLERANCE[self.dtype] * max(1.0, float(highest.max()), -float(lowest.min())):
            raise UsageError(
                say(
                    f"DistributeQMachine: angles differ between ranks by up to {apart:.3g}; all ranks share "
                    "one state, so give all of them the same batch and parameters",
                    f"DistributeQMachine：各进程的角度相差至多 {apart:.3g}；所有进程共有一个态，请给出相同的批和参数",
                )
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributeQMachine:
        """A machine with the same settings that has recorded nothing."""
        twin = memo[id(self)] = DistributeQMachine(self.num_wires, self.dtype, self.grad_mode)
        twin.just_defined, twin.save_op_history = self.just_defined, self.save_op_history
        twin.qr_config = dict(self.qr_config)
        return twin
