"""Assigns every node to a scope of the user (a task graph), by what it is connected to; names random streams.

Capture puts a scope on forward nodes, and on gradient nodes whose forward op it saw. ``annotate`` finds the scope of
the others: an update joins the scope that reads its variable; any other node joins the scope of its first operand that
has one, or else of its readers. A split scope takes in fewer nodes, since tensors inside have other layouts: nodes that
read its variables, and nodes that contribute only to updates of these variables. The scope in which an optimizer's
state was created does not count: its updates belong to the weights.

``mark_streams`` marks random operations that have their own stream with its name. In one process a trace has one kernel
for such an operation, whatever the shapes of a call, and the stream continues from call to call. A program is compiled
for one set of shapes, so programs for other shapes use the same name to continue the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from whale.ir.ops import DRAWS, UPDATES
from whale.ir.plan import TaskGraph
from whale.ir.program import COMPILED, Node, Program
from whale.passes.analysis.scopes import PASSED_ON, context_of, ranks_of_scope, split_scope
from whale.passes.analysis.stages import assign_stages, stage_of
from whale.passes.analysis.uses import only_state


def annotate(program: Program) -> Program:
    """Gives a scope to every node and variable of ``program`` that is connected to a node with a scope."""
    if not any(n.scope for n in program.nodes) and not any(v.scope for v in program.variables):
        return program
    program = _free_updates(_without_scopes_of_state(program))
    scope = {n.name: n.scope for n in program.nodes}
    handles = program.variable_of
    of_variable: dict[str, str] = {v.node: v.scope for v in program.variables if v.scope}
    for node in program.nodes:
        if node.scope:
            for ref in node.inputs:
                if ref.node in handles:
                    of_variable.setdefault(ref.node, node.scope)
    for node in program.nodes:
        if node.inputs and not scope[node.name]:
            before = [name for name, _ in node.inputs]
            owned = [of_variable[name] for name in before if name in of_variable]
            near = owned or [scope[name] for name in before if scope[name]]
            if near:
                scope[node.name] = near[0]
    for node in reversed(program.nodes):
        if node.inputs and (own := scope[node.name]):
            for name, _ in node.inputs:
                if not scope[name]:
                    scope[name] = own
    if any(split_scope(path) for path in scope.values()):
        _leave_split_scopes(program, scope, of_variable)
    nodes = tuple([n if n.scope == scope[n.name] else _in_scope(n, scope[n.name]) for n in program.nodes])
    found = of_variable.get
    variables = tuple(
        [v if v.scope or not found(v.node) else replace(v, scope=of_variable[v.node]) for v in program.variables]
    )
    return assign_stages(program, replace(program, nodes=nodes, variables=variables))


def _in_scope(n: Node, scope: str) -> Node:
    """Copies a node with scope ``scope``. Most nodes of a step need it, and ``replace`` takes three times as long."""
    return Node(n.name, n.op, n.inputs, n.controls, n.attrs, n.outputs, scope, n.stateful, n.marks)


def _without_scopes_of_state(program: Program) -> Program:
    """Removes the split scopes of variables that only updates read: the state of an optimizer that was built under a
    scope.

    That scope is not the one of the layers. The weights' updates would be divided by it, with gradients and weights
    resharded for them.
    """
    if not any(split_scope(v.scope) for v in program.variables):
        return program
    state = only_state(program)
    kept = tuple(replace(v, scope="") if split_scope(v.scope) and v.node in state else v for v in program.variables)
    return replace(program, variables=kept)


def _free_updates(program: Program) -> Program:
    """Removes ``wh.replica`` scopes from updates of split scopes' variables and of optimizer state.

    These updates have such a scope only because ``minimize`` was called under an open ``wh.replica``. Scopes that
    assign a pipeline stage are kept.
    """
    readers: dict[str, set[bool]] = {v.node: set() for v in program.variables}
    updates: dict[str, list[str]] = {}  # node -> the variables that it updates
    for node in program.nodes:
        owned = [r.node for r in node.inputs if r.node in readers]
        if owned and node.op in UPDATES and not node.outputs:
            updates[node.name] = owned
        else:
            for name in owned:
                readers[name].add(split_scope(node.scope) is not None)
    divided = {v.node for v in program.variables if split_scope(v.scope) or readers[v.node] == {True}}
    freed: set[str] = set()
    for name, (first, *others) in updates.items():
        path = program.by_name[name].scope
        if first in divided and path and not split_scope(path) and not stage_of(path):
            freed.update([name, *others, *([] if split_scope(program.variable_of[first].scope) else [first])])
    if not freed:
        return program
    nodes = tuple(replace(n, scope="") if n.name in freed else n for n in program.nodes)
    variables = tuple(replace(v, scope="") if v.node in freed else v for v in program.variables)
    return replace(program, nodes=nodes, variables=variables)


def _leave_split_scopes(program: Program, scope: dict[str, str], of_variable: Mapping[str, str]) -> None:
    """Removes nodes from split scopes, in ``scope``, if the user did not put them there and they also contribute to
    other variables.

    Args:
      scope: node -> its scope; changed in place.
      of_variable: handle node -> the variable's scope.
    """
    served = _map_served(program, of_variable)
    reads: dict[str, str] = {}
    for node in program.nodes:
        own = ""
        for name, _ in node.inputs:
            if path := of_variable.get(name) or reads.get(name):
                own = path
                break
        if node.op in PASSED_ON:
            reads[node.name] = own
        if not node.scope and (split_scope(scope[node.name]) or split_scope(own)):
            if not own and _is_between(program, node, scope[node.name]):
                continue
            serves = served[node.name]
            made = _find_scope_between(program, node, scope, serves)
            scope[node.name] = own or made or (next(iter(serves)) if len(serves) == 1 else "")


def _find_scope_between(program: Program, node: Node, scope: Mapping[str, str], serves: Collection[str]) -> str:
    """Returns the split scope that all operands of a node come from, if the node contributes to updates only; else "".

    Nodes without a scope add up gradients from the parts of a layer. Under the layer's scope they are added up locally,
    and a single sum leaves the scope.

    Args:
      serves: the node's entry of ``_map_served``.
    """
    made = {scope[r.node] for r in node.inputs if program.by_name[r.node].inputs}  # scopes of constants do not count
    path = next(iter(made)) if len(made) == 1 else ""
    return path if "" not in serves and serves and split_scope(path) else ""


def _is_between(program: Program, node: Node, path: str) -> bool:
    """Returns True if all operands and all readers of a node are in the scope ``path``."""
    if not node.inputs or any(program.by_name[name].scope != path for name, _ in node.inputs):
        return False
    readers = [reader for ref in node.list_refs() for reader, _ in program.consumers.get(ref, ())]
    return bool(readers) and all(reader.scope == path for reader in readers)


def _map_served(program: Program, of_variable: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Maps each node to the scopes of the variables whose updates depend on it; "" among them stands for any other use,
    such as a fetched result.

    ``_leave_split_scopes`` keeps a node in a split scope only if it serves no variable outside. A variable without a
    scope (an optimizer's state) counts as the uses of what is read from it.

    Args:
      of_variable: handle node -> the variable's scope.
    """
    handles = program.variable_of
    # Sets of scopes are integers with a bit for each scope: unions of sets took most of the time.
    paths = ["", *dict.fromkeys(path for name in handles if (path := of_variable.get(name)))]
    bits = {path: 1 << i for i, path in enumerate(paths)}
    own = {name: bits[path] for name in handles if (path := of_variable.get(name))}
    without = dict.fromkeys(handles.keys() - own.keys(), 0)
    fetched, effects = {r.node for r in program.outputs}, set(program.effects)
    while True:
        found = dict.fromkeys([n.name for n in program.nodes], 0)
        for node in reversed(program.nodes):
            name, inputs = node.name, node.inputs
            mine = found[name]
            updated = [before for before, _ in inputs if before in handles] if not node.outputs else ()
            for handle in updated:
                mine |= own[handle] if handle in own else without[handle]
            if name in fetched or (name in effects and not updated):
                mine |= bits[""]
            found[name] = mine
            if not mine:
                continue
            for before, _ in inputs:
                if not (updated and before in handles):  # a handle serves what reads it, not its own update
                    found[before] |= mine
        now = {name: found[name] for name in without}
        if now == without:
            break
        without = now
    sets = {mine: frozenset(path for path in paths if mine & bits[path]) for mine in set(found.values())}
    return {name: sets[mine] for name, mine in found.items()}


