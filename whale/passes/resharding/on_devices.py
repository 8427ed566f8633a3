"""Moves collectives and messages from host memory to accelerators, if `communication.backend` names a device library.

It applies to the rank's program itself and its micro-batches; tensors exchanged through the host are copied there and
back. It runs last, on each rank's program by itself, and depends only on properties that are equal on all ranks of an
exchange: kind, dtype, attributes.

  on_devices             replaces Whale's ops by device ops in a rank's program
  find_in_stream         finds the exchanges for which a device's stream waits, and not the host
  mark_device_exchanges  marks the same exchanges as the device's, for predictions
  partners               counts the groups and ranks that a rank's device communicates with
  device_groups          lists the groups that have to be connected before a rank's program runs
  host_exchanges         lists the exchanges through the host, and why
  host_lines             formats those of all ranks, with their bytes
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

# Values of `communication.backend` that mean accelerators. With the last one ranks that have none take part.
PINNED = "pinned"
DEVICE_BACKENDS = ("nccl", "cuda-ipc", PINNED)

# Types that accelerators add up.
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_UNSIZED = frozenset({"string", "resource", "variant"})  # elements have no fixed size
_COMMUNICATOR = "WhaleCommunicator"

# Tells whether TensorFlow has a kernel for GPUs, by the node's op and its attributes.
HasKernel = Callable[[Node], bool]
_HANDLES = frozenset({"resource", "variant", "string"})  # lie in the host's memory wherever they are used


@dataclass(frozen=True, slots=True)
class HostExchange:
    """An exchange through the host's memory.

    Attributes:
      graph: name of the function that contains it; "" is the program.
      why: the reason why it cannot go from device to device.
    """

    graph: str
    node: Node
    why: str


def on_devices(program: Program, comm: str, rank: int) -> Program:
    """Returns the program of ``rank`` with its communication carried out by devices where they can.

    Args:
      comm: name of the communicator.
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
    """Finds the exchanges of a rank's program for which a device's stream may wait in the host's place, by name.

    They are those on the critical path: products follow from their results, so that the device has little else to do
    meanwhile. To the executor they are done when they are queued, and the host is ahead of the device. Others are done
    when they have happened, and what does not depend on them is computed meanwhile:

      gradients, which only updates wait for
      weights that are gathered ahead of their use (ZeRO 3), and all else that follows from variables alone
      what micro-batches exchange, beside which others are computed, and what stages send each other
      the last ones of a step, on which no other exchange depends: no step ends before it is known how they ended
    """
    multiplies = {name for name, body in program.functions.items() if any(n.op in CONTRACTIONS for n in body.nodes)}
    varies: set[str] = set()  # what follows from more than variables and constants
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
    """Marks the communication that ``backend`` lets devices carry out, in a rank's program with its micro-batches
    unrolled.
    """
    if backend not in DEVICE_BACKENDS:
        return program
    marked = (n.with_marks(device_backend=backend) if _why_not(n) == "" else n for n in program.nodes)
    return program.replace_nodes(tuple(marked))


def _drop_handles(program: Program, direct: frozenset[str]) -> Program:
    """Removes handles of a communicator from calls of ``program`` whose function does not use them any more.

    TensorFlow would place the call, and all nodes of the function, where the handle is: on the host.
    """
    functions = dict(program.functions)
    kept: dict[str, list[int]] = {}  # operands that remain, of each function that loses some
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
    return _drop_handles(shorter, direct) if kept else shorter  # callers may have got them as operands, too


