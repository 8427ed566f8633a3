"""Optimizers' state, weights or tables in the host's memory, in float64 against one device, and what is copied.

python -m tests.offload                  # all; a second logical device of the processor stands for an accelerator
python -m tests.offload replica pipeline # some
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as tf_context

import whale as wh
from whale.runtime.compile.offload import count_offloaded_bytes

STEPS = 3
COMPUTES, HOLDS = "CPU:1", "CPU:0"
ROWS, WIDTH, BATCH, EACH = 400, 6, 8, 3
# name -> (ranks, configuration, how the model is built: in two "stages", updated in a "branch", of "tables")
CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "alone": (1, {}, ""),
    "replica": (2, {}, ""),
    "accumulation": (2, {"pipeline.micro_batches": 3}, ""),
    "zero 1": (2, {"memory.zero": 1, "memory.zero_min_bytes": 0}, ""),
    "zero 3": (2, {"memory.zero": 3, "memory.zero_min_bytes": 0}, ""),
    "recompute": (2, {"memory.recompute": "auto"}, ""),
    "pipeline": (4, {"pipeline.micro_batches": 2}, "stages"),
    "pipeline, zero 1": (4, {"pipeline.micro_batches": 2, "memory.zero": 1, "memory.zero_min_bytes": 0}, "stages"),
    "weights": (1, {"memory.offload": "parameters", "memory.zero_min_bytes": 0}, ""),
    "weights, replica, accumulation": (2, {"memory.offload": "parameters", "pipeline.micro_batches": 3}, ""),
    "in a branch, zero 3": (
        2,
        {"memory.offload": "parameters", "memory.zero": 3, "memory.zero_min_bytes": 0},
        "branch",
    ),
    "tables": (1, {"memory.offload": "tables"}, "tables"),
    "tables, keras": (1, {"memory.offload": "tables"}, "tables keras"),
    "tables, keras, replica": (2, {"memory.offload": "tables", "pipeline.micro_batches": 2}, "tables keras"),
    "tables, columns": (2, {"memory.offload": "tables"}, "tables columns"),
    "tables, rows": (2, {"memory.offload": "tables"}, "tables rows"),
    "tables, hot": (2, {"memory.offload": "tables", "pipeline.micro_batches": 2}, "tables hot"),
}


class Model:
    """Two dense layers and an optimizer; the weights lie on the device that computes."""

    def __init__(self, function: Callable[[Any], Any], optimizer: str, form: str = "") -> None:
        draw = np.random.default_rng(0).standard_normal
        with tf.device(COMPUTES):
            self.weights = [tf.Variable(draw(shape)) for shape in ((6, 16), (16,), (16, 3))]
            self.speeds = [tf.Variable(np.zeros(w.shape)) for w in self.weights]
            self.squares = [tf.Variable(np.zeros(w.shape)) for w in self.weights]
        self.optimizer, self.form = optimizer, form
        self.step = function(self._step)

    @property
    def held(self) -> list[tf.Variable]:
        """What has to lie in the host's memory at any level."""
        return self.speeds + (self.squares if self.optimizer == "adam" else [])

    def _scope(self) -> Any:
        return wh.stage() if self.form == "stages" else tf.name_scope("model")

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with self._scope():
                h = tf.tanh(x @ self.weights[0] + self.weights[1])
            with self._scope():
                loss = tf.reduce_mean(tf.square(h @ self.weights[2] - y))
        gradients = tape.gradient(loss, self.weights)
        if self.form == "branch":
            tf.cond(tf.reduce_max(self.weights[1]) < 100.0, lambda: self._update(gradients), lambda: None)
        else:
            self._update(gradients)
        return loss

    def _update(self, gradients: list[tf.Tensor]) -> None:
        for w, m, v, g in zip(self.weights, self.speeds, self.squares, gradients):
            if self.optimizer == "adam":
                m.assign_add((g - m) * 0.1)
                v.assign_add((g * g - v) * 0.01)
                w.assign_sub(0.05 * m / (tf.sqrt(v) + 1e-3))
            else:
                m.assign(0.9 * m + g)
                w.assign_sub(0.05 * m)

    def train(self) -> list[np.ndarray]:
        """Losses, weights and state after some steps."""
        draw = np.random.default_rng(1).standard_normal
        losses = [self.step(tf.constant(draw((8, 6))), tf.constant(draw((8, 3)))) for _ in range(STEPS)]
        return [t.numpy() for t in (*losses, *self.weights, *self.held)]


