"""Variables of a session: how they lie on the ranks, and first values that wait until somebody knows that.

A run that only gives variables their first values, or restores them, says nothing about their layout. What it would
assign is recorded, and made by the first run that uses the variable: part by part where that run's plan divides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.ops import gen_resource_variable_ops

from whale.capture.encode import HOST_DEVICE
from whale.errors import PlanError, ProgramError
from whale.ir.mesh import Tiles
from whale.ir.program import Node, Program, Ref, Variable, prune
from whale.ir.values import TensorType, numpy_dtype
from whale.passes.facts.stages import has_stages
from whale.runtime.checkpoint.reading import read_region
from whale.runtime.compile.compile import Compiled
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context
from whale.runtime.session.names import name_of, rank_prefix
from whale.runtime.session.ranks_graph import RanksGraph
from whale.runtime.variables.initializer_recording import Recorded, record_tensor
from whale.runtime.variables.partial_initializers import LITTLE_BYTES, Initial
from whale.runtime.variables.split_variable import cut
from whale.runtime.variables.stage_variables import Use

_TOGETHER_BYTES = 64 << 20
Layout = tuple[Use, TensorType, bool]  # the last: in the host's memory beside an accelerator
_INITIAL = "_whale_initial"  # what ranks compare of an assignment that waits


@dataclass(frozen=True)
class Restored:
    """A value out of a checkpoint: ``prefix`` is the tensor that names its files."""

    prefix: tf.Tensor
    key: str
    shape: tuple[int, ...]
    dtype: tf.DType

    @property
    def digest(self) -> str:
        """What it is known by in the fingerprint of a run."""
        return self.key

    def initial(self, path: str) -> Initial:
        """The value in the checkpoint at ``path``, to be read region by region."""
        reader = partial(read_region, path, self.key, self.shape, self.dtype)
        return Initial(self.shape, self.dtype.name, {}, (), 0, reader)


@dataclass(frozen=True)
class Waiting:
    """Assignments of a run that wait: name of the node -> (name of the variable, what it assigns)."""

    found: Mapping[str, tuple[str, Recorded | Restored]]

    def left_out(self, program: Program) -> Program:
        """``program`` without them."""
        nodes = tuple(self._left_out(node) for node in program.nodes)
        return prune(program.with_nodes(nodes)) if self.found else program

    def _left_out(self, node: Node) -> Node:
        if node.name not in self.found:
            return node
        attrs = {_INITIAL: self.found[node.name][1].digest}
        return Node(node.name, "NoOp", (), node.controls, attrs, (), node.scope)

    def restored_from(self, feeds: Mapping[tf.Tensor, np.ndarray]) -> dict[tf.Tensor, str] | None:
        """The paths of the checkpoints that are read, by the tensors that name them; None: a run computes one.

        Raises:
          tf.errors.OpError: a checkpoint, or a variable in it, is not there.
        """
        found: dict[tf.Tensor, str] = {}
        wanted = [what for _, what in self.found.values() if isinstance(what, Restored)]
        for prefix in dict.fromkeys(what.prefix for what in wanted):
            path = _path(prefix, feeds)
            if path is None:
                return None
            found[prefix] = path
        shapes = {path: _shapes(path) for path in found.values()}
        for what in wanted:
            shape = shapes[found[what.prefix]].get(what.key)
            if shape is None:
                raise tf.errors.NotFoundError(
                    None, None, f"Key {what.key} not found in checkpoint {found[what.prefix]}"
                )
            if shape != list(what.shape):
                where = f"{what.key} has shape {shape} in the checkpoint {found[what.prefix]}"
                raise tf.errors.InvalidArgumentError(None, None, f"{where}, and {list(what.shape)} in the graph")
        return found


def _shapes(path: str) -> dict[str, list[int]]:
    """Of the variables in a checkpoint. Raises tf.errors.OpError when there is none."""
    try:
        found: dict[str, list[int]] = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    except ValueError as error:  # what TensorFlow's Python says of a path without files
        raise tf.errors.NotFoundError(None, None, str(error)) from error
    return found


def waiting_in(program: Program, graph: tf.Graph) -> Waiting:
    """The assignments of a captured run of ``graph`` that may wait."""
    found: dict[str, tuple[str, Recorded | Restored]] = {}
    for variable in program.variables:
        handle = program.by_name[variable.node]
        users = [n for n, _ in program.consumers.get(Ref(variable.node), ()) if n.op != "VarIsInitializedOp"]
        shape = variable.type.shape
        if len(users) != 1 or users[0].op != "AssignVariableOp" or shape is None or None in shape:
            continue
        value = graph.get_operation_by_name(users[0].name).inputs[1]
        if value.dtype.name != variable.type.dtype or not value.shape.is_compatible_with(shape):
            continue
        what: Recorded | Restored | None = _restored(value, tuple(n for n in shape if n is not None))
        if what is None and variable.type.bytes > LITTLE_BYTES and value.shape == tf.TensorShape(shape):
            what = record_tensor(value)
        if what is not None:
            found[users[0].name] = name_of(handle), what
    return Waiting(found)


def _restored(value: tf.Tensor, shape: tuple[int, ...]) -> Restored | None:
    while value.op.type == "Identity":
        value = value.op.inputs[0]
    if value.op.type != "RestoreV2":
        return None
    keys, specs = (tf.get_static_value(t) for t in value.op.inputs[1:])
    if keys is None or specs is None or specs[value.value_index]:
        return None
    return Restored(value.op.inputs[0], keys[value.value_index].decode(), shape, value.dtype)


def _path(prefix: tf.Tensor, feeds: Mapping[tf.Tensor, np.ndarray]) -> str | None:
    while prefix not in feeds and prefix.op.type in ("Identity", "PlaceholderWithDefault"):
        prefix = prefix.op.inputs[0]
    value = feeds[prefix] if prefix in feeds else tf.get_static_value(prefix)
    if value is None or np.shape(value):
        return None
    item = np.asarray(value).item()
    return item.decode() if isinstance(item, bytes) else str(item)


def _is_used(program: Program, variable: Variable) -> bool:
    """Whether a run does more with it than to ask whether it has a value."""
    return any(n.op != "VarIsInitializedOp" for n, _ in program.consumers.get(Ref(variable.node), ()))


def _unseeded(seed: int, variable: int, number: int) -> tuple[int, int]:
    """Seeds of a random op that has none: another stream for each."""
    return seed, (variable << 32) + number


class SessionVariables:
    """What this process's ranks hold of a session's variables.

    Args:
      ranks_graph: the graph and the session in which the ranks' variables live.
    """

    def __init__(self, context: Context, ranks_graph: RanksGraph):
        self.context, self._ranks_graph = context, ranks_graph
        self._inner, self._graph = ranks_graph.session, ranks_graph.graph
        self._held: dict[str, Initial] = {}
        self._split: dict[str, Tiles] = {}
        self._order: dict[str, Sequence[int]] = {}  # of the ranks that have the tiles
        self.on_host: set[str] = set()  # names of those that lie in the host's memory beside an accelerator
        self._types: dict[str, TensorType] = {}
        self._runs: Counter[str] = Counter()  # of random ops
        self._seeds = 0
        self._reads: dict[tuple[str, int], tf.Tensor] = {}
        self._assigns: dict[tuple[str, int], tuple[tf.Tensor, tf.Operation]] = {}

    def held(self, name: str) -> Initial | None:
        """The value that a variable waits for."""
        return self._held.get(name)

    def layout(self, name: str) -> tuple[Tiles, TensorType]:
        """Of a variable that lies split."""
        return self._split[name], self._types[name]

    def holder(self, name: str, place: int) -> int:
        """The first rank that has a tile."""
        return self._order[name][place]

    def place(self, name: str, rank: int) -> int:
        """The tile that a rank has of a variable that lies split."""
        return self._order[name].index(rank) % self._split[name].count

    def read(self, name: str, position: int, dtype: tf.DType) -> np.ndarray:
        """What this process's rank number ``position`` holds of a variable."""
        if (name, position) not in self._reads:
            with self._graph.as_default():
                handle = self.handle(name, position, dtype)
                self._reads[name, position] = gen_resource_variable_ops.read_variable_op(handle, dtype)
        return np.asarray(self._inner.run(self._reads[name, position]))

    def is_apart(self, name: str) -> bool:
        """Whether a variable lies split or waits for its value."""
        return name in self._split or name in self._held

    def waiting_in(self, program: Program, graph: tf.Graph) -> Waiting:
        """The assignments of a captured run of ``graph`` that wait."""
        return waiting_in(program, graph) if self.context.may_divide_variables else Waiting({})

    def known(self, program: Program) -> dict[str, Tiles] | None:
        """Handle nodes of a captured program's variables that lie split -> how; None: its variables have to lie whole.

        Raises:
          PlanError: they do not.
        """
        used = [v for v in program.variables if _is_used(program, v)]
        named = ((v, self._split.get(name_of(program.by_name[v.node]))) for v in used)
        found = {v.node: tiles for v, tiles in named if tiles is not None}
        config = self.context.config
        if not has_stages(program) and not config["auto_parallel"]:
            return found
        if found:
            raise PlanError(
                "a variable of a session is sharded, and a run with stages uses it",
                op=next(iter(found)),
                given="wh.stage",
                expected="variables that no run without stages has divided",
                action="build all steps of the session in stages, or none",
            )
        return None

    def refuse_alone(self, program: Program) -> None:
        """Raises ProgramError when a run of the first rank alone uses a variable that it does not have whole."""
        for variable in program.variables:
            name = name_of(program.by_name[variable.node])
            if self.is_apart(name) and _is_used(program, variable):
                raise ProgramError(
                    "what one rank runs alone uses a variable of which it has a part, or no value yet",
                    op=name,
                    given="a run that writes a checkpoint or fills a queue",
                    expected="variables that all ranks have whole",
                    action="read the variable in a run of its own",
                )

    def wanted(self, compiled: Compiled, uses: Mapping[str, Use]) -> dict[str, Layout]:
        """Names of the variables that a run reads or writes -> how it uses them, and their types."""
        program = compiled.program
        used = [v for v in program.variables if _is_used(program, v)]
        found = ((v, name_of(program.by_name[v.node]), v.node in compiled.plan.offloaded) for v in used)
        return {name: (uses[name], v.type, there or name in self.on_host) for v, name, there in found}

    def wait(self, waiting: Waiting, paths: Mapping[tf.Tensor, str]) -> None:
        """Takes note of what a run assigned. Collective between processes where it draws without seeds."""
        recorded = [what for _, what in waiting.found.values() if isinstance(what, Recorded)]
        seed = 0 if all(what.is_seeded for what in recorded) else self._seed()
        for i, (name, what) in enumerate(waiting.found.values()):
            if isinstance(what, Recorded):
                initial = what.run(self._runs, partial(_unseeded, seed, i))
            else:
                initial = what.initial(paths[what.prefix])
            self._held[name] = initial
        names = [name for name, _ in waiting.found.values()]
        dtypes = {name: numpy_dtype(self._held[name].dtype) for name in names}
        everywhere = range(len(self.context.ranks))
        self._assign((name, i, np.zeros((0,), dtypes[name])) for name in names for i in everywhere)  # initialised now
        self._make([name for name in names if name in self._split])

    def settle(self, wanted: Mapping[str, Layout]) -> list[str]:
        """Lets variables lie as a run has them. Returns the names of those that lie otherwise than before."""
        moved = []
        for name, (use, held, on_host) in wanted.items():
            if use.tiles is not None and name not in self._split:
                moved.append(name)
                self._split[name], self._types[name] = use.tiles, held
                self._order[name] = use.place or range(self.context.size)
                if name not in self._held:
                    self._cut(name, held)
            if on_host and name not in self.on_host:
                moved.append(name)
                self._to_host(name, tf.as_dtype(held.dtype))
        self._make([name for name in wanted if name in self._held])
        return moved

    def _seed(self) -> int:
        """Of random ops that have none; equal on all ranks."""
        self._seeds += 1
        mine = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        if not self.context.between_processes:
            return mine
        data = mine.to_bytes(8, "little") if self.context.rank == 0 else None
        timeout_s = self.context.config["check.timeout_s"]
        key = f"whale/session_seed/{self.context.elements}"
        self.context.elements += 1
        return int.from_bytes(self.context.comms[0].broadcast_bytes(key, data, 0, timeout_s), "little")

    def _make(self, names: Sequence[str]) -> None:
        """Gives the ranks' variables the values that they wait for."""
        self._assign(made for name in names for made in self._made(name))

    def _made(self, name: str) -> Iterator[tuple[str, int, np.ndarray]]:
        initial, divided = self._held.pop(name), name in self._split
        # What can only be computed whole is computed by one process after the other.
        whole = divided and not initial.is_divisible and self.context.between_processes
        for turn in range(self.context.size if whole else 1):
            for position, rank in enumerate(self.context.ranks):
                if not whole or turn == rank:
                    yield name, position, self._first_value(name, initial, rank)
            if whole:
                purpose = f"the first value of {name!r}, which can only be computed whole, by one rank after the other"
                self.context.comms[0].allgather_bytes("whale/first_values/turn", b"", TURN_TIMEOUT_S, purpose)

    def _assign(self, values: Iterable[tuple[str, int, np.ndarray]]) -> None:
        """Gives variables of this process's ranks their values, several in a run."""
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

    def _first_value(self, name: str, initial: Initial, rank: int) -> np.ndarray:
        """What a rank holds of an initial value; nothing else refers to its memory."""
        with tf_context.eager_mode():
            if name in self._split:
                part = initial.part(self._split[name], self.place(name, rank)).read_value()
            else:
                part = initial.whole()
        found: np.ndarray = part._numpy_internal()
        return found

    def _cut(self, name: str, held: TensorType) -> None:
        """Of a whole value every rank keeps its part."""
        dtype, shape = tf.as_dtype(held.dtype), held.shape
        for position, rank in enumerate(self.context.ranks):
            with self._graph.as_default():
                handle = self.handle(name, position, dtype)
                whole = tf.ensure_shape(gen_resource_variable_ops.read_variable_op(handle, dtype), shape)
                part = cut(whole, self._split[name], self.place(name, rank))
                assign = gen_resource_variable_ops.assign_variable_op(handle, part)
            self._inner.run(assign)

    def handle(self, name: str, position: int, dtype: tf.DType) -> tf.Tensor:
        """In the inner graph, of the variable of this process's rank number ``position``."""
        shared = rank_prefix(position) + name
        place = HOST_DEVICE if name in self.on_host else self._ranks_graph.device
        with self._graph.device(place):
            return gen_resource_variable_ops.var_handle_op(dtype=dtype, shape=tf.TensorShape(None), shared_name=shared)

    def _to_host(self, name: str, dtype: tf.DType) -> None:
        """Values of a variable move to the host's memory, and leave the device's."""
        positions = range(len(self.context.ranks))
        values = [self.read(name, position, dtype) for position in positions]
        with self._graph.as_default():
            handles = [self.handle(name, position, dtype) for position in positions]
            self._inner.run([gen_resource_variable_ops.destroy_resource_op(handle) for handle in handles])
        for position in positions:
            del self._reads[name, position]
            self._assigns.pop((name, position), None)
        self.on_host.add(name)
        self._assign((name, position, value) for position, value in enumerate(values))
