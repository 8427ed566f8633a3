"""Connects the ranks of an elastic run anew: tracks who the ranks are, creates their communicators, and updates the
run's context.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

import whale_ops
from whale.config import Config
from whale.distributed.connect import SocketBootstrap, configure_communicator
from whale.distributed.joining import CommonState, Members, Welcome, extend_shares
from whale.distributed.listener import RankListener
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.distributed.trace import Trace
from whale.distributed.watch import LauncherWatch
from whale.ir.topology import Topology, make_topology
from whale.log import log
from whale.planner.graph_search.environment import Slowdown
from whale.runtime.elastic.agreement import LoneCommunicator, gather_bytes, send_value
from whale.runtime.elastic.requirements import count_hosts_left, find_fitting_changes
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.runtime.variables.variable_store import VariableStore
from whale.started import APART_VARIABLE, GROWS_VARIABLE, PEERS_VARIABLE, ProcessPlace, joins


class ElasticRun(Protocol):
    """Declares the parts of a run's context that change when its ranks change."""

    config: Config
    place: ProcessPlace
    size: int
    ranks: tuple[int, ...]
    comms: Sequence[Any]
    comm_name: str
    watch: LauncherWatch | None
    trace: Trace | None
    variables: VariableStore
    programs: int
    elements: int
    planning: Any
    scoping: Any
    reports: Any
    hooks: Any
    apart: SocketBootstrap | None
    outside: ExternalUpdates | None
    topology: Topology | None


