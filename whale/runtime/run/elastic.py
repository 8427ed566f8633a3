"""Ranks that are taken away: the others go on without them, each in its process, with the step that failed.

A step's updates wait for all of its exchanges (whale/lowering/updates/last.py), so each rank that is left has taken the
step whole or not at all; and who has taken it cannot be further ahead, since the next step needs the others. They
meet on a communicator of their own. Who has taken the step gives the others its results and the variables; where
nobody has, all take it again. Programs are compiled anew for as many ranks as are left.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.sharded import ShardedTensor
from whale.errors import ClusterError, CommError, ConfigError, PlanError
from whale.ir.layout import Split
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.log import log
from whale.passes.facts.batch import rows_of_ranks
from whale.runtime.ranks.balance import Balance, Watched
from whale.runtime.ranks.connect import as_configured
from whale.runtime.ranks.plain import pack, unpack
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context
from whale.runtime.variables.owner import VariableOwner
from whale.runtime.variables.stage_variables import Use

# From an exchange that fails to the word of `whale run` that a rank is gone; it takes longer only where nobody is.
_WORD_S = 3.0
_T = TypeVar("_T")


@dataclass
class _Said:
    """What a rank that is left says of itself: calls made and steps taken, and what it knows of by now."""

    calls: int
    steps: int
    variables: int
    programs: int
    elements: int
    host: str
    divisions: int
    shares: list[int]


class Elastic:
    """Has this rank go on when others are gone.

    Attributes:
      number: how many ranks are gone so far; equal on all that are left.
      divisions: how often rows were divided anew among the same ranks.
    """

    def __init__(self, context: Context) -> None:
        _refuse(context)
        self._context: weakref.ref[Context] = weakref.ref(context)
        self.number = self.divisions = 0
        self._balance = Balance() if context.config["elastic.rebalance"] else None
        self._watched: Watched | None = None  # the program of the latest step
        self._name = context.comm_name
        self._started = self._members = tuple(range(context.size))
        self._me = context.rank
        self._calls = 0  # those that exchanged something, a step or not
        self._steps = 0
        self._kept: list[tuple[Any, tf.Tensor]] = []  # handles and values from before the step that is being taken
        self._results: Any = None  # of the latest step
        self._pack: Callable[[Any], Any] = lambda results: results
        self._returned: Any = None  # by the latest call that was no step
        self._drawn: list[Any] = []  # batches of the call that goes on, for when it is made again
        self._drawn_again = 0
        self._datasets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = False

    def watched(self, plan: Plan, program: Program) -> Watched | None:
        """What counts the steps of a program of this rank under a plan; None: its rows are not divided, or stay so."""
        run = self._run
        if self._balance is None or not plan.batch_inputs or run.saved is not None or run.described is not None:
            return None
        placement = plan.batch_inputs[0].placement
        return Watched(placement.sizes, program) if isinstance(placement, Split) else None

    def step(
        self,
        run: Callable[[], Any],
        pack_results: Callable[[Any], Any],
        early: Sequence[Any],
        watched: Watched | None = None,
    ) -> Any:
        """Takes a step.

        Args:
          run: gives its flat results.
          early: (handle, dtype) of variables that it writes before its exchanges have come to their end.
          watched: counts it.
        """
        self._kept = [(handle, gen_resource_variable_ops.read_variable_op(handle, dtype)) for handle, dtype in early]
        self._pack = pack_results
        results = run() if watched is None else watched.take(run)
        self._kept, self._watched = [], watched
        self._results, self._steps = results, self._steps + 1
        return pack_results(results)

    def through(self, take: Callable[[Any, Any], _T], args: Any = (), kwargs: Any = None) -> _T:
        """``take(args, kwargs)``, which exchanges something, as often as it takes.

        Where another rank has made this call before somebody was gone, what it returned there. Of a call that takes no
        step, that is something that ``pack`` takes.

        Raises:
          CommError: it failed though nobody is gone, or what is gone cannot be had again.
        """
        if self._inside:
            return take(args, kwargs)
        self._inside, self._drawn, self._drawn_again = True, [], 0
        calls, steps = self._calls, self._steps
        try:
            while True:
                try:
                    result = take(args, kwargs)
                    break
                except CommError as error:
                    self._go_on(error)
                if self._steps > steps:  # by itself before a later exchange failed, or by another rank
                    result = self._pack(self._results)
                    break
                if self._calls > calls:
                    return self._returned  # type: ignore[no-any-return]
                args, kwargs = tf.nest.map_structure(self._again, (args, kwargs))
                self._drawn_again = 0
        finally:
            self._inside, self._drawn = False, []
        self._calls = calls + 1
        self._returned = result if self._steps == steps else None
        if self._steps > steps and self._balance is not None and self._watched is not None and self._run.comms:
            self._look(self._balance, self._watched)
        return result

    def _look(self, balance: Balance, watched: Watched) -> None:
        """After a step: divides rows anew where ranks are faster or slower than their shares."""
        context = self._run
        try:
            rows, why = balance.after(watched, context.comms[0])
        except CommError as error:
            self._go_on(error)
            return
        if not rows:
            return
        self.divisions += 1
        self._divide(list(rows))
        context.compiled_for.clear()
        for dataset in list(self._datasets):
            dataset.divide_again()
        if context.rank == 0:
            log.info(why)

    def _divide(self, shares: list[int]) -> None:
        context = self._run
        context.config = context.config.but({"replica.shares": shares})
        if context.auto is not None:
            context.auto = msgspec.structs.replace(context.auto, shares=())

    def drawn(self, draw: Callable[[], _T]) -> _T:
        """A batch that a step reads itself: the next one, or the same when the call is made again."""
        if self._drawn_again < len(self._drawn):
            self._drawn[self._drawn_again] = tf.nest.map_structure(
                self._again, self._drawn[self._drawn_again], expand_composites=True
            )
        else:
            self._drawn.append(draw())
        self._drawn_again += 1
        return self._drawn[self._drawn_again - 1]  # type: ignore[no-any-return]

    def share_again(self, dataset: Any) -> None:
        """Has a dataset of which each rank reads its rows be divided among those that are left (``divide_again``)."""
        self._datasets.add(dataset)

    def check(self, uses: dict[str, Use], names: dict[str, str]) -> None:
        """Raises PlanError for a variable of which some rank does not hold all."""
        size = self._run.size
        for node, use in uses.items():
            if use.tiles is not None or len(use.ranks) < size:
                raise PlanError(
                    "ranks can go on without another one only if each of them holds every variable whole",
                    variable=names.get(node, node),
                    given="elastic, and a plan under which it lies split, or on some ranks only",
                    expected="replicas: no stages, no split scopes, no zero.level, no offload",
                    action="leave elastic out, and use `whale run --max-restarts` with checkpoints",
                )

    # -- a rank is gone

    @property
    def _run(self) -> Context:
        context = self._context()
        assert context is not None  # it owns this
        return context

    def _go_on(self, error: CommError) -> None:
        watch = self._run.watch
        assert watch is not None
        while True:
            gone = watch.gone(self.number, _WORD_S)
            if len(gone) <= self.number:
                raise error
            self.number = len(gone)
            members = tuple(rank for rank in self._started if rank not in gone)
            try:
                self._meet(members)
                return
            except CommError as another:  # one more is gone, or soon will be known to be
                error = another

    def _meet(self, members: tuple[int, ...]) -> None:
        context, number = self._run, self.number
        for handle, value in self._kept:
            gen_resource_variable_ops.assign_variable_op(handle, value)
        self._kept = []
        me = members.index(self._me)
        if len(members) == 1:
            context.watch.look_after(None)  # type: ignore[union-attr]
            self._begin_anew(None, me, members, [self._mine()])
            return
        meeting = whale_ops.survivors(f"{self._name}/{number}", members, 2 * number - 1, share_memory=False)
        context.watch.look_after(meeting, members)  # type: ignore[union-attr]
        mine = pack(tuple(vars(self._mine()).values()))
        purpose = "going on with the ranks that are left"
        said = [_Said(*unpack(one)) for one in meeting.allgather_bytes("whale/elastic", mine, TURN_TIMEOUT_S, purpose)]
        self._catch_up(meeting, said, me)
        hosts = _hosts(context, members)
        share = context.config["communication.shared_memory"]
        comm = whale_ops.survivors(f"{self._name}.{number}", members, 2 * number, share_memory=share, hosts=hosts)
        context.watch.look_after(comm, members)  # type: ignore[union-attr]
        meeting.leave(0.0)
        as_configured(comm, context.config)
        if context.trace is not None:
            comm.trace_start(context.trace.descriptor)
        self._begin_anew(comm, me, members, said)

    def _mine(self) -> _Said:
        context = self._run
        known = len(context.variables.known)
        shares = list(context.config["replica.shares"])
        host = socket.gethostname()
        return _Said(self._calls, self._steps, known, context.programs, context.elements, host, self.divisions, shares)

    def _begin_anew(
        self, comm: whale_ops.Communicator | None, me: int, members: Sequence[int], said: Sequence[_Said]
    ) -> None:
        """The run is one of the ranks that are left; what was compiled for more is compiled again."""
        context = self._run
        here = [rank for rank, one in enumerate(said) if one.host == said[me].host]
        context.place = replace(
            context.place, rank=me, size=len(members), local_rank=here.index(me), local_size=len(here)
        )
        context.size, context.ranks = len(members), (me,)
        context.comms = () if comm is None else (comm,)
        context.comm_name = "" if comm is None else comm.name
        context.programs = max(one.programs for one in said)
        context.elements = max(one.elements for one in said)
        context.variables = VariableOwner()
        context.auto = context.saved = context.described = None
        last = max(said, key=lambda one: one.divisions)  # some may not have come to divide rows anew
        self.divisions, self._watched = last.divisions, None
        if last.shares:
            self._divide([share for rank, share in zip(self._members, last.shares) if rank in members])
        self._members = tuple(members)
        context.compiled_for.clear()
        if comm is None and context.outside is not None:  # nobody is left with whom this rank could differ
            context.outside.take_back()
            context.outside = None
        for dataset in list(self._datasets):
            dataset.divide_again()
        if me == 0:
            steps = max(one.steps for one in said)
            log.info(f"{len(members)} ranks go on after {steps} steps, none of which is lost")

    def _catch_up(self, meeting: whale_ops.Communicator, said: Sequence[_Said], me: int) -> None:
        """What the latest call of the rank that has made most returned, and the step that it took, for the others."""
        calls, steps = max(one.calls for one in said), max(one.steps for one in said)
        if min(one.calls for one in said) < calls - 1 or min(one.steps for one in said) < steps - 1:
            raise ClusterError(
                "the ranks that are left are at different steps",
                given=f"(calls made, steps taken) by each: {[(one.calls, one.steps) for one in said]}",
                expected="at most one between them, since every step exchanges something",
                action="start again from a checkpoint: `whale run --max-restarts`",
            )
        if any(one.calls < calls for one in said):
            first = next(rank for rank, one in enumerate(said) if one.calls == calls)
            returned = _sent(meeting, first, self._returned if me == first else None)
            if said[me].calls < calls and said[me].steps == steps:
                self._returned, self._calls = returned, calls
        if any(one.steps < steps for one in said):
            first = next(rank for rank, one in enumerate(said) if one.steps == steps)
            known = self._run.variables.known[: min(one.variables for one in said)]
            results = _sent(meeting, first, [t.numpy() for t in self._results or ()])
            for variable in known:
                value = _sent(meeting, first, variable.numpy())
                if said[me].steps < steps:
                    variable.assign(np.asarray(value))
            if said[me].steps < steps:
                self._results, self._steps = [tf.constant(value) for value in results], steps

    def _rows(self, rows: int) -> tuple[int, ...]:
        return rows_of_ranks(rows, self._run.size, self._run.config["replica.shares"])

    def _again(self, value: Any) -> Any:
        """The rows of a batch that are this rank's now."""
        if type(value) is not ShardedTensor:
            return value
        known = len(value.sizes) == self._run.size
        if known and (value.source is None or value.sizes == self._rows(sum(value.sizes))):
            return value
        if value.source is None:
            raise ClusterError(
                "rows of a batch that a rank read are gone with it",
                given="a wh.ShardedTensor that was made by the script",
                expected="batches of a wh.shard dataset, or whole ones, which are divided anew",
                action="take batches of wh.shard(dataset)",
            )
        iterator, position, leaf = value.source
        return iterator.read_again(position)[leaf]


