"""Objects that are plain data travel as data, exactly; nothing else does, and what arrives damaged is refused."""

from __future__ import annotations

import enum
import math
import os
import pickle
import struct
import traceback
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import unisono as uni
from tests.processes import run_forked
from tests.ranks import RankPool, free_port
from unisono.comm.c10d import all_gather_single
from unisono.comm.communicator import Communicator
from unisono.comm.signatures.plain_data import NotPlainError, decoded, encoded
from unisono.errors import CommError, UsageError
from unisono.planner.choice import Choice, Lap

Pair = namedtuple("Pair", "a b")


class Level(enum.IntEnum):
    LOW = 1


class Named(str):
    pass


def there_and_back(value: Any, or_pickled: bool = True) -> Any:
    return decoded(b"before" + encoded(value, or_pickled), 6, "the value")


def bits_of(value: torch.Tensor) -> Any:
    return value.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()


def shown(value: Any) -> str:
    """Types and values in full: 1, 1.0 and True differ, and so do -0.0 and 0.0."""
    if isinstance(value, torch.Tensor):
        return f"{type(value)} {value.dtype} {tuple(value.shape)} {bytes(bits_of(value))!r}"
    if isinstance(value, dict):
        return f"{type(value)} {[(shown(key), shown(each)) for key, each in value.items()]}"
    if isinstance(value, set | frozenset):
        return f"{type(value)} {sorted(map(shown, value))}"
    if isinstance(value, tuple | list):
        return f"{type(value)} {[shown(each) for each in value]}"
    return f"{type(value)} {struct.pack('<d', value)!r}" if type(value) is float else f"{type(value)} {value!r}"


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**63) - 2, -(2**63) + 2)
    | st.integers(2**63 - 2, 2**64)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from(
        [
            torch.float32,
            torch.bfloat16,
            torch.device("cuda", 1),
            torch.device("cpu"),
            torch.Size([2, 0]),
            range(3, -2, -2),
        ]
    )
)
_keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.frozensets(st.binary())
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_keys, inner)
        | st.sets(_keys)
        | st.frozensets(_keys)
    ),
    max_leaves=30,
)


@given(_values)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    assert shown(there_and_back(value, or_pickled=False)) == shown(value)


def test_records_of_unisono_are_data() -> None:
    plan = uni.Plan.parse("dp=2,pp=2,microbatches=4,recompute=*.mlp,boundaries=0+3")
    choice = Choice(plan, 0.5, 10, {"parameters": 1.5}, race=[Lap("dp=2", None, 0.5)])
    found = there_and_back([choice, plan], or_pickled=False)
    assert found == [choice, plan]
    assert type(found[0].race[0]) is Lap
    with pytest.raises(NotPlainError):
        encoded(plan, or_pickled=True)  # pickle imports the class where it has not been


def test_tensors_keep_their_bits() -> None:
    torch.manual_seed(0)
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.float16, torch.bfloat16, torch.complex64]
    for dtype in [*dtypes, torch.float64, torch.float8_e4m3fn]:
        for shape in ((), (0, 3), (5,), (2, 1, 3)):
            tensor = torch.randn(shape).abs().to(dtype)
            found = there_and_back(tensor)
            assert shown(found) == shown(tensor)
    nan = torch.tensor([0x7FC01234, 0x7F800001], dtype=torch.int32).view(torch.float32)  # two nans of different bits
    assert shown(there_and_back(nan)) == shown(nan)
    for view in (torch.arange(9)[3:6], torch.arange(9)[::8][:1], torch.ones(2, 1).t(), torch.empty(0, 3).t()):
        assert shown(there_and_back(view)) == shown(view.clone(memory_format=torch.contiguous_format))
    found = there_and_back(torch.zeros(3))
    found += 1  # memory of its own


def test_what_is_held_twice_is_one_object_as_in_a_pickle() -> None:
    inner, tensor = [1], torch.ones(2)
    found = there_and_back({"a": inner, "b": (inner, tensor), "c": [tensor]})
    found["a"].append(2)
    found["c"][0].mul_(2)
    assert found["b"][0] == [1, 2]
    assert found["b"][1].tolist() == [2, 2]


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append((found,))
    return found


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def attributed() -> torch.Tensor:
    tensor: Any = torch.ones(1)
    tensor.note = "kept by a pickle"
    return tensor


