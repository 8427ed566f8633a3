"""What ranks agree on when one of them goes in between: all act, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from whale.errors import CommError
from whale.runtime.elastic.agreement import ANEW, GROWN, MET, WHOLE, Agreements

pytestmark = pytest.mark.core


class Meeting:
    """Of one rank with others, which say this."""

    def __init__(self, *others: int, gone: bool = False) -> None:
        self._others, self._gone = [str(number).encode() for number in others], gone

    def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str = "") -> list[bytes]:
        if self._gone:
            raise CommError("a rank is gone")
        return [data, *self._others]


def told(agreements: Agreements) -> int:
    """What a rank says of how far it is."""
    said = []

    class Heard(Meeting):
        def allgather_bytes(self, key: str, data: bytes, timeout_s: float, purpose: str = "") -> list[bytes]:
            said.append(int(data))
            return [data]

    agreements.catch_up(Heard())
    return said[0]


def interrupted(act: Callable[[], None]) -> Agreements:
    """Of a rank that had met, and agreed to grow when another one was gone."""
    found = Agreements()
    found.agree(1, MET, Meeting(), lambda: None)
    with pytest.raises(CommError, match="gone"):
        found.agree(1, GROWN, Meeting(gone=True), act)
    return found


def test_a_rank_acts_on_what_others_have_acted_on() -> None:
    acted: list[str] = []
    mine, other = interrupted(lambda: acted.append("mine")), Agreements()
    other.agree(1, GROWN, Meeting(), lambda: acted.append("other"))
    mine.catch_up(Meeting(told(other)))
    mine.catch_up(Meeting(told(other)))
    assert acted == ["other", "mine"]
    assert told(mine) == told(other)


def test_nobody_acts_where_nobody_has() -> None:
    mine, other = interrupted(lambda: pytest.fail("nobody knows of it")), Agreements()
    other.agree(1, MET, Meeting(), lambda: None)
    other.agree(1, WHOLE, Meeting(), lambda: None)
    mine.catch_up(Meeting(told(Agreements())))
    mine.catch_up(Meeting(told(other)))  # of which this one, a joining rank, knows nothing
    mine.agree(2, MET, Meeting(), lambda: None)
    assert told(mine) > told(other)


def test_the_same_ranks_plan_anew_more_than_once() -> None:
    acted: list[str] = []
    mine, other = Agreements(), Agreements()
    for one in (mine, other):
        one.agree(1, ANEW, Meeting(), lambda: None, 1)
    with pytest.raises(CommError, match="gone"):
        mine.agree(1, ANEW, Meeting(gone=True), lambda: acted.append("mine"), 2)
    mine.catch_up(Meeting(told(mine)))
    assert not acted
    other.agree(1, ANEW, Meeting(), lambda: acted.append("other"), 2)
    mine.catch_up(Meeting(told(other)))
    assert acted == ["other", "mine"] and told(mine) == told(other)
