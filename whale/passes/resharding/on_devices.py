"""Moves collectives and messages from host memory to accelerators, if `communication.backend` names a device library.

This applies to a rank's program and to the functions of its micro-batches, not to loops and branches: tensors that they
exchange are copied to the host and back. The rewrite comes last, on each rank's program by itself. It depends only on
properties that are equal on all ranks of an exchange: kind, dtype, attributes.

  on_devices             replaces Whale's communication ops by device ops in a rank's program
  find_in_stream         finds the exchanges for which a device's stream waits, instead of the host
  mark_device_exchanges  marks the exchanges that devices carry out, for predictions
  partners               counts the groups and ranks that a rank's device communicates with
  device_groups          lists the groups that have to be connected before a rank's program runs
  host_exchanges         lists the exchanges through the host, and why
  host_lines             formats the exchanges of all ranks through the host, with their bytes
  processor_lines        formats the operations that run on the CPU because TensorFlow has no GPU kernel, with the bytes
                         that TensorFlow copies for them

Decisions: 0111, 0183.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whale.ir.layout import count_rank_bytes
from whale.ir.ops import (
    CALLS,
    COLLECTIVES,
    CONTRACTIONS,
    EXCHANGES,
    ON_DEVICE,
    POINT_TO_POINT,
    RANK_REDUCTIONS,
    ROW_EXCHANGES,
)
from whale.ir.plan_text import format_bytes
from whale.ir.program import Node, Program, Ref, find_called_functions
from whale.ir.values import Func

# Values of `communication.backend` that mean accelerators. With "pinned", ranks without an accelerator take part too.
PINNED = "pinned"
DEVICE_BACKENDS = ("nccl", "cuda-ipc", PINNED)

# Dtypes that device libraries reduce.
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_UNSIZED = frozenset({"string", "resource", "variant"})  # elements have no fixed size
_COMMUNICATOR = "WhaleCommunicator"

# Tells whether TensorFlow has a kernel for GPUs, by the node's op and its attributes.
HasKernel = Callable[[Node], bool]
_HANDLES = frozenset({"resource", "variant", "string"})  # always in the host's memory: never copied


@dataclass(frozen=True, slots=True)
class HostExchange:
    """Represents a communication op that goes through the host's memory although the backend is a device library.

    Attributes:
      graph: name of the function that contains it; "" is the program.
      node: the communication op.
      why: the reason why it cannot go from device to device, for reports.
    """

    graph: str
    node: Node
    why: str


def on_devices(program: Program, comm: str, rank: int) -> Program:
    """Returns the program of ``rank`` with its communication ops replaced by device ops where devices can carry them
    out.

    Args:
      comm: name of the communicator, which device ops take as an attribute.
    """
    direct = _find_called_directly(program)
    bodies = {name: _gather_one_by_one(body) if name in direct else body for name, body in program.functions.items()}
    program = _gather_one_by_one(replace(program, functions=bodies))

    def rewrite_graph(graph: Program, in_stream: frozenset[str] = frozenset()) -> Program:
        moved = (_on_device(n, comm, rank, n.name in in_stream) if _why_not(n) == "" else n for n in graph.nodes)
        return graph.replace_nodes(tuple(moved))

    functions = {name: rewrite_graph(body) if name in direct else body for name, body in program.functions.items()}
    return _drop_handles(replace(rewrite_graph(program, find_in_stream(program)), functions=functions), direct)


def find_in_stream(program: Program) -> frozenset[str]:
    """Finds the collectives of a rank's program for which only the device's stream should wait, and not the host;
    returns their names.

    To the executor such a collective is done when it is queued, and the host runs ahead of the device. This is right
    for collectives on the critical path: matrix products depend on their results, so the device has little else to do
    meanwhile. Any other exchange counts as done when it has happened, and what does not depend on it is computed
    meanwhile:

      gradients, which only updates wait for
      weights that are gathered ahead of their use (ZeRO 3), and all else that depends on variables alone
      exchanges of micro-batches, beside which other micro-batches are computed, and messages between stages
      the last exchanges of a step, on which no other depends: a step must not end before their outcome is known
    """
    multiplies = {name for name, body in program.functions.items() if any(n.op in CONTRACTIONS for n in body.nodes)}
    varies: set[str] = set()  # nodes that depend on more than variables and constants
    for node in program.nodes:
        is_given = not node.inputs and node.op != "Const" and all(t.dtype != "resource" for t in node.outputs)
        if is_given or node.op == "WhaleRecv" or any(ref.node in varies for ref in node.inputs):
            varies.add(node.name)
    before_products: set[str] = set()
    before_exchanges: set[str] = set()
    found = []
    for node in reversed(program.nodes):
        is_between = node.name in varies and node.name in before_products and node.name in before_exchanges
        if is_between and node.op in COLLECTIVES and _why_not(node) == "":
            found.append(node.name)
        operands = [ref.node for ref in node.inputs]
        called = find_called_functions((node,), program.functions)
        if node.name in before_products or node.op in CONTRACTIONS or not multiplies.isdisjoint(called):
            before_products.update(operands)
        if node.name in before_exchanges or node.op in EXCHANGES:
            before_exchanges.update(operands)
    return frozenset(found)


def mark_device_exchanges(program: Program, backend: str) -> Program:
    """Marks the communication ops that devices carry out under ``backend``, so that predictions count them so; without
    a device backend, nothing.

    Args:
      program: a rank's program, its micro-batches unrolled.
    """
    if backend not in DEVICE_BACKENDS:
        return program
    marked = (n.with_marks(device_backend=backend) if _why_not(n) == "" else n for n in program.nodes)
    return program.replace_nodes(tuple(marked))


def _drop_handles(program: Program, direct: frozenset[str]) -> Program:
    """Removes communicator handles from calls whose function does not use them any more.

    TensorFlow would place the call, and all nodes of the function, on the host, where the handle is.

    Args:
      direct: names of functions that are only called, not bodies of loops or branches.
    """
    functions = dict(program.functions)
    kept: dict[str, list[int]] = {}  # function that loses operands -> numbers of those that remain
    for name in direct:
        body = functions[name]
        used = {ref.node for node in body.nodes for ref in node.inputs} | {ref.node for ref in body.outputs}
        gone = {i for i in body.inputs if i not in used and body.find_type(Ref(i)).dtype == "resource"}
        if gone:
            kept[name] = [k for k, i in enumerate(body.inputs) if i not in gone]
            nodes = tuple(node for node in body.nodes if node.name not in gone)
            functions[name] = replace(body, nodes=nodes, inputs=tuple(i for i in body.inputs if i not in gone))

    def rewrite_node(node: Node) -> Node:
        function = node.attrs.get("f") if node.op in CALLS else None
        if not isinstance(function, Func) or function.name not in kept:
            return node
        inputs = [node.inputs[k] for k in kept[function.name]]
        types = [node.attrs["Tin"][k] for k in kept[function.name]]
        return replace(node, inputs=tuple(inputs), attrs={**node.attrs, "Tin": tuple(types)})

    def rewrite_graph(graph: Program) -> Program:
        nodes = tuple(map(rewrite_node, graph.nodes))
        used = {ref.node for n in nodes for ref in n.inputs} | {name for n in nodes for name in n.controls}
        used |= {ref.node for ref in graph.outputs} | set(graph.effects)
        return graph.replace_nodes(tuple(n for n in nodes if n.op != _COMMUNICATOR or n.name in used))

    shorter = replace(rewrite_graph(program), functions={name: rewrite_graph(body) for name, body in functions.items()})
    # Repeat: a caller may have got the handle as an operand itself, and not need it now.
    return _drop_handles(shorter, direct) if kept else shorter


def partners(program: Program, rank: int, size: int) -> tuple[int, int]:
    """Counts what the device of ``rank`` communicates with, from which NCCL's memory is predicted: groups of ranks in
    collectives, and single ranks in messages and all-to-alls.

    Args:
      program: the rank's program before `on_devices`.

    Returns:
      (number of groups, number of other ranks).
    """
    groups: set[tuple[int, ...]] = set()
    peers: set[int] = set()
    for graph in (program, *(program.functions[name] for name in _find_called_directly(program))):
        for node in graph.nodes:
            if _why_not(node):
                continue
            group = tuple(node.attrs.get("ranks") or range(size))
            if node.op in POINT_TO_POINT:
                peers.add(int(node.attrs["peer"]))
            elif node.op == "WhaleAllToAll":
                peers.update(group)
            else:
                groups.add(group)
    return len(groups), len(peers - {rank})


def device_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """Lists the groups of ranks with which a rank's device runs collectives, in an order that is the same on all ranks.

    Args:
      program: the rank's program after `on_devices`. The group of all ranks is left out: it is connected from the
        start.
    """
    alone = {ON_DEVICE[op] for op in (*POINT_TO_POINT, "WhaleAllToAll")}
    ops = set(ON_DEVICE.values()) - alone
    graphs = (program, *program.functions.values())
    found = {tuple(node.attrs.get("ranks") or ()) for graph in graphs for node in graph.nodes if node.op in ops}
    return tuple(sorted(found - {()}))


def host_exchanges(program: Program) -> Iterator[HostExchange]:
    """Yields the exchanges of a rank that stay in the host's memory although a device backend is set.

    Args:
      program: the rank's program before `on_devices`.
    """
    direct = _find_called_directly(program)
    for name, graph in {"": program, **program.functions}.items():
        for node in graph.nodes:
            if node.op in EXCHANGES:
                why = _why_not(node) if name in direct or not name else "in a loop or a branch"
                if why:
                    yield HostExchange(name, node, why)


def _find_called_directly(program: Program) -> frozenset[str]:
    """Returns the functions that are called from the program, directly or nested (bodies of micro-batches); not those
    of loops and branches.
    """
    functions: Mapping[str, Program] = program.functions
    found: set[str] = set()
    stack = [program]
    while stack:
        for node in stack.pop().nodes:
            function = node.attrs.get("f") if node.op in CALLS else None
            if isinstance(function, Func) and function.name in functions and function.name not in found:
                found.add(function.name)
                stack.append(functions[function.name])
    return frozenset(found)


def _why_not(node: Node) -> str:
    """Returns the reason why a device cannot carry out a node's communication, for reports; "" if a device can."""
    if node.op not in EXCHANGES:
        return "no exchange"
    if node.op in ROW_EXCHANGES:
        return "rows exchanged by their ids, whose number is known only at run time"
    if node.op not in ON_DEVICE:
        return "carried out by Horovod"
    if node.marks.on_host:
        return "offloaded: computed in the host's memory"
    dtype = str(node.attrs["T"])
    if node.op in RANK_REDUCTIONS and dtype not in _FLOATS:
        return f"{dtype}: devices reduce floating-point types only"
    if dtype in _UNSIZED:
        return f"{dtype}: elements have no fixed size"
    if node.op == "WhaleAllGather" and not node.attrs.get("sizes"):
        return "sizes known only at run time"
    if node.op == "WhaleBroadcast":
        shapes = node.attrs.get("shapes", ())
        if not shapes or any(s.dims is None or None in s.dims for s in shapes):
            return "shapes known only at run time"
    return ""


