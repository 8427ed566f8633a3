"""Finds which inputs carry the batch, and divides its rows among the ranks.

An input may also be a stack of batches, [k, rows, ...], of which a step takes one batch at a time, mostly in a loop;
then dimension 1 has the rows.

Decision: 0022.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from whale.errors import PlanError
from whale.ir.layout import divide_evenly, divide_proportionally, shard
from whale.ir.ops import ASKS_SHAPE, BRANCHES, IDENTITIES, LOOPS
from whale.ir.plan import BatchInput
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE
from whale.sharding_rules.graph import list_called_functions

_FIRST = 1  # bit of dimension 0 in the masks of a StridedSlice


def rows_of_ranks(
    size: int, parts: int, shares: Sequence[int] = (), coordinates: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the number of rows that each rank computes of a batch of ``size`` rows.

    Args:
      parts: number of ranks.
      shares: rows of a usual batch per rank, or per coordinate of the axis ``data``; a batch of another size (the last
        one of an epoch) is divided in the same proportion. (): as equally as possible.
      coordinates: coordinate of every rank on the axis ``data``; ranks with the same one divide its rows evenly. ():
        there is no such axis.

    Raises:
      PlanError: there is not one share per rank or coordinate, or all are 0.
    """
    if not shares:
        return divide_evenly(size, parts)
    groups = max(coordinates, default=-1) + 1
    if len(shares) not in (parts, groups) or not any(shares):
        or_so = f", or {groups}, one for each coordinate of the axis data" if 1 < groups < parts else ""
        raise PlanError(
            "the batch cannot be split as `batch.shares` asks",
            given=f"shares {list(shares)} for {parts} ranks",
            expected=f"{parts} numbers, not all 0, for example {list(divide_evenly(size, parts))}{or_so}",
            action="change the key `batch.shares`, or the number of ranks",
        )
    rows = divide_proportionally(size, tuple(shares))
    if len(shares) == parts:
        return rows
    of_group = [iter(divide_evenly(n, list(coordinates).count(c))) for c, n in enumerate(rows)]
    return tuple(next(of_group[c]) for c in coordinates)


def batch_inputs(
    program: Program,
    parts: int,
    shares: Sequence[int] = (),
    marked: Sequence[str] = (),
    local: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    coordinates: Sequence[int] = (),
) -> tuple[BatchInput, ...]:
    """Finds the inputs that carry the batch, in dimension 0 (or 1, in stacks of batches), and the rows of each rank.

    Args:
      parts: number of ranks.
      shares, coordinates: see ``rows_of_ranks``.
      marked: names of the inputs that carry the batch (``batch.inputs``); names that this program lacks are ignored.
        (): the inputs with as many rows as the shares together, or else as many as the first input of rank 1 or more.
      local: input that a rank passes with its own rows only -> the rows of every rank. If there is one, an input that
        every rank passes whole is divided in the same way if it has as many rows.

    Raises:
      PlanError: none of the marked inputs exists, or one looks misspelt or has no dimension 0; the shares do not fit.
    """
    types = {name: program.by_name[name].outputs[0] for name in program.inputs}
    stacked = _stacks(program)
    dims = {n: int(n in stacked and n not in local) for n in types}  # the dimension of the rows
    candidates = {
        n: size
        for n, t in types.items()
        if t.shape and (size := t.shape[dims[n]]) is not None and t.dtype not in UNMOVABLE
    }
    present = [name for name in marked if name in candidates]
    for name in marked:
        # Not every program of a run has all marked inputs: a prediction takes no labels.
        near = difflib.get_close_matches(name, [n for n in candidates if n not in marked], 1)
        if name not in candidates and (name in types or near or not present):
            raise PlanError(
                "an input that `batch.inputs` names cannot carry the batch",
                given=name,
                expected=f"one of {', '.join(candidates)}" if candidates else "an input of rank 1 or more; it has none",
                action=f"name {near[0]!r} in `batch.inputs`"
                if near
                else "name an input of rank 1 or more in `batch.inputs`, or remove the key",
            )
    if not candidates:
        return ()
    given = dict.fromkeys(local.values())
    if len(given) > 1:
        raise PlanError(
            "two arguments of a step divide the batch differently over the ranks",
            given=", ".join(f"{name}: {list(sizes)}" for name, sizes in local.items()),
            expected="the same number of rows per rank in all of them",
            action="take all arguments of a step from one dataset",
        )
    usual = bool(shares) and sum(shares) in candidates.values()
    batch = sum(next(iter(given))) if given else sum(shares) if usual else next(iter(candidates.values()))
    chosen = [n for n, size in candidates.items() if n in local or (n in present if marked else size == batch)]
    origin = "rule: dimension {} has the size of the first input's"
    if marked:
        origin = "user (batch.inputs)"
    elif usual:
        origin = "rule: dimension {} has the rows of batch.shares"
    rows = []
    for name in chosen:
        size = candidates[name]
        sizes = next((s for s in given if sum(s) == size), None) or rows_of_ranks(size, parts, shares, coordinates)
        if name in local:
            rows.append(BatchInput(name, shard(0, sizes), "user (each rank passes its rows)", local=True))
            continue
        how = "; dimension 0 is read one element at a time" if dims[name] else ""
        how += ", in proportion to batch.shares" if shares and sizes != tuple(shares) and not given else ""
        rows.append(BatchInput(name, shard(dims[name], sizes), origin.format(dims[name]) + how))
    return tuple(rows)


