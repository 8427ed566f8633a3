"""Caches plans, and strategies that a search found, for later runs of the same program: the key ``mesh.plan_cache``.

The cache key of a plan covers all that decides it: the program (its fingerprint, its variables' names and scopes), the
settings, and the code that plans. The key of a strategy covers the machines of all ranks as well; a cached strategy is
used only while an exchange between their hosts takes about as long as it did. The ranks' computing speeds are not
measured again. A cached plan is checked like one from a plan file, except for the programs that its ranks would run,
since the checksum shows that this code made it.

Decisions: 0080, 0151.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path

import msgspec

import cost_model
import whale_ops
from whale.distributed.cache_files import CacheFolder, DamagedFileError, find_folder
from whale.errors import WhaleError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.plan import Plan, plan_from_json
from whale.ir.program import Program
from whale.ir.strategy import ChosenStrategy
from whale.log import log
from whale.partition.verify_saved_plan import CONTRADICTIONS, list_illegal
from whale.passes.settings import PlanSettings
from whale.runtime.compile.memory_plan import limit_bytes
from whale.runtime.context import Context, RunMachines
from whale_ops.processor import count_threads

# An exchange of _PROBE_BYTES between hosts is measured several times, and the fastest counts. Quick exchanges are tried
# more often, since on a busy machine one may be slow by accident. Links count as the same unless an exchange takes more
# than _OTHER_LINK times as long and _OTHER_LINK_S seconds longer.
_PROBE_BYTES, _LEAST_PROBES, _MOST_PROBES, _QUICK_S = 1 << 18, 3, 16, 0.02
_OTHER_LINK, _OTHER_LINK_S = 3.0, 0.5e-3


class KeptStrategy(msgspec.Struct, frozen=True):
    """Represents the content of a cache file: a strategy that a search found.

    Attributes:
      exchange_s: seconds of an exchange between hosts when the strategy was chosen; 0: all ranks were on one host.
    """

    chosen: ChosenStrategy
    exchange_s: float


def load_plan(program: Program, context: Context, settings: PlanSettings) -> Plan | None:
    """Returns the plan that an earlier run cached for this program and these settings; None: there is none, or it is
    not legal.
    """
    if (files := files_of(context, settings)) is None:
        return None
    name = _plan_name(program, settings)
    if (data := get_kept(files, name, f"the plan of `{program.name}`")) is None:
        return None
    try:
        plan = plan_from_json(data)
        same = plan.fingerprint == compute_fingerprint(program) and plan.ranks == settings.size
        if same and not list_illegal(program, plan, settings):
            return plan
    except (WhaleError, *CONTRADICTIONS):
        pass
    _say_and_forget(files, name, program)
    return None


def keep_plan(program: Program, context: Context, settings: PlanSettings, plan: Plan) -> None:
    """Caches the plan of a program for later runs, if the run caches plans."""
    if (files := files_of(context, settings)) is not None:
        put_kept(files, context, _plan_name(program, settings), plan.to_json())


def load_strategy(program: Program, context: Context, settings: PlanSettings) -> ChosenStrategy | None:
    """Returns the strategy that `auto_parallel` found in an earlier run on these machines; None: there is none, or the
    link between hosts has changed.
    """
    if (files := files_of(context, settings)) is None:
        return None
    name = context.planning.kept_as = _strategy_name(program, context, settings)
    if (data := get_kept(files, name, f"the strategy for `{program.name}`")) is None:
        return None
    try:
        kept = msgspec.json.decode(data, type=KeptStrategy)
    except ValueError:
        _say_and_forget(files, name, program)
        return None
    if is_same_link(kept.exchange_s, context):
        return kept.chosen
    now_ms, then_ms = 1e3 * know_machines(context).exchange_s, 1e3 * kept.exchange_s
    log.info(
        f"auto_parallel: hosts exchange {_PROBE_BYTES >> 10} KB in {now_ms:.3g} ms, and took {then_ms:.3g} ms when an "
        "earlier run chose a strategy: the search is repeated"
    )
    return None


def keep_strategy(program: Program, context: Context, settings: PlanSettings, chosen: ChosenStrategy) -> None:
    """Caches the strategy of a program for later runs, if the run caches plans."""
    if (files := files_of(context, settings)) is not None:
        kept = KeptStrategy(chosen, know_machines(context).exchange_s)
        context.planning.kept_as = _strategy_name(program, context, settings)
        put_kept(files, context, context.planning.kept_as, msgspec.json.encode(kept))


def correct_strategy(chosen: ChosenStrategy | None, step: str, context: Context, settings: PlanSettings) -> None:
    """Replaces the cached strategy of the run by another one, and removes the cached lowered step that was made under
    it.

    Args:
      chosen: the other strategy; None: the next run searches anew.
      step: the name under which the lowered step is cached; "": it is not.
    """
    if (files := files_of(context, settings)) is None:
        return
    for name in filter(None, (step, context.planning.kept_as)):
        with contextlib.suppress(OSError):
            files.remove(name)
    if chosen is not None and context.planning.kept_as:
        kept = KeptStrategy(chosen, know_machines(context).exchange_s)
        put_kept(files, context, context.planning.kept_as, msgspec.json.encode(kept))


def folder_of(context: Context) -> Path | None:
    """Returns the cache folder of the run; None: plans are not cached, or the run is a dry one."""
    return None if context.planning.dry is not None else find_folder(context.config["mesh.plan_cache"])


def _plan_name(program: Program, settings: PlanSettings) -> str:
    return f"{_digest(compute_fingerprint(program), program.name, program.variables, settings)}.plan"


def _strategy_name(program: Program, context: Context, settings: PlanSettings) -> str:
    machines = know_machines(context).machines
    settings = settings.but(fuse__declined=())  # slow kernels are found when runs end, and do not change the strategy
    return f"{_digest(compute_fingerprint(program), program.name, program.variables, settings, machines)}.strategy"


def know_machines(context: Context) -> RunMachines:
    """Returns the machines of all ranks, gathered and measured when first asked for; collective between
    processes then.
    """
    comm = context.comms[0] if context.has_other_processes and context.planning.dry is None else None
    if context.planning.machines is not None and context.planning.machines.comm is comm:
        return context.planning.machines
    mine = f"{blake2b(repr(_machine(context)).encode(), digest_size=16).hexdigest()} {socket.gethostname()}"
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if comm is None:
        context.planning.machines = RunMachines((mine,), 0.0, comm, (cores,))
        return context.planning.machines
    timeout_s = context.config["debug.check_timeout_s"]
    told = comm.allgather_bytes(
        "whale/auto/machines", msgspec.json.encode((mine, cores)), timeout_s, "comparing the ranks' hosts"
    )
    machines, of_ranks = zip(*(msgspec.json.decode(one, type=tuple[str, tuple[int, ...]]) for one in told))
    tries_s: list[float] = []
    if len({one.partition(" ")[2] for one in machines}) > 1:
        slowest_s = 0.0  # on any rank, in the try before the last one
        while len(tries_s) < (_MOST_PROBES if slowest_s < _QUICK_S else _LEAST_PROBES):
            part = f"{tries_s[-1] if tries_s else 0.0:.6f}".encode().ljust(_PROBE_BYTES // comm.size)
            start_s = time.perf_counter()
            found = comm.allgather_bytes("whale/auto/link", part, timeout_s, "measuring the link between the hosts")
            tries_s.append(time.perf_counter() - start_s)
            slowest_s = max(map(float, found))
    context.planning.machines = RunMachines(machines, min(tries_s, default=0.0), comm, of_ranks)
    return context.planning.machines


def is_same_link(then_s: float, context: Context) -> bool:
    """Returns True if an exchange between hosts now takes about as long as ``then_s`` seconds."""
    now_s = know_machines(context).exchange_s
    slower, faster = max(then_s, now_s), min(then_s, now_s)
    return slower <= _OTHER_LINK * faster or slower - faster < _OTHER_LINK_S


def _machine(context: Context) -> tuple[object, ...]:
    """Returns the properties of this host (except its name) and the configuration keys on which the choice of
    `auto_parallel` depends, besides the program and the settings; part of the key of a cached strategy.
    """
    limit, _ = limit_bytes(context)
    config = {k: context.config[k] for k in ("pipeline.stages", "communication.in_process_ranks", "mesh.profile")}
    if config["mesh.profile"]:
        with contextlib.suppress(OSError):  # the search says what is wrong with it
            config["mesh.profile"] = Path(config["mesh.profile"]).read_bytes()
    host = platform.machine(), len(os.sched_getaffinity(0)), count_threads(), context.local_ranks, limit, _devices()
    return config, host, context.config.network.link


def _devices() -> list[str]:
    import tensorflow as tf

    return [device.name for device in tf.config.list_physical_devices()]


def _digest(*values: object) -> str:
    return blake2b(repr((*values, code_digest())).encode(), digest_size=16).hexdigest()


@cache
def code_digest() -> tuple[str, ...]:
    """Returns the version of the code: TensorFlow's and Python's versions, and a digest of the modification time and
    size of each source file.
    """
    import tensorflow as tf

    stamp = blake2b(digest_size=16)
    whale = Path(__file__).parents[2]
    for root in (str(whale), str(Path(cost_model.__file__).parent), str(Path(whale_ops.__file__).parent)):
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".yaml", ".so")):
                    found = os.stat(os.path.join(folder, name))
                    stamp.update(f"{folder[len(root) :]}/{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return tf.__version__, platform.python_version(), stamp.hexdigest()


def files_of(context: Context, settings: PlanSettings) -> CacheFolder | None:
    """Returns the run's cache folder; None: nothing is cached, or passes are being observed and must run."""
    folder = folder_of(context)
    return (
        None if folder is None or settings.observer.is_on else CacheFolder(folder)
    )  # passes run where they are watched


def get_kept(files: CacheFolder, name: str, what: str) -> bytes | None:
    """Returns the data cached under a name; None: there are none, or they are damaged, which is logged.

    Args:
      what: describes the data, for the warning.
    """
    try:
        return files.get(name)
    except OSError:
        return None  # `put_kept` logs the reason
    except DamagedFileError:
        log.warning(f"{what} in the cache (mesh.plan_cache) is damaged, and is made anew")
        return None


def put_kept(files: CacheFolder, context: Context, name: str, data: bytes) -> None:
    """Caches ``data`` under a name; if that fails, warns once in a run."""
    try:
        files.put(name, data)
    except OSError as error:
        if not context.reports.plans_not_kept:
            context.reports.plans_not_kept = True
            log.warning(f"plans are not kept for later runs ({error}); set mesh.plan_cache to another folder")


def _say_and_forget(files: CacheFolder, name: str, program: Program) -> None:
    log.warning(f"the plan of `{program.name}` in the cache (mesh.plan_cache) is not legal, and is made anew")
    with contextlib.suppress(OSError):
        files.remove(name)
