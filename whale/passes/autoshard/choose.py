"""Chooses one option for each node of split scopes, so that resharding costs least.

The producer's option decides a tensor's placement, and its readers' options the placements that they want. A change
from one form to another is paid once, however many readers want it; and a form that can be cut from the whole tensor
costs nothing where the whole tensor is made anyway. The cheapest choice is found exactly: by eliminating one node after
the other (dynamic programming, ``eliminate``), which takes a moment for the chains and blocks that models consist of;
by an integer program (``integer_program``) where a graph is too wide for that.

Decision: 0035.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from whale.errors import PlanError
from whale.ir.layout import B, Placement
from whale.passes.autoshard import eliminate, integer_program
from whale.passes.autoshard.tensor_forms import TensorForms


def choose(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms]) -> list[int]:
    """Returns the option of every node.

    Args:
      costs: per node the cost of each of its options by itself.

    Raises:
      PlanError: no assignment is possible, or the solver found none in its time.
    """
    # Blocks that a model repeats have the same tensors: what these cost is found once.
    matters: dict[Hashable, dict[tuple[Placement, ...], int]] = {}
    needed = []
    for tensor in tensors:
        if (found := matters.get(shape := tensor.shape)) is None:
            found = matters[shape] = _forms_that_matter(tensor)
        if (simple := _simplify(tensor, found)) is not None:
            needed.append(simple)
    chosen = eliminate.solve(costs, needed)
    if chosen is None:
        chosen = integer_program.solve(costs, needed)
    if math.isinf(total_cost(costs, tensors, chosen)):
        raise PlanError(
            "no layouts were found for a split scope",
            given="operations whose layouts exclude each other",
            expected="a layout for every operation",
            action="put fewer operations under the scope, or name the dimension (`dim=`)",
        )
    return chosen


def _simplify(tensor: TensorForms, matters: Mapping[tuple[Placement, ...], int]) -> TensorForms | None:
    """Drops readers that never cost anything and fixes readers that want one form only; None: no choice affects the
    cost.
    """
    readers: dict[tuple[int | None, tuple[Placement, ...]], None] = {}
    for reader, forms in tensor.readers:
        if count := matters[forms]:
            readers[(reader, forms) if count > 1 else (None, forms[:1])] = None
    if not readers:
        return None
    several = len(set(tensor.forms)) > 1
    producer, made = (tensor.producer, tensor.forms) if several else (None, tensor.forms[:1])
    return replace(tensor, forms=made, producer=producer, readers=tuple(readers))


def _forms_that_matter(tensor: TensorForms) -> dict[tuple[Placement, ...], int]:
    """Maps the forms that readers want to the number of forms that can cost something; 0: none ever does."""
    sources = dict.fromkeys(tensor.forms)
    found = {}
    for _, forms in tensor.readers:
        wanted = dict.fromkeys(forms)
        found[forms] = len(wanted) if any(tensor.price(p, q) for p in sources for q in wanted) else 0
    return found


def total_cost(costs: Sequence[Sequence[float]], tensors: Sequence[TensorForms], chosen: Sequence[int]) -> float:
    """Returns the cost of an assignment, computed without the solver; infinite when it is impossible.

    Args:
      costs, tensors: as of ``choose``; chosen: per node the number of its option.
    """
    total = sum(options[i] for options, i in zip(costs, chosen))
    for tensor in tensors:
        source = tensor.forms[0 if tensor.producer is None else chosen[tensor.producer]]
        wanted = {forms[0 if reader is None else chosen[reader]] for reader, forms in tensor.readers}
        apart = sum(tensor.price(source, q) for q in wanted)
        whole = tensor.price(source, B) if any(B in forms for _, forms in tensor.readers) else math.inf
        total += min(apart, whole) if 0 < whole < math.inf and apart < math.inf else apart
    return total
