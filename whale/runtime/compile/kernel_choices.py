"""Measures, when a run ends, whether kernel substitutions are faster on this machine, and lists those that are not.

A run uses every substitution that is not known to be slower. When a run of ten seconds or more ends, the first process
of each host measures those substitutions that were never measured there: each alone, before and after, on random
values, for half a second in all. What there is no time for waits for later runs; `whale profile SCRIPT` measures all of
a script's. The figures are cached in the folder of plans (`mesh.plan_cache`), for the processor, its CPU limit, the
number of threads and the software versions that they were measured with.

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

MOST_S, LEAST_RUN_S = 0.5, 10.0  # seconds of measurements at the end of a run, and of a run long enough for them
# A substitution loses if it takes LOSES times as long and LOSES_S seconds longer: a smaller difference is noise.
LOSES, LOSES_S = 1.05, 2e-6
# A substitution that seems to lose after ROUNDS rounds gets up to MOST_ROUNDS: it may have been interrupted.
ROUNDS, MOST_ROUNDS, ROUND_S = 5, 25, 4e-4
MOST_WAITING, MOST_TEXT = 500, 1 << 16  # waiting substitutions, and characters of one: longer programs hold data
MOST_PROGRAMS = 16  # programs of a run that are held until it ends


class KernelFile(msgspec.Struct):
    """Represents the cache file with what was measured of a machine's kernels.

    Attributes:
      measured: name of a substitution -> seconds before and after; both 0: it cannot be measured.
      waiting: name of a substitution that is still to be measured -> the programs before and after, as text.
    """

    measured: dict[str, tuple[float, float]] = {}
    waiting: dict[str, tuple[str, str]] = {}

    @property
    def declined(self) -> tuple[str, ...]:
        """Returns the names of the substitutions that are slower than what they replace, sorted."""
        return tuple(sorted(name for name, (before_s, after_s) in self.measured.items() if loses(before_s, after_s)))


def loses(before_s: float, after_s: float) -> bool:
    """Returns True if a substitution is slower than what it replaces: if it takes more than LOSES times as long, and
    more than LOSES_S seconds longer.
    """
    return after_s > LOSES * before_s and after_s - before_s > LOSES_S


class MachineKernels:
    """Holds, during a run, which kernel substitutions (Whale's fused kernels in place of TensorFlow's ops) are slower
    on this machine; implements ``KernelTimes``.

    Args:
      files: the cache folder.
      name: of the file in it (``name_file``).

    Attributes:
      declined: names of the substitutions that this run leaves out, if this rank plans.
    """

    def __init__(self, files: CacheFolder, name: str) -> None:
        self._files, self._name, self._start_s = files, name, time.monotonic()
        self._compiled: list[tuple[Program, PlanSettings]] = []
        self.declined = self.read_file().declined

    def note_program(self, program: Program, settings: PlanSettings) -> None:
        """Records a program of this process's first rank as it is before kernels are substituted, to be measured when
        the run ends.
        """
        if len(self._compiled) < MOST_PROGRAMS:
            self._compiled.append((program, settings))

    def measure(self) -> None:
        """Measures substitutions that were never measured, for MOST_S seconds, if the run was at least LEAST_RUN_S
        seconds long.
        """
        if time.monotonic() - self._start_s >= LEAST_RUN_S:
            self.measure_within(MOST_S)

    def measure_within(self, budget_s: float) -> int:
        """Measures substitutions of the recorded programs, and those left waiting by earlier runs, for ``budget_s``
        seconds; returns how many were measured.
        """
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
        log.debug(
            f"{len(done)} of Whale's kernels were timed against TensorFlow's, and {len(kept.waiting)} are still to be "
            f"timed; slower than TensorFlow's on this machine: {'; '.join(lost) or 'none'}"
        )
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
        """Returns the content of the cache file; an empty one if it is missing or damaged."""
        try:
            data = self._files.get(self._name)
            return KernelFile() if data is None else msgspec.msgpack.decode(data, type=KernelFile)
        except (OSError, ValueError, DamagedFileError):
            return KernelFile()


def _parse(name: str, texts: tuple[str, str]) -> Substitution:
    return Substitution(name, *map(parse_program, texts))


def _measure(one: Substitution) -> tuple[float, float]:
    """Returns the seconds that a program takes before and after one substitution of kernels, each the least of several
    alternating rounds; (0, 0) if it cannot be run by itself.
    """
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
    """Returns the figures of this machine's kernels, read once in a run; None: the ranks compute on accelerators, or
    nothing is cached.
    """
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
    """Returns the name of the cache file for kernels on this processor with so many threads.

    Args:
      threads: number of threads that compute one operation; None: this process's.
    """
    import tensorflow as tf

    threads = threads or tf.config.threading.get_intra_op_parallelism_threads()
    where = describe_processor(), len(os.sched_getaffinity(0)), threads, code_digest()
    return f"{blake2b(repr(where).encode(), digest_size=16).hexdigest()}.kernels"