def _stacks(program: Program) -> frozenset[str]:
    """Returns the names of inputs that are stacks of batches: all readers take single elements along dimension 0.

    Returns the empty set if one of them has no dimension 1: its elements are rows then, not batches.
    """
    shapes = {name: program.by_name[name].outputs[0].shape or () for name in program.inputs}
    apart = [name for name, shape in shapes.items() if shape and _is_taken_apart(program, program, Ref(name)) is True]
    return frozenset(apart) if all(len(shapes[name]) > 1 for name in apart) else frozenset()


def _is_taken_apart(program: Program, graph: Program, ref: Ref) -> bool | None:
    """Returns True if every reader takes one element of a tensor at a time along dimension 0; None if nothing reads the
    tensor.
    """
    if ref in graph.outputs:
        return False
    return _all_or_none(_takes_apart(program, graph, node, place) for node, place in graph.consumers.get(ref, ()))


def _all_or_none(found: Iterable[bool | None]) -> bool | None:
    known = [one for one in found if one is not None]
    return all(known) if known else None


def _takes_apart(program: Program, graph: Program, node: Node, place: int) -> bool | None:
    """Returns True if ``node`` takes one element at a time from its operand number ``place``; None if it does not read
    the elements.
    """
    if node.op in IDENTITIES:
        return _is_taken_apart(program, graph, Ref(node.name))
    if node.op in ASKS_SHAPE:
        return None
    if node.op in LOOPS or node.op in BRANCHES:
        return _inside(program, graph, node, place)
    if place != 0:
        return False
    if node.op == "StridedSlice":
        masks = {key: int(node.attrs.get(f"{key}_mask", 0)) for key in ("shrink_axis", "new_axis", "ellipsis")}
        return bool(masks["shrink_axis"] & _FIRST) and not (masks["new_axis"] | masks["ellipsis"]) & _FIRST
    if node.op in ("GatherV2", "Gather"):
        axis = graph.const(node.inputs[2]) if node.op == "GatherV2" else 0
        one = graph.find_type(node.inputs[1]).shape == ()
        return one and axis is not None and int(axis) == 0 and not node.attrs.get("batch_dims", 0)
    if node.op == "Unpack":
        return int(node.attrs.get("axis", 0)) == 0
    return node.op == "TensorListFromTensor"


def _inside(program: Program, graph: Program, node: Node, place: int) -> bool | None:
    """Returns True if the functions of a loop or branch take one element of operand ``place`` at a time; a loop may
    hand the tensor on unchanged.
    """
    first = 0 if node.op in LOOPS else 1
    if place < first:
        return False
    found: list[bool | None] = []
    for func in list_called_functions(node):
        body = program.functions[func.name]
        argument = Ref(body.inputs[place - first])
        if node.op in LOOPS and len(body.outputs) == len(body.inputs):
            if _origin(body, body.outputs[place]) != argument:
                return False
            kept = tuple(ref for i, ref in enumerate(body.outputs) if i != place)
            body = body.replace_nodes(body.nodes, outputs=kept)
        found.append(_is_taken_apart(program, body, argument))
    if node.op in LOOPS:
        found.append(_is_taken_apart(program, graph, Ref(node.name, place)))
    return _all_or_none(found)


def _origin(graph: Program, ref: Ref) -> Ref:
    node = graph.by_name[ref.node]
    while node.op in IDENTITIES:
        ref = node.inputs[0]
        node = graph.by_name[ref.node]
    return ref
