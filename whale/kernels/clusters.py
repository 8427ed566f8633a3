"""Groups nodes of a rank's program that ask for XLA (``jit_compile=True``) into clusters, each of which XLA compiles as
one function.

As in TensorFlow's own clustering, nodes for which XLA has kernels are joined if no path leads out of them and back in.
But TensorFlow knows nothing of communication: one of its clusters could be all of a backward pass, and the first
gradient would be sent only when the last one is known. Here each node has a place, which says which communication ops
come before it and which is the first after it, and all nodes of a cluster have the same place. So no node waits for
communication that it does not need, and no communication waits for nodes that it does not need, except short
all-reduces that nothing waits for.

Values of variables are arguments and results of clusters. Random ops stay outside, since XLA draws other numbers, and
so do operations for which other kernels are faster (``_is_faster_otherwise``).

Decisions: 0169, 0170, 0171.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from whale.ir.ops import (
    BATCH_NORM_GRADIENTS,
    BATCH_NORMS,
    BRANCHES,
    CONTRACTIONS,
    CONVOLUTIONS,
    EXCHANGES,
    LOOPS,
    MEETINGS,
    RANDOM,
    RANK_REDUCTIONS,
    READS,
    VIEWS,
)
from whale.ir.program import (
    COMPILED,
    Node,
    Program,
    Ref,
    find_called_functions,
    iterate_function_refs,
)
from whale.ir.values import FLOATING, TensorType
from whale.kernels.elementwise import may_synchronize
from whale.kernels.xla import XlaKernels, find_compiled, make_call
from whale.passes.elementwise.code import find_elementwise_type, find_sum_type, is_contraction_result
from whale.passes.elementwise.units import list_predecessors, replace_by_operations

_BY_XLA = LOOPS | BRANCHES  # ops that XLA compiles together with their bodies
# Checks that raise errors, which XLA would leave out.
_CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})
_JOINED = frozenset({"BiasAdd", "Relu", "Relu6"})  # ops that oneDNN fuses with a product or convolution before them
# Integer tensors with so few elements are shapes, counters and seeds. If they were compiled, a cluster would be cut
# wherever a random operation or a variable depends on them.
_FEW_ELEMENTS = 64
# All-reduces of at most so many bytes that nothing waits for need not start before the next exchange.
_SHORT_BYTES = 64 << 10
# Smaller clusters are not formed: starting one takes as long, on CPUs, as reading and writing so many bytes.
LEAST_BYTES = 64 << 10
_FEWEST_NODES = 3  # in a cluster


class _Place(NamedTuple):
    """Groups nodes: XLA compiles the nodes with equal places as one cluster.

    Compared as tuples, places never decrease along an edge of the graph, so that joining the nodes of one place makes
    no cycle. An "exchange" is a communication op, or a call of a function that contains one.

    Attributes:
      stage: number of the first exchange that needs the node's result, in the order in which exchanges can start.
      met: bit set of the exchanges, and of other nodes that may wait for other ranks, on which the node depends.
      turns: on paths to the node, among nodes of equal ``stage`` and ``met``, the most edges from a node with
        ``of_rank`` to one without (control edges, which pass no value).
      of_rank: whether the node depends on values that differ between ranks, such as rows of a batch. Nodes that do not
        are compiled by themselves: all ranks then compile the same function, and copies of a variable stay equal.
      level: how often paths to the node leave a cluster, among nodes that agree in the other components; without this
        number a path could leave a cluster and come back.
    """

    stage: int
    met: int
    turns: int
    of_rank: bool
    level: int


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Represents a cluster: nodes in the graph's order, and those of their results that other nodes read."""

    nodes: list[Node]
    results: list[Ref]


def form_clusters(program: Program, xla: XlaKernels) -> Program:
    """Replaces nodes that ask for XLA, in one rank's program and its functions, by calls of functions that XLA
    compiles.

    Args:
      xla: the kernels that XLA has for the device on which the program runs.
    """
    graphs = (program, *program.functions.values())
    if not any(node.marks.compiled for graph in graphs for node in graph.nodes):
        return program
    return _Former(program, xla).run()


