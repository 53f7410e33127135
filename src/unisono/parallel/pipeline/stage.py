"""A stage: some consecutive blocks of a model, run by the model's own forward.

No model has to be rewritten for the pipeline. A stage calls the user's forward on its microbatch's inputs, with a gate
before every block that decides what the block does:

    blocks before the stage      are skipped: the gate returns meta tensors of the right form
    the first block of the stage gets the message from the stage before instead of the meta tensors
    the blocks of the stage      run
    the first block after it     is never entered: its arguments are the message to the next stage, and a private
                                 exception ends the forward; the last stage has none and runs to the model's end

Since inputs are on every rank, whatever the model makes of them (masks, positions, rotary tables, plain Python values)
is made on every stage and need not travel. What travels is what depends on parameters; the first pass over microbatches
of a new kind watches which arguments do (`dependence`), and also that nothing without values finds its way into the
result: a model that carries something round its blocks, instead of through them, is refused and not run wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from unisono.errors import UsageError
from unisono.parallel.blocks import Blocks
from unisono.parallel.inputs import call
from unisono.parallel.pipeline.dependence import Dependence
from unisono.parallel.pipeline.message import (
    Key,
    MessageForm,
    TensorForm,
    form_of_result,
    indices_of,
    is_placeholder,
    kind_of,
    meta_result,
)
from unisono.parallel.pipeline.off_stage import OffStage
from unisono.parallel.pipeline.skips import Calls, Label, Skips
from unisono.parallel.zero.units import without_views


@dataclass
class StageOutput:
    """What came of a forward: the model's output on the last stage, else the message to the next one."""

    output: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)
    form: MessageForm | None = None
    is_new: bool = False  # the form has not been seen before: the next stage does not know it yet


class _HandOver(BaseException):
    """Ends a forward at the entry of a block; not an Exception, so that no model catches it."""


@dataclass
class _Run:
    """One forward under way."""

    received: Sequence[torch.Tensor]
    received_form: MessageForm | None
    known: MessageForm | None  # the form of the message, if it has been watched before
    watching: bool
    device: torch.device
    flow: Dependence = field(default_factory=Dependence)  # depends on parameters, placeholders or not
    placeholders: Dependence = field(default_factory=Dependence)  # depends on what is not here
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)  # id of a meta argument -> what was received
    kept: list[Any] = field(default_factory=list)  # the placeholder arguments, so that no other tensor gets their id
    results: list[Any] = field(default_factory=list)  # the forms of what the blocks returned that ran
    calls: Calls | None = None  # outside the blocks, where tensors are carried round them
    message: tuple[Any, Any] | None = None


