"""The batches of a DataLoader that the user has made, in the form that `Engine.fit` reads.

    engine.fit(DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=pad))        # every rank: global batches
    uni.Engine(..., batch="local").fit(DataLoader(dataset, sampler=DistributedSampler(dataset)))     # its own samples

Samples and their order are the DataLoader's. What it draws from the generators of Python, NumPy and torch depends on
(seed, epoch, batch), so that all ranks read the same batches, and a resumed run the ones that follow; a generator that
was given to the DataLoader is the user's to seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.inputs import as_pair
from unisono.train.data.dataset_sample import fingerprint, warn_of_other_data
from unisono.train.data.reading import preserved_generators, seed_generators

_END = object()


class GivenBatches:
    """Iterating yields the rest of the epoch, then starts the next, as a Loader does; positions count batches.

    is_local: whether the ranks of `comm` have batches of their own, of which each must have as many; `index` is that of
    the data rank.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        comm: Communicator,
        *,
        is_local: bool = False,
        index: int = 0,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.seed, self.device = seed, device
        self.batch_size: int | None = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.batches = _length(loader)
        if self.batches == 0:
            raise UsageError("the DataLoader has no batch; expected at least one")
        self.epoch = 0
        self.position = 0  # in batches
        self._loader, self._comm = loader, comm
        self._sampled: tuple[str | None, ...] = ()  # the dataset's fingerprint, once it was asked for
        self._is_local = is_local and comm.size > 1
        self._stream = ("batch", index) if is_local else ("batch",)

    @property
    def ids(self) -> list[int]:
        """Indices of the samples of the last batch: not known here."""
        return []

    @property
    def smallest_batch(self) -> int | None:
        return None

    def batches_left(self, epochs: int) -> int | None:
        """Batches from the current position to the end of so many epochs; None if unknown."""
        return None if self.batches is None else max(self.batches * (epochs - self.epoch) - self.position, 0)

    def first(self, global_batches: bool = True) -> Any:
        """The next batch, without advancing; None if there is none."""
        generators = [each for each in (self._loader.generator, _sampler_generator(self._loader)) if each is not None]
        states = [generator.get_state() for generator in generators]
        try:
            return next(self._epoch_batches(), (0, None))[1]
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        if self._is_local:
            self._require_equal_lengths()
        for number, batch in self._epoch_batches():
            self.position = number + 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _epoch_batches(self) -> Iterator[tuple[int, Any]]:
        """The rest of the epoch, numbered."""
        owners: tuple[Any, ...] = (self._loader.sampler, self._loader.batch_sampler, self._loader.dataset)
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)
        with preserved_generators():
            seed_generators(self.seed, self.epoch, *self._stream)
            stream = iter(self._loader)
        start, number = self.position, 0
        while True:
            with preserved_generators():
                seed_generators(self.seed, self.epoch, *self._stream, number)
                batch = next(stream, _END)
            if batch is _END:
                return
            if number >= start:
                yield number, tree_map(self._to_device, as_pair(batch))
            number += 1

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) and self.device is not None else leaf

    def _require_equal_lengths(self) -> None:
        lengths = self._comm.all_gather_object(self.batches, only_data=True)
        for rank, length in enumerate(lengths):
            if length is None:
                raise UsageError(
                    'a DataLoader without a length with Engine(batch="local"); expected one with a length, as ranks '
                    "must have equally many batches: use a map-style dataset with a DistributedSampler"
                )
            if length != lengths[0]:
                raise UsageError(
                    f"the DataLoader has {length} batches on rank {rank} and {lengths[0]} on rank 0; expected equally "
                    "many on every rank, as a DistributedSampler gives"
                )

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch; JSON serialisable."""
        epoch, position = self.epoch, self.position
        if self.batches is not None and position >= self.batches:
            epoch, position = epoch + 1, 0
        state = {"epoch": epoch, "position": position, "seed": self.seed, "batches": self.batches}
        if not self._sampled:
            self._sampled = (fingerprint(self._loader.dataset),)
        return {**state, "fingerprint": self._sampled[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; the batches before are read again and dropped."""
        if "batches" not in state or state["batches"] != self.batches:
            raise UsageError(
                f"the saved state of the data has {state.get('batches', 'no')} batches in an epoch, but this "
                f"DataLoader has {self.batches}; resume with the dataset and batch size that the run began with"
            )
        warn_of_other_data(state.get("fingerprint"), self._loader.dataset)
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _sampler_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    generator = getattr(loader.sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) and generator is not loader.generator else None