class _Former:
    def __init__(self, program: Program, xla: XlaKernels) -> None:
        self.program, self.xla = program, xla
        self.functions = dict(program.functions)
        self.bodies: dict[str, bool] = {}  # function -> whether XLA compiles all of it
        self.exchanging = _find_exchanging(program)

    def run(self) -> Program:
        main = self._form(self.program, "")
        waiting, formed = [main], {""}
        while waiting:
            compiled = find_compiled(replace(main, functions=self.functions))
            for name in find_called_functions(waiting.pop().nodes, self.functions):
                if name not in formed and name not in compiled:
                    formed.add(name)
                    self.functions[name] = self._form(self.functions[name], name)
                    waiting.append(self.functions[name])
        if len(self.functions) == len(self.program.functions):
            return self.program
        return replace(main, functions=find_called_functions(main.nodes, self.functions))

    def _form(self, graph: Program, name: str) -> Program:
        members = self._find_members(graph)
        clusters: list[_Cluster] = []
        while members:
            clusters = self._group(graph, members)
            refused = {name for cluster in clusters for name in _refuse(graph, cluster, self.xla.on_gpu)}
            if not refused:
                break
            members -= refused
        else:
            return graph
        made: dict[str, Node] = {}
        moved: dict[Ref, Ref] = {}
        for i, (nodes, results) in enumerate((one.nodes, one.results) for one in clusters):
            function = f"cluster/{name}/{i}"
            call, self.functions[function] = make_call(graph, nodes, f"whale_cluster/{i}", function, results)
            made.update({node.name: call for node in nodes})
            moved.update({ref: Ref(call.name, k) for k, ref in enumerate(results)})
        return replace_by_operations(graph, made, moved)

    # -- which nodes

    def _find_members(self, graph: Program) -> set[str]:
        """Returns the names of nodes to compile: those that ask for XLA, and those that passes have added between them,
        if XLA compiles them.
        """
        able = {node.name for node in graph.nodes if self._is_able(graph, node)}
        asked = {node.name for node in graph.nodes if node.marks.compiled}
        behind: set[str] = set()  # added nodes that depend on compiled ones
        for node in graph.nodes:
            if node.name in able and node.name not in asked:
                if any(name in behind or (name in asked and name in able) for name, _ in node.inputs):
                    behind.add(node.name)
        read = {ref.node for ref in graph.outputs}
        for node in reversed(graph.nodes):
            if node.name in behind and node.name not in read:
                readers = [reader.name for ref in node.list_refs() for reader, _ in graph.consumers.get(ref, ())]
                if readers and all(reader in asked for reader in readers):
                    asked.add(node.name)
        return able & asked

    def _is_able(self, graph: Program, node: Node) -> bool:
        """Returns True if XLA can compile a node, and is not slower than other kernels."""
        if node.op == "Const" or not node.outputs or node.marks.on_host or not self._compiles(graph, node):
            return False
        if not self.xla.on_gpu and not node.attrs.get(COMPILED) and _is_faster_otherwise(graph, node):
            return False
        types = [*map(graph.find_type, node.inputs), *node.outputs]
        small = all(t.dtype not in FLOATING and t.elements <= _FEW_ELEMENTS for t in types)
        return not small or any(t.dtype == "variant" for t in types)

    def _compiles(self, graph: Program, node: Node) -> bool:
        types = [*map(graph.find_type, node.inputs), *node.outputs]
        if not all(_has_known_size(t) for t in types) or node.op in RANDOM or node.op in _CHECKS:
            return False
        if node.op in _BY_XLA:
            return all(self._compiles_body(func.name) for _, func in iterate_function_refs(node))
        if node.stateful or any(True for _ in iterate_function_refs(node)) or not _has_fixed_length(graph, node):
            return False
        # XLA's convolutions on processors take several times as long.
        slow = node.op in CONVOLUTIONS and not self.xla.on_gpu and not node.attrs.get(COMPILED)
        return node in self.xla and not slow

    def _compiles_body(self, function: str) -> bool:
        if function not in self.bodies:
            self.bodies[function] = False
            body = self.functions.get(function)
            self.bodies[function] = body is not None and all(
                (node.op in ("Const", "Placeholder", "NoOp") and all(map(_has_known_size, node.outputs)))
                or self._compiles(body, node)
                for node in body.nodes
            )
        return self.bodies[function]

    # -- which of them together

    def _group(self, graph: Program, members: Collection[str]) -> list[_Cluster]:
        met, beyond = self._find_met(graph, members)
        stages = self._find_stages(graph, met, beyond)
        places: dict[str, _Place] = {}
        for node in graph.nodes:
            stage, after = stages[node.name], met[node.name]
            member, level = node.name in members, 0
            of_rank = not self._exchanges(node) and (
                _may_differ_between_ranks(node) or any(places[name].of_rank for name, _ in node.inputs)
            )
            behind = [(name, places[name]) for name in list_predecessors(node)]
            here = [one for _, one in behind if (one.stage, one.met) == (stage, after)]
            turns = max((one.turns + (one.of_rank and not of_rank) for one in here), default=0)
            for name, before in behind:
                if (before.stage, before.met, before.turns, before.of_rank) == (stage, after, turns, of_rank):
                    made = graph.by_name[name]
                    # In one cluster XLA would see that a recomputed value is known already, and keep it instead.
                    again = node.marks.recomputed and not made.marks.recomputed
                    leaves = name in members and (not member or again)
                    level = max(level, before.level + leaves)
            places[node.name] = _Place(stage, after, turns, of_rank, level)
        found: dict[_Place, list[Node]] = {}
        for node in graph.nodes:
            if node.name in members:
                found.setdefault(places[node.name], []).append(node)
        return [_Cluster(nodes, list(_iterate_results(graph, nodes))) for nodes in found.values()]

    def _exchanges(self, node: Node) -> bool:
        """Returns True if a node communicates with other ranks, itself or in a function that it calls."""
        return (
            node.op in EXCHANGES
            or node.op in MEETINGS
            or any(func.name in self.exchanging for _, func in iterate_function_refs(node))
        )

    def _find_met(self, graph: Program, members: Collection[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Finds the exchanges (communication ops) on which nodes depend.

        Nodes that are not compiled and may wait for other ranks are counted as exchanges too.

        Args:
          members: names of the nodes to compile.

        Returns:
          For each node: the bit set of the exchanges on which it depends, and that of the exchanges on which its
          readers depend by it (the same, and the node itself if it is one).
        """
        met: dict[str, int] = {}
        beyond: dict[str, int] = {}
        bits = 0
        for node in graph.nodes:
            after = 0
            for name in list_predecessors(node):
                after |= beyond[name]
            met[node.name] = beyond[node.name] = after
            if node.name not in members and (self._exchanges(node) or may_synchronize(node)):
                beyond[node.name] |= 1 << bits
                bits += 1
        return met, beyond

    def _find_stages(self, graph: Program, met: Mapping[str, int], beyond: Mapping[str, int]) -> dict[str, int]:
        """Returns, for each node, the number of the first exchange (communication op) that needs its result.

        Exchanges are numbered in the order in which they can start: by the longest path to each, so that none comes
        before one that it waits for. Short all-reduces whose results are not needed before the next exchange share its
        number. Nodes that no exchange needs get the number after the last one.

        Args:
          met, beyond: as returned by ``_find_met``.
        """
        depths: dict[str, int] = {}
        exchanges: list[Node] = []
        for node in graph.nodes:
            depths[node.name] = 1 + max((depths[name] for name in list_predecessors(node)), default=0)
            if self._exchanges(node):
                exchanges.append(node)
        exchanges.sort(key=lambda node: depths[node.name])
        numbers: dict[str, int] = {}
        number, together = 0, 0
        for i, node in enumerate(exchanges):
            numbers[node.name] = number
            together |= beyond[node.name] & ~met[node.name]
            follows = i + 1 < len(exchanges)
            # A short all-reduce that nothing waits for may as well start together with the next exchange.
            if not (follows and _is_short(node) and not met[exchanges[i + 1].name] & together):
                number, together = number + 1, 0
        last = number
        stages = {node.name: numbers.get(node.name, last) for node in graph.nodes}
        for node in reversed(graph.nodes):
            stage = stages[node.name]
            for name in list_predecessors(node):
                stages[name] = min(stages[name], stage)
        return stages


def _find_exchanging(program: Program) -> set[str]:
    """Returns the names of functions in which ranks communicate, directly or in functions that they call."""
    found = {
        name
        for name, body in program.functions.items()
        if any(node.op in EXCHANGES or node.op in MEETINGS for node in body.nodes)
    }
    grew = bool(found)
    while grew:
        more = {
            name
            for name, body in program.functions.items()
            if name not in found
            and any(func.name in found for node in body.nodes for _, func in iterate_function_refs(node))
        }
        grew = bool(more)
        found |= more
    return found


def _is_faster_otherwise(graph: Program, node: Node) -> bool:
    """Returns True if other CPU kernels are faster than XLA's: oneDNN's products and convolutions with their bias and
    rectifier, TensorFlow's batch normalisation, and Whale's sums over rows.
    """
    return (
        node.op in CONTRACTIONS | BATCH_NORMS | BATCH_NORM_GRADIENTS
        or (node.op in _JOINED and is_contraction_result(graph, node))
        or find_sum_type(graph, node) is not None
    )


def _may_differ_between_ranks(node: Node) -> bool:
    """Returns True if a node may yield other values on other ranks even with equal operands: arguments and stateful
    ops, but not reads of variables.
    """
    values = any(t.dtype != "resource" for t in node.outputs)
    return values and (node.op == "Placeholder" or (node.stateful and node.op not in READS))


def _is_short(node: Node) -> bool:
    return node.op in RANK_REDUCTIONS and sum(t.bytes for t in node.outputs) <= _SHORT_BYTES


def _has_known_size(kind: TensorType) -> bool:
    return kind.dtype == "variant" or (kind.is_static and kind.dtype not in ("resource", "string"))


def _has_fixed_length(graph: Program, node: Node) -> bool:
    """Returns True unless the node creates a TensorList whose length is unknown, which XLA cannot compile."""
    places = {"TensorListReserve": 1, "EmptyTensorList": 1}.get(node.op)
    if places is None:
        return True
    length = graph.const(node.inputs[places])
    return length is not None and int(length) >= 0


def _iterate_results(graph: Program, nodes: Sequence[Node]) -> Iterator[Ref]:
    """Yields the tensors of ``nodes`` that the program returns, or that other nodes read."""
    own, fetched = {node.name for node in nodes}, set(graph.outputs)
    for node in nodes:
        for ref in node.list_refs():
            if ref in fetched or any(reader.name not in own for reader, _ in graph.consumers.get(ref, ())):
                yield ref


def _refuse(graph: Program, cluster: _Cluster, on_gpu: bool) -> Iterator[str]:
    """Yields the names of the nodes that have to leave a cluster; ``_form`` then groups the rest again.

    These are nodes that exchange TensorLists with the outside, else reshapes at the cluster's border, else all nodes if
    the cluster is not worth a call.
    """
    own = {node.name for node in cluster.nodes}
    inner = {ref.node for node in cluster.nodes for ref in node.inputs}
    # Reshapes at the border of a cluster stay outside: XLA would copy their operands or results.
    views = [
        node.name
        for node in cluster.nodes
        if node.op in VIEWS and (node.inputs[0].node not in own or node.name not in inner)
    ]
    lists = {ref.node for ref in cluster.results if graph.find_type(ref).dtype == "variant"}
    for node in cluster.nodes:
        if any(ref.node not in own and graph.find_type(ref).dtype == "variant" for ref in node.inputs):
            lists.add(node.name)
    if lists:
        yield from lists
    elif views:
        yield from views
    elif not cluster.results or not _is_worth_a_call(graph, cluster.nodes, on_gpu):
        yield from own


def _is_worth_a_call(graph: Program, nodes: Sequence[Node], on_gpu: bool) -> bool:
    if any(node.attrs.get(COMPILED) or node.op in _BY_XLA for node in nodes):
        return True
    work = [node for node in nodes if node.op not in VIEWS]
    # Arithmetic that Whale's elementwise kernel can do does not count: that kernel also takes the sums behind it.
    others = [node for node in work if on_gpu or find_elementwise_type(graph, node) is None]
    moved_bytes = sum(t.bytes for node in others for t in (*map(graph.find_type, node.inputs), *node.outputs))
    return len(work) >= _FEWEST_NODES and moved_bytes >= LEAST_BYTES
