"""Lets a run continue after a loss of ranks: the other ranks repeat the failed step, each in its process.

A step's updates wait for all of its exchanges (whale/kernels/updates.py), so each remaining rank has taken the step
completely or not at all; and no rank can be further ahead, since the next step needs the others. The remaining ranks
meet on a new communicator. If all variables are replicated, a rank that has taken the step sends the others its results
and the variables. If ranks hold shards, lost shards come from the ranks that keep copies of them
(whale/runtime/elastic/generations.py); if these do not complete the latest step, all ranks repeat it. Programs are then
compiled again for the remaining ranks.

Decisions: 0091, 0115.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

import whale_ops
from whale.capture.captured import CapturedVariable
from whale.distributed.balance import Balance, BalanceHistory, WatchedSteps
from whale.distributed.device_exchange import OwnGpu, find_gpus
from whale.distributed.joining import Commits, CommonState, StepTimes, Welcome, is_worthwhile
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.distributed.stream_positions import DRAWN_APART, gather_streams
from whale.errors import CommError, ConfigError
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.partition.variable_use import VariableUse
from whale.runtime.context import Context, StepWatch
from whale.runtime.elastic.agreement import (
    ANEW,
    GROWN,
    MET,
    WHOLE,
    Agreements,
    LoneCommunicator,
    RankStatement,
    catch_up,
    gather_bytes,
    hear_returned,
)
from whale.runtime.elastic.call_replay import CallLog, cut_rows_again, wrap_in_scopes
from whale.runtime.elastic.generations import Generations
from whale.runtime.elastic.recovery import RecoveredState, become_whole, describe_going_on, describe_lost, recover
from whale.runtime.elastic.rendezvous import RankGroup
from whale.runtime.elastic.requirements import (
    find_host_name,
    has_divided_variables,
    make_done_before_error,
    make_nothing_to_join_error,
    refuse,
    refuse_plan,
    refuse_variables,
)
from whale.started import joins

# Seconds to wait, after an exchange fails, for `whale run` to say that a rank is gone; longer only if none is gone.
_WORD_S = 3.0
_T = TypeVar("_T")


class Elastic:
    """Lets this rank continue when other ranks are lost, and admits ranks that join; implements ``ElasticHooks``.

    ``wh.init`` creates it for an elastic run. Every call that communicates passes through ``retry``.

    Attributes:
      drawn: takes a function that reads the next batch from an iterator, and returns the batch that a step gets: in a
        repeated call the same batch again.
      share_again: registers a dataset, whose ``divide_again`` is called whenever the ranks or their shares change.
    """

    def __init__(self, context: Context) -> None:
        refuse(context, joins() > 0)
        context.variables.keeps_first = True
        self._context: weakref.ref[Context] = weakref.ref(context)
        self._balance = Balance() if context.config["fault.rebalance"] else None
        self._watched: WatchedSteps | None = None  # the program of the latest step
        self._group = RankGroup(lambda: self._run)
        self._commits, self._times = Commits(), StepTimes()
        self._calls = CallLog(lambda value: cut_rows_again(self._run, value))
        self._at = self._calls.at
        self.drawn: Callable[[Callable[[], Any]], Any] = self._calls.draw_batch
        self.share_again: Callable[[Any], None] = self._group.register_dataset
        self._kept: list[tuple[Any, tf.Tensor]] = []  # handles and values from before the step that is being taken
        self._pack: Callable[[Any], Any] = lambda results: results
        self._inside = False
        self._generations: Generations | None = None
        self._agreements = Agreements()
        self._is_catching_up = False

    @property
    def number(self) -> int:
        """Returns how many times the set of ranks has changed so far; equal on all remaining ranks."""
        return self._group.number

    @property
    def divisions(self) -> int:
        """Returns how many times rows were divided anew among the same ranks, or ranks were admitted."""
        return self._group.divisions

    def watch_steps(self, plan: Plan, program: Program) -> WatchedSteps | None:
        """Returns a counter of the steps of this rank's program, by which rows are rebalanced; None: the run does not
        rebalance (``fault.rebalance``).
        """
        run = self._run
        if self._balance is None:
            return None
        given = (run.planning.saved is not None or run.planning.described is not None) * "their plan is given"
        cut = run.planning.auto is not None and run.planning.auto.strategy.is_pipelined
        return self._balance.watch(plan, program, run, given or run.scoping.stages_seen * "each has its stage", cut)

    def take_step(
        self,
        run: Callable[[], Any],
        pack_results: Callable[[Any], Any],
        early: Sequence[Any],
        watched: WatchedSteps | None = None,
        assigned: Mapping[int, tf.Tensor] | None = None,
    ) -> Any:
        """Runs a step so that it can be repeated after a loss of ranks, and returns the packed results.

        Args:
          run: runs the step and returns its flat results.
          pack_results: packs flat results into the user's structure.
          early: (handle, dtype) of variables that the step writes before its exchanges are complete; their values are
            saved first.
          watched: counts and times the step; None: it is not watched.
          assigned: Python's ``id`` of a variable's handle -> whole value that the script has assigned to a sharded
            variable since the last step.
        """
        step, generations = self._at.steps + 1, self._generations if self._run.comms else None
        if generations is not None:
            generations.record_before(step, assigned or {})
        self._kept = [(handle, gen_resource_variable_ops.read_variable_op(handle, dtype)) for handle, dtype in early]
        self._pack = pack_results
        results = run() if watched is None else watched.take(run)
        self._kept, self._watched = [], watched
        self._at.results, self._at.steps = results, step
        if generations is not None:
            generations.record_after(step)
        return pack_results(results)

    def retry(self, take: Callable[[Any, Any], _T], args: Any = (), kwargs: Any = None) -> _T:
        """Calls ``take(args, kwargs)``, which communicates, and repeats it after each loss of ranks until it succeeds.

        If another rank completed this call before the loss, returns that rank's result. The result of a call that is
        not a step must be something that ``pack`` takes.

        Args:
          take: runs the call.
          args: its positional arguments; rows of batches in them are cut anew before the call is repeated.
          kwargs: its keyword arguments.

        Raises:
          CommError: the call failed though no rank is lost, or lost data cannot be recovered.
        """
        if self._inside:
            return take(args, kwargs)
        if not self._group.members:
            raise make_nothing_to_join_error()
        if self._is_catching_up:
            raise make_done_before_error()
        self._inside = True
        self._calls.begin()
        self._times.begin()
        calls, steps = self._at.calls, self._at.steps
        try:
            while True:
                try:
                    if self._take_in():
                        args, kwargs = self._calls.prepare_again(args, kwargs)
                    calls, steps = self._calls.redo()
                    result = take(args, kwargs)
                    break
                except CommError as error:
                    self._go_on(error)
                if self._calls.undone is None and self._at.steps > steps:  # by itself, or by another rank
                    result = self._pack(self._at.results)
                    break
                if self._at.calls > calls:
                    return self._at.returned  # type: ignore[no-any-return]
                args, kwargs = self._calls.prepare_again(args, kwargs)
            if self._generations is not None and self._at.steps > steps:
                self._calls.record_step(wrap_in_scopes(self._run.scoping.scopes, take), args, kwargs)
        finally:
            self._inside = False
        self._at.calls = calls + 1
        self._times.end(self._at.steps > steps)
        self._at.returned = result if self._at.steps == steps else None
        if self._at.steps > steps and self._balance is not None and self._watched is not None and self._run.comms:
            self._look(self._balance, self._watched)
        if self._at.steps > steps and self._run.comms and self._run.planning.forecast is not None:
            self._follow_forecast(self._run.planning.forecast)
        return result

    def _follow_forecast(self, forecast: StepWatch) -> None:
        """Compares steps with their prediction, and changes to another strategy if a better one was found."""
        self._calls.begin()  # as in `_look`
        context = self._run
        try:
            chosen = forecast.look()
            if chosen is not None and self._group.ranks.present == self._group.members:
                said = self._hear_statements(context.comms[0])
                self._make_variables_whole(context.comms[0], said, ANEW, chosen)
                self._group.divide_data()
        except CommError as error:
            self._go_on(error)

    def _look(self, balance: Balance, watched: WatchedSteps) -> None:
        """Divides rows anew after a step if ranks were faster or slower than their shares of rows suggest; or plans the
        stages of a pipeline anew, if that saves more time than it takes.
        """
        context = self._run
        self._calls.begin()  # the step is over: if it has to be repeated now, it counts as an earlier call's
        try:
            rows, why = balance.check_after_step(watched, context.comms[0])
            if why and not rows and self._group.ranks.present == self._group.members:
                said = self._hear_statements(context.comms[0])
                if watched.is_replanning_worthwhile(said[0].weighed):
                    self._make_variables_whole(context.comms[0], said, ANEW)
        except CommError as error:
            self._go_on(error)
            return
        if why:
            self._group.divide_work(rows, why)

    def check(self, uses: Mapping[str, VariableUse], variables: Sequence[CapturedVariable]) -> None:
        """Raises an error if elastic training cannot support a program whose variables are divided; called before it
        divides them.

        Collective for the first such program, in which ranks exchange their hosts.

        Raises:
          PlanError: a variable would be lost with its ranks, or could not be divided again.
          CommError: a rank is gone.
        """
        context = self._run
        if not has_divided_variables(uses, context.size) or not context.comms:
            return
        copies = context.config["fault.elastic"] == "memory"
        refuse_variables(variables)
        refuse_plan(uses, {c.node: c.name for c in variables}, context.size, copies)
        if self._generations is None:
            host = find_host_name(context.config.network.hosts, self._group.me)
            said = context.comms[0].allgather_bytes("whale/elastic/hosts", host.encode(), TURN_TIMEOUT_S)
            self._generations = Generations(context, context.variables, [one.decode() for one in said], copies)

    # -- a rank is gone

    @property
    def _run(self) -> Context:
        context = self._context()
        assert context is not None  # it owns this
        return context

    def _go_on(self, error: CommError) -> None:
        while True:
            if not self._group.hear(_WORD_S):
                raise error
            try:
                self._meet()
                return
            except CommError as another:  # one more is gone, or soon will be known to be
                error = another

    def _meet(self) -> None:
        """Meets all present ranks, including those not yet admitted, and agrees on the members and on the step to
        continue from.
        """
        context, group = self._run, self._group
        self._times.begin_change()
        for handle, value in self._kept:
            gen_resource_variable_ops.assign_variable_op(handle, value)
        self._kept = []
        there = group.ranks.present
        meeting = group.make_meeting(there, 0)
        self._agreements.catch_up(meeting)
        members = group.ranks.active
        if group.me not in members:
            return
        if members != there:
            meeting = group.make_meeting(members, 2)
        said = self._hear_statements(meeting)
        me, recovered = members.index(group.me), None
        if self._generations is not None and all(one.keeps for one in said):
            taken = [one.steps for one in said]
            recovered = recover(meeting, self._generations, max(taken), min(taken))
        if recovered is None or not recovered.back:
            hear_returned(meeting, said, me, self._at)
        if recovered is None:
            catch_up(meeting, said, me, self._at, context.variables.known)
        self._agreements.agree(group.number, MET, meeting, partial(self._become_ranks, members, said, recovered))
        group.connect(group.make_survivors(members))

    def _hear_statements(self, meeting: Any) -> list[RankStatement]:
        """Sends this rank's ``RankStatement`` to all ranks of a meeting, and returns the statements of all, in order;
        collective.
        """
        context = self._run
        keeps = self._generations is not None and bool(self._generations.begun)
        left = self._commits.steps_left if context.config["fault.join"] == "weighed" else None
        mine = RankStatement(
            self._at.calls,
            self._at.steps,
            len(context.variables.known),
            socket.gethostname(),
            keeps,
            self._times.weigh(left),
            self._read_common(self.divisions),
        )
        return [RankStatement.from_values(unpack(one)) for one in gather_bytes(meeting, pack(mine.to_values()))]

    def _read_common(self, divisions: int) -> CommonState:
        context = self._run
        history = BalanceHistory() if self._balance is None else self._balance.history
        return CommonState(context.programs, context.elements, divisions, list(context.config["batch.shares"]), history)

    def _take_over_balance(self, common: Sequence[CommonState]) -> None:
        if self._balance is not None:
            self._balance.take_over([one.balance for one in common])

    def _become_ranks(
        self,
        members: tuple[int, ...],
        said: Sequence[RankStatement],
        recovered: RecoveredState | None,
        divisions: int = 0,
        draws_on: bool = False,
    ) -> None:
        """Makes ``members`` the ranks of the run and all variables whole; programs are compiled again at their next
        call.

        Args:
          members: the ranks by the numbers that they had when their processes started, which never change.
          said: their statements, in the same order.
          recovered: values of sharded variables; None: every rank has all values.
          divisions: least value for the count of divisions, if this rank has counted more than the statements tell.
          draws_on: as in ``RankGroup.update_places``.
        """
        context, group, generations = self._run, self._group, self._generations
        if recovered is not None and generations is not None:
            self._calls.go_back(recovered.steps, generations.list_rewritten)
        become_whole(context.variables.list_holdings(context.size), recovered)
        group.update_places([one.host for one in said], members.index(group.me), draws_on)
        self._generations = None
        common = [one.common for one in said]
        context.programs = max(one.programs for one in common)
        context.elements = max(one.elements for one in common)
        last = max(common, key=lambda one: one.divisions)  # a loss may have kept some ranks from dividing rows anew
        group.divisions, self._watched = max(divisions, last.divisions), None
        self._take_over_balance(common)
        if last.shares:
            group.divide([share for rank, share in zip(group.members, last.shares) if rank in members])
        fewer = len(members) < len(group.members)
        group.members = members
        if context.rank == 0 and fewer:
            steps = max(one.steps for one in said)
            log.info(f"{describe_going_on(len(said))} after {steps} steps, {describe_lost(recovered)}")

    def _make_variables_whole(
        self, meeting: Any, said: Sequence[RankStatement], kind: int, chosen: ChosenStrategy | None = None
    ) -> None:
        """Makes every variable whole on all ranks, without a change of members, so that programs can be planned anew;
        collective.

        Args:
          meeting: temporary communicator of the ranks, through which they agree before they continue.
          said: their statements.
          kind: WHOLE before ranks join, ANEW to plan for the same ranks.
          chosen: the strategy that programs follow from now on; None: it is searched anew.
        """
        self._times.begin_change()
        group, generations, recovered = self._group, self._generations, None
        if generations is not None and generations.begun:
            recovered = recover(meeting, generations, self._at.steps, self._at.steps)
        divisions = group.divisions + (kind == ANEW)
        # The same ranks continue their random streams; with joining ranks, streams begin anew.
        planning, moves, slower = self._run.planning, self._run.planning.moves, self._run.planning.slower
        positions = gather_streams(meeting, list(self._run.streams)) if kind == ANEW else None
        if chosen is not None and positions is None:
            if self._run.rank == 0:
                log.warning(DRAWN_APART)
            return

        def act() -> None:
            self._become_ranks(group.members, said, recovered, divisions, draws_on=positions is not None)
            if positions is not None:
                whale_ops.set_streams(positions)
            if chosen is not None:
                planning.moves, planning.slower = moves, slower
                planning.go_over(chosen)

        self._agreements.agree(group.number, kind, meeting, act, divisions)

    # -- ranks have come

    @property
    def is_keeping_commits(self) -> bool:
        """Returns True if other processes may join later, so that the script's commits are kept for them."""
        return self._group.door is not None

    @property
    def is_catching_up(self) -> bool:
        """Returns True if this process has joined the run and its script has not reached the other ranks' commit.

        Until then, what ranks do together has been done by the others before, so this process must not take part in it.
        """
        return self._is_catching_up

    def commit(self, state: Callable[[], bytes], steps_left: int | None = None) -> None:
        """Marks a point of the script from which joining processes can continue, now or later.

        Args:
          state: returns the script's state as bytes.
          steps_left: number of steps that the script still takes; None: unknown.
        """
        self._is_catching_up = False
        self._commits.keep(self._at.calls, state, steps_left)

    def come_in(self) -> bytes | None:
        """Waits, in a process that joins, until the ranks have admitted it, and returns the script's committed state;
        None in other processes.

        Raises:
          CommError: a rank is lost while the ranks admit this one.
          SystemExit: the ranks have finished before they admitted this process.
        """
        if self._group.members:
            return None
        self._group.wait_until_asked_in()
        while not self._group.members:
            try:
                self._meet()
                if not self._group.members:
                    self._take_in_joining_ranks(None)
            except CommError:
                if self._group.is_over:
                    log.warning("the run has ended before it admitted this process, which has trained nothing")
                    self._run.outside = None  # it has trained nothing that could be compared
                    raise SystemExit(0) from None
                if not self._group.hear(_WORD_S):
                    raise
        self._is_catching_up = True
        return self._commits.held[self._at.calls]()

    def _take_in_joining_ranks(self, welcome: Welcome | None) -> None:
        comm, members, hosts, known = self._group.offer(welcome)
        act = partial(self._apply_growth, comm, members, hosts, known, find_gpus(comm, self._run.own_gpu))
        self._agreements.agree(self._group.number, GROWN, comm, act)

    def _apply_growth(
        self,
        comm: Any,
        members: tuple[int, ...],
        hosts: Sequence[str],
        known: Welcome,
        gpus: Sequence[OwnGpu | None],
    ) -> None:
        more = len(members) - len(self._group.members)
        self._group.grow(comm, members, hosts, known)
        self._run.gpus, self._run.own_gpu = tuple(gpus), gpus[self._run.rank]
        self._take_over_balance([known.common])
        self._at.calls, self._at.steps, self._watched = known.calls, known.steps, None
        self._commits.keep(known.calls, lambda: known.state)
        if self._run.rank == 0:
            joined = "1 rank joins" if more == 1 else f"{more} ranks join"
            log.info(f"{joined} after {known.steps} steps: {describe_going_on(len(members))}")

    def _take_in(self) -> bool:
        """Before a call, admits processes that wait to join, if the script has just committed its state and if more
        ranks save more time than the change takes; returns True if it admitted any.
        """
        context, group, state = self._run, self._group, self._commits.held.get(self._at.calls)
        if state is not None and not context.comms and group.hear(0.0):  # alone, no exchange fails when a rank joins
            self._meet()
        there = group.ranks.present
        if state is None or there in (group.members, self._times.declined):
            return False
        meeting = context.comms[0] if context.comms else LoneCommunicator()
        said = self._hear_statements(meeting)
        if not is_worthwhile(said[0].weighed, len(said), len(there), tell=context.rank == 0):
            self._times.declined = there
            return False
        self._make_variables_whole(meeting, said, WHOLE)
        common = self._read_common(group.divisions + 1)
        self._take_in_joining_ranks(Welcome(self._at.calls, self._at.steps, state(), common))
        return True


def refuse_session(context: Context) -> None:
    """Raises ConfigError if the run is elastic; called when a TensorFlow 1 session is created."""
    if context.elastic is not None:
        raise ConfigError(
            "sessions of TensorFlow 1 cannot continue after a loss of ranks",
            given=f"fault.elastic={context.config['fault.elastic']!r}, and a session of TensorFlow 1",
            expected="steps of wh.function or of Keras",
            action="leave elastic=True (fault.elastic) out, and use `whale run --max-restarts` with checkpoints",
        )
