"""The post between stages: messages and gradients under way from rank to rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.comm.signatures.object_bytes import object_of_bytes, object_to_bytes
from unisono.comm.signatures.plain_data import is_plain
from unisono.parallel.pipeline.message import MessageForm, TensorForm

# How many messages to one rank may be under way. One would do; more only keep more memory.
_UNDER_WAY = 2
_FORM = "the form of a message"  # in signatures


@dataclass
class Delivery:
    """Tensors on their way here."""

    tensors: list[torch.Tensor]
    handles: list[Handle]

    def wait(self) -> list[torch.Tensor]:
        for handle in self.handles:
            handle.wait()
        self.handles = []
        return self.tensors


class Transfers:
    """Sends without waiting and receives without waiting, in the order of the calls between any two ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sent: dict[int, deque[list[Handle]]] = {}

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Empty tensors stay: both ends know from the form that nothing is in them."""
        running = self._sent.setdefault(to, deque())
        while len(running) >= _UNDER_WAY:
            _finish(running.popleft())
        running.append([self._comm.isend(tensor.detach(), to) for tensor in tensors if tensor.numel()])

    def receive(self, forms: Sequence[TensorForm], source: int, device: torch.device) -> Delivery:
        tensors = [form.empty(device) for form in forms]
        return Delivery(tensors, [self._comm.irecv(tensor, source) for tensor in tensors if tensor.numel()])

    def send_form(self, form: MessageForm, to: int) -> None:
        number = self._comm.seal.next_number(("sent", to))
        content = self._comm.seal.sign(
            object_to_bytes(form, only_data=is_plain(form)), _FORM, number, self._comm.rank, to
        )
        content = content.to(self._comm.device)
        self.send([torch.tensor([content.numel()], device=self._comm.device), content], to)

    def receive_form(self, source: int) -> MessageForm:
        """Waits for it."""
        device = self._comm.device
        (length,) = self.receive([TensorForm((1,), torch.int64)], source, device).wait()
        (content,) = self.receive([TensorForm((int(length),), torch.uint8)], source, device).wait()
        number = self._comm.seal.next_number(("received", source))
        verified = self._comm.seal.verified(content.cpu(), _FORM, number, source, self._comm.rank)
        form: MessageForm = object_of_bytes(verified, f"what came as {_FORM} of rank {source}")
        return form

    def settle(self) -> None:
        """Wait until everything sent has arrived."""
        for running in self._sent.values():
            while running:
                _finish(running.popleft())


def _finish(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
