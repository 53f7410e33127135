"""The plans of `verify --plan all`, and the table of their verdicts, printed as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.plan.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from unisono.verify.compare import Verdict, WorstDeviation

from collections.abc import Iterator
from itertools import product


def plans_for(ranks: int, experts: bool = False) -> list[Plan]:
    """Every way to multiply the axes to `ranks`, each with what applies to it: ZeRO stages, sp, both kinds of cp, ep
    where the model has experts; and, where one axis takes all ranks, its schedules, microbatches and recomputation."""
    return list(dict.fromkeys(_shapes(ranks, experts)))


def _shapes(ranks: int, experts: bool) -> Iterator[Plan]:
    for dp, tp, pp in product(range(ranks, 0, -1), repeat=3):
        if ranks % (dp * tp * pp):
            continue
        plain = Plan(dp=dp, tp=tp, pp=pp, cp=ranks // (dp * tp * pp), microbatches=2 * pp if pp > 1 else 1)
        yield plain
        if tp > 1:
            yield plain.but(sequence=True)
        if plain.cp > 1:
            yield plain.but(context="ulysses")
        for stage in (1, 2, 3) if dp * plain.cp > 1 else ():
            yield plain.but(zero=stage)
        for part in range(2, dp + 1) if experts else ():
            if dp % part == 0:
                yield plain.but(ep=part)
    yield from _alone(ranks)


def _alone(ranks: int) -> Iterator[Plan]:
    yield Plan(dp=ranks, microbatches=2)
    yield Plan(dp=ranks, recompute="full")
    yield Plan(dp=ranks, recompute="selective")
    yield Plan(dp=ranks, recompute="attention")
    if ranks > 1:
        pipeline = Plan(pp=ranks, microbatches=2 * ranks)
        yield pipeline.but(microbatches=1, schedule="naive")
        yield pipeline.but(schedule="f-then-b")
        yield pipeline.but(schedule="zb1p")
        yield pipeline.but(schedule="interleaved", chunks=2)
        yield pipeline.but(schedule="zbv", chunks=2)


# What stands over the columns, in two lines; and in one line where the screen is narrow.
_WIDE = (
    ("initial", "parameters"),
    ("", "loss"),
    ("", "gradients"),
    ("", "parameters"),
    ("", "buffers"),
    ("optimizer", "state"),
)
_NARROW = ("init", "loss", "grads", "params", "bufs", "optim")
_VERDICT = 10  # columns: the length of the longest verdict


@dataclass
class PlanGrid:
    """Shows verdicts on a console; `end` shows the reasons of those that were refused, and the total."""

    console: Console
    plans: list[Plan]

    def __post_init__(self) -> None:
        self._is_wide = self.console.width >= 100
        self._widths = [max(map(len, title)) + 2 for title in _WIDE] if self._is_wide else [7] * len(_NARROW)
        room = self.console.width - sum(self._widths) - _VERDICT - 2
        self._room = max(min(max(len(str(plan)) for plan in self.plans), room), 4)
        self._verdicts: list[Verdict] = []

    def begin(self) -> None:
        if self._is_wide:
            self._line("", [title[0] for title in _WIDE], "")
        self._line("plan", [title[1] for title in _WIDE] if self._is_wide else list(_NARROW), "verdict")

    def show(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        if not verdict.ran:
            word = "[yellow]refused[/]" if verdict.refusal else "[red]FAILED[/]"
            self._line(verdict.plan, ["-"] * len(self._widths), word)
            return
        word = "[green]equivalent[/]" if verdict.equivalent else "[red]DIFFERENT[/]"
        self._line(verdict.plan, [_figure(each) for each in verdict.worst], word)
        for label, text in (("first divergence", verdict.first_divergence), ("looks like", verdict.guess)):
            if text:
                self.console.print(f"    {label}: {text}", markup=False)

    def end(self) -> None:
        self._reasons("refused", {v.plan: v.refusal for v in self._verdicts if v.refusal})
        for note in dict.fromkeys(v.note for v in self._verdicts if v.note):
            self.console.print(f"\n{note}", markup=False)
        self._reasons("failed", {v.plan: v.failure for v in self._verdicts if v.failure})
        self.console.print(total(self._verdicts))

    def _line(self, plan: str, figures: list[str], verdict: str) -> None:
        if len(plan) > self._room:  # on a line of its own, the figures below
            self.console.print(plan, markup=False)
            plan = ""
        columns = "".join(f"{figure:>{width}}" for figure, width in zip(figures, self._widths, strict=True))
        self.console.print(f"{plan:{self._room}}{columns}  {verdict}", soft_wrap=True)

    def _reasons(self, word: str, reasons: dict[str, str]) -> None:
        """Each reason once, with the plans that it holds for."""
        for reason in dict.fromkeys(reasons.values()):
            plans = [plan for plan, why in reasons.items() if why == reason]
            self.console.print(f"\n{word}: {reason}", markup=False)
            for plan in plans:
                self.console.print(f"    {plan}", markup=False)


def _figure(worst: WorstDeviation) -> str:
    if not worst.compared:
        return "none"
    return "exact" if worst.deviation == 0 else f"{worst.deviation:.0e}"


def total(verdicts: list[Verdict]) -> str:
    ran = [verdict for verdict in verdicts if verdict.ran]
    parts = [f"{sum(verdict.equivalent for verdict in ran)} of {len(ran)} plans equivalent"]
    refused = sum(bool(verdict.refusal) for verdict in verdicts)
    failed = sum(bool(verdict.failure) for verdict in verdicts)
    if refused:
        parts.append(f"{refused} refused with a reason")
    if failed:
        parts.append(f"{failed} failed")
    return ", ".join(parts)