def _sent(meeting: whale_ops.Communicator, first: int, value: Any) -> Any:
    """The value of rank ``first`` of a meeting, on every rank of it."""
    data = pack(value) if meeting.rank == first else None
    return unpack(meeting.broadcast_bytes("whale/elastic/sent", data, first, TURN_TIMEOUT_S))


def refuse_session(context: Context) -> None:
    """Raises ConfigError where a session is made in a run that is to go on when ranks are gone."""
    if context.elastic is not None:
        raise ConfigError(
            "sessions do not go on when ranks are gone",
            given="elastic, and a session of TensorFlow 1",
            expected="steps of wh.function or of Keras",
            action="leave elastic out, and use `whale run --max-restarts` with checkpoints",
        )


def _refuse(context: Context) -> None:
    config = context.config
    wrong = ""
    if context.place.launcher != "whale run" or not context.between_processes:
        wrong = f"{context.size} ranks started by {context.place.launcher}"
    elif config["batch.mode"] == "local":
        wrong = 'batch.mode "local": the rows that a rank brings are gone with it'
    elif config["mesh"] or config["split.ranks"]:
        wrong = "a mesh of so many ranks"
    elif config["communication.backend"] != "whale":
        wrong = f"communication.backend {config['communication.backend']!r}, whose ranks do not go on"
    if wrong:
        raise ConfigError(
            "this run cannot go on when ranks are gone",
            given=f"elastic, and {wrong}",
            expected="several processes of `whale run`, Whale's own exchanges, and batches of all ranks",
            action="change that, or leave elastic out and use `whale run --max-restarts`",
        )


def _hosts(context: Context, members: Sequence[int]) -> tuple[int, ...]:
    """How many of the members are on each emulated host."""
    of = [host for host, count in enumerate(context.config["communication.emulate_hosts"]) for _ in range(count)]
    left = [of[rank] for rank in members] if of else []
    return tuple(left.count(host) for host in dict.fromkeys(left))
