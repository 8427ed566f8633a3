"""Infers shapes of loop variables by induction: a loop keeps the shape that it starts with if one iteration does.

Decision: 0124.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from whale.ir.ops import LOOPS
from whale.ir.program import Node, Program, iterate_function_refs
from whale.ir.values import UNMOVABLE, Dims, Shape, TensorType


class _Variable(NamedTuple):
    """Variable ``index`` of the loop ``node`` in ``graph`` ("" is the main graph)."""

    graph: str
    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index, of which nobody has need


def refine_loops(program: Program, settle: Callable[[Program], Program]) -> Program:
    """Makes the types of loop variables as static as their initial values, if the body preserves them.

    All candidate shapes are assumed at once, ``settle`` infers the types that follow, and shapes that a body does not
    preserve are dropped; the remaining ones are an invariant of all loops together. A body that several loops share is
    not changed.

    Args:
      program: already settled.
      settle: folds and refines types within all graphs.
    """
    rejected: set[_Variable] = set()
    while assumed := {v: s for v, s in _candidates(program).items() if v not in rejected}:
        settled = settle(_assume(program, assumed))
        broken = {v for v, shape in assumed.items() if not _keeps(settled, v, shape)}
        rejected |= broken
        if not broken:
            program = settled
    return program


def _graphs(program: Program) -> dict[str, Program]:
    return {"": program, **program.functions}


def _candidates(program: Program) -> dict[_Variable, Dims]:
    """Returns the loop variables whose initial value has a better known shape than the variable."""
    graphs = _graphs(program)
    uses = Counter(f.name for graph in graphs.values() for n in graph.nodes if n.op in LOOPS
                   for _, f in iterate_function_refs(n))  # fmt: skip
    found: dict[_Variable, Dims] = {}
    for name, graph in graphs.items():
        for node in graph.nodes:
            if node.op not in LOOPS or any(uses[node.attrs[key].name] > 1 for key in ("cond", "body")):
                continue
            for i, (ref, kind) in enumerate(zip(node.inputs, node.outputs)):
                if kind.dtype not in UNMOVABLE and not kind.is_static:
                    shape = _merge(kind.shape, graph.find_type(ref).shape)
                    if shape is not None and shape != kind.shape:
                        found[_Variable(name, node.name, i)] = shape
    return found


def _merge(own: Dims | None, told: Dims | None) -> Dims | None:
    if own is None or told is None or len(own) != len(told):
        return told if own is None else own
    return tuple(b if a is None else a for a, b in zip(own, told))


def _assume(program: Program, assumed: Mapping[_Variable, Dims]) -> Program:
    """Returns the program with these shapes on loops' outputs and on the arguments of their bodies and conditions."""
    graphs = _graphs(program)
    outputs: dict[tuple[str, str], dict[int, Dims]] = {}
    for variable, shape in assumed.items():
        loop = graphs[variable.graph].by_name[variable.node]
        outputs.setdefault((variable.graph, variable.node), {})[variable.index] = shape
        for key in ("cond", "body"):
            function = loop.attrs[key].name
            argument = graphs[function].inputs[variable.index]
            outputs.setdefault((function, argument), {})[0] = shape
    changed = {
        name: graph.replace_nodes(
            tuple(_set_types(n, outputs[name, n.name]) if (name, n.name) in outputs else n for n in graph.nodes)
        )
        for name, graph in graphs.items()
    }
    main = changed.pop("")
    return replace(main, functions=changed)


def _set_types(node: Node, shapes: Mapping[int, Dims]) -> Node:
    kinds = tuple(TensorType(t.dtype, shapes.get(i, t.shape)) for i, t in enumerate(node.outputs))
    if node.op not in LOOPS:
        return replace(node, outputs=kinds)
    recorded = {"output_shapes": tuple(Shape(t.shape) for t in kinds)}
    return replace(node, outputs=kinds, attrs={**node.attrs, **recorded})


def _keeps(program: Program, variable: _Variable, shape: Dims) -> bool:
    graphs = _graphs(program)
    body = graphs[graphs[variable.graph].by_name[variable.node].attrs["body"].name]
    result = body.find_type(body.outputs[variable.index]).shape
    return result is not None and len(result) == len(shape) and all(s in (None, r) for s, r in zip(shape, result))
