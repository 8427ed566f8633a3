"""Defines the one context of a process: the state of a run, from ``wh.init`` to ``wh.shutdown``.

Other frontends than TensorFlow 1 may override how ``wh.Session`` interprets a script's graphs (``GraphSemantics``).
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

# Under auto_parallel, variables of up to _SMALL_BYTES are made at once, up to _AT_ONCE_BYTES of them together:
# recording what their initializers do takes longer than that, and most of them are whole in the end.
_SMALL_BYTES, _AT_ONCE_BYTES = 1 << 20, 1 << 28
_REPLICAS = re.compile(r"replica_\d+(/replica_\d+)*")  # paths of wh.replica without devices


@dataclass(frozen=True)
class DryRun:
    """A run that only plans: every program is planned for ``size`` ranks and runs on one.

    ``seen`` is called with the plan, the normalised program, the settings, and the programs of the first ranks.
    ``saved``: plan file to use. ``cluster``: the devices that ``auto_parallel`` plans for; None: ranks as fast as this
    one. ``passes``: records the seconds and changes of passes.
    """

    size: int
    seen: Callable[[Plan, Program, PlanSettings, Sequence[Program]], None]
    saved: str = ""
    cluster: Cluster | None = None
    passes: PassLog | None = None


@dataclass
class OwnPrograms:
    """The state of a run in which each rank runs a program of its own with explicit exchanges, as scripts for Horovod
    do.

    Whale then divides nothing: batches are a rank's own, and so are random states.

    Attributes:
      local_ranks: of every rank, its number among those on its host.
      exchanges: number of exchanges that the script has made on this rank, or built into its graphs.
    """

    local_ranks: tuple[int, ...]
    exchanges: int = 0


@dataclass(frozen=True, slots=True)
class RunMachines:
    """Describes the machines of a run's ranks, and the link between their hosts.

    Attributes:
      machines: a digest of each rank's machine, and the name of its host.
      exchange_s: seconds of a small exchange between hosts; 0: all ranks are on one.
      comm: the communicator of those ranks; None: there is one process.
      cores: the numbers of the cores that each rank may run on.
    """

    machines: tuple[str, ...]
    exchange_s: float
    comm: Any
    cores: tuple[tuple[int, ...], ...] = ()


class Meter(Protocol):
    """Measures the steps of a run."""

    def note_plan(self, program: Program, plan: Plan, settings: PlanSettings) -> None:
        """Records that a normalised program is about to run under a plan."""

    def measure_steps(self, call: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
        """Returns the same callable, measured."""
        ...


class KernelTimes(Protocol):
    """Knows which substitutions of kernels measured slower on this machine.

    Attributes:
      declined: their names, sorted (see ``whale.kernels.choices``).
    """

    declined: tuple[str, ...]

    def note_program(self, program: Program, settings: PlanSettings) -> None:
        """Notes a program of this process's first rank, before kernels are substituted in it."""

    def measure(self) -> None:
        """Measures what is not known of the noted programs, at the end of a run."""


class StepWatch(Protocol):
    """Compares steps with what was predicted of them."""

    def watch_steps(self, call: Callable[..., _T], name: str, number: int) -> Callable[..., _T]:
        """Returns the same callable, whose calls are timed."""
        ...

    def look(self) -> ChosenStrategy | None:
        """Returns, after a step, a strategy to go over to; collective where it is time to compare."""
        ...


class KeptFiles(Protocol):
    """The files in which a process keeps what its datasets yield.

    Attributes:
      kept: whether they hold what all ranks read, and the first rank's may be kept for later runs.
    """

    kept: bool


