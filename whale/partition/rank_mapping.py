"""Maps a partitioned program to one rank of the mesh: its peers, the keys of its exchanges, its rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.ir.emitter import COMMUNICATOR, Emitter
from whale.ir.layout import B, Shard
from whale.ir.mesh import Mesh
from whale.ir.ops import EXCHANGES
from whale.ir.plan import BatchInput, Reshard
from whale.ir.program import Node, Program, Ref
from whale.ir.values import Shape, TensorType
from whale.partition.resharding import emit_reshard

ROWS_OF_GROUP = "whale/rows"  # prefix of the names of nodes that slice a group's rows out of a batch


def _change_all_graphs(program: Program, change: Callable[[Node], Node]) -> Program:
    functions = {name: body.replace_nodes(tuple(map(change, body.nodes))) for name, body in program.functions.items()}
    return program.replace_nodes(tuple(map(change, program.nodes)), functions=functions)


def mark_axis(program: Program, axis: str) -> Program:
    """Marks the exchanges of ``program`` that have no mesh axis yet with ``axis``, along which they communicate."""

    def mark_node(node: Node) -> Node:
        if node.op not in EXCHANGES or node.marks.axis:
            return node
        return node.with_marks(axis=(axis,))

    return _change_all_graphs(program, mark_node)


def map_to_ranks(program: Program, mesh: Mesh, rank: int, comm: str) -> Program:
    """Replaces the axes of a program's exchanges by the ranks of ``rank``'s groups, and makes keys unique to each
    group.

    Args:
      program: the program for the coordinates of ``rank``, whose exchanges are marked with their axes.
      comm: name of the communicator.
    """
    groups: dict[tuple[str, ...], tuple[int, ...]] = {}

    def map_node(node: Node) -> Node:
        if node.op == "WhaleCommunicator":
            return replace(node, attrs={**node.attrs, "rank": rank, "communicator": comm})
        if not node.marks.axis:
            return node
        attrs, along = dict(node.attrs), node.marks.axis
        ranks = groups.get(along) or groups.setdefault(along, mesh.list_ranks_along(rank, *along))
        attrs["key"] = f"{attrs['key']}@{'+'.join(map(str, ranks)) if len(ranks) <= 4 else f'{ranks[0]}+{ranks[1]}...'}"
        if "peer" in attrs:
            attrs["peer"], attrs["ranks"] = ranks[attrs["peer"]], ()
        else:
            attrs["ranks"] = ranks
        return replace(node, attrs=attrs, marks=node.marks.replace_marks(axis=()))

    return _change_all_graphs(program, map_node)


def add_check(lowered: Program, rank: int, comm: str, mark: str, what: str) -> Program:
    """Adds a node to a rank's program that raises an error if the ranks run different programs.

    Args:
      mark: fingerprint that must be equal on all ranks.
      what: description of the program, for the error.
    """
    attrs = {"communicator": comm, "rank": rank}
    handle = lowered.by_name.get(COMMUNICATOR)
    nodes = list(lowered.nodes)
    if handle is None:
        nodes.insert(0, Node(COMMUNICATOR, "WhaleCommunicator", (), (), attrs, (TensorType("resource", ()),), "", True))
    said = {"key": "whale/check", "fingerprint": mark, "what": what, "ranks": ()}
    nodes.append(Node("whale/check", "WhaleCheck", (Ref(COMMUNICATOR),), (), said, (), "", True))
    return lowered.replace_nodes(tuple(nodes), effects=(*lowered.effects, "whale/check"))


def cut_rows(program: Program, whole: Program, b: BatchInput, groups: Shard, group: int) -> Program:
    """Changes ``program`` to take the whole batch as input ``b``, and to slice the rows of its group of ranks out of
    it.

    Args:
      program: the program of the group's ranks, whose input has the group's rows only.
      whole: a program whose input ``b`` has the type of the whole batch.
      b: the batch input.
      groups: the placement of the batch over all groups of ranks.
      group: number of this group.
    """
    node = program.by_name[b.name]
    t = whole.by_name[b.name].outputs[0]
    emitter = Emitter(group, len(groups.sizes), "", ROWS_OF_GROUP)
    emitter.nodes[b.name] = replace(node, attrs={**node.attrs, "shape": Shape(t.shape)}, outputs=(t,))
    change = Reshard("", Ref(b.name), B, groups, "", 0)
    rows = emit_reshard(emitter, change, t, lambda: Ref(b.name))
    if rows is None or rows == Ref(b.name):
        return program

    def replace_ref(ref: Ref) -> Ref:
        return rows if ref == Ref(b.name) else ref

    nodes = list(emitter.nodes.values())
    nodes += [replace(n, inputs=tuple(map(replace_ref, n.inputs))) for n in program.nodes if n.name != b.name]
    return program.replace_nodes(tuple(nodes), outputs=tuple(map(replace_ref, program.outputs)))
