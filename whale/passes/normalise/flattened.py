"""Activations that are flattened keep their sequence: [rows, sequence, ..] to [rows x sequence, ..] and back."""

from __future__ import annotations

from dataclasses import replace

from whale.ir.program import Node, Program
from whale.passes.facts.scopes import context_of
from whale.rules.structure.shape import RUNS


def mark_flattened(program: Program) -> Program:
    """``program`` whose reshapes may be cut along any of their dimensions, under scopes that divide the sequence.

    Elsewhere they are not, so that no layout in runs comes up where rows, columns or heads are divided.
    """

    def marked(node: Node) -> Node:
        if node.op != "Reshape" or context_of(node.scope) is None:
            return node
        return replace(node, attrs={**node.attrs, RUNS: True})

    return program.with_nodes(tuple(map(marked, program.nodes)))
