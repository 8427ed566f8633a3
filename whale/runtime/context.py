"""Holds the state of the present run, from ``wh.init`` to ``wh.shutdown``: one ``Context`` for each process.

``require_current`` returns the context to whatever needs a run. Frontends other than TensorFlow 1 may override how
``wh.Session`` interprets a script's graphs (``GraphSemantics``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cost_model.cluster.cluster_file import Cluster
from cost_model.graph.machine import cluster_topology
from whale.capture.captured import CapturedVariable
from whale.capture.loss_scaling import LossScale, LossScaleFeed
from whale.config import Mesh
from whale.distributed.balance import WatchedSteps
from whale.distributed.connect import SocketBootstrap
from whale.distributed.device_exchange import OwnGpu
from whale.distributed.preemption import PreemptionNotice
from whale.distributed.ranks import Ranks
from whale.errors import ClusterError, ConfigError
from whale.ir.mesh import TENSOR, Axis
from whale.ir.plan import Plan
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.ir.topology import Topology
from whale.partition.variable_use import VariableUse
from whale.passes.analysis.axes import fill_mesh
from whale.passes.analysis.rank_order import order_ranks
from whale.passes.analysis.scopes import Pattern
from whale.passes.run_passes import PassLog
from whale.passes.settings import PlanSettings
from whale.planner.graph_search.environment import Slowdown
from whale.planner.report.planfile import PlanFile
from whale.runtime.saved_plan import SavedPlan
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.runtime.variables.variable_store import VariableStore

_T = TypeVar("_T")

# Under auto_parallel, variables of up to _SMALL_BYTES each are initialised at once instead of deferred, up to
# _AT_ONCE_BYTES in total: recording what their initializers do takes longer than running them, and most of these
# variables are replicated in the end.
_SMALL_BYTES, _AT_ONCE_BYTES = 1 << 20, 1 << 28
_REPLICAS = re.compile(r"replica_\d+(/replica_\d+)*")  # paths of wh.replica without devices


@dataclass(frozen=True)
class DryRun:
    """Describes a run that only plans: every program is planned for ``size`` ranks, while the script itself runs on
    one.

    Attributes:
      size: number of ranks to plan for.
      seen: called for each program with the plan, the normalised program, the settings, and the programs of the first
        ranks.
      saved: path of the plan file to use; "": none.
      cluster: the devices that ``auto_parallel`` plans for; None: ranks as fast as this one.
      passes: records the seconds and changes of passes; None: nobody asks.
    """

    size: int
    seen: Callable[[Plan, Program, PlanSettings, Sequence[Program]], None]
    saved: str = ""
    cluster: Cluster | None = None
    passes: PassLog | None = None


@dataclass
class OwnPrograms:
    """Holds the state of a run in which each rank runs a program of its own with explicit exchanges, as scripts for
    Horovod do.

    Whale divides nothing in such a run; each rank has its own batches and random states.

    Attributes:
      local_ranks: for each rank of the run, its number among the ranks on its host.
      exchanges: number of exchanges that the script has made on this rank, or built into its graphs, so far.
    """

    local_ranks: tuple[int, ...]
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class RunMachines:
    """Describes the machines of a run's ranks, and the link between their hosts: a strategy that an earlier run cached
    is used only on the same machines.

    Attributes:
      machines: for each rank, ``"<digest of its hardware and settings> <host name>"``.
      exchange_s: seconds of a small exchange between hosts; 0: all ranks are on one host.
      comm: the communicator over which this was gathered; None: there is one process.
      cores: for each rank, the numbers of the CPU cores that it may run on.
    """

    machines: tuple[str, ...]
    exchange_s: float
    comm: Any
    cores: tuple[tuple[int, ...], ...] = ()


class Meter(Protocol):
    """Measures the steps of a run, for a tool that has started it (``measure_run``)."""

    def note_plan(self, program: Program, plan: Plan, settings: PlanSettings) -> None:
        """Records that a normalised program is about to run under a plan."""

    def measure_steps(self, call: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """Returns a callable that calls ``call`` and measures each call."""
        ...


class KernelTimes(Protocol):
    """Knows which kernel substitutions are slower than what they replace on this machine.

    Attributes:
      declined: names of the slower substitutions, sorted (see ``whale.kernels.choices``).
    """

    declined: tuple[str, ...]

    def note_program(self, program: Program, settings: PlanSettings) -> None:
        """Records the program of this process's first rank as it is before kernels are substituted, so that they can be
        measured later.
        """

    def measure(self) -> None:
        """Measures the substitutions in the recorded programs that were never measured; called at the end of a run."""


class StepWatch(Protocol):
    """Compares the measured seconds of steps with what `auto_parallel` predicted."""

    def watch_steps(self, call: Callable[..., _T], name: str, number: int) -> Callable[..., _T]:
        """Returns a callable that calls ``call`` and times it.

        Args:
          name: of the step, for messages.
          number: index of the program among those compiled in this run; only the program with a prediction is timed.
        """
        ...

    def look(self) -> ChosenStrategy | None:
        """Returns the strategy that the run should change to now, or None. Called after each step; collective when it
        is time to compare.
        """
        ...


class KeptFiles(Protocol):
    """Represents the files in which a process keeps the elements that its datasets yield.

    Attributes:
      kept: whether the files hold what all ranks read, so that the first rank's may be kept for later runs.
    """

    kept: bool


class ElasticHooks(Protocol):
    """Declares what an elastic run does at steps and calls, so that this rank continues when others are lost;
    implemented in ``whale.runtime.elastic.elastic_run``.
    """

    @property
    def number(self) -> int:
        """Returns how many times the set of ranks has changed so far, because ranks were lost or joined."""
        ...

    @property
    def divisions(self) -> int:
        """Returns how many times the batch's rows were divided anew among the same ranks, or ranks were admitted; part
        of ``Context.division``, by which compiled steps are found out of date.
        """
        ...

    def watch_steps(self, plan: Plan, program: Program) -> WatchedSteps | None:
        """Returns a counter of the steps of this rank's program under ``plan``; None: its steps are not counted."""

    def take_step(
        self,
        run: Callable[[], Any],
        pack_results: Callable[[Any], Any],
        early: Sequence[Any],
        watched: WatchedSteps | None,
        assigned: Mapping[int, Any],
    ) -> Any:
        """Runs a step so that it can be repeated after ranks were lost, and returns its packed results; the arguments
        are those of ``whale.runtime.elastic.elastic_run.Elastic.take_step``.
        """

    def retry(self, take: Callable[[Any, Any], _T], args: Any = (), kwargs: Any = None) -> _T:
        """Calls ``take(args, kwargs)``, which communicates, and repeats the call after each loss of ranks until it
        succeeds.
        """
        ...

    drawn: Callable[[Callable[[], Any]], Any]  # returns a batch that a step reads itself, the same one when repeated
    share_again: Callable[[Any], None]  # registers a dataset, to be divided anew whenever the ranks change

    @property
    def is_keeping_commits(self) -> bool:
        """Returns True if other processes may join later, so that the script's commits are kept for them."""
        ...

    @property
    def is_catching_up(self) -> bool:
        """Returns True if this process has joined a running job and its script has not yet reached the commit of the
        other ranks.
        """
        ...

    def commit(self, state: Callable[[], bytes], steps_left: int | None = None) -> None:
        """Marks a point of the script from which joining processes can continue, now or later.

        Args:
          state: returns the script's state as bytes.
          steps_left: number of steps that the script still takes; None: unknown.
        """

    def come_in(self) -> bytes | None:
        """Waits, in a process that joins, until the ranks admit it, and returns the state that their script has
        committed; None in a process that does not join.
        """
        ...

    def check(self, uses: Mapping[str, VariableUse], variables: Sequence[CapturedVariable]) -> None:
        """Raises an error if elastic training does not support how a program divides its variables; called before it
        divides them.
        """