class ElasticHooks(Protocol):
    """Interface that lets this rank continue when others are gone; see ``whale.runtime.elastic.elastic_run``."""

    @property
    def number(self) -> int:
        """Returns how many changes of the set of ranks (lost or joined) there have been so far."""
        ...

    @property
    def divisions(self) -> int:
        """Returns how often the batch's rows were divided again among the same ranks, or ranks were admitted."""
        ...

    def watch_steps(self, plan: Plan, program: Program) -> WatchedSteps | None:
        """Returns a counter of the steps of this rank's program under a plan; None: they are not counted."""

    def take_step(
        self,
        run: Callable[[], Any],
        pack_results: Callable[[Any], Any],
        early: Sequence[Any],
        watched: WatchedSteps | None,
        assigned: Mapping[int, Any],
    ) -> Any:
        """Takes a step, so that it can be repeated after a loss of ranks."""

    def retry(self, take: Callable[[Any, Any], _T], args: Any = (), kwargs: Any = None) -> _T:
        """Makes a call that communicates, and repeats it after a loss of ranks until it succeeds."""
        ...

    drawn: Callable[[Callable[[], Any]], Any]  # a batch that a step reads itself
    share_again: Callable[[Any], None]  # has a dataset be divided among those that there are

    @property
    def is_keeping_commits(self) -> bool:
        """Tells whether other processes may join later and continue from the script's commits."""
        ...

    @property
    def is_catching_up(self) -> bool:
        """Tells whether this process has come in, and its script is not yet at the others' commit."""
        ...

    def commit(self, state: Callable[[], bytes], steps_left: int | None = None) -> None:
        """Commits the script's state here (returned by ``state``), from which joining processes can continue, now or
        later.
        """

    def come_in(self) -> bytes | None:
        """Returns, in a process that joins, the state that the script has committed in the other ranks, once it is
        admitted.
        """
        ...

    def check(self, uses: Mapping[str, VariableUse], variables: Sequence[CapturedVariable]) -> None:
        """Checks that elastic training supports a program before it divides its variables."""


@dataclass
class ScopeState:
    """Tracks the scopes that the script has entered, and those that it gives by names.

    Attributes:
      scopes: paths of the scopes that are entered, the innermost last.
      scope_count: how many scopes were entered so far.
      dividing_scope_seen: whether a split or a stage was entered: ranks may come to hold parts of variables, or none.
      stages_seen: whether a stage was: steps then take whole batches.
      split_ranks: ranks in a row that divide tensors together, where the script says so by a number; 0: as configured.
      split_everything: whether steps are planned as if they stood inside of ``wh.split``.
      annotations: scopes by names of layers and variables.
      annotated: the patterns of these that anything matched so far.
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
      dry: what a run is for that only plans; None: it computes.
      saved: the plan that one of the programs runs under; None: all are planned.
      described: the plan of a described or measured model that training programs are spread by, and its file.
      machines: what the ranks are on, once it was asked.
      auto: how ``auto_parallel`` divides this run's programs; None before the first training step.
      kept_as: the name under which that is cached on the first rank; "": it is not.
      forecast: compares the first training step with what was predicted of it; None: nothing was.
      searched_all: whether `auto_parallel` had time for every candidate, so that its choice may be kept.
      own_programs: None: the ranks run one program together, which is the usual case.
      meaning: what another interface's scripts mean by their graphs; None: what ``wh.Session`` takes them for.
      meter: what measures the steps of this run; None: nobody asks.
      kernels: what is known of this machine's kernels; None: it was not asked yet, or nothing is kept.
      moves: how often the run has gone over to another strategy.
      slower: what searches for that have found of the figures by which steps are predicted.
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
        """Has programs that are compiled from now on be spread by another strategy, whose steps are compared anew."""
        self.auto, self.forecast, self.moves = chosen, None, self.moves + 1


@dataclass
class LossScales:
    """Holds the loss scales of a run under ``precision.compute_dtype=float16``.

    Attributes:
      loss_scale: of steps; None before the first one.
      fed_scale: of the graphs of sessions.
    """

    loss_scale: LossScale | None = None
    fed_scale: LossScaleFeed | None = None


@dataclass
class Reports:
    """Records messages about a run's programs, so that each is given once, and figures for reports.

    Attributes:
      predicted: name of a program -> finds category -> bytes that its step takes on the first rank here.
      offloaded: name of a program -> bytes that a step copies to the host's memory, and from it, on the ranks here.
      compiled_for: the inputs of the latest program of each name, in words.
      whole: names of programs that every rank computes whole, which was said.
      on_device: what was said of tables that are not kept in the host's memory.
      wide: names of programs whose wide weights would better be divided, which was said.
      plans_not_kept: whether it was said why plans are not kept for later runs.
      without_xla: whether it was said that TensorFlow has no XLA.
    """

    predicted: dict[str, Callable[[], dict[str, int]]] = field(default_factory=dict)
    offloaded: dict[str, tuple[int, int]] = field(default_factory=dict)
    compiled_for: dict[str, str] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    on_device: set[str] = field(default_factory=set)
    wide: set[str] = field(default_factory=set)
    plans_not_kept: bool = False
    without_xla: bool = False


@dataclass
class Hooks:
    """Lists functions to call when runs of a session, or the run itself, end.

    Attributes:
      between_runs: what is done on every rank after a run of a session that all ranks make.
      at_end: what puts TensorFlow's settings back that the run has changed.
      before_shutdown: what an orderly end waits for, on every rank: checkpoints that threads write.
    """

    between_runs: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    before_shutdown: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class BatchReaders:
    """The ranks that provide the parts of a session's batch.

    Attributes:
      readers: ranks of which each provides parts; the global batch is their concatenation in order.
      turns: number of parts that each of them provides for one run.
      whole: every rank gets the whole batch, and takes the rows it computes; otherwise each keeps its own part.
    """

    readers: tuple[int, ...]
    turns: int = 1
    whole: bool = False


class GraphSemantics(Protocol):
    """The semantics that a frontend assigns to a script's graphs."""

    def find_batch_readers(self, graph: Any) -> BatchReaders:
        """Returns the ranks that provide the batches for runs of ``graph``."""
        ...

    def apply_scopes(self, program: Program, graph: Any) -> Program:
        """Returns a captured part of ``graph`` with the scopes that the script's annotations stand for."""
        ...

    def find_fetched(self, graph: Any, fetch: Any) -> Any:
        """Returns the tensor of ``graph`` whose value a script gets when it fetches ``fetch``."""
        ...


