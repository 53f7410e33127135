"""Loaders: every part, any number of workers and any resume take the same samples in the same order, once each."""

from __future__ import annotations

import os
import random
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unisono as uni
from tests.ranks import RankPool
from tests.train import stores
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.share import Share, share
from unisono.train.data.given_batches import GivenBatches
from unisono.train.data.sample_order import COMPUTED_ABOVE, ComputedOrder, order


class Noisy(Dataset[Any]):
    """Sample number i is (i, i with noise from all three generators)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[float, float]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return float(number), number + noise


class Flow(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            yield float(number), number + random.random() + float(torch.rand(()))


def epoch(dataset: Any, parts: int, workers: int = 0, **options: Any) -> list[tuple[list[float], list[float]]]:
    """The batches of an epoch, joined from those of all parts."""
    loaders = [uni.Loader(dataset, 5, part=(i, parts), workers=workers, seed=3, **options) for i in range(parts)]
    joined = []
    for shares in zip(*loaders, strict=True):
        batch: tuple[list[float], list[float]] = ([], [])
        for number, each in enumerate(shares):
            assert isinstance(each, Share)
            assert each == share(torch.empty(each.of), number, parts)._replace(batch=each.batch, spare=each.spare)
            for side in (0, 1):
                batch[side].extend(each.batch[side].tolist())
        assert len(batch[0]) == shares[0].of
        joined.append(batch)
    assert all(loader.epoch == 1 for loader in loaders)
    return joined


@pytest.mark.parametrize("dataset", [Noisy(17), Flow(17)])
def test_parts_and_workers_change_nothing(dataset: Any) -> None:
    random.seed(1)
    before = random.getstate(), torch.get_rng_state()
    whole = epoch(dataset, 1)
    assert [len(inputs) for inputs, _ in whole] == [5, 5, 5, 2]
    ids = [number for inputs, _ in whole for number in inputs]
    assert sorted(ids) == list(range(17))
    assert (ids != list(range(17))) == isinstance(dataset, Noisy)
    assert len({value % 1 for _, targets in whole for value in targets}) == 17  # each has its own noise
    for parts, workers in ((2, 0), (3, 0), (2, 1), (1, 3)):  # of three parts, one has none of the last batch
        assert epoch(dataset, parts, workers) == whole
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_the_order_is_of_seed_and_epoch_only() -> None:
    dataset = TensorDataset(torch.arange(100.0), torch.arange(100))
    loader = uni.Loader(dataset, 8, seed=1)
    taken = [[number for batch in loader for number in batch.batch[1].tolist()] for _ in range(2)]
    assert taken[0] != taken[1]
    other = uni.Loader(dataset, 16, seed=1)
    other.set_epoch(1)
    assert [number for batch in other for number in batch.batch[1].tolist()] == taken[1]
    assert taken[0][:5] == [82, 18, 97, 60, 84]  # and not of the version of torch: resumes depend on it


# ---- orders that are computed, not kept ------------------------------------------------------------------------------

MANY = 10_000_000


class Numbers(Dataset[Any]):
    """Samples that are made when they are read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[int, int]:
        return number, number


@pytest.mark.parametrize("samples", [*range(1, 30), 121, 122, 16_384, 16_385, 99_999, COMPUTED_ABOVE + 1])
def test_a_computed_order_has_every_sample_once(samples: int) -> None:
    taken = [ComputedOrder(samples, "test", seed)[:samples] for seed in range(2)]
    for each in taken:
        assert each.dtype == torch.int64
        assert torch.equal(each.sort().values, torch.arange(samples))
    if samples > 20:
        assert not torch.equal(taken[0], taken[1])
        assert int((taken[0] == torch.arange(samples)).sum()) < 9  # one is expected, more than 8 once in a million


def test_a_computed_order_is_that_of_its_parts() -> None:
    whole = order(MANY, 1, 0)[30_000:70_000]
    again = order(MANY, 1, 0)
    for start in (50_000, 30_000, 32_700, 65_000, 49_100):  # two blocks are kept at a time, of which some meet here
        assert torch.equal(again[start : start + 700], whole[start - 30_000 : start - 29_300])
    assert order(MANY, 1, 0)[:5].tolist() == [5601722, 1094374, 6407891, 5580258, 2527198]  # whatever the version
    assert order(MANY, 1, 0)[MANY - 1 : MANY + 9].shape == (1,)
    assert order(MANY, 1, 0)[MANY : MANY + 9].shape == (0,)
    for other in (order(MANY, 2, 0), order(MANY, 1, 1), order(MANY - 1, 1, 0)):
        assert not torch.equal(other[:5], again[:5])