@dataclass
class ScopeState:
    """Tracks the scopes that the script has entered with ``with wh.split():`` and the like, and those of
    ``wh.annotate``.

    Attributes:
      scopes: paths of the scopes that are entered now, the innermost last.
      scope_count: how many scopes were entered so far; numbers the next one.
      dividing_scope_seen: whether a split or a stage was entered, so that ranks may come to hold parts of variables, or
        none.
      stages_seen: whether a stage was entered; steps then take whole batches.
      split_ranks: number of consecutive ranks that divide tensors together, as the script gives it (``device_count``);
        0: as configured.
      split_everything: whether steps are planned as if all their nodes stood inside of ``wh.split``.
      annotations: patterns of names with their scopes, in the order given.
      annotated: the patterns of ``annotations`` that have matched a name so far.
    """

    scopes: list[str] = field(default_factory=list)
    scope_count: int = 0
    dividing_scope_seen: bool = False
    stages_seen: bool = False
    split_ranks: int = 0
    split_everything: bool = False
    annotations: list[Pattern] = field(default_factory=list)
    annotated: set[str] = field(default_factory=set)


@dataclass
class PlanningState:
    """Holds the plans and strategies by which a run plans its programs, beside its configuration.

    Attributes:
      dry: describes the dry run, which only plans; None: the run computes.
      saved: the saved plan that one of the programs runs under (``mesh.plan``); None: all programs are planned here.
      described: the plan of a described or measured model that training programs follow, and the path of its file.
      machines: the ranks' machines, once they were gathered (``know_machines``).
      auto: the strategy that ``auto_parallel`` has chosen for this run's programs; None before the first training step.
      kept_as: name under which ``auto`` is cached on the first rank; "": it is not cached.
      forecast: compares the steps of the first training program with their prediction; None: nothing was predicted.
      searched_all: whether `auto_parallel` had time for every candidate, so that its choice may be cached.
      own_programs: state of a run whose ranks run programs of their own; None, the usual case: all run one program
        together.
      meaning: how another frontend interprets a script's graphs; None: as ``wh.Session`` does.
      meter: measures the steps of this run for a tool; None: nobody asks.
      kernels: which kernels are slow on this machine; None: not read yet, or nothing is kept.
      moves: how many times the run has changed to another strategy.
      slower: factors by which measured steps were slower than the machine's figures predict, found by searches within
        the run.
    """

    dry: DryRun | None = None
    saved: SavedPlan | None = None
    described: tuple[PlanFile, str] | None = None
    machines: RunMachines | None = None
    auto: ChosenStrategy | None = None
    kept_as: str = ""
    forecast: StepWatch | None = None
    searched_all: bool = True
    own_programs: OwnPrograms | None = None
    meaning: GraphSemantics | None = None
    meter: Meter | None = None
    kernels: KernelTimes | None = None
    moves: int = 0
    slower: Slowdown = field(default_factory=Slowdown)

    def go_over(self, chosen: ChosenStrategy) -> None:
        """Makes programs that are compiled from now on follow another strategy, whose steps are compared with their own
        prediction.
        """
        self.auto, self.forecast, self.moves = chosen, None, self.moves + 1


