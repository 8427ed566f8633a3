"""Makes the keys by which ranks match their exchanges; a key has to be equal on all ranks.

In a graph the key is made of the graph's name and a unique operation name, so ranks that build equal graphs have equal
keys. An eager exchange has the name that the script gives; those without a name are matched in the order of calls.
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
    """Returns the run's Context, after a check that a Horovod exchange is possible here.

    Args:
      what: the call, such as "hvd.allgather()", for errors.
      process_set: the call's argument.

    Raises:
      ClusterError: ``hvd.init`` was not called.
      ProgramError: ``process_set`` has only some of the ranks, or the call is inside a step of ``wh.function``.
    """
    refuse_other_set(process_set, what)
    context = require_own_run(what)[0]
    if capturing.get():
        raise ProgramError(
            f"{what} cannot be used inside a step of wh.function, which Whale itself distributes",
            op=what,
            given="an exchange of Horovod's API in a wh.function",
            expected="no exchanges: batches, gradients and losses in a wh.function are those of all ranks together",
            action="use tf.function for the step, or remove all hvd calls from it",
        )
    return context


def make_key(context: Context, kind: str, name: str | None) -> str:
    """Returns the key of an exchange, which is equal on all ranks if their scripts make the same calls.

    Args:
      kind: "allreduce", "allgather", ...
      name: the name that the script gives; None: none.
    """
    programs = context.planning.own_programs
    assert programs is not None
    programs.exchanges += 1
    if tf.executing_eagerly():
        return f"hvd/{kind}/{name or ''}"
    graph = tf.compat.v1.get_default_graph()
    # A number at the end of a graph's name counts the graphs of this process; other ranks may have built more.
    function = re.sub(r"[\d_]+$", "", str(getattr(graph, "name", "")))
    return f"hvd/{function}/{graph.unique_name(f'Whale_{kind}_{_clean_name(name)}')}"


def _clean_name(name: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-/]", "_", name or "tensor")


def check_root(context: Context, root_rank: int) -> None:
    """Raises a ProgramError if ``root_rank`` is not a rank of the run."""
    if not (isinstance(root_rank, int) and 0 <= root_rank < context.size):
        raise ProgramError(
            "root_rank is not a rank of this run",
            given=f"root_rank={root_rank!r}",
            expected=f"a number from 0 to {context.size - 1}",
            action="pass such a number as root_rank, or start more ranks",
        )
