"""Marks: what Whale notes on a node beside what TensorFlow knows of it (decision 0140).

Decision: 0140.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a node. What stands for a node has its marks; TensorFlow is not told of them.

    Attributes:
      backward: it computes gradients.
      checkpoint: an activation that the user wants held for the backward pass.
      compute_again: one that the user wants computed again for it.
      recomputed: it computes an activation again.
      compiled: it came from a function that asks for XLA (``jit_compile=True``).
      full_precision: mixed precision leaves it as it is.
      unscaled: a gradient from which the scale of the loss has been taken out.
      all_finite: stands for whether all gradients are finite (``whale.passes.normalize.loss_scaling``).
      gathered_at_use: an Identity in front of a use of a weight that lies split only to be kept so, and is gathered
        there.
      on_host: it is computed in the host's memory (``whale.passes.memory.offload``).
      cut_in_runs: a reshape through which dimensions that are not outermost may be cut, in runs.
      blocks: a gather, scatter or segment sum stays within blocks: what stands in one part of the indices' first
        dimension addresses the same part of the table; how many such parts there are. 0: that is not known.
      owned_rows: it does the same to each of the rows that a table has for ids taken once, whose number only the run
        knows: they may lie with the owners of the table's rows (``whale.sharding_rules.embedding``).
      stream: of a random operation, the name of its stream (``whale.passes.normalize.annotate``).
      of_first_rank: an Identity whose value on the first rank is that of all, whatever others hold.
      on_every_rank: it runs on every rank although it is stateful: it changes what each of them has.
      initial: what an assignment of a first value would have assigned, by its digest.
      axis: of an exchange, the mesh axes along which it is; (): not said, or ranks are named already.
      micro_batch_rows: of a send or receive between stages, how micro-batches cut its tensor, as text; "": not at all.
      edge: of these, (number of the sending stage group, of the receiving one).
      ring_dim: of a send or receive of a tensor that goes round the ranks of an axis, the dimension along which it is
        divided. Until ranks have their programs such a receive also has what is sent in its place as an operand, and
        lies as that does.
      runs: of an exchange of a tensor of which one dimension is seen as two, (runs, run) or (turns, turn): that which
        is alike on all ranks, and into how many parts it is cut.
      rounds_for_wire: a Cast to fewer bits for the way to other ranks.
      expected_bytes: of an exchange of rows, what this rank is expected to send.
      device_backend: of an exchange that devices carry out, in programs that are predicted: ``communication.backend``.
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
        """Returns the marks that are not as they are on most nodes, by name."""
        if self is NO_MARKS:
            return {}
        return {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}

    def replace_marks(self, **changes: Any) -> Marks:
        """Returns these marks with some others."""
        return _replace_marks(self, tuple(changes.items()))


@lru_cache(maxsize=1024)
def _replace_marks(marks: Marks, changes: tuple[tuple[str, Any], ...]) -> Marks:
    """Makes marks once for all nodes that have them: programs of thousands of nodes have a few dozens."""
    return replace(marks, **dict(changes))


NO_MARKS = Marks()
_DEFAULTS = {one.name: one.default for one in fields(Marks)}
