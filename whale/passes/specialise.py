"""Gives every loop and branch its own copies of the functions it calls, so that each can have its own layouts."""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Node, Program
from whale.ir.values import Func


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

    def of_node(node: Node, prefix: str) -> Node:
        changes: dict[str, object] = {}
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
    if node.op not in ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"):
        return []
    keys = ("cond", "body", "then_branch", "else_branch", "branches")
    return [(key, node.attrs[key]) for key in keys if key in node.attrs]
