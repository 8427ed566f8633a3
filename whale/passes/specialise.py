"""Gives every loop and branch its own copies of the functions it calls, so that each can have its own layouts.

Functions that other ops carry (datasets, iterators) run whole: they keep their names and may be shared.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Node, Program, function_refs
from whale.ir.values import Func
from whale.rules.graph import BRANCHES, LOOPS


def specialise(program: Program) -> Program:
    """``program`` in which no function body is called from two places; copies are named after node and attribute."""
    functions: dict[str, Program] = {}
    source = dict(program.functions)

    def of_graph(graph: Program, prefix: str) -> Program:
        source.update(graph.functions)
        return replace(graph, nodes=tuple(of_node(n, prefix) for n in graph.nodes), functions={})

    def own(func: Func, name: str) -> Func:
        if func.name not in source:
            return func
        functions[name] = replace(of_graph(source[func.name], name + "/"), name=name)
        return replace(func, name=name)

    def keep(name: str) -> None:
        if name in source and name not in functions:
            functions[name] = source[name]
            for node in source[name].nodes:
                for _, func in function_refs(node):
                    keep(func.name)

    def of_node(node: Node, prefix: str) -> Node:
        changes: dict[str, object] = {}
        if node.op not in LOOPS and node.op not in BRANCHES:
            for _, func in function_refs(node):
                keep(func.name)
            return node
        for key, value in _function_attrs(node):
            name = f"{prefix}{node.name}/{key}"
            if isinstance(value, tuple):
                changes[key] = tuple(own(f, f"{name}{i}") for i, f in enumerate(value))
            else:
                changes[key] = own(value, name)
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    main = of_graph(program, "")
    return replace(main, functions=functions)


def _function_attrs(node: Node) -> list[tuple[str, Func | tuple[Func, ...]]]:
    keys = ("cond", "body", "then_branch", "else_branch", "branches")
    return [(key, node.attrs[key]) for key in keys if key in node.attrs]
