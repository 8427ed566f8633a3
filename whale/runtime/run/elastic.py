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
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.ops import gen_resource_variable_ops

from whale.capture.captured import CapturedVariable
from whale.errors import ClusterError, CommError, ConfigError
from whale.ir.layout import Split
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.log import log
from whale.runtime.elastic.allowed import divides, host_of, hosts_left, refuse, refuse_plan, refuse_variables
from whale.runtime.elastic.balance import Balance, Watched
from whale.runtime.elastic.calls import Calls
from whale.runtime.elastic.generations import Generations
from whale.runtime.elastic.group import Group
from whale.runtime.elastic.growth import Commits, Welcome
from whale.runtime.elastic.meeting import Said, catch_up, gathered, hear_returned
from whale.runtime.elastic.recovery import Alone, Recovered, become_whole, recover
from whale.runtime.elastic.rows import rows_again
from whale.runtime.ranks.plain import pack, unpack
from whale.runtime.ranks.ranks import TURN_TIMEOUT_S
from whale.runtime.run.context import Context
from whale.runtime.variables.owner import VariableOwner
from whale.runtime.variables.stage_variables import Use
from whale.started import joins

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
      drawn: of what gives a batch that a step reads itself: the next one, or the same when the call is made again.
      share_again: has a dataset be divided among the ranks that there are (``divide_again``).
    """

    def __init__(self, context: Context) -> None:
        refuse(context, joins() > 0)
        context.variables.keeps_first = True
        self._context: weakref.ref[Context] = weakref.ref(context)
        self._balance = Balance() if context.config["elastic.rebalance"] else None
        self._watched: Watched | None = None  # the program of the latest step
        self._group = Group(lambda: self._run)
        self._commits = Commits()
        self._calls = Calls(lambda value: rows_again(self._run, value))
        self._at = self._calls.at
        self.drawn: Callable[[Callable[[], Any]], Any] = self._calls.drawn
        self.share_again: Callable[[Any], None] = self._group.share_again
        self._kept: list[tuple[Any, tf.Tensor]] = []  # handles and values from before the step that is being taken
        self._pack: Callable[[Any], Any] = lambda results: results
        self._inside = False
        self._generations: Generations | None = None
        self._agreed: _Agreed | None = None
        self._done = 0  # number of the latest agreement that this rank has acted on

    @property
    def number(self) -> int:
        """How often ranks are gone or have come so far; equal on all that are left."""
        return self._group.number

    @property
    def divisions(self) -> int:
        """How often rows were divided anew among the same ranks, or ranks were taken in."""
        return self._group.divisions

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
        if not self._group.members:
            raise self._nothing_to_go_on_with()
        self._inside = True
        self._calls.begin()
        calls, steps = self._at.calls, self._at.steps
        try:
            while True:
                try:
                    if self._take_in():
                        args, kwargs = self._calls.once_more(args, kwargs)
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
        self._group.divisions += 1
        self._group.divide(list(rows))
        context.compiled_for.clear()
        self._group.divide_data()
        if context.rank == 0:
            log.info(why)

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
        refuse_variables(variables)
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
        while True:
            if not self._group.hear(_WORD_S):
                raise error
            try:
                self._meet(self._group.ranks.left)
                return
            except CommError as another:  # one more is gone, or soon will be known to be
                error = another

    def _meet(self, members: tuple[int, ...]) -> None:
        context, group = self._run, self._group
        for handle, value in self._kept:
            gen_resource_variable_ops.assign_variable_op(handle, value)
        self._kept = []
        me = members.index(group.me)
        meeting: Any = Alone()
        if len(members) > 1:
            meeting = group.communicator(members, 0, share_memory=False)
        else:
            group.alone()
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
        self._agreed = _Agreed(group.number, members, said, me, recovered)
        gathered(meeting, b"")  # everybody has all that it needs
        self._act(self._agreed)
        comm = None
        if len(members) > 1:
            hosts = hosts_left(context.config["communication.emulate_hosts"], members)
            share = context.config["communication.shared_memory"]
            comm = group.communicator(members, 1, share_memory=share, hosts=hosts)
        group.connect(comm)

    def _mine(self) -> Said:
        context = self._run
        known, shares = len(context.variables.known), list(context.config["replica.shares"])
        keeps = self._generations is not None and bool(self._generations.begun)
        counted = known, context.programs, context.elements
        return Said(self._at.calls, self._at.steps, *counted, socket.gethostname(), self.divisions, shares, keeps)

    def _act(self, agreed: _Agreed) -> None:
        """The run is one of the ranks that are left; what was compiled for more is compiled again."""
        context, group, said, me = self._run, self._group, agreed.said, agreed.me
        recovered, generations = agreed.recovered, self._generations
        if recovered is not None and generations is not None:
            self._calls.go_back(recovered.steps, generations.rewritten)
        become_whole(context.variables.holdings(context.size), recovered)
        group.place([one.host for one in said], me)
        self._generations = None
        context.programs = max(one.programs for one in said)
        context.elements = max(one.elements for one in said)
        last = max(said, key=lambda one: one.divisions)  # some may not have come to divide rows anew
        group.divisions, self._watched = last.divisions, None
        if last.shares:
            group.divide([share for rank, share in zip(group.members, last.shares) if rank in agreed.members])
        fewer = len(agreed.members) < len(group.members)
        group.members, self._done = agreed.members, agreed.number
        if me == 0 and fewer:
            steps = max(one.steps for one in said)
            back = recovered is not None and recovered.back
            what = "the last of which they take again" if back else "none of which is lost"
            if recovered is not None and recovered.joined:
                what += f"; {recovered.joined} variables are put together from parts and copies of parts"
            log.info(f"{len(said)} ranks go on after {steps} steps, {what}")

    # -- ranks have come

    @property
    def keeps_commits(self) -> bool:
        """Whether other processes may come to take up what the script commits."""
        return self._group.door is not None

    def commit(self, state: bytes) -> None:
        """The script has come to where another process can take it up with this."""
        self._commits.keep(self._at.calls, state)

    def come_in(self) -> bytes | None:
        """In a process that joins, waits for the others, and returns what the script has committed there; else None.

        Raises:
          CommError: one of them is gone while they take this one in.
          SystemExit: they have come to their end before they took it in.
        """
        if self._group.members:
            return None
        self._group.wait_until_asked_in()
        while True:
            try:
                return self._grow(None).state
            except CommError:
                if self._group.over:
                    log.warning("the others have come to their end, and this process has not joined them")
                    raise SystemExit(0) from None
                if not self._group.hear(_WORD_S):
                    raise

    def _grow(self, welcome: Welcome | None) -> Welcome:
        known = self._group.grow(welcome)
        self._at.calls, self._at.steps, self._watched = known.calls, known.steps, None
        self._commits.keep(known.calls, known.state)
        self._done = self._group.number
        return known

    def _nothing_to_go_on_with(self) -> ClusterError:
        return ClusterError(
            "a process that joins a run has to know where the others are",
            given="a step, or another call that exchanges something, before wh.State",
            expected="state = wh.State(...) before the training loop",
            action="keep in it what the loop has to know: its epoch, what it has counted",
        )

    def _take_in(self) -> bool:
        """Before a call: takes those in that have come, where the script has just committed; whether there were any."""
        context, group, state = self._run, self._group, self._commits.held.get(self._at.calls)
        if state is not None and not context.comms:
            group.hear(0.0)  # nothing fails here when somebody comes
        if state is None or group.ranks.there == group.members:
            return False
        recovered = None
        if self._generations is not None and self._generations.begun:
            meeting = context.comms[0] if context.comms else Alone()
            recovered = recover(meeting, self._generations, self._at.steps, self._at.steps)
        become_whole(context.variables.holdings(context.size), recovered)
        self._generations, context.variables = None, VariableOwner(keeps_first=True)
        at, shares, before = self._at, list(context.config["replica.shares"]), len(group.members)
        counted = context.programs, context.elements, group.divisions + 1
        self._grow(Welcome(at.calls, at.steps, *counted, shares, state))
        if context.rank == 0:
            log.info(f"{context.size - before} ranks join after {at.steps} steps: {context.size} ranks go on")
        return True


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


def refuse_session(context: Context) -> None:
    """Raises ConfigError where a session is made in a run that is to go on when ranks are gone."""
    if context.elastic is not None:
        raise ConfigError(
            "sessions do not go on when ranks are gone",
            given="elastic, and a session of TensorFlow 1",
            expected="steps of wh.function or of Keras",
            action="leave elastic out, and use `whale run --max-restarts` with checkpoints",
        )
