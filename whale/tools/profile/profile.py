"""Implements `whale profile`: measures this machine's operations and exchanges, or a script's operations and step."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import tensorflow as tf

from cost_model.graph import machine_profile as tables
from cost_model.graph.machine import make_measured_machine
from cost_model.graph.machine_profile import Copies, Gpu, MachineProfile, Step
from cost_model.graph.predict import predict_ranks
from cost_model.graph.signature import dtype_of
from whale import python
from whale.cpu_load import BUSY, LoadMeter, format_load
from whale.distributed.cache_files import DEFAULT, CacheFolder, find_folder
from whale.distributed.links import format_link
from whale.errors import ClusterError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.ops import EXCHANGES, MEETINGS
from whale.ir.program import Node, Program, Ref
from whale.ir.topology import Link
from whale.ir.values import DType, TensorType, require_static_shape
from whale.partition.lower import lower_ranks
from whale.partition.mesh import plan_program
from whale.partition.spmd import partition_for_rank
from whale.passes.normalize.emitter import NodeEmitter
from whale.passes.pass_manager import make_plan
from whale.planner.graph_search.plan_prediction import Planned, rank_programs
from whale.runtime.compile.kernel_choices import MachineKernels, name_file
from whale.tools.dry_run import first_step
from whale.tools.profile import operations as measure
from whale.tools.profile.links import TOLD, Links
from whale.tools.profile.steps import measure_step_seconds
from whale_ops import gpu_driver

_JOINED = MEETINGS | {"WhaleCommunicator"}  # ops that only connect or order ranks, and carry no tensor

SIZES_BYTES = (1 << 16, 1 << 20, 1 << 24)
ROUNDS, COPIES = 5, 4

SECONDS_FOR_OPERATIONS = 25.0
SECONDS_FOR_LINKS = 120.0
SECONDS_FOR_KERNELS = 60.0
SECONDS_TO_END = 15.0
LEAST_PAUSE_S = 3e-4  # shorter pauses of a thread are interrupts
_WATCH = """
import sys, time
clock, least = time.perf_counter, float(sys.argv[1])
last = clock()
end = last + 0.6
while last < end:
    now = clock()
    if now - last > least:
        print(now - last)
    last = now
"""


def measure_machine(
    out: Path, cores: float, memory_gb: float, ranks: int, say: Callable[[str], None], hosts: Sequence[str] = ()
) -> MachineProfile:
    """Measures operations of sample programs, and exchanges between ranks; writes and returns the profile.

    Args:
      out: path of the profile.
      cores, memory_gb: what this process may use of the machine, to be recorded.
      ranks: number of ranks that exchange.
      say: called with lines of progress.
      hosts: the host of each rank, the first one being this host; (): all ranks are here.

    Raises:
      ClusterError: the ranks did not start.
    """
    meter = LoadMeter()
    where = f" on {', '.join(hosts)}" if hosts else ""
    say(f"exchanges between {ranks} ranks{where}: some 20 s on an idle machine, {SECONDS_FOR_LINKS:g} s at most")
    links = measure_links(ranks, say=say, hosts=hosts)
    curves, wake_s = links.curves, links.wake_s
    count = sum(len(c.samples) for c in curves)
    if links.left:
        say(
            f"only {count} of {count + links.left} exchanges were measured within {SECONDS_FOR_LINKS:g} s: "
            "the machine is busy"
        )
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    from whale.tools.profile import samples

    found, _ = measure.measure(
        list(measure.find_distinct(samples.make_programs()).values()), SECONDS_FOR_OPERATIONS, say
    )
    call_s, node_s = measure.measure_overheads()
    name = platform.node() or "local"
    devices = [one.name for one in tf.config.list_logical_devices("GPU")]
    gpus, copied = (find_gpus(), measure_copies(["/device:CPU:0", *devices])) if devices else ([], [])
    others = meter.measure_others()
    if others >= BUSY:
        say(
            f"the machine is busy ({format_load(others)}): step times predicted from these figures will be too long; "
            "measure again when it is idle"
        )
    table = MachineProfile(
        name, cores, memory_gb, call_s, node_s, _measure_slice_s(), wake_s, found, curves, [], gpus, copied,
        max(1, len(hosts)), links.hosts,
    )  # fmt: skip
    tables.write(table, out)
    return table


def _measure_slice_s() -> float:
    """Measures the scheduler's time slice: how long a computing thread stands still when two threads share a core."""
    found = []
    count = 2 * len(os.sched_getaffinity(0))
    command = [sys.executable, "-S", "-c", _WATCH, str(LEAST_PAUSE_S)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for process in running:
        found += [float(pause) for pause in process.communicate()[0].split()]
    if len(found) < 4:  # hardly any pause: there are more cores than the affinity mask tells
        return LEAST_PAUSE_S
    return statistics.quantiles(found, n=4)[0]  # if other programs run too, most pauses last several slices


def measure_links(
    ranks: int,
    variables: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], None] = lambda text: None,
    hosts: Sequence[str] = (),
) -> Links:
    """Starts ranks that measure exchanges between them, as many exchanges as there is time for.

    Args:
      variables: environment variables of the ranks, in addition to those of this process.
      say: called with lines of progress.
      hosts: the host of each rank; (): all ranks are here.

    Raises:
      ClusterError: the ranks did not start, lack the GPUs that ``communication.backend`` asks for, or measured nothing
          in time.
    """
    meter = LoadMeter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.json"
        arguments = str(path), str(SECONDS_FOR_LINKS)
        where = ("--hosts", ",".join(hosts)) if hosts else ()
        links = ("-m", "whale.tools.profile.links", *arguments)
        command = python.module("whale", "run", "-np", str(ranks), *where, *links)
        whole = {**python.environment(), **variables}
        code, output = _run_told(command, whole, SECONDS_FOR_LINKS + SECONDS_TO_END, say)
        found = msgspec.json.decode(path.read_bytes(), type=Links) if path.exists() else Links([], 0.0)
        if code in (0, None) and found.curves:
            return found
        if code in (0, None):
            raise ClusterError(
                "the exchanges between ranks could not be measured in time",
                given=f"none of them within {SECONDS_FOR_LINKS + SECONDS_TO_END:g} s",
                machine=format_load(meter.measure_others()),
                action="wait until the machine is idle and call `whale profile` again; `whale doctor` tests a run",
            )
        raise ClusterError(
            "the exchanges between ranks could not be measured",
            given=python.last_lines(output),
            action="run `whale doctor`, which looks for the reasons why runs fail on this machine",
        )


