"""Offloads variables to host memory, while the model is computed on an accelerator (``memory.offload``).

Follows Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021: updates are computed on
the host, where the optimizer state is, so that a step copies each gradient to the host and each change of a weight
back, and never the state. Of embedding tables only the rows that a step looks up, and their gradients, are copied.
Copies are ``WhaleOffload`` nodes, which count their bytes.

Decision: 0030.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from whale.errors import PlanError
from whale.ir.ops import (
    APPLIES_ROWS,
    ASKS_SHAPE,
    BRANCHES,
    CALLS,
    HAS_BODIES,
    LOOPS,
    READS_ROWS,
    ROW_LOOKUPS,
    SCATTERS,
    UPDATES,
)
from whale.ir.program import Node, Program, Ref, Variable, find_called_functions, iterate_function_refs
from whale.ir.values import UNMOVABLE, DType, Func
from whale.passes.analysis.resharding_cost import count_matmul_flops
from whale.passes.analysis.uses import OPTIMIZER_STATE, is_model, leading_to, variable_kinds
from whale.sharding_rules.graph import Use, iterate_variable_uses, list_called_functions

COPY = "WhaleOffload"
TABLES = "tables"  # value of memory.offload that keeps embedding tables, and their state, in host memory
LEVELS = {
    "optimizer": (OPTIMIZER_STATE,),
    "parameters": (OPTIMIZER_STATE, "parameters"),
}  # value of memory.offload -> categories of variables that are kept in host memory
_BY_ROWS = READS_ROWS | SCATTERS | APPLIES_ROWS
_RUNS_PARTS = BRANCHES | CALLS  # ops in whose functions some nodes may be computed on the host


def find_offloaded(program: Program, level: str) -> tuple[str, ...]:
    """Returns the handle nodes of the variables to keep in host memory; variables that one op updates together are all
    offloaded, or none.

    Args:
      level: value of ``memory.offload``: "optimizer", "parameters", "tables", or "" for none.

    Raises:
      PlanError: a loop takes such a variable, or a step updates all rows of a table.
    """
    if not level or not any(is_model(program, node) for node in program.nodes):
        return ()  # without a model (such as a program that initialises variables) it is unknown which ones are state
    variables, uses = program.variable_of, list(iterate_variable_uses(program))
    if level == TABLES:
        found = _tables(program, uses)
    else:
        kinds = variable_kinds(program)
        found = {handle for handle, kind in kinds.items() if kind in LEVELS[level] and variables[handle].type.shape}
    while True:
        more = {
            name
            for use in uses
            if not found.isdisjoint(use.handles) and not _is_call(use.node)
            for name in use.handles
            if name
        }
        if more <= found:
            break
        found |= more
    for use in uses:
        node, taken = use.node, [name for name in use.handles if name in found]
        if taken and (_is_call(node) or not all(variables[name].type.shape for name in taken)):
            raise PlanError(
                "a variable cannot be kept in host memory",
                op=f"{node.name} ({node.op}), which uses {variables[taken[0]].name}",
                given=f'memory.offload="{level}"',
                expected="reads and updates outside of loops, of variables that are no scalars",
                action="read and update the variable outside of the loop, or leave memory.offload out",
            )
    return tuple(v.node for v in program.variables if v.node in found)


def _tables(program: Program, uses: Iterable[Use]) -> set[str]:
    """Returns the handle nodes of variables that a step only reads and updates row by row, by ids.

    Raises:
      PlanError: rows of a variable are looked up, but all of it is updated.
    """
    found: set[str] = set()
    whole: dict[str, Use] = {}
    read: set[str] = set()
    for use in uses:
        for handle in filter(None, use.handles):
            if use.node.op in _BY_ROWS:
                found.add(handle)
            elif use.node.op in UPDATES:
                whole.setdefault(handle, use)
            else:
                read.add(handle)
    for handle in found & whole.keys() - read:
        raise PlanError(
            "a table cannot be kept in host memory",
            op=f"{whole[handle].node.name} ({whole[handle].node.op}), which changes all of "
            f"{program.variable_of[handle].name}",
            given=f'memory.offload="{TABLES}"',
            expected="an optimizer that reads and changes only the rows that a step looks up",
            action="wrap an optimizer of Keras 3: wh.optimizers.lazy(optimizer); or take one that updates single rows "
            '(SGD, Momentum, Adagrad, Ftrl); or set memory.offload="parameters", which copies whole gradients',
        )
    return found - whole.keys() - read


def not_by_rows(program: Program, handles: Collection[str]) -> dict[str, str]:
    """Finds tables that stay on the accelerator although a step looks up their rows, for a warning.

    Args:
      program: normalised.
      handles: handle nodes of the variables in host memory.

    Returns:
      Name of the table -> the op that needs all of its rows.
    """
    looked_up: set[str] = set()
    lookups: dict[str, str] = {}  # handle -> a lookup in the variable's value, not in the variable itself
    others: dict[str, str] = {}
    for use in iterate_variable_uses(program):
        node = use.node
        readers = [(node, 0)]
        if node.op == "ReadVariableOp":
            readers = [r for r in use.graph.consumers.get(Ref(node.name), ()) if r[0].op not in ASKS_SHAPE]
        by_rows = [r for r, i in readers if r.op in ROW_LOOKUPS and i == 0]
        whole = [r for r, _ in readers if r not in by_rows]
        inside = _find_looked_up(program, node)
        for i, handle in ((i, h) for i, h in enumerate(use.handles) if h):
            if (node.op in READS_ROWS or by_rows or i in inside) and len(
                program.variable_of[handle].type.shape or ()
            ) > 1:
                looked_up.add(handle)
            for found, ops in ((lookups, by_rows), (others, whole)):
                if node.op not in _BY_ROWS and ops:
                    found.setdefault(handle, f"{ops[0].name} ({ops[0].op})")
    needed_by = {**lookups, **others}
    left = [v for v in program.variables if v.node in looked_up and v.node in needed_by and v.node not in handles]
    return {v.name: needed_by[v.node] for v in left}


def _find_looked_up(program: Program, loop: Node) -> set[int]:
    """Returns the numbers of those operands of a loop that are tables its body looks rows up in."""
    bodies = [program.functions[f.name] for f in list_called_functions(loop)] if loop.op in LOOPS else []
    gathers = [(body, node) for body in bodies for node in body.nodes if node.op in READS_ROWS]
    return {body.inputs.index(n.inputs[0].node) for body, n in gathers if n.inputs[0].node in body.inputs}


def offload(program: Program, handles: Collection[str]) -> Program:
    """Marks the nodes of one rank's program that are computed on the host, and adds copies where tensors go to the
    other side.

    Args:
      handles: handle nodes of the variables in host memory.
    """
    if program.variable_of.keys().isdisjoint(handles):
        return program
    crossing = _Crossings(program, handles, False).run()
    # Called functions were rewritten under new names: drop the old ones.
    return replace(crossing, functions=find_called_functions(crossing.nodes, crossing.functions))


def crossing_bytes(program: Program) -> tuple[int, int]:
    """Returns the bytes that a step of a rank's program copies to the host, and from it.

    Of a conditional the branch with most bytes counts; tensors of dynamic shape count as 0.
    """
    to_host = from_host = 0
    for node in program.nodes:
        if node.op == COPY and node.outputs[0].is_static:
            to_host += node.outputs[0].bytes * node.attrs["to_host"]
            from_host += node.outputs[0].bytes * (not node.attrs["to_host"])
        elif node.op in _RUNS_PARTS:
            functions = (
                list_called_functions(node)
                if node.op in BRANCHES
                else (func for _, func in iterate_function_refs(node))
            )
            bodies = (replace(program.functions[f.name], functions=program.functions) for f in functions)
            most = max((crossing_bytes(body) for body in bodies), key=sum)
            to_host, from_host = to_host + most[0], from_host + most[1]
    return to_host, from_host


def _is_call(node: Node) -> bool:
    return node.op in HAS_BODIES or any(True for _ in iterate_function_refs(node))


def _find_computed_on_host(program: Program, handles: Collection[str]) -> set[str]:
    """Returns the names of the nodes to compute on the host.

    These are nodes that use an offloaded variable, nodes computed from offloaded optimizer state, and producers that
    only these read and whose operands have fewer bytes to copy than their results.
    """
    there: set[str] = set()
    of_state: set[str] = set()
    state = _only_for_updates(program).intersection(handles)
    for node in program.nodes:
        taken = [r.node for r in node.inputs if r.node in program.variable_of]
        if node.op in _RUNS_PARTS:
            continue  # its functions are rewritten by themselves
        if any(h in handles for h in taken):
            there.add(node.name)
            if any(h in state for h in taken):
                of_state.add(node.name)
        elif not taken and not _is_call(node) and any(r.node in of_state for r in node.inputs):
            there.add(node.name)
            of_state.add(node.name)
        elif node.marks.gathered_at_use and node.inputs[0].node in there:
            there.add(node.name)  # the copy of a weight for one use
    kept = {*program.effects, *(r.node for r in program.outputs), *program.inputs, *program.variable_of}
    while more := _cheaper_there(program, there, kept):
        there |= more
    return there


def _only_for_updates(program: Program) -> set[str]:
    """Returns the nodes that contribute to nothing but updates, as `only_state` does, also if a lazy optimizer looks
    rows of its state up.
    """
    fetched = {ref.node for ref in program.outputs}
    other = leading_to(
        program, lambda node: node.name in fetched or (node.op not in READS_ROWS and is_model(program, node))
    )
    return {node.name for node in program.nodes if node.name not in other}


def _cheaper_there(program: Program, there: Collection[str], kept: Collection[str]) -> set[str]:
    """Returns the names of nodes whose readers are all on the host, and whose operands have fewer bytes to copy than
    their results.

    Args:
      there: names of nodes on the host.
      kept: names of nodes that must stay on the accelerator.
    """
    crossing = {ref for node in program.nodes if node.name in there for ref in node.inputs}
    found: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in there or node.name in kept or node.op == "Const" or node.stateful or not node.outputs:
            continue
        readers = [reader.name for ref in node.list_refs() for reader, _ in program.consumers.get(ref, ())]
        if not readers or any(name not in there and name not in found for name in readers):
            continue
        operands = [r for r in dict.fromkeys(node.inputs) if program.by_name[r.node].op != "Const"]
        more = [program.find_type(r) for r in operands if r not in crossing and r.node not in there]
        if _is_call(node) or (more and not all(t.is_static for t in (*more, *node.outputs))):
            continue
        if count_matmul_flops(node, [program.find_type(r) for r in node.inputs]):
            continue
        if not more or sum(t.bytes for t in more) < sum(t.bytes for t in node.outputs):
            found.add(node.name)
            crossing.update(node.inputs)
    return found


class _Crossings:
    """Rewrites one graph for offload: marks nodes on the host, and inserts copies between host and accelerator.

    Args:
      inside: whether the graph is the body of a branch or micro-batch, whose arguments and results are on the
        accelerator.
    """

    def __init__(self, program: Program, handles: Collection[str], inside: bool):
        self.program, self.handles, self.inside = program, handles, inside
        self.there = _find_computed_on_host(program, handles)
        self.nodes: list[Node] = []
        self.made: dict[tuple[Ref, bool], Ref] = {}
        self.functions = dict(program.functions)
        self.bodies: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}  # (function, handles that it has) -> new

    def run(self) -> Program:
        for node in self.program.nodes:
            on_host = node.name in self.there
            inputs = tuple(self._operand(ref, on_host) for ref in node.inputs)
            node = replace(node, inputs=inputs) if inputs != node.inputs else node
            if node.op in _RUNS_PARTS and any(ref.node in self.handles for ref in node.inputs):
                node = self._caller(node)
            self.nodes.append(_on_host(node) if on_host else node)
        outputs = self.program.outputs
        if self.inside:
            outputs = tuple(self._operand(ref, False) for ref in outputs)
        return self.program.replace_nodes(tuple(self.nodes), outputs=outputs, functions=self.functions)

    def _caller(self, node: Node) -> Node:
        """Returns a call or branch with functions whose offloaded parts are computed on the host."""
        operands = node.inputs if node.op in CALLS else node.inputs[1:]

        def rewritten(func: Func) -> Func:
            body, known = self.functions[func.name], self.program.variable_of
            passed = {arg: r.node for arg, r in zip(body.inputs, operands) if r.node in known}
            key = func.name, tuple(passed.items())
            if key not in self.bodies:  # micro-batches share one
                name = self.bodies[key] = f"{func.name}/there/{node.name}"
                variables = tuple(Variable(arg, known[h].name, known[h].type) for arg, h in passed.items())
                handles = {arg for arg, handle in passed.items() if handle in self.handles}
                whole = replace(body, variables=variables, functions=self.functions)
                body = _Crossings(whole, handles, True).run()
                self.functions |= {**body.functions, name: replace(body, variables=(), functions={})}
            return replace(func, name=self.bodies[key])

        attrs = {
            key: rewritten(value)
            if isinstance(value, Func)
            else tuple(map(rewritten, value))
            if key == "branches"
            else value
            for key, value in node.attrs.items()
        }
        return replace(node, op=node.op.removeprefix("Stateless"), attrs=attrs, stateful=True)

    def _operand(self, ref: Ref, on_host: bool) -> Ref:
        source = self.program.by_name[ref.node]
        if source.name in self.program.variable_of or (source.name in self.there) == on_host:
            return ref
        if source.name in self.program.inputs and not self.inside:
            return ref  # TensorFlow copies arguments of the program itself
        if (ref, on_host) not in self.made:
            made = self._again(source) if source.op in ("Const", "WhaleCommunicator") else self._copy(ref, on_host)
            self.nodes.append(made)
            self.made[ref, on_host] = Ref(made.name)
        return self.made[ref, on_host]

    def _again(self, source: Node) -> Node:
        return _on_host(replace(source, name=f"{source.name}/whale_host"))

    def _copy(self, ref: Ref, to_host: bool) -> Node:
        kind = self.program.find_type(ref)
        assert kind.dtype not in UNMOVABLE, ref
        name = f"{ref.node}/whale_{ref.index}_to_{'host' if to_host else 'device'}"
        attrs = {"T": DType(kind.dtype), "to_host": to_host}
        return _on_host(Node(name, COPY, (ref,), (), attrs, (kind,), self.program.by_name[ref.node].scope, True))


def _on_host(node: Node) -> Node:
    return node.with_marks(on_host=True)
