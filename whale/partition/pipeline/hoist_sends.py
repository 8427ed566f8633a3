"""Hoists sends and receives of micro-batches out of the functions that compute them, into the main graph.

Inside, a function would end only when its results have arrived, and a receive would begin only with the function that
reads it. In the main graph receives wait from the beginning of the step, as far as there is room, and sends hold nobody
up, as long as the receiver takes what is sent: so many tensors of each kind are under way at a time, and whoever is
faster than its reader waits for it, instead of filling memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whale.ir.emitter import COMMUNICATOR
from whale.ir.ops import POINT_TO_POINT
from whale.ir.program import Node, Program, Ref, sort_nodes
from whale.ir.values import DType, Func, Shape
from whale.partition.pipeline.microbatch_loop import CALL


@dataclass(frozen=True)
class _OutsideBody:
    """A function without its sends and receives.

    Attributes:
      body: receives have become arguments, what was sent are results.
      received, sent: the nodes, in the order of these arguments and results.
    """

    body: Program
    received: tuple[Node, ...]
    sent: tuple[Node, ...]


def hoist_sends(program: Program, room: Callable[[tuple[int, int]], int]) -> Program:
    """Moves the sends and receives of rows of a rank's outlined program from its functions to the main graph.

    Args:
      room: (number of the sending stage group, of the receiving one) -> results of one kind that may be under way.
    """
    taken = {name: _take_out(body) for name, body in program.functions.items()}
    if not any(o.received or o.sent for o in taken.values()):
        return program
    nodes: dict[str, Node] = {}
    effects = list(program.effects)
    readers: dict[str, list[str]] = {}  # a receive -> the calls so far that read it
    sends: dict[str, list[str]] = {}
    for node in program.nodes:
        function = node.attrs.get("f") if node.op == CALL else None
        outside = taken.get(function.name) if isinstance(function, Func) else None
        if outside is None or not (outside.received or outside.sent):
            nodes[node.name] = node
            continue
        number = node.name.rpartition("_")[2]  # of the micro-batch
        arguments = []
        for n in outside.received:
            name = f"{n.name}/{number}"
            waits = _find_latest(readers.setdefault(n.name, []), room(_find_edge(n)))
            nodes[name] = replace(_change_key(n, number), name=name, inputs=(Ref(COMMUNICATOR),), controls=waits)
            readers[n.name].append(node.name)
            arguments.append(Ref(name))
        results = tuple(outside.body.find_type(r) for r in outside.body.outputs[len(node.outputs) :])
        attrs = {
            **node.attrs,
            "Tin": (*node.attrs["Tin"], *(DType(n.outputs[0].dtype) for n in outside.received)),
            "Tout": (*node.attrs["Tout"], *(DType(t.dtype) for t in results)),
            "shapes": (*node.attrs["shapes"], *(Shape(t.shape) for t in results)),
        }
        outputs = (*node.outputs, *results)
        waits = tuple(w for n in outside.sent for w in _find_latest(sends.get(n.name, []), room(_find_edge(n))))
        nodes[node.name] = replace(
            node, inputs=(*node.inputs, *arguments), controls=(*node.controls, *waits), attrs=attrs, outputs=outputs
        )
        for i, n in enumerate(outside.sent):
            name = f"{n.name}/{number}"
            sends.setdefault(n.name, []).append(name)
            operands = (Ref(COMMUNICATOR), Ref(node.name, len(node.outputs) + i))
            nodes[name] = replace(_change_key(n, number), name=name, inputs=operands, controls=())
            effects.append(name)
    functions = {name: outside.body for name, outside in taken.items()}
    return replace(program, nodes=sort_nodes(nodes), effects=tuple(effects), functions=functions)


def _find_latest(before: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns, as controls, the one of ``before`` that has to be over before there is room for one more."""
    return (before[-count],) if len(before) >= count else ()


def _take_out(body: Program) -> _OutsideBody:
    moves = [n for n in body.nodes if n.op in POINT_TO_POINT and n.marks.micro_batch_rows]
    received = tuple(n for n in moves if n.op == "WhaleRecv")
    sent = tuple(n for n in moves if n.op == "WhaleSend")
    names = {n.name for n in moves}
    nodes = []
    for node in body.nodes:
        if node.name not in names:
            nodes.append(replace(node, controls=tuple(c for c in node.controls if c not in names)))
        elif node.op == "WhaleRecv":
            (t,) = node.outputs
            nodes.append(Node(node.name, "Placeholder", attrs={"dtype": DType(t.dtype), "shape": Shape(t.shape)},
                              outputs=(t,)))  # fmt: skip
    without = replace(
        body,
        nodes=tuple(nodes),
        inputs=(*body.inputs, *(n.name for n in received)),
        outputs=(*body.outputs, *(n.inputs[1] for n in sent)),
        effects=tuple(n for n in body.effects if n not in names),
    )
    return _OutsideBody(without, received, sent)


def _find_edge(node: Node) -> tuple[int, int]:
    """Returns the numbers of the stage groups between which a tensor is sent."""
    assert node.marks.edge is not None, node.name
    return node.marks.edge


def _change_key(node: Node, number: str) -> Node:
    """Gives what is sent or received for each micro-batch the key of one of them."""
    attrs = {**node.attrs, "key": f"{node.attrs['key']}/{number}"}
    return replace(node, attrs=attrs, marks=node.marks.replace_marks(micro_batch_rows="", edge=None))
