"""Stores a session's variables, and moves them to another layout before a run that needs one.

``VariableSharding`` describes which ranks have a variable's present value; ``ShardingMoves`` builds the operations that
move values between ranks.

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
    """Returns True if a run does more with a variable than ask whether it is initialised."""
    return any(n.op != "VarIsInitializedOp" for n, _ in program.consumers.get(Ref(variable.node), ()))


def list_used_names(program: Program) -> list[str]:
    """Returns the names of the variables that a run reads or writes."""
    return [find_name(program.by_name[v.node]) for v in program.variables if _is_used(program, v)]


def list_changed_names(program: Program) -> list[str]:
    """Returns the names of the variables that a run writes, or passes to an op that may write."""
    of_variable = ((v, program.consumers.get(Ref(v.node), ())) for v in program.variables)
    return [find_name(program.by_name[v.node]) for v, users in of_variable if any(n.op not in READS for n, _ in users)]


def _make_seeds(seed: int, variable: int, number: int) -> tuple[int, int]:
    """Returns the two seeds for random op ``number`` of variable ``variable``, if the script gave the op no seed."""
    return seed, (variable << 32) + number


class SessionVariables:
    """Stores the variables of a session on this process's ranks.

    Args:
      context: the run.
      ranks_graph: the graph, with its session, that has the variables.
    """

    def __init__(self, context: Context, ranks_graph: RanksGraph):
        self.context, self._ranks_graph = context, ranks_graph
        self._inner, self._graph = ranks_graph.session, ranks_graph.graph
        self._everywhere = VariableSharding(frozenset(range(context.size)))
        self._held: dict[str, DeferredInitial] = {}
        self._now: dict[str, VariableSharding] = {}  # present sharding of variables that were used
        self._divided: dict[
            str, VariableSharding
        ] = {}  # sharding in the first run that shards the variable; later runs are planned with the same one
        self.on_host: set[str] = set()  # names of variables in host memory beside an accelerator
        self._types: dict[str, TensorType] = {}
        self._runs: Counter[str] = Counter()  # how often random ops have run
        self._seeds = 0
        self._reads: dict[tuple[str, int], tf.Tensor] = {}
        self._assigns: dict[tuple[str, int], tuple[tf.Tensor, tf.Operation]] = {}
        self._moves = ShardingMoves(context, self._graph, self.handle)

    def find_deferred(self, name: str) -> DeferredInitial | None:
        """Returns the initial value that a variable waits for; None if it waits for none."""
        return self._held.get(name)

    def find_sharding(self, name: str) -> VariableSharding:
        """Returns which ranks have a variable's present value; all ranks for a variable that no run has used."""
        return self._now.get(name, self._everywhere)

    def find_type(self, name: str) -> TensorType:
        """Returns the dtype and shape of a variable that some run has used."""
        return self._types[name]

    def read(self, name: str, position: int, dtype: tf.DType) -> np.ndarray:
        """Returns this process's present value of a variable: the whole value or, if it is sharded, one rank's tile.

        Args:
          name: name of the variable.
          position: index of the rank among those of this process.
          dtype: dtype of the variable.
        """
        if (name, position) not in self._reads:
            with self._graph.as_default():
                handle = self.handle(name, position, dtype)
                self._reads[name, position] = gen_resource_variable_ops.read_variable_op(handle, dtype)
        return np.asarray(self._inner.run(self._reads[name, position]))

    def is_not_whole_here(self, name: str) -> bool:
        """Returns True if some rank lacks the whole value of a variable: because the variable is sharded, stored on
        other ranks only, or not initialised yet.
        """
        return name in self._held or not self.find_sharding(name).can_serve(self._everywhere)

    def find_deferred_assignments(self, captured: Captured, graph: tf.Graph) -> DeferredAssignments:
        """Returns the assignments of a captured run that are deferred; none if this run cannot shard variables."""
        return find_deferred(captured, graph) if self.context.may_divide_variables else DeferredAssignments({})

    def find_known_tiles(self, program: Program) -> dict[str, Tiles]:
        """Returns the tiles of those variables of a program that an earlier run has sharded, by handle node, so that
        the program is planned with the same ones.
        """
        used = [v for v in program.variables if _is_used(program, v)]
        named = ((v, self._divided.get(find_name(program.by_name[v.node]))) for v in used)
        return {v.node: lying.tiles for v, lying in named if lying is not None and lying.tiles is not None}

    def refuse_alone(self, names: Iterable[str]) -> None:
        """Raises a ProgramError if a run of one rank uses a variable that is not replicated on all ranks."""
        for name in names:
            if self.is_not_whole_here(name):
                raise ProgramError(
                    "a run of one rank alone, e.g. one that fills a queue, reads a variable that is sharded, on other "
                    "ranks, or not initialised yet",
                    op=name,
                    given=f"the variable {name} in a run of one rank, which cannot exchange data with other ranks",
                    expected="variables that are initialised and replicated on all ranks",
                    action="read the variable in a Session.run of its own, and feed its value",
                )

    def find_wanted_layouts(self, compiled: Compiled) -> dict[str, Layout]:
        """Returns the layouts that a compiled run needs for the variables that it uses, by name."""
        program, by_node = compiled.program, find_variable_uses(compiled.program, compiled.plan)
        everyone = VariableUse(self._everywhere.ranks, True)
        used = [v for v in program.variables if _is_used(program, v)]
        found = ((v, find_name(program.by_name[v.node]), v.node in compiled.plan.offloaded) for v in used)
        return {
            name: (by_node.get(v.node, everyone), v.type, there or name in self.on_host) for v, name, there in found
        }

    def wait(self, waiting: DeferredAssignments, paths: Mapping[tf.Tensor, str]) -> None:
        """Records the deferred assignments of a run; until they are made, the variables hold empty tensors, so that
        they count as initialised.

        Collective between processes if an initial value is random and has no seed.

        Args:
          waiting: the assignments.
          paths: path of a checkpoint by the tensor that names it, for values that are read from checkpoints.
        """
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
        """Moves variables to the layouts that a run needs. Collective between processes if some layouts change.

        Args:
          wanted: what ``find_wanted_layouts`` returned for the run.

        Returns:
          Names of variables that were sharded or offloaded for the first time; runs that use them should be planned
          again.
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
        """Replicates variables on all ranks. Collective between processes if some rank lacks a value."""
        apart = {name: self._everywhere for name in names if self.is_not_whole_here(name)}
        self._make({name: lying for name, lying in apart.items() if name in self._held})
        self._bring(apart)

    def _bring(self, wanted: Mapping[str, VariableSharding]) -> None:
        """Moves initialised variables to the wanted shardings, at most about 64 MiB at a time, since a move may need
        the whole value on each rank.

        Args:
          wanted: name of a variable -> the sharding that it gets.
        """
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
        """Frees a variable's value on ranks that have no part in its new sharding.

        Args:
          name: name of the variable.
          lying: its new sharding.
        """
        self._run(self._moves.free(name, self._types[name], self.find_sharding(name).ranks - lying.ranks))
        self._now[name] = lying

    def _run(self, operations: Sequence[tf.Operation]) -> None:
        if operations:
            self._inner.run(operations)

    def _draw_seed(self) -> int:
        """Returns a new random seed that is equal on all ranks; collective between processes."""
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
        """Computes the deferred initial values of variables on the ranks that need them.

        Args:
          wanted: name of a variable -> the sharding in which it is initialised.
        """
        self._assign(made for name, lying in wanted.items() for made in self._make_values(name, lying))

    def _make_values(self, name: str, lying: VariableSharding) -> Iterator[tuple[str, int, np.ndarray]]:
        initial = self._held.pop(name)
        self._now[name] = lying
        # Processes take turns to compute an initial value that can only be computed whole, to bound the host's memory.
        whole = lying.tiles is not None and not initial.is_divisible and self.context.has_other_processes
        for turn in range(self.context.size if whole else 1):
            for position, rank in enumerate(self.context.ranks):
                if rank in lying.ranks and (not whole or turn == rank):
                    yield name, position, _compute_first_value(initial, lying, rank)
            if whole:
                purpose = f"the first value of {name!r}, which can only be computed whole, by one rank after the other"
                self.context.comms[0].allgather_bytes("whale/first_values/turn", b"", TURN_TIMEOUT_S, purpose)

    def _assign(self, values: Iterable[tuple[str, int, np.ndarray]]) -> None:
        """Assigns values to variables of this process's ranks, about 64 MiB per run.

        Args:
          values: (name, position of the rank within this process, value).
        """
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
        """Returns the resource handle of a variable, from an op that is added to the default graph.

        Args:
          name: name of the variable.
          position: index of the rank among those of this process.
          dtype: dtype of the variable.
        """
        shared = make_rank_prefix(position) + name
        place = HOST_DEVICE if name in self.on_host else self._ranks_graph.device
        with self._graph.device(place):
            return gen_resource_variable_ops.var_handle_op(dtype=dtype, shape=tf.TensorShape(None), shared_name=shared)

    def _move_to_host(self, name: str, dtype: tf.DType) -> None:
        """Moves a variable from the accelerator's memory to host memory."""
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
    """Computes a rank's part of an initial value, as an array that nothing else refers to.

    Args:
      initial: the deferred initial value.
      lying: the sharding in which the variable is initialised.
      rank: the rank.
    """
    place = lying.find_place(rank)
    with tf_context.eager_mode():
        part = initial.compute_whole() if place is None else initial.make_part(lying.tiles, place).read_value()  # type: ignore[arg-type]
    found: np.ndarray = part._numpy_internal()
    return found


