"""Chooses the key of a script's exchange, which has to be equal on all ranks.

It is the name given by the script, or that of the operation in its graph, which is equal if the ranks build
equal graphs. Eager exchanges without a name are numbered in the order of the calls.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.frontends.horovod.ranks import refuse_other_set, require_own_run
from whale.runtime.context import Context
from whale.runtime.variables.deferred import capturing


def require_context(what: str, process_set: Any) -> Context:
    """Returns the run, for an exchange that ``what`` names.

    Raises:
      ClusterError: before ``hvd.init``.
      ProgramError: among some of the ranks, or inside a step of ``wh.function``.
    """
    refuse_other_set(process_set, what)
    context = require_own_run(what)[0]
    if capturing.get():
        raise ProgramError(
            "a step of wh.function is one program of all ranks, which exchanges by itself",
            op=what,
            given="an exchange of Horovod inside it",
            expected="none: batches, gradients and losses are global there",
            action="use tf.function for the step, or remove what is Horovod's from it",
        )
    return context


def make_key(context: Context, kind: str, name: str | None) -> str:
    """Returns the key of an exchange: equal on all ranks if their scripts do the same."""
    programs = context.planning.own_programs
    assert programs is not None
    programs.exchanges += 1
    if tf.executing_eagerly():
        return f"hvd/{kind}/{name or ''}"
    graph = tf.compat.v1.get_default_graph()
    # Numbers at the end of a graph's name count what this process has built; other ranks may have built more.
    function = re.sub(r"[\d_]+$", "", str(getattr(graph, "name", "")))
    return f"hvd/{function}/{graph.unique_name(f'Whale_{kind}_{_clean_name(name)}')}"


def _clean_name(name: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-/]", "_", name or "tensor")


def check_root(context: Context, root_rank: int) -> None:
    """Raises an error for a root rank that does not exist."""
    if not (isinstance(root_rank, int) and 0 <= root_rank < context.size):
        raise ProgramError(
            "this rank does not exist",
            given=f"root_rank={root_rank!r}",
            expected=f"a number from 0 to {context.size - 1}",
            action="correct root_rank",
        )
