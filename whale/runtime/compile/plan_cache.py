"""Keeps plans, and strategies that a search found, for later runs of the same program: the key ``mesh.plan_cache``.

A plan is found by all that decides it: the program (its fingerprint, its variables' names and scopes), the settings,
and the code that plans. A strategy is found by the machines as well; what they computed and exchanged in a second when
it was made is part of it, and not measured again. A plan is checked as one out of a file is, but for what its ranks
would run, since the checksum says that it is what this code made.
"""

from __future__ import annotations

import contextlib
import os
import platform
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
from whale.runtime.context import Context


def kept_plan(program: Program, context: Context, settings: PlanSettings) -> Plan | None:
    """Returns the plan that an earlier run made; None: there is none."""
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
    """Keeps a plan for later runs."""
    if (files := files_of(context, settings)) is not None:
        put_kept(files, context, _plan_name(program, settings), plan.to_json())


def kept_strategy(program: Program, context: Context, settings: PlanSettings) -> ChosenStrategy | None:
    """Returns the strategy that `auto_parallel` found in an earlier run of these machines; None: there is none."""
    if (files := files_of(context, settings)) is None:
        return None
    name = _strategy_name(program, context, settings)
    if (data := get_kept(files, name, f"the strategy for `{program.name}`")) is None:
        return None
    try:
        return msgspec.json.decode(data, type=ChosenStrategy)
    except ValueError:
        _say_and_forget(files, name, program)
        return None


def keep_strategy(program: Program, context: Context, settings: PlanSettings, chosen: ChosenStrategy) -> None:
    """Keeps a strategy for later runs."""
    if (files := files_of(context, settings)) is not None:
        put_kept(files, context, _strategy_name(program, context, settings), msgspec.json.encode(chosen))


def folder_of(context: Context) -> Path | None:
    """Returns where plans are kept; None: they are not."""
    return None if context.planning.dry is not None else find_folder(context.config["mesh.plan_cache"])


def _plan_name(program: Program, settings: PlanSettings) -> str:
    return f"{_digest(compute_fingerprint(program), program.name, program.variables, settings)}.plan"


def _strategy_name(program: Program, context: Context, settings: PlanSettings) -> str:
    return (
        f"{_digest(compute_fingerprint(program), program.name, program.variables, settings, machine(context))}.strategy"
    )


def machine(context: Context) -> tuple[object, ...]:
    """Returns what of this host and of the configuration `auto_parallel` depends on, beside the program and the
    settings.
    """
    limit, _ = limit_bytes(context.config, context.local_ranks)
    config = {k: context.config[k] for k in ("pipeline.stages", "communication.in_process_ranks", "mesh.profile")}
    if config["mesh.profile"]:
        with contextlib.suppress(OSError):  # the search says what is wrong with it
            config["mesh.profile"] = Path(config["mesh.profile"]).read_bytes()
    host = platform.node(), platform.machine(), len(os.sched_getaffinity(0)), context.local_ranks, limit, _devices()
    return config, host, context.config.network.link


def _devices() -> list[str]:
    import tensorflow as tf

    return [device.name for device in tf.config.list_physical_devices()]


def _digest(*values: object) -> str:
    return blake2b(repr((*values, code_digest())).encode(), digest_size=16).hexdigest()


@cache
def code_digest() -> tuple[str, ...]:
    """Returns what tells one state of the code from another: versions, and a digest of each source's age and size."""
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
    """Returns where a run keeps what later ones take; None: nowhere."""
    folder = folder_of(context)
    return (
        None if folder is None or settings.observer.is_on else CacheFolder(folder)
    )  # passes run where they are watched


def get_kept(files: CacheFolder, name: str, what: str) -> bytes | None:
    """Returns what was kept under a name; logs it if that is damaged."""
    try:
        return files.get(name)
    except OSError:
        return None  # `put_kept` logs the reason
    except DamagedFileError:
        log.warning(f"{what} that was kept is damaged, and is made anew")
        return None


def put_kept(files: CacheFolder, context: Context, name: str, data: bytes) -> None:
    """Keeps ``data`` under a name; logs it once if it cannot."""
    try:
        files.put(name, data)
    except OSError as error:
        if not context.reports.plans_not_kept:
            context.reports.plans_not_kept = True
            log.warning(f"plans are not kept for later runs ({error}); plan_cache names another folder")


def _say_and_forget(files: CacheFolder, name: str, program: Program) -> None:
    log.warning(f"the plan that was kept of `{program.name}` is not legal, and is made anew")
    with contextlib.suppress(OSError):
        files.remove(name)
