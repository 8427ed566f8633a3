from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts, Machine, NoHostsError, find_obstacle


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """``make_hosts(2, h1=Machine(...))``: hosts until the test's end, after which nothing of them may be left."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    made: list[Hosts] = []
    with ExitStack() as stack:

        def make(count: int, **machines: Machine) -> Hosts:
            hosts = Hosts(tmp_path, count, machines)
            stack.callback(lambda: made.append(hosts))
            try:
                return stack.enter_context(hosts)
            except NoHostsError as error:
                pytest.skip(str(error))

        yield make
    assert [left for hosts in made for left in hosts.find_left()] == []
