"""Keeps variables of pipeline stages up to date on the ranks of their stage only, and sends their values to other
readers.

The home of a variable is the set of ranks that have its present value. Every rank knows the home of every variable,
since it follows from the plans of the steps that ran. A program that reads the variable on other ranks, and a script
that reads it, first get the value; so reading is collective, as for sharded variables. Other ranks hold no value after
a step. If the ranks are in one process, the first one always holds the value, because its variable is the script's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.distributed.collective_call_check import read_surviving, read_together
from whale.distributed.faults import raise_comm_error
from whale.distributed.ranks import Ranks
from whale.partition.variable_use import VariableUse
from whale.runtime.variables.native_reads import make_handle_properties
from whale.runtime.variables.partial_initializers import DeferredInitial
from whale.runtime.variables.split_variable import NEED_WHOLE, hold_nothing


class VariableHome:
    """Tracks which ranks have a stage variable's present value (its home); the store of variables has one for each such
    variable.

    Args:
      name: of the variable.
      variable: the tf.Variable.
      copies: the variables of this process's other ranks.
      context: of the run.

    Attributes:
      ranks: the ranks that have the present value; None: all.
      held: whether the variable itself holds a value on this rank, present or stale.
      first: the initial value, as long as an elastic run may have to restore it.
    """

    def __init__(
        self,
        name: str,
        variable: Any,
        copies: Sequence[Any],
        context: Ranks,
        ranks: frozenset[int] | None = None,
        held: bool = True,
    ):
        self.name, self.variable, self.copies, self.context = name, variable, tuple(copies), context
        self.ranks, self.held = ranks, held
        self.first: DeferredInitial | None = None
        self._empty: set[int] = set()  # copies that hold nothing, by position
        kind: type = type(variable)
        self._kind = kind
        if context.has_other_processes:
            variable._whale_home = self
            variable.__class__ = _make_homed_class(kind)

    def leave(self) -> None:
        """Makes the variable an ordinary one again, which keeps its value on this rank."""
        self.variable.__class__ = self._kind
        del self.variable._whale_home

    def find_copy(self, position: int) -> Any:
        """Returns the variable of one of this process's ranks.

        Args:
          position: index of the rank among those of this process; 0 is the script's own variable.
        """
        return self.variable if position == 0 else self.copies[position - 1]

    def note_use(self, use: VariableUse) -> None:
        """Records, after a step that used the variable, which ranks have its present value now. If the ranks are in one
        process, copies a new value to the first rank's variable.
        """
        if not use.writes:
            return
        self.ranks = use.ranks if len(use.ranks) < self.context.size else None
        if self.context.has_other_processes:
            if self.held and self.ranks is not None and self.context.rank not in self.ranks:
                hold_nothing(self.variable._handle, self.variable.dtype)
                self.held = False
            return
        if self.ranks is not None and 0 not in use.ranks:
            self.variable.assign(self.find_copy(min(use.ranks)).read_value())
            self.ranks = use.ranks | {0}
        self.free()

    def free(self) -> None:
        """Frees the copies on ranks of this process that do not have the present value."""
        for position in range(1, len(self.copies) + 1) if self.ranks is not None else ():
            if position not in self.ranks and position not in self._empty:  # type: ignore[operator]
                copy = self.find_copy(position)
                hold_nothing(copy._handle, copy.dtype)
                self._empty.add(position)

    def give_copies(self, value: tf.Tensor) -> None:
        """Assigns ``value`` to every copy in this process that does not have the present value."""
        for position in set(range(self.context.size)) - (self.ranks or frozenset(range(self.context.size))):
            gen_resource_variable_ops.assign_variable_op(self.find_copy(position).handle, value)
        self._empty.clear()

    def count_held_copies(self) -> int:
        """Returns how many variables of this process, copies included, hold a value."""
        return int(self.held) + len(self.copies) - len(self._empty)

    def make_room(self) -> None:
        """Assigns zeros to the variable if it holds no value, so that TensorFlow accepts an assignment."""
        if not self.held:
            self.hold(tf.zeros(self.variable.shape, self.variable.dtype))

    def hold(self, value: tf.Tensor) -> None:
        """Assigns ``value`` to this rank's variable."""
        gen_resource_variable_ops.assign_variable_op(self.variable.handle, value)
        self.held = True

    def read_own_value(self) -> tf.Tensor:
        """Returns the value of this rank's variable; zeros if it holds none."""
        if not self.held:
            return tf.zeros(self.variable.shape, self.variable.dtype)
        return gen_resource_variable_ops.read_variable_op(self.variable.handle, self.variable.dtype)