class RankGroup:
    """Tracks the ranks of an elastic run, and connects them anew after losses and joins; ``Elastic`` has one.

    Args:
      run: returns the run's context.

    Attributes:
      number: count of losses and joins that this rank has heard of.
      divisions: how many times rows were divided anew, or ranks admitted.
      me: this rank's number at its start, which never changes.
      members: the ranks of the run, by the numbers that they had at their start; (): this process has not been admitted
        yet.
      ranks: which processes are present, which are admitted, and which are both (``active``).
      door: the socket listener through which joining processes connect; None: no process may join through this rank.
    """

    def __init__(self, run: Callable[[], ElasticRun]) -> None:
        self._of, context, began_with = run, run(), joins()
        self.number = self.divisions = 0
        self._name = context.comm_name
        self.me = context.place.rank
        started = began_with or context.size
        apart = context.apart
        self.ranks = Members(started, set(range(started)), addresses={} if apart is None else apart.addresses)
        self.members = () if began_with else self.ranks.active
        self._made = [(comm, self.members) for comm in context.comms]
        self._datasets: weakref.WeakSet[Any] = weakref.WeakSet()
        self.door = None if apart is None else apart.door
        if self.door is not None and APART_VARIABLE not in os.environ:  # else later runs of the process use it too
            context.hooks.at_end.append(self.door.close)
        if self.door is None and GROWS_VARIABLE in os.environ:
            self.door = RankListener(os.environ[PEERS_VARIABLE], context.config["fault.freeze_s"])
            self._watch.tell({"address": self.door.address})
            context.hooks.at_end.append(self.door.close)

    @property
    def _watch(self) -> LauncherWatch:
        watch = self._of().watch
        assert watch is not None  # every rank of `whale run` has one, if several take part
        return watch

    def hear(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` seconds for news of lost or joined ranks from the launcher, and returns True if
        there is any.
        """
        changes = self._watch.list_changes(self.number, timeout_s)
        if len(changes) <= self.number:
            return False
        self.number, self.ranks.changes = len(changes), changes
        return True

    @property
    def is_over(self) -> bool:
        """Returns True if a rank has finished, so that the run is over."""
        return self._watch.is_over

    def wait_until_asked_in(self) -> None:
        """Announces to the launcher that this joining process is ready, and waits until the launcher has told all ranks
        of it.
        """
        self._watch.tell({"ready": True})
        while self.me not in self.ranks.present:
            self.hear(TURN_TIMEOUT_S)

    def make_communicator(self, members: Sequence[int], kind: int, **shared: Any) -> whale_ops.Communicator:
        """Creates a communicator of ``members``, and watches it for lost ranks.

        Args:
          members: the ranks to connect, by the numbers that they had at their start.
          kind: 0 to 3, which tells apart communicators that are made after the same loss or join (``Members.connect``).
          shared: options for ``Members.connect``, such as ``share_memory``.
        """
        comm = self.ranks.connect(self._name, self.me, members, kind, self.door, self._watch, **shared)
        self._made.append((comm, tuple(members)))
        self._watch.look_after(comm, members, self.number)
        return comm

    def _leave(self, comm: whale_ops.Communicator, ranks: Sequence[int]) -> bool:
        """Leaves a communicator that is not used any more.

        Args:
          ranks: those that it connects, by the numbers that they had at their start.

        Returns:
          True if all its other ranks have left it or are gone, so that it can be dropped; else it must be left again
          later.
        """
        for i, rank in enumerate(ranks):
            if rank not in self.ranks.present:
                comm.lose(i, "is gone")
        return comm.leave(0.0)

    def register_dataset(self, dataset: Any) -> None:
        """Registers a dataset to be divided (``divide_again``) whenever the ranks or their shares change."""
        self._datasets.add(dataset)

    def divide(self, shares: list[int]) -> None:
        """Sets the ranks' shares of each batch (``batch.shares``) from now on."""
        context = self._of()
        context.config = context.config.but({"batch.shares": shares})
        if context.planning.auto is not None:
            even = msgspec.structs.replace(context.planning.auto.strategy, shares=())
            context.planning.auto = msgspec.structs.replace(context.planning.auto, strategy=even)

    def divide_work(self, rows: Sequence[int], why: str) -> None:
        """Changes the rows per rank among the same ranks, without compiling again. With ``rows=()`` only the registered
        datasets are divided anew, because the stages of a pipeline are planned anew.

        Args:
          rows: shares of the ranks.
          why: reason in words, which the first rank logs.
        """
        context = self._of()
        if rows:
            self.divisions += 1
            self.divide(list(rows))
            context.reports.compiled_for.clear()
        self.divide_data()
        if context.place.rank == 0:
            log.info(why)

    def divide_data(self) -> None:
        """Makes every registered dataset yield this rank's rows under the present number of ranks and shares
        (``divide_again``).
        """
        for dataset in list(self._datasets):
            dataset.divide_again()

    def update_places(self, hosts: Sequence[str], me: int, draws_on: bool = False) -> None:
        """Sets the number of ranks, their hosts and this rank's number in the run's context, and forgets its variables'
        layouts and chosen strategy.

        Random streams of operations begin anew, because joining ranks do not know them, and a failed step advanced them
        on some ranks.

        Args:
          hosts: name of each rank's host.
          me: this rank's new number.
          draws_on: whether random streams continue instead, because the ranks are the same and no step has failed.
        """
        if not draws_on:
            whale_ops.forget_streams()
        context, size = self._of(), len(hosts)
        here = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
        context.place = replace(context.place, rank=me, size=size, local_rank=here.index(me), local_size=len(here))
        context.size, context.ranks = size, (me,)
        context.topology = make_topology(hosts)
        context.variables = VariableStore(keeps_first=True)
        context.planning.auto = context.planning.saved = context.planning.described = context.planning.forecast = None
        context.planning.moves, context.planning.slower = 0, Slowdown()  # as of a joining rank
        context.scoping.stages_seen = False
        if changes := find_fitting_changes(context.config, size):
            context.config = context.config.but(changes)
        context.reports.compiled_for.clear()

    def make_meeting(self, members: Sequence[int], kind: int) -> Any:
        """Creates the temporary communicator through which the present ranks agree before they continue.

        Args:
          members: these ranks, by the numbers that they had at their start.
          kind: as in ``make_communicator``.
        """
        if len(members) > 1:
            return self.make_communicator(members, kind, share_memory=False)
        self._watch.look_after(None, self.members, self.number)  # there is no other rank to watch
        return LoneCommunicator()

    def make_survivors(self, members: Sequence[int]) -> whale_ops.Communicator | None:
        """Creates the communicator of the remaining ranks for the rest of the run; None: this rank is the only one."""
        if len(members) == 1:
            return None
        config = self._of().config
        hosts = count_hosts_left(config.network.hosts, members)
        return self.make_communicator(
            members, 1, share_memory=config["communication.shared_memory"] != "none", hosts=hosts
        )

    def offer(self, welcome: Welcome | None) -> tuple[whale_ops.Communicator, tuple[int, ...], list[str], Welcome]:
        """Connects all present ranks, joining ones included, and sends the joining ranks what they need to continue;
        collective.

        Args:
          welcome: progress and state of the run; None on joining ranks, which receive it.

        Returns:
          the communicator, the numbers that its ranks had at their start, the names of their hosts, and the welcome.

        Raises:
          CommError: a rank is gone.
        """
        members = self.ranks.present
        comm = self.make_communicator(
            members, 3, share_memory=self._of().config["communication.shared_memory"] != "none"
        )
        said = None if welcome is None else (welcome.calls, welcome.steps, welcome.state, welcome.common.to_values())
        calls, steps, state, common = send_value(comm, 0, said)
        known = Welcome(calls, steps, state, CommonState.from_values(common))
        return comm, members, [one.decode() for one in gather_bytes(comm, socket.gethostname().encode())], known

    def grow(
        self, comm: whale_ops.Communicator, members: tuple[int, ...], hosts: Sequence[str], known: Welcome
    ) -> None:
        """Makes the ranks that ``comm`` connects, joining ones included, the ranks of the run.

        Args:
          comm: the new communicator, from ``offer``.
          members: its ranks, by the numbers that they had at their start.
          hosts: name of each rank's host.
          known: progress and state of the run, from ``offer``.
        """
        context = self._of()
        self.update_places(hosts, members.index(self.me))
        common = known.common
        context.programs, context.elements, self.divisions = common.programs, common.elements, common.divisions
        if common.shares:
            self.divide(extend_shares(common.shares, len(members)))
        self.members, self.ranks.inside = members, self.ranks.inside | set(members)
        if context.outside is None:
            context.outside = ExternalUpdates()
        self.connect(comm)

    def connect(self, comm: whale_ops.Communicator | None) -> None:
        """Makes the ranks communicate through ``comm`` from now on, and leaves older communicators; None: this rank is
        the only one.
        """
        context = self._of()
        if comm is not None:
            configure_communicator(comm, context.config)
            if context.trace is not None:
                comm.trace_start(context.trace.descriptor)
        elif context.outside is not None:  # there is no other rank whose variables could differ
            context.outside.take_back()
            context.outside = None
        context.comms = () if comm is None else (comm,)
        self._watch.tell({"members": self.members})
        self._made = [(old, ranks) for old, ranks in self._made if old is comm or not self._leave(old, ranks)]
        context.comm_name = "" if comm is None else comm.name
        self.divide_data()
