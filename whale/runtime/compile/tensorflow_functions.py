"""Lowers ranks' programs to TensorFlow FunctionDefs and GraphDefs, which the runtime registers and calls.

Decision: 0014.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from tensorflow.core.framework import function_pb2

from whale.capture.encode import encode_function_def, encode_graph_def, encode_node_def, find_attr_types
from whale.ir.ops import DRAWS_BY_COUNTER, READS
from whale.ir.program import Node, Program, Ref, iterate_function_refs, make_const
from whale.ir.values import DType, Func, Shape, TensorType
from whale.kernels.xla import change_other_graphs
from whale.partition.pipeline.microbatch_loop import CALL

_PHILOX = 1
_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class LoweredFunction:
    """Represents a step as a callable TensorFlow function.

    Attributes:
      name: of the function to call.
      definitions: FunctionDefs to register, callees first.
      inputs: node names of the tensors to pass, in order.
      handles: for each rank of this process, the variable nodes whose handles follow these, in order.
      outputs: number of results; they are those of the first of these ranks.
    """

    name: str
    definitions: tuple[Any, ...]
    inputs: tuple[str, ...]
    handles: tuple[tuple[str, ...], ...]
    outputs: int


def communicates(ranks: Sequence[Program]) -> bool:
    """Returns True if the ranks' programs need the op library: they have ops of Whale (exchanges, micro-batches) or
    share random streams.
    """
    return has_streams(ranks) or any(
        n.op.startswith("Whale") for r in ranks for graph in (r, *r.functions.values()) for n in graph.nodes
    )


def load_ops(ranks: Sequence[Program]) -> None:
    """Loads Whale's op library if the ranks' programs need it."""
    if communicates(ranks):
        import whale_ops

        whale_ops.load_ops()


def lower_to_function(
    ranks: Sequence[Program], tag: str, streams: str = "", threads: Sequence[int] = ()
) -> LoweredFunction:
    """Creates the functions of a step for the ranks of this process; several ranks (in-process transport) run
    concurrently in one call.

    Args:
      ranks: the programs of the ranks (see whale.partition.spmd), with equal inputs and outputs.
      tag: unique in the process; prefix of all function names.
      streams: prefix of the names of their random streams; "": each random operation has a stream of its own.
      threads: for each rank, the number of threads on cores that other ranks lend; 0 or (): TensorFlow's own threads.
    """
    threads = threads or (0,) * len(ranks)
    called = len(ranks) > 1 or any(threads)
    if streams:
        ranks = [with_streams(program, f"{streams}/{i}") for i, program in enumerate(ranks)]
    definitions: list[Any] = []
    mains: list[Any] = []
    handles: list[tuple[str, ...]] = []
    for i, program in enumerate(ranks):
        prefix = f"{tag}_rank{i}" if called else tag
        renamed = _rename_functions(program, prefix)
        definitions += function_definitions(renamed)
        variables = tuple(v.node for v in renamed.variables)
        if i > 0:
            # This rank's results are not read, but the first rank waits for exchanges that they depend on.
            wanted = dict.fromkeys(r.node for r in renamed.outputs if r.node not in renamed.inputs + variables)
            renamed = replace(renamed, effects=tuple(dict.fromkeys((*renamed.effects, *wanted))))
        handles.append(variables)
        main = encode_function_def(_calls_by_name(replace(renamed, inputs=renamed.inputs + variables)), prefix)
        if len(ranks) > 1:
            # Inlined side by side, or specialised to the results that are read (the first rank's), equal arithmetic
            # of two ranks would be rewritten in two ways by TensorFlow's optimiser, and their copies of a variable
            # would drift apart by rounding.
            main.attr["_noinline"].b = main.attr["_nospecialize"].b = True
        definitions.append(main)
        mains.append(main)
    if called:
        mains.append(_side_by_side(tag, mains, len(ranks[0].inputs), threads))
        definitions.append(mains[-1])
    name = mains[-1].signature.name
    return LoweredFunction(name, tuple(definitions), ranks[0].inputs, tuple(handles), len(ranks[0].outputs))


def function_definitions(program: Program) -> list[Any]:
    """Returns the FunctionDefs of the functions that a program's nodes call or branch to."""
    return [encode_function_def(_calls_by_name(_reads_awaited(body)), name) for name, body in program.functions.items()]


def _reads_awaited(body: Program) -> Program:
    """Returns a function body in which variable reads are control outputs too, so that nodes after the call wait for
    them.

    TensorFlow inlines the bodies of branches into their callers. Nodes that wait for a branch then wait for its effects
    only, and could write a variable before the branch has read it.
    """
    reads = (node.name for node in body.nodes if node.op in READS)
    return replace(body, effects=tuple(dict.fromkeys((*body.effects, *reads))))