def make_home(
    name: str, variable: Any, copies: Sequence[Any], use: VariableUse | None, context: Ranks
) -> VariableHome | None:
    """Creates the home of a variable that only some ranks of this process use, so that only these and the first rank
    hold it.

    Args:
      copies: the variables of this process's other ranks.
      use: how the program uses the variable; None: on all ranks.

    Returns:
      the home; None if all ranks use the variable, or this process has a single rank.
    """
    if not copies or use is None or not 0 < len(use.ranks) < context.size:
        return None
    home = VariableHome(name, variable, copies, context, use.ranks | {0})
    home.free()
    return home


def list_present_copies(copies: Sequence[Any], home: VariableHome | None) -> list[Any]:
    """Returns those copies, on other ranks of this process than the first, that have the present value."""
    ranks = home.ranks if home is not None else None
    return [copy for i, copy in enumerate(copies, 1) if ranks is None or i in ranks]


def refresh(homes: Sequence[VariableHome], context: Ranks) -> None:
    """Broadcasts the present values of these variables, so that every rank has them. Collective."""
    homes = [home for home in homes if home.ranks is not None]
    if not context.has_other_processes:
        for home in homes:
            assert home.ranks is not None
            home.give_copies(home.find_copy(min(home.ranks)).read_value())
            home.ranks = None
        return
    together: dict[tuple[int, str], list[VariableHome]] = {}
    for home in homes:
        assert home.ranks is not None
        together.setdefault((min(home.ranks), home.variable.dtype.name), []).append(home)
    ops = whale_ops.load_ops()
    comm = ops.whale_communicator(communicator=context.comm_name, rank=context.rank)
    try:
        for (root, dtype), group in together.items():
            values = ops.whale_broadcast(
                comm=comm,
                inputs=[home.read_own_value() for home in group],
                key=f"whale/present_values/{root}/{dtype}",
                root=root,
                shapes=[home.variable.shape for home in group],
                ranks=[],
            )
            for home, value in zip(group, values):
                if context.rank not in home.ranks:  # type: ignore[operator]
                    home.hold(value)
                home.ranks = None
    except tf.errors.OpError as error:
        raise_comm_error(error, context)
        raise


def refresh_for(homes: Mapping[int, VariableHome], uses: Sequence[tuple[int, VariableUse]], context: Ranks) -> None:
    """Broadcasts, before a step, the present values of those variables that the step reads on ranks without them.

    Args:
      homes: Python's ``id`` of a variable's handle -> home.
      uses: (``id`` of a handle, how the step uses the variable).
    """
    stale = []
    for key, use in uses:
        home = homes.get(key)
        if home is not None and home.ranks is not None and not use.ranks <= home.ranks:
            stale.append(home)
    if stale:
        refresh(stale, context)


def _read_by_script(home: VariableHome) -> None:
    """Fetches the present value of a variable before the script reads it. Collective: all ranks have to read it.

    Raises:
      CommError: not all ranks read it, or the run is over.
    """
    if home.ranks is None:
        return
    what = "a variable that another stage holds"
    read_together(home.context, home.name, what, one="which one stage holds", many="which stages hold")
    refresh([home], home.context)


@cache
def _make_homed_class(kind: type) -> type:
    """Returns a subclass of ``kind`` for variables of a stage, whose methods fetch the present value when called
    eagerly; graphs are built as usual.
    """

    def read(self: Any, no_copy: bool = False) -> Any:
        def read_now() -> Any:
            return kind._read_variable_op(self, no_copy)  # type: ignore[attr-defined]

        def read_with_others() -> Any:
            _read_by_script(home)
            return read_now()

        home = self._whale_home
        if not tf.executing_eagerly() or home.ranks is None:
            return read_now()
        return read_surviving(home.context, self, read_with_others)

    def bring_home(self: Any) -> None:
        home = self._whale_home
        if home.ranks is not None:
            read_surviving(home.context, self, lambda: _read_by_script(home))

    def wrap_assignment(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                self._whale_home.make_room()
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    def wrap_with_value(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if tf.executing_eagerly():
                _read_by_script(self._whale_home)
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    methods: dict[str, Any] = {name: wrap_with_value(name) for name in NEED_WHOLE if hasattr(kind, name)}
    methods.update((name, wrap_assignment(name)) for name in ("assign", "_restore_from_tensors"))
    methods.update(make_handle_properties(bring_home))
    return type(kind.__name__, (kind,), {**methods, "_read_variable_op": read})
