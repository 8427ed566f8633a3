"""Gathers what asks for XLA in a rank's program into clusters, each of which XLA compiles as one function.

As TensorFlow's own clustering does, nodes that XLA has kernels for are joined where no path leads out of them and back
in. TensorFlow knows nothing of exchanges, so that one cluster of its own would be all of a backward pass, and the first
gradient would be sent when the last one is known. Here a node's place says which exchanges come before it and which is
the first behind it, and a cluster's nodes have one place: none waits for an exchange that it does not need, and no
exchange waits for a node that it does not need, but for short ones that nothing waits for.

Values of variables come in as arguments and go out as results. What draws random numbers stays outside, since XLA draws
others, and so do operations for which other kernels are faster (``_is_faster_otherwise``).

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

_BY_XLA = LOOPS | BRANCHES  # XLA compiles them with their bodies
# They tell of a fault, which XLA leaves out.
_CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})
_JOINED = frozenset({"BiasAdd", "Relu", "Relu6"})
# Whole numbers of so few elements are shapes, counters and seeds. Compiled they would cut a cluster wherever a random
# operation or a variable stands behind them.
_FEW_ELEMENTS = 64
# Sums over ranks of at most so many bytes, for which nothing waits, need not start before what comes behind them.
_SHORT_BYTES = 64 << 10
# What starting a cluster takes, on CPUs, in bytes that could be read and written meanwhile.
LEAST_BYTES = 64 << 10
_FEWEST_NODES = 3


class _Place(NamedTuple):
    """A key that is equal for nodes that are compiled together.

    No component is smaller for a node than for one that it waits for. So no cycle comes of joining nodes by it.

    Attributes:
      stage: number of the first exchange for which the node has to be done.
      met: bit set of the exchanges and other synchronising nodes that it waits for.
      turns: how often the way to it leads from a node of which ``of_rank`` holds to one that only comes behind it.
      of_rank: whether it depends on what other ranks may have otherwise, such as rows of a batch. What it does not is
        compiled by itself, so that all ranks compile the same of it, and copies of a variable do not come to differ.
      level: how often the way to it from such nodes leaves a cluster.
    """

    stage: int
    met: int
    turns: int
    of_rank: bool
    level: int


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Nodes in the graph's order, and those of their results that others read."""

    nodes: list[Node]
    results: list[Ref]


def form_clusters(program: Program, xla: XlaKernels) -> Program:
    """Replaces what asks for XLA in one rank's program, and in its functions, by calls of functions that XLA compiles.

    Args:
      xla: the kernels for the device on which the program runs.
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
        """Returns the nodes that ask for XLA, and those between them that passes have added, if XLA compiles them."""
        able = {node.name for node in graph.nodes if self._is_able(graph, node)}
        asked = {node.name for node in graph.nodes if node.marks.compiled}
        behind: set[str] = set()  # added nodes that read what is compiled
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
        """Tells whether XLA compiles a node, and should."""
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
                    # XLA would find that what is recomputed is known already.
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
        """Tells whether a node takes part in an exchange with other ranks."""
        return (
            node.op in EXCHANGES
            or node.op in MEETINGS
            or any(func.name in self.exchanging for _, func in iterate_function_refs(node))
        )

    def _find_met(self, graph: Program, members: Collection[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Returns for each node the bit sets of what it waits for, and of what those behind it wait for."""
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
        """Numbers the exchanges in the order in which they can start; returns the first that needs a node, for each.

        The order is that of the longest ways to them, so that none comes before what it waits for.
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
            # What nobody waits for, and takes as long whenever it starts, starts together with the next.
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
    """Returns the functions in which ranks exchange something."""
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
    """Tells whether other kernels for CPUs beat XLA's: oneDNN's products and convolutions, to which TensorFlow adds a
    bias and a rectifier, TensorFlow's batch normalisation, and our sums over rows.
    """
    return (
        node.op in CONTRACTIONS | BATCH_NORMS | BATCH_NORM_GRADIENTS
        or (node.op in _JOINED and is_contraction_result(graph, node))
        or find_sum_type(graph, node) is not None
    )


def _may_differ_between_ranks(node: Node) -> bool:
    """Tells whether ranks may have other values of a node, whatever its operands are; handles are none."""
    values = any(t.dtype != "resource" for t in node.outputs)
    return values and (node.op == "Placeholder" or (node.stateful and node.op not in READS))


def _is_short(node: Node) -> bool:
    return node.op in RANK_REDUCTIONS and sum(t.bytes for t in node.outputs) <= _SHORT_BYTES


def _has_known_size(kind: TensorType) -> bool:
    return kind.dtype == "variant" or (kind.is_static and kind.dtype not in ("resource", "string"))


def _has_fixed_length(graph: Program, node: Node) -> bool:
    """Tells whether a list, if the node makes one, has as many places as XLA has to know of; True for other nodes."""
    places = {"TensorListReserve": 1, "EmptyTensorList": 1}.get(node.op)
    if places is None:
        return True
    length = graph.const(node.inputs[places])
    return length is not None and int(length) >= 0


def _iterate_results(graph: Program, nodes: Sequence[Node]) -> Iterator[Ref]:
    """Yields the tensors of ``nodes`` that are fetched, or that others read."""
    own, fetched = {node.name for node in nodes}, set(graph.outputs)
    for node in nodes:
        for ref in node.list_refs():
            if ref in fetched or any(reader.name not in own for reader, _ in graph.consumers.get(ref, ())):
                yield ref


def _refuse(graph: Program, cluster: _Cluster, on_gpu: bool) -> Iterator[str]:
    """Yields the names of the nodes of a cluster that cannot be compiled in it, or of all if it is not worth a call."""
    own = {node.name for node in cluster.nodes}
    inner = {ref.node for node in cluster.nodes for ref in node.inputs}
    # XLA would copy what is only seen in another shape, on the way in or out.
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
    # Where our kernels do all of a cluster's arithmetic, they do the sums behind it as they go.
    others = [node for node in work if on_gpu or find_elementwise_type(graph, node) is None]
    moved_bytes = sum(t.bytes for node in others for t in (*map(graph.find_type, node.inputs), *node.outputs))
    return len(work) >= _FEWEST_NODES and moved_bytes >= LEAST_BYTES