def _calls_by_name(graph: Program) -> Program:
    """Returns ``graph`` with each function stored only in its first call node, and named in the other calls.

    TensorFlow's passes visit the function of every node that stores one, so repeated storing costs time.
    """
    held: set[str] = set()
    others: dict[int, dict[str, Any]] = {}  # number of attributes that calls share -> those of all but the first

    def rewrite_node(node: Node) -> Node:
        if node.op != CALL:
            return node
        function = node.attrs["f"]
        if function.name not in held:
            held.add(function.name)
            return replace(node, attrs={**node.attrs, "f": function.name, "bodies": (function,)})
        if id(node.attrs) not in others:
            others[id(node.attrs)] = {**node.attrs, "f": function.name, "bodies": ()}
        return replace(node, attrs=others[id(node.attrs)])

    return replace(graph, nodes=tuple(map(rewrite_node, graph.nodes)))


def lower_to_graph(program: Program, tag: str) -> Any:
    """Converts a rank's program to a GraphDef (for a v1 session); its functions are named after ``tag``."""
    renamed = _rename_functions(program, tag)
    graph_def = encode_graph_def(_calls_by_name(replace(renamed, functions={})))
    graph_def.library.function.extend(function_definitions(renamed))
    return graph_def


@cache
def _carries_functions(op: str) -> bool:
    return any(kind in ("func", "list(func)") for kind in find_attr_types(op).values())


def _rename_functions(program: Program, tag: str) -> Program:
    """Renames function bodies to ``<tag>_body<i>``, since function names are global in a process."""
    names = {old: f"{tag}_body{i}" for i, old in enumerate(program.functions)}
    if not names:
        return program

    def rewrite_value(value: Any) -> Any:
        if isinstance(value, Func):
            return replace(value, name=names.get(value.name, value.name))
        if isinstance(value, tuple) and value and isinstance(value[0], Func):
            return tuple(map(rewrite_value, value))
        return value

    changed: dict[int, dict[str, Any]] = {}  # attributes that several nodes share stay shared

    def rewrite_node(node: Node) -> Node:
        if not _carries_functions(node.op):
            return node
        if id(node.attrs) not in changed:
            changed[id(node.attrs)] = {k: rewrite_value(v) for k, v in node.attrs.items()}
        return replace(node, attrs=changed[id(node.attrs)])

    def rewrite_graph(graph: Program, functions: Mapping[str, Program]) -> Program:
        return replace(graph, nodes=tuple(map(rewrite_node, graph.nodes)), functions=functions)

    return rewrite_graph(program, {names[old]: rewrite_graph(body, {}) for old, body in program.functions.items()})


def _side_by_side(name: str, mains: Sequence[Any], shared: int, threads: Sequence[int]) -> Any:
    """Creates a FunctionDef that calls one function per rank concurrently, and returns the first rank's results.

    Args:
      name: of the new function.
      mains: the FunctionDef of each rank.
      shared: number of leading inputs that all ranks take; each rank's own inputs (variable handles) follow.
      threads: for each rank, the number of threads on lent cores, or 0.
    """
    function = function_pb2.FunctionDef()
    function.signature.name = name
    function.signature.is_stateful = True
    first = mains[0].signature
    inputs: list[str] = []
    for argument in first.input_arg[:shared]:
        function.signature.input_arg.add(name=f"shared_{len(inputs)}", type=argument.type)
        inputs.append(f"shared_{len(inputs)}")
    for i, main in enumerate(mains):
        own = []
        for j, argument in enumerate(main.signature.input_arg[shared:]):
            function.signature.input_arg.add(name=f"rank{i}_{j}", type=argument.type)
            own.append(f"rank{i}_{j}")
        # TensorFlow's own call op would cancel the other ranks before it reports an error, and one of their errors
        # might be reported first.
        node = function.node_def.add(name=f"call_{i}", op=CALL)
        node.input.extend(inputs + own)
        node.attr["f"].s = main.signature.name.encode()
        node.attr["bodies"].list.func.add(name=main.signature.name)
        node.attr["cancelled_alone"].b = len(mains) > 1
        node.attr["threads"].i = threads[i]
        node.attr["Tin"].list.type.extend(a.type for a in main.signature.input_arg)
        node.attr["Tout"].list.type.extend(a.type for a in main.signature.output_arg)
        node.attr["Tin"].list.SetInParent()
        node.attr["Tout"].list.SetInParent()
        for _ in main.signature.output_arg:
            node.attr["shapes"].list.shape.add(unknown_rank=True)
        node.attr["shapes"].list.SetInParent()
        function.signature.control_output.append(f"done_{i}")
        function.control_ret[f"done_{i}"] = f"call_{i}"
    for j, result in enumerate(first.output_arg):
        function.signature.output_arg.add(name=f"result_{j}", type=result.type)
        function.ret[f"result_{j}"] = f"call_0:output:{j}"
    return function


