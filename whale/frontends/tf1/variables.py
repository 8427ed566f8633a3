"""Stores the variables of a session, and changes their layouts before each run that needs others.

Decision: 0093.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.ops import gen_resource_variable_ops

from whale.capture.captured import Captured
from whale.capture.encode import HOST_DEVICE
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.errors import ProgramError
from whale.frontends.tf1.deferred_initializers import DeferredAssignments, RecordedInitializer, find_deferred
from whale.frontends.tf1.names import find_name, make_rank_prefix
from whale.frontends.tf1.ranks_graph import RanksGraph
from whale.frontends.tf1.variable_shardings import ShardingMoves, VariableSharding, find_sharding
from whale.ir.mesh import Tiles
from whale.ir.ops import READS
from whale.ir.program import Program, Ref, Variable
from whale.ir.values import TensorType, find_numpy_dtype
from whale.partition.variable_use import VariableUse, find_variable_uses
from whale.runtime.compile.compile import Compiled
from whale.runtime.context import Context
from whale.runtime.variables.partial_initializers import DeferredInitial

_TOGETHER_BYTES = 64 << 20
Layout = tuple[VariableUse, TensorType, bool]  # the last: in the host's memory beside an accelerator


def _is_used(program: Program, variable: Variable) -> bool:
    """Tells whether a run uses a variable other than by asking whether it is initialised."""
    return any(n.op != "VarIsInitializedOp" for n, _ in program.consumers.get(Ref(variable.node), ()))


def list_used_names(program: Program) -> list[str]:
    """Returns the names of the variables that a run reads or writes."""
    return [find_name(program.by_name[v.node]) for v in program.variables if _is_used(program, v)]


def list_changed_names(program: Program) -> list[str]:
    """Returns the names of the variables that a run writes, or passes to an op that may."""
    of_variable = ((v, program.consumers.get(Ref(v.node), ())) for v in program.variables)
    return [find_name(program.by_name[v.node]) for v, users in of_variable if any(n.op not in READS for n, _ in users)]


def _make_seeds(seed: int, variable: int, number: int) -> tuple[int, int]:
    """Returns seeds for a random op without seeds: a different stream for each."""
    return seed, (variable << 32) + number


class SessionVariables:
    """The variables of a session on this process's ranks.

    Args:
      ranks_graph: the graph and the session in which the ranks' variables live.
    """

    def __init__(self, context: Context, ranks_graph: RanksGraph):
        self.context, self._ranks_graph = context, ranks_graph
        self._inner, self._graph = ranks_graph.session, ranks_graph.graph
        self._everywhere = VariableSharding(frozenset(range(context.size)))
        self._held: dict[str, DeferredInitial] = {}
        self._now: dict[str, VariableSharding] = {}  # where variables lie that were used, and wait for no value
        self._divided: dict[
            str, VariableSharding
        ] = {}  # as the first run that divides one has it; later ones are planned so
        self.on_host: set[str] = set()  # names of those that lie in the host's memory beside an accelerator
        self._types: dict[str, TensorType] = {}
        self._runs: Counter[str] = Counter()  # how often random ops have run
        self._seeds = 0
        self._reads: dict[tuple[str, int], tf.Tensor] = {}
        self._assigns: dict[tuple[str, int], tuple[tf.Tensor, tf.Operation]] = {}
        self._moves = ShardingMoves(context, self._graph, self.handle)

    def find_deferred(self, name: str) -> DeferredInitial | None:
        """Returns the deferred value of a variable; None: it has none."""
        return self._held.get(name)

    def find_sharding(self, name: str) -> VariableSharding:
        """Returns the ranks that have the value of a variable."""
        return self._now.get(name, self._everywhere)

    def find_type(self, name: str) -> TensorType:
        """Returns the type of a variable that some run has used."""
        return self._types[name]

    def read(self, name: str, position: int, dtype: tf.DType) -> np.ndarray:
        """Reads the value or part of a variable on this process's rank number ``position``."""
        if (name, position) not in self._reads:
            with self._graph.as_default():
                handle = self.handle(name, position, dtype)
                self._reads[name, position] = gen_resource_variable_ops.read_variable_op(handle, dtype)
        return np.asarray(self._inner.run(self._reads[name, position]))

    def is_not_whole_here(self, name: str) -> bool:
        """Tells whether some rank lacks the whole value of a variable: it is elsewhere, split, or deferred."""
        return name in self._held or not self.find_sharding(name).can_serve(self._everywhere)

    def find_deferred_assignments(self, captured: Captured, graph: tf.Graph) -> DeferredAssignments:
        """Finds the assignments of a captured run of ``graph`` that are deferred."""
        return find_deferred(captured, graph) if self.context.may_divide_variables else DeferredAssignments({})

    def find_known_tiles(self, program: Program) -> dict[str, Tiles]:
        """Maps handle nodes of a captured program's variables that some run has divided to their tiles."""
        used = [v for v in program.variables if _is_used(program, v)]
        named = ((v, self._divided.get(find_name(program.by_name[v.node]))) for v in used)
        return {v.node: lying.tiles for v, lying in named if lying is not None and lying.tiles is not None}

    def refuse_alone(self, names: Iterable[str]) -> None:
        """Raises ProgramError if a run of the first rank alone uses a variable that is not replicated."""
        for name in names:
            if self.is_not_whole_here(name):
                raise ProgramError(
                    "a queue is filled from a variable that is split over ranks, or not initialised yet",
                    op=name,
                    given="a run of one rank, in which nothing can be exchanged: its threads run in no common order",
                    expected="variables that all ranks have whole",
                    action="read the variable in a run of its own, and feed its value",
                )

    def find_wanted_layouts(self, compiled: Compiled) -> dict[str, Layout]:
        """Maps the names of the variables that a run reads or writes to their layouts and types in it."""
        program, by_node = compiled.program, find_variable_uses(compiled.program, compiled.plan)
        everyone = VariableUse(self._everywhere.ranks, True)
        used = [v for v in program.variables if _is_used(program, v)]
        found = ((v, find_name(program.by_name[v.node]), v.node in compiled.plan.offloaded) for v in used)
        return {
            name: (by_node.get(v.node, everyone), v.type, there or name in self.on_host) for v, name, there in found
        }

    def wait(self, waiting: DeferredAssignments, paths: Mapping[tf.Tensor, str]) -> None:
        """Records a run's deferred assignments. Collective between processes if a value is drawn without seeds."""
        recorded = [what for _, what in waiting.found.values() if isinstance(what, RecordedInitializer)]
        seed = 0 if all(what.is_seeded for what in recorded) else self._draw_seed()
        for i, (name, what) in enumerate(waiting.found.values()):
            if isinstance(what, RecordedInitializer):
                initial = what.run(self._runs, partial(_make_seeds, seed, i))
            else:
                initial = what.make_initial(paths[what.prefix])
            self._held[name] = initial
        names = [name for name, _ in waiting.found.values()]
        dtypes = {name: find_numpy_dtype(self._held[name].dtype) for name in names}
        everywhere = range(len(self.context.ranks))
        self._assign((name, i, np.zeros((0,), dtypes[name])) for name in names for i in everywhere)  # initialised now
        self._make({name: self._divided[name] for name in names if name in self._divided})

    def move_to_layouts(self, wanted: Mapping[str, Layout]) -> list[str]:
        """Changes variables to the layouts of a run. Collective between processes if some layouts differ.

        Returns the names of those for which other runs are better planned again.
        """
        moved, lying = [], {name: find_sharding(use, self.context.size) for name, (use, _, _) in wanted.items()}
        for name, (_, held, on_host) in wanted.items():
            self._types[name] = held
            if lying[name].tiles is not None and name not in self._divided:
                moved.append(name)
                self._divided[name] = lying[name]
            if on_host and name not in self.on_host:
                moved.append(name)
                self._move_to_host(name, tf.as_dtype(held.dtype))
        self._make({name: lying[name] for name in wanted if name in self._held})
        self._bring(lying)
        for name, (use, _, _) in wanted.items():
            if use.writes and lying[name].tiles is None and lying[name] != self.find_sharding(name):
                self._leave(name, lying[name])
        return moved

    def bring_whole(self, names: Iterable[str]) -> None:
        """Replicates the values of variables. Collective between processes if some rank lacks one."""
        apart = {name: self._everywhere for name in names if self.is_not_whole_here(name)}
        self._make({name: lying for name, lying in apart.items() if name in self._held})
        self._bring(apart)

    def _bring(self, wanted: Mapping[str, VariableSharding]) -> None:
        """Moves initialised variables to the wanted layouts, some megabytes at a time."""
        together: list[str] = []
        for name in (name for name, lying in wanted.items() if not self.find_sharding(name).can_serve(lying)):
            together.append(name)
            if sum(self._types[other].bytes for other in together) >= _TOGETHER_BYTES:
                self._bring_now(together, wanted)
                together = []
        if together:
            self._bring_now(together, wanted)

    def _bring_now(self, names: Sequence[str], wanted: Mapping[str, VariableSharding]) -> None:
        whole: list[tf.Operation] = []
        tiles: list[tf.Operation] = []
        for name in names:
            now, lying = self.find_sharding(name), wanted[name]
            if now.tiles is not None or not lying.ranks <= now.ranks:
                whole += self._moves.gather_everywhere(name, self._types[name], now)
                self._now[name] = self._everywhere
            if lying.tiles is not None:
                tiles += self._moves.cut_to_tiles(name, self._types[name], lying)
        self._run(whole)
        self._run(tiles)
        for name in names:
            if wanted[name].tiles is not None:
                self._leave(name, wanted[name])

    def _leave(self, name: str, lying: VariableSharding) -> None:
        """Frees a variable on the ranks that do not need it any more."""
        self._run(self._moves.free(name, self._types[name], self.find_sharding(name).ranks - lying.ranks))
        self._now[name] = lying

    def _run(self, operations: Sequence[tf.Operation]) -> None:
        if operations:
            self._inner.run(operations)

    def _draw_seed(self) -> int:
        """Draws a seed, equal on all ranks, for random ops that have none."""
        self._seeds += 1
        mine = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        if not self.context.has_other_processes:
            return mine
        data = mine.to_bytes(8, "little") if self.context.rank == 0 else None
        timeout_s = self.context.config["debug.check_timeout_s"]
        key = f"whale/session_seed/{self.context.elements}"
        self.context.elements += 1
        return int.from_bytes(self.context.comms[0].broadcast_bytes(key, data, 0, timeout_s), "little")

    def _make(self, wanted: Mapping[str, VariableSharding]) -> None:
        """Initialises deferred variables on the ranks of their layouts."""
        self._assign(made for name, lying in wanted.items() for made in self._make_values(name, lying))

    def _make_values(self, name: str, lying: VariableSharding) -> Iterator[tuple[str, int, np.ndarray]]:
        initial = self._held.pop(name)
        self._now[name] = lying
        # A value that can only be computed whole is computed by one process after the other.
        whole = lying.tiles is not None and not initial.is_divisible and self.context.has_other_processes
        for turn in range(self.context.size if whole else 1):
            for position, rank in enumerate(self.context.ranks):
                if rank in lying.ranks and (not whole or turn == rank):
                    yield name, position, _compute_first_value(initial, lying, rank)
            if whole:
                purpose = f"the first value of {name!r}, which can only be computed whole, by one rank after the other"
                self.context.comms[0].allgather_bytes("whale/first_values/turn", b"", TURN_TIMEOUT_S, purpose)

    def _assign(self, values: Iterable[tuple[str, int, np.ndarray]]) -> None:
        """Assigns values to variables of this process's ranks, several in a run."""
        feeds: dict[tf.Tensor, np.ndarray] = {}
        assigns: list[tf.Operation] = []

        def run() -> None:
            if assigns:
                self._inner.run(assigns, feeds)
            feeds.clear()
            assigns.clear()

        for name, position, value in values:
            if (name, position) not in self._assigns:
                with self._graph.as_default():
                    given = tf.compat.v1.placeholder(value.dtype)
                    handle = self.handle(name, position, given.dtype)
                    self._assigns[name, position] = given, gen_resource_variable_ops.assign_variable_op(handle, given)
            given, assign = self._assigns[name, position]
            feeds[given] = value
            assigns.append(assign)
            if sum(v.nbytes for v in feeds.values()) >= _TOGETHER_BYTES:
                run()
        run()

    def handle(self, name: str, position: int, dtype: tf.DType) -> tf.Tensor:
        """Builds, in the inner graph, the handle of the variable of this process's rank number ``position``."""
        shared = make_rank_prefix(position) + name
        place = HOST_DEVICE if name in self.on_host else self._ranks_graph.device
        with self._graph.device(place):
            return gen_resource_variable_ops.var_handle_op(dtype=dtype, shape=tf.TensorShape(None), shared_name=shared)

    def _move_to_host(self, name: str, dtype: tf.DType) -> None:
        """Moves values of a variable from the device's memory to the host's."""
        positions = range(len(self.context.ranks))
        values = [self.read(name, position, dtype) for position in positions]
        with self._graph.as_default():
            handles = [self.handle(name, position, dtype) for position in positions]
            self._inner.run([gen_resource_variable_ops.destroy_resource_op(handle) for handle in handles])
        self._moves.forget(name)
        for position in positions:
            del self._reads[name, position]
            self._assigns.pop((name, position), None)
        self.on_host.add(name)
        self._assign((name, position, value) for position, value in enumerate(values))


def _compute_first_value(initial: DeferredInitial, lying: VariableSharding, rank: int) -> np.ndarray:
    """Computes a rank's part of an initial value, in memory that nothing else refers to."""
    place = lying.find_place(rank)
    with tf_context.eager_mode():
        part = initial.compute_whole() if place is None else initial.make_part(lying.tiles, place).read_value()  # type: ignore[arg-type]
    found: np.ndarray = part._numpy_internal()
    return found
