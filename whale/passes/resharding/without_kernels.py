"""Reports operations that run on the CPU because TensorFlow has no GPU kernel, and the bytes copied for them.

TensorFlow places them on the CPU by itself, and copies their operands and results; this module only names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whale.ir.ops import CALLS, EXCHANGES
from whale.ir.plan_text import format_bytes
from whale.ir.program import Node, Program
from whale.ir.values import Func

# Tells whether TensorFlow has a kernel for GPUs, by the node's op and its attributes.
HasKernel = Callable[[Node], bool]
_HANDLES = frozenset({"resource", "variant", "string"})  # lie in the host's memory wherever they are used


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
