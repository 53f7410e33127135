"""The RandomState that a thread draws from: the innermost one of whose blocks it is in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from unisono.torch_patches import runs_in

if TYPE_CHECKING:
    from unisono.mesh.random.state import RandomState

_entered: list[tuple[RandomState, int]] = []  # with the thread


def active_state() -> RandomState | None:
    """The state from which this thread draws now: the last one that it has entered, also on threads of autograd."""
    for state, thread in reversed(_entered):
        if runs_in(thread):
            return state
    return None


def entered_states() -> list[RandomState]:
    """All states in whose blocks this thread is."""
    return [state for state, thread in _entered if runs_in(thread)]


def enter_state(state: RandomState) -> None:
    _entered.append((state, threading.get_ident()))


def leave_state(state: RandomState) -> None:
    # The last entry of it, whichever thread leaves: backwards of two models end in the order in which they began.
    del _entered[max(number for number, (other, _) in enumerate(_entered) if other is state)]