@dataclass(frozen=True, slots=True)
class VariableSharding:
    """Describes which ranks store a variable's present value: the whole value, or tiles of it.

    Attributes:
      ranks: the ranks that have the value or a tile of it.
      tiles: how the variable is divided; None: each of ``ranks`` has the whole value.
      order: the ranks in the order of their tiles; empty if there are no tiles.
    """

    ranks: frozenset[int]
    tiles: Tiles | None = None
    order: tuple[int, ...] = ()

    def find_place(self, rank: int) -> int | None:
        """Returns the number of the tile that a rank has; None if it has no tile."""
        if self.tiles is None or rank not in self.ranks:
            return None
        return self.order.index(rank) % self.tiles.count

    def can_serve(self, wanted: VariableSharding) -> bool:
        """Returns True if no value has to be moved for a run that needs the sharding ``wanted``, because this one has
        all of it in place.
        """
        if wanted.tiles is None:
            return self.tiles is None and wanted.ranks <= self.ranks
        return (self.tiles, self.order) == (wanted.tiles, wanted.order)


def _find_sharding(use: VariableUse, size: int) -> VariableSharding:
    """Returns the sharding that a run needs for a variable.

    Args:
      use: the ranks on which the run's plan uses the variable, and its tiles.
      size: number of ranks of the run.
    """
    if use.tiles is None:
        return VariableSharding(use.ranks)
    order = use.place or tuple(range(size))
    return VariableSharding(frozenset(order), use.tiles, order)


