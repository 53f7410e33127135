"""The generator: its published words, its implementations against each other, and regions of full tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.mesh.global_index import Part, Runs, runs_of
from unisono.mesh.random import draw
from unisono.mesh.random.draw import words
from unisono.mesh.random.philox import PhiloxStream, mix, torch_words

CPU = torch.device("cpu")
# Counter, key and outcome, from the known-answer file that the generator's authors publish.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "outcome"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], outcome: tuple[int, ...]) -> None:
    block = counter[0] | counter[1] << 32
    number = block - (1 << 64) if block >> 63 else block
    mixed = mix(PhiloxStream(key, (counter[2], counter[3])), torch.tensor([number]))
    assert tuple(int(word) & 0xFFFFFFFF for word in mixed) == outcome


RUNS = [([0], 16), ([0], 1), ([5], 11), ([3], 2), ([4, 20, 40], 8), ([1, 6, 11], 5), ([7, 3], 1), ([2**40 + 1], 9)]


def flat_words(stream: PhiloxStream, starts: list[int], length: int) -> torch.Tensor:
    """One element at a time: the plain meaning."""
    numbers = torch.cat([torch.arange(start, start + length) for start in starts])
    mixed = torch.stack(mix(stream, numbers >> 2), 1)
    return mixed.gather(1, (numbers & 3)[:, None])[:, 0].to(torch.int32)


@pytest.mark.parametrize(("starts", "length"), RUNS)
def test_words_of_runs(starts: list[int], length: int) -> None:
    stream = PhiloxStream.of("test")
    found = torch_words(stream, Runs(torch.tensor(starts), length), CPU)
    assert torch.equal(found, flat_words(stream, starts, length))


def test_many_words_come_in_shards() -> None:
    stream = PhiloxStream.of("test")
    found = words(stream, Runs(torch.tensor([3]), 300_000), CPU)
    assert torch.equal(found, flat_words(stream, [3], 300_000))


def test_the_compiled_words_are_the_same() -> None:
    philox_cpu = pytest.importorskip("unisono.mesh.random.philox_cpu", exc_type=ImportError)
    stream = PhiloxStream.of("test")
    for starts, length in [*RUNS, ([1], 100_001)]:
        runs = Runs(torch.tensor(starts), length)
        assert torch.equal(philox_cpu.words(stream, runs), torch_words(stream, runs, CPU))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_gives_the_same_words() -> None:
    from unisono.mesh.random import philox_gpu

    stream, gpu = PhiloxStream.of("test"), torch.device("cuda")
    for starts, length in [*RUNS, ([0], 100_001), ([1], 100_001), (list(range(0, 700_000, 701)), 333)]:
        runs = Runs(torch.tensor(starts), length)
        expected = torch_words(stream, runs, CPU)
        assert torch.equal(torch_words(stream, runs, gpu).cpu(), expected)
        assert torch.equal(philox_gpu.words(stream, runs, gpu).cpu(), expected)


def test_words_are_uniform() -> None:
    """Every bit is set half of the time, and neighbours do not know of each other: five standard deviations."""
    count = 1 << 18
    drawn = words(PhiloxStream.of(1), Runs(torch.tensor([0]), count), CPU)
    for bit in range(32):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - count / 2) < 5 * math.sqrt(count) / 2
    centred = drawn.double() / 2**31
    for lag in (1, 2, 3, 4, 5, 64):
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) < 5 / 3 / math.sqrt(count)


def test_streams_differ() -> None:
    runs = Runs(torch.tensor([0]), 4096)
    drawn = [
        words(PhiloxStream.of(*identity), runs, CPU) for identity in [(1, 2), (2, 1), (1, 2, 0), (12,), ("1", "2\0")]
    ]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert int((one == other).sum()) < 3


# ---- regions -----------------------------------------------------------------------------------------------------


@st.composite
def regions(draw: st.DrawFn) -> tuple[list[int], dict[int, Part]]:
    full = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    parts: dict[int, Part] = {}
    for dim, size in enumerate(full):
        kind = draw(st.sampled_from(["all", "range", "stride", "list"]))
        if kind == "range":
            start = draw(st.integers(0, size))
            parts[dim] = Part(range(start, draw(st.integers(start, size))), size)
        elif kind == "stride":
            parts[dim] = Part(range(draw(st.integers(0, size - 1)), size, draw(st.integers(1, 3))), size)
        elif kind == "list":
            parts[dim] = Part(torch.tensor(draw(st.permutations(range(size)))[: draw(st.integers(1, size))]), size)
    return full, parts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(regions())
def test_runs_number_the_elements_of_the_full(region: tuple[list[int], dict[int, Part]]) -> None:
    full, parts = region
    numbers = torch.arange(math.prod(full)).view(full)
    for dim, part in parts.items():
        numbers = numbers.index_select(dim, torch.tensor(list(part.positions), dtype=torch.int64))
    runs = runs_of(numbers.shape, parts)
    found = (runs.starts[:, None] + torch.arange(runs.length)).reshape(-1)
    assert torch.equal(found, numbers.reshape(-1))


def test_full_rows_are_one_run() -> None:
    runs = runs_of((4, 8, 16), {0: Part(range(4, 8), 12)})
    assert (runs.starts.tolist(), runs.length) == ([512], 512)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [(range(1, 3), [5, 6]), (range(0, 4, 2), [4, 6]), (torch.tensor([3, 0]), [7, 4]), (range(2, 2), [])],
)
def test_a_part_within_a_part(inner: range | torch.Tensor, expected: list[int]) -> None:
    for outer in (range(4, 8), torch.tensor([4, 5, 6, 7])):
        part = Part(inner, 4).within(Part(outer, 12))
        assert (list(map(int, part.positions)), part.total) == (expected, 12)
    strided = Part(inner, 4).within(Part(range(1, 12, 3), 12))
    assert list(map(int, strided.positions)) == [3 * (position - 4) + 1 for position in expected]


def test_bad_parts() -> None:
    with pytest.raises(UsageError, match="expected 0 to 3"):
        Part(range(2, 5), 4)
    with pytest.raises(UsageError, match="integers"):
        Part(torch.tensor([0.5]), 4)
    with pytest.raises(UsageError, match="expected a part of 3"):
        Part(range(2), 4).within(Part(range(3), 12))


# ---- normal numbers ----------------------------------------------------------------------------------------------


def test_logarithm_and_cosine() -> None:
    few = torch.tensor([1e-300, 2.0**-53, 0.5, 0.7071, 1.0], dtype=torch.float64)
    x = torch.cat([torch.linspace(1e-6, 1, 20001, dtype=torch.float64), few])
    torch.testing.assert_close(draw.log(x), torch.log(x), rtol=1e-15, atol=1e-16)
    turn = torch.linspace(0, 1, 20001, dtype=torch.float64)
    torch.testing.assert_close(draw.cos_of_turns(turn), torch.cos(2 * math.pi * turn), rtol=0, atol=1e-15)
