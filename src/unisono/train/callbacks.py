"""Callbacks: what a user, the display and the run folder hang onto a run. Every rank calls them alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.train.moment import Moment

if TYPE_CHECKING:
    from unisono.train.engine import Engine


class Callback:
    """Override what you need. A callback that returns True from `on_step` or `on_epoch` ends the run, once all ranks
    have heard it; it must do so on all ranks or be content that any one ends it."""

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        """Before the first step, with the number of steps done before (after a resume) and of the whole run."""

    def on_step(self, engine: Engine, moment: Moment) -> bool | None:
        """After each step."""

    def on_epoch(self, engine: Engine, moment: Moment) -> bool | None:
        """After each epoch, with the values of its evaluation."""

    def on_save(self, engine: Engine, step: int, path: str) -> None:
        """After a checkpoint was begun."""

    def on_end(self, engine: Engine, moment: Moment | None) -> None:
        """After the last step, also when the run was stopped or failed."""
