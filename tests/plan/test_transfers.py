"""Transfers: nothing is lost, nothing waits in a circle, on paper and between real ranks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import groupby, product

import pytest
import torch
from hypothesis import given

from tests.plan.pipelines import every_pipeline, examples, pipelines
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.plan.schedules.action import COMPUTE, Action, Lists
from unisono.plan.schedules.schedule import Schedule, forward_only, schedule
from unisono.plan.schedules.transfers import check_transfers, lower

TWIN = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


@examples(60)
@given(pipelines())
def test_lists_are_complete_and_finish_in_every_way(made: Schedule) -> None:
    for trained in (made, forward_only(made)):
        lists = lower(trained)
        check_transfers(trained, lists)
        check_counts(trained, lists)
        assert finishes_with_buffers(lists)
        assert finishes_with_batches(lists)


def check_counts(made: Schedule, lists: Lists) -> None:
    """As many of each as there are microbatches that cross from rank to rank, and each end names the other."""
    crossings = sum(a != b for a, b in zip(made.placement, made.placement[1:], strict=False)) * made.microbatches
    counted = Counter(action.kind for actions in lists for action in actions)
    assert counted["SEND_F"] == counted["RECV_F"] == crossings
    assert counted["SEND_B"] == counted["RECV_B"] == (crossings if made.backward else 0)
    for rank, actions in enumerate(lists):
        for action in actions:
            if action.kind in TWIN:
                kind, step = TWIN[action.kind]
                assert Action(kind, action.stage + step, action.microbatch, rank) in lists[action.peer]
            assert (action.peer is None) == (action.kind in COMPUTE)


def finishes_with_buffers(lists: Lists) -> bool:
    """A SEND returns at once; a RECV takes the oldest message of its peer, which must be the one it expects."""
    wires: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    left = [deque(actions) for actions in lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions:
                action = actions[0]
                if action.kind in TWIN:
                    kind, step = TWIN[action.kind]
                    wires[rank, action.peer].append(Action(kind, action.stage + step, action.microbatch, rank))
                elif action.kind not in COMPUTE:
                    if not wires[action.peer, rank]:
                        break
                    assert wires[action.peer, rank].popleft() == action
                actions.popleft()
                moved = True
    return not any(left)


def finishes_with_batches(lists: Lists) -> bool:
    """Neighbouring transfers are posted together, and all of them must meet their other end before a rank goes on."""
    left = [deque(tuple(run) for _, run in groupby(actions, lambda a: a.kind in COMPUTE)) for actions in lists]
    open_ends: list[set[Action]] = [set() for _ in lists]  # posted, not met
    posted = [False] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, runs in enumerate(left):
            if runs and not posted[rank]:
                open_ends[rank] = {action for action in runs[0] if action.kind not in COMPUTE}
                posted[rank] = moved = True
            for action in [a for a in open_ends[rank] if a.kind in TWIN]:
                kind, step = TWIN[action.kind]
                other_end = Action(kind, action.stage + step, action.microbatch, rank)
                if other_end in open_ends[action.peer]:
                    open_ends[rank].remove(action)
                    open_ends[action.peer].remove(other_end)
                    moved = True
            if posted[rank] and not open_ends[rank]:
                runs.popleft()
                posted[rank] = False
                moved = True
    return not any(left)


def test_a_check_finds_what_is_wrong() -> None:
    made = schedule("1f1b", 2, 2)
    first, second = lower(made)
    assert [str(action) for action in first[:4]] == ["0F0", "0SEND_F0", "0F1", "0SEND_F1"]
    wrong = {
        "compute something else": (first[1:], second),
        "sends 0F0 before it is there": ((first[1], first[0], *first[2:]), second),
        "rank 1 runs 1F0 without 0F0": (first, (second[1], second[0], *second[2:])),
        "deadlock: rank 0 at 0SEND_F1": (first, tuple(a for a in second if str(a) != "1RECV_F1")),
        "deadlock: rank 0 at 0SEND_F1; rank 1 at 1RECV_F0": (
            (first[0], first[2], first[3], first[1], *first[4:]),
            second,
        ),
    }
    for message, lists in wrong.items():
        with pytest.raises(AssertionError, match=message):
            check_transfers(made, lists)


def test_the_obvious_order_would_deadlock() -> None:
    """Send what is done, receive what is needed next: in 1F1B two neighbours then send to each other at once."""
    made = schedule("1f1b", 2, 3)
    lists = []
    for actions in lower(made):
        receives = {(a.kind[-1], a.stage, a.microbatch): a for a in actions if a.kind.startswith("RECV")}
        sends = {(a.kind[-1], a.stage, a.microbatch): a for a in actions if a.kind.startswith("SEND")}
        obvious = [(receives.get(a[:3]), a, sends.get(a[:3])) for a in actions if a.kind in COMPUTE]
        lists.append(tuple(a for three in obvious for a in three if a is not None))
    assert finishes_with_buffers(tuple(lists))
    with pytest.raises(AssertionError, match="deadlock: rank 0 at 0SEND_F1; rank 1 at 1SEND_B0"):
        check_transfers(made, tuple(lists))


def test_one_rank_transfers_nothing() -> None:
    for made in every_pipeline(1, 4):
        assert lower(made) == made.actions


# Between real ranks: a pipeline of arithmetic. Stage s maps x to 2x + s going forward and g to 3g + s going back.
LENGTH = 1 << 15  # float64 numbers: 256 KiB, more than transports take without a rendezvous


class Worker:
    """Runs one rank's list; `way` is how transfers are made: blocking, posted, or in batches. No tags."""

    def __init__(self, comm: Communicator, made: Schedule, way: str) -> None:
        self.comm, self.made, self.way = comm, made, way
        self.here: dict[Action, torch.Tensor] = {}  # results, by the action that made them
        self.pending: dict[Action, Handle] = {}
        self.sent: list[Handle] = []

    def run(self, actions: tuple[Action, ...]) -> None:
        for computes, run in groupby(actions, lambda a: a.kind in COMPUTE):
            if computes:
                for action in run:
                    self.compute(action)
            elif self.way == "batches":
                self.exchange(list(run))
            else:
                for action in run:
                    self.transfer(action)
        for handle in self.sent:
            handle.wait()

    def compute(self, action: Action) -> None:
        kind, stage, microbatch, _ = action
        needs = self.made.needs(action)
        for need in needs:
            if need in self.pending:
                self.pending.pop(need).wait()
        if kind == "F":
            x = self.here[needs[0]] if needs else torch.full((LENGTH,), float(microbatch), dtype=torch.float64)
            self.here[action] = 2 * x + stage
        elif kind != "W":
            g = self.here[needs[1]] if len(needs) > 1 else self.here[needs[0]]
            self.here[action] = 3 * g + stage

    def result(self, action: Action) -> Action:
        """Whose result a transfer carries."""
        back = self.made.backward[0] if self.made.backward else "B"
        kind, stage = {
            "SEND_F": ("F", action.stage),
            "RECV_F": ("F", action.stage - 1),
            "SEND_B": (back, action.stage),
            "RECV_B": (back, action.stage + 1),
        }[action.kind]
        return Action(kind, stage, action.microbatch)

    def transfer(self, action: Action) -> None:
        result = self.result(action)
        if action.kind.startswith("SEND"):
            handle = self.comm.isend(self.here[result], action.peer)
            self.sent.append(handle)
        else:
            self.here[result] = torch.empty(LENGTH, dtype=torch.float64)
            handle = self.pending[result] = self.comm.irecv(self.here[result], action.peer)
        if self.way == "blocking":
            handle.wait()
            self.sent.clear()
            self.pending.clear()

    def exchange(self, transfers: list[Action]) -> None:
        sends = [(self.here[self.result(a)], a.peer) for a in transfers if a.kind.startswith("SEND")]
        recvs = []
        for action in transfers:
            if action.kind.startswith("RECV"):
                self.here[self.result(action)] = torch.empty(LENGTH, dtype=torch.float64)
                recvs.append((self.here[self.result(action)], action.peer))
        self.comm.exchange(sends, recvs)


