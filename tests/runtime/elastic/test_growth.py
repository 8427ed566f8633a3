"""Ranks that come: how they are connected, who is there, and what the launcher reads of hosts."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import whale_ops
from whale.distributed.balance import BalanceHistory
from whale.distributed.joining import Commits, CommonState, Members, StepTimes, extend_shares, is_worthwhile
from whale.distributed.listener import RankListener
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.watch import RankChange
from whale.errors import ClusterError, CommError
from whale.launcher.mpirun import Host
from whale.launcher.scale_up import HostSource, find_free_slots, read_hosts
from whale.runtime.elastic.agreement import RankStatement
from whale.started import ProcessPlace, find_slot

pytestmark = pytest.mark.core
SECRET = "s" * 32


def test_ranks_connect_by_their_doors_and_strangers_do_not() -> None:
    doors = {rank: RankListener(f"127.0.0.1 {SECRET}", 3.5) for rank in (1, 4, 5)}
    addresses = {rank: door.address for rank, door in doors.items()}
    host, _, port = addresses[1].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger, ThreadPoolExecutor(3) as pool:
        stranger.sendall(b"x" * 40)
        wanted = [pool.submit(doors[r].connect_group, 7, r, (1, 4, 5), addresses, lambda: False) for r in doors]
        ends = [one.result(timeout=20) for one in wanted]
        assert stranger.recv(1) == b""
    assert [[descriptor < 0 for descriptor in end] for end in ends] == [[i == j for j in range(3)] for i in range(3)]
    comms = [whale_ops.connect_over_sockets(f"door {i}", i, end, share_memory=False) for i, end in enumerate(ends)]
    with ThreadPoolExecutor(3) as pool:
        said = pool.map(lambda comm: comm.allgather_bytes("x", bytes([comm.rank])), comms)
        assert list(said) == [[b"\0", b"\1", b"\2"]] * 3
        list(pool.map(lambda comm: comm.leave(5.0), comms))
    for door in doors.values():
        door.close()


def test_who_waits_for_a_rank_that_is_gone_gives_up() -> None:
    doors = [RankListener(f"127.0.0.1 {SECRET}", 3.5) for _ in range(2)]
    addresses = {rank: door.address for rank, door in enumerate(doors)}
    for rank, door in enumerate(doors):
        asked = iter(range(3))
        with pytest.raises(CommError, match="gone while the ranks connect anew"):
            door.connect_group(rank, rank, (0, 1), addresses, lambda asked=asked: next(asked, None) is None)
        door.close()


def test_who_is_there() -> None:
    members = Members(
        3, {0, 1, 2}, [RankChange(1, None, None), RankChange(None, [3, 4], {}), RankChange(3, None, None)]
    )
    assert (members.present, members.active) == ((0, 2, 4), (0, 2))
    members.inside.add(4)
    assert members.active == (0, 2, 4)


def test_of_what_was_committed_the_latest_two_calls_are_kept() -> None:
    commits = Commits()
    for calls, state in ((0, b"a"), (1, b"b"), (1, b"c"), (2, b"d")):
        commits.keep(calls, lambda state=state: state)
    assert {calls: state() for calls, state in commits.held.items()} == {1: b"c", 2: b"d"}


def test_joining_ranks_are_weighed_where_it_is_known_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    times = StepTimes()
    for took_s in (5.0, 1.0, 1.0, 9.0):
        times.begin()
        clock[0] += took_s
        times.end(stepped=True)
    assert times.weigh(12) == (12.0, 5.0) and times.weigh(None) is None
    assert is_worthwhile((12.0, 5.0), 1, 2, tell=False) and not is_worthwhile((12.0, 5.0), 2, 3, tell=False)
    assert is_worthwhile(None, 2, 3, tell=False)
    times.begin()
    clock[0] += 4.0
    times.begin_change()
    clock[0] += 2.0
    times.end(stepped=True)
    assert times.moving_s == 2.0 and times.weigh(12) is None


def test_joining_ranks_have_shares_as_the_others_have_on_average() -> None:
    assert extend_shares([], 4) == []
    assert extend_shares([2, 4], 4) == [2, 4, 3, 3]


def test_hosts_come_from_a_file_or_from_a_program(tmp_path: Path) -> None:
    listed = tmp_path / "hosts"
    listed.write_text("a slots=2  # two\nb:3\n\nc\n")
    assert read_hosts(str(listed)) == (Host("a", 2), Host("b", 3), Host("c", 1))
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho a:4\n")
    program.chmod(0o700)
    assert read_hosts(str(program)) == (Host("a", 4),)
    program.write_text("#!/bin/sh\necho nothing >&2; exit 3\n")
    with pytest.raises(ClusterError, match="exit code 3: nothing"):
        read_hosts(str(program))


def test_a_change_of_the_list_is_news_and_so_is_an_answer_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:1")
    hosts = HostSource(str(path))
    hosts.news.setblocking(True)
    try:
        hosts.ask()
        assert hosts.news.recv(1, socket.MSG_PEEK)
        hosts.news.setblocking(False)
        assert hosts.take() == (True, (Host("a", 1),))
        assert hosts.take() is None
        os.replace(path, tmp_path / "away")
        hosts.news.setblocking(True)
        assert hosts.news.recv(1, socket.MSG_PEEK)
        hosts.news.setblocking(False)
        forced, wrong = hosts.take() or (True, "")
        assert not forced and "No such file" in str(wrong)
    finally:
        hosts.close()


def test_joining_ranks_receive_all_that_ranks_decide_by() -> None:
    common = CommonState(3, 5, 2, [4, 2], BalanceHistory(looks=4, gain=1.32, slower=1.25, before_s=0.5))
    said = RankStatement(9, 8, 2, "h0", True, (1.0, 2.0), common)
    assert CommonState.from_values(unpack(pack(common.to_values()))) == common
    assert RankStatement.from_values(unpack(pack(said.to_values()))) == said


def test_joining_ranks_have_numbers_on_their_hosts_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which they choose a GPU: their mpirun counts them from 0, beside the ranks of the start."""
    assert find_free_slots(["a", "a", "b"], []) == [0, 1, 0]
    assert find_free_slots(["a", "a", "b"], [("a", 0), ("a", 2), ("b", 0)]) == [1, 3, 1], "one is gone from a"
    place = ProcessPlace(rank=3, size=4, local_rank=0, local_size=1, launcher="Open MPI")
    assert find_slot(place) == 0
    monkeypatch.setenv("WHALE_JOINS", "3")
    monkeypatch.setenv("WHALE_SLOTS", "0,1,0,2")
    assert find_slot(place) == 2
