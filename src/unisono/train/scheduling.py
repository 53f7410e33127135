"""A torch scheduler that an engine steps after each training step."""

from __future__ import annotations

from inspect import signature
from typing import Any

from unisono.errors import CheckpointError, UsageError


def require_stepped(schedule: Any) -> Any:
    """The scheduler, if it can be stepped after each training step."""
    if not all(callable(getattr(schedule, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise UsageError(f"scheduler(optimizer) gave a {type(schedule).__name__}; expected a torch scheduler")
    needed = [each.name for each in signature(schedule.step).parameters.values() if each.default is each.empty]
    if needed:
        raise UsageError(
            f"{type(schedule).__name__}.step needs {needed[0]}, but the engine steps its scheduler after every step, "
            "with nothing to give; step this one yourself, in the on_epoch of a callback"
        )
    return schedule


def state_of(schedule: Any) -> dict[str, Any]:
    if schedule is None:
        return {}
    return {"schedule": schedule.state_dict(), "scheduler": type(schedule).__qualname__}


def go_on(schedule: Any, state: dict[str, Any]) -> None:
    """Go on with the scheduler as it was; one that is new begins now."""
    if schedule is None or "schedule" not in state:
        return
    kind = type(schedule).__qualname__
    was = state.get("scheduler", kind)
    if was != kind:
        raise CheckpointError(
            f"the scheduler was {was}, and is {kind}, which cannot go on from the other's state; build it "
            "as it was when the checkpoint was saved"
        )
    schedule.load_state_dict(state["schedule"])
