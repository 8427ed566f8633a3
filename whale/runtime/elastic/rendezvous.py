"""Connects the ranks of an elastic run anew: who they are now, where they meet, and what they count in common."""

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
from whale.distributed.connect import configure_communicator
from whale.distributed.joining import CommonState, Members, Welcome, extend_shares
from whale.distributed.listener import RankListener
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.distributed.socket_bootstrap import SocketBootstrap
from whale.distributed.trace import Trace
from whale.distributed.watch import LauncherWatch
from whale.log import log
from whale.runtime.elastic.agreement import LoneCommunicator, gather_bytes, send_value
from whale.runtime.elastic.requirements import count_hosts_left, find_fitting_changes
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.runtime.variables.variable_store import VariableStore
from whale.started import GROWS_VARIABLE, PEERS_VARIABLE, ProcessPlace, joins


class ElasticRun(Protocol):
    """What changes of a run's context when its ranks do."""

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


class RankGroup:
    """The ranks of a run.

    Args:
      run: gives its context.

    Attributes:
      number: of what was told of ranks that are gone or have come, and this rank has acted on.
      divisions: how often rows were divided anew, or ranks taken in.
      me: this rank, as it was started; members: all of them; (): this one has not been taken in.
      ranks: what is known of them.
      door: where others reach this one; None where no rank may join.
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
        if self.door is None and GROWS_VARIABLE in os.environ:
            self.door = RankListener(os.environ[PEERS_VARIABLE])
            self._watch.tell({"address": self.door.address})
            context.hooks.at_end.append(self.door.close)

    @property
    def _watch(self) -> LauncherWatch:
        watch = self._of().watch
        assert watch is not None  # every rank of `whale run` has one, if several take part
        return watch

    def hear(self, timeout_s: float) -> bool:
        """Whether there is news of ranks; waits for it."""
        changes = self._watch.list_changes(self.number, timeout_s)
        if len(changes) <= self.number:
            return False
        self.number, self.ranks.changes = len(changes), changes
        return True

    @property
    def is_over(self) -> bool:
        """Whether a rank has come to its end, and so the run."""
        return self._watch.is_over

    def wait_until_asked_in(self) -> None:
        """Of a process that joins: it is ready, and waits until all ranks know of it."""
        self._watch.tell({"ready": True})
        while self.me not in self.ranks.present:
            self.hear(TURN_TIMEOUT_S)

    def make_communicator(self, members: Sequence[int], kind: int, **shared: Any) -> whale_ops.Communicator:
        """Of some of the ranks; ``kind`` and ``shared`` as of ``Members.connect``. It is looked after."""
        comm = self.ranks.connect(self._name, self.me, members, kind, self.door, self._watch, **shared)
        self._made.append((comm, tuple(members)))
        self._watch.look_after(comm, members, self.number)
        return comm

    def _leave(self, comm: whale_ops.Communicator, ranks: Sequence[int]) -> bool:
        """Leaves a communicator that is not used any more; whether all others have, too, or are gone."""
        for i, rank in enumerate(ranks):
            if rank not in self.ranks.present:
                comm.lose(i, "is gone")
        return comm.leave(0.0)

    def register_dataset(self, dataset: Any) -> None:
        """Has a dataset be divided (``divide_again``) whenever the ranks are others, or their shares."""
        self._datasets.add(dataset)

    def divide(self, shares: list[int]) -> None:
        """The shares of rows are these from now on."""
        context = self._of()
        context.config = context.config.but({"batch.shares": shares})
        if context.planning.auto is not None:
            even = msgspec.structs.replace(context.planning.auto.strategy, shares=())
            context.planning.auto = msgspec.structs.replace(context.planning.auto, strategy=even)

    def divide_work(self, rows: Sequence[int], why: str) -> None:
        """The ranks stay, with these rows, or with stages that are planned anew (); nothing is compiled for that."""
        context = self._of()
        if rows:
            self.divisions += 1
            self.divide(list(rows))
            context.reports.compiled_for.clear()
        self.divide_data()
        if context.place.rank == 0:
            log.info(why)

    def divide_data(self) -> None:
        """Datasets are read by the ranks and the shares that there are now."""
        for dataset in list(self._datasets):
            dataset.divide_again()

    def update_places(self, hosts: Sequence[str], me: int) -> None:
        """The run has so many ranks now, on these hosts; variables are whole, and nothing is compiled for it.

        Random streams of operations begin anew: joining ranks know nothing of them, and a failed step went on in some.
        """
        whale_ops.forget_streams()
        context, size = self._of(), len(hosts)
        here = [rank for rank, host in enumerate(hosts) if host == hosts[me]]
        context.place = replace(context.place, rank=me, size=size, local_rank=here.index(me), local_size=len(here))
        context.size, context.ranks = size, (me,)
        context.variables = VariableStore(keeps_first=True)
        context.planning.auto = context.planning.saved = context.planning.described = None
        context.scoping.stages_seen = False  # as of a joining rank
        if changes := find_fitting_changes(context.config, size):
            context.config = context.config.but(changes)
        context.reports.compiled_for.clear()

    def make_meeting(self, members: Sequence[int], kind: int) -> Any:
        """Through which some of the ranks talk that are there; ``kind`` as of ``Members.connect``."""
        if len(members) > 1:
            return self.make_communicator(members, kind, share_memory=False)
        self._watch.look_after(None, self.members, self.number)  # nobody else is left to be looked after
        return LoneCommunicator()

    def make_survivors(self, members: Sequence[int]) -> whale_ops.Communicator | None:
        """Of those that are left, for all that follows; None: this one is alone."""
        if len(members) == 1:
            return None
        config = self._of().config
        hosts = count_hosts_left(config.network.hosts, members)
        return self.make_communicator(
            members, 1, share_memory=config["communication.shared_memory"] != "none", hosts=hosts
        )

    def offer(self, welcome: Welcome | None) -> tuple[whale_ops.Communicator, tuple[int, ...], list[str], Welcome]:
        """Connects all ranks that are there; (through what, their numbers, their hosts, what joining ranks are told).

        Collective.

        Raises:
          CommError: one of them is gone.
        """
        members = self.ranks.present
        comm = self.make_communicator(
            members, 3, share_memory=self._of().config["communication.shared_memory"] != "none"
        )
        said = None if welcome is None else (welcome.calls, welcome.steps, welcome.state, welcome.common.to_values())
        calls, steps, state, common = send_value(comm, 0, said)
        known = Welcome(calls, steps, state, CommonState.of_values(common))
        return comm, members, [one.decode() for one in gather_bytes(comm, socket.gethostname().encode())], known

    def grow(
        self, comm: whale_ops.Communicator, members: tuple[int, ...], hosts: Sequence[str], known: Welcome
    ) -> None:
        """The ranks are those that are connected by this, joining ranks among them."""
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
        """The ranks exchange through this from now on; None: this one is alone."""
        context = self._of()
        if comm is not None:
            configure_communicator(comm, context.config)
            if context.trace is not None:
                comm.trace_start(context.trace.descriptor)
        elif context.outside is not None:  # nobody is left with whom this rank could differ
            context.outside.take_back()
            context.outside = None
        context.comms = () if comm is None else (comm,)
        self._watch.tell({"members": self.members})
        self._made = [(old, ranks) for old, ranks in self._made if old is comm or not self._leave(old, ranks)]
        context.comm_name = "" if comm is None else comm.name
        self.divide_data()