@dataclass
class LossScales:
    """Holds the loss scales of a run under ``precision.compute_dtype=float16``.

    Attributes:
      loss_scale: shared by all steps of ``wh.function``; None before the first one is compiled.
      fed_scale: for graphs that sessions run, into which it is fed; None before the first one.
    """

    loss_scale: LossScale | None = None
    fed_scale: LossScaleFeed | None = None


@dataclass
class Reports:
    """Records which messages were already logged about a run's programs, so that each is logged once, and figures for
    reports.

    Attributes:
      predicted: name of a program -> function that returns bytes by category, of its step on this process's first rank.
      offloaded: name of a program -> (bytes that a step copies to the host's memory, bytes from there), summed over
        this process's ranks.
      compiled_for: name of a program -> its inputs in words, when it was last compiled.
      whole: names of programs for which it was logged that every rank computes all of them.
      on_device: messages logged about embedding tables that are not kept in the host's memory.
      wide: names of programs for which it was logged that wide weights would better be sharded.
      plans_not_kept: whether it was logged why plans cannot be cached.
      without_xla: whether it was logged that TensorFlow has no XLA for the device.
      not_eager: whether it was logged that ``run_functions_eagerly`` does not make steps eager.
    """

    predicted: dict[str, Callable[[], dict[str, int]]] = field(default_factory=dict)
    offloaded: dict[str, tuple[int, int]] = field(default_factory=dict)
    compiled_for: dict[str, str] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    on_device: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)
    plans_not_kept: bool = False
    without_xla: bool = False
    not_eager: bool = False


@dataclass
class Hooks:
    """Lists functions to call after runs of a session, and when the run itself ends.

    Attributes:
      between_runs: called on every rank after a run of a session that all ranks make.
      at_end: undo changes that the run has made in the process, such as TensorFlow's settings.
      before_shutdown: called on every rank by an orderly ``wh.shutdown``, to wait for threads that write checkpoints.
    """

    between_runs: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    before_shutdown: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class BatchReaders:
    """Describes which ranks provide the parts of a session's batch.

    Attributes:
      readers: ranks that each provide parts; the global batch is their concatenation in this order.
      turns: number of parts that each reader provides for one ``Session.run``.
      whole: True: every rank gets the whole batch and takes the rows that it computes; False: each keeps its own part.
    """

    readers: tuple[int, ...]
    turns: int = 1
    whole: bool = False