def _gather_one_by_one(graph: Program) -> Program:
    """Splits fused all-gathers that devices carry out into one op per tensor, since the device op takes one tensor."""
    parts: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "WhaleAllGather" and len(node.outputs) > 1 and _why_not(node) == "":
            comm, *tensors = node.inputs
            parts[node.name] = [
                replace(
                    node,
                    name=node.name if k == 0 else f"{node.name}/{k}",
                    inputs=(comm, tensor),
                    attrs={**node.attrs, "N": 1, "key": node.attrs["key"] if k == 0 else f"{node.attrs['key']}/{k}"},
                    outputs=(node.outputs[k],),
                )
                for k, tensor in enumerate(tensors)
            ]
    if not parts:
        return graph

    def follow(name: str) -> list[str]:
        return [part.name for part in parts[name]] if name in parts else [name]

    def rewrite(node: Node) -> Node:
        inputs = tuple(Ref(parts[r.node][r.index].name) if r.node in parts else r for r in node.inputs)
        controls = tuple(one for name in node.controls for one in follow(name))
        return replace(node, inputs=inputs, controls=controls)

    nodes = tuple(rewrite(one) for node in graph.nodes for one in parts.get(node.name, [node]))
    outputs = tuple(Ref(parts[r.node][r.index].name) if r.node in parts else r for r in graph.outputs)
    effects = tuple(one for name in graph.effects for one in follow(name))
    return graph.replace_nodes(nodes, outputs=outputs, effects=effects)


