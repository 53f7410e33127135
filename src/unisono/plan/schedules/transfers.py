"""The transfers of a schedule, written out between the actions that compute.

Whatever passes from a stage on one rank to a stage on another is one SEND there and one RECV here. Where to put
them so that ranks never wait for each other in a circle?

All actions and transfers are put into *one* order, by the time at which they happen when the schedule is played, and
each rank's list is that order with everything left out that is not the rank's own. A transfer, being one event of the
one order, thus stands in both ranks' lists between the same neighbours. That cannot deadlock: take the first event
of the order that has not happened; both its ranks have done all they had before it, so both stand at it. The proof
holds if a SEND returns at once (buffered), if it waits for its RECV (rendezvous), and if transfers that follow one
another in a list are posted together as a batch. Messages between two ranks are received in the order in which they
were sent, so they need no tags.

A RECV stands where its message is expected, which can be before actions that do not need it. A runtime loses nothing
by that if it posts RECV without waiting and waits when the action that needs the message starts.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.plan.schedules.action import COMPUTE, Action, Lists
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.schedules.timeline import timeline


class _Event(NamedTuple):
    """Something that happens in the one order of all ranks: `time` first, then transfers before actions."""

    time: float
    computes: bool
    rank: int  # of what computes, or of the sender
    number: int  # of the action on that rank
    actions: tuple[tuple[int, Action], ...]  # what stands for it in which rank's list


def lower(schedule: Schedule) -> Lists:
    """The schedule's lists with the transfers in between, in an order that cannot deadlock."""
    events = []
    for rank, spans in enumerate(timeline(schedule).spans):
        for number, (action, start, end) in enumerate(spans):
            events.append(_Event(start, True, rank, number, ((rank, action),)))
            if transfer := _transfer(schedule, action):
                events.append(_Event(end, False, rank, number, transfer))
    lists: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for event in sorted(events):
        for rank, action in event.actions:
            lists[rank].append(action)
    return tuple(map(tuple, lists))


def _transfer(schedule: Schedule, action: Action) -> tuple[tuple[int, Action], ...]:
    """The SEND of an action's result and its RECV, each with its rank; nothing if the result stays where it is."""
    kind, stage, microbatch, _ = action
    forward = kind == "F"
    target = stage + 1 if forward else stage - 1
    if kind == "W" or not 0 <= target < schedule.stages:
        return ()
    rank, peer = schedule.placement[stage], schedule.placement[target]
    if rank == peer:
        return ()
    send = Action("SEND_F" if forward else "SEND_B", stage, microbatch, peer)
    receive = Action("RECV_F" if forward else "RECV_B", target, microbatch, rank)
    return (rank, send), (peer, receive)


def check_transfers(schedule: Schedule, lists: Lists) -> None:
    """Raise AssertionError unless the lists are the schedule's, deliver what it needs, and finish under rendezvous.

    Rendezvous, where a SEND waits until its RECV is reached, is the strictest way to run them: lists that finish
    under it finish with buffered and with batched transfers too.
    """
    if tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in lists) != schedule.actions:
        raise AssertionError(f"the lists compute something else than schedule {schedule.name}")
    position = [0] * schedule.ranks
    here: list[set[Action]] = [set() for _ in lists]  # the results that each rank has, its own or received
    able = list(range(schedule.ranks))
    while able:
        rank = able.pop()
        while action := _head(lists, position, rank):
            if action.kind in COMPUTE:
                _compute(schedule, action, rank, here[rank])
            else:
                peer = action.peer if action.peer is not None else rank
                facing = _head(lists, position, peer)
                if facing is None or not _meet(schedule, (rank, action), (peer, facing), here):
                    break
                position[peer] += 1
                able.append(peer)
            position[rank] += 1
    stuck = [f"rank {r} at {a}" for r in range(schedule.ranks) if (a := _head(lists, position, r))]
    if stuck:
        raise AssertionError(f"the transfers of schedule {schedule.name} deadlock: {'; '.join(stuck)}")


def _head(lists: Lists, position: list[int], rank: int) -> Action | None:
    return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None


def _compute(schedule: Schedule, action: Action, rank: int, here: set[Action]) -> None:
    for need in schedule.needs(action):
        if need not in here:
            raise AssertionError(f"schedule {schedule.name}: rank {rank} runs {action} without {need}")
    here.add(action)


def _meet(schedule: Schedule, one: tuple[int, Action], two: tuple[int, Action], here: list[set[Action]]) -> bool:
    """Whether two ranks stand at the two ends of one transfer; if so, deliver."""
    if not one[1].kind.startswith("SEND"):
        one, two = two, one
    (sender, send), (receiver, receive) = one, two
    for kind in ("F", *schedule.backward[:1]):
        result = Action(kind, send.stage, send.microbatch)
        if _transfer(schedule, result) == ((sender, send), (receiver, receive)):
            if result not in here[sender]:
                raise AssertionError(f"schedule {schedule.name}: rank {sender} sends {result} before it is there")
            here[receiver].add(result)
            return True
    return False