class GraphSemantics(Protocol):
    """Declares what a frontend can define about a script's graphs: who reads batches, which scopes apply, what a fetch
    returns.
    """

    def find_batch_readers(self, graph: Any) -> BatchReaders:
        """Returns the ranks that provide the batches for runs of ``graph``."""
        ...

    def apply_scopes(self, program: Program, graph: Any) -> Program:
        """Returns ``program``, captured from ``graph``, with the scopes that the frontend's annotations in the script
        stand for.
        """
        ...

    def find_fetched(self, graph: Any, fetch: Any) -> Any:
        """Returns the tensor of ``graph`` whose value the script gets when it fetches ``fetch``."""
        ...


@dataclass
class Context(Ranks):
    """Holds the state of one run of Whale in this process.

    Attributes:
      variables: which rank holds which part of the run's variables.
      scoping: scopes that the script has entered or annotated.
      planning: plans and strategies of the run.
      scaling: loss scales in float16.
      reports: what was already logged, and figures for reports.
      hooks: functions to call when runs of sessions, or the run, end.
      programs: number of programs compiled so far, equal on all ranks.
      streams: for each trace, the prefix of its random streams' names, in the order of their first programs; the keys
        of a dict used as an ordered set.
      elements: number of exchanges so far about what ranks read from datasets, equal on all ranks.
      failed: whether a step of this rank has failed; the other ranks are notified at the end.
      calls: number of step calls so far, failed ones included.
      apart: how ranks on hosts without a common MPI are reached; None: all have one.
      after_horovod: whether Horovod, and with it MPI, was running before Whale was started.
      at_once_bytes: bytes of the variables that were created at once, before it was known whether they are divided.
      written: paths that the first rank has written and other ranks might read too early, in the order of the calls (an
        ordered set).
      unread: paths of ``written`` for which the ranks have waited because of their folder, before any has read them.
      first_paths: this rank's own path -> the first rank's, where they differ and the first rank writes.
      saves_apart: whether ranks may save checkpoints to paths of their own, as scripts for tf.distribute do.
      own_files: files in which this process keeps what its datasets yield; None: it keeps nothing.
      outside: tracks variables that are changed outside of the run's programs; None when no other process takes part.
      distributed: whether a program of this run updates variables, or returns their gradients.
      solo: whether the ranks may each train alone.
      notice: is told by SIGTERM that the run is to end soon, so that it can save; None: SIGTERM ends the run at once.
      elastic: lets this rank continue when others are lost; None: the run ends then.
      host_bytes: bytes of memory that this host and the control groups grant to all ranks on it; None: not looked up.
      topology: the hosts of the ranks, with their links where these were measured; None: all ranks are on one host.
      laid: cache of ``rank_order``: the topology and mesh axes that it was computed for, and the result.
      own_gpu: this rank's GPU, where ranks are processes; None: it has none, or which one is unknown.
      gpus: every rank's ``own_gpu``, as last exchanged (at the start, and when ranks have joined); (): not known.
    """

    variables: VariableStore = field(default_factory=VariableStore)
    scoping: ScopeState = field(default_factory=ScopeState)
    planning: PlanningState = field(default_factory=PlanningState)
    scaling: LossScales = field(default_factory=LossScales)
    reports: Reports = field(default_factory=Reports)
    hooks: Hooks = field(default_factory=Hooks)
    programs: int = 0
    streams: dict[str, None] = field(default_factory=dict)
    elements: int = 0
    failed: bool = False
    calls: int = 0
    after_horovod: bool = False
    apart: SocketBootstrap | None = None
    at_once_bytes: int = 0
    written: dict[str, None] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)
    first_paths: dict[str, str] = field(default_factory=dict)
    saves_apart: bool = False
    own_files: KeptFiles | None = None
    outside: ExternalUpdates | None = None
    distributed: bool = False
    solo: bool = False
    notice: PreemptionNotice | None = None
    elastic: ElasticHooks | None = None
    own_gpu: OwnGpu | None = None
    gpus: tuple[OwnGpu | None, ...] = ()
    host_bytes: float | None = None
    topology: Topology | None = None
    laid: tuple[tuple[Topology, tuple[Axis, ...]], tuple[int, ...]] | None = None

    def watch_calls(
        self, call: Callable[..., _T], name: str, number: int, plan: Callable[[], Plan]
    ) -> Callable[..., _T]:
        """Wraps a program's callable so that its calls are counted, timed, traced and measured, as far as the run asks
        for that.

        Args:
          name: of the program.
          number: index of the program among those compiled in this run; equal on all ranks, and part of the keys of its
            messages.
          plan: returns the program's plan; called only if steps are measured.
        """
        if self.watch is not None and self.watch.progress is not None:
            call = self.watch.progress.count_steps(call, name)
        if self.planning.forecast is not None:
            call = self.planning.forecast.watch_steps(call, name, number)
        if self.trace is not None:
            call = self.trace.trace_steps(call, name, number)
        return call if self.planning.meter is None else self.planning.meter.measure_steps(call, plan())

    @property
    def is_elastic(self) -> bool:
        """Returns True if this rank continues when other ranks are lost."""
        return self.elastic is not None

    def retry_after_loss(self, call: Callable[[], _T]) -> _T:
        """Returns the result of ``call()``, which communicates; an elastic run repeats the call after a loss
        of ranks.
        """
        return call() if self.elastic is None else self.elastic.retry(lambda *_: call())

    @property
    def lost_count(self) -> int:
        """Returns how many times the set of ranks has changed without ending this run; 0 if the run is not elastic."""
        return 0 if self.elastic is None else self.elastic.number

    @property
    def division(self) -> tuple[int, ...]:
        """Returns the version of the run's layout: steps compiled for another version must be compiled again.

        It counts moves of variables, changes of the set of ranks, and changes of the rows per rank.
        """
        gone = (0, 0) if self.elastic is None else (self.elastic.number, self.elastic.divisions)
        return (self.variables.moved, *gone)

    @property
    def planned_size(self) -> int:
        """Returns the number of ranks that programs are planned for: the run's, or in a dry run that of its target."""
        return self.size if self.planning.dry is None else self.planning.dry.size

    @property
    def mesh(self) -> Mesh:
        """Returns the sizes of the mesh axes: the key ``mesh``, or else a tensor axis of as many ranks as the script's
        ``device_count`` says.
        """
        said = self.config["mesh"]
        return said if said or not self.scoping.split_ranks else Mesh(**{TENSOR: self.scoping.split_ranks})

    @property
    def planned_topology(self) -> Topology | None:
        """Returns the hosts of the ranks that programs are planned for, in a dry run those of its cluster file; None:
        all ranks are on one host.
        """
        dry = self.planning.dry
        if dry is not None and dry.cluster is not None and self.topology is None:
            self.topology = cluster_topology(dry.cluster, dry.size)
        return self.topology

    @property
    def is_laid_by_links(self) -> bool:
        """Returns True if ranks are assigned to mesh positions by the speed of the links between their hosts
        (``mesh.rank_order=links``).

        Ranks with batches of their own keep their order, because it is the order of the batch's rows.
        """
        return self.config["mesh.rank_order"] == "links" and not self.has_local_batch

    @property
    def rank_order(self) -> tuple[int, ...]:
        """Returns the rank at each position of the configured mesh; (): the position is the rank's number."""
        if (topology := self.planned_topology) is None or not self.mesh or not self.is_laid_by_links:
            return ()
        sizes = fill_mesh(self.mesh, self.planned_size) or dict(self.mesh)
        asked = topology, tuple(Axis(name, size) for name, size in sizes.items())
        if self.laid is None or self.laid[0] != asked:
            self.laid = asked, order_ranks(*asked)
        return self.laid[1]

    @property
    def local_ranks(self) -> int:
        """Returns how many of the ranks that programs are planned for are on this host."""
        return max(1, self.place.local_size if self.has_other_processes else self.planned_size)

    @property
    def has_local_batch(self) -> bool:
        """Returns True if every rank passes a batch of its own (``batch.mode=local``, with several processes or in a
        dry run).
        """
        spread = self.has_other_processes or self.planning.dry is not None
        return spread and self.config["batch.mode"] == "local"

    @property
    def _is_only_replicating(self) -> bool:
        """Returns True if the entered scopes leave all variables replicated, and no plan is given that may shard them.

        Recording what initializers compute costs a first step more than running them, so it is skipped for replicated
        variables.
        """
        given = self.planning.saved is not None or self.planning.described is not None
        return not given and all(_REPLICAS.fullmatch(path) for path in self.scoping.scopes)

    @property
    def may_divide_variables(self) -> bool:
        """Returns True if variables of this run may be sharded later, or moved to the host's memory."""
        if self.planning.dry is not None or (self.size == 1 and not self.config["memory.offload"]):
            return False
        return bool(self._is_asked_to_divide or self.config["mesh.auto_parallel"])

    @property
    def _is_asked_to_divide(self) -> bool:
        """Returns True if the script's scopes or the configuration divide variables; if not, only the search of
        `auto_parallel` may.
        """
        return bool(
            self.config["memory.zero"]
            or self.config["memory.offload"]
            or (self.scoping.scopes and not self._is_only_replicating)
            or self.scoping.dividing_scope_seen
        )

    def should_defer(self, size_bytes: int | None) -> bool:
        """Returns True if a variable created now stays a handle with a recorded initial value until a plan says which
        part a rank holds.

        Args:
          size_bytes: of the variable; None: unknown before its initializer has run.
        """
        if not self.may_divide_variables:
            return False
        given = self.planning.saved is not None or self.planning.described is not None
        if size_bytes is None or size_bytes > _SMALL_BYTES or self._is_asked_to_divide or given:
            return True
        self.at_once_bytes += size_bytes
        return self.at_once_bytes > _AT_ONCE_BYTES


