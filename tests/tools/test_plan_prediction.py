"""Predictions against what runs of this process do: bytes exactly, and that a plan's prediction can be made at all."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tensorflow as tf

import whale as wh
from cost_model.graph.machine import make_measured_machine
from cost_model.graph.machine_profile import Operation, read, write
from cost_model.graph.signature import signature
from tests.cost_model.test_captured import LAB, TABLE
from tests.draws import one_of
from whale.capture.function import capture_function
from whale.errors import ClusterError
from whale.ir.fingerprint import compute_fingerprint
from whale.ir.ops import EXCHANGES, MEETINGS
from whale.partition.lower import make_any_plan
from whale.passes.pass_manager import normalise
from whale.planner.graph_search.plan_prediction import Planned, predict_plan, rank_programs
from whale.planner.report.page_parts import mesh_of_plan
from whale.planner.report.sliders import make_captured_sliders
from whale.runtime.compile.measured_call import compile_whole_step
from whale.runtime.compile.settings import settings_of
from whale.runtime.context import require_current
from whale.tools.profile import operations as measure
from whale.tools.profile.profile import measure_programs as profile_programs
from whale.tools.profile.profile import remove_exchanges

Start = Callable[..., None]
SILENT = EXCHANGES | MEETINGS | {"WhaleCommunicator"}
MOVING = {"AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Send"}


class Model:
    """Two layers and a classifier, with momentum."""

    def __init__(self, scope: Callable[[], Any] = contextlib.nullcontext) -> None:
        self.first = wh.stage if scope is wh.stage else contextlib.nullcontext
        draw = np.random.default_rng(2).standard_normal
        shapes = ((12, 24), (24, 24), (24, 40), (40,))
        self.weights = [tf.Variable(draw(shape)) for shape in shapes]
        self.speeds = [tf.Variable(np.zeros(shape)) for shape in shapes]
        self.scope = scope

    def step(self, x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        w = self.weights
        with tf.GradientTape() as tape:
            with self.first():
                hidden = tf.tanh(tf.nn.relu(x @ w[0]) @ w[1])
            with self.scope():
                logits = tf.nn.bias_add(hidden @ w[2], w[3])
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        for weight, speed, gradient in zip(w, self.speeds, tape.gradient(loss, w)):
            speed.assign(0.9 * speed + gradient)
            weight.assign_sub(0.1 * speed)
        return loss


def batch(rows: int = 16) -> tuple[tf.Tensor, tf.Tensor]:
    draw = np.random.default_rng(1)
    return tf.constant(draw.standard_normal((rows, 12))), tf.constant(draw.integers(40, size=rows))


def planned_here(model: Model, rows: int = 16) -> Planned:
    """The plan of this process's run, made without running."""
    settings = settings_of(require_current())
    program = normalise(capture_function(model.step, batch(rows), {}).program, settings)
    return Planned(program, make_any_plan(program, settings), settings)


PLANS = {
    "even": (2, {}, contextlib.nullcontext),
    "uneven": (3, {"batch.shares": [9, 5, 2]}, contextlib.nullcontext),
    "split": (2, {}, wh.split),
    "groups": (4, {"mesh": wh.Mesh(tensor=2)}, wh.split),
    "state": (2, {"memory.zero": 1, "memory.zero_min_bytes": 0}, contextlib.nullcontext),
    "pipeline": (2, {"pipeline.micro_batches": 4}, wh.stage),
    "pipelines": (4, {"pipeline.micro_batches": 2, "pipeline.schedule": "gpipe"}, wh.stage),
    "micro-batches": (2, {"pipeline.micro_batches": 4}, contextlib.nullcontext),
    "tree": (3, {"communication.algorithm": "tree"}, contextlib.nullcontext),
    "ring": (4, {"communication.algorithm": "ring"}, contextlib.nullcontext),
    "state of three": (3, {"memory.zero": 2, "memory.zero_min_bytes": 0}, contextlib.nullcontext),
}


@pytest.mark.core
@pytest.mark.parametrize("name", one_of(3, PLANS))
def test_bytes_predicted_equal_bytes_counted(ranks: Start, name: str) -> None:
    count, config, scope = PLANS[name]
    ranks(count, **config)
    model = Model(scope)
    predicted = predict_plan(planned_here(model), TABLE)
    step = wh.function(model.step)
    step(*batch())  # compiles, and sends the variables

    def counted() -> list[int]:
        """Bytes of each rank; the comparison of fingerprints beside each step is no part of the program."""
        kinds = [
            [c.logical_bytes for c in comm.counters() if c.kind in MOVING and "whale/check" not in c.key]
            for comm in require_current().comms
        ]
        return [sum(one) for one in kinds]

    before = counted()
    for _ in range(3):
        step(*batch())
    moved = [(after - start) for start, after in zip(before, counted())]
    assert moved == [3 * one for one in predicted.logical_bytes]
    assert sum(predicted.logical_bytes) == planned_here(model).plan.logical_bytes > 0
    assert predicted.step_s > 0 and len(predicted.ranks) == count
    if count == 4:
        assert predict_plan(planned_here(model), LAB).step_s > 0