class Tables:
    """A bag of rows of a table for each example, and a dense layer; a lazy optimizer changes the rows in use.

    Args:
      form: "tables", and how the table is sharded; "hot": by rows, some of them on every rank; "keras": not, and the
        layer is Keras' own.
    """

    def __init__(self, function: Callable[[Any], Any], optimizer: str, form: str) -> None:
        draw = np.random.default_rng(0).standard_normal
        how = form.removeprefix("tables").strip()
        tf.keras.backend.set_floatx("float64")
        with tf.device(COMPUTES):
            hot = [1, 2, 3, 5, 8] if how == "hot" else None
            if how == "keras":
                self.layer = tf.keras.layers.Embedding(ROWS, WIDTH)
            else:
                self.layer = wh.layers.Embedding(
                    ROWS, WIDTH, "sum", sharded=None if hot else how or None, hot=hot, dtype="float64"
                )
            self.layer.build()
            for v in self.layer.trainable_variables:
                v.assign(draw(v.shape))
            self.out = tf.Variable(draw((WIDTH, 1)))
            kind = tf.keras.optimizers.Adam(0.05) if optimizer == "adam" else tf.keras.optimizers.SGD(0.05, 0.9)
            self.optimizer = wh.optimizers.lazy(kind)
            self.weights = [*(v.value for v in self.layer.trainable_variables), self.out]
            self.optimizer.build(self.weights)
        table = self.layer.embeddings.value
        self.held = [table, *(v.value for v in self.optimizer.variables if v.shape == table.shape)]
        self.step = function(self._step)

    def _step(self, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = self.layer(ids)
            bags = tf.reduce_sum(rows, 1) if len(rows.shape) == 3 else rows
            loss = tf.reduce_mean(tf.square(bags @ self.out - 1.0))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
        return loss

    def train(self) -> list[np.ndarray]:
        """Losses, weights and state after some steps."""
        draw = np.random.default_rng(1).integers
        losses = [self.step(tf.constant(draw(0, ROWS, (BATCH, EACH)))) for _ in range(STEPS)]
        return [t.numpy() for t in (*losses, *self.weights, *self.held)]


def _model(function: Callable[[Any], Any], optimizer: str, form: str) -> Model | Tables:
    return (Tables if form.startswith("tables") else Model)(function, optimizer, form)


def try_case(name: str, optimizer: str) -> str:
    """What is wrong with a run of the case, or ""."""
    ranks, config, form = CASES[name]
    with tf.device(COMPUTES):
        expected = _model(tf.function, optimizer, "" if form == "stages" else form).train()
    wh.init({"communication.in_process_ranks": ranks, "memory.offload": "optimizer", **config})
    try:
        before = count_offloaded_bytes()
        model = _model(wh.function, optimizer, form)
        tf_context.context().enable_graph_collection()
        found = model.train()
        graphs = tf_context.context().export_run_metadata().function_graphs
        tf_context.context().disable_graph_collection()
        report = wh.memory_report()
        error = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in zip(found, expected))
        (each_step,) = report.copied_each_step.values()
        copied = tuple(now - then for now, then in zip(report.copied, before))
        state = sum(v.shape.num_elements() * v.dtype.size for v in model.held)
    finally:
        wh.shutdown()
    facts = f"error {error:.1e}, held by the host {report.on_host_bytes}, copied {copied} in {STEPS} steps"
    wrong = []
    if error > 1e-12:
        wrong.append("not as one device")
    if report.on_host_bytes < state:
        wrong.append(f"the state of {state} bytes is not there")
    if form.startswith("tables"):  # only the step knows how many rows it changes: at most one for each id
        ids, rows = (STEPS * BATCH * EACH * n for n in (8, 8 * WIDTH))
        copies = ranks if form in ("tables", "tables keras") else 1  # of the table, each with all gradients
        if not (rows / 2 < copied[0] <= 2 * ids * ranks + rows * copies and rows / 2 < copied[1] <= rows + ids * ranks):
            wrong.append("more or less is copied than ids, rows, and their gradients")
    elif copied != tuple(STEPS * n for n in each_step) or not all(copied):
        wrong.append(f"predicted {each_step} for a step")
    if others := uncounted(graphs):
        wrong.append(f"not counted: {others}")
    print(f"{name}, {optimizer}: {facts}; {'WRONG: ' + ', '.join(wrong) if wrong else 'as predicted'}", flush=True)
    return ", ".join(wrong)


def uncounted(functions: Any) -> list[str]:
    """What the graphs that TensorFlow made of a step move between the devices without its bytes being counted."""
    found = []
    for function in functions:
        for graph in function.partition_graphs:
            by_name = {node.name: node for node in graph.node}
            readers: dict[str, list[Any]] = {}
            for node in graph.node:
                for text in node.input:
                    readers.setdefault(text.lstrip("^").split(":")[0], []).append(node)
            for node in graph.node:
                # What a control edge moves is an empty tensor, of another type than the model's.
                kinds = (node.attr["T"].type, node.attr["tensor_type"].type)
                if not node.device.endswith(f"device:{HOLDS}") or tf.float64.as_datatype_enum not in kinds:
                    continue
                if node.op == "_Send":
                    others = [by_name[node.input[0].split(":")[0]]]
                elif node.op == "_Recv":
                    others = readers.get(node.name, [])
                else:
                    continue
                found += [f"{o.name} ({o.op})" for o in others if o.op not in ("WhaleOffload", "_Arg", "_Retval")]
    return found


def main() -> int:
    """Prints a line for each run; returns 1 when one is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.offload", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    parser.add_argument("--optimizers", nargs="+", default=["momentum", "adam"], choices=["momentum", "adam"])
    options = parser.parse_args()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    wrong = [
        f for name in options.cases or CASES for optimizer in options.optimizers if (f := try_case(name, optimizer))
    ]
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