@dataclass
class Process:
    """Holds the state that Whale keeps in a process across runs.

    Attributes:
      context: of the present run; None: there is none.
      runs: number of runs so far; communicators are named after it.
      dry: the dry run that the next ``init`` begins.
      meter: measures the steps of the run that the next ``init`` begins.
      names: number of names made by ``make_unique_name``.
      alone: error text if the ranks trained without each other, for which the process ends with exit code 2; "": they
        did not.
    """

    context: Context | None = None
    runs: int = 0
    dry: DryRun | None = None
    meter: Meter | None = None
    names: int = 0
    alone: str = ""


def make_unique_name(name: str, digits: int = 1) -> str:
    """Returns ``name`` with a number that is unique in the process, because names of TensorFlow's functions are global
    in it.

    Args:
      digits: least number of digits, padded with zeros.
    """
    process.names += 1
    return f"{name}_{process.names:0{digits}}"


def find_running() -> Context | None:
    """Returns the context of the present run; None between runs."""
    return process.context


@contextmanager
def measure_run(meter: Meter) -> Iterator[None]:
    """Makes a ``wh.init`` called inside this context begin a run whose steps ``meter`` measures."""
    process.meter = meter
    try:
        yield
    finally:
        process.meter = None


def require_current(what: str = "this call") -> Context:
    """Returns the context of the present run.

    Args:
      what: the call that needs it, for the message.

    Raises:
      ClusterError: ``wh.init`` was not called.
    """
    if process.context is None:
        raise ClusterError(
            f"{what} needs Whale to be started",
            given="no run: wh.init() was not called, or wh.shutdown() has ended the run",
            expected="wh.init() before it",
            action="call wh.init() at the start of the script",
        )
    return process.context


