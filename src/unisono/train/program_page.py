"""The page that shows the program of an engine's plan, beside the log of its run."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

from torch import nn

from unisono.errors import UsageError
from unisono.parallel.hollow import hollow_copy
from unisono.plan.plan import Plan
from unisono.train.auto import Job
from unisono.train.explain_command import page_of_plan


class ProgramPage:
    """Of a job whose model no plan has cut yet: of a module it keeps the form, without its numbers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._failure: Exception | None = None
        if isinstance(job.model, nn.Module):
            try:
                form = hollow_copy(job.model)
                self._job = replace(job, model=lambda: copy.deepcopy(form))
            except Exception as error:  # training must not end for a page
                self._failure = error

    def under(self, plan: Plan) -> str:
        """Empty where the program cannot be shown: it can be trained all the same, also where showing it fails."""
        shown = plan if plan.pp > 1 else plan.but(microbatches=1)
        try:
            if self._failure is not None:
                raise self._failure
            return page_of_plan(self._job.task(), shown)
        except UsageError:
            return ""
        except Exception as error:
            warnings.warn(
                f"the run has no page of its program under plan {plan}: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return ""
