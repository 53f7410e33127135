"""Tries random models under random plans: each pair must give the result of one device, or be refused in one sentence.

    python tools/fuzz.py --minutes 5                 # a quick look
    python tools/fuzz.py --pairs 2000 --seed 7       # models 7000000, 7000001, ...
    python tools/fuzz.py --only tp --save faults/    # plans with tp; the models of faults as files
    python tools/fuzz.py --again log.jsonl           # the pairs that were faults in this log
    python tools/fuzz.py --self-check --minutes 5    # plants faults: the self-check must stop what verify finds wrong
    python tools/fuzz.py --own-loop --minutes 5      # pairs that are equivalent, in a loop of one's own
    python tools/fuzz.py --replay 7000023            # one model again, with its source; 7000023/2: its plan number 2

Exits 1 if a pair was wrong (it ran, and its result is not that of one device) or raw (any other error, a hang or a
crash), or if a planted fault was missed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import own_loops  # noqa: E402
import planted_faults  # noqa: E402
from random_models import FAMILIES, Drawn, job  # noqa: E402
from random_plans import plans  # noqa: E402

from tests.pairs import EQUIVALENT, KINDS, Outcome, Pairs, agreed, answered  # noqa: E402
from tests.ranks import RemoteError  # noqa: E402
from unisono.parallel.task import Task  # noqa: E402
from unisono.verify.training_record import TrainingRecord  # noqa: E402

MODELS_OF_A_SEED = 1_000_000
PLANS_OF_A_MODEL = 5


class Pair(NamedTuple):
    model: int
    number: int  # of the plan among the model's
    plan: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.number}"


def main() -> int:
    options = _options()
    if options.replay:
        return _replay(options)
    if options.self_check:
        return _check_self_check(options)
    counts: collections.Counter[str] = collections.Counter()
    by_axis: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with Pairs(options.timeout) as ranks:
        for pair, outcome, seconds in _tried(ranks, options):
            if pair is None:
                counts["unfit models"] += 1
                if time.monotonic() > deadline:
                    break
                continue
            counts[outcome.kind] += 1
            by_axis[_axes(pair.plan)][outcome.kind] += 1
            _note(options, pair, outcome, seconds)
            total = sum(counts[kind] for kind in KINDS)
            if time.monotonic() > deadline or total >= options.pairs:
                break
    _summary(counts, by_axis)
    return 1 if counts["wrong"] or counts["raw"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=0, help="stop after so many minutes")
    add("--pairs", type=int, default=0, help="stop after so many pairs (default: 2000, or what --minutes allows)")
    add("--seed", type=int, default=0)
    add("--only", default="", metavar="WORD", help="plans that contain this word, such as tp or zero=3")
    add("--family", choices=FAMILIES, help="models of this family")
    add("--replay", default="", metavar="MODEL[/PLAN]", help="try the pairs of one model again and print its source")
    add("--plan", default="", help="with --replay: this plan instead of the model's")
    add("--again", type=Path, metavar="FILE", help="try the pairs that were faults in this log")
    add("--log", type=Path, metavar="FILE", help="append a line of JSON for each pair")
    add("--save", type=Path, metavar="FOLDER", help="write the models of faults as files")
    add("--self-check", action="store_true", help="plant a fault into each pair: does the self-check stop it?")
    add("--own-loop", action="store_true", help="train pairs that are equivalent in a loop of one's own, too")
    add("--timeout", type=float, default=60, metavar="S", help="seconds after which a pair hangs")
    options = parser.parse_args()
    options.pairs = options.pairs or (10**9 if options.minutes else 2000)
    return options


# ---- pairs -----------------------------------------------------------------------------------------------------------


def load(source: str) -> Task:
    """The task of a model's source. Run anew for each pair: nothing that it caches is another's."""
    module = ModuleType("random_job")
    sys.modules["random_job"] = module
    exec(compile(source, "random_job.py", "exec"), module.__dict__)
    return module.task  # type: ignore[no-any-return]


def _tried(ranks: Pairs, options: argparse.Namespace) -> Iterator[tuple[Any, Outcome, float]]:
    faults = _faults(options.again) if options.again else None
    seeds = range(options.seed * MODELS_OF_A_SEED, (options.seed + 1) * MODELS_OF_A_SEED)
    for model in seeds if faults is None else faults:
        drawn = job(model, options.family)
        source = drawn.text
        reference = _reference(ranks, source)
        if reference is None:
            yield None, Outcome(EQUIVALENT), 0.0
            continue
        for pair in _pairs(model, drawn, options.only) if faults is None else faults[model]:
            began = time.monotonic()
            outcome = ranks.outcome(load, source, pair.plan, reference)
            if options.own_loop and outcome.kind == EQUIVALENT and own_loops.suits(pair.plan):
                outcome = _in_own_loop(ranks, source, pair.plan, reference)
            yield pair, outcome, time.monotonic() - began


def _in_own_loop(ranks: Pairs, source: str, plan: str, reference: TrainingRecord) -> Outcome:
    answers = ranks.answers(plan, own_loops.outcome, load, source, plan, pickle.dumps(reference))
    return agreed([answered(answer) for answer in answers])


def _faults(log: Path) -> dict[int, list[Pair]]:
    """The pairs of a log that were faults, by model."""
    found: dict[int, list[Pair]] = collections.defaultdict(list)
    for line in map(json.loads, log.read_text().splitlines()):
        if Outcome(line["kind"]).is_fault:
            model, number = map(int, line["pair"].split("/"))
            found[model].append(Pair(model, number, line["plan"]))
    return found


def _pairs(model: int, drawn: Drawn, only: str = "") -> list[Pair]:
    return [Pair(model, *each) for each in enumerate(plans(model, PLANS_OF_A_MODEL, drawn.traits, only))]


def _reference(ranks: Pairs, source: str) -> TrainingRecord | None:
    """None: torch itself cannot train this model, or not to finite numbers."""
    try:
        record = ranks.reference(load, source)
    except RemoteError:
        return None
    return record if all(abs(loss) < 1e6 for loss in record.losses) else None


def _replay(options: argparse.Namespace) -> int:
    model, _, number = options.replay.partition("/")
    drawn = job(int(model), options.family)
    source = drawn.text
    print(source)
    pairs = _pairs(int(model), drawn, options.only)
    if options.plan:
        pairs = [Pair(int(model), 0, options.plan)]
    elif number:
        pairs = [pairs[int(number)]]
    with Pairs(options.timeout) as ranks:
        reference = _reference(ranks, source)
        if reference is None:
            print("torch itself cannot train this model")
            return 1
        outcomes = [ranks.outcome(load, source, pair.plan, reference) for pair in pairs]
        if options.own_loop:
            outcomes = [_in_own_loop(ranks, source, pair.plan, reference) for pair in pairs]
    for pair, outcome in zip(pairs, outcomes, strict=True):
        print(f"{pair.name} {pair.plan}: {outcome.kind} {outcome.text}")
    return 1 if any(outcome.is_fault for outcome in outcomes) else 0


def _check_self_check(options: argparse.Namespace) -> int:
    """One fault after the other in pairs that are equivalent without it."""
    counts: collections.Counter[str] = collections.Counter()
    faults = list(planted_faults.FAULTS)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with Pairs(options.timeout) as ranks:
        for pair, outcome, _ in _tried(ranks, options):
            if pair is None or outcome.kind != EQUIVALENT:
                continue
            source, fault = job(pair.model, options.family).text, faults[sum(counts.values()) % len(faults)]
            answers = ranks.answers(pair.plan, planted_faults.judge, load, source, pair.plan, fault)
            output = {"raw" if answer is None or not answer[0] else answer[1] for answer in answers}
            kind = output.pop() if len(output) == 1 else "ranks disagree"
            counts[kind] += 1
            _note_fault(options, pair, fault, kind, answers)
            if time.monotonic() > deadline or sum(counts.values()) >= options.pairs:
                break
    print(f"{sum(counts.values())} pairs with a planted fault: {dict(counts)}")
    return 1 if set(counts) - {planted_faults.CAUGHT, planted_faults.HARMLESS} else 0


def _note_fault(options: argparse.Namespace, pair: Pair, fault: str, kind: str, answers: list[Any]) -> None:
    if options.log:
        with options.log.open("a") as file:
            file.write(json.dumps({"pair": pair.name, "plan": pair.plan, "fault": fault, "kind": kind}) + "\n")
    if kind not in (planted_faults.CAUGHT, planted_faults.HARMLESS):
        last = [str(answer and answer[1]).strip().splitlines()[-1][:150] for answer in answers]
        print(f"{kind.upper()} {pair.name} --plan {pair.plan}, {fault}: {last}", flush=True)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _note(options: argparse.Namespace, pair: Pair, outcome: Outcome, seconds: float) -> None:
    if options.log:
        line = {
            "pair": pair.name,
            "plan": pair.plan,
            "kind": outcome.kind,
            "text": outcome.text,
            "s": round(seconds, 2),
        }
        with options.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
    if not outcome.is_fault:
        return
    last = outcome.text.strip().splitlines()[-1:] or [""]
    print(f"{outcome.kind.upper():5} {pair.name} --plan {pair.plan}: {last[0][:200]}", flush=True)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        file = options.save / f"model_{pair.model}_{pair.number}.py"
        reported = "\n".join(f"# {line}" for line in outcome.text.strip().splitlines()[-12:])
        file.write_text(f"{job(pair.model, options.family).text}\n# {outcome.kind} under {pair.plan}\n{reported}\n")


def _axes(plan: str) -> str:
    return "+".join(
        word.split("=")[0]
        for word in plan.split(",")
        if word.split("=")[0] in ("dp", "tp", "pp", "cp", "ep", "sp") or word.startswith("zero")
    )


def _summary(counts: collections.Counter[str], by_axis: dict[str, collections.Counter[str]]) -> None:
    print(f"{'plan':20}" + "".join(f"{kind:>12}" for kind in KINDS))
    for axes in sorted(by_axis):
        print(f"{axes:20}" + "".join(f"{by_axis[axes][kind]:12}" for kind in KINDS))
    print(f"{'all':20}" + "".join(f"{counts[kind]:12}" for kind in KINDS))
    print(
        f"{sum(counts[kind] for kind in KINDS)} pairs; {counts['unfit models']} models that torch itself cannot train"
    )


if __name__ == "__main__":
    sys.exit(main())
