"""The errors that a user of unisono can meet.

Every message has what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UnisonoError(Exception):
    """The root of all errors that unisono raises on purpose."""


class UsageError(UnisonoError, ValueError):
    """Something that the caller passed is wrong."""


class TaskError(UsageError):
    """Code of the model, the loss or the optimizer raised an error on some rank; every rank raises this."""


class PlanMismatch(UnisonoError, RuntimeError):
    """A step under the plan is not the step of one device; the message has where they diverge."""


class LaunchError(UnisonoError, RuntimeError):
    """Ranks could not be started, or the job they ran failed."""


class PreflightError(LaunchError):
    """Hosts that cannot do their part; `causes` has why, by host."""

    def __init__(self, causes: dict[str, str]) -> None:
        listed = "\n".join(f"  {host}: {cause}" for host, cause in causes.items())
        super().__init__(f"preflight failed, nothing was started:\n{listed}")
        self.causes = causes


class CommError(UnisonoError, RuntimeError):
    """Ranks could not communicate."""


class MessageError(CommError):
    """A message does not fit the tensor that it was received into."""


class HangError(CommError):
    """Ranks wait for each other and never will meet; the message is the report."""


class CheckpointError(UnisonoError, RuntimeError):
    """A checkpoint could not be written, is damaged, or is of another model."""


class InternalError(UnisonoError, RuntimeError):
    """unisono has broken a rule of its own: a fault to report."""


class MissingPackageError(UnisonoError, ImportError):
    """An optional package is needed and absent."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}; run: pip install 'unisono[{extra}]'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " (did you mean NAME?)" with the known name that is nearest to a word; "" if none is near."""
    near = get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""