def test_ranks_and_resumes_agree_on_ten_million_samples() -> None:
    def read(loader: uni.Loader, batches: int) -> list[list[int]]:
        return [batch.batch[0].tolist() for batch, _ in zip(loader, range(batches), strict=False)]

    dataset = Numbers(MANY)
    plain = uni.Loader(dataset, 64, seed=3)
    whole = read(plain, 6)
    assert whole == order(MANY, 3, 0)[: 6 * 64].view(6, 64).tolist()
    parts = [read(uni.Loader(dataset, 64, part=(index, 3), seed=3), 6) for index in range(3)]
    assert [list(chain(*shares)) for shares in zip(*parts, strict=True)] == whole
    first = uni.Loader(dataset, 64, seed=3)
    read(first, 2)
    state = first.state_dict()
    later = uni.Loader(dataset, 32, part=(1, 2), workers=1)
    later.load_state_dict({**state, "position": 128})
    assert read(later, 2) == [whole[2][16:32], whole[2][48:]]
    later.load_state_dict({**state, "position": MANY - 40})
    last = order(MANY, 3, 0)[MANY - 40 :].tolist()
    assert list(chain(*(batch.batch[0].tolist() for batch in later))) == [*last[16:32], *last[36:]]
    assert later.epoch == 1


def test_states_from_before_orders_were_computed_go_on_in_theirs() -> None:
    samples = COMPUTED_ABOVE + 1
    loader = uni.Loader(Numbers(samples), 8, seed=3)
    state = loader.state_dict()
    next(iter(loader))
    assert loader.ids == order(samples, 3, 0, is_computed=True)[:8].tolist()
    del state["order"]
    loader.load_state_dict({**state, "position": 800})
    next(iter(loader))
    assert loader.ids == order(samples, 3, 0, is_computed=False)[800:808].tolist()
    assert loader.state_dict()["order"] == "sorted"


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("shuffle", [False, True])
def test_more_samples_take_no_more_memory(shuffle: bool) -> None:
    def taken(samples: int) -> tuple[int, int]:
        """The peak of what Python and NumPy hold, and the largest tensor."""
        tracemalloc.start()
        try:
            with Largest() as largest:
                loader = uni.Loader(Numbers(samples), 64, part=(1, 2), seed=3, shuffle=shuffle)
                for _, _number in zip(loader, range(40), strict=False):
                    pass
                loader.load_state_dict({**loader.state_dict(), "position": samples // 2})
                next(iter(loader))
                sampler = uni.DistributedBatchSampler(samples, 64, part=(0, 1), shuffle=shuffle)
                next(iter(sampler))
            return tracemalloc.get_traced_memory()[1], largest.elements
        finally:
            tracemalloc.stop()

    taken(10_000)  # what is imported and cached
    few, many = taken(10_000), taken(MANY)
    assert many[0] < few[0] + 3 * 2**20  # working memory of a block of 16,384 positions; 80 MB if indices were kept
    assert many[1] <= 1 << 14


# ---- resumes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Noisy(23), Flow(23)])
@pytest.mark.parametrize("stop", [2, 5])
def test_a_resume_repeats_none_and_skips_none(dataset: Any, stop: int) -> None:
    first = uni.Loader(dataset, 5, part=(0, 1), seed=4, workers=1)
    ids, noise = [], []
    for number, batch in enumerate(first):
        ids += batch.batch[0].tolist()
        noise += batch.batch[1].tolist()
        if number + 1 == stop:
            break
    state = first.state_dict()
    parts = [uni.Loader(dataset, 4, part=(i, 2)) for i in range(2)]
    for loader in parts:
        loader.load_state_dict(state)
        assert loader.epoch == (1 if stop == 5 and isinstance(dataset, Noisy) else 0)
    if stop == 5:
        assert sorted(ids) == list(range(23))
        return
    for shares in zip(*parts, strict=True):
        for each in shares:
            ids += each.batch[0].tolist()
            noise += each.batch[1].tolist()
        assert parts[0].ids == parts[1].ids == [int(number) for number in ids[-len(parts[0].ids) :]]
    assert sorted(ids) == list(range(23))
    again = [value for batch in uni.Loader(dataset, 23, seed=4) for value in batch.batch[1].tolist()]
    assert noise == again


def test_a_collate_sees_the_full_batch() -> None:
    def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.tensor([len(s) for s in samples])

    words = [torch.ones(length) for length in range(1, 9)]
    batch = next(iter(uni.Loader(words, 4, part=(1, 2), shuffle=False, collate=padded)))
    assert batch[0].shape == (4, 4)
    local = next(iter(uni.Loader(words, 4, part=(0, 2), shuffle=False, collate=padded, global_batches=False)))
    assert isinstance(local, Share)
    assert local.batch[0].shape == (2, 2)


def test_samples_that_are_dicts() -> None:
    """Lists of numbers are tensors, as in transformers; lists of tensors and of arrays are lists, as in torch."""
    sample = {"ids": [1, 2, 3], "rows": [[1.0], [2.0]], "none": [], "views": [np.ones((2, 2)), np.zeros((2, 2))]}
    sample |= {"tensors": [torch.ones(1), torch.zeros(1)], "words": ["a", "b"], "ragged": [[1], [2, 3]]}
    (batch,) = uni.Loader([sample] * 4, 4, pairs=False)
    batch = batch.batch[0] if isinstance(batch.batch, tuple) else batch.batch
    assert batch["ids"].shape == (4, 3)
    assert batch["rows"].shape == (4, 2, 1)
    assert batch["none"].shape == (4, 0)
    assert [each.shape for each in batch["views"]] == [(4, 2, 2)] * 2
    assert [each.shape for each in batch["tensors"]] == [(4, 1)] * 2
    assert batch["words"] == [("a",) * 4, ("b",) * 4]
    assert [len(row) for row in batch["ragged"]] == [1, 2]


def test_bad_input() -> None:
    pairs = TensorDataset(torch.ones(3), torch.ones(3))
    with pytest.raises(UsageError, match="the dataset is empty"):
        uni.Loader([], 2)
    with pytest.raises(UsageError, match="batch_size=0"):
        uni.Loader(pairs, 0)
    with pytest.raises(UsageError, match="leave no batch"):
        uni.Loader(pairs, 4, drop_last=True)
    with pytest.raises(UsageError, match="shuffle within it"):
        uni.Loader(Flow(3), 2, shuffle=True)
    with pytest.raises(UsageError, match="has no number of batches"):
        len(uni.Loader(Flow(3), 2))
    with pytest.raises(UsageError, match=r"is Tensor; expected \(inputs, targets\)"):
        next(iter(uni.Loader([1.0, 2.0], 2)))
    with pytest.raises(UsageError, match="dataset of type int"):
        uni.Loader(7, 2)
    for wrong, words in (
        (DataLoader(pairs), "a DataLoader as a dataset, whose items are batches"),
        ((pair for pair in pairs), "a generator as a dataset, which can be read only once"),
        ({"x": pairs}, "a dict as a dataset"),
        (pairs.tensors, "a tuple of 2 tensors as a dataset"),
    ):
        with pytest.raises(UsageError, match=words):
            uni.Loader(wrong, 2)
    with pytest.raises(
        UsageError, match=r"cannot be collated: stack expects .* collate= of uni\.Engine or uni\.Loader"
    ):
        next(iter(uni.Loader([(torch.ones(length), 1) for length in (1, 2)], 2)))
    with pytest.raises(UsageError, match=r"part=\(2, 2\)"):
        uni.Loader(pairs, 2, part=(2, 2))
    with pytest.raises(UsageError, match=r"samples=4, but this loader has samples=3; is it another dataset"):
        uni.Loader(pairs, 2).load_state_dict(uni.Loader([(1, 2)] * 4, 2).state_dict())
    assert uni.Loader(pairs, 2).smallest_batch == 1
    assert uni.Loader(pairs, 2, drop_last=True).smallest_batch == 2


def test_sampler_for_torchs_loader() -> None:
    dataset = TensorDataset(torch.arange(22))
    expected = [sorted(batch.batch[0].tolist()) for batch in uni.Loader(dataset, 6, seed=2, pairs=False)]
    samplers = [uni.DistributedBatchSampler(22, 6, part=(i, 3), seed=2) for i in range(3)]
    loaders = [DataLoader(dataset, batch_sampler=sampler) for sampler in samplers]
    taken = [sorted(n for (part,) in parts for n in part.tolist()) for parts in zip(*loaders, strict=True)]
    assert taken == expected
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [sorted(n for (part,) in parts for n in part.tolist()) for parts in zip(*loaders, strict=True)] != expected
    with pytest.raises(UsageError, match="the smallest has 1 for 3 ranks"):
        uni.DistributedBatchSampler(19, 6, part=(0, 3))


def test_partitions_leave_no_sample_out() -> None:
    parts = uni.DataPartitioner(list(range(10)), [1 / 3] * 3, seed=5)
    taken = [[parts.use(i)[n] for n in range(len(parts.use(i)))] for i in range(3)]
    assert sorted(chain(*taken)) == list(range(10))
    assert [len(part) for part in taken] == [3, 4, 3]
    assert taken[0] == [uni.DataPartitioner(list(range(10)), [1 / 3] * 3, seed=5).use(0)[n] for n in range(3)]
    for sizes in ([0.5, 0.6], [], [0.5, -0.1], [0.01, 0.9]):
        with pytest.raises(UsageError):
            uni.DataPartitioner(list(range(10)), sizes)
    with pytest.raises(UsageError, match="part 3; expected 0 to 2"):
        parts.use(3)


def split_here(comm: Communicator) -> tuple[Any, Any]:
    x, y = np.arange(10), list(range(10))
    plain, shuffled = uni.split_data(x, y), uni.split_data(torch.arange(10), y, shuffle=True)
    assert plain[0].tolist() == plain[1]
    assert shuffled[0].tolist() == shuffled[1]
    return plain[1], shuffled[1]


def test_split_data_among_ranks(pools: Callable[[str, int], RankPool]) -> None:
    answers = pools("gloo", 4).run(split_here)
    plain, shuffled = ([answer[kind] for answer in answers] for kind in (0, 1))
    assert plain == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert list(chain(*shuffled)) != list(range(10))
    assert sorted(chain(*shuffled)) == list(range(10))
    with pytest.raises(UsageError, match="3 samples but 2 labels"):
        uni.split_data([1, 2, 3], [1, 2])


# ---- a whole run, stopped in mid-epoch and resumed under another plan ------------------------------------------------


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (30, 16), generator=generator)
    return TensorDataset(tokens, tokens.roll(-1, 1))


def train(comm: Communicator, folder: str, plan: str, until: int) -> tuple[list[float], list[list[int]], float]:
    """Train up to a step from what is saved, if anything; losses, the ids that this rank read, a sum of parameters."""
    trainer = stores.new_trainer("slim", plan)
    loader = uni.Loader(dataset(), 8, part=trainer.part, seed=7)
    checkpoints = uni.Checkpoints(folder)
    if checkpoints.newest_good() is not None:
        loader.load_state_dict(checkpoints.load(trainer).data_state)
    losses, ids = [], []
    while trainer.steps < until:
        for batch in loader:
            losses.append(float(trainer.step(batch)))
            ids.append(loader.ids)
            if trainer.steps == until:
                break
    checkpoints.save(trainer, trainer.steps, loader.state_dict())
    total = sum(float(tensor.double().abs().sum()) for tensor in trainer.state_dict()["model"].values())
    return losses, ids, total


@pytest.mark.parametrize(
    "plans",
    [
        ("dp=2,zero=3", "pp=2,microbatches=2", "tp=2"),
        pytest.param(("dp=4,zero=3", "dp=2,pp=2,microbatches=2,zero=1", "tp=2,cp=2"), marks=pytest.mark.thorough),
    ],
    ids=["two ranks", "four ranks"],
)
def test_stopped_in_mid_epoch_and_resumed_under_other_plans(
    pools: Callable[[str, int], RankPool], tmp_path: Path, plans: tuple[str, ...]
) -> None:
    plain = pools("gloo", 1).run(train, str(tmp_path / "one"), "dp=1", 6)[0]
    losses, ids = [], []
    for plan, until in zip(plans, (2, 3, 6), strict=True):
        answers = pools("gloo", uni.Plan.parse(plan).world).run(train, str(tmp_path / "many"), plan, until)
        assert all(answer == answers[0] for answer in answers)
        losses += answers[0][0]
        ids += answers[0][1]
    assert ids == plain[1]
    assert sorted(number for batch in ids[:4] for number in batch) == list(range(30))  # an epoch: 8 + 8 + 8 + 6
    assert losses == pytest.approx(plain[0], rel=1e-9)
    assert answers[0][2] == pytest.approx(plain[2], rel=1e-9)


class Drawn(Dataset[Any]):
    """Never twice the same, whatever the generators are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        return os.urandom(8), number


@pytest.mark.parametrize("is_given", [False, True])
def test_other_data_of_the_same_length_is_noticed_in_a_resume(is_given: bool) -> None:
    comm = uni.init()

    def loader(dataset: Any) -> Any:
        return GivenBatches(DataLoader(dataset, batch_size=4), comm) if is_given else uni.Loader(dataset, 4)

    try:
        first, other = (TensorDataset(torch.arange(12.0) + add, torch.arange(12)) for add in (0, 1))
        state = loader(first).state_dict()
        generators = torch.get_rng_state()
        with pytest.warns(RuntimeWarning, match="the TensorDataset has other samples than the one that the checkpoint"):
            loader(other).load_state_dict(state)
        assert torch.equal(generators, torch.get_rng_state())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader(TensorDataset(torch.arange(12.0), torch.arange(12))).load_state_dict(state)
            for dataset in (Noisy(12), Drawn(), [("text", {"a": np.ones(2)}, None, object())] * 12):
                loader(dataset).load_state_dict(loader(dataset).state_dict())
            old = {name: value for name, value in state.items() if name != "fingerprint"}
            loader(other).load_state_dict(old)
    finally:
        uni.shutdown()
