"""Gives every loop and branch its own copies of the functions it calls, so that each can have its own layouts.

Functions of other ops (datasets, iterators) are not divided and may be shared. They are named after the op that
uses them, too: TensorFlow gives some of them random names in each process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whale.ir.ops import HAS_BODIES
from whale.ir.program import Node, Program, iterate_function_refs
from whale.ir.values import Func


def specialise(program: Program) -> Program:
    """Copies functions so that none is called from two places; copies are named after node and attribute."""
    if not program.functions:
        return program
    functions: dict[str, Program] = {}
    source = dict(program.functions)
    kept: dict[str, str] = {}

    def copy_graph(graph: Program, prefix: str) -> Program:
        source.update(graph.functions)
        return replace(graph, nodes=tuple(copy_node(n, prefix) for n in graph.nodes), functions={})

    def own(func: Func, name: str) -> Func:
        if func.name not in source:
            return func
        functions[name] = replace(copy_graph(source[func.name], name + "/"), name=name)
        return replace(func, name=name)

    def copy_value(value: Any, name: str) -> Any:
        """Renames the functions in ``value``, and copies each of them once, unchanged."""
        if isinstance(value, tuple):
            return tuple(copy_value(item, f"{name}{i}") for i, item in enumerate(value))
        if not isinstance(value, Func) or value.name not in source:
            return value
        if value.name not in kept:
            kept[value.name] = name
            body = source[value.name]
            functions[name] = replace(body, name=name, nodes=tuple(with_kept(n, name + "/") for n in body.nodes))
        return replace(value, name=kept[value.name])

    def with_kept(node: Node, prefix: str) -> Node:
        changes = {
            key: copy_value(node.attrs[key], f"{prefix}{node.name}/{key}") for key, _ in iterate_function_refs(node)
        }
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    def copy_node(node: Node, prefix: str) -> Node:
        changes: dict[str, object] = {}
        if node.op not in HAS_BODIES:
            return with_kept(node, prefix)
        for key, value in _function_attrs(node):
            name = f"{prefix}{node.name}/{key}"
            if isinstance(value, tuple):
                changes[key] = tuple(own(f, f"{name}{i}") for i, f in enumerate(value))
            else:
                changes[key] = own(value, name)
        return replace(node, attrs={**node.attrs, **changes}) if changes else node

    main = copy_graph(program, "")
    return replace(main, functions=functions)


def _function_attrs(node: Node) -> list[tuple[str, Func | tuple[Func, ...]]]:
    keys = ("cond", "body", "then_branch", "else_branch", "branches")
    return [(key, node.attrs[key]) for key in keys if key in node.attrs]
