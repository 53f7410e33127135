"""The reducer: gradients are reduced in buckets, while the backward still computes others.

A parameter's gradient is ready when autograd has accumulated it. Parameters that become ready about the same time share
a bucket; a full bucket is sent at once. Buckets are sent in one fixed order on every rank, whatever order autograd
works in, so that ranks whose models took different paths issue the same collectives; what is missing when the backward
ends is sent as zeros.

`DataParallel` and `ShardedOptimizer` define the collective (`_reduce_async`) and where its result goes
(`_store_gradients`). How often gradients are reduced in a step is a property of the program, not of the data: once for
every backward outside `hold`, or once at `finish` if there was none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError
from unisono.mesh.bucket import Bucket
from unisono.torch_compat import at_end_of_backward

Missing = list[tuple[Handle, list[tuple[str, nn.Parameter]]]]  # answers, and to which parameters
AnyBucket = TypeVar("AnyBucket", bound=Bucket)

_step: Reducer[Any] | None = None


def current_step() -> Reducer[Any] | None:
    """The reducer of the trainer whose step, or evaluation, is running; None in the user's own code."""
    return _step


class Reducer(Generic[AnyBucket]):
    """Starts the reduction of buckets during the backward.

    Subclasses: `_reduce_async` takes the gradients off a bucket's parameters and starts their reduction;
    `_store_gradients` gives the parameters the sum of all that were reduced in a step. In between parameters hold only
    what has not been summed yet.
    """

    def __init__(self, buckets: Sequence[AnyBucket], watch: bool = True) -> None:
        """`watch`: see by itself when gradients are ready; else the subclass sends buckets."""
        self.buckets = list(buckets)
        self._bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
        self._seen: set[int] = set()  # parameters that have sent a gradient since the last finish
        self._next = 0  # the bucket that is sent next
        self._rounds = 0  # since the last finish
        self._is_held = False
        self._has_held_back = False
        self._is_running = False
        self._publishes = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._ready)
            for bucket in buckets
            for parameter in bucket.parameters
            if watch
        ]

    def _reduce_async(self, bucket: AnyBucket) -> Handle:
        raise AssertionError("a subclass sends a bucket")

    def _store_gradients(self, bucket: AnyBucket, total: torch.Tensor) -> None:
        raise AssertionError("a subclass stores a sum")

    def _drop(self, name: str, parameter: nn.Parameter) -> None:
        """No rank has a gradient for this parameter, so .grad is None, as on one device."""
        parameter.grad = None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """In the block, backward only accumulates: for every microbatch but the last."""
        return self._holding()

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    # ---- backwards of the user's own (loop.py) -------------------------------------------------------------------

    def publish_after_backward(self) -> None:
        """From now on a backward outside a trainer's step ends with `finish`, which averages and adds: see `is_own`."""
        self._publishes = True

    @property
    def is_own(self) -> bool:
        """Whether gradients come from a backward of the user's own: they are averaged over the ranks that have parts of
        them, and added to those that are there."""
        return self._publishes and _step is not self

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """In the block a trainer runs the model, on parts of a loss that sum to it, and calls `finish` by itself."""
        global _step
        before, _step = _step, self
        try:
            yield
        finally:
            _step = before

    def expect_backward(self) -> None:
        """Called in a backward of a user-written loop: joins the reduction even where no parameter gets a gradient."""
        if not self._is_held and not self._is_running and self._hooks:
            self._is_running = True
            at_end_of_backward(self._end_of_backward)

    def complete(self) -> None:
        """Before the optimizer's step: send what `hold` has held back."""
        if self._has_held_back:
            self.finish()

    def require_idle(self) -> None:
        if self._is_running:
            raise UsageError(
                "the last backward ended with an error, when some of its gradients had been sent to other ranks; "
                "start again from a checkpoint"
            )

    # ---- the end of a step ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all gradients are summed. Every rank calls it after the last backward of a step."""
        self._is_running = False
        self._complete()
        asked = self._ask_for_missing()
        for bucket in self.buckets:
            self._wait_for(bucket)
            if bucket.total is not None:
                if self.is_own:
                    bucket.total.div_(bucket.everyone.size)
                self._store_gradients(bucket, bucket.total)
                bucket.total = None
        self._drop_missing(asked)
        self._seen.clear()
        self._rounds = 0

    def _complete(self) -> None:
        """Send what must be sent before a step can end."""
        if self._rounds == 0 or self._has_held_back:
            self._send_rest()

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._is_held:
            self._has_held_back = True
            return
        if not self._is_running:
            self._is_running = True
            at_end_of_backward(self._end_of_backward)
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        if bucket.missing < 0:
            raise UsageError(
                f"{bucket.name_of(parameter)} got a second gradient in one backward, after the first had been sent to "
                "other ranks; run backward in hold() and reduce at the end"
            )
        self._require_dense(bucket, parameter)
        self._seen.add(id(parameter))
        bucket.pack(parameter)
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send_next()

    def _end_of_backward(self) -> None:
        if self._is_running:  # else an exception ended it, and finish has cleaned up
            self._send_rest()
            self._is_running = False
            if self.is_own:
                self.finish()

    def _send_rest(self) -> None:
        while self._next < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self._next = 0
        self._rounds += 1
        self._has_held_back = False

    def _send_next(self) -> None:
        self._send(self.buckets[self._next])
        self._next += 1

    def _send(self, bucket: AnyBucket) -> None:
        self._wait_for(bucket)
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                self._require_dense(bucket, parameter)
                self._seen.add(id(parameter))
        bucket.handle = self._reduce_async(bucket)

    def _require_dense(self, bucket: AnyBucket, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UsageError(f"{bucket.name_of(parameter)} has a sparse gradient; use nn.Embedding(sparse=False)")

    def _wait_for(self, bucket: AnyBucket) -> None:
        if bucket.handle is not None:
            result = bucket.handle.wait().to(bucket.dtype)
            bucket.handle = None
            bucket.total = result if bucket.total is None else bucket.total.add_(result)

    def _ask_for_missing(self) -> Missing:
        """Tell a gradient of zeros from none: an optimizer passes over a parameter that has none on any rank.

        The question travels beside the last gradients, so that nobody waits for the answer alone.
        """
        groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
        comms: dict[int, Communicator] = {}
        for bucket in self.buckets:
            comms[id(bucket.everyone)] = bucket.everyone
            groups.setdefault(id(bucket.everyone), []).extend(zip(bucket.names, bucket.parameters, strict=True))
        asked = []
        for key, members in groups.items():
            seen = torch.tensor([id(parameter) in self._seen for _, parameter in members], dtype=torch.uint8)
            sent = seen.to(comms[key].device, non_blocking=True)
            asked.append((comms[key].all_reduce(sent, "max", async_op=True), members))
        return asked

    def _drop_missing(self, asked: Missing) -> None:
        for handle, members in asked:
            seen = handle.wait()
            if all(id(parameter) in self._seen for _, parameter in members):
                continue  # all are there, also without looking at the answer, which may be on a GPU
            for (name, parameter), is_seen in zip(members, seen.tolist(), strict=True):
                if not is_seen:
                    self._drop(name, parameter)
