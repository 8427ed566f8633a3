"""What every rank does at the same place of its script."""

from __future__ import annotations

from whale.errors import CommError
from whale.runtime.ranks.ranks import Ranks


def read_together(ranks: Ranks, name: str, what: str, one: str, many: str) -> None:
    """All ranks are about to read the variable ``name``; collective.

    Args:
      what: such a variable, in words.
      one, many: why a rank cannot read it alone, of one such variable and of several.

    Raises:
      CommError: the run is over, or the ranks do not all read that variable.
    """
    if ranks.ended:
        raise CommError(
            f"{what} cannot be read any more",
            variable=name,
            given="a reading after wh.shutdown()",
            expected="a reading by all ranks before it",
            action="read or save variables before wh.shutdown()",
        )
    # Told apart by this exchange, which every other rank has to make at the same place of its script.
    purpose = f"the reading of the variable {name!r}, {one} (every rank has to read it)"
    said = ranks.comms[0].allgather_bytes("whale/read", name.encode(), ranks.config["check.timeout_s"], purpose)
    other = next((rank for rank, n in enumerate(said) if n != said[0]), None)
    if other is not None:
        raise CommError(
            f"the ranks read different variables, {many}",
            given=f"rank 0 reads {said[0].decode()}, rank {other} reads {said[other].decode()}",
            expected="the same variables in the same order on every rank",
            action="read variables on every rank, whatever the rank does with the value",
        )
