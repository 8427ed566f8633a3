"""Measures whether substitutions of kernels are faster on this machine, after runs, and says which ones are not.

A run takes every substitution that is not known to lose. When a run of ten seconds or more ends, its first process of
each host measures those that were never measured there: each alone, before and after, on random values, for half a
second at most. What there is no time for waits for later runs; `whale profile SCRIPT` measures all of a script's.
Figures are kept in the folder of plans (`mesh.plan_cache`), for the processor, its cap, the threads and the versions
that they were measured with.

Decision: 0176.
"""

from __future__ import annotations

import contextlib
import os
import time
from hashlib import blake2b

import msgspec

from whale.distributed.cache_files import CacheFolder, DamagedFileError, find_folder
from whale.errors import WhaleError
from whale.ir.program import Program
from whale.ir.text import format_program, parse_program
from whale.kernels.choices import Substitution
from whale.kernels.substitute import list_substitutions
from whale.log import log
from whale.passes.settings import PlanSettings
from whale.runtime.compile.offload import has_compute_device
from whale.runtime.compile.plan_cache import code_digest
from whale.runtime.context import Context, KernelTimes
from whale_ops.processor import describe_processor

MOST_S, LEAST_RUN_S = 0.5, 10.0  # of measurements at the end of a run, and of such a run
# A substitution loses if it takes so many times as long, and so much longer: less is noise, or the next run's luck.
LOSES, LOSES_S = 1.05, 2e-6
# What seems to lose after some rounds may have been interrupted: it has more of them.
ROUNDS, MOST_ROUNDS, ROUND_S = 5, 25, 4e-4
MOST_WAITING, MOST_TEXT = 500, 1 << 16  # a longer program holds data
MOST_PROGRAMS = 16  # of a run, which are held until it ends


class KernelFile(msgspec.Struct):
    """Keeps what was measured of a machine's kernels.

    Attributes:
      measured: name of a substitution -> seconds before and after; both 0: it cannot be measured.
      waiting: those to be measured: name, and the programs before and after, as text.
    """

    measured: dict[str, tuple[float, float]] = {}
    waiting: dict[str, tuple[str, str]] = {}

    @property
    def declined(self) -> tuple[str, ...]:
        """Returns the names of the substitutions that lose, sorted."""
        return tuple(sorted(name for name, (before_s, after_s) in self.measured.items() if loses(before_s, after_s)))


def loses(before_s: float, after_s: float) -> bool:
    """Tells whether a substitution takes longer than what it replaces."""
    return after_s > LOSES * before_s and after_s - before_s > LOSES_S


class MachineKernels:
    """The figures of a machine's kernels, in a run.

    Attributes:
      declined: names of the substitutions that this run does not take, if it is planned here.
    """

    def __init__(self, files: CacheFolder, name: str) -> None:
        self._files, self._name, self._start_s = files, name, time.monotonic()
        self._compiled: list[tuple[Program, PlanSettings]] = []
        self.declined = self.read_file().declined

    def note_program(self, program: Program, settings: PlanSettings) -> None:
        """Notes a program of this process's first rank, before kernels are substituted in it."""
        if len(self._compiled) < MOST_PROGRAMS:
            self._compiled.append((program, settings))

    def measure(self) -> None:
        """Measures what is not known of the noted programs, and of those of runs before, if the run was long enough for
        it.
        """
        if time.monotonic() - self._start_s >= LEAST_RUN_S:
            self.measure_within(MOST_S)

    def measure_within(self, budget_s: float) -> int:
        """Does the same in so many seconds; returns how many substitutions were measured."""
        kept = self.read_file()
        found = self._list_waiting(kept)
        end_s = time.monotonic() + budget_s
        done = dict[str, tuple[float, float]]()
        for one in found:
            if time.monotonic() >= end_s:
                break
            done[one.name] = _measure(one)
        if not done and len(found) == len(kept.waiting):
            return 0
        kept = self.read_file()  # another run may have ended meanwhile
        kept.measured.update(done)
        kept.waiting.update({one.name: (format_program(one.before), format_program(one.after)) for one in found})
        kept.waiting = {
            name: texts
            for name, texts in kept.waiting.items()
            if name not in kept.measured and sum(map(len, texts)) <= MOST_TEXT
        }
        for name in list(kept.waiting)[MOST_WAITING:]:
            del kept.waiting[name]
        with contextlib.suppress(OSError):  # `put_kept` of plans says why
            self._files.put(self._name, msgspec.msgpack.encode(kept))
        lost = [name for name, (before_s, after_s) in done.items() if loses(before_s, after_s)]
        log.debug(f"{len(done)} kernels measured, {len(kept.waiting)} wait; slower here: {'; '.join(lost) or 'none'}")
        return len(done)

    def _list_waiting(self, kept: KernelFile) -> list[Substitution]:
        found = {name: _parse(name, texts) for name, texts in kept.waiting.items() if name not in kept.measured}
        for program, settings in self._compiled:
            for one in list_substitutions(program, settings):
                if one.name not in kept.measured:
                    found.setdefault(one.name, one)
        self._compiled.clear()
        return list(found.values())

    def read_file(self) -> KernelFile:
        """Returns what is kept now."""
        try:
            data = self._files.get(self._name)
            return KernelFile() if data is None else msgspec.msgpack.decode(data, type=KernelFile)
        except (OSError, ValueError, DamagedFileError):
            return KernelFile()


def _parse(name: str, texts: tuple[str, str]) -> Substitution:
    return Substitution(name, *map(parse_program, texts))


def _measure(one: Substitution) -> tuple[float, float]:
    """Returns the seconds before and after, the least of some rounds in turns; 0, 0: it cannot be run alone."""
    import tensorflow as tf

    from whale.runtime.compile.measured_call import compile_whole_step

    try:
        calls = [compile_whole_step(one.before), compile_whole_step(one.after)]
        once_s = []
        for call in calls:
            call()
            start_s = time.perf_counter()
            call()
            once_s.append(time.perf_counter() - start_s)
        repeats = max(1, int(ROUND_S / max(1e-6, *once_s)))
        least_s = [float("inf")] * 2
        for number in range(MOST_ROUNDS):
            for i, call in enumerate(calls):
                start_s = time.perf_counter()
                for _ in range(repeats):
                    call()
                least_s[i] = min(least_s[i], (time.perf_counter() - start_s) / repeats)
            if number >= ROUNDS - 1 and not loses(*least_s):
                break
        return least_s[0], least_s[1]
    except (tf.errors.OpError, WhaleError):
        return 0.0, 0.0


def kernel_times_of(context: Context) -> KernelTimes | None:
    """Returns the figures of this machine's kernels; None: none of them are used here, or nothing is kept."""
    planning = context.planning
    folder = find_folder(context.config["mesh.plan_cache"]) if planning.dry is None else None
    if folder is None or has_compute_device():
        return None
    if planning.kernels is None:
        planning.kernels = known = MachineKernels(CacheFolder(folder), name_file())

        def measure() -> None:
            if not context.failed:
                known.measure()

        if context.place.local_rank == 0:
            context.hooks.before_shutdown.insert(0, measure)
    return planning.kernels


def name_file(threads: int | None = None) -> str:
    """Returns the name under which figures are kept of this processor, with so many threads.

    Args:
      threads: that compute one operation; None: this process's.
    """
    import tensorflow as tf

    threads = threads or tf.config.threading.get_intra_op_parallelism_threads()
    where = describe_processor(), len(os.sched_getaffinity(0)), threads, code_digest()
    return f"{blake2b(repr(where).encode(), digest_size=16).hexdigest()}.kernels"
