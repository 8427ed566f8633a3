"""Keeps exchanges of rows that ranks bring themselves within micro-batches: each rank's rows are of each in turn.

Row i of a rank is of micro-batch i modulo their number, on every rank. What the ranks have together then is in turn as
well, in the order of the batch: a dimension of rows is seen as (turns, micro-batches), and ranks join and cut turns. So
a micro-batch's rows are brought together without those of others, and nothing is moved beforehand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

from whale.ir.emitter import Emitter
from whale.ir.layout import Split, find_multiple, split
from whale.ir.ops import COLLECTIVES, ROW_EXCHANGES
from whale.ir.program import Node, Program, Ref
from whale.ir.values import TensorType, require_static_shape

_SIZES = {"axis": "sizes", "split_axis": "split_sizes", "concat_axis": "concat_sizes"}
_OPS = COLLECTIVES - ROW_EXCHANGES  # those of no axis have none to be seen otherwise


def make_interleaved_split(rows: int, micro_batches: int) -> Split:
    """Returns how ``rows`` rows of a rank are cut into micro-batches in turn."""
    return split(0, (1,) * micro_batches, rows // micro_batches)


def interleave_rows(program: Program, micro_batches: int, rows: Collection[tuple[int, ...]]) -> Program:
    """Rewrites one rank's exchanges of rows so that the rows of each micro-batch stay together.

    Args:
      rows: of the ranks along each axis of the mesh, multiples of the micro-batches.
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
    """Puts ``node`` between two views of what it moves, where that has rows, or as many indices as if it had."""
    if node.op not in _OPS or not node.outputs[0].is_static or not graph.find_type(node.inputs[1]).is_static:
        return [node]
    turns: dict[int, int] = {}  # dimension -> indices of one turn
    for name in _SIZES.keys() & node.attrs.keys():
        sizes = tuple(map(int, node.attrs[_SIZES[name]]))
        if times := max(find_multiple(sizes, along) for along in rows):
            turns[int(node.attrs[name])] = micro_batches * times
    return _put_in_views(graph, node, turns, micro_batches) if turns else [node]


def _put_in_views(graph: Program, node: Node, turns: Mapping[int, int], micro_batches: int) -> list[Node]:
    """Makes ``node`` see dimensions as (turns, indices of one), and marks that of rows where there is just one."""
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
    return [n.marked(cut_in_runs=True) if n.op == "Reshape" else n for n in e.nodes.values()]