@dataclass
class Context(Ranks):
    """The state of one run of Whale.

    Attributes:
      variables: who holds which part of the run's variables.
      scoping, planning, scaling, reports, hooks: what is kept of scopes, of plans, of loss scales, of what was said,
        and of what is done at ends.
      programs: number of programs compiled so far, equal on all ranks.
      streams: what the names of random streams begin with, of each trace, in the order of their first programs.
      elements: number of messages so far about what ranks read, equal on all ranks.
      failed: whether a step of this rank has failed; the others are told so at the end.
      calls: of steps so far, failed ones too.
      apart: how ranks of hosts are reached that have no MPI in common; None: all have.
      after_horovod: whether Horovod ran, and with it MPI, before Whale was started.
      at_once_bytes: of variables that were made before it was known whether they are divided.
      written: paths that the first rank has written, and others might read too early, in the order of the calls.
      first_paths: this rank's own paths -> the first rank's, where they differ and it writes there.
      saves_apart: whether ranks may save checkpoints to paths of their own, as scripts for tf.distribute do.
      own_files: in which this process keeps what its datasets yield; None: it has kept nothing.
      outside: what changes variables beside the run's programs; None when no other process takes part.
      distributed: whether a program of this run updates variables, or gives their gradients.
      solo: whether the ranks may each train alone.
      notice: hears that the run is to end, where it may save then.
      elastic: has this rank go on when others are gone; None: the run ends then.
      topology: the hosts of the ranks, with their links where these were measured; None: all are on one.
      laid: a topology and the axes of a mesh, and the ranks as they are laid there (``rank_order``).
      own_gpu: of this rank, where ranks are processes; None: it has none, or an unknown one.
      gpus: of all ranks, as `own_gpu`, when they last told each other: at the beginning, and when ranks have joined;
        (): they are not known.
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
    topology: Topology | None = None
    laid: tuple[tuple[Topology, tuple[Axis, ...]], tuple[int, ...]] | None = None

    def watch_calls(
        self, call: Callable[..., _T], name: str, number: int, plan: Callable[[], Plan]
    ) -> Callable[..., _T]:
        """Wraps a program's callable so that its calls are counted, traced and measured, as configured."""
        if self.watch is not None and self.watch.progress is not None:
            call = self.watch.progress.count_steps(call, name)
        if self.planning.forecast is not None:
            call = self.planning.forecast.watch_steps(call, name, number)
        if self.trace is not None:
            call = self.trace.trace_steps(call, name, number)
        return call if self.planning.meter is None else self.planning.meter.measure_steps(call, plan())

    @property
    def is_elastic(self) -> bool:
        """Tells whether this rank continues when others are gone."""
        return self.elastic is not None

    def retry_after_loss(self, call: Callable[[], _T]) -> _T:
        """Returns the result of a call that communicates; repeats the call if this rank continues after a loss of
        others.
        """
        return call() if self.elastic is None else self.elastic.retry(lambda *_: call())

    @property
    def lost_count(self) -> int:
        """Returns how many ranks were lost without ending this run."""
        return 0 if self.elastic is None else self.elastic.number

    @property
    def division(self) -> tuple[int, ...]:
        """Returns the version for which steps are compiled: counts of moved variables, lost ranks, and changed row
        shares.
        """
        gone = (0, 0) if self.elastic is None else (self.elastic.number, self.elastic.divisions)
        return (self.variables.moved, *gone)

    @property
    def planned_size(self) -> int:
        """Returns the number of ranks that programs are planned for: those of the run, or of a dry run's target."""
        return self.size if self.planning.dry is None else self.planning.dry.size

    @property
    def mesh(self) -> Mesh:
        """Returns the configured sizes of mesh axes, or the script's number of ranks that divide tensors."""
        said = self.config["mesh"]
        return said if said or not self.scoping.split_ranks else Mesh(**{TENSOR: self.scoping.split_ranks})

    @property
    def planned_topology(self) -> Topology | None:
        """Returns the hosts of the ranks that programs are planned for; None: all are on one."""
        dry = self.planning.dry
        if dry is not None and dry.cluster is not None and self.topology is None:
            self.topology = cluster_topology(dry.cluster, dry.size)
        return self.topology

    @property
    def is_laid_by_links(self) -> bool:
        """Tells whether ranks are laid on the mesh by the links between their hosts.

        Ranks that bring batches of their own keep their order, which is that of the batch's rows.
        """
        return self.config["mesh.rank_order"] == "links" and not self.has_local_batch

    @property
    def rank_order(self) -> tuple[int, ...]:
        """Returns the rank at each position of the configured mesh; (): position and rank are the same number."""
        if (topology := self.planned_topology) is None or not self.mesh or not self.is_laid_by_links:
            return ()
        sizes = fill_mesh(self.mesh, self.planned_size) or dict(self.mesh)
        asked = topology, tuple(Axis(name, size) for name, size in sizes.items())
        if self.laid is None or self.laid[0] != asked:
            self.laid = asked, order_ranks(*asked)
        return self.laid[1]

    @property
    def local_ranks(self) -> int:
        """Returns how many of the ranks that programs are planned for share this host."""
        return max(1, self.place.local_size if self.has_other_processes else self.planned_size)

    @property
    def has_local_batch(self) -> bool:
        """Tells whether every rank passes a batch of its own."""
        spread = self.has_other_processes or self.planning.dry is not None
        return spread and self.config["batch.mode"] == "local"

    @property
    def _is_only_replicating(self) -> bool:
        """Tells whether the entered scopes, and the plan if any, leave all variables replicated.

        Recording what initializers compute costs a first step more than running them, so it is skipped for replicated
        variables.
        """
        given = self.planning.saved is not None or self.planning.described is not None
        return not given and all(_REPLICAS.fullmatch(path) for path in self.scoping.scopes)

    @property
    def may_divide_variables(self) -> bool:
        """Tells whether variables of this run may be split later, or moved out of the device's memory."""
        if self.planning.dry is not None or (self.size == 1 and not self.config["memory.offload"]):
            return False
        return bool(self._is_asked_to_divide or self.config["mesh.auto_parallel"])

    @property
    def _is_asked_to_divide(self) -> bool:
        """Tells whether the script or its configuration divides variables; otherwise the search may do so."""
        return bool(
            self.config["memory.zero"]
            or self.config["memory.offload"]
            or (self.scoping.scopes and not self._is_only_replicating)
            or self.scoping.dividing_scope_seen
        )

    def should_defer(self, size_bytes: int | None) -> bool:
        """Tells whether a variable created now is deferred until a plan says which part of it a rank holds.

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
    """The state that Whale keeps in a process across runs.

    Attributes:
      context: of the present run.
      runs: number of runs so far; their communicators are named by it.
      dry, meter: used by the next ``init``.
      names: number of names made by ``make_unique_name``.
      alone: the reason to end the process with exit code 2, if any: programs that its ranks trained alone.
    """

    context: Context | None = None
    runs: int = 0
    dry: DryRun | None = None
    meter: Meter | None = None
    names: int = 0
    alone: str = ""


def make_unique_name(name: str, digits: int = 1) -> str:
    """Appends a number to ``name``: names of TensorFlow's functions and nodes are global in a process."""
    process.names += 1
    return f"{name}_{process.names:0{digits}}"


