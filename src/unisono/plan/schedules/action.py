"""An action: the smallest thing that a rank of a pipeline does.

A model is split into *stages*, numbered along the forward pass, and a batch into *microbatches*. Each rank holds one or
more stages. What can be done to one microbatch at one stage:

    F         forward
    B         backward, whole
    I         backward, only the gradient of the stage's input, which is all that the stage before waits for
    W         backward, only the gradients of the stage's weights, which nobody waits for
    SEND_F    send this stage's output to the stage after it
    RECV_F    receive this stage's input from the stage before it
    SEND_B    send the gradient of this stage's input to the stage before it
    RECV_B    receive the gradient of this stage's output from the stage after it

The first four compute; the last four are transfers and appear only in lists that `transfers` has lowered.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from unisono.comm.signatures.records import plain_record

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
COMPUTE: frozenset[Kind] = frozenset(("F", "B", "I", "W"))


@plain_record
class Action(NamedTuple):
    """One action of one rank. `peer` is the other rank of a transfer and None for what computes."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Lists = tuple[tuple[Action, ...], ...]  # for each rank, its actions in order
