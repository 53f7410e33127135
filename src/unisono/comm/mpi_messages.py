"""Messages between ranks over MPI, by the short way. Imports mpi4py: import it late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from mpi4py import MPI

from unisono.comm import mpi_calls as calls
from unisono.comm import traffic
from unisono.comm.communicator import Communicator, Piece
from unisono.comm.handle import Handle
from unisono.comm.mpi_memory import memory_of
from unisono.comm.mpi_now import soon_done
from unisono.comm.operation import Outcome
from unisono.errors import CommError

if TYPE_CHECKING:
    from unisono.comm.mpi_group import MPIProcessGroup


class MPIMessages(Communicator):
    """A Communicator whose messages take the short way."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mpi = cast("MPIProcessGroup", self.group)
        self._raw = self._mpi.comm
        self._told = MPI.Status()

    def exchange(self, sends: Sequence[Piece] = (), recvs: Sequence[Piece] = (), *, async_op: bool = False) -> Outcome:
        log, watch = self._letters, self._watch
        into, of = self._parcels(recvs), self._parcels(sends)
        if into is not None and of is not None and not async_op and not traffic.counters:
            raw = self._raw
            try:
                requests = [raw.Irecv(buffer, source) for buffer, source in into]
                requests += [raw.Isend(buffer, to) for buffer, to in of]
                log.enter("exchange", "", None, 2)
                told = self._told
                for number, (buffer, _) in enumerate(into):
                    request = requests[number]
                    if not soon_done(request, told):
                        request.Wait(told)
                    if told.Get_count(MPI.BYTE) != buffer[0].nbytes:
                        raise calls.not_as_long(recvs[number][0], told)
                for request in requests[len(into) :]:
                    if not soon_done(request):
                        request.Wait()
            except CommError:
                raise
            except RuntimeError as error:
                raise watch.explained(error) from error
            finally:
                log.left = log.entered
            return [tensor for tensor, _ in recvs]
        received = [tensor for tensor, _ in recvs]
        if traffic.counters:
            for tensor, to in sends:
                traffic.note("send", self.size, tensor, (self.ranks[to],))
            for tensor, source in recvs:
                traffic.note_arrival(tensor, self.ranks[source])
        peers = ",".join(str(peer) for peer in sorted({peer for _, peer in (*sends, *recvs)}))
        log.enter(f"exchange with ranks {peers}", "", None, 2)
        try:
            made = [calls.receive(tensor, source, 0) for tensor, source in recvs]
            made += [calls.send(tensor, to, 0) for tensor, to in sends]
            if async_op:
                return Handle([self._mpi.start(call) for call in made], lambda: received, watch.waiter(log))
            self._mpi.run_together(made)
        except RuntimeError as error:
            if is_own(error):
                raise
            raise watch.explained(error) from error
        finally:
            log.left = log.entered
        return received

    def _parcels(self, pieces: Sequence[Piece]) -> list[tuple[Any, int]] | None:
        """The pieces as MPI takes them, or None where it cannot take all as they lie."""
        parcels: list[tuple[Any, int]] | None = []
        for tensor, peer in pieces:
            self._require_numbers(tensor)
            if peer.__class__ is not int or peer == self.rank or not 0 <= peer < self.size:
                self._require_peer(peer)
            memory = memory_of(tensor)
            if memory is None:
                parcels = None
            elif parcels is not None:
                parcels.append((memory.buffer, peer))
        return parcels


def is_own(error: RuntimeError) -> bool:
    """Whether an error is this rank's own: neither MPI's nor one that follows from it."""
    return not isinstance(error, MPI.Exception) and not isinstance(error.__cause__, MPI.Exception)