def rank() -> int:
    """Returns the rank of this process in the run; the first one's if it runs several ranks
    (``communication.in_process_ranks``).
    """
    return require_current("wh.rank()").rank


def size() -> int:
    """Returns the number of ranks in the run."""
    return require_current("wh.size()").size


process = Process()


def local_rank() -> int:
    """Returns the number of this process among the run's processes on its host."""
    return require_current("wh.local_rank()").place.local_rank


def local_ranks(context: Context) -> tuple[int, ...]:
    """Returns, for each rank, its number among the ranks on its host; collective between processes."""
    if not context.has_other_processes:
        return (context.place.local_rank,)
    said = context.comms[0].allgather_bytes("whale/local_ranks", str(context.place.local_rank).encode())
    return tuple(map(int, said))


def preempted() -> bool:
    """Returns True if the run is about to end, because `whale run` or any rank's process got SIGTERM; collective.

    All ranks get the same answer. They call it where no work is half done, such as after a step. If it is True, they
    save:

        if wh.preempted():
            manager.save()
            sys.exit(0)

    Raises:
      ConfigError: ``fault.notice_s`` is 0, so that SIGTERM ends the run at once.
      CommError: a rank makes another call, or is gone.
    """
    context = require_current("wh.preempted()")
    if context.notice is None:
        raise ConfigError(
            "this run ends at once on SIGTERM, without time to save",
            given="wh.preempted() with fault.notice_s = 0",
            expected="fault.notice_s: the seconds that the machine leaves between SIGTERM and the end",
            action='set the key: wh.init({"fault.notice_s": 60}), or WHALE_FAULT_NOTICE_S=60',
        )
    notice = context.notice
    return context.retry_after_loss(lambda: notice.has_reached(context))