class Stage:
    """Stage `number` of a pipeline: the blocks `span` of the model, on this rank."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        number: int,
        span: range,
        off_stage: OffStage,
        skips: Skips | None = None,
    ) -> None:
        """skips: what the model carries round its blocks, where that is known."""
        skips = skips or Skips()
        self.model = model
        self.number = number
        self.span = span
        self.is_first = span.start == 0
        self.is_last = span.stop == len(blocks.modules)
        self._blocks = blocks
        self._off_stage = off_stage
        self._gates = [_Gate(block, index, self) for index, block in enumerate(blocks.modules)]
        self._forms: dict[Key, MessageForm | None] = {}  # of the messages handed on, by kind of microbatch
        self._run: _Run | None = None
        self._skips_out = tuple(sorted(skips.into(span.stop)))
        self._skips = frozenset(self._skips_out) | skips.into(span.start)
        self._is_written = skips.writes
        self._writes: bool | None = None  # whether the forward writes to its inputs; the first one shows
        self.run_model: Callable[[Any], Any] = lambda inputs: call(model, inputs)

    def __repr__(self) -> str:
        return f"Stage({self.number}, blocks {self.span.start} to {self.span.stop - 1})"

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The stage's blocks."""
        return self._blocks.modules[self.span.start : self.span.stop]

    @property
    def device(self) -> torch.device:
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def forward(
        self, inputs: Any, received: Sequence[torch.Tensor] = (), received_form: MessageForm | None = None
    ) -> StageOutput:
        """Run on one microbatch: its inputs, and (but for the first stage) the message of the stage before."""
        self._off_stage.follow()
        kind = kind_of(inputs)
        inputs, versions = self._writable(inputs)
        watching = kind not in self._forms
        run = _Run(received, received_form, self._forms.get(kind), watching, self.device)
        if self._skips or watching:
            run.calls = Calls(self._skips)
            if self._skips:
                run.calls.replaced, run.calls.kept = run.replaced, run.kept
            run.calls.received = {} if received_form is None else received_form.carried(received)
            if watching:
                run.calls.require_value = partial(self._require_value, run.placeholders)
        output, ended = None, False
        with self._running(run):
            try:
                output = self.run_model(inputs)
                ended = True
            except _HandOver:
                pass
        if self._writes is None:
            self._writes = any(leaf._version != version for leaf, version in versions)
        if ended != self.is_last:
            self._refuse(f"{self._name(self.span.stop)} was never run, but the forward ended")
        if ended:
            output = output if run.calls is None else run.calls.real(output)
            if watching:
                self._require_real(run, output, "the model's output")
                self._forms[kind] = None
            return StageOutput(self._apart(output))
        assert run.message is not None
        leaves = self._travelling(run)
        form = self._form(run, leaves) if run.known is None else run.known
        tensors = [leaves[indices[0]] for indices in form.positions]
        if watching:
            self._forms[kind] = form
        elif tuple(map(TensorForm.of, tensors)) != form.tensors:
            self._refuse(
                f"the tensors for {self._name(self.span.stop)} were announced as {form.tensors}, but now are "
                f"{tuple(map(TensorForm.of, tensors))}; if parameters were frozen or freed, call forget() on all ranks"
            )
        return StageOutput(None, self._apart(tensors), form, watching)

    def _apart(self, value: Any) -> Any:
        """Without views of parameters, which ZeRO 3 frees before a message is sent or an output is used."""
        return without_views(value, self.model.parameters())

    def _writable(self, inputs: Any) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
        """A copy of the inputs if the forward writes to them, as each stage runs it; and their versions before."""
        if self._writes is False:
            return inputs, []
        inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)
        return inputs, [(leaf, leaf._version) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]

    def _travelling(self, run: _Run) -> list[Any]:
        """The flattened arguments of the next stage's first block, and what is carried round the blocks to it."""
        made = run.calls.made if run.calls is not None else {}
        carried = [made.get(label) for label in self._skips_out]
        return [*tree_leaves(run.message), *(run.replaced.get(id(tensor), tensor) for tensor in carried)]

    def forget(self) -> None:
        """Watch and announce messages again, as after freezing parameters."""
        self._forms.clear()

    @contextlib.contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        indices = self._blocks.holders(self.model)
        for (holder, key), gate in zip(indices, self._gates, strict=True):
            holder[key] = gate
        self._run, self._off_stage.is_running = run, True
        try:
            with contextlib.ExitStack() as modes:
                if run.watching:
                    run.flow.mark(list(self.model.parameters()))
                    run.flow.mark(list(self._off_stage.parameters()))
                    run.placeholders.mark(list(self._off_stage.parameters()))
                    run.placeholders.mark(
                        [parameter for parameter in self.model.parameters() if is_placeholder(parameter)]
                    )
                    run.flow.mark(list(run.received))
                    modes.enter_context(run.flow)
                    modes.enter_context(run.placeholders)
                if run.calls is not None:
                    modes.enter_context(run.calls)
                yield
        finally:
            self._run, self._off_stage.is_running = None, False
            for (holder, key), block in zip(indices, self._blocks.modules, strict=True):
                holder[key] = block

    # ---- what the gates do ---------------------------------------------------------------------------------------

    def pass_gate(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        assert run is not None
        if run.calls is None:
            return self._passed(run, index, block, args, kwargs)
        run.calls.is_inside = True
        result = self._passed(run, index, block, args, kwargs)
        run.calls.is_inside = False
        run.calls.label_block(index, result)
        return result

    def _passed(self, run: _Run, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index < self.span.start:
            return self._skip(run, index)
        if self.span.start > 0:
            args, kwargs = self._replace(run, index, args, kwargs)
        if run.watching:
            self._require_real(run, (args, kwargs), f"the argument of {self._name(index)}")
        if index == self.span.stop:
            run.message = (args, kwargs)
            raise _HandOver
        result = block(*args, **kwargs)
        if run.watching:
            run.flow.mark(result)
            run.results.append(form_of_result(result))
        return result

    def _skip(self, run: _Run, index: int) -> Any:
        assert run.received_form is not None
        result = meta_result(run.received_form.results[index], run.device, self._is_written)
        if run.watching:
            run.placeholders.mark(result)
            run.flow.mark(result)
        return result

    def _replace(
        self, run: _Run, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put what was received instead of what is without values: in the first block by position, later by
        identity."""
        leaves, spec = tree_flatten((args, kwargs))
        if index == self.span.start:
            form = run.received_form
            assert form is not None
            if len(leaves) != form.arguments:
                self._refuse(f"{self._name(index)} got {len(leaves)} arguments, but {form.arguments} were announced")
            for tensor, indices in zip(run.received, form.positions, strict=True):
                for position in indices:
                    if position < form.arguments:
                        self._note(run, leaves[position], tensor)
                        leaves[position] = tensor
                    else:
                        self._note_carried(run, form.labels[position - form.arguments], tensor)
        else:
            leaves = [run.replaced.get(id(leaf), leaf) for leaf in leaves]
        return tree_unflatten(leaves, spec)

    @staticmethod
    def _note(run: _Run, placeholder: Any, tensor: torch.Tensor) -> None:
        run.kept.append(placeholder)
        if run.replaced.setdefault(id(placeholder), tensor) is not tensor:
            del run.replaced[id(placeholder)]  # two tensors look alike: it is found without values later

    def _note_carried(self, run: _Run, label: Label, tensor: torch.Tensor) -> None:
        own = run.calls.made.get(label) if run.calls is not None else None
        if own is None or own.shape != tensor.shape:
            self._refuse(
                f"{tuple(tensor.shape)} numbers are carried round the blocks to {self._name(self.span.start)}, but the "
                "forward takes another way on this stage; pass the tensor through the blocks"
            )
        self._note(run, own, tensor)

    def _form(self, run: _Run, leaves: Sequence[Any]) -> MessageForm:
        travels = [isinstance(leaf, torch.Tensor) and leaf in run.flow for leaf in leaves]
        indices = indices_of(leaves, travels)
        if not indices:
            self._refuse(f"nothing that depends on parameters reaches {self._name(self.span.stop)}")
        tensors = tuple(TensorForm.of(leaves[positions[0]]) for positions in indices)
        before = run.received_form.results if run.received_form is not None else ()
        arguments = len(leaves) - len(self._skips_out)
        return MessageForm(tensors, indices, arguments, (*before, *run.results), self._skips_out)

    # ---- what is refused -----------------------------------------------------------------------------------------

    def _require_real(self, run: _Run, tree: Any, what: str) -> None:
        if not any(isinstance(leaf, torch.Tensor) and leaf in run.placeholders for leaf in tree_leaves(tree)):
            return
        paths = [keystr(path) for path, leaf in tree_flatten_with_path(tree)[0] if leaf in run.placeholders]
        self._refuse(
            f"{what} ({', '.join(path or 'itself' for path in paths)}) depends on layers of other stages by a way that "
            "leads round the blocks; pass it through the blocks, as an argument or a result, or keep it in one stage"
        )

    def _require_value(self, placeholders: Dependence, tensor: torch.Tensor) -> None:
        if tensor in placeholders:
            self._refuse(
                "the forward reads the value of a tensor that depends on layers of other stages; pass that tensor "
                "through the blocks, as an argument or a result, and read it there"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"pipeline: stage {self.number} of {type(self.model).__name__}: {why}")

    def _name(self, index: int) -> str:
        return self._blocks.name(index) if index < len(self._blocks.modules) else "the end of the model"


class _Gate(nn.Module):
    """Replaces a block while a stage runs; to the model it looks like the block."""

    def __init__(self, block: nn.Module, index: int, stage: Stage) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self._index = index
        self._stage = stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage.pass_gate(self._index, self.block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.block, name)