def partners(program: Program, rank: int, size: int) -> tuple[int, int]:
    """Counts the partners of the device of ``rank``: (groups that reduce, gather or broadcast; other ranks).

    Args:
      program: the rank's program before `on_devices`.
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
    """Lists the groups in which a rank's device reduces, gathers or broadcasts, in an order that all ranks have.

    Args:
      program: the rank's program after `on_devices`. A group of all ranks, which is connected from the start, is none.
    """
    alone = {ON_DEVICE[op] for op in (*POINT_TO_POINT, "WhaleAllToAll")}
    ops = set(ON_DEVICE.values()) - alone
    graphs = (program, *program.functions.values())
    found = {tuple(node.attrs.get("ranks") or ()) for graph in graphs for node in graph.nodes if node.op in ops}
    return tuple(sorted(found - {()}))


def host_exchanges(program: Program) -> Iterator[HostExchange]:
    """Yields the exchanges of a rank through the host's memory that remain when devices carry out what they can.

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
    """Returns the functions that are only called, directly or nested: bodies of micro-batches, not of loops and
    branches.
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
    """Returns why a device cannot carry out a node's communication, in a graph that is called directly; "" if it
    can.
    """
    if node.op not in EXCHANGES:
        return "no exchange"
    if node.op in ROW_EXCHANGES:
        return "rows by their ids, of which only the run knows how many there are"
    if node.op not in ON_DEVICE:
        return "carried out by Horovod"
    if node.marks.on_host:
        return "offloaded: computed in the host's memory"
    dtype = str(node.attrs["T"])
    if node.op in RANK_REDUCTIONS and dtype not in _FLOATS:
        return f"{dtype}: devices add up floats"
    if dtype in _UNSIZED:
        return f"{dtype}: elements have no fixed size"
    if node.op == "WhaleAllGather" and not node.attrs.get("sizes"):
        return "sizes that only the run knows"
    if node.op == "WhaleBroadcast":
        shapes = node.attrs.get("shapes", ())
        if not shapes or any(s.dims is None or None in s.dims for s in shapes):
            return "shapes that only the run knows"
    return ""


def _gather_one_by_one(graph: Program) -> Program:
    """Returns a graph in which all-gathers that devices carry out have one tensor each, as the op of devices does."""
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
    """Replaces a communication op by the op of devices, which takes no handle of the communicator."""
    attrs = {**node.attrs, "communicator": comm, "rank": rank}
    if in_stream:
        attrs["in_stream"] = True
    if node.op in ("WhaleSend", "WhaleRecv"):
        attrs.pop("ranks", None)
    if node.op == "WhaleAllGather":
        attrs.pop("N", None)
    return replace(node, op=ON_DEVICE[node.op], inputs=node.inputs[1:], attrs=attrs)


def host_lines(programs: Sequence[Program]) -> list[str]:
    """Formats the communication of all ranks through the host in a step, with its bytes, as lines of text.

    Args:
      programs: every rank's program before `on_devices`.
    """
    found: dict[tuple[str, str], list[int]] = {}  # by kind and reason: number, bytes whose number is known
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
    lines = ["From device to device: all exchanges but those through the host"]
    for (kind, why), (count, moved) in sorted(found.items(), key=lambda row: -row[1][1]):
        lines.append(f"  {format_bytes(moved):>10}  {count} {kind}: {why}")
    return lines


def processor_lines(programs: Sequence[Program], has_kernel: HasKernel) -> list[str]:
    """Formats the operations that all ranks run on CPUs in a step, with the bytes copied for them, as lines of text.

    The bytes are those of tensors from or to operations on the GPU; in a loop's body, of one iteration.

    Args:
      programs: every rank's program.
    """
    found: dict[tuple[str, str, str], list[int]] = {}  # by op, dtype, where: how many, bytes whose number is known
    for program in programs:
        for name, graph in {"": program, **program.functions}.items():
            where = "" if not name or name in _find_called(program) else ", in a loop or a branch: bytes of one round"
            for node, moved_bytes in _find_in_graph(graph, has_kernel):
                dtype = str(node.attrs.get("T", node.outputs[0].dtype if node.outputs else ""))
                entry = found.setdefault((node.op, dtype, where), [0, 0])
                entry[0] += 1
                entry[1] += moved_bytes
    if not found:
        return ["On the GPU: all operations"]
    lines = ["On the processor, because TensorFlow has no kernel for GPUs; bytes copied there and back"]
    for (op, dtype, where), (count, moved) in sorted(found.items(), key=lambda row: (-row[1][1], row[0])):
        lines.append(f"  {format_bytes(moved):>10}  {count} {op}{f' of {dtype}' if dtype else ''}{where}")
    return lines


def _find_called(program: Program) -> frozenset[str]:
    """Returns the functions that call ops run: once per call, unlike the bodies of loops."""
    graphs = (program, *program.functions.values())
    calls = (n.attrs.get("f") for g in graphs for n in g.nodes if n.op in CALLS)
    return frozenset(f.name for f in calls if isinstance(f, Func))


def _find_in_graph(graph: Program, has_kernel: HasKernel) -> list[tuple[Node, int]]:
    """Returns the graph's nodes without a kernel, each with the bytes that are copied for it."""

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
