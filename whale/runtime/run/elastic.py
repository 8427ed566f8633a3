"""Ranks that are taken away: the others go on without them, each in its process, with the step that failed.

A step's updates wait for all of its exchanges (whale/lowering/updates/last.py), so each rank that is left has taken the
step whole or not at all; and who has taken it cannot be further ahead, since the next step needs the others. They
meet on a communicator of their own. Where every variable is whole everywhere, who has taken the step gives the others
its results and the variables. Where ranks hold parts, the parts that are gone come from who keeps copies of them
(whale/runtime/elastic/generations.py), and if the step is not whole with these, all take it again, those that had
taken it too. Programs are compiled anew for as many ranks as are left.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.captured import CapturedVariable
from whale.capture.sharded import ShardedTensor
from whale.errors import ClusterError, CommError, ConfigError
from whale.ir.layout import Split
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.log import log
from whale.passes.facts.batch import rows_of_ranks
from whale.runtime.elastic.allowed import divides, fitting, host_of, hosts_left, refuse, refuse_plan, refuse_variable
from whale.runtime.elastic.balance import Balance, Watched
from whale.runtime.elastic.calls import Calls
from whale.runtime.elastic.generations import Generations
from whale.runtime.elastic.meeting import Said, catch_up, gathered, hear_returned
from whale.runtime.elastic.recovery import Alone, Recovered, become_whole, recover
from whale.runtime.ranks.connect import as_configured
from whale.runtime.ranks.plain import pack, unpack
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context
from whale.runtime.variables.given_tiles import given_tiles
from whale.runtime.variables.in_files import folder_of
from whale.runtime.variables.owner import VariableOwner
from whale.runtime.variables.stage_variables import Use

# From an exchange that fails to the word of `whale run` that a rank is gone; it takes longer only where nobody is.
_WORD_S = 3.0
_T = TypeVar("_T")


@dataclass
class _Agreed:
    """What the ranks that are left have agreed on, before any of them acts on it."""

    number: int
    members: tuple[int, ...]
    said: Sequence[Said]
    me: int
    recovered: Recovered | None


class Elastic:
    """Has this rank go on when others are gone.

    Attributes:
      number: how many ranks are gone so far; equal on all that are left.
      divisions: how often rows were divided anew among the same ranks.
    """

    def __init__(self, context: Context) -> None:
        refuse(context)
        context.variables.keeps_first = True
        self._context: weakref.ref[Context] = weakref.ref(context)
        self.number = self.divisions = 0
        self._balance = Balance() if context.config["elastic.rebalance"] else None
        self._watched: Watched | None = None  # the program of the latest step
        self._name = context.comm_name
        self._started = self._members = tuple(range(context.size))
        self._me = context.rank
        self._calls = Calls(lambda value: _rows_again(self._run, value))
        self._at = self._calls.at
        self._kept: list[tuple[Any, tf.Tensor]] = []  # handles and values from before the step that is being taken
        self._pack: Callable[[Any], Any] = lambda results: results
        self._datasets: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inside = False
        self._generations: Generations | None = None
        self._agreed: _Agreed | None = None
        self._done = 0  # number of the latest agreement that this rank has acted on

    def watched(self, plan: Plan, program: Program) -> Watched | None:
        """What counts the steps of a program of this rank under a plan; None: its rows are not divided, or stay so."""
        run = self._run
        fixed = run.saved is not None or run.described is not None or self._generations is not None
        if self._balance is None or not plan.batch_inputs or fixed:
            return None
        placement = plan.batch_inputs[0].placement
        return Watched(placement.sizes, program) if isinstance(placement, Split) else None

    def step(
        self,
        run: Callable[[], Any],
        pack_results: Callable[[Any], Any],
        early: Sequence[Any],
        watched: Watched | None = None,
        assigned: Mapping[int, tf.Tensor] | None = None,
    ) -> Any:
        """Takes a step.

        Args:
          run: gives its flat results.
          early: (handle, dtype) of variables that it writes before its exchanges have come to their end.
          watched: counts it.
          assigned: handle's number -> whole value that the script gave to a variable of which ranks hold parts.
        """
        step, generations = self._at.steps + 1, self._generations if self._run.comms else None
        if generations is not None:
            generations.before(step, assigned or {})
        self._kept = [(handle, gen_resource_variable_ops.read_variable_op(handle, dtype)) for handle, dtype in early]
        self._pack = pack_results
        results = run() if watched is None else watched.take(run)
        self._kept, self._watched = [], watched
        self._at.results, self._at.steps = results, step
        if generations is not None:
            generations.after(step)
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
        self._inside = True
        self._calls.begin()
        calls, steps = self._at.calls, self._at.steps
        try:
            while True:
                try:
                    self._calls.redo()
                    result = take(args, kwargs)
                    break
                except CommError as error:
                    self._go_on(error)
                if self._calls.undone is None and self._at.steps > steps:  # by itself, or by another rank
                    result = self._pack(self._at.results)
                    break
                if self._at.calls > calls:
                    return self._at.returned  # type: ignore[no-any-return]
                args, kwargs = self._calls.once_more(args, kwargs)
            if self._generations is not None and self._at.steps > steps:
                self._calls.took(_in_scopes(self._run, take), args, kwargs)
        finally:
            self._inside = False
        self._at.calls = calls + 1
        self._at.returned = result if self._at.steps == steps else None
        if self._at.steps > steps and self._balance is not None and self._watched is not None and self._run.comms:
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
        return self._calls.drawn(draw)

    def share_again(self, dataset: Any) -> None:
        """Has a dataset of which each rank reads its rows be divided among those that are left (``divide_again``)."""
        self._datasets.add(dataset)

    def check(self, uses: Mapping[str, Use], variables: Sequence[CapturedVariable]) -> None:
        """A program is about to divide variables so. Collective where it is the first that does.

        Raises:
          PlanError: one of them would be gone with its ranks, or could not be divided anew.
          CommError: a rank is gone.
        """
        context = self._run
        if not divides(uses, context.size) or not context.comms:
            return
        copies = context.config["elastic.redundancy"] == "memory"
        for c in variables:
            if given_tiles(c) is not None:
                refuse_variable(c.name, "a LayoutMap that says how it lies", "a layout that Whale can choose again")
            if folder_of(c.variable):
                refuse_variable(c.name, "a table in files, which go with their rank", "a table in memory")
        refuse_plan(uses, {c.node: c.name for c in variables}, context.size, copies)
        if self._generations is None:
            of = host_of(context.config["communication.emulate_hosts"])
            host = str(of[context.rank]) if of else socket.gethostname()
            said = context.comms[0].allgather_bytes("whale/elastic/hosts", host.encode(), TURN_TIMEOUT_S)
            self._generations = Generations(context, context.variables, [one.decode() for one in said], copies)

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
        meeting: Any = Alone()
        if len(members) > 1:
            meeting = whale_ops.survivors(f"{self._name}/{number}", members, 2 * number - 1, share_memory=False)
        context.watch.look_after(meeting if len(members) > 1 else None, members)  # type: ignore[union-attr]
        done = max(int(one) for one in gathered(meeting, str(self._done).encode()))
        if done > self._done:  # others have acted on what was agreed before one more was gone
            assert self._agreed is not None and self._agreed.number == done
            self._act(self._agreed)
        said = [Said(*unpack(one)) for one in gathered(meeting, pack(tuple(vars(self._mine()).values())))]
        recovered = None
        if self._generations is not None and all(one.keeps for one in said):
            taken = [one.steps for one in said]
            recovered = recover(meeting, self._generations, max(taken), min(taken))
        if recovered is None or not recovered.back:
            hear_returned(meeting, said, me, self._at)
        if recovered is None:
            catch_up(meeting, said, me, self._at, context.variables.known)
        self._agreed = _Agreed(number, members, said, me, recovered)
        gathered(meeting, b"")  # everybody has all that it needs
        self._act(self._agreed)
        comm = None
        if len(members) > 1:
            hosts = hosts_left(context.config["communication.emulate_hosts"], members)
            share = context.config["communication.shared_memory"]
            comm = whale_ops.survivors(f"{self._name}.{number}", members, 2 * number, share_memory=share, hosts=hosts)
            context.watch.look_after(comm, members)  # type: ignore[union-attr]
            meeting.leave(0.0)
            as_configured(comm, context.config)
            if context.trace is not None:
                comm.trace_start(context.trace.descriptor)
        self._connect(comm)

    def _mine(self) -> Said:
        context = self._run
        known = len(context.variables.known)
        shares = list(context.config["replica.shares"])
        host = socket.gethostname()
        keeps = self._generations is not None and bool(self._generations.begun)
        return Said(
            self._at.calls,
            self._at.steps,
            known,
            context.programs,
            context.elements,
            host,
            self.divisions,
            shares,
            keeps,
        )

    def _act(self, agreed: _Agreed) -> None:
        """The run is one of the ranks that are left; what was compiled for more is compiled again."""
        context, said, me, members = self._run, agreed.said, agreed.me, agreed.members
        recovered, generations = agreed.recovered, self._generations
        if recovered is not None and generations is not None:
            self._calls.go_back(recovered.steps, generations.rewritten)
        become_whole(context.variables.holdings(context.size), recovered)
        self._generations = None
        here = [rank for rank, one in enumerate(said) if one.host == said[me].host]
        context.place = replace(
            context.place, rank=me, size=len(members), local_rank=here.index(me), local_size=len(here)
        )
        context.size, context.ranks = len(members), (me,)
        context.programs = max(one.programs for one in said)
        context.elements = max(one.elements for one in said)
        context.variables = VariableOwner(keeps_first=True)
        context.auto = context.saved = context.described = None
        if changes := fitting(context.config, len(members)):
            context.config = context.config.but(changes)
        last = max(said, key=lambda one: one.divisions)  # some may not have come to divide rows anew
        self.divisions, self._watched = last.divisions, None
        if last.shares:
            self._divide([share for rank, share in zip(self._members, last.shares) if rank in members])
        self._members, self._done = members, agreed.number
        context.compiled_for.clear()
        if me == 0:
            steps = max(one.steps for one in said)
            what = (
                "the last of which they take again"
                if recovered is not None and recovered.back
                else "none of which is lost"
            )
            if recovered is not None and recovered.joined:
                what += f"; {recovered.joined} variables are put together from parts and copies of parts"
            log.info(f"{len(members)} ranks go on after {steps} steps, {what}")

    def _connect(self, comm: whale_ops.Communicator | None) -> None:
        context = self._run
        context.comms = () if comm is None else (comm,)
        context.comm_name = "" if comm is None else comm.name
        if comm is None and context.outside is not None:  # nobody is left with whom this rank could differ
            context.outside.take_back()
            context.outside = None
        for dataset in list(self._datasets):
            dataset.divide_again()


def _in_scopes(context: Context, take: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``take`` in the scopes that are entered now, wherever the script is when it is called."""
    entered = list(context.scopes)

    def inside(args: Any, kwargs: Any) -> Any:
        around, context.scopes[:] = list(context.scopes), entered
        try:
            return take(args, kwargs)
        finally:
            context.scopes[:] = around

    return inside


def _rows_again(context: Context, value: Any) -> Any:
    """The rows of a batch that are this rank's now."""
    if type(value) is not ShardedTensor:
        return value
    if len(value.sizes) == context.size:
        rows = sum(value.sizes)
        if value.source is None or value.sizes == rows_of_ranks(rows, context.size, context.config["replica.shares"]):
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


def refuse_session(context: Context) -> None:
    """Raises ConfigError where a session is made in a run that is to go on when ranks are gone."""
    if context.elastic is not None:
        raise ConfigError(
            "sessions do not go on when ranks are gone",
            given="elastic, and a session of TensorFlow 1",
            expected="steps of wh.function or of Keras",
            action="leave elastic out, and use `whale run --max-restarts` with checkpoints",
        )
