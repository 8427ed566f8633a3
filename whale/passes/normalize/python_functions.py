"""Runs what changes objects of the script on every rank, where ranks are processes, with the results of the first one.

A Python function (``tf.numpy_function``, ``tf.py_function``) may change the script's objects: an environment, a list of
what was seen, a counter. Each rank runs the script and has such objects of its own, so each runs the function, on the
same whole operands; what one device would compute is what the first rank's gave, whatever others draw. Tables of words
and queues are such objects too: what a step inserts, the script finds on every rank. So are the iterators and datasets
of a step's loops, whose places and orders go on from call to call.

Decision: 0180.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whale.ir.ops import DATASET_LOOPS, ELEMENTS_READ, HAS_BODIES, ITERATOR_READS, OBJECT_UPDATES, PYTHON_FUNCTIONS
from whale.ir.program import Node, Program, Ref
from whale.ir.values import UNMOVABLE, DType
from whale.sharding_rules.graph import list_called_functions


def run_python_everywhere(program: Program) -> Program:
    """Marks the Python functions of the program, and of its loops and branches, and takes the first rank's results."""
    graphs = [program, *program.functions.values()]
    # Elsewhere iterators begin where they are read: on the first rank, as a session's does.
    loops = any(node.op == "IteratorGetNextAsOptional" for graph in graphs for node in graph.nodes)
    bodies = {name: _take_first_results(program.functions[name], loops) for name in _list_bodies(program)}
    changed = _take_first_results(program, loops)
    if changed is program and all(bodies[name] is program.functions[name] for name in bodies):
        return program
    return replace(changed, functions={**program.functions, **bodies})


def _list_bodies(program: Program) -> Iterator[str]:
    """Yields the functions of loops and branches, each once; datasets' functions are theirs."""
    seen: set[str] = set()
    waiting = [program]
    while waiting:
        for node in waiting.pop().nodes:
            if node.op in HAS_BODIES:
                for func in list_called_functions(node):
                    if func.name in program.functions and func.name not in seen:
                        seen.add(func.name)
                        waiting.append(program.functions[func.name])
                        yield func.name


def _take_first_results(graph: Program, loops: bool) -> Program:
    """Returns the graph, or a function's, with the first rank's results.

    Args:
      loops: whether the program has loops over datasets or iterators.
    """
    begins = loops and any(node.op == "MakeIterator" for node in graph.nodes)
    called = {node.name for node in graph.nodes if _is_called(node) or (loops and node.op in ITERATOR_READS)}
    if not called and not any(node.op in ELEMENTS_READ for node in graph.nodes):
        return graph
    taken = {
        ref: Ref(f"{ref.node}/whale_of_first_{ref.index}")
        for node in graph.nodes
        if node.name in called or node.op in ELEMENTS_READ
        for ref, kind in zip(node.list_refs(), node.outputs)
        if kind.dtype not in UNMOVABLE
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        node = replace(node, inputs=tuple([taken.get(ref, ref) for ref in node.inputs]))
        everywhere = node.name in called or (begins and _makes_dataset(node))
        nodes.append(node.with_marks(on_every_rank=True) if everywhere else node)
        for ref, kind in zip(node.list_refs(), node.outputs):
            if ref in taken:
                first = Node(taken[ref].node, "Identity", (ref,), (), {"T": DType(kind.dtype)}, (kind,), node.scope)
                nodes.append(first.with_marks(of_first_rank=True))
    return graph.replace_nodes(tuple(nodes), outputs=tuple(taken.get(ref, ref) for ref in graph.outputs))


def _is_called(node: Node) -> bool:
    """Tells whether an op changes objects of the script, and its results can be sent."""
    changes = node.op in OBJECT_UPDATES or (node.op in PYTHON_FUNCTIONS and node.stateful)
    return changes and not any(t.dtype in UNMOVABLE for t in node.outputs)


def _makes_dataset(node: Node) -> bool:
    return node.op.rstrip("V23456").endswith("Dataset") and node.op not in DATASET_LOOPS
