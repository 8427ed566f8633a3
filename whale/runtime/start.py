"""Implements ``wh.init`` and ``wh.shutdown``: connects the ranks, makes their random states equal, and ends the run in
order or with a reason.

Scripts of a library that allows a second ``init`` begin the run anew with another configuration (``begin_again``).
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tensorflow.python.autograph.pyct import loader

import whale_ops
from cost_model.graph.machine_profile import read as read_profile
from whale.config import Config
from whale.distributed import device_exchange, horovod
from whale.distributed.common_seeds import (
    CommonSeeds,
    compute_state_number,
    read_random_state,
    restart_streams,
    take_random_state,
)
from whale.distributed.connect import SocketBootstrap, configure_communicator, connect_ranks, share_tensors_if_possible
from whale.distributed.links import find_topology, measure_links, name_emulated_hosts
from whale.distributed.msgpack_values import pack, unpack
from whale.distributed.preemption import PreemptionNotice
from whale.distributed.ranks import TURN_TIMEOUT_S
from whale.distributed.trace import Trace, open_span, open_trace
from whale.distributed.versions import RankVersions, describe_rounding, read_versions, refuse_other_versions
from whale.distributed.watch import LauncherWatch
from whale.errors import ClusterError, ConfigError, PlanError, WhaleError
from whale.ir.topology import Link, make_topology
from whale.log import log, set_level
from whale.runtime.annotate import annotate, describe_unmatched, read_annotations
from whale.runtime.context import (
    Context,
    DryRun,
    LossScales,
    OwnPrograms,
    PlanningState,
    ScopeState,
    find_running,
    local_ranks,
    process,
    require_current,
)
from whale.runtime.elastic.elastic_run import Elastic
from whale.runtime.saved_plan import SavedPlan, read_saved_plan, warn_of_other_devices
from whale.runtime.tf_config import check_alone
from whale.runtime.unsynchronized_training import find_unsynchronized_training, watch_in_process_training
from whale.runtime.variables import deferred
from whale.runtime.variables.external_updates import ExternalUpdates
from whale.started import CONTROL_VARIABLE, FILES_VARIABLE, ProcessPlace, joins, own_descriptor, process_place

_FOLDER = "python"
_FREE_BYTES = 1 << 24  # with less room, nothing is written to the folder of `whale run`, which is in memory
_ANY_TEXT = "whale"  # each rank sends Python's hash of this text, to find ranks whose hashes differ

# Prefixes of keys that decide how ranks are connected; a second `wh.init` cannot change them.
_CONNECTED = ("communication.", "fault.", "debug.trace", "debug.emulate")


@contextmanager
def plan_only(dry: DryRun) -> Iterator[None]:
    """Makes a ``wh.init`` inside this context start a dry run, which plans and does not train; the run ends with the
    context.
    """
    process.dry = dry
    try:
        yield
    finally:
        process.dry = None
        shutdown()


def init(
    config: Config | Mapping[str, Any] | None = None,
    plan: str | os.PathLike[str] = "",
    solo: bool = False,
    *,
    ranks: int | None = None,
    elastic: bool = False,
) -> None:
    """Starts Whale in this process; every rank calls it before scopes and steps.

    Connects the ranks that a launcher started (`whale run`, mpirun, srun), or makes ``ranks`` of them inside this
    process, for a notebook. Rank 0's random states of Python, NumPy, TensorFlow and Keras become those of all ranks, so
    that seeds which a program draws are equal. From now on, what is created without a seed gets equal seeds on all
    ranks: shuffles of tf.data and, unless each rank brings batches of its own, operations that run eagerly and
    generators of NumPy and TensorFlow.

    A second call, on every rank, gives the present run another configuration, and drops earlier scopes and annotations;
    the ranks stay connected.

    Args:
      config: a ``wh.Config`` or a mapping of dotted keys; None: no keys are set by this call.
      plan: file of the plan that the script's step runs under, as the key ``mesh.plan``.
      solo: whether each rank may train by itself. Otherwise a run of several processes that trains, and of which Whale
        distributes nothing, ends with exit code 2.
      elastic: whether the ranks continue in their processes when others are killed, frozen or lost; sets the key
        ``fault.elastic`` to "memory" if it is not set.
      ranks: number of ranks to run as threads of this process; the key ``communication.in_process_ranks``.

    Raises:
      ConfigError: an unknown key or a wrong value; ``TF_CONFIG`` names tasks that are no workers.
      PlanError: the saved plan cannot be read, or is for another number of ranks.
      ClusterError: the ranks cannot be connected; or ``TF_CONFIG`` names several workers, and nothing has started ranks
        for them; or a second call has a ``plan`` or ``solo``, or changes keys that say how ranks are connected, or the
        ranks run programs of their own.
    """
    if ranks is not None:
        config = config if isinstance(config, Config) else Config(config or {})
        config = config.but({"communication.in_process_ranks": ranks})
    if elastic:
        config = config if isinstance(config, Config) else Config(config or {})
        config = config if config["fault.elastic"] else config.but({"fault.elastic": "memory"})
    going_on = process.context
    if going_on is not None and going_on.planning.own_programs is None and not plan and not solo:
        begin_again(config)
        return
    _begin(config, plan, own_programs=False, solo=solo)


def init_own_programs(config: Config | Mapping[str, Any] | None = None) -> None:
    """Starts Whale where each rank runs a program of its own with explicit exchanges, as scripts for Horovod do;
    collective.

    As ``init``, but programs are not divided, and each rank keeps its own random states of Python, NumPy and
    TensorFlow.

    Raises:
      ConfigError: as ``init``, and with several ranks in one process.
      ClusterError: the ranks cannot be connected, or Whale runs already.
    """
    config = config if isinstance(config, Config) else Config(config or {})
    if _is_in_process(config) and config["communication.in_process_ranks"] > 1:
        raise ConfigError(
            "ranks that share one process cannot each run a program of their own",
            given=f"communication.in_process_ranks={config['communication.in_process_ranks']}",
            expected="a process for each rank",
            action="start the ranks with `whale run` or mpirun, and leave communication.in_process_ranks out",
        )
    _begin(config, "", own_programs=True, solo=True)


def _begin(
    config: Config | Mapping[str, Any] | None, plan: str | os.PathLike[str], own_programs: bool, solo: bool
) -> None:
    if process.context is not None:
        raise ClusterError(
            "wh.init was called twice",
            given="a second call in one process",
            expected="one call, before scopes and steps",
            action="call wh.shutdown() before the second wh.init(), or remove one of the two",
        )
    config = config if isinstance(config, Config) else Config(config or {})
    if config.origin("debug.log") != "default":
        set_level(config["debug.log"])
    place = process_place()
    _check_in_process(config, place)
    if place.launcher == "none" and not (solo or _is_in_process(config) or process.dry is not None):
        check_alone()
    if not joins():
        check_mesh(config, _find_planned_size(config, place))
    # Files are read before the ranks are connected, so that an unreadable file leaves nothing to undo.
    path = (process.dry.saved if process.dry is not None else "") or os.fspath(plan) or config["mesh.plan"]
    saved = read_saved_plan(path, _find_planned_size(config, place)) if path else None
    annotations = read_annotations(config["mesh.annotations"]) if config["mesh.annotations"] else {}
    process.runs += 1
    keep_sources_with_run()
    trace = None
    if process.dry is None:
        ranks = tuple(range(config["communication.in_process_ranks"])) if _is_in_process(config) else (place.rank,)
        trace = open_trace(config, place, ranks, process.runs)
    try:
        with open_span(trace, "wh.init", "init"):
            context = _start(config, place, f"whale{process.runs}", trace)
            if own_programs:
                context.planning.own_programs = OwnPrograms(local_ranks(context))
            elif context.has_other_processes or joins():
                _share_random_state(context, solo)
            elif context.size > 1:
                watch_in_process_training(context)
            if saved is not None and context.rank == 0:
                warn_of_other_devices(saved.cluster, context.gpus)
            if isinstance(saved, SavedPlan):
                context.planning.saved, context.planning.auto = saved, saved.chosen_strategy
            elif saved is not None:
                context.planning.described = saved, path
            context.solo = solo
            annotate(annotations)
            deferred.install(lambda size_bytes: not context.ended and context.should_defer(size_bytes))
            context.hooks.at_end.append(restart_streams())
    except BaseException as error:
        _undo()
        if trace is not None:
            trace.stop(f"wh.init failed: {type(error).__name__}")
        raise
    if trace is not None:
        for comm in context.comms:
            comm.trace_start(trace.descriptor)
    if process.runs == 1:
        atexit.register(_end_at_exit)
    log.debug(f"rank {context.rank} of {context.size} takes part ({place.launcher})")


def _undo() -> None:
    """Reverts an ``init`` that failed on this rank, and notifies the ranks on which it succeeded that this one has
    left.
    """
    context, process.context = process.context, None
    if context is None:
        return
    context.ended = True
    for taken in (context.seeds, context.outside):
        if taken is not None:
            taken.take_back()
    if context.notice is not None:
        context.notice.stop()
    for comm in context.comms:
        comm.leave()
    if context.watch is not None:
        context.watch.stop()


def check_mesh(config: Config, size: int) -> None:
    """Raises an error if ``size`` ranks are not a multiple of the configured mesh; done on each rank before it connects
    to the others.

    Raises:
      PlanError: says where the mesh was set.
    """
    mesh = config["mesh"]
    if size % mesh.size:
        raise PlanError(
            "the ranks do not fill the mesh",
            given=f"mesh {mesh} ({config.origin('mesh')}), {size} rank{'s' * (size != 1)}",
            expected=f"a multiple of {mesh.size} ranks",
            action=f"change the key mesh, or start a multiple of {mesh.size} ranks (whale run -np)",
        )


def _find_planned_size(config: Config, place: ProcessPlace) -> int:
    """Returns the number of ranks that programs will be planned for."""
    if process.dry is not None:
        return process.dry.size
    return config["communication.in_process_ranks"] if _is_in_process(config) else place.size


def _is_in_process(config: Config) -> bool:
    return bool(config["communication.in_process_ranks"])


def _check_in_process(config: Config, place: ProcessPlace) -> None:
    if not _is_in_process(config) or process.dry is not None:
        return
    if place.size > 1:
        raise ConfigError(
            "all ranks are asked for in one process, but a launcher started several processes",
            given=f"{place.size} processes ({place.launcher})",
            expected="one process",
            action="start the script alone, or leave communication.in_process_ranks out",
        )
    if config["batch.mode"] == "local":
        raise ConfigError(
            "ranks that share one process cannot each have a batch of their own",
            given='communication.in_process_ranks with batch.mode "local"',
            expected='batch.mode "global": the script runs once and passes one batch',
            action="start the ranks with `whale run`, or leave batch.mode out",
        )


def _start(config: Config, place: ProcessPlace, name: str, trace: Trace | None) -> Context:
    """Connects the ranks and returns the run's context, which is set in ``process`` as soon as a failure would have
    something to revert.
    """
    after_horovod = horovod.is_running()
    ranks: tuple[int, ...]
    comms: Sequence[whale_ops.Communicator]
    watch: LauncherWatch | None = None
    apart: SocketBootstrap | None = None
    if process.dry is not None:
        size, ranks, comms = 1, (0,), ()
    elif _is_in_process(config):
        size = config["communication.in_process_ranks"]
        ranks = tuple(range(size))
        comms = whale_ops.connect_in_process(name, size, hosts=config.network.hosts) if size > 1 else ()
    elif place.size > 1 and not joins():
        watch = LauncherWatch(config, trace)
        try:
            comms, apart = connect_ranks(name, place, config, watch)
        except BaseException:
            watch.stop()
            raise
        watch.look_after(comms[0])
        size, ranks = comms[0].size, (comms[0].rank,)
    elif joins():
        if not config["fault.elastic"]:
            raise ConfigError(
                "a process cannot join a run that is not elastic",
                given="a process that `whale run --hosts-from` has started, and elastic=False",
                expected="the configuration of the other ranks",
                action="call wh.init(elastic=True) in all of them",
            )
        watch = LauncherWatch(config, trace)
        size, ranks, comms = 1, (0,), ()
        if config["communication.shared_memory"] == "tensors":
            share_tensors_if_possible(config, place)
        watch.look_after(None)
    else:
        size, ranks, comms = 1, (0,), ()
        if own_descriptor(CONTROL_VARIABLE) is not None or config["fault.notice_s"]:  # `whale run` hears of a lone rank
            watch = LauncherWatch(config, trace)
            watch.look_after(None)
    process.context = Context(
        config, place, size, ranks, comms, name, watch, trace,
        planning=PlanningState(dry=process.dry, meter=process.meter), after_horovod=after_horovod, apart=apart,
    )  # fmt: skip
    if config["communication.backend"] == "horovod" and process.dry is None:
        horovod.start(config, size, ranks)
    if process.dry is None and config["fault.notice_s"]:
        process.context.notice = PreemptionNotice()
        process.context.hooks.at_end.append(process.context.notice.stop)
    if process.dry is None and config["fault.elastic"] and (size > 1 or joins()):
        process.context.elastic = Elastic(process.context)
    if process.dry is None:
        process.context.own_gpu = own = device_exchange.start_device_exchange(config, place, size, comms)
        if process.context.has_other_processes:
            process.context.gpus = tuple(device_exchange.find_gpus(process.context.comms[0], own))
            process.context.own_gpu = process.context.gpus[process.context.rank]
            if process.context.rank == 0:
                precision = config["precision.compute_dtype"]
                for line in device_exchange.describe_unequal_precision(process.context.gpus, precision):
                    log.warning(line)
    for comm in comms:
        configure_communicator(comm, config)
    _find_topology(process.context)
    return process.context


def _find_topology(context: Context) -> None:
    """Finds the hosts of the ranks, and measures the links between three or more hosts if mesh axes are assigned by
    them. Collective.

    Nothing is measured between two hosts, whose only link leaves no choice (the search of ``auto_parallel`` measures it
    where it matters), nor where ``mesh.profile`` names a file of ``whale profile --hosts`` that has these links.

    Raises:
      ClusterError: the file that ``mesh.profile`` names cannot be read.
    """
    if context.size == 1 or context.planning.dry is not None:
        return
    if not context.has_other_processes:
        context.topology = make_topology(name_emulated_hosts(context.config, context.size))
        return
    found = find_topology(context.comms[0], context.place, context.config)
    if found is not None and (path := context.config["mesh.profile"]):
        # Each rank may have a file of its own: the first one's counts.
        mine = None
        if context.rank == 0:
            links = read_profile(path).find_links(found.names)
            mine = pack([(*pair, link.exchange_s, link.bytes_per_s) for pair, link in links.items()])
        said = unpack(context.comms[0].broadcast_bytes("whale/topology/profile", mine, 0, TURN_TIMEOUT_S))
        context.topology = replace(found, links={(i, j): Link(*figures) for i, j, *figures in said})
        if said:
            return
    is_laid = sum(size > 1 for size in context.mesh.values()) > 1 or context.mesh.size < context.size
    if found is not None and len(found.names) > 2 and context.mesh and is_laid:
        found = measure_links(context.comms[0], found)
    context.topology = found


def shutdown() -> None:
    """Ends Whale in this process: notifies the other ranks that this one leaves, and frees communicators. A second call
    does nothing.

    If Horovod was started after Whale, it is ended too, because MPI ends with Whale's last communicator. If Horovod was
    started first, it goes on, and ends MPI itself.
    """
    try:
        while process.context is not None and process.context.hooks.before_shutdown:
            process.context.hooks.before_shutdown.pop()()
    finally:
        _end()


def _end() -> None:
    context, process.context = process.context, None
    if context is None:
        return
    context.ended = True
    _conclude(context)
    context.variables.end(context)
    for put_back in context.hooks.at_end:
        put_back()
    if context.seeds is not None:
        context.seeds.take_back()
    if context.outside is not None:
        context.outside.take_back()
    if (
        context.planning.saved is not None
        and not context.planning.saved.used
        and context.planning.dry is None
        and context.rank == 0
    ):
        log.warning(
            f"the saved plan {context.planning.saved.path} was not used: no step of this run is the one that it "
            "was made for; make the plan again with `whale plan`"
        )
    if context.planning.dry is None and context.rank == 0 and (missing := describe_unmatched(context)):
        log.warning(missing)
    if not context.after_horovod:
        horovod.stop()  # MPI ends with the last communicator, and must not end under Horovod's thread
    if context.watch is not None:
        context.watch.tell_counters()
    with open_span(context.trace, "wh.shutdown", "end"):
        for comm in context.comms:
            comm.close_device()
            comm.leave()
    if context.watch is not None:
        context.watch.stop()
    _end_trace(context, "end")


def _conclude(context: Context) -> None:
    """Makes the final checks of a run: whether this rank trained without the others, and whether trainable variables
    are equal on all ranks.
    """
    if (error := find_unsynchronized_training(context)) is not None:
        process.alone = str(error)
    if context.watch is None or context.outside is None or context.solo:
        return
    outside = context.outside
    if not context.watch.tell_end(
        process.alone, lambda: context.variables.describe_held(context, outside, trainable=True)
    ):
        if process.alone:
            log.warning(process.alone)


def check_replicas() -> int:
    """Compares the copies of variables between ranks: those that the run's programs use, and others that were trained;
    collective.

    The others are trainable, of floating point, and were trained after ``wh.init``. Variables that no program uses and
    that were not trained are not compared: the first step that uses one sends rank 0's value to all.

    Returns:
      how many variables were compared; the first rank logs it too.

    Raises:
      CommError: copies differ from the first rank's; names the variables and ranks.
    """
    context = require_current("wh.check_replicas()")
    compared = context.variables.check(context, context.outside)
    if context.rank == 0:
        log.info(f"{compared} variables are equal on all ranks")
    return compared


def _end_at_exit() -> None:
    """Ends Whale when the process exits; after an uncaught exception or a failed step, notifies the other ranks of the
    failure instead.
    """
    context = process.context
    error = getattr(sys, "last_value", None)
    if context is None:
        if error is None:
            _end_alone()
        return
    if error is None and not context.failed:
        try:
            shutdown()
        except WhaleError as e:
            log.error(str(e))
            os._exit(1)
        _end_alone()
        return
    failure = "failed" + (f": {type(error).__name__}: {error}" if error else "")
    for comm in context.comms:
        comm.abort(f"rank {context.rank} {failure}")
    _end_trace(context, failure)
    if context.watch is not None:
        context.watch.tell_counters()


def _end_alone() -> None:
    """Ends the process with exit code 2 if the run trained but Whale distributed nothing; otherwise returns."""
    if process.alone:
        whale_ops.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)


def _end_trace(context: Context, reason: str) -> None:
    if context.trace is not None:
        for comm in context.comms:
            comm.trace_stop()
        context.trace.stop(reason)


def _share_random_state(context: Context, solo: bool) -> None:
    """Gives every rank the random states of rank 0, and one number from which all seeds follow that the script does not
    give.

    Python's string hashes cannot be changed in a running process; rank 0 warns where they differ.

    Raises:
      ClusterError: ranks run other versions of Whale, TensorFlow or Python.
    """
    first = context.rank == 0 and not joins()
    state = read_random_state() if first else b""
    own = socket.gethostname(), read_versions(), hash(_ANY_TEXT), state, describe_rounding()
    if first and context.elastic is not None and context.elastic.is_keeping_commits:
        context.watch.tell({"start": pack(own).hex()})  # type: ignore[union-attr]
    if joins():
        everyone = [unpack(bytes.fromhex(context.watch.start())), own]  # type: ignore[union-attr]
    else:
        timeout_s = context.config["debug.check_timeout_s"]
        everyone = [unpack(one) for one in context.comms[0].allgather_bytes("whale/random", pack(own), timeout_s)]
    refuse_other_versions([RankVersions(host, versions) for host, versions, *_ in everyone])
    said = everyone[0][3]
    roundings = {one[4] for one in everyone}
    # A process that joins later may have another processor than the present ranks.
    context.rounds_otherwise = len(roundings) > 1 or "" in roundings or context.elastic is not None
    if not joins():
        context.other_hashes = tuple(r for r, one in enumerate(everyone) if one[2] != everyone[0][2])
        if first and context.other_hashes:
            log.warning(
                "Python's string hashes differ between the ranks, and with them the order of sets, and what the script "
                "makes in that order: start the ranks with PYTHONHASHSEED=0 in their environment, or by `whale run`"
            )
    number = compute_state_number(said) if first else take_random_state(said)
    context.seeds = CommonSeeds(number)
    if solo or context.has_local_batch:
        context.seeds.leave_draws_to_ranks()
    context.outside = ExternalUpdates()


# TensorFlow removes the Python files that AutoGraph writes only when a process ends in order.
def keep_sources_with_run(environment: Mapping[str, str] | None = None) -> None:
    """Makes AutoGraph write its generated Python into the temporary folder of `whale run`, if that started this
    process.

    A rank that is killed, as the others are after a fault, would otherwise leave these files in the system's temporary
    folder.

    Args:
      environment: environment variables; None: this process's.
    """
    folder = (os.environ if environment is None else environment).get(FILES_VARIABLE)
    if folder:
        loader.tempfile = _Files(os.path.join(folder, _FOLDER))


class _Files:
    """Replaces the module ``tempfile`` inside AutoGraph, and creates files in a given folder while that has room."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def NamedTemporaryFile(self, **options: Any) -> Any:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            free = os.statvfs(self._folder)
            folder = self._folder if free.f_bavail * free.f_frsize >= _FREE_BYTES else None
        except OSError:
            folder = None
        return tempfile.NamedTemporaryFile(**{"dir": folder, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(tempfile, name)


def begin_again(config: Config | Mapping[str, Any] | None) -> bool:
    """Gives the present run another configuration; returns False if there is no run.

    Variables, the ranks' connections and their random states stay; scopes, annotations, loss scales and the chosen
    strategy are forgotten.

    Raises:
      ConfigError: an unknown key or a wrong value.
      ClusterError: a key would change how the ranks are connected.
    """
    context = find_running()
    if context is None:
        return False
    config = config if isinstance(config, Config) else Config(config or {})
    for key in config:
        if key.startswith(_CONNECTED) and config[key] != context.config[key] and key != "communication.wire_dtype":
            raise ClusterError(
                "a second wh.init cannot change how the ranks are connected",
                given=f"{key}={config[key]!r} in a second init; the first had {context.config[key]!r}",
                expected="the same value",
                action="set it in the first init, or call wh.shutdown() in between",
            )
    if config.origin("debug.log") != "default":
        set_level(config["debug.log"])
    _forget(context)
    context.config = config
    return True


def _forget(context: Context) -> None:
    context.scoping, context.scaling = ScopeState(), LossScales()
    context.planning.auto = context.planning.saved = context.planning.meaning = context.planning.forecast = None