def _on_device(node: Node, comm: str, rank: int, in_stream: bool) -> Node:
    """Returns the device op that replaces a communication op; it takes the communicator's name instead of its handle.

    Args:
      comm: name of the communicator.
      rank: the rank that runs the node.
      in_stream: only the device's stream waits for the op, and not the host (see ``find_in_stream``).
    """
    attrs = {**node.attrs, "communicator": comm, "rank": rank}
    if in_stream:
        attrs["in_stream"] = True
    if node.op in ("WhaleSend", "WhaleRecv"):
        attrs.pop("ranks", None)
    if node.op == "WhaleAllGather":
        attrs.pop("N", None)
    return replace(node, op=ON_DEVICE[node.op], inputs=node.inputs[1:], attrs=attrs)


def host_lines(programs: Sequence[Program]) -> list[str]:
    """Formats the communication of all ranks through the host in a step, grouped by kind and reason, with its bytes.

    Args:
      programs: every rank's program before `on_devices`.

    Returns:
      Lines of text; a single one if everything goes from device to device.
    """
    found: dict[tuple[str, str], list[int]] = {}  # (kind, reason) -> [number of exchanges, bytes of static shapes]
    for rank, program in enumerate(programs):
        for one in host_exchanges(program):
            graph = program.functions[one.graph] if one.graph else program
            group = tuple(one.node.attrs.get("ranks") or range(len(programs)))
            place = group.index(rank) if rank in group else 0
            if place == 0 or "peer" in one.node.attrs:
                found.setdefault((one.node.op.removeprefix("Whale"), one.why), [0, 0])[0] += 1
            inputs = [graph.find_type(ref) for ref in one.node.inputs]
            if all(t.is_static for t in (*inputs, *one.node.outputs) if t.dtype != "resource"):
                moved = count_rank_bytes(one.node, inputs, place, len(group))
                found.setdefault((one.node.op.removeprefix("Whale"), one.why), [0, 0])[1] += moved
    if not found:
        return ["From device to device: all exchanges"]
    lines = ["From device to device: all exchanges but these, which go through host memory"]
    for (kind, why), (count, moved) in sorted(found.items(), key=lambda row: -row[1][1]):
        lines.append(f"  {format_bytes(moved):>10}  {count} {kind}: {why}")
    return lines


