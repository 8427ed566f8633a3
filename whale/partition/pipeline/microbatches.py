"""Divides a rank's program into micro-batches: plans it over time, and turns the repeated part into function calls.

Decision: 0094.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from whale.ir.emitter import Emitter
from whale.ir.layout import Shard, divide_evenly, find_multiple, shard
from whale.ir.ops import COLLECTIVES, ROW_EXCHANGES
from whale.ir.plan import Plan
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType, require_static_shape
from whale.partition.axis_partitioner import count_axes_with_rows, iterate_levels, make_prefix
from whale.partition.pipeline.microbatch_loop import outline
from whale.partition.pipeline.plan_microbatches import EACH, time_plan, untie_microbatches
from whale.partition.rank_mapping import ROWS_OF_GROUP
from whale.partition.resharding import make_reshard_name
from whale.partition.spmd import is_alike
from whale.passes.analysis.rank_groups import brings_rows_together, map_named_ranks
from whale.passes.settings import PlanSettings

_SIZES = {"axis": "sizes", "split_axis": "split_sizes", "concat_axis": "concat_sizes"}
_OPS = COLLECTIVES - ROW_EXCHANGES  # exchanges of table rows have no dimension of the batch's rows


def find_batch_rows(program: Program, plan: Plan, position: int, micro_batches: int) -> dict[str, Shard]:
    """Returns the nodes of a rank's program that yield its rows of the batch -> how micro-batches cut these rows.

    Args:
      program: the rank's program.
      plan: the plan of the outermost axis.
      position: the rank's position in the mesh of the plan's axes.
    """
    axes = [p.size for p in iterate_levels(plan)]
    found: dict[str, Shard] = {}
    for b in plan.batch_inputs:
        assert isinstance(b.placement, Shard)
        groups = len(b.placement.sizes)  # of ranks that have the same rows
        last, group = count_axes_with_rows(axes, groups) - 1, position * groups // prod(axes)
        place = group % axes[last]
        sizes = b.placement.sizes[group - place : group - place + axes[last]]
        own, parts = shard(b.placement.dim, sizes, b.placement.blocks), b.placement.sizes
        of_groups = tuple(sum(parts[i : i + axes[last]]) for i in range(0, len(parts), axes[last]))
        whole = shard(b.placement.dim, of_groups, b.placement.blocks)
        of_group = [b.name, make_reshard_name(ROWS_OF_GROUP, Ref(b.name), whole)]
        of_rank = [f"{b.name}/whale_rows", make_reshard_name(make_prefix(last), Ref(b.name), own)]
        # If each rank has rows of each micro-batch, micro-batches already cut the rows of its group, of which the
        # rank's own rows are a slice.
        candidates = [(n, own.local_size(place)) for n in (*of_group, *of_rank)]
        if b.placement.blocks == micro_batches and not b.local:
            candidates += [(n, own.extent) for n in of_group]
        for name, count in reversed(candidates):
            node = program.by_name.get(name)
            if node is not None and (node.outputs[0].shape or (None,))[0] == count:
                if count:  # a rank without rows has nothing to cut
                    found[name] = shard(0, divide_evenly(count, micro_batches))
                break
    return found


def can_keep_own_rows(program: Program, rows: Iterable[Sequence[int]], micro_batches: int) -> bool:
    """Returns True if ranks that pass their own rows can keep them, so that micro-batches need not move rows between
    ranks.

    That is so without micro-batches, or if no rank reads another rank's rows. Otherwise no scope may be limited to some
    ranks, and all ranks must have the same number of rows, a multiple of the number of micro-batches.

    Args:
      program: the program of all ranks.
      rows: for each input, the rows of every rank.
    """
    if micro_batches == 1 or not brings_rows_together(program):
        return True
    return not map_named_ranks(program) and all(len({*sizes}) == 1 and sizes[0] % micro_batches == 0 for sizes in rows)


def find_own_rows(program: Program, plan: Plan) -> set[tuple[int, ...]]:
    """Returns how many rows each rank has along each mesh axis, if ranks pass their own rows and keep them in every
    micro-batch.

    ``interleave_rows`` recognises by these sizes which exchanges move rows of the batch. The result is empty if ranks
    pass the whole batch, or have unequal rows and read each other's.

    Args:
      program: the program of all ranks.
    """
    brought = [b.placement.sizes for b in plan.batch_inputs if b.local and isinstance(b.placement, Shard)]
    if not can_keep_own_rows(program, brought, plan.micro_batches):
        return set()
    axes = [p.size for p in iterate_levels(plan)]
    return {(sizes[0] * prod(axes[level + 1 :]),) * size for sizes in brought for level, size in enumerate(axes)}


@dataclass(frozen=True, slots=True)
class MicrobatchProgram:
    """Holds a rank's program and its plan over micro-batches. Planning is slow, so ranks with an equal program share
    one.

    Attributes:
      program: the rank's program for all its rows.
      rows: node that yields rows of the batch -> how micro-batches cut these rows.
      plan: the plan over micro-batches, made by ``time_plan``.
      regions: node -> "before", "each" or "after" (see ``whale.partition.pipeline.plan_microbatches``).
    """

    program: Program
    rows: Mapping[str, Shard]
    plan: Plan
    regions: Mapping[str, str]


def divide_in_micro_batches(
    program: Program,
    plan: Plan,
    rank: int,
    settings: PlanSettings,
    own: Collection[tuple[int, ...]],
    known: list[MicrobatchProgram],
) -> Program:
    """Rewrites the program of ``rank``, which processes all its rows at once, to run micro-batches one after the other.

    Args:
      program: the rank's program for all its rows.
      own: the result of ``find_own_rows``.
      known: the programs that were planned for other ranks under the same plan; this rank's is appended if none is
        alike.

    Raises:
      PlanError: a value of all micro-batches is needed before the last one is finished.
    """
    rows = find_batch_rows(program, plan, plan.mesh_ranks.index(rank), plan.micro_batches)
    if not plan.batch_inputs:
        return program
    together = interleave_rows(program, plan.micro_batches, own) if own else program
    if together is not program:
        rows = {name: make_interleaved_split(cut.extent, plan.micro_batches) for name, cut in rows.items()}
    program = untie_microbatches(together)
    one = next((one for one in known if one.rows == rows and is_alike(one.program, program)), None)
    if one is None:
        streams, statistics = settings.batch.local_streams, settings.time.local_statistics
        one = MicrobatchProgram(program, rows, *time_plan(program, plan.micro_batches, rows, streams, statistics))
        known.append(one)
    each = {name for name, region in one.regions.items() if region == EACH}
    return outline(program, one.plan, each)


# The next functions let ranks that pass their own rows exchange the rows of one micro-batch without those of others.
#
# Row i of a rank belongs to micro-batch i modulo their number, on every rank. Gathered rows of all ranks follow this
# pattern too, in the order of the batch: a dimension of rows can be viewed as (turns, micro-batches), and ranks gather
# or slice turns. No row has to move to another rank beforehand.
def make_interleaved_split(rows: int, micro_batches: int) -> Shard:
    """Returns the split of a rank's ``rows`` rows in which row i belongs to micro-batch i modulo ``micro_batches``."""
    return shard(0, (1,) * micro_batches, rows // micro_batches)


def interleave_rows(program: Program, micro_batches: int, rows: Collection[tuple[int, ...]]) -> Program:
    """Rewrites a rank's exchanges of rows so that the exchange of one micro-batch moves only rows of that micro-batch.

    If row i belongs to micro-batch i modulo their number m, the dimension of rows can be viewed as (rows / m, m): each
    index of the first one, a turn, has one row of every micro-batch. Ranks exchange whole turns, of which a micro-batch
    then takes its own rows.

    Args:
      rows: the number of rows of each rank, one tuple per axis of the mesh; multiples of ``micro_batches``.
    """

    def interleave_graph(graph: Program) -> Program:
        nodes = [new for node in graph.nodes for new in _view_rows(graph, node, micro_batches, rows)]
        return graph if len(nodes) == len(graph.nodes) else graph.replace_nodes(tuple(nodes))

    functions = {name: interleave_graph(body) for name, body in program.functions.items()}
    main = interleave_graph(program)
    if main is program and all(functions[name] is body for name, body in program.functions.items()):
        return program
    return replace(main, functions=functions)


def _view_rows(graph: Program, node: Node, micro_batches: int, rows: Collection[tuple[int, ...]]) -> list[Node]:
    """Returns the nodes that replace ``node``: the node between two reshapes if it exchanges rows of the batch, else
    the node alone.
    """
    if node.op not in _OPS or not node.outputs[0].is_static or not graph.find_type(node.inputs[1]).is_static:
        return [node]
    turns: dict[int, int] = {}  # dimension -> indices of one turn
    for name in _SIZES.keys() & node.attrs.keys():
        sizes = tuple(map(int, node.attrs[_SIZES[name]]))
        if times := max(find_multiple(sizes, along) for along in rows):
            turns[int(node.attrs[name])] = micro_batches * times
    return _put_in_views(graph, node, turns, micro_batches) if turns else [node]


def _put_in_views(graph: Program, node: Node, turns: Mapping[int, int], micro_batches: int) -> list[Node]:
    """Returns ``node`` between reshapes that view each dimension of rows as (turns, indices of one turn); see
    ``interleave_rows``.

    Args:
      turns: dimension of rows -> number of indices in one turn. If the node has a single such dimension, it gets the
        mark ``runs``, so that micro-batches may cut it.
    """
    e = Emitter(0, 1, "", "")
    source, made = graph.find_type(node.inputs[1]), node.outputs[0]

    def view_type(t: TensorType) -> TensorType:
        dims = ((n // turns[i], turns[i]) if i in turns else (n,) for i, n in enumerate(require_static_shape(t)))
        return TensorType(t.dtype, tuple(chain.from_iterable(dims)))

    attrs = dict(node.attrs)
    for name in _SIZES.keys() & attrs.keys():
        dim, sizes = attrs[name], _SIZES[name]
        attrs[sizes] = tuple(n // turns.get(dim, 1) for n in attrs[sizes])
        attrs[name] = dim + sum(other < dim for other in turns)
    marks = node.marks
    if len(turns) == 1:
        marks = marks.replace_marks(runs=(next(iter(turns)) + 1, micro_batches))
    seen = e.reshape(f"{node.name}/turns", node.inputs[1], source.dtype, require_static_shape(view_type(source)))
    name = f"{node.name}/in_turn"
    inputs, outputs = (node.inputs[0], seen), (view_type(made),)
    e.nodes[name] = replace(node, name=name, inputs=inputs, attrs=attrs, outputs=outputs, marks=marks)
    e.reshape(node.name, Ref(name), made.dtype, require_static_shape(made))
    return [n.with_marks(cut_in_runs=True) if n.op == "Reshape" else n for n in e.nodes.values()]