NOT_PLAIN: dict[str, Any] = {
    "a named tuple": Pair(1, 2),
    "an OrderedDict": OrderedDict(a=1),
    "an IntEnum": Level.LOW,
    "a subclass of str": Named("a"),
    "NumPy's float64": np.float64(1.0),
    "NumPy's array": np.ones(2),
    "a parameter": torch.nn.Parameter(torch.ones(1)),
    "a tensor with a gradient": torch.ones(1, requires_grad=True),
    "a tensor with an attribute": attributed(),
    "a meta tensor": torch.ones(1, device="meta"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a conjugate": torch.ones(1, dtype=torch.complex64).conj(),
    "a function": print,
    "a class": dict,
    "a cycle": cycle(),
    "many levels": nested(100),
}
NOT_PLAIN_BUT_PICKLED: dict[str, Any] = {
    "every second element": torch.arange(6)[::2],
    "an expanded tensor": torch.arange(2).expand(3, 2),
    "a transposed tensor": torch.ones(2, 3).t(),
    "many elements": list(range(2000)),
}


@pytest.mark.parametrize("name", [*NOT_PLAIN, *NOT_PLAIN_BUT_PICKLED])
def test_what_is_not_exactly_plain_is_not_written(name: str) -> None:
    with pytest.raises(NotPlainError):
        encoded([(NOT_PLAIN | NOT_PLAIN_BUT_PICKLED)[name]], or_pickled=True)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_nor_where_only_data_may_be_sent(name: str) -> None:
    with pytest.raises(NotPlainError):
        encoded([NOT_PLAIN[name]])


@pytest.mark.parametrize("name", NOT_PLAIN_BUT_PICKLED)
def test_where_only_data_may_be_sent_any_number_and_layout_is(name: str) -> None:
    value = NOT_PLAIN_BUT_PICKLED[name]
    assert shown(there_and_back(value, or_pickled=False)) == shown(value)


def count(number: int) -> bytes:
    return struct.pack("<Q", number)


MALFORMED = {
    "nothing": b"",
    "an unknown letter": b"?",
    "a pickle": pickle.dumps([1]),
    "two values": b"NN",
    "a short number": b"i\0",
    "a long text": b"s" + count(2**62) + b"a",
    "many elements": b"l" + count(2**62),
    "more elements than bytes": b"l" + count(3) + b"NN",
    "text that is not UTF-8": b"s" + count(1) + b"\xff",
    "an unknown dtype": b"y" + count(4) + b"load",
    "an unknown device": b"v" + count(4) + b"load",
    "sizes that are none": b"z" + count(1) + b"N",
    "a set of a list": b"e" + count(1) + b"l" + count(0),
    "a set of equals": b"e" + count(2) + b"T" + struct.pack("<cq", b"i", 1),
    "a dict with a key alone": b"d" + count(1) + b"N",
    "a dict of equal keys": b"d" + count(4) + b"NNNN",
    "a dict with a dict as key": b"d" + count(2) + b"d" + count(0) + b"N",
    "a range of text": b"n" + count(1) + b"s" + count(1) + b"x",
    "a range of nothing": b"n" + count(0),
    "an unknown record": b"o" + count(5) + b"Popen" + b"t" + count(0),
    "a record of other fields": b"o" + count(4) + b"Plan" + b"t" + count(1) + b"s" + count(1) + b"x",
    "what comes later": b"l" + count(1) + b"@" + count(0),
    "itself": b"l" + count(9) + b"@" + count(0) + b"@" + count(0),
    "many levels": (b"l" + count(1)) * 100_000 + b"N",
    "a shape that is a list": b"a" + count(4) + b"bool" + b"l" + count(0) + count(1) + b"\1",
    "a shape of floats": b"a" + count(4) + b"bool" + b"t" + count(1) + struct.pack("<cd", b"f", 1) + count(1) + b"\1",
    "a negative shape": b"a" + count(4) + b"bool" + b"t" + count(1) + struct.pack("<cq", b"i", -1) + count(0),
    "a shape for more":
    b"a" + count(4) + b"bool" + b"t" + count(1) + struct.pack("<cq", b"i", 2**40) + count(1) + b"\1",
    "a bool of 2": b"a" + count(4) + b"bool" + b"t" + count(0) + count(1) + b"\2",
    "huge dims of nothing": b"a" + count(4) + b"bool" + b"t" + count(4)
    + struct.pack("<cq", b"i", 0) + struct.pack("<cq", b"i", 2**62) * 3 + count(0),
    "many dims": b"a" + count(4) + b"bool" + b"t" + count(5000) + struct.pack("<cq", b"i", 2**62) * 5000 + count(0),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_data_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(
        CommError, match=r"^rank 1's object is no plain data: .*, at byte \d+ of \d+; expected "
    ) as caught:
        decoded(MALFORMED[name], 0, "rank 1's object")
    assert len(str(caught.value)) < 400


# ---- among ranks ---------------------------------------------------------------------------------------------------


def only_data(comm: Communicator) -> None:
    mine = (comm.rank, [comm.rank] * 2000, {"t": torch.full((2,), float(comm.rank)).t()})
    everyone = [(rank, [rank] * 2000, {"t": torch.full((2,), float(rank))}) for rank in range(comm.size)]
    assert shown(comm.all_gather_object(mine, only_data=True)) == shown(everyone)
    assert shown(comm.broadcast_object(mine, 2, only_data=True)) == shown(everyone[2])
    gathered = comm.gather_object(mine, 1, only_data=True, async_op=True).wait()
    assert shown(gathered) == shown(everyone if comm.rank == 1 else None)
    dealt = comm.scatter_object(everyone if comm.rank == 3 else None, 3, only_data=True)
    assert shown(dealt) == shown(mine)
    expected = (
        r"rank 2 gave a value of type builtins\.list that is no plain data \(a value of type .*\.Pair\), with "
        "only_data=True; pass plain data, or no only_data on any rank"
    )
    bad = [Pair(1, 2)] if comm.rank == 2 else [1]
    for call in (
        lambda: comm.all_gather_object(bad, only_data=True),
        lambda: comm.broadcast_object(bad, 2, only_data=True),
        lambda: comm.scatter_object([bad] * comm.size if comm.rank == 2 else None, 2, only_data=True),
    ):
        with pytest.raises(UsageError, match=expected):
            call()
    with pytest.raises(UsageError, match=expected if comm.rank in (0, 2) else "what rank 2 gave is no plain data"):
        comm.gather_object(bad, 0, only_data=True)


def all_kinds(comm: Communicator) -> None:
    """Without only_data: data or pickled, what arrives is the same."""
    for name, value in (NOT_PLAIN | NOT_PLAIN_BUT_PICKLED | {"plain": [1, ("a", {2: 3.0})]}).items():
        if name in ("a cycle", "a meta tensor"):
            continue
        for theirs in comm.all_gather_object(value):
            assert type(theirs) is type(value), name
            if name not in ("many levels", "a sparse tensor", "a conjugate"):
                assert shown(theirs) == shown(value), name
    (loop,) = comm.broadcast_object(cycle())
    assert loop[0][0] is loop


def refused_pickles(comm: Communicator) -> None:
    """A rank that expects data, beside one that sends pickles."""
    if comm.rank == 0:
        comm.broadcast_object(Level.LOW)
        return
    with pytest.raises(CommError, match=r"rank 0's object is pickled, but plain data \(only_data=True\) is expected"):
        comm.broadcast_object(None, only_data=True)


@pytest.mark.parametrize("part", [only_data, all_kinds, refused_pickles])
def test_among_ranks(ranks4: RankPool, part: Callable[[Communicator], None]) -> None:
    ranks4.run(part)


# ---- a job without a secret ----------------------------------------------------------------------------------------


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _send_instead(comm: Communicator, data: bytes) -> None:
    """As whoever holds a rank's connection can: other bytes in place of its object."""
    lengths = torch.empty(comm.size, dtype=torch.int64)
    all_gather_single(lengths, torch.tensor([len(data)]), group=comm.group)
    row = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    all_gather_single(torch.empty(comm.size * len(row), dtype=torch.uint8), row, group=comm.group)


def attacked(url: str, rank: int, owned: Path) -> None:
    comm = uni.init(init_method=url, rank=rank, world_size=2)
    assert comm.seal.key is None  # nothing is signed
    model = torch.nn.Linear(2, 2)
    for data in (pickle.dumps(Evil(str(owned))), b"D" + pickle.dumps(Evil(str(owned))), b"l" + count(2**60), b"?"):
        if rank:
            _send_instead(comm, data)
        else:
            with pytest.raises(CommError, match=r"what came as rank 1's object is .*expected"):
                comm.broadcast_parameters(model)  # which begins with what the modules are made of
        dist.barrier(comm.group)
    assert not owned.exists()
    uni.shutdown()


def test_unisonos_own_messages_run_no_code_in_a_job_without_a_secret(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ends = run_forked([lambda rank=rank: attacked(url, rank, tmp_path / "owned") for rank in range(2)], tmp_path)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.output for end in ends)


def train(url: str, rank: int, plan: str, folder: Path) -> None:
    """With a plan that is given, from the self-check to the resumed checkpoint, pickle reads nothing but batches."""
    read: list[str] = []
    loads = pickle.loads

    def noted(data: bytes, **options: Any) -> Any:
        value = loads(data, **options)
        read.append("".join(traceback.format_stack(limit=8)[:-1]))
        return value

    pickle.loads = noted  # type: ignore[assignment]
    uni.init(init_method=url, rank=rank, world_size=2)
    for _ in range(2):
        torch.manual_seed(0)
        samples = [(torch.randn(4), torch.randn(2)) for _ in range(32)]
        engine = uni.Engine(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.AdamW(p, lr=np.float64(1e-3)),  # type: ignore[arg-type]
            plan=plan,
        )
        history = engine.fit(samples, epochs=1, batch_size=8, save=folder / "run", resume=True, save_every=2)
        assert math.isfinite(history.losses[-1]) if history.losses else True
    assert not read, f"{len(read)} pickles were read, the last here:\n{read[-1]}"
    uni.shutdown()


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2", "pp=2,microbatches=2"])
def test_training_without_a_secret_unpickles_nothing(plan: str, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ends = run_forked([lambda rank=rank: train(url, rank, plan, tmp_path) for rank in range(2)], tmp_path)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.output for end in ends)
