"""Lends the cores of a host's ranks to the first one: what they compute then is measured here, for `auto_parallel`.

TensorFlow makes its pools of threads when a process starts, with a rank's part of the cores. A step that one rank
computes for all runs on pools of ours beside these (``WhaleCall``), whose threads may be on the cores of all ranks; the
others wait for its results, asleep.

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

# A step is run so many times at least, and for so long.
RUNS, RUNS_S = 3, 0.1


@dataclass(frozen=True)
class HostCores:
    """The cores of the host on which all ranks of a run are; see `whale.planner.graph_search.environment.Lending`.

    Attributes:
      threads: of one rank on the cores of all.
      free_bytes: that a step's second copy may take.
    """

    threads: int
    free_bytes: float

    def measure_step(self, program: Program) -> float:
        """Returns the seconds of a step on random values with all threads; the least of a few.

        Raises:
          ProgramError: it takes what no random values can be made of, fails on them, or does not fit beside the script.
        """
        needed = predict_at_most_bytes(program, 0, PlanSettings(size=1))
        if needed > self.free_bytes:
            raise ProgramError("a second copy of the step does not fit into memory", given=f"{needed} bytes")
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
                "the step cannot be timed on random values, with which it fails", given=str(error).splitlines()[0]
            ) from error


def find_lending(program: Program, context: Context) -> HostCores | None:
    """Returns the cores that ranks may lend the first one; None: they may not, or have no more than it has.

    Collective between processes.
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
    """Tells whether the run's ranks may lend their cores, if these are more than the first one has."""
    if not context.has_other_processes or context.planning.dry is not None or context.elastic is not None:
        return False
    together = context.place.local_size == context.size
    return together and not has_compute_device() and context.planning.own_programs is None


def share_cores(context: Context) -> None:
    """Lets threads that this rank borrows run on the cores of all ranks of its host. Collective between processes."""
    if not context.has_other_processes:
        return
    known = know_machines(context)
    hosts = [machine.partition(" ")[2] for machine in known.machines]
    here = (own for own, host in zip(known.cores, hosts) if host == hosts[context.rank])
    cores = sorted(set(chain(*here)))
    load_library().whale_lend_cores((c_int * len(cores))(*cores), len(cores))
