"""Stores the variables of a session, and changes their layouts before each run that needs others.

Which ranks have a variable's present value is its ``VariableSharding``; ``ShardingMoves`` builds the operations that
move values where a run needs them.

Decision: 0093.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.captured import Captured
from whale.capture.encode import HOST_DEVICE
from whale.distributed.ranks import TURN_TIMEOUT_S, Ranks
from whale.errors import ProgramError
from whale.frontends.tf1.deferred_initializers import DeferredAssignments, RecordedInitializer, find_deferred
from whale.frontends.tf1.ranks_graph import RanksGraph, find_name, make_rank_prefix
from whale.ir.mesh import Tiles
from whale.ir.ops import READS
from whale.ir.program import Program, Ref, Variable
from whale.ir.values import TensorType, find_numpy_dtype
from whale.partition.variable_use import VariableUse, find_variable_uses
from whale.runtime.compile.compile import Compiled
from whale.runtime.context import Context
from whale.runtime.variables.partial_initializers import DeferredInitial
from whale.runtime.variables.split_variable import cut_part, gather_on_rank

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
        moved, lying = [], {name: _find_sharding(use, self.context.size) for name, (use, _, _) in wanted.items()}
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


@dataclass(frozen=True, slots=True)
class VariableSharding:
    """The ranks that have a variable's present value: a replica on each, or its tiles on those in ``order``."""

    ranks: frozenset[int]
    tiles: Tiles | None = None
    order: tuple[int, ...] = ()

    def find_place(self, rank: int) -> int | None:
        """Returns the tile that a rank has; None: it has none, or the variable is not split."""
        if self.tiles is None or rank not in self.ranks:
            return None
        return self.order.index(rank) % self.tiles.count

    def can_serve(self, wanted: VariableSharding) -> bool:
        """Tells whether the present sharding includes the wanted one."""
        if wanted.tiles is None:
            return self.tiles is None and wanted.ranks <= self.ranks
        return (self.tiles, self.order) == (wanted.tiles, wanted.order)


def _find_sharding(use: VariableUse, size: int) -> VariableSharding:
    """Returns the sharding of a variable in a run of ``size`` ranks."""
    if use.tiles is None:
        return VariableSharding(use.ranks)
    order = use.place or tuple(range(size))
    return VariableSharding(frozenset(order), use.tiles, order)


class ShardingMoves:
    """Builds operations that gather split variables, split whole values, and free unused values.

    Args:
      handle: in ``graph``, of (a variable's name, the position of one of this process's ranks, dtype).
    """

    def __init__(self, context: Ranks, graph: tf.Graph, handle: Callable[[str, int, tf.DType], tf.Tensor]) -> None:
        self._context, self._graph, self._handle = context, graph, handle
        self._made: dict[str, dict[Hashable, list[tf.Operation]]] = {}
        self._number = 0  # counts exchanges, equal on all ranks

    def forget(self, name: str) -> None:
        """Forgets a variable's operations, because it has moved to other memory."""
        self._made.pop(name, None)

    def gather_everywhere(self, name: str, held: TensorType, now: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations that gather the whole value on every rank. Collective."""

        def make_operations() -> list[tf.Operation]:
            number, self._number = self._number, self._number + 1
            return [
                op
                for position, rank in enumerate(self._context.ranks)
                for op in self._gather_on_rank(f"present/{number}", position, rank, name, held, now)
            ]

        return self._make_once(name, ("together", now), make_operations)

    def cut_to_tiles(self, name: str, held: TensorType, lying: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations by which every rank keeps only its tile of a whole value."""
        tiles, dtype = lying.tiles or Tiles(), tf.as_dtype(held.dtype)

        def keep_tile(position: int, place: int) -> tf.Operation:
            handle = self._handle(name, position, dtype)
            whole = tf.ensure_shape(gen_resource_variable_ops.read_variable_op(handle, dtype), held.shape)
            return gen_resource_variable_ops.assign_variable_op(handle, cut_part(whole, tiles, place))

        places = [(position, lying.find_place(rank)) for position, rank in enumerate(self._context.ranks)]
        return self._make_once(
            name, ("cut", lying), lambda: [keep_tile(i, place) for i, place in places if place is not None]
        )

    def free(self, name: str, held: TensorType, ranks: frozenset[int]) -> Sequence[tf.Operation]:
        """Returns operations that free the value on these ranks; the variable stays initialised there."""
        dtype = tf.as_dtype(held.dtype)

        def free_value(position: int) -> tf.Operation:
            handle = self._handle(name, position, dtype)
            return gen_resource_variable_ops.assign_variable_op(handle, tf.zeros((0,), dtype))

        at = [position for position, rank in enumerate(self._context.ranks) if rank in ranks]
        return self._make_once(name, ("free", ranks), lambda: list(map(free_value, at)))

    def _make_once(self, name: str, key: Hashable, make: Callable[[], list[tf.Operation]]) -> Sequence[tf.Operation]:
        known = self._made.setdefault(name, {})
        if key not in known:
            with self._graph.as_default():
                known[key] = make()
        return known[key]

    def _gather_on_rank(
        self, key: str, position: int, rank: int, name: str, held: TensorType, now: VariableSharding
    ) -> list[tf.Operation]:
        """Builds one rank's operations of ``gather_everywhere``."""
        ops, dtype = whale_ops.load_ops(), tf.as_dtype(held.dtype)
        comm = ops.whale_communicator(communicator=self._context.comm_name, rank=rank)
        handle = self._handle(name, position, dtype)
        value = tf.zeros((0,), dtype)
        if rank in now.ranks:
            value = gen_resource_variable_ops.read_variable_op(handle, dtype)
            if now.tiles is not None:
                value = gather_on_rank(value, now.tiles, now.order, rank, comm, key)
        if len(now.ranks) < self._context.size:
            root = now.order[0] if now.order else min(now.ranks)
            (value,) = ops.whale_broadcast(
                comm=comm, inputs=[value], key=f"{key}/sent", root=root, shapes=[held.shape], ranks=[]
            )
            if now.tiles is None and rank in now.ranks:
                return [value.op]
        return [gen_resource_variable_ops.assign_variable_op(handle, value)]