WAYS = ("blocking", "posted", "batches")


def work(comm: Communicator, listed: list[Schedule]) -> list[dict[str, float]]:
    """What the rank's F, B and I gave, by name, for each schedule in each way."""
    found = []
    for made, way in product(listed, WAYS):
        if comm.rank >= made.ranks:
            found.append({})
            continue
        worker = Worker(comm, made, way)
        worker.run(lower(made)[comm.rank])
        assert all(bool((tensor == tensor[0]).all()) for tensor in worker.here.values())
        found.append({str(a): worker.here[a][0].item() for a in made.actions[comm.rank] if a.kind != "W"})
    return found


def expected(made: Schedule) -> dict[str, float]:
    values: dict[str, float] = {}
    for microbatch in range(made.microbatches):
        x = float(microbatch)
        for stage in range(made.stages):
            x = values[f"{stage}F{microbatch}"] = 2 * x + stage
        for kind in made.backward[:1]:
            for stage in reversed(range(made.stages)):
                x = values[f"{stage}{kind}{microbatch}"] = 3 * x + stage
    return values


@pytest.mark.thorough
def test_between_real_ranks(ranks4: RankPool) -> None:
    listed = [*every_pipeline(4, 6), schedule("1f1b", 2, 5), forward_only(schedule("zbv", 4, 3))]
    for (made, way), *parts in zip(product(listed, WAYS), *ranks4.run(work, listed), strict=True):
        values: dict[str, float] = {}
        for part in parts:
            values |= part
        assert values == expected(made), (made.name, way)
