"""Gathers sharded and stage variables on the first rank, for writers that run on one rank only (SavedModel, Keras
files).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from whale.runtime.context import Context
from whale.runtime.variables.checkpoint_regions import find_variable, is_split
from whale.runtime.variables.compared import refuse_differences
from whale.runtime.variables.deferred import make_whole


def refuse_different_copies(holders: Iterable[Any], context: Context, when: str) -> None:
    """Raises an error if the ranks' copies of a trainable variable that is about to be saved differ; collective between
    processes.

    Args:
      holders: the variables, or objects of a checkpoint that may be or wrap one.
      when: describes the saving, for messages.

    Raises:
      CommError: copies differ; names the variables and ranks.
    """
    if context.has_other_processes:
        only = {id(v._handle) for v in map(find_variable, holders) if v is not None}
        refuse_differences(
            context.variables.describe_held(context, context.outside, only, trainable=True), context, when
        )


def describe_unreadable(holders: Iterable[Any]) -> str:
    """Returns a sentence about the first variable that a rank cannot read without the other ranks, with the reason; ""
    if there is none.

    Args:
      holders: the variables, or objects of a checkpoint that may be or wrap one.
    """
    for holder in holders:
        variable = find_variable(holder)
        name = getattr(holder, "path", None) or getattr(variable, "name", "").partition(":")[0]
        if is_split(variable):
            parts = variable._whale_parts
            if not parts.is_assigned and (parts.tiles.count > 1 or parts.group):
                return f"the variable {name!r} is sharded over the ranks"
        home = getattr(variable, "_whale_home", None)
        if home is not None and home.ranks is not None:
            return f"the variable {name!r} is held by the ranks of one stage"
    return ""


@contextmanager
def gather_on_first_rank(holders: Iterable[Any], context: Context) -> Iterator[None]:
    """Lets the first rank read all of the variables inside this context without the other ranks, even sharded or stage
    variables.

    Collective if any of them is not whole on every rank. Sharded variables are gathered one after the other, and freed
    again at the end.

    Args:
      holders: the variables, or objects of a checkpoint that may be or wrap one.
    """
    variables = list({id(v): v for v in map(find_variable, holders) if v is not None}.values())
    gathered: list[Any] = []
    try:
        for variable in variables:
            make_whole(variable)  # if no step has used it
            # A value that was assigned is whole on all ranks, and stays so.
            if is_split(variable) and not variable._whale_parts.is_assigned:
                whole = variable._whale_parts.gather_whole()
                if context.rank == 0:
                    gathered.append(variable)
                    variable._whale_parts.hold(whole)
        context.variables.bring_home(variables, context)
        yield
    finally:
        for variable in gathered:
            variable._whale_parts.settle()
