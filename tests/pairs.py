"""Pairs of a task and a plan, tried on ranks that stay up: is the plan equivalent, refused, wrong, or did it crash?

    pairs = Pairs()
    record = pairs.reference(load, name)                    # load(name) gives the task, on any rank
    outcome = pairs.outcome(load, name, "dp=2,tp=2", record)

The reference is trained in a process of its own, so that nothing a plan leaves behind (in a cache, in a patched module)
can reach it. A crash or a hang ends the ranks; the next pair gets new ones.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from tests.ranks import RankPool, RemoteError
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.compare import Verdict
from unisono.verify.training_record import TrainingRecord, plain_record
from unisono.verify.verify import verify_here

EQUIVALENT, REFUSED, WRONG, RAW = "equivalent", "refused", "wrong", "raw"
KINDS = (EQUIVALENT, REFUSED, WRONG, RAW)
STEPS = 2
SHORTEST_REASON = 25  # characters
PASSED_ON = "failed while the plan was applied"  # of a refusal that passes on another rank's error
PAIRS_BETWEEN_MEETINGS = 8  # every pair makes process groups anew, each of which is three threads of gloo

Load = Callable[[Any], Task]


@dataclass(frozen=True)
class Outcome:
    kind: str  # one of KINDS
    text: str = ""  # why it was refused; what is wrong; the error

    @property
    def is_fault(self) -> bool:
        return self.kind in (WRONG, RAW)


_NO_ANSWER = Outcome(RAW, "no answer: it hangs or has died")


class Pairs:
    def __init__(self, timeout: float = 60) -> None:
        """timeout: seconds for one pair."""
        self._timeout = timeout
        self._pools: dict[int, RankPool] = {}
        self._tried = 0

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pool in self._pools.values():
            if not pool.closed:
                pool.close()

    def reference(self, load: Load, name: Any) -> TrainingRecord:
        """The record of one device. RemoteError: the task itself cannot be trained."""
        return pickle.loads(self._ranks(1).run(_reference, load, name)[0])  # type: ignore[no-any-return]

    def outcome(self, load: Load, name: Any, plan: str, reference: TrainingRecord | None) -> Outcome:
        """Tries one pair. Without a reference the task is trained for one beside rank 0."""
        ranks = self._ranks(Plan.parse(plan).world)
        answers = ranks.run_each(_try, load, name, plan, reference and pickle.dumps(reference))
        outcome = agreed([answered(answer) for answer in answers])
        if outcome.kind == RAW and not ranks.closed:
            ranks.close()
        return outcome

    def answers(self, plan: str, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any] | None]:
        """What a function of a rank answers on each of the plan's ranks; see RankPool.run_each."""
        return self._ranks(Plan.parse(plan).world).run_each(function, *args)

    def _ranks(self, size: int) -> RankPool:
        self._tried += 1
        pool = self._pools.get(size)
        if pool is None or pool.closed:
            pool = self._pools[size] = RankPool(size, "gloo", self._timeout)
        elif self._tried % PAIRS_BETWEEN_MEETINGS == 0:
            with contextlib.suppress(RemoteError):
                pool.shed_groups()
        return pool


def answered(answer: tuple[bool, Any] | None) -> Outcome:
    """What one rank says."""
    if answer is None:
        return _NO_ANSWER
    came_to_a_result, value = answer
    return value if came_to_a_result else Outcome(RAW, value)


def agreed(answers: list[Outcome]) -> Outcome:
    """What all ranks say. Where some refuse and others wait for them, a launched job ends with that refusal."""
    refusals = [answer for answer in answers if answer.kind == REFUSED]
    if refusals and all(answer in (*refusals, _NO_ANSWER) for answer in answers):
        return _checked(refusals[0])
    kinds = {answer.kind for answer in answers}
    if len(kinds) > 1 or RAW in kinds:
        reported = {f"{answer.kind}: {answer.text}": rank for rank, answer in reversed(list(enumerate(answers)))}
        return Outcome(
            RAW, "\n".join(f"rank {rank} {text}" for text, rank in sorted(reported.items(), key=itemgetter(1)))
        )
    return answers[0]


def _checked(refusal: Outcome) -> Outcome:
    """The refusal, if it is a sentence about the job, and no raw error of a rank that was passed on."""
    text = refusal.text.strip()
    if len(text) < SHORTEST_REASON or "\n" in text or PASSED_ON in text:
        return Outcome(RAW, f"a refusal that is not one sentence: {text}")
    return refusal


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def _reference(_: Communicator, load: Load, name: Any) -> bytes:
    """The record as bytes: tensors that a connection is given travel through shared memory, and need their sender."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.dumps(plain_record(load(name), STEPS, torch.float64))


def _try(comm: Communicator, load: Load, name: Any, plan: str, reference: bytes | None) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = pickle.loads(reference) if reference and comm.rank == 0 else None
            return _judged(verify_here(comm, load(name), Plan.parse(plan), STEPS, plain=plain))
    except UsageError as error:
        return Outcome(REFUSED, str(error))
    except Exception:
        return Outcome(RAW, traceback.format_exc())
    finally:
        gc.collect()  # trainers hold models in cycles


def _judged(verdict: Verdict) -> Outcome:
    if verdict.equivalent:
        return Outcome(EQUIVALENT)
    if verdict.refusal:
        return Outcome(REFUSED, verdict.refusal)
    if verdict.failure:
        return Outcome(RAW, verdict.failure)
    far = ", ".join(f"{each.kind} {each.deviation:.1e} ({each.name})" for each in verdict.worst if each.deviation)
    return Outcome(WRONG, f"{far}; first divergence: {verdict.first_divergence}; looks like: {verdict.guess}")
