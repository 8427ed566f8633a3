"""Makes the keys of a plan's exchanges unique in a run by adding the program's number, and so Horovod's tensor
names.
"""

from __future__ import annotations

from dataclasses import replace

from whale.ir.ops import EXCHANGES, HOROVOD_ALL_REDUCE
from whale.ir.program import Node, Program, Ref


def with_number(program: Program, number: int) -> Program:
    """Adds the program's number to its keys, which are unique in a plan only. Horovod uses the node's name as key."""

    def rewrite_graph(graph: Program) -> Program:
        renamed = {n.name: f"{n.name}_of_{number}" for n in graph.nodes if n.op == HOROVOD_ALL_REDUCE}

        def rewrite_ref(ref: Ref) -> Ref:
            return Ref(renamed[ref.node], ref.index) if ref.node in renamed else ref

        def rewrite_node(n: Node) -> Node:
            if n.op in EXCHANGES and "key" in n.attrs:
                n = replace(n, attrs={**n.attrs, "key": f"{number}:{n.attrs['key']}"})
            if n.name in renamed or not renamed.keys().isdisjoint(r.node for r in n.inputs):
                n = replace(n, name=renamed.get(n.name, n.name), inputs=tuple(map(rewrite_ref, n.inputs)))
            return n

        nodes = tuple(map(rewrite_node, graph.nodes))
        if not renamed:
            return graph.replace_nodes(nodes)
        effects = tuple(renamed.get(name, name) for name in graph.effects)
        return replace(graph, nodes=nodes, outputs=tuple(map(rewrite_ref, graph.outputs)), effects=effects)

    main = rewrite_graph(program)
    return replace(main, functions={name: rewrite_graph(body) for name, body in program.functions.items()})
