"""Code blocks of README and the guides are run on ranks of this process, and command lines are those of `whale`."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import whale as wh
from cost_model.cluster import cluster_file
from tests import stand_ins
from tests.launcher.helpers import ROOT
from whale.cli import make_parser
from whale.cli.cluster import EXAMPLE

GUIDES = ROOT / "docs" / "guides"
PAGES = [ROOT / "README.md", ROOT / "docs/gpu.md", *sorted(GUIDES.glob("*.md"))]
_BLOCK = re.compile(r"^```(python|yaml|json|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAD = """
import sys
import keras, numpy as np, tensorflow as tf
import whale as wh
def dense(*widths): return keras.Sequential([keras.Input((widths[0],)), *map(keras.layers.Dense, widths[1:])])
def ones(*shape): return tf.ones(shape)
def loss_of(y, labels): return tf.reduce_mean((y - labels) ** 2)
optimizer = keras.optimizers.SGD(0.1)
"""


@dataclass(frozen=True)
class Around:
    """What a block needs around it.

    Attributes:
      before: code in front of it.
      after: code behind it.
      step: what its step is called with; the block is then the inside of a step that returns `value`.
    """

    before: str = ""
    after: str = ""
    step: str = ""
    value: str = "loss"
    ranks: int = 2


MODEL = "wh.init()\nmodel, done, folder, steps = dense(4, 2), tf.Variable(0, dtype=tf.int64), 'saved', 2\n"
LABELS = "tf.zeros(4, tf.int32)"
TRACKED = (
    "import os\nos.environ['MLFLOW_ALLOW_FILE_STORE'] = 'true'\nfrom tests.stand_ins import CALLS, stand_in\n"
    "model = dense(8, 4); model.compile('sgd', 'mse')\nx, y = ones(128, 8).numpy(), ones(128, 4).numpy()\n"
)
AROUND = {
    "README.md": [Around("x, y = np.ones((128, 8), 'float32'), np.ones((128, 4), 'float32')")],
    "checkpoints.md": [
        Around(MODEL + "iterator = iter(tf.data.Dataset.range(8))", "assert manager.latest_checkpoint"),
        Around(MODEL + "checkpoint = tf.train.Checkpoint(model=model)", "assert manager.save() == 'ram://bucket/run/ckpt-1'"),
        Around(MODEL + "model = dense(784, 2)\npredict = tf.function(lambda x: model(x))"),
    ],
    "cost_model.md": [
        Around(after="assert found.step_s > 1 and found.memory_curve(stage=0)"),
        Around(
            "from tests.programs import mlp, planned\nfrom whale.partition.spmd import partition_for_rank\n"
            "program = mlp(8, 4, 4, 2)\nplan = planned(program, 4, 4)\n"
            "programs = [partition_for_rank(program, plan, rank, 'c', None) for rank in (0, 1)]",
            "assert found.step_s > 0",
        ),
    ],
    "custom_loop.md": [
        Around(
            "x, y = np.ones((128, 8), 'float32'), np.zeros(128, 'int32')",
            "assert np.isfinite(float(loss)) and wh.size() == 2",
        )
    ],
    "data.md": [
        Around(
            "wh.init()\nstep = wh.function(lambda x, y: loss_of(x, y))\ndecode = lambda i: (tf.ones(2), tf.zeros(2))\n"
            "files = tf.data.Dataset.range(512)"
        )
    ],
    "giant.md": [
        Around(
            "wh.init()\ngroups, experts, capacity, width = 2, 2, 4, 3\nclasses = tf.zeros((2, 4), tf.int32)\n"
            "into, out = tf.Variable(tf.ones((2, 3, 5))), tf.Variable(tf.ones((2, 5, 3)))\n"
            "slot = tf.tile(tf.range(4)[None], (2, 1)); group = tf.tile(tf.range(2)[:, None], (1, 4))",
            step="tokens, gate, group, expert, slot = ones(2, 4, 3), ones(2, 4), group, classes, slot",
            value="tf.reduce_sum(y)",
        ),
        Around(
            "wh.init()\nexperts, capacity, width = 2, 4, 3",
            step="tokens, expert, slot = ones(4, 3), tf.zeros(4, tf.int32), tf.range(4)",
            value="tf.reduce_sum(dispatched)",
        ),
        Around(
            "wh.init()\nexperts, width = 2, 3",
            step="tokens, expert = ones(4, 3), tf.zeros(4, tf.int32)",
            value="tf.reduce_sum(dispatched)",
        ),
        Around(
            "wh.init()\ntables = [tf.Variable(tf.ones((8, 2))) for _ in range(2)]",
            step="ids = tf.zeros((4, 2), tf.int32)",
            value="tf.reduce_sum(rows[0])",
        ),
        Around("wh.init()", "model.compile('sgd', 'mse'); model.fit(np.ones((4, 20)), np.ones((4, 1)), verbose=0)"),
    ],
    "keras.md": [Around("x, y = np.ones((512, 8), 'float32'), np.zeros(512, 'int32')")],
    "largest_batch.md": [
        Around(
            "model = dense(8, 256, 4)\n"
            "def step(x, y):\n"
            "    with tf.GradientTape() as tape: loss = loss_of(model(x), tf.one_hot(y, 4))\n"
            "    weights = model.trainable_weights\n"
            "    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))\n"
            "    return loss",
            "assert rows >= 1024 and count_peak_bytes(rows, 2) < limit_bytes <= count_peak_bytes(2 * rows, 2)",
        )
    ],
    "micro_batches.md": [
        Around(
            "wh.init({'memory.recompute': 'marked'})\nblock = dense(2, 2)", step="y = ones(4, 2)", value="y"
        )
    ],
    "monitoring.md": [
        Around(after="logging.getLogger('whale').removeHandler(handler)"),
        Around(TRACKED + "stand_in('wandb')", "assert [c[0] for c in CALLS] in ([], ['init', 'log', 'log', 'finish'])"),
        Around(
            TRACKED + "stand_in('mlflow')",
            "assert [c[0] for c in CALLS] in ([], ['start_run', 'log_metrics', 'log_metrics', 'end_run'])",
        ),
    ],
    "pipeline.md": [
        Around(
            "first_half, second_half = dense(4, 3), dense(3, 2)\n"
            "weights = first_half.trainable_weights + second_half.trainable_weights",
            "step(ones(4, 4), ones(4, 2))",
        )
    ],
    "planner.md": [Around()],
    "running.md": [
        Around("step, batch = wh.function(lambda x: tf.reduce_mean(x)), ones(8, 2)"),
        Around("step, batch = wh.function(lambda x: tf.reduce_mean(x)), ones(8, 2)", "assert len(graph) > 2"),
        Around(ranks=1),
        Around(
            "@wh.function\ndef step(x, y): return tf.reduce_mean(x - y)\n"
            "dataset = tf.data.Dataset.from_tensor_slices((ones(8), ones(8))).batch(4)",
            "assert len(state.losses) == 20",
            ranks=1,
        ),
        Around(MODEL + "step = wh.function(lambda x: tf.reduce_mean(x))\nbatch = lambda n: (ones(8, 2),)"),
        Around(after="assert not wh.preempted()"),
    ],
    "split.md": [
        Around("def build_features(): return dense(4, 3)", "step(ones(4, 4), tf.zeros(4, tf.int32))"),
        Around(),
        Around(
            "model = lambda tokens: tf.reduce_sum(tokens, -1)",
            step="tokens, labels = ones(4, 8, 2), ones(4, 8)",
            ranks=8,
        ),
        Around(
            "wh.init()\nfeatures, classifier = dense(4, 3), dense(3, 8)",
            step=f"x, y = ones(4, 4), {LABELS}",
            ranks=4,
        ),
        Around(
            "attention, experts = dense(4, 4), dense(4, 4)", step="h = ones(8, 4)", value="tf.reduce_mean(h)", ranks=8
        ),
    ],
    "tuning.md": [
        Around(TRACKED + "stand_in('keras_tuner')", "assert best.values['width'] in range(8, 65) and wh.size() == 2"),
        Around(
            TRACKED + "stand_in('ray')\ndef train(rate): return (rate - 0.01) ** 2\n"
            # Processes of a thread are those of tests/launcher/test_launch.py.
            "wh.launch = lambda fn, args, np: [fn(*args)] * np",
            "assert len(CALLS) in (0, 3)\ndel wh.launch",
        ),
    ],
}  # fmt: skip
ELSEWHERE = {"tf1.md": "tests/tf1", "schedulers.md": "tests/frontends/test_on_ray.py"}


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind in kinds]


def cases() -> list[Any]:
    found = []
    for page in PAGES:
        if page.name in ELSEWHERE:
            continue
        texts, around = blocks(page, "python", "diff"), AROUND.get(page.name, [])
        assert len(texts) == len(around), f"{page.name} has {len(texts)} blocks, and what stands around {len(around)}"
        found += [pytest.param(t, a, id=f"{page.stem}-{i}") for i, (t, a) in enumerate(zip(texts, around))]
    return found


def whole(text: str, around: Around) -> str:
    """A block with what it needs, as a script; the memory of this process stands for a store."""
    text = text.replace("gs://", "ram://")
    if text.startswith((" ", "+")):  # a difference of two scripts: the second one, up to how it is started
        lines = [line[1:] for line in text.partition("\n\n")[0].splitlines() if not line.startswith("-")]
        return "\n".join([HEAD, around.before, *lines])
    if not around.step:
        return "\n".join([HEAD, around.before, text, around.after])
    start, calls = re.match(r"((?:wh\.init\(.*\n)?)((?:.|\n)*)", text).groups()  # type: ignore[union-attr]
    names, _, values = around.step.partition(" = ")
    inside = textwrap.indent(f"{calls}return {around.value}\n", "    ")
    step = f"@wh.function\ndef block_step({names}):\n{inside}\nassert np.isfinite(block_step({values})).all()\n"
    return "\n".join([HEAD, around.before, start, step, around.after])


@pytest.mark.parametrize(("text", "around"), cases())
def test_a_block_runs(text: str, around: Around, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "selene.yaml").write_text((ROOT / "cost_model/validation/clusters/selene.yaml").read_text())
    (tmp_path / "lab.yaml").write_text(EXAMPLE)
    monkeypatch.setenv("WHALE_COMMUNICATION_IN_PROCESS_RANKS", str(around.ranks))
    monkeypatch.setattr(sys, "argv", ["block.py"])
    (tmp_path / "block.py").write_text(whole(text, around))
    try:
        runpy.run_path("block.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code
    finally:
        wh.shutdown()
        stand_ins.remove_all()


def test_clusters_and_annotations_can_be_read() -> None:
    found = [yaml.safe_load(text) for page in PAGES for text in blocks(page, "yaml")]
    clusters = [one for one in found if "hosts" in one]
    for one in clusters:
        assert cluster_file.parse(yaml.safe_dump(one)).hosts
    assert clusters and all(json.loads(text) for text in blocks(GUIDES / "split.md", "json"))


def test_command_lines_are_those_of_whale() -> None:
    seen = 0
    for page in PAGES:
        for line in re.findall(r"^(?: {4}| {8}|\$ )?(whale [a-z]+ .*)$", page.read_text(), re.MULTILINE):
            command = re.split(r"  +| \(or |&& |; ", line)[0]
            words = [re.sub(r"^\"?\$\w+\"?$", "2", word) for word in shlex.split(command, comments=True)]
            make_parser().parse_args(words[1:])  # SystemExit: no such verb or option
            seen += 1
    assert seen > 20
    for line in re.findall(r"^    (wh\.init\(.*?\))(?: .*)?$", "".join(p.read_text() for p in PAGES), re.MULTILINE):
        eval(line, {"wh": type("wh", (), {"init": staticmethod(wh.Config), "Config": dict})})  # unknown keys are errors
