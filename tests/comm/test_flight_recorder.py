"""Reports on dumps of torch's flight recorder: real ones of gloo, and such as NCCL leaves."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_forked
from tests.ranks import free_port
from unisono import cli
from unisono.comm.watchdog import flight_recorder
from unisono.errors import UsageError


def entry(number: int, op: str = "all_reduce", line: int = 10, **others: Any) -> dict[str, Any]:
    library = {"name": "wrapper", "filename": "/venv/lib/python3.11/site-packages/torch/x.py", "line": 3}
    return {
        "frames": [library, {"name": "train", "filename": "/far/train.py", "line": line}],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[16, 1024]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        **others,
    }


WAITS = {"state": "started", "retired": False}
GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
    "1": {"name": "1", "desc": "tp", "ranks": "[0, 2]"},
}


def explained(folder: Path, *ranks: list[dict[str, Any]]) -> str:
    dumps = {}
    for rank, entries in enumerate(ranks):
        dumps[rank] = folder / f"nccl_trace_rank_{rank}"
        dumps[rank].write_bytes(pickle.dumps({"version": "2.10", "pg_config": GROUPS, "entries": entries}, 2))
    return flight_recorder.explain(dumps)


FIRST = entry(1)
WAITING = entry(2, line=12, **WAITS)
HEAD = "ranks 0,1 wait in all_reduce #2 float32[16, 1024] at /far/train.py:12"


def test_a_rank_that_did_not_come(tmp_path: Path) -> None:
    rest = "rank 2 has not entered any collective since #1 and is at an unknown line after /far/train.py:10"
    assert explained(tmp_path, [FIRST, WAITING], [FIRST, WAITING], [FIRST]) == f"{HEAD}; {rest}"


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    assert explained(tmp_path, [FIRST, WAITING], [FIRST, WAITING]) == f"{HEAD}; rank 2 has left no dump"


def test_another_operation(tmp_path: Path) -> None:
    other = entry(2, "_all_gather_base", 20, input_dtypes=["BFloat16"], **WAITS)
    rest = "rank 2 is in all_gather_base #2 bfloat16[16, 1024] at /far/train.py:20"
    assert explained(tmp_path, [FIRST, WAITING], [FIRST, WAITING], [FIRST, other]) == f"{HEAD}; {rest}"


def test_other_sizes_that_nccl_let_pass(tmp_path: Path) -> None:
    past = [FIRST, entry(2, line=20, input_sizes=[[8]]), entry(3, "barrier", 21, input_sizes=[], **WAITS)]
    found = explained(tmp_path, [FIRST, WAITING], [FIRST, WAITING], past)
    begun = "rank 2 has begun all_reduce #2 float32[8] at /far/train.py:20"
    assert found == f"{HEAD}; {begun} and is in barrier #3 at /far/train.py:21"


def test_groups_in_opposite_order_and_messages(tmp_path: Path) -> None:
    in_group = entry(1, line=30, process_group=("1", "tp"), **WAITS)
    receives = entry(0, "recv 1<-0", 40, is_p2p=True, p2p_seq_id=4, **WAITS)
    found = explained(tmp_path, [FIRST, WAITING], [FIRST, receives], [FIRST, in_group])
    assert "rank 0 is in all_reduce #2 float32[16, 1024] at /far/train.py:12" in found
    assert "rank 1 is in recv 1<-0 #4 float32[16, 1024] at /far/train.py:40" in found
    assert "rank 2 waits in all_reduce #1 float32[16, 1024] at /far/train.py:30 in the group of ranks 0,2" in found


def test_nobody_waits(tmp_path: Path) -> None:
    assert explained(tmp_path, [FIRST], [FIRST]) == "ranks 0,1 wait in no collective that was recorded"


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


HUGE = b"\x80\x02}r\xff\xff\xff\x7f."  # a memo of 16 GiB for the C reader


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps(Runs(), protocol) for protocol in (0, 2, 4)),
        *(
            pickle.dumps(value, 2)
            for value in ([], {}, {"entries": 3, "pg_config": {}}, {"entries": [{}], "pg_config": {}})
        ),
        *(b"", b"not a pickle", b"\x80\x02", b"\x80\x02}X\xff\xff\xff\x7fabc", b"\x80\x04\x96" + b"\x7f" * 8, HUGE),
        pickle.dumps({"entries": [entry(1, process_group=[[]])], "pg_config": GROUPS}, 2),
    ],
)
def test_what_is_no_dump_is_refused_and_not_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a dump of torch's flight recorder"):
        flight_recorder.explain({0: path})
    assert not (tmp_path / "made").exists()


def leave_dump(folder: Path, rank: int, port: int) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    x = torch.ones(4)
    dist.all_reduce(x)
    time.sleep(1)  # gloo's thread notes that it is complete a little after the call
    if rank == 0:
        dist.all_reduce(x, async_op=True)  # LINE: real
    (folder / f"trace_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    store.set(f"done/{rank}", "1")
    store.wait(["done/0", "done/1"])
    if rank == 0:
        with contextlib.suppress(Exception):
            store.wait(["gone"])
    else:
        store.set("gone", "1")
    sys.stdout.flush()
    os._exit(0)


def test_what_torch_writes_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 does not record gloo's collectives")
    port = free_port()
    run_forked([functools.partial(leave_dump, tmp_path, rank, port) for rank in range(2)], tmp_path)
    assert cli.main(["attach", str(tmp_path)]) == 0
    source = Path(__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if text.endswith("# LINE: real"))
    sentence = capsys.readouterr().out
    assert sentence.startswith("rank 0 waits in all_reduce #2 float32[4] at "), sentence
    assert f"test_flight_recorder.py:{line}; rank 1 has not entered any collective since #1 and is at" in sentence
