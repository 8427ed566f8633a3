"""Stores the variables that the programs of a run use: their layouts, initial values, copies for in-process ranks; and
checks replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.captured import CapturedVariable
from whale.capture.encode import HOST_DEVICE
from whale.distributed.faults import raise_comm_error
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S, Ranks
from whale.errors import REPORT_FAULT, CommError, PlanError
from whale.ir.layout import shard
from whale.ir.mesh import Tiles, make_one_axis_tiles
from whale.partition.variable_use import VariableUse
from whale.replicas import Said
from whale.runtime.variables.compared import describe_variables, refuse_differences
from whale.runtime.variables.deferred import find_deferred, forget, make_whole
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.runtime.variables.native_reads import watch_plain_functions
from whale.runtime.variables.ownership import Holding, HoldingsCache
from whale.runtime.variables.partial_initializers import DeferredInitial, RecordedOp
from whale.runtime.variables.split_variable import VariableParts, forget_parts, hold_nothing
from whale.runtime.variables.stage_variables import VariableHome, list_present_copies, make_home, refresh, refresh_for

# Variables whose first values one operation broadcasts: of one shape, and of any shapes.
_SENT_TOGETHER, _MOST_SENT = 64, 256
_TURN = "the first value of {!r}, which can only be computed whole, by one rank after the other"


class _Entry:
    """Represents a variable that programs of this run use; its layout is fixed by the first plan.

    Attributes:
      name, handle, variable: of the first rank in this process.
      copies: the variables of this process's other ranks.
      parts: the shards of a sharded variable, which hold its value; None: the variable holds its value itself.
      left: the first rank's value after the last step; if the value differs now, the script has assigned another. None:
        there are no copies.
      kind: "parameters", optimizer state or buffers; "": unknown.
    """

    __slots__ = ("copies", "handle", "kind", "left", "name", "parts", "variable")

    def __init__(self, captured: CapturedVariable, copies: Sequence[Any], parts: VariableParts | None = None):
        self.name, self.handle, self.variable = captured.name, captured.handle, captured.variable
        self.copies, self.parts = tuple(copies), parts
        self.left = self.read() if copies else None
        self.kind = ""

    @property
    def tiles(self) -> Tiles:
        return Tiles() if self.parts is None or self.parts.tiles.count == 1 else self.parts.tiles

    def read(self) -> tf.Tensor:
        """Returns the first rank's value; it shares the variable's memory until somebody writes to that."""
        return gen_resource_variable_ops.read_variable_op(self.handle, self.variable.dtype)


def _make_ordinary(entry: _Entry) -> None:
    """Puts the whole value of a sharded variable into its own memory, as before any program used it; collective between
    processes.
    """
    assert entry.parts is not None
    whole = entry.parts.gather_whole()
    entry.parts.leave()
    gen_resource_variable_ops.assign_variable_op(entry.handle, whole)


class VariableStore:
    """Holds the variables of a run, each identified by its handle, which the store keeps alive.

    Attributes:
      keeps_first: whether the initial values of parts are kept, as elastic runs need.
      moved: how many times variables got another layout than earlier compiled steps use.
    """

    def __init__(self, keeps_first: bool = False) -> None:
        self.keeps_first, self.moved = keeps_first, 0
        self._entries: dict[int, _Entry] = {}
        self._split: list[VariableParts] = []
        self._homes: dict[int, VariableHome] = {}
        self._held = HoldingsCache()
        self._put_back: Callable[[], None] | None = None

    def clear(self) -> None:
        """Forgets all variables, and frees their files."""
        self._entries.clear()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        forget_parts(self._split)
        self._homes.clear()

    def end(self, context: Ranks) -> None:
        """Ends the run's use of the variables, and frees their files.

        If all ranks are in one process, variables in its memory are ordinary ones again, with their values, so that the
        script may use the model without Whale, or in another run. Between processes a sharded variable stays so, since
        the other ranks may be gone: reading it, also in a plain tf.function, is an error from now on.
        """
        if not context.has_other_processes:
            for entry in self._entries.values():
                if entry.parts is not None and not entry.parts.folder:
                    _make_ordinary(entry)
        elif any(entry.parts is not None for entry in self._entries.values()):
            self._put_back = None  # plain functions go on to ask for sharded variables
        self.clear()

    def make_all_whole(self, context: Ranks) -> None:
        """Makes all variables ordinary ones again, with their values on every rank, as before any program used them.

        Collective between processes. Variables are gathered one after the other, so that a rank needs memory for all of
        them and at most one more.

        Raises:
          CommError: a rank is gone.
        """
        self.settle()
        try:
            for entry in self._entries.values():
                if entry.parts is not None:
                    _make_ordinary(entry)
        except tf.errors.OpError as error:
            raise_comm_error(error, context)
            raise
        refresh(list(self._homes.values()), context)
        for home in self._homes.values():
            home.leave()
        self.clear()
        self.moved += 1

    @property
    def whole_bytes(self) -> tuple[int, int]:
        """Returns the bytes of all known variables together, and of the largest one, as if each were whole."""
        sizes = [_count_bytes(entry.variable) for entry in self._entries.values()]
        return sum(sizes), max(sizes, default=0)

    @property
    def has_files(self) -> bool:
        """Returns True if parts of a variable are stored in files."""
        return any(parts.folder for parts in self._split)

    @property
    def known(self) -> list[tf.Variable]:
        """Returns the variables that programs have used, in an order that is equal on all ranks."""
        return [entry.variable for entry in self._entries.values()]

    def list_tiles(self, captured: Sequence[CapturedVariable], movable: Collection[str] = ()) -> dict[str, Tiles]:
        """Returns the name of a variable's handle node -> its tiles, for those variables whose layout an earlier
        program or the script has fixed.

        Args:
          movable: names of the handle nodes of variables that ``adopt`` may cut if they lie whole on all ranks; such
            layouts are not fixed.
        """
        given = {c.node: find_given_tiles(c) for c in captured}
        known = ((c.node, self._entries.get(id(c.handle))) for c in captured)
        fixed = {
            node: entry.tiles
            for node, entry in known
            if entry is not None and not (node in movable and self._lies_whole(entry))
        }
        return {node: tiles for node, tiles in given.items() if tiles is not None} | fixed

    def _lies_whole(self, entry: _Entry) -> bool:
        """Returns True if a variable is neither cut nor on the ranks of its stage only."""
        return entry.parts is None and id(entry.handle) not in self._homes

    def adopt(
        self,
        captured: Sequence[CapturedVariable],
        context: Ranks,
        uses: Mapping[str, VariableUse],
        on_host: Collection[str] = (),
    ) -> None:
        """Adds the variables that a program uses; new ones get the first rank's value on every rank. Collective.

        A deferred variable of a pipeline's stage is initialised on the ranks of that stage only.

        Args:
          captured: the program's variables.
          uses: name of a variable's handle node -> the ranks that use the variable, if not all do, and its tiles if it
            is sharded.
          on_host: names of the handle nodes of variables in the host's memory, beside an accelerator.

        Raises:
          CommError: the ranks cannot exchange the values.
          PlanError: a variable cannot have the layout of the plan.
        """
        self._move_to_host([c for c in captured if c.node in on_host])
        # A variable in the host's memory is handled as a sharded one, even if it has a single part.
        placed = {c.node: _make_one_part_tiles(c) for c in captured if c.node in on_host}
        placed |= {node: use.tiles for node, use in uses.items() if use.tiles is not None}
        for c in captured:
            _refuse_other_layout(self._entries.get(id(c.handle)), c, uses.get(c.node))
        self._release_whole([c for c in captured if c.node in placed])
        new = [c for c in captured if id(c.handle) not in self._entries]
        initials = agree_on_initials(new, context)
        if context.has_other_processes:
            for c, initial in zip(new, initials):
                ranks = uses[c.node].ranks if c.node in uses else frozenset()
                if initial is not None and 0 < len(ranks) < context.size and c.node not in placed:
                    self._give_home(c, initial, ranks, context)
            rest = [i for i, c in enumerate(new) if id(c.handle) not in self._entries]
            new, initials = [new[i] for i in rest], [initials[i] for i in rest]
        for c, initial in zip(new, initials):
            if initial is None or c.node not in placed:
                make_whole(c.variable)
        if context.has_other_processes and new:
            try:
                self._send(new, initials, context, placed, uses, on_host)
            except tf.errors.OpError as error:
                raise_comm_error(error, context)
                raise
        for c, initial in zip(new, initials):
            if c.node in placed:
                self._divide(c, placed[c.node], initial, context, uses.get(c.node), c.node in on_host)
                continue
            copies = [
                tf.Variable(
                    c.variable,
                    trainable=False,
                    dtype=c.variable.dtype,
                    name=f"rank{rank}",
                    shape=c.variable.shape,  # which may be open, so that values of other sizes can be assigned
                )
                for rank in context.ranks[1:]
            ]
            self._entries[id(c.handle)] = _Entry(c, copies)
            if home := make_home(c.name, c.variable, copies, uses.get(c.node), context):
                self._homes[id(c.handle)] = home

    def is_owner_of(self, variable: tf.Variable) -> bool:
        """Returns True if programs of this run use the variable, so that its value is equal on every rank, or
        sharded.
        """
        return id(variable._handle) in self._entries

    def _send(
        self,
        new: Sequence[CapturedVariable],
        initials: Sequence[DeferredInitial | None],
        context: Ranks,
        placed: Mapping[str, Tiles],
        uses: Mapping[str, VariableUse],
        on_host: Collection[str],
    ) -> None:
        """Broadcasts the first rank's values of new variables; those to be sharded are broadcast and cut one after the
        other, so that only one is whole at a time.
        """
        broadcast_values([c for c in new if c.node not in placed], context)
        for c, initial in zip(new, initials):
            if c.node in placed and initial is None:
                broadcast_values([c], context)
                self._divide(c, placed[c.node], None, context, uses.get(c.node), c.node in on_host)

    def _give_home(self, c: CapturedVariable, initial: DeferredInitial, ranks: frozenset[int], context: Ranks) -> None:
        """Initialises a deferred variable on the ranks of its stage, ``ranks``, and leaves it without a value
        elsewhere.
        """
        forget(c.variable)
        held = context.rank in ranks
        if held:
            gen_resource_variable_ops.assign_variable_op(c.handle, initial.compute_whole())
        else:
            hold_nothing(c.variable._handle, c.variable.dtype)
        self._entries[id(c.handle)] = _Entry(c, ())
        home = self._homes[id(c.handle)] = VariableHome(c.name, c.variable, (), context, ranks, held)
        home.first = initial if self.keeps_first else None

    def _move_to_host(self, captured: Sequence[CapturedVariable]) -> None:
        """Removes variables that are to move to the host's memory from the store, so that they are added again there.

        Raises:
          PlanError: a variable is sharded in the device's memory, or belongs to a stage.
        """
        for c in captured:
            entry = self._entries.get(id(c.handle))
            if entry is None or (entry.parts is not None and entry.parts.device is not None):
                continue
            if not self._lies_whole(entry):
                raise PlanError(
                    "a variable that an earlier step has put into the device's memory cannot move to the host's memory",
                    op=c.name,
                    given="a step under memory.offload that would keep it in the host's memory",
                    expected="the training step, which shows what is an optimizer's state, before others that use it",
                    action="run the training step first, or leave memory.offload out",
                )
            self._release(c)

    def _release_whole(self, captured: Sequence[CapturedVariable]) -> None:
        """Removes those variables that lie whole on all ranks, and are to be cut, from the store."""
        for c in captured:
            entry = self._entries.get(id(c.handle))
            if entry is not None and self._lies_whole(entry):
                self._release(c)

    def _release(self, c: CapturedVariable) -> None:
        """Removes a variable from the store, so that it is added again; steps that use it are then compiled again."""
        self.follow()
        self.moved += 1
        del self._entries[id(c.handle)]

    def _divide(
        self,
        c: CapturedVariable,
        tiles: Tiles,
        initial: DeferredInitial | None,
        context: Ranks,
        use: VariableUse | None,
        on_host: bool,
    ) -> None:
        """Makes a variable a sharded one: creates the shards of this process's ranks, unless they exist. Collective if
        its initial value can only be computed whole.

        Args:
          c: the variable, as captured.
          tiles: how it is cut into shards.
          initial: the initial value of a deferred variable; None: the variable has a value.
          use: how the program uses the variable; None: all ranks use it alike.
          on_host: whether the shards are in the host's memory, beside an accelerator.
        """
        if id(c.handle) in self._entries:
            return
        forget(c.variable)
        if self._put_back is None:
            self._put_back = watch_plain_functions()
        # A value that can only be computed whole is computed by one process after the other.
        in_turns = initial is not None and not initial.is_divisible and context.has_other_processes
        for turn in range(context.size if in_turns else 1):
            if not in_turns or turn == context.rank:
                device = HOST_DEVICE if on_host else None
                self._split.append(VariableParts(c, tiles, context, initial, use.place if use else (), device))
                if not self.keeps_first:
                    self._split[-1].first = None
            if in_turns:
                context.comms[0].allgather_bytes("whale/first_values/turn", b"", TURN_TIMEOUT_S, _TURN.format(c.name))
        self._entries[id(c.handle)] = _Entry(c, (), self._split[-1])

    def classify(self, captured: Sequence[CapturedVariable], kinds: Mapping[str, str]) -> None:
        """Records the kinds of a program's variables; a variable that is a parameter in one program stays a parameter.

        Args:
          kinds: name of a variable's handle node -> "parameters", optimizer state or buffers.
        """
        for c in captured:
            entry = self._entries[id(c.handle)]
            if c.node in kinds and entry.kind != "parameters":
                entry.kind = kinds[c.node]

    def count_held_bytes(self) -> dict[str, int]:
        """Returns kind -> bytes that the known variables take on the ranks of this process."""
        found: Counter[str] = Counter()
        for entry in self._entries.values():
            home = self._homes.get(id(entry.handle))
            whole = 1 + len(entry.copies) if home is None else home.count_held_copies()
            found[entry.kind or "buffers"] += entry.parts.bytes if entry.parts else whole * _count_bytes(entry.variable)
        return dict(found)

    def count_host_bytes(self) -> int:
        """Returns the bytes of known variables that are in the host's memory, beside an accelerator."""
        return sum(e.parts.bytes for e in self._entries.values() if e.parts is not None and e.parts.device is not None)

    def prepare_uses(
        self, captured: Sequence[CapturedVariable], uses: Mapping[str, VariableUse], context: Ranks
    ) -> list[tuple[int, VariableUse]]:
        """Returns how a program uses its variables, for ``prepare_step`` and ``note_step``; creates homes for variables
        that only some ranks write.

        Args:
          uses: name of a variable's handle node -> use, where not all ranks use the variable alike.

        Returns:
          (``id`` of the handle, use) of each variable.
        """
        found = []
        for c in captured:
            use = uses.get(c.node, VariableUse(frozenset(range(context.size)), True))
            key, entry = id(c.handle), self._entries[id(c.handle)]
            found.append((key, use))
            if use.writes and len(use.ranks) < context.size and key not in self._homes and entry.parts is None:
                self._homes[key] = VariableHome(entry.name, entry.variable, entry.copies, context)
        return found

    def prepare_step(self, uses: Sequence[tuple[int, VariableUse]], context: Ranks) -> None:
        """Sends present values to those ranks on which a step reads variables of other ranks' stages. Collective if
        there are any.

        Args:
          uses: as ``prepare_uses`` has returned them for the step's program.
        """
        if self._homes:
            refresh_for(self._homes, uses, context)

    def note_step(self, uses: Sequence[tuple[int, VariableUse]]) -> None:
        """Records, after a step, which ranks have the present values of its variables."""
        if self._homes:
            for key, use in uses:
                if key in self._homes:
                    self._homes[key].note_use(use)

    def settle(self) -> dict[int, tf.Tensor]:
        """Cuts whole values that the script has assigned to sharded variables since the last step into shards; called
        before a step.

        Returns:
          Python's ``id`` of a variable's handle -> the whole value.
        """
        return {parts.key: whole for parts in self._split if (whole := parts.settle()) is not None}

    def list_holdings(self, size: int) -> list[Holding]:
        """Returns which of ``size`` ranks holds which piece of each known variable, in an order that is equal on all
        ranks; see ``HoldingsCache``.
        """
        return self._held.list_holdings(self._entries, self._homes, size)

    def find_holders(self, variable: tf.Variable, context: Ranks) -> tuple[int, ...]:
        """Returns the ranks that have the present value of a known variable, sorted."""
        return tuple(sorted(self._find_entry_holders(self._entries[id(variable._handle)], context)))

    def read_own_value(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the value that this rank's variable holds, present or stale; not collective."""
        return self._entries[id(variable._handle)].read()

    def bring_home(self, variables: Sequence[tf.Variable], context: Ranks) -> None:
        """Broadcasts the present values of stage variables to every rank, where they stay until the next step.
        Collective.
        """
        homes = dict.fromkeys(self._homes.get(id(v._handle)) for v in variables)
        refresh([home for home in homes if home is not None], context)

    def follow(self) -> None:
        """Copies values that the script has assigned since the last step from its variables, which are the first
        rank's, to the variables of other ranks in the same process.

        With several processes there are no copies, because every rank runs the script.
        """
        for entry in self._entries.values():
            if not entry.copies:
                continue
            now = entry.read()
            if not _is_untouched(now, entry.left):
                for copy in list_present_copies(entry.copies, self._homes.get(id(entry.handle))):
                    copy.assign(now)
                entry.left = now

    def leave(self) -> None:
        """Records the values that a step has left in the first rank's variables, so that ``follow`` sees which of them
        the script assigns later.
        """
        for entry in self._entries.values():
            if entry.copies:
                entry.left = entry.read()

    def list_handles(
        self, captured: Sequence[CapturedVariable], nodes: Sequence[str], position: int, rank: int
    ) -> list[Any]:
        """Returns the handles that the program of ``rank`` takes for the variables ``nodes``, in order.

        Args:
          captured: the program's variables.
          nodes: their handle nodes.
          position: number of the rank among those of this process.
        """
        by_node = {c.node: c for c in captured}
        entries = [self._entries[id(by_node[n].handle)] for n in nodes]
        return [
            e.parts.find_rank_part(rank).handle
            if e.parts
            else e.handle
            if position == 0
            else e.copies[position - 1].handle
            for e in entries
        ]

    def check(self, context: Ranks, outside: ExternalUpdates | None, what: str = "wh.check_replicas()") -> int:
        """Compares all copies of replicated variables, including those trained outside of programs. Collective between
        processes.

        Args:
          outside: tracks the variables that no program uses; None: there are no other processes.
          what: the call that asks for it, for messages.

        Returns:
          how many variables were compared.

        Raises:
          CommError: a rank's copy differs from the first rank's.
        """
        self.follow()
        for entry in (whole := [e for e in self._entries.values() if e.parts is None]):
            mine = entry.read().numpy()
            for rank, copy in zip(context.ranks[1:], entry.copies):
                if rank in self._find_entry_holders(entry, context):
                    _compare(entry.name, rank, mine, copy.numpy())
        if context.has_other_processes:
            return refuse_differences(self.describe_held(context, outside), context, what)
        return len(whole)

    def describe_held(
        self,
        context: Ranks,
        outside: ExternalUpdates | None,
        only: Collection[int] | None = None,
        trainable: bool = False,
    ) -> Said:
        """Describes this rank's replicated variables, to be compared with those of other ranks.

        Args:
          outside: tracks the variables that no program uses; None: these are left out.
          only: Python's ``id`` of the handle of each variable to describe; None: all.
          trainable: whether to describe trainable variables only; a rank may reset a metric that it alone shows.
        """
        found: list[tuple[str, tf.Tensor | None, bool]] = []
        for key, e in self._entries.items():
            if e.parts is None and (only is None or key in only) and (e.variable.trainable or not trainable):
                found.append((e.name, e.read() if context.rank in self._find_entry_holders(e, context) else None, True))
        return describe_variables(
            [*found, *(outside.iterate_held(self._entries.keys(), only) if outside is not None else ())],
            context.rounds_otherwise,
        )

    def list_written(self, outside: ExternalUpdates) -> dict[int, str]:
        """Returns Python's ``id`` of a variable's handle -> name, for replicated variables that were written to since
        the last step.
        """
        known = {key: self._entries[key] for key in outside.written if key in self._entries and key not in self._homes}
        return {key: entry.name for key, entry in known.items() if entry.parts is None}

    def _find_entry_holders(self, entry: _Entry, context: Ranks) -> frozenset[int]:
        """Returns the ranks that have the present value of a variable."""
        home = self._homes.get(id(entry.handle))
        return frozenset(range(context.size)) if home is None or home.ranks is None else home.ranks


def _refuse_other_layout(entry: _Entry | None, c: CapturedVariable, use: VariableUse | None) -> None:
    """Raises PlanError if a variable that is sharded over the ranks of a stage is used by other ranks."""
    if entry is not None and entry.parts is not None and entry.parts.group:
        if use is None or use.place != entry.parts.group:
            raise PlanError(
                "a variable that is sharded over the ranks of a stage is used outside of it",
                op=c.name,
                given="memory.zero, which shards it over its stage, and a program that uses it on other ranks",
                expected="steps with the same stages, or programs that do not use the variable",
                action="set memory.zero=0, or use the variable under the same wh.stage in every step",
            )


def _make_one_part_tiles(c: CapturedVariable) -> Tiles:
    """Returns tiles with a single part, which all ranks have."""
    return make_one_axis_tiles(shard(0, (int(c.variable.shape[0]),)))


def _count_bytes(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def _is_untouched(now: tf.Tensor, left: tf.Tensor) -> bool:
    """Returns True if a variable still holds the value that a step left: in the same memory, or for scalars and strings
    an equal value.
    """
    if not now.shape.rank or now.dtype == tf.string:
        return bool(np.array_equal(now.numpy(), left.numpy()))
    # While ``left`` is alive, no other value can have its address.
    addresses = [t._numpy_internal().__array_interface__["data"][0] for t in (now, left)]
    return addresses[0] == addresses[1]


def _compare(name: str, rank: int, first: np.ndarray, other: np.ndarray) -> None:
    if np.array_equal(first, other, equal_nan=first.dtype.kind == "f"):
        return
    gap = np.max(np.abs(first.astype(np.float64) - other.astype(np.float64)))
    raise CommError(
        "a variable differs between ranks",
        variable=name,
        given=f"an element on rank {rank} differs by {gap:.3g} from rank 0's",
        expected="equal copies on all ranks of this process",
        action=REPORT_FAULT,
    )


def agree_on_initials(new: Sequence[CapturedVariable], context: Ranks) -> list[DeferredInitial | None]:
    """Returns the first rank's initial values of new variables that are deferred there; None for those that have a
    value. Collective between processes.

    Raises:
      CommError: a variable is restored from a checkpoint on the first rank only.
    """
    mine = [find_deferred(c.variable) for c in new]
    if not context.has_other_processes or not new:
        return mine
    comm, timeout_s = context.comms[0], context.config["debug.check_timeout_s"]
    data = None
    if context.rank == 0:
        data = pack(["reader" if i is not None and i.reader is not None else _encode_initial(i) for i in mine])
    said = unpack(comm.broadcast_bytes("whale/first_values/initial", data, 0, timeout_s))
    firsts = [one if one == "reader" else _decode_initial(one) for one in said]
    for i, (c, first, own) in enumerate(zip(new, firsts, mine)):
        if first == "reader":
            firsts[i] = own  # its reader knows the file
            if own is None or own.reader is None:
                raise CommError(
                    "a variable is initialised from a checkpoint on some ranks only",
                    variable=c.name,
                    given=f"rank 0 restored it, rank {context.rank} did not",
                    expected="a variable that is restored on every rank, or on none",
                    action="call restore at the same place on every rank",
                )
    return firsts


def _encode_initial(initial: DeferredInitial | None) -> tuple[Any, ...] | None:
    if initial is None:
        return None
    ops = [(op.kind, op.attrs, op.operands, op.first, op.shapes, op.dtypes) for op in initial.ops]
    return initial.shape, initial.dtype, initial.little, ops, initial.result


def _decode_initial(said: Any) -> DeferredInitial | None:
    if said is None:
        return None
    shape, dtype, little, ops, result = said
    return DeferredInitial(shape, dtype, little, tuple(RecordedOp(*op) for op in ops), result)


def broadcast_values(captured: Sequence[CapturedVariable], context: Ranks) -> None:
    """Broadcasts the first rank's values into the variables, many of one dtype by one operation."""
    ops = whale_ops.load_ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    by_dtype: dict[str, list[Any]] = {}
    for c in captured:
        by_dtype.setdefault(c.variable.dtype.name, []).append(c.variable)
    for dtype, variables in by_dtype.items():
        if dtype == "string":  # strings have no fixed size, so Whale's broadcast of tensors cannot send them
            _broadcast_texts(variables, context)
            continue
        for sent in _divide_for_broadcasts(variables):
            values = ops.whale_broadcast(
                comm=comm,
                inputs=[gen_resource_variable_ops.read_variable_op(v.handle, v.dtype) for v in sent],
                key=f"whale/first_values/{dtype}",
                root=0,
                shapes=[v.shape for v in sent],
                ranks=[],
            )
            for variable, value in zip(sent, values) if context.rank else ():
                gen_resource_variable_ops.assign_variable_op(variable.handle, value)


def _divide_for_broadcasts(variables: Iterable[Any]) -> list[list[Any]]:
    """Divides variables of one dtype into those that one operation broadcasts each.

    TensorFlow creates a kernel for each operation with other attributes, in a tenth of a millisecond for each input,
    and more for thousands of inputs. So the broadcasts of many variables of one shape have equal attributes.
    """
    by_shape: dict[str, list[Any]] = {}
    for variable in variables:
        by_shape.setdefault(str(variable.shape), []).append(variable)
    found: list[list[Any]] = []
    others: list[Any] = []
    for alike in by_shape.values():
        whole = len(alike) - len(alike) % _SENT_TOGETHER
        found += [alike[i : i + _SENT_TOGETHER] for i in range(0, whole, _SENT_TOGETHER)]
        others += alike[whole:]
    return found + [others[i : i + _MOST_SENT] for i in range(0, len(others), _MOST_SENT)]


def _broadcast_texts(variables: Sequence[tf.Variable], context: Ranks) -> None:
    """Broadcasts the first rank's values into variables of strings."""
    said = None if context.rank else pack([v.numpy() for v in variables])
    first = context.comms[0].broadcast_bytes("whale/first_values/string", said, 0, TURN_TIMEOUT_S)
    for variable, value in zip(variables, unpack(first)) if context.rank else ():
        gen_resource_variable_ops.assign_variable_op(variable.handle, tf.constant(value, tf.string))


def find_given_tiles(captured: CapturedVariable) -> Tiles | None:
    """Returns the tiles that the script sets for a variable (``LayoutMap``); None: it sets none."""
    return getattr(captured.variable, "_whale_tiles", None)


def refuse_other_tiles(
    captured: Iterable[CapturedVariable], known: Mapping[str, Tiles], planned: Mapping[str, Tiles]
) -> None:
    """Raises an error if the plan gives a variable another layout than the script sets.

    Args:
      known: name of a variable's handle node -> layout that planning started from. A variable that a program used
        before the script set its layout has an earlier one here, and keeps it.
      planned: name of a variable's handle node -> layout in the plan, of sharded variables.

    Raises:
      PlanError: names the first such variable.
    """
    for c in captured:
        given = find_given_tiles(c)
        if given is None or not given.cuts or known.get(c.node) != given:
            continue
        found = planned.get(c.node, Tiles())
        if found.cuts != given.cuts:
            where = str(found) if found.cuts else "whole, or on one stage only"
            raise PlanError(
                "a variable cannot have the layout that the script sets",
                op=c.name,
                given=f"{given} by a LayoutMap; in the plan it is {where}",
                expected="a program in which all ranks of the mesh's axes have a part of it: without wh.stage",
                action="leave the variable out of the LayoutMap, or leave stages out",
            )
