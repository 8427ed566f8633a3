"""Lets XLA compile nodes: they become calls of functions that TensorFlow compiles, in a rank's program with its local
shapes.

Nodes that have no kernel on the device are compiled one by one (``compile_marked``), unless a cluster contains them
already (``whale.kernels.clusters``). On GPUs these are XLA's own operations only: cuDNN has convolutions and pooling of
every layout and kind.

Other passes must leave functions that XLA compiles unchanged; ``change_other_graphs`` does that.

Decisions: 0051, 0169.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.ir.ops import CALLS
from whale.ir.program import COMPILED, Node, Program, Ref, find_called_functions, iterate_function_refs
from whale.ir.values import DType, Func

# Larger constants become arguments: inside of a compiled function they would be held a second time and slow XLA down.
_MOST_CONST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class XlaKernels:
    """Holds the operations that XLA can compile for the device of this process.

    Attributes:
      kernels: op -> its kernels; of each, attribute -> the dtypes that it may have (attributes that are not named may
        have any).
      on_gpu: the device is a GPU.
    """

    kernels: Mapping[str, Sequence[Mapping[str, frozenset[str]]]]
    on_gpu: bool = False

    def __contains__(self, node: Node) -> bool:
        """Returns True if XLA has a kernel for a node with its dtypes."""

        def allows(name: str, allowed: frozenset[str]) -> bool:
            given = node.attrs.get(name)
            asked = given if isinstance(given, tuple) else (given,)
            return given is None or all(one in allowed for one in asked)

        return any(all(allows(*one) for one in kernel.items()) for kernel in self.kernels.get(node.op, ()))


def compile_marked(program: Program, on_gpu: bool = False) -> Program:
    """Puts every node of one rank's program that has no kernel (marked by ``whale.passes.normalize.inline``) into a
    function of its own that XLA compiles.

    Args:
      on_gpu: the program runs on a GPU, which has kernels for all but XLA's own ops.
    """
    if on_gpu:
        program = _unmark_all_but_xla(program)
    done = find_compiled(program)
    functions: dict[str, Program] = {}
    main = _replace_marked_nodes(program, "", functions)
    bodies = {
        name: body if name in done else _replace_marked_nodes(body, name, functions)
        for name, body in program.functions.items()
    }
    return replace(main, functions={**bodies, **functions}) if functions else program


def change_other_graphs(program: Program, change: Callable[[Program], Program]) -> Program:
    """Applies ``change`` to ``program`` and its functions, except functions that XLA compiles, since it has no kernels
    for Whale's ops.
    """
    if not program.functions:
        return change(program)
    compiled = find_compiled(program)
    functions = {name: one if name in compiled else change(one) for name, one in program.functions.items()}
    return change(program.replace_nodes(program.nodes, functions=functions))


def find_compiled(program: Program) -> set[str]:
    """Returns the names of functions that XLA compiles, and of those called from them."""
    graphs = (program, *program.functions.values())
    compiled = (node for graph in graphs for node in graph.nodes if node.attrs.get(COMPILED))
    return set(find_called_functions(compiled, program.functions))


def count_compiled(program: Program) -> int:
    """Counts the calls of functions that XLA compiles, in all graphs of a program."""
    graphs = (program, *program.functions.values())
    return sum(node.op in CALLS and bool(node.attrs.get(COMPILED)) for graph in graphs for node in graph.nodes)


def make_call(
    graph: Program, nodes: Sequence[Node], name: str, function: str, results: Sequence[Ref]
) -> tuple[Node, Program]:
    """Returns the call that replaces ``nodes`` of a graph, and its function, which XLA compiles.

    Args:
      nodes: in the graph's order; no path leads out of them and back.
      name: name of the call.
      function: name of its function.
      results: the tensors of ``nodes`` that the call returns, in order.
    """
    inside: dict[str, Node] = {}
    own = {node.name for node in nodes}
    passed: dict[Ref, Ref] = {}

    def find_operand(ref: Ref) -> Ref:
        if ref.node in own:
            return ref
        producer = graph.by_name[ref.node]
        if producer.op == "Const" and producer.outputs[0].bytes <= _MOST_CONST_BYTES:  # XLA needs constants for shapes
            inside[ref.node] = replace(producer, controls=())
            return ref
        if ref not in passed:
            kind = graph.find_type(ref)
            argument = f"argument_{len(passed)}"
            inside[argument] = Node(argument, "Placeholder", attrs={"dtype": DType(kind.dtype)}, outputs=(kind,))
            passed[ref] = Ref(argument)
        return passed[ref]

    for node in nodes:
        attrs = {key: value for key, value in node.attrs.items() if key != COMPILED}
        inside[node.name] = replace(node, inputs=tuple(map(find_operand, node.inputs)), controls=(), attrs=attrs)
    body = Program(function, tuple(inside.values()), tuple(r.node for r in passed.values()), outputs=tuple(results))
    types = tuple(graph.find_type(ref) for ref in results)
    attrs = {
        "Tin": tuple(DType(graph.find_type(ref).dtype) for ref in passed),
        "Tout": tuple(DType(kind.dtype) for kind in types),
        "f": Func(function),
        "config": "",
        "config_proto": b"",
        "executor_type": "",
        COMPILED: True,
    }
    controls = tuple(_list_controls(nodes, own))
    return Node(name, "PartitionedCall", tuple(passed), controls, attrs, types, nodes[-1].scope), body


def _list_controls(nodes: Iterable[Node], own: set[str]) -> dict[str, None]:
    return dict.fromkeys(name for node in nodes for name in node.controls if name not in own)


def _replace_marked_nodes(program: Program, graph: str, functions: dict[str, Program]) -> Program:
    """Moves each node that is marked to be compiled by XLA (see `_is_marked`) into a function of its own, which a call
    in its place runs.

    Args:
      graph: name of the graph that ``program`` is, which begins the functions' names.
      functions: the program's functions by name; the new ones are added.
    """
    if not any(map(_is_marked, program.nodes)):
        return program
    nodes = []
    for node in program.nodes:
        if _is_marked(node):
            function = f"compiled/{graph}/{node.name}"
            node, functions[function] = make_call(program, (node,), node.name, function, node.list_refs())
        nodes.append(node)
    return program.replace_nodes(tuple(nodes))


def _unmark_all_but_xla(program: Program) -> Program:
    """Removes the mark to be compiled from all nodes except XLA's own ops and calls of functions."""

    def unmark(node: Node) -> Node:
        if COMPILED not in node.attrs or node.op.startswith("Xla") or any(True for _ in iterate_function_refs(node)):
            return node
        return replace(node, attrs={key: value for key, value in node.attrs.items() if key != COMPILED})

    functions = {name: one.replace_nodes(tuple(map(unmark, one.nodes))) for name, one in program.functions.items()}
    return program.replace_nodes(tuple(map(unmark, program.nodes)), functions=functions)


def _is_marked(node: Node) -> bool:
    return bool(node.outputs) and bool(node.attrs.get(COMPILED)) and node.op not in CALLS