def _run_told(
    command: list[str], environment: dict[str, str], limit_s: float, say: Callable[[str], None]
) -> tuple[int | None, str]:
    """Runs a command with a time limit; returns its exit code (None: it was ended after ``limit_s``) and its output.

    Args:
      say: called with each line of the output that begins with `TOLD`, as it arrives.
    """
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            _, told, text = line.partition(TOLD)
            if told:
                say(text.strip())

    reader = threading.Thread(target=read, name="whale profile", daemon=True)
    reader.start()
    code: int | None
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # `whale run` ends its ranks
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_TO_END)
        reader.join(SECONDS_TO_END)
    return code, "".join(lines)


def measure_script(path: str, args: Sequence[str], ranks: int, out: Path, say: Callable[[str], None]) -> MachineProfile:
    """Measures the operations of a script's first step, on one device and as ``ranks`` ranks would run it.

    The step is captured but not run by the script; it is measured on random values. Results are added to the machine's
    profile.

    Args:
      path: path of the script.
      args: its arguments.
      out: path of the profile.
      say: called with lines of progress.

    Raises:
      ClusterError: the machine has not been measured.
      ProgramError: the script has no step that takes a batch.
    """
    table = tables.read(out)
    planned = first_step(path, args, ranks)
    found = measure_programs(table, [planned], out, say)
    measure_kernels(planned, say)
    return found


def measure_kernels(planned: Planned, say: Callable[[str], None]) -> None:
    """Measures which of Whale's kernel substitutions are faster in the first rank's program, and records it for later
    runs.
    """
    folder = find_folder(DEFAULT)
    assert folder is not None
    kernels = MachineKernels(CacheFolder(folder), name_file())
    (program,) = lower_ranks(planned.program, planned.plan, planned.settings, [0])
    kernels.note_program(program, planned.settings)
    count = kernels.measure_within(SECONDS_FOR_KERNELS)
    lost = [name.partition("(")[0] for name in kernels.read_file().declined]
    say(f"{count} substitutions of kernels measured; slower here: {', '.join(sorted(set(lost))) or 'none'}")


