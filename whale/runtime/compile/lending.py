"""Measures, for `auto_parallel`, what a step takes if one rank computes it on the cores of all ranks of the host.

TensorFlow creates its thread pools when a process starts, with a rank's share of the cores. A step that one rank
computes for all therefore runs on separate pools of Whale (``WhaleCall``), whose threads may use the cores of all
ranks; meanwhile the other ranks wait for its results, asleep.

Decisions: 0052, 0190, 0200.
"""

from __future__ import annotations

import time
from ctypes import c_int
from dataclasses import dataclass
from itertools import chain

import tensorflow as tf

from whale.cgroup import cpu_quota
from whale.errors import ProgramError
from whale.ir.program import Program
from whale.passes.memory.step_bytes import predict_at_most_bytes
from whale.passes.settings import PlanSettings
from whale.runtime.compile.measured_call import compile_program_alone, draw_operands
from whale.runtime.compile.memory_plan import limit_bytes
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.plan_cache import know_machines
from whale.runtime.context import Context
from whale_ops.memory import load_library
from whale_ops.processor import count_threads

# A step is run at least RUNS times, and for at least RUNS_S seconds.
RUNS, RUNS_S = 3, 0.1


@dataclass(frozen=True)
class HostCores:
    """Describes the cores of the host on which all ranks of a run are; implements
    `whale.planner.graph_search.environment.Lending`.

    Attributes:
      threads: number of threads of one rank on the cores of all.
      free_bytes: memory for a second copy of a step, to be measured beside the script.
    """

    threads: int
    free_bytes: float

    def measure_step(self, program: Program) -> float:
        """Returns the seconds of a step that one rank computes on the cores of all ranks, on random values: the least
        of several runs.

        Raises:
          ProgramError: the step takes arguments for which no random values can be made, fails on them, or does not fit
            into memory beside the script.
        """
        needed = predict_at_most_bytes(program, 0, PlanSettings(size=1))
        if needed > self.free_bytes:
            raise ProgramError(
                "a second copy of the step, to be timed on the cores of all ranks, does not fit into memory",
                given=f"{needed} bytes predicted",
                expected=f"at most {self.free_bytes:.0f} bytes, which are free on this host",
                action="none is needed: another strategy is chosen; to try this one, use a smaller batch",
            )
        try:
            values, variables = draw_operands(program)
            operands = [*values, *(v.handle for v in variables)]
            call = compile_program_alone(program, operands, len(program.outputs), self.threads)
            call()
            least_s, runs = float("inf"), 0
            end_s = time.perf_counter() + RUNS_S
            while runs < RUNS or time.perf_counter() < end_s:
                runs += 1
                start_s = time.perf_counter()
                call()
                least_s = min(least_s, time.perf_counter() - start_s)
            return least_s
        except tf.errors.OpError as error:
            raise ProgramError(
                "the step cannot be timed, since it fails on random values",
                given=str(error).splitlines()[0],
                expected="a step that runs on random arguments and variables",
                action="none is needed: another strategy is chosen",
            ) from error


def find_lending(program: Program, context: Context) -> HostCores | None:
    """Returns the cores on which the first rank could compute for all ranks; None if ranks may not lend their cores
    (``may_lend``), or have no more cores together than the first one has. Collective between processes.
    """
    if not may_lend(context):
        return None
    cores = know_machines(context).cores
    own = count_threads()
    threads = min(own * context.size, len(set(chain(*cores))), int(cpu_quota() or own * context.size))
    if threads <= own:
        return None
    share_cores(context)
    limit, _ = limit_bytes(context)
    held = sum(v.type.bytes for v in program.variables if v.type.is_static)
    return HostCores(threads, limit - held)


def may_lend(context: Context) -> bool:
    """Returns True if the ranks are CPU-only processes on one host that run one program together and not elastically,
    so that they may lend their cores.
    """
    if not context.has_other_processes or context.planning.dry is not None or context.elastic is not None:
        return False
    together = context.place.local_size == context.size
    return together and not has_compute_device() and context.planning.own_programs is None


def share_cores(context: Context) -> None:
    """Allows the threads that this rank borrows to run on the cores of all ranks of its host. Collective between
    processes.
    """
    if not context.has_other_processes:
        return
    known = know_machines(context)
    hosts = [machine.partition(" ")[2] for machine in known.machines]
    here = (own for own, host in zip(known.cores, hosts) if host == hosts[context.rank])
    cores = sorted(set(chain(*here)))
    load_library().whale_lend_cores((c_int * len(cores))(*cores), len(cores))