def has_streams(ranks: Iterable[Program]) -> bool:
    """Returns True if one of the programs draws from random streams that programs share."""
    graphs = (graph for one in ranks for graph in (one, *one.functions.values()))
    return any(node.marks.stream for graph in graphs for node in graph.nodes)


def with_streams(program: Program, name: str) -> Program:
    """Makes one rank's program draw from the process's random streams whose names begin with ``name``.

    A stream also advances in branches and loops in which the rank has no rows and does not use the numbers, so that all
    ranks stay in step.
    """
    drawing = _drawing_functions(program)
    return change_other_graphs(program, lambda graph: _make_graph(graph, name, drawing))


def _drawing_functions(program: Program) -> frozenset[str]:
    """Returns the names of the functions that draw from shared random streams, directly or in a function that they
    call.
    """
    found = {name for name, body in program.functions.items() if any(node.marks.stream for node in body.nodes)}
    grew = bool(found)
    while grew:
        callers = {name for name, body in program.functions.items() if any(_calls(node, found) for node in body.nodes)}
        grew = not callers <= found
        found |= callers
    return frozenset(found)


def _calls(node: Node, functions: Collection[str]) -> bool:
    return any(func.name in functions for _, func in iterate_function_refs(node))


def _make_graph(graph: Program, name: str, drawing: Collection[str]) -> Program:
    callers = [node.name for node in graph.nodes if _calls(node, drawing)] if drawing else []
    if not callers and not any(node.marks.stream for node in graph.nodes):
        return graph
    nodes: list[Node] = []
    effects = [*graph.effects, *callers]
    for node in graph.nodes:
        stream = node.marks.stream
        if not stream:
            nodes.append(node)
        elif node.op in DRAWS_BY_COUNTER:
            # Each micro-batch has a seed and so a stream of its own, which makes their order irrelevant.
            made = _draw_by_counter(node, f"{name}/{stream}/{node.attrs.get('seed2', 0)}")
            nodes += made
            effects.append(made[0].name)
        else:
            nodes.append(_draw_by_kernel(node, f"{name}/{stream}", [graph.find_type(ref) for ref in node.inputs]))
            effects.append(node.name)
    return replace(graph.replace_nodes(tuple(nodes), functions=graph.functions), effects=tuple(dict.fromkeys(effects)))


def _draw_by_counter(node: Node, stream: str) -> list[Node]:
    """Returns nodes that advance the stream's counter, and draw with a stateless op from the place where it was."""
    seed, seed2 = int(node.attrs.get("seed", 0)), int(node.attrs.get("seed2", 0))
    shape, *bounds = node.inputs
    sizes = node.attrs["T"]
    advance = Node(
        f"{node.name}/whale_counter",
        "WhaleAdvance",
        (shape,),
        node.controls,
        {"stream": stream, "seed2": seed2, "Tshape": sizes},
        (TensorType("uint64", (2,)),),
        node.scope,
        stateful=True,
    )
    key = make_const(f"{node.name}/whale_key", np.array([seed & _WORD], np.uint64), scope=node.scope)
    alg = make_const(f"{node.name}/whale_alg", np.array(_PHILOX, np.int32), scope=node.scope)
    drawn = replace(
        node,
        op=DRAWS_BY_COUNTER[node.op],
        inputs=(shape, Ref(key.name), Ref(advance.name), Ref(alg.name), *bounds),
        attrs={"dtype": node.attrs["Tout" if bounds else "dtype"], "Tshape": sizes},
        stateful=False,
        marks=node.marks.replace_marks(stream=""),
    )
    return [advance, key, alg, drawn]


def _draw_by_kernel(node: Node, stream: str, types: Sequence[TensorType]) -> Node:
    """Returns a ``WhaleDraw`` node that runs the random operation with a kernel, and its state, that programs share.

    Args:
      types: of the operation's operands.
    """
    plain = replace(node, attrs={key: value for key, value in node.attrs.items() if not key.startswith("_")})
    node_def = encode_node_def(plain, "draw", [f"operand_{i}" for i in range(len(node.inputs))])
    attrs = {
        "stream": stream,
        "node": node_def.SerializeToString(deterministic=True),
        "shapes": tuple(Shape(t.shape) for t in node.outputs),
        "Tin": tuple(DType(t.dtype) for t in types),
        "Tout": tuple(DType(t.dtype) for t in node.outputs),
    }
    return replace(node, op="WhaleDraw", attrs=attrs, stateful=True, marks=node.marks.replace_marks(stream=""))