def measure_programs(
    table: MachineProfile, planned: Sequence[Planned], out: Path, say: Callable[[str], None]
) -> MachineProfile:
    """Measures the ranks' programs of some plans, and whole steps side by side; writes and returns the extended
    profile.
    """
    ranks = {id(p): rank_programs(p) for p in planned}
    runs: dict[int, dict[str, list[Program]]] = {}  # by the number of ranks
    for p in planned:
        programs = ranks[id(p)]
        marked = runs.setdefault(len(programs), {})
        marked[compute_fingerprint(p.program)] = [_make_alone(p)] * len(programs)
        if any(map(has_inner_exchanges, programs)):
            say(f"{p.program.name}: a loop or branch communicates, so only the step on one device is measured")
        elif len(programs) > 1:
            marked[compute_fingerprint(programs[0])] = list(map(remove_exchanges, programs))
    measured_s: dict[tuple[str, int], float] = {}
    for count, marked in runs.items():
        for (mark, run), seconds in zip(marked.items(), measure_step_seconds(list(marked.values()))):
            measured_s[mark, count] = max(1e-6, seconds - table.call_s)
            what = "on one device" if run[0] is run[-1] else "as the ranks run it, without exchanges"
            say(f"{run[0].name}: {1e3 * seconds:.1f} ms {what}, {count} side by side")
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    every = [one for marked in runs.values() for run in marked.values() for one in run]
    every += [one for programs in ranks.values() for one in programs]
    known = {o.signature for o in table.operations}
    new = [one for name, one in measure.find_distinct(every).items() if name not in known]
    found, skipped = measure.measure(new, 120.0, say)
    lost = f", {len(skipped)} could not be ({skipped[0]}, ...)" if skipped else ""
    say(f"{len(found)} operations measured{lost}")
    table = table.merge(found)
    steps = [
        Step(mark, measured_s[mark, count], _predict_s(table, run), count)
        for count, marked in runs.items()
        for mark, run in marked.items()
    ]
    table = table.merge((), steps)
    tables.write(table, out)
    return table


def _make_alone(planned: Planned) -> Program:
    settings = planned.settings.but(size=1, devices=(), batch__shares=(), batch__local={}, mesh=(), zero__level=0)
    plan = make_plan(planned.program, settings)
    return partition_for_rank(planned.program, plan, 0, "", None)


def _predict_s(table: MachineProfile, run: Sequence[Program]) -> float:
    """Predicts the seconds of a step in which each rank runs one program of ``run``: the mean over the ranks of when
    each ends.

    Only the seconds of operations count; what a call of the step costs besides (its overhead) is left out.
    """
    found = predict_ranks(run, make_measured_machine(table, len(run)), plays=0).ranks
    return sum(one.end_s for one in found) / len(found)


def replan(planned: Planned, **changes: object) -> Planned:
    """Plans the same program again with some settings changed (see whale.passes.settings.PlanSettings)."""
    settings = replace(planned.settings, **changes)  # type: ignore[arg-type]
    return Planned(planned.program, plan_program(planned.program, settings), settings)


def format_summary(table: MachineProfile) -> str:
    """Formats the main figures of a profile for the user: fastest operations, copies, exchanges and links."""
    fastest: dict[tuple[str, str], tuple[float, str]] = {}  # by op and dtype: the rate and its unit
    for o in table.operations:
        if o.op in ("MatMul", "Conv2D", "AddV2"):
            amount, unit = (o.moved_bytes, "GB/s") if o.op == "AddV2" else (o.flops, "GFLOP/s")
            kind = o.op, dtype_of(o.signature)
            fastest[kind] = max(fastest.get(kind, (0.0, unit)), (amount / o.seconds / 1e9, unit))
    lines = [f"{table.host}: {table.cores:g} cores, {len(table.operations)} operations, {len(table.steps)} steps"]
    lines += [f"  {gpu.name}, {gpu.memory_gb:.0f} GB" for gpu in table.gpus]
    lines += [f"  {op:<8} {dtype:<8} up to {rate:.1f} {unit}" for (op, dtype), (rate, unit) in sorted(fastest.items())]
    for one in table.copies:
        (_, first_s), (last, last_s) = one.samples[0], one.samples[-1]
        way = f"{one.source.removeprefix('/device:')} to {one.target.removeprefix('/device:')}"
        lines.append(f"  {way:<14} copied: {1e6 * first_s:.0f} us, {last / last_s / 1e9:.2f} GB/s")
    for c in table.curves:
        (_, first_s), (last, last_s) = c.samples[0], c.samples[-1]
        through = f" through {c.through}" if c.through else ""
        rate = f"{1e6 * first_s:.0f} us, {last / last_s / 1e9:.2f} GB/s"
        lines.append(f"  {c.kind:<14} {c.ranks} ranks{through}: {rate}")
    lines += [f"  {one.one} - {one.other}: {format_link(Link(one.exchange_s, one.bytes_per_s))}" for one in table.links]
    return "\n".join(lines) + "\n"


# Measures a machine's GPUs: their memory, and how fast TensorFlow copies tensors between them and the host's memory.
def find_gpus() -> list[Gpu]:
    """Returns the GPUs of this process, with their memory."""
    driver = gpu_driver.look()
    return [Gpu(gpu.name, gpu.memory_bytes / 1e9) for gpu in driver.gpus] if driver is not None else []


def measure_copies(devices: Sequence[str]) -> list[Copies]:
    """Measures copies of tensors from each device to each other one.

    Args:
      devices: TensorFlow's names of devices; a CPU stands for host memory.
    """
    found = []
    for source, target in itertools.permutations(devices, 2):
        samples = [(float(size), _measure_copy_s(source, target, size)) for size in SIZES_BYTES]
        found.append(Copies(source, target, samples))
    return found