def processor_lines(programs: Sequence[Program], has_kernel: HasKernel) -> list[str]:
    """Formats the operations that ranks run on the CPU because TensorFlow has no GPU kernel for them, with the bytes
    copied for them in a step.

    Counted are the bytes of tensors that come from or go to operations on the GPU; in a loop's body, those of one
    iteration.

    Args:
      programs: every rank's program.
      has_kernel: returns True if TensorFlow has a GPU kernel for a node.
    """
    found: dict[tuple[str, str, str], list[int]] = {}  # (op, dtype, where) -> [number of nodes, bytes of static shapes]
    for program in programs:
        for name, graph in {"": program, **program.functions}.items():
            where = "" if not name or name in _find_called(program) else ", in a loop or branch: bytes of one iteration"
            for node, moved_bytes in _find_in_graph(graph, has_kernel):
                dtype = str(node.attrs.get("T", node.outputs[0].dtype if node.outputs else ""))
                entry = found.setdefault((node.op, dtype, where), [0, 0])
                entry[0] += 1
                entry[1] += moved_bytes
    if not found:
        return ["On the GPU: all operations"]
    lines = ["On the CPU, because TensorFlow has no GPU kernel; bytes copied between GPU and CPU in a step"]
    for (op, dtype, where), (count, moved) in sorted(found.items(), key=lambda row: (-row[1][1], row[0])):
        lines.append(f"  {format_bytes(moved):>10}  {count} {op}{f' of {dtype}' if dtype else ''}{where}")
    return lines


def _find_called(program: Program) -> frozenset[str]:
    """Returns the names of functions that call ops run: once per call, unlike the bodies of loops."""
    graphs = (program, *program.functions.values())
    calls = (n.attrs.get("f") for g in graphs for n in g.nodes if n.op in CALLS)
    return frozenset(f.name for f in calls if isinstance(f, Func))


def _find_in_graph(graph: Program, has_kernel: HasKernel) -> list[tuple[Node, int]]:
    """Returns the graph's nodes without a GPU kernel, each with the bytes copied between GPU and CPU for it."""

    def computes(node: Node) -> bool:
        return node.op not in EXCHANGES and not node.marks.on_host and node.name not in graph.inputs

    alone = {n.name for n in graph.nodes if computes(n) and not has_kernel(n)}
    if not alone:
        return []
    taken = {ref for n in graph.nodes if n.name not in alone for ref in n.inputs}
    found = []
    for node in graph.nodes:
        if node.name not in alone:
            continue
        types = [graph.find_type(ref) for ref in dict.fromkeys(node.inputs) if ref.node not in alone]
        read = {ref.index for ref in taken if ref.node == node.name}
        types += [kind for i, kind in enumerate(node.outputs) if i in read]
        found.append((node, sum(t.bytes for t in types if t.is_static and t.dtype not in _HANDLES)))
    return found
