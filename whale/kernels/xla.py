"""Compiles nodes by XLA that have no kernel where they run: they become calls of functions compiled with local shapes.

On GPUs these are XLA's own operations only: cuDNN has convolutions and pooling of every layout and kind.

Passes over the other graphs of a program leave the functions that XLA compiles unchanged.

Decision: 0051.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whale.ir.marks import NO_MARKS
from whale.ir.program import COMPILED, Node, Program, Ref, find_called_functions, iterate_function_refs
from whale.ir.values import DType, Func


def compile_marked(program: Program, on_gpu: bool = False) -> Program:
    """Puts every marked node (passes.normalize.compiled) of one rank's program into a compiled function of its own.

    Args:
      on_gpu: the program runs on a GPU, where it has kernels for most of them.
    """
    if on_gpu:
        program = _unmark_all_but_xla(program)
    functions: dict[str, Program] = {}
    main = _replace_marked_nodes(program, "", functions)
    bodies = {name: _replace_marked_nodes(body, name, functions) for name, body in program.functions.items()}
    return replace(main, functions={**bodies, **functions}) if functions else program


def change_other_graphs(program: Program, change: Callable[[Program], Program]) -> Program:
    """Applies ``change`` to ``program`` and its functions, except for those that XLA compiles, which knows no kernel of
    ours.
    """
    if not program.functions:
        return change(program)
    compiled = find_compiled(program)
    functions = {name: one if name in compiled else change(one) for name, one in program.functions.items()}
    return change(program.replace_nodes(program.nodes, functions=functions))


def find_compiled(program: Program) -> set[str]:
    """Returns the functions that XLA compiles, and those called from them."""
    graphs = (program, *program.functions.values())
    compiled = (node for graph in graphs for node in graph.nodes if node.attrs.get(COMPILED))
    return set(find_called_functions(compiled, program.functions))


def _replace_marked_nodes(program: Program, graph: str, functions: dict[str, Program]) -> Program:
    """Replaces the marked nodes of one graph by calls; adds the functions called to ``functions``."""
    if not any(map(_is_marked, program.nodes)):
        return program
    nodes = []
    for node in program.nodes:
        if _is_marked(node):
            name = f"compiled/{graph}/{node.name}"
            node, functions[name] = _make_call(program, node, name)
        nodes.append(node)
    return program.replace_nodes(tuple(nodes))


def _unmark_all_but_xla(program: Program) -> Program:
    """Takes the marks of nodes away that are no operations of XLA's; calls of functions keep theirs."""

    def unmark(node: Node) -> Node:
        if COMPILED not in node.attrs or node.op.startswith("Xla") or any(True for _ in iterate_function_refs(node)):
            return node
        return replace(node, attrs={key: value for key, value in node.attrs.items() if key != COMPILED})

    functions = {name: one.replace_nodes(tuple(map(unmark, one.nodes))) for name, one in program.functions.items()}
    return program.replace_nodes(tuple(map(unmark, program.nodes)), functions=functions)


def _is_marked(node: Node) -> bool:
    return bool(node.outputs) and bool(node.attrs.get(COMPILED))


def _make_call(program: Program, node: Node, function: str) -> tuple[Node, Program]:
    """Returns the call that replaces ``node``, and its function; constants move into it, since XLA has to know
    shapes.
    """
    nodes: dict[str, Node] = {}
    passed: dict[Ref, Ref] = {}
    operands = []
    for ref in node.inputs:
        producer = program.by_name[ref.node]
        if producer.op == "Const":
            nodes[ref.node] = replace(producer, controls=())
            operands.append(ref)
            continue
        if ref not in passed:
            kind = program.find_type(ref)
            argument = f"argument_{len(passed)}"
            nodes[argument] = Node(argument, "Placeholder", attrs={"dtype": DType(kind.dtype)}, outputs=(kind,))
            passed[ref] = Ref(argument)
        operands.append(passed[ref])
    attrs = {key: value for key, value in node.attrs.items() if key != COMPILED}
    inner = replace(node, inputs=tuple(operands), controls=(), attrs=attrs)
    nodes[inner.name] = inner
    body = Program(function, tuple(nodes.values()), tuple(r.node for r in passed.values()), outputs=inner.list_refs())
    call_attrs = {
        "Tin": tuple(DType(program.find_type(ref).dtype) for ref in passed),
        "Tout": tuple(DType(kind.dtype) for kind in node.outputs),
        "f": Func(function),
        "config": "",
        "config_proto": b"",
        "executor_type": "",
        COMPILED: True,
    }
    call = replace(node, op="PartitionedCall", inputs=tuple(passed), attrs=call_attrs, marks=NO_MARKS)
    return call, body