def _measure_copy_s(source: str, target: str, size_bytes: int) -> float:
    with tf.device(source):
        tensors = [tf.random.uniform([size_bytes // 4]) for _ in range(COPIES)]
    rounds = []
    for _ in range(ROUNDS):
        tf.test.experimental.sync_devices()
        start_s = time.perf_counter()
        with tf.device(target):
            there = [tf.identity(tensor) for tensor in tensors]
        tf.test.experimental.sync_devices()
        rounds.append((time.perf_counter() - start_s) / COPIES)
        del there
    return statistics.median(rounds[1:])


# The functions below remove the exchanges from a rank's program, so that its computation alone can be measured.
#
# A received tensor is replaced by the exchange's own operand, brought to the right shape, so that every kernel still
# runs on tensors of the same shape and in the same order. The values are meaningless.
def has_inner_exchanges(program: Program) -> bool:
    """Returns True if a loop or branch communicates; `remove_exchanges` cannot remove such exchanges."""
    return any(n.op in EXCHANGES or n.op in _JOINED for body in program.functions.values() for n in body.nodes)


def remove_exchanges(program: Program) -> Program:
    """Returns ``program`` without exchanges, to measure what a rank computes.

    A received tensor is replaced by the operand of the exchange in the right shape, or by an input of the program; a
    sent tensor becomes an output.
    """
    nodes: dict[str, Node] = {}
    inputs, outputs = list(program.inputs), list(program.outputs)
    stands_for: dict[Ref, Ref] = {}
    waits_for: dict[str, tuple[str, ...]] = {n.name: () for n in program.nodes if n.op in _JOINED}
    taken = set(program.by_name)
    for node in program.nodes:
        if node.op in _JOINED:
            continue
        node = replace(
            node,
            inputs=tuple(stands_for.get(r, r) for r in node.inputs if r.node not in waits_for or r in stands_for),
            controls=tuple(dict.fromkeys(name for c in node.controls for name in waits_for.get(c, (c,)))),
        )
        if node.op not in EXCHANGES:
            nodes[node.name] = node
            continue
        outputs += node.inputs if not node.outputs else ()
        for k, kind in enumerate(node.outputs):
            if k < len(node.inputs):
                found = _reshape_to(NodeEmitter(program, node, nodes, taken), node.inputs[k], kind, inputs)
            else:
                found = _add_input(f"{node.name}/given", kind, nodes, inputs)
            stands_for[Ref(node.name, k)] = found
        stand = [stands_for[r].node for r in node.list_refs()] or [r.node for r in node.inputs]
        waits_for[node.name] = tuple(dict.fromkeys(stand))
    return replace(
        program,
        nodes=tuple(nodes.values()),
        inputs=tuple(inputs),
        outputs=tuple(stands_for.get(r, r) for r in outputs),
        effects=tuple(name for e in program.effects for name in waits_for.get(e, (e,))),
    )


def _add_input(name: str, kind: TensorType, nodes: dict[str, Node], inputs: list[str]) -> Ref:
    nodes[name] = Node(name, "Placeholder", (), (), {"dtype": DType(kind.dtype)}, (kind,))
    inputs.append(name)
    return Ref(name)


def _reshape_to(emit: NodeEmitter, source: Ref, kind: TensorType, inputs: list[str]) -> Ref:
    """Reshapes ``source`` to the type ``kind``: takes its first elements, or pads it if it has too few."""
    own = emit.type_of(source)
    if own.shape == kind.shape:
        return emit.node_of("apart", "Identity", (source,), kind, {"T": DType(kind.dtype)})
    index, dtype = DType("int32"), DType(kind.dtype)
    flat = emit.const("flat", np.array([-1], np.int32))
    shaped = {"T": dtype, "Tshape": index}
    row = emit.node_of("row", "Reshape", (source, flat), TensorType(kind.dtype, (own.elements,)), shaped)
    missing = kind.elements - own.elements
    part = TensorType(kind.dtype, (kind.elements,))
    if missing > 0:
        name = f"{emit.node.name}/rest_{len(inputs)}"
        rest = _add_input(name, TensorType(kind.dtype, (missing,)), emit.nodes, inputs)
        axis = emit.const("axis", np.array(0, np.int32))
        row = emit.node_of("more", "ConcatV2", (row, rest, axis), part, {"N": 2, "T": dtype, "Tidx": index})
    elif missing < 0:
        begin, size = (emit.const(n, np.array([v], np.int32)) for n, v in (("begin", 0), ("size", kind.elements)))
        row = emit.node_of("part", "Slice", (row, begin, size), part, {"T": dtype, "Index": index})
    shape = emit.const("shape", np.array(require_static_shape(kind), np.int32))
    return emit.node_of("apart", "Reshape", (row, shape), kind, shaped)