class ShardingMoves:
    """Builds the operations by which ``SessionVariables`` moves values: gathering sharded variables, cutting whole
    values into tiles, freeing values.

    Operations are built once per variable and kind of move.

    Args:
      context: the ranks.
      graph: the graph to which operations are added.
      handle: returns the handle in ``graph`` for (variable's name, position of a rank within this process, dtype).
    """

    def __init__(self, context: Ranks, graph: tf.Graph, handle: Callable[[str, int, tf.DType], tf.Tensor]) -> None:
        self._context, self._graph, self._handle = context, graph, handle
        self._made: dict[str, dict[Hashable, list[tf.Operation]]] = {}
        self._number = 0  # counts exchanges, equal on all ranks

    def forget(self, name: str) -> None:
        """Drops the operations that were built for a variable, because it has moved to other memory."""
        self._made.pop(name, None)

    def gather_everywhere(self, name: str, held: TensorType, now: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations that give every rank the whole value of a variable; to run them is collective.

        Args:
          name: name of the variable.
          held: dtype and shape of the whole variable.
          now: its present sharding.
        """

        def make_operations() -> list[tf.Operation]:
            number, self._number = self._number, self._number + 1
            return [
                op
                for position, rank in enumerate(self._context.ranks)
                for op in self._gather_on_rank(f"present/{number}", position, rank, name, held, now)
            ]

        return self._make_once(name, ("together", now), make_operations)

    def cut_to_tiles(self, name: str, held: TensorType, lying: VariableSharding) -> Sequence[tf.Operation]:
        """Returns operations by which each rank replaces the whole value by its own tile.

        Args:
          name: name of the variable.
          held: dtype and shape of the whole variable.
          lying: the sharding with the tiles.
        """
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
        """Returns operations that replace a variable's value on ``ranks`` by an empty tensor; it stays initialised.

        Args:
          name: name of the variable.
          held: dtype and shape of the whole variable.
          ranks: the ranks that give up their value.
        """
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
        """Builds the operations of ``gather_everywhere`` for one rank.

        Args:
          key: prefix of the keys of the exchanges, equal on all ranks.
          position: index of the rank among those of this process.
          rank: the rank.
          name, held, now: as for ``gather_everywhere``.
        """
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