def test_a_programs_own_operations_are_measured(ranks: Start, tmp_path: Path) -> None:
    ranks(2)
    path = tmp_path / "profile.json"
    write(TABLE, path)
    planned = planned_here(Model())
    table = profile_programs(TABLE, [planned], path, lambda text: None)
    assert read(path) == table and [s.copies for s in table.steps] == [2, 2]
    mine = {o.signature for o in table.operations}
    programs = rank_programs(planned)
    wanted = measure.find_distinct(programs)
    assert len(mine & set(wanted)) > 0.8 * len(wanted) > 10
    (update,) = [o for o in table.operations if o.op == "WhaleUpdate"]  # of all weights of a shape, and their speeds
    assert update.moved_bytes > 5 * 8 * 24 * 24 and "Mul" in update.signature
    # Both the whole step and the ranks' own were measured; these count where both are known.
    own = next(s for s in table.steps if s.program == compute_fingerprint(programs[0]))
    slower = table.merge((), [msgspec.structs.replace(own, seconds=10 * own.seconds)])
    for one, other in zip(predict_plan(planned, table).ranks, predict_plan(planned, slower).ranks):
        assert other.compute_s == pytest.approx(10 * one.compute_s)


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_apart_runs_all_of_its_kernels_alone(ranks: Start, name: str) -> None:
    count, config, scope = PLANS[name]
    ranks(count, **config)
    for program in rank_programs(planned_here(Model(scope))):
        alone = remove_exchanges(program)
        assert not SILENT & {n.op for n in alone.nodes}
        kernels, found = (Counter(signature(p, n) for n in p.nodes if n.op not in SILENT) for p in (program, alone))
        assert not kernels - found
        compile_whole_step(alone)()


def test_a_larger_product_takes_longer() -> None:
    def product(n: int) -> Operation:
        spec = tf.TensorSpec((n, n))
        program = capture_function(lambda x, y: tf.exp(x @ y), (spec, spec), {}).program
        found, skipped = measure.measure(list(measure.find_distinct([program]).values()))
        assert not skipped and {o.op for o in found} == {"MatMul", "Exp"}
        return next(o for o in found if o.op == "MatMul")

    # A clock beside other programs may be off by any factor at one time, not at each of many.
    pairs = ((product(32), product(512)) for _ in range(20))
    small, large = next(pair for pair in pairs if pair[1].seconds > 20 * pair[0].seconds)
    assert large.flops == 4096 * small.flops


def test_reads_of_a_variable_whose_rows_are_taken_are_measured_as_copies() -> None:
    v = tf.Variable(tf.ones((1024, 256)))
    spec = tf.TensorSpec((4,), tf.int32)
    program = capture_function(lambda i: tf.reduce_sum(tf.gather(v, i)) + tf.reduce_sum(v), (spec,), {}).program
    found, skipped = measure.measure(list(measure.find_distinct([program]).values()))
    (copy,) = [o for o in found if o.op == "ReadVariableOp"]
    assert not skipped and copy.moved_bytes == 2 * 1024 * 256 * 4 and copy.seconds > 1e-6


def test_what_cannot_run_alone_is_named() -> None:
    spec = tf.TensorSpec((4,), tf.string)
    program = capture_function(lambda x: tf.strings.join([x, x]), (spec,), {}).program
    found, skipped = measure.measure(list(measure.find_distinct([program]).values()))
    (why,) = skipped
    assert not found and why.startswith("StringJoin: the operation has an operand of dtype string")


def test_the_planned_program_may_be_planned_otherwise(ranks: Start) -> None:
    ranks(2)
    planned = planned_here(Model())
    from whale.tools.profile.profile import replan

    wide = replan(planned, size=4)
    assert wide.plan.size == 4 and len(rank_programs(wide)) == 4
    assert replace(wide.settings, size=2) == planned.settings


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_devices_exchange_is_predicted_by_their_own_rates(ranks: Start, micro_batches: int) -> None:
    """Losses and gradients, in micro-batches as well; a profile without the backend's exchanges is refused."""
    ranks(2, **{"pipeline.micro_batches": micro_batches})
    planned = planned_here(Model())
    through = [msgspec.structs.replace(c, samples=[(1e3, 2e-3), (1e6, 5e-3)], through="nccl") for c in TABLE.curves]
    table = msgspec.structs.replace(TABLE, curves=[*TABLE.curves, *through])
    on_gpus = replace(planned, settings=planned.settings.but(exchange__backend="nccl"))
    host, gpus = predict_plan(planned, table), predict_plan(on_gpus, table)
    assert gpus.ranks[0].exchange_s > 20 * host.ranks[0].exchange_s
    assert gpus.logical_bytes == host.logical_bytes
    assert predict_plan(planned, TABLE).step_s == host.step_s
    with pytest.raises(ClusterError, match="all_reduce through nccl"):
        predict_plan(on_gpus, TABLE)


def test_sliders_and_mesh_of_a_page(ranks: Start) -> None:
    ranks(4, mesh=wh.Mesh(tensor=2))
    planned = planned_here(Model(wh.split), rows=1 << 16)
    programs = rank_programs(planned)
    machine = make_measured_machine(TABLE, 4, (), 0)
    drawn = make_captured_sliders(programs, machine, 1)
    assert drawn is not None
    times = np.reshape(drawn["step_s"], [len(texts) for _, texts, _ in drawn["axes"]])
    exchanges, all_ranks, alone = (at for _, _, at in drawn["axes"])
    now = times[exchanges, all_ranks, alone]
    assert now == pytest.approx(predict_plan(planned, TABLE).step_s, rel=0.2)  # by its own steps, as none was measured
    assert times[0, all_ranks, alone] > now > times[-1, all_ranks, alone]
    assert times[exchanges, 0, alone] > now > times[exchanges, -1, alone] and times[exchanges, all_ranks, 0] > now
    (grid,) = mesh_of_plan(planned.plan, [0.5, None, 0.25, 1.0])["grids"]
    assert re.fullmatch(r"tensor 2 across, data 2 down; \d+%( to \d+%)? of memory in use", grid["axes"])
    assert grid["rows"] == [
        ("data 0", [(0, "data 0, tensor 0", 0.5), (1, "data 0, tensor 1", None)]),
        ("data 1", [(2, "data 1, tensor 0", 0.25), (3, "data 1, tensor 1", 1.0)]),
    ]
