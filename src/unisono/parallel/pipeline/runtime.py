"""The pipeline at work: each rank carries out its list of actions.

The list is the schedule's, with the transfers written out by `plan.schedules.transfers`; nothing is decided here. What
an action leaves behind, another one picks up: by (stage, microbatch), in one of four dicts.

    messages    what a stage gets from the one before: made by RECV_F (or F on this same rank), used by F
    passes      a microbatch between F and its backward
    outgoing    what F hands on, until SEND_F; what a backward hands back, until SEND_B
    gradients   what a stage gets from the one after: made by RECV_B (or a backward on this same rank), used by B or I

Receives are posted where they stand in the list and waited for by the action that needs them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.pipeline.backward import Arrival, Pass
from unisono.parallel.pipeline.message import Key, MessageForm, TensorForm, kind_of
from unisono.parallel.pipeline.stage import Stage
from unisono.parallel.pipeline.transfers import Delivery, Transfers
from unisono.plan.schedules import schedule as schedules
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.schedules.transfers import lower

Loss = Callable[[Any, int], torch.Tensor]  # (outputs, number of the microbatch) -> its part of the loss
Around = Callable[[Action], contextlib.AbstractContextManager[Any]]
Place = tuple[int, int]  # stage, microbatch


class PipelineRuntime:
    """Runs this rank's stages of a pipeline.

    `comm` joins the pipeline's ranks. `around(action)` gives a context for everything that an action computes: the
    scope of the microbatch's random numbers, for example. With split_backward=False the schedules with halved backwards
    do all of it in the first half; that is right for layers that are costly to run backward twice, such as
    recomputed ones.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        comm: Communicator,
        loss: Loss | None = None,
        *,
        around: Around | None = None,
        split_backward: bool = True,
    ) -> None:
        if comm.size != schedule.ranks:
            raise UsageError(f"the schedule is for {schedule.ranks} pipeline ranks, but {comm.size} are given")
        numbers = tuple(stage.number for stage in stages)
        if numbers != schedule.stages_of(comm.rank):
            raise UsageError(
                f"rank {comm.rank} of the pipeline has stages {list(numbers)}, but its schedule places "
                f"{list(schedule.stages_of(comm.rank))} there; split the model with the same schedule"
            )
        self.stages = {stage.number: stage for stage in stages}
        self.schedule = schedule
        self.comm = comm
        self.loss = loss
        self.around = around or (lambda action: contextlib.nullcontext())
        self.split_backward = split_backward
        self.peaks: dict[int, int] = {}  # stage -> the most microbatches that it kept at once in the last call
        self.forms: dict[int, dict[Key, MessageForm]] = {number: {} for number in self.stages}  # of messages received
        self._lists: dict[tuple[str, int], tuple[Action, ...]] = {}

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline that computes the loss."""
        return self.schedule.placement[-1]

    def step(self, microbatches: Sequence[Any]) -> torch.Tensor:
        """Forward and backward over the inputs of all microbatches; the sum of their losses, on every rank.

        Gradients are added to what the parameters have. Those of tied parameters are not summed between ranks yet.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise UsageError(
                f"the schedule {self.schedule.name} was made for {self.schedule.microbatches} microbatches, "
                f"but {len(microbatches)} were given"
            )
        with torch.enable_grad():
            return self._total(self._execute(self.schedule, microbatches))

    def evaluate(self, microbatches: Sequence[Any]) -> torch.Tensor:
        """The sum of the losses, on every rank, without gradients. Any number of microbatches will do."""
        with torch.no_grad():
            return self._total(self._execute(self._forward_only(len(microbatches)), microbatches))

    def predict(self, microbatches: Sequence[Any]) -> list[Any]:
        """The model's output for each microbatch, on every rank."""
        with torch.no_grad():
            execution = self._execute(self._forward_only(len(microbatches)), microbatches, keep_outputs=True)
            return [self._shared(execution.outputs.get(number)) for number in range(len(microbatches))]

    def forget(self) -> None:
        """Watch and announce messages again, as after freezing parameters. All ranks of the pipeline call it."""
        for stage in self.stages.values():
            stage.forget()
            self.forms[stage.number].clear()

    def _execute(self, schedule: Schedule, microbatches: Sequence[Any], keep_outputs: bool = False) -> Execution:
        key = (schedule.name, schedule.microbatches)
        if key not in self._lists:
            self._lists[key] = lower(schedule)[self.comm.rank]
        execution = Execution(self, schedule, microbatches, keep_outputs)
        execution.run(self._lists[key])
        self.peaks = dict(execution.peaks)
        return execution

    def _forward_only(self, microbatches: int) -> Schedule:
        made = self.schedule
        if made.microbatches != microbatches:
            name = "f-then-b" if made.name == "naive" else made.name
            made = schedules.schedule(name, made.ranks, microbatches, made.chunks)
        return schedules.forward_only(made)

    def _total(self, execution: Execution) -> torch.Tensor:
        device = next(iter(self.stages.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in execution.losses:
            total += part
        return self.comm.broadcast(total, self.last_rank)

    def _shared(self, output: Any) -> Any:
        """The last rank's output, on every rank."""
        has_it = self.comm.rank == self.last_rank
        forms = tree_map(lambda leaf: TensorForm.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)
        leaves, spec = tree_flatten(self.comm.broadcast_object(forms, self.last_rank))
        mine = tree_leaves(output) if has_it else leaves
        device = next(iter(self.stages.values())).device
        for number, form in enumerate(leaves):
            if isinstance(form, TensorForm):
                tensor = mine[number].contiguous() if has_it else form.empty(device)
                leaves[number] = self.comm.broadcast(tensor, self.last_rank)
        return tree_unflatten(leaves, spec)


class Execution:
    """One run through a list of actions."""

    def __init__(
        self, runtime: PipelineRuntime, schedule: Schedule, microbatches: Sequence[Any], keep_outputs: bool
    ) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._inputs = microbatches
        self._kinds = [kind_of(inputs) for inputs in microbatches]
        self._keep_outputs = keep_outputs
        self._post = Transfers(runtime.comm)
        self._messages: dict[Place, tuple[Delivery, MessageForm]] = {}
        self._passes: dict[Place, Pass] = {}
        self._outgoing: dict[Place, list[torch.Tensor]] = {}
        self._sent_forms: dict[Place, MessageForm] = {}
        self._new_forms: set[Place] = set()
        self._gradients: dict[Place, Delivery] = {}
        self._kept: Counter[int] = Counter()
        self.peaks: Counter[int] = Counter()
        self.losses: list[torch.Tensor] = []
        self.outputs: dict[int, Any] = {}
        self._do: dict[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": self._backward_weights,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }

    def run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do[action.kind](action)
        self._post.settle()

    # ---- computing -----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, index = self._runtime.stages[action.stage], (action.stage, action.microbatch)
        self._kept[stage.number] += 1
        self.peaks[stage.number] = max(self.peaks[stage.number], self._kept[stage.number])
        arrival = self._arrive(index) if not stage.is_first else None
        with self._runtime.around(action):
            received = (arrival.tensors, arrival.form) if arrival is not None else ((), None)
            outcome = stage.forward(self._inputs[action.microbatch], *received)
            ends = outcome.tensors if not stage.is_last else self._finish(outcome.output, action.microbatch)
            if arrival is not None:
                arrival.tensors = []
        if self._schedule.backward:
            self._passes[index] = Pass.of(arrival, ends)
        else:
            self._kept[stage.number] -= 1
        if not stage.is_last:
            assert outcome.form is not None
            self._hand_on(index, [tensor.detach() for tensor in outcome.tensors], outcome.form, outcome.is_new)

    def _arrive(self, index: Place) -> Arrival:
        delivery, form = self._messages.pop(index)
        return Arrival(delivery.wait(), form)

    def _finish(self, output: Any, microbatch: int) -> list[torch.Tensor]:
        """The last stage's end: the loss."""
        if self._keep_outputs:
            self.outputs[microbatch] = output
            return []
        if self._runtime.loss is None:
            raise UsageError("the pipeline was given no loss; pass loss= to PipelineRuntime, or use predict")
        part = self._runtime.loss(output, microbatch)
        if not isinstance(part, torch.Tensor) or part.numel() != 1:
            shape = tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
            raise UsageError(f"the loss of a microbatch must be a tensor with one number, not {shape}")
        self.losses.append(part.detach())
        return [part.reshape(())]

    def _hand_on(self, index: Place, tensors: list[torch.Tensor], form: MessageForm, is_new: bool) -> None:
        stage, microbatch = index
        self._sent_forms[index] = form
        if stage + 1 in self._runtime.stages:
            self._messages[stage + 1, microbatch] = (Delivery(tensors, []), form)
        else:
            self._outgoing[index] = tensors
            if is_new:
                self._new_forms.add(index)

    def _backward(self, action: Action) -> None:
        self._run_backward(action, full=True)
        self._drop(action)

    def _backward_inputs(self, action: Action) -> None:
        self._run_backward(action, full=not self._runtime.split_backward)

    def _backward_weights(self, action: Action) -> None:
        with self._runtime.around(action):
            self._passes[action.stage, action.microbatch].backward_weights()
        self._drop(action)

    def _run_backward(self, action: Action, full: bool) -> None:
        index = (action.stage, action.microbatch)
        one = self._passes[index]
        grads = self._incoming(index)
        with self._runtime.around(action):
            if full:
                one.backward(grads)
            else:
                one.backward_inputs(grads)
        if one.arrival is not None:
            back = one.arrival.take_grads()
            if action.stage - 1 in self._runtime.stages:
                self._gradients[action.stage - 1, action.microbatch] = Delivery(back, [])
            else:
                self._outgoing[index] = back

    def _incoming(self, index: Place) -> list[torch.Tensor | None]:
        """The gradients of a pass's roots."""
        if index in self._gradients:
            return list(self._gradients.pop(index).wait())
        return [None] * len(self._passes[index].roots)

    def _drop(self, action: Action) -> None:
        del self._passes[action.stage, action.microbatch]
        self._kept[action.stage] -= 1

    # ---- transfers -----------------------------------------------------------------------------------------------

    def _send_forward(self, action: Action) -> None:
        index = (action.stage, action.microbatch)
        if index in self._new_forms:
            self._post.send_form(self._sent_forms[index], _peer(action))
        self._post.send(self._outgoing.pop(index), _peer(action))

    def _receive_forward(self, action: Action) -> None:
        known, kind = self._runtime.forms[action.stage], self._kinds[action.microbatch]
        if kind not in known:
            known[kind] = self._post.receive_form(_peer(action))
        form = known[kind]
        device = self._runtime.stages[action.stage].device
        self._messages[action.stage, action.microbatch] = (
            self._post.receive(form.tensors, _peer(action), device),
            form,
        )

    def _send_backward(self, action: Action) -> None:
        self._post.send(self._outgoing.pop((action.stage, action.microbatch)), _peer(action))

    def _receive_backward(self, action: Action) -> None:
        index = (action.stage, action.microbatch)
        device = self._runtime.stages[action.stage].device
        self._gradients[index] = self._post.receive(self._sent_forms.pop(index).differentiable, _peer(action), device)


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer
