"""Defines marks: facts about a node that Whale's passes record beside TensorFlow's attributes.

Decision: 0140.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Marks:
    """Holds the marks of one node. A node that replaces another inherits its marks; TensorFlow never sees them.

    Attributes:
      backward: the node computes gradients.
      checkpoint: the node is an activation that the user wants stored for the backward pass.
      compute_again: the node is an activation that the user wants recomputed for the backward pass.
      recomputed: the node is a copy that recomputes an activation in the backward pass.
      compiled: the node came from a function with ``jit_compile=True``, to be compiled by XLA.
      full_precision: mixed precision leaves the node in its dtype.
      unscaled: the node is a gradient from which the loss scale has been divided out.
      all_finite: the node tells whether all gradients are finite (``whale.passes.normalize.loss_scaling``).
      gathered_at_use: the node is an Identity before one use of a weight that is sharded only to save memory; the
        weight is all-gathered there.
      on_host: the node runs in the host's memory (``whale.passes.memory.offload``).
      cut_in_runs: the node is a reshape through which an inner dimension may be sharded, in runs (``Shard.blocks``).
      blocks: of a gather, scatter or segment sum: n if the indices and the table can be divided along their first
        dimensions into n equal parts, so that part i of the indices addresses only part i of the table; 0 if unknown.
      owned_rows: the node treats each row of its operands alike, one row per unique id, with a count known only at run
        time; so it may run where the table's rows are (``whale.sharding_rules.embedding``).
      stream: name of a random op's stream of numbers (``whale.passes.normalize.annotate``); "" for others.
      of_first_rank: the node is an Identity whose value on the first rank counts for all ranks, whatever theirs is.
      on_first_rank: the node uses an object of the script (a table, a queue) that all ranks share, because they are
        threads of one process; so only the first rank runs it.
      on_every_rank: the node is stateful and nevertheless runs on every rank, because it changes an object that each
        has.
      initial: digest of the value that a deferred initial assignment, now a NoOp, would assign; "" for others. It makes
        ranks with different initial values differ in their fingerprints.
      axis: of a communication op, the mesh axes along which it communicates; () if its ``ranks`` are set or not yet
        known.
      micro_batch_rows: of a send or receive between stages, the placement by which micro-batches cut its tensor, as
        text; "" if the tensor is sent once per step.
      edge: of such a send or receive, (number of the sending stage group, number of the receiving one).
      ring_dim: of a send or receive of ring attention, the dimension of its tensor that is sharded around the ring.
        While the next axis is planned, such a receive also has an operand, the tensor that is sent in exchange: the
        received tensor gets the same placement.
      runs: of a communication op between two reshapes that view one dimension as two, such as (ranks' rows, one row of
        each micro-batch): (the one of the two that ranks do not shard, the number of parts into which micro-batches
        may cut it).
      rounds_for_wire: the node is a Cast to fewer bits before a tensor is sent.
      expected_bytes: of an exchange of table rows, the bytes that this rank is expected to send.
      device_backend: in programs made for prediction, the ``communication.backend`` that carries out a communication op
        on the device; "" if the host does.
    """

    backward: bool = False
    checkpoint: bool = False
    compute_again: bool = False
    recomputed: bool = False
    compiled: bool = False
    full_precision: bool = False
    unscaled: bool = False
    all_finite: bool = False
    gathered_at_use: bool = False
    on_host: bool = False
    cut_in_runs: bool = False
    blocks: int = 0
    owned_rows: bool = False
    stream: str = ""
    of_first_rank: bool = False
    on_first_rank: bool = False
    on_every_rank: bool = False
    initial: str = ""
    axis: tuple[str, ...] = ()
    micro_batch_rows: str = ""
    edge: tuple[int, int] | None = None
    ring_dim: int | None = None
    runs: tuple[int, ...] = ()
    rounds_for_wire: bool = False
    expected_bytes: int = 0
    device_backend: str = ""

    def list_given(self) -> dict[str, Any]:
        """Returns the marks that differ from their defaults, by name."""
        if self is NO_MARKS:
            return {}
        return {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}

    def replace_marks(self, **changes: Any) -> Marks:
        """Returns a copy of these marks with the given ones changed."""
        return _replace_marks(self, tuple(changes.items()))


@lru_cache(maxsize=1024)
def _replace_marks(marks: Marks, changes: tuple[tuple[str, Any], ...]) -> Marks:
    """Returns the changed marks, cached, so that the thousands of nodes of a program share a few dozen objects."""
    return replace(marks, **dict(changes))


NO_MARKS = Marks()
_DEFAULTS = {one.name: one.default for one in fields(Marks)}
