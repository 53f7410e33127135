"""What ZeRO's ranks say beside the ops of a plan's program, as the very code that runs on them deals it out.

    zero=1, 2   gradients are reduce-scattered in buckets, the optimizer has a rank's rows, and its results are gathered
    zero=3      a unit's parameters are gathered before its forward and again before its backward, whose gradients are
                reduce-scattered; in between a rank has its rows only

Stage 3 is shown as two lines around the ops of each unit. The forward reads them on the way down: gather, ops, free.
The backward reads them on the way up: gather, ops, reduce-scatter and free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.graph.beside import Aside, Beside
from unisono.graph.lowering import Lowered, Move
from unisono.graph.source import calls_of
from unisono.graph.talk import Talk
from unisono.mesh.mesh import Mesh
from unisono.parallel.bucket import summed_axes
from unisono.parallel.pieces import PieceBucket
from unisono.parallel.task import Task
from unisono.parallel.units import Unit
from unisono.parallel.zero import Zero
from unisono.plan.plan import Plan
from unisono.train.held_model import held_model
from unisono.train.seats import SeatedMesh

_FLAG = torch.uint8  # a parameter's, in the question which have gradients
_ONCE = "once a step"


def with_zero(task: Task, plan: Plan, parts: Sequence[Lowered], blocks: Sequence[str], rank: int) -> list[Lowered]:
    """The programs of this rank's stages with what ZeRO does in them; `blocks`: the names of the pipeline's, if any."""
    if plan.copies > 1:
        raise UsageError(
            f"plan {plan}: what ZeRO sends within groups of {plan.shard} data ranks and between them is not shown yet; "
            f"use --plan {plan.but(shard=0)}"
        )
    _require_even(plan, parts)
    return _ZeroShown(task, plan, parts, blocks, rank).parts()


def _require_even(plan: Plan, parts: Sequence[Lowered]) -> None:
    trace, notes = parts[0].trace, parts[0].assignment.notes
    for node, name in trace.parameters.items():
        if node in notes:
            raise UsageError(
                f"plan {plan}: {name}: {notes[node]}; so what ZeRO sends of it cannot be shown either: "
                f"use --plan {plan.but(zero=0, shard=0, offload=False)}"
            )


class _ZeroShown:
    def __init__(self, task: Task, plan: Plan, parts: Sequence[Lowered], blocks: Sequence[str], rank: int) -> None:
        self._plan = plan
        self._parts = parts
        self._rank = rank
        self._mesh = parts[0].mesh
        model = held_model(task, parts, rank)
        self._names = {id(module): name for name, module in model.named_modules()}
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._first = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        # A Seat has of a communicator what dealing out looks at.
        mesh = cast(Mesh, SeatedMesh(self._mesh, rank))
        in_pipeline: dict[str, Any] = {}
        if plan.pp > 1:
            in_pipeline = {"units": self._blocks_here(model, blocks), "users": self._users(), "tied": self._tied()}
        self._zero = Zero(model, mesh, task.optimizer, plan.zero, **in_pipeline)

    def _blocks_here(self, model: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
        paths = {op.path for part in self._parts for op in part.trace.ops if op.name in _computed(part)}
        here = [name for name in blocks if any(f"{path}.".startswith(f"{name}.") for path in paths)]
        return [model.get_submodule(name) for name in here]

    def _users(self) -> dict[str, tuple[int, ...]]:
        """Of a parameter here, the stages here that use it."""
        using: dict[str, list[int]] = {name: [] for name in self._first.values()}
        for part in self._parts:
            assert part.stage is not None
            for name in {self._name_of(part, node) for node in part.given} - {""}:
                using[name].append(part.stage)
        return {name: tuple(stages) for name, stages in using.items()}

    def _tied(self) -> set[str]:
        return {self._name_of(part, node) for part in self._parts for node in part.tied}

    # ---- what is said --------------------------------------------------------------------------------------------

    def parts(self) -> list[Lowered]:
        keeping = "kept here" if self._plan.zero == 3 else "optimized here"
        made = [replace(part, beside=Beside(sums=[], kept=self._kept(part), keeping=keeping)) for part in self._parts]
        for part in made:
            for unit in self._zero.units or ():
                self._show(unit, part)
            part.beside.sums = [self._scattered(bucket) for bucket in self._of_stage(part.stage)]
        last = made[-1].beside
        assert last.sums is not None
        if self._plan.zero < 3:
            of_stages = {id(bucket) for part in made for bucket in self._of_stage(part.stage)}
            is_once = self._plan.zero == 1 or self._plan.pp > 1
            rest = [bucket for bucket in self._zero.buckets if id(bucket) not in of_stages]
            last.sums += [self._scattered(bucket, is_once) for bucket in rest]
            last.updates = [
                self._gathered(bucket, f"what it made of {_count(bucket)}", True) for bucket in self._zero.buckets
            ]
        last.sums += self._questions()
        return made

    def _of_stage(self, stage: int | None) -> Sequence[PieceBucket]:
        return () if stage is None else self._zero.of_stage.get(stage, ())

    def _kept(self, part: Lowered) -> dict[str, tuple[int, ...]]:
        """By a parameter's first placeholder."""
        kept: dict[str, tuple[int, ...]] = {}
        seen = set()
        for node in part.given:
            name = self._name_of(part, node)
            if name in self._zero.pieces and name not in seen:
                seen.add(name)
                kept[node] = self._zero.pieces[name].local_shape
        return kept

    def _name_of(self, part: Lowered, node: str) -> str:
        """The parameter's, of several the first."""
        return self._first.get(part.trace.parameters.get(node, ""), "")

    def _show(self, unit: Unit, part: Lowered) -> None:
        """The unit's lines around its ops in a program."""
        name = self._names[id(unit.module)]
        span = self._span(unit, name, part)
        if span is None or not unit.buckets:
            return
        count = sum(len(bucket.parameters) for bucket in unit.buckets)
        what = f"{name or 'what is in no block'}: {count} parameters"
        gathers = tuple(self._gathered(bucket, _count(bucket)) for bucket in unit.buckets)
        scatters = tuple(self._scattered(bucket) for bucket in unit.buckets)
        first, last = span
        key = name or "_".join(map(str, ("rest", *(unit.stages or ()))))
        begin = Aside(f"gather_{key}", f"gather({what})", forward=gathers, backward=scatters)
        end = Aside(f"free_{key}", f"free({what}), gathered again in the backward", backward=gathers)
        outer = name == ""  # the root's lines are around those of all blocks
        before, after = part.beside.before.setdefault(first, []), part.beside.after.setdefault(last, [])
        before.insert(0 if outer else len(before), begin)
        after.insert(len(after) if outer else 0, end)

    def _span(self, unit: Unit, name: str, part: Lowered) -> tuple[str, str] | None:
        """The first and the last instruction while the unit's parameters are whole."""
        names = [each.name for each in part.instructions]
        if unit.stages is not None:
            return (names[0], names[-1]) if part.stage in unit.stages else None
        path = f"model.{name}" if name else "model"
        inside = [op.name for op in part.trace.ops if op.name in _computed(part) and calls_of(op.node, path)]
        if not inside:
            if part.stage is None:
                raise UsageError(f"plan {self._plan}: {name} has parameters, but is not called as a module: use zero=2")
            return None
        self._require_one_run(part, name, path, inside)
        start = names.index(inside[0])
        while start and isinstance(part.instructions[start - 1], Move):
            start -= 1
        return names[start], inside[-1]

    def _require_one_run(self, part: Lowered, name: str, path: str, inside: list[str]) -> None:
        calls = [call for op in inside for call in calls_of(part.trace.node(op), path)]
        if name and any(re.search(r"@\d+$", call) for call in calls):
            raise UsageError(
                f"plan {self._plan}: {name} runs several times in a forward, and how often it is gathered is not "
                f"shown; use --plan {self._plan.but(zero=2)}"
            )

    def _scattered(self, bucket: PieceBucket, is_once: bool = False) -> Talk:
        talk = self._talk("reduce_scatter", bucket, bucket.size, bucket.chunk, bucket.dtype)
        return self._worded(talk, f"sum, gradients of {_count(bucket)}", is_once)

    def _gathered(self, bucket: PieceBucket, words: str, is_once: bool = False) -> Talk:
        talk = self._talk("all_gather", bucket, bucket.chunk, bucket.size, bucket.parameters[0].dtype)
        return self._worded(talk, words, is_once)

    def _questions(self) -> Iterator[Talk]:
        """Which parameters have a gradient on any rank: asked in every group."""
        groups: dict[int, list[PieceBucket]] = {}
        for bucket in self._zero.buckets:
            groups.setdefault(id(bucket.comm), []).append(bucket)
        for buckets in groups.values():
            count = sum(len(bucket.parameters) for bucket in buckets)
            talk = self._talk("all_reduce", buckets[0], count, count, _FLAG)
            yield self._worded(talk, f"max, which of {count} parameters have gradients", True)

    def _talk(self, kind: str, bucket: PieceBucket, before: int, after: int, dtype: torch.dtype) -> Talk:
        axes, ranks = summed_axes(bucket.parameters[0], self._mesh), bucket.comm.ranks
        share = max(before, after) * (len(ranks) - 1) / len(ranks) * (2 if kind == "all_reduce" else 1)
        return Talk(kind, axes, ranks, round(share * dtype.itemsize), (before,), (after,), "", True)

    def _worded(self, talk: Talk, words: str, is_once: bool) -> Talk:
        """In a step of several microbatches, what is said once is told from what is said for each."""
        often = f", {_ONCE}" if is_once and self._plan.microbatches > 1 else ""
        return replace(talk, detail=words + often)


def _computed(part: Lowered) -> set[str]:
    return {each.name for each in part.computes}


def _count(bucket: PieceBucket) -> str:
    return f"{len(bucket.parameters)} parameter{'s' if len(bucket.parameters) > 1 else ''}"
