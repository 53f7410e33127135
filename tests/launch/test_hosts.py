from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.launch.hosts import Host, assign_ranks, parse_file, parse_list


def test_list() -> None:
    assert parse_list("a:2,b:3, c") == [Host("a", 2), Host("b", 3), Host("c", 1)]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("a:0", "at least 1, not '0'"),
        ("a:x", "not 'x'"),
        ("a:-1", "not '-1'"),
        ("a:²", "not '²'"),
        (":2", "names no host"),
        ("a:2,,b:1", "names no host"),
        ("-oProxyCommand=x:1", "not a host name"),
        ("a b:2", "not a host name"),
        ("a;rm:2", "not a host name"),
        ("a:1,a:2", "twice"),
        ("a:1,localhost:1,127.0.0.1:2", "'localhost' and '127.0.0.1' are the same host, .* slots .3."),
        ("", "names no host"),
    ],
)
def test_bad_lists_say_why(text: str, output: str) -> None:
    with pytest.raises(UsageError, match=output):
        parse_list(text)


def test_file_with_comments_and_blanks(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("\ufeff# cluster\n\nnode0 slots=4  # the big one\r\n  node1   slots=2\nnode2\nfe80::1\n")
    assert parse_file(path) == [Host("node0", 4), Host("node1", 2), Host("node2", 1), Host("fe80::1", 1)]


def test_file_as_batch_systems_write_it_has_a_host_once_a_slot(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("node0\nnode0\nnode1\nnode0\nnode1\nnode2 slots=2\n")
    assert parse_file(path) == [Host("node0", 3), Host("node1", 2), Host("node2", 2)]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("node0 slots=4\nnode1 slots=many\n", r"hosts:2: the slots of node1 .* not 'many'"),
        ("node0 4\n", r"hosts:1: cannot read 'node0 4'; a line is `node0 slots=4`"),
        ("\n# x\nnode0 slots=4 gpus=2\n", r"hosts:3: cannot read"),
        ("node0 slots=1\nnode0 slots=1\n", r"hosts:2: host 'node0' is given twice"),
        ("node0 slots=2\nnode1\nnode0\n", r"hosts:3: host 'node0' is given twice"),
        ("localhost\n::1\n", r"hosts:2: 'localhost' and '::1' are the same host"),
        ("node0 slots=\n", r"hosts:1: the slots of node0"),
        ("a\nnode0:4\n", r"hosts:2: cannot read 'node0:4'; in a hostfile that is `node0 slots=4`"),
        ("a;b slots=1\n", r"hosts:1: 'a;b' is not a host name"),
        ("# nothing\n", "names no host"),
    ],
)
def test_bad_files_name_file_line_and_fault(tmp_path: Path, text: str, output: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=output):
        parse_file(path)


def test_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere' cannot be read: No such file"):
        parse_file(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="Is a directory"):
        parse_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        parse_file(tmp_path / "binary")


def test_placing_fills_hosts_in_order_and_drops_empty_ones() -> None:
    hosts = [Host("a", 2), Host("b", 2), Host("c", 2)]
    placed = assign_ranks(hosts, 3)
    assert [(p.host.name, p.first_rank, p.count) for p in placed] == [("a", 0, 2), ("b", 2, 1)]
    assert sum(p.count for p in assign_ranks(hosts, None)) == 6


@pytest.mark.parametrize("n", [0, -3, 7])
def test_placing_too_few_or_too_many(n: int) -> None:
    with pytest.raises(UsageError, match=f"-n {n}"):
        assign_ranks([Host("a", 2), Host("b", 4)], n)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_every_rank_has_exactly_one_place(slots: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, sum(slots)))
    placed = assign_ranks([Host(f"h{i}", count) for i, count in enumerate(slots)], n)
    ranks = [rank for p in placed for rank in range(p.first_rank, p.first_rank + p.count)]
    assert ranks == list(range(n))
    assert all(0 < p.count <= p.host.slots for p in placed)