def find_running() -> Context | None:
    """Returns the context of the present run, if any."""
    return process.context


@contextmanager
def measure_run(meter: Meter) -> Iterator[None]:
    """Makes an ``init`` inside begin a run whose steps are measured."""
    process.meter = meter
    try:
        yield
    finally:
        process.meter = None


def require_current(what: str = "this call") -> Context:
    """Returns the context; raises ClusterError, mentioning ``what``, if ``wh.init`` was not called."""
    if process.context is None:
        raise ClusterError(
            f"{what} needs Whale to be started",
            given="no context",
            expected="wh.init() before it",
            action="call wh.init() at the start of the script",
        )
    return process.context


def rank() -> int:
    """Returns the number of this process's rank (the first one with the in-process transport)."""
    return require_current("wh.rank()").rank


def size() -> int:
    """Returns the number of ranks."""
    return require_current("wh.size()").size


process = Process()


def local_rank() -> int:
    """Returns the number of this process among those on its host."""
    return require_current("wh.local_rank()").place.local_rank


def local_ranks(context: Context) -> tuple[int, ...]:
    """Returns each rank's number among those on its host; collective between processes."""
    if not context.has_other_processes:
        return (context.place.local_rank,)
    said = context.comms[0].allgather_bytes("whale/local_ranks", str(context.place.local_rank).encode())
    return tuple(map(int, said))


def preempted() -> bool:
    """Tells whether the run is about to end: by SIGTERM to `whale run`, or to the process of any rank; collective.

    All ranks get the same answer. They call it where no work is half done, as after a step. If it is True, they save:

        if wh.preempted():
            manager.save()
            sys.exit(0)

    Raises:
      ConfigError: ``fault.notice_s`` is 0, so that SIGTERM ends the run at once.
      CommError: a rank does something else, or is gone.
    """
    context = require_current("wh.preempted()")
    if context.notice is None:
        raise ConfigError(
            "this run ends at once on SIGTERM, without time to save",
            given="wh.preempted() with fault.notice_s = 0",
            expected="the seconds that the machine leaves between SIGTERM and the end",
            action='set it: wh.init({"fault.notice_s": 60}), or WHALE_FAULT_NOTICE_S=60',
        )
    notice = context.notice
    return context.retry_after_loss(lambda: notice.has_reached(context))
