"""Predicts one rank's peak memory in a step, by kind, by simulating its program without other ranks.

The simulation is that of `simulate`, with rough times that only need to give a realistic order: exchanges are treated
as ordinary nodes that take time in proportion to their bytes. The memory inside a function is computed once per
function and counts as scratch memory of each call, so 64 micro-batches take no longer to simulate than two. Loops are
unrolled; a loop with an unknown trip count counts as one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cost_model.graph.executor_graph import Graph, graph_of
from cost_model.graph.liveness import Kinds, peaks
from cost_model.graph.machine import GRAIN_BYTES
from cost_model.graph.simulate import SLICE_S, Sharing, run
from cost_model.kernels.op_work import Work
from whale.ir.ops import CALLS, CONTRACTIONS
from whale.ir.program import Node, Program, Ref, iterate_function_refs

# Rates of a server's core. Memory depends only on which of two nodes takes longer, not on how long they take.
_FLOPS_PER_S, _BYTES_PER_S, _EXCHANGED_BYTES_PER_S, _NODE_S = 5e10, 8e9, 2e9, 1e-6
_THREADS = 2
# The most time slices of a step that are simulated: a step may take minutes on such a core.
_MOST_SLICES = 4000
_STEPS_OF_A_CALL = 2

# Returns (tensor -> kind, variable's handle -> kind) of a program; tensors and variables left out have kind 0.
KindsOf = Callable[[Program], tuple[Mapping[Ref, int], Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class Held:
    """Holds the memory of one rank.

    Attributes:
        at_peak: bytes of each kind at the moment of a step when their sum is largest.
        resident_bytes: bytes between steps: variables, inputs, communication buffers.
    """

    at_peak: tuple[int, ...]
    resident_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Returns the bytes at the peak, summed over kinds."""
        return sum(self.at_peak)


def simulate_held(
    program: Program,
    rank: int,
    size: int,
    kinds: int,
    kinds_of: KindsOf,
    resident: int,
    counted_from_bytes: int = 0,
) -> Held:
    """Simulates the memory that ``rank`` (of ``size`` ranks) holds while it runs ``program``.

    Args:
        kinds: number of kinds of memory that are distinguished.
        kinds_of: returns the kinds of a program's tensors and variables; those that it leaves out have kind 0.
        resident: kind of inputs and communication buffers.
        counted_from_bytes: smaller tensors are not counted, as in TensorFlow's counters of host memory.
    """

    def round_up(wanted: int) -> int:
        return -(-wanted // GRAIN_BYTES) * GRAIN_BYTES if wanted and wanted >= counted_from_bytes else 0

    return _Holder(rank, size, kinds, kinds_of, resident, round_up, program.functions).hold(program)


@dataclass(frozen=True, slots=True)
class _Inside:
    """Holds the cost of one call of a function.

    Attributes:
        seconds: time of the call.
        scratch_bytes: memory of the call besides its results.
        passed_on: number of a result -> number of the argument that it returns unchanged.
    """

    seconds: float
    scratch_bytes: int
    passed_on: Mapping[int, int]


class _Holder:
    def __init__(
        self,
        rank: int,
        size: int,
        kinds: int,
        kinds_of: KindsOf,
        resident: int,
        allocated: Callable[[int], int],
        functions: Mapping[str, Program],
    ) -> None:
        self.rank, self.size, self.kinds, self.kinds_of, self.resident = rank, size, kinds, kinds_of, resident
        self.allocated, self.functions = allocated, functions
        self.inside: dict[str, _Inside] = {}

    def hold(self, program: Program) -> Held:
        graph, seconds, scratch, calls = self._graph(program)
        # The peak depends on which thread happens to be first, so it is the larger one of two simulations.
        orders = [_order(graph, seconds, cores) for cores in (float(_THREADS), 1.0)]
        most, resident = peaks(graph, orders, scratch, self._kinds(graph), calls=calls)
        return Held(tuple(most), resident)

    def _graph(self, program: Program) -> tuple[Graph, list[float], list[int], set[int]]:
        whole = replace(program, functions=self.functions)
        graph = graph_of(whole, self.rank, self.size, self.allocated, strict=False)
        seconds, scratch, calls = list[float](), list[int](), set[int]()
        for i, (node, does) in enumerate(zip(graph.nodes, graph.work)):
            called = [self._inside(f.name) for _, f in iterate_function_refs(node) if f.name in self.functions]
            if called:
                calls.add(i)
                seconds.append(sum(c.seconds for c in called))
                scratch.append(max(c.scratch_bytes for c in called))
                if node.op in CALLS:
                    for k, operand in called[0].passed_on.items():
                        graph.shared[graph.results[i][k]] = graph.operands[i][operand]
                continue
            what = graph.exchanges.get(i)
            seconds.append(what.tensor_bytes / _EXCHANGED_BYTES_PER_S if what else _seconds(node, does))
            scratch.append(sum(map(self.allocated, what.scratch_bytes)) if what else 0)
        graph.exchanges.clear()
        return graph, [0.0 if fused else s for s, fused in zip(seconds, graph.fused)], scratch, calls

    def _kinds(self, graph: Graph) -> Kinds:
        tensors, variables = self.kinds_of(graph.program)
        results = [0] * len(graph.sizes)
        for node, own in zip(graph.nodes, graph.results):
            for k, mine in enumerate(own):
                results[mine] = tensors.get(Ref(node.name, k), 0)
        return Kinds(self.kinds, results, {h: variables.get(h, 0) for h in graph.variable_bytes}, self.resident)

    def _inside(self, name: str) -> _Inside:
        if name not in self.inside:
            graph, seconds, scratch, calls = self._graph(self.functions[name])
            order = _order(graph, seconds, float(_THREADS))
            most, resident = peaks(graph, [order], scratch, self._kinds(graph), _STEPS_OF_A_CALL, calls)
            argument = {graph.results[i][0]: k for k, i in enumerate(_arguments(graph))}
            passed_on, own = {}, 0
            for k, result in enumerate(graph.fetched):
                while graph.shared[result] >= 0:
                    result = graph.shared[result]
                if result in argument:
                    passed_on[k] = argument[result]
                else:
                    own += graph.sizes[result]
            self.inside[name] = _Inside(sum(seconds), max(0, sum(most) - resident - own), passed_on)
        return self.inside[name]


def _order(graph: Graph, seconds: Sequence[float], cores: float) -> Sequence[int]:
    slice_s = max(SLICE_S, sum(seconds) / _MOST_SLICES)
    (played,) = run([graph], [seconds], lambda what: 0.0, Sharing([0], [cores], _THREADS, slice_s))
    return played.order


def _arguments(graph: Graph) -> list[int]:
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    return [place[name] for name in graph.program.inputs]


def _seconds(node: Node, does: Work) -> float:
    if not does.kernels:
        return 0.0
    return _NODE_S + (does.flops / _FLOPS_PER_S if node.op in CONTRACTIONS else does.moved_bytes / _BYTES_PER_S)