def task_graphs(program: Program, devices: tuple[int, ...]) -> tuple[TaskGraph, ...]:
    """Returns one task graph per scope, in order of first appearance, for the plan's report; nodes outside all scopes
    form a default ``replica``.

    Args:
      devices: all ranks, for scopes that name none.
    """
    counts: Counter[str] = Counter(n.scope for n in program.nodes)
    order = dict.fromkeys(n.scope for n in program.nodes)
    rows = []
    for path in order:
        kind = path.rsplit("/", 1)[-1].split("_")[0].split("(")[0] if path else "replica"
        named = ranks_of_scope(path)
        mine = devices if named is None else tuple(sorted(named))
        rows.append(TaskGraph(path or "(default)", kind, mine, counts[path]))
    return tuple(rows)


def mark_flattened(program: Program) -> Program:
    """Marks reshapes under scopes with ``context=`` so that rules may shard their result in runs.

    There [batch, sequence, ..] becomes [batch x sequence, ..], and the sequence stays sharded: one run for each row.
    Other reshapes are not marked, so that no interleaved layout arises where rows, columns or heads are sharded.
    """

    def mark(node: Node) -> Node:
        if node.op != "Reshape" or context_of(node.scope) is None:
            return node
        return node.with_marks(cut_in_runs=True)

    return program.replace_nodes(tuple(map(mark, program.nodes)))


def mark_streams(program: Program) -> Program:
    """Marks every seeded random operation with the name of its stream: the node's name, with the function's in front.

    Operations that XLA compiles draw other numbers, and are not marked.
    """

    def mark_graph(graph: Program, path: str) -> Program:
        if not any(node.op in DRAWS for node in graph.nodes):
            return graph
        return graph.replace_nodes(tuple(_mark_node(node, path) for node in graph.nodes), functions=graph.functions)

    functions = {name: mark_graph(body, f"{name}/") for name, body in program.functions.items()}
    return replace(mark_graph(program, ""), functions=functions)


def _mark_node(node: Node, path: str) -> Node:
    seeded = node.op in DRAWS and (node.attrs.get("seed") or node.attrs.get("seed2"))
    if not seeded or node.attrs.get(COMPILED):
        return node
    return node.with_marks(stream=path + node.name)
