"""What annotations and settings mean, and what is refused, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from whale.errors import ConfigError, PlanError, ProgramError
from whale.frontends.epl.batch_scaling import BatchScaling, find_scaling
from whale.frontends.epl.config import Config
from whale.frontends.epl.layout import AnnotatedGraph, make_layout
from whale.frontends.epl.start import slice_files
from whale.runtime.context import BatchReaders

pytestmark = pytest.mark.core
ONE = AnnotatedGraph("replicate", 1)


def test_one_replicate_is_data_parallel_and_adds_up_over_runs() -> None:
    found = make_layout([ONE], 4, False, 3)
    assert found.batches == BatchReaders((0, 1, 2, 3)) and found.replicas == 4 and found.accumulated == 3
    assert found.paths == {0: ""}


def test_a_replica_of_several_devices_shares_a_batch() -> None:
    found = make_layout([AnnotatedGraph("replicate", 2)], 4, False, 1)
    assert found.batches == BatchReaders((0, 2), whole=True) and found.replicas == 2


def test_several_replicates_are_stages_of_replicas() -> None:
    found = make_layout([ONE, ONE], 4, False, 3)
    assert found.batches == BatchReaders((0, 2), 3, whole=True) and found.accumulated == 1
    assert found.paths == {k: f"pipeline_0(micro_batches=3)/stage_{k}" for k in range(2)}
    unequal = make_layout([ONE, AnnotatedGraph("split", 3)], 8, False, 1)
    assert unequal.paths == {0: "stage_0(ranks=0+4)", 1: "stage_1(ranks=1+2+3+5+6+7)/split_1"}
    assert make_layout([ONE, ONE], 1, False, 2).batches == BatchReaders((0,), 2, whole=True)


def test_colocated_task_graphs_are_on_all_ranks() -> None:
    whole, rows = AnnotatedGraph("split", 4), AnnotatedGraph("replicate", 4)
    found = make_layout([rows, whole], 4, True, 1)
    assert found.batches == BatchReaders((0,), whole=True) and found.paths == {0: "", 1: "split_1"}
    found = make_layout([ONE, whole], 4, True, 2)
    assert found.batches == BatchReaders((0, 1, 2, 3), 2, whole=True) and found.replicas == 4
    assert found.paths[1] == "pipeline_0(micro_batches=2)/split_1"


@pytest.mark.parametrize(
    ("graphs", "size", "said"),
    [
        ([ONE, ONE], 3, "one replica takes 1 + 1"),
        ([AnnotatedGraph("replicate", 3)], 4, "one replica takes 3"),
        ([ONE, ONE, AnnotatedGraph("split", None)], 4, "pass device_count to epl.split"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(graphs: list[AnnotatedGraph], size: int, said: str) -> None:
    with pytest.raises(PlanError) as error:
        make_layout(graphs, size, False, 1)
    assert said in str(error.value)


def test_modules_are_attributes_as_the_librarys_are() -> None:
    import whale.epl as epl

    assert epl.env.Env is epl.Env and epl.config.Config is epl.Config and epl.cluster.Cluster is epl.Cluster


def test_settings_come_from_code_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "24")
    monkeypatch.setenv("EPL_COMMUNICATION_FP16", "True")
    monkeypatch.setenv("EPL_COMMUNICATION_GRADIENTS_REDUCE_METHOD", "SUM")
    config = Config({"communication.max_splits": 15, "pipeline.strategy": "PreferForward", "zero.level": "V1"})
    assert (config.communication.max_splits, config.communication.fp16) == (15, True)
    assert config.communication.gradients_reduce_method == "sum"
    assert config.to_whale()["pipeline.schedule"] == "gpipe" and config.to_whale()["memory.zero"] == 2
    assert config.to_whale()["communication.wire_dtype"] == "float16"
    config.pipeline.num_micro_batch = 4
    assert config.pipeline.num_micro_batch == 4


def test_settings_that_there_are_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_splits"):
        Config({"communication.max_splits": "many"})
    with pytest.raises(ConfigError, match="no such setting"):
        Config({"pipeline.micro_batch": 4})
    with pytest.raises(AttributeError):
        Config().pipeline.micro_batch = 4
    with pytest.raises(AttributeError):
        _ = Config().pipelines
    monkeypatch.setenv("EPL_COMMUNICATION_GRADIENTS_REDUCE_METHOD", "not_mean")
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        Config()


def test_how_values_grow_with_rows() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, [None, 6]), v1.placeholder(tf.int64, [None])
        w = v1.get_variable("w", [6, 4], use_resource=True)
        logits = x @ w
        right = tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32)
        assert find_scaling(logits) == BatchScaling(rows=True)
        assert find_scaling(v1.losses.sparse_softmax_cross_entropy(y, logits)) == BatchScaling()
        assert find_scaling(tf.reduce_sum(right)) == BatchScaling(power=1)
        assert (
            find_scaling(tf.reduce_mean(right))
            == find_scaling(v1.metrics.accuracy(y, tf.argmax(logits, 1))[1])
            == BatchScaling()
        )
        assert find_scaling(tf.reduce_sum(logits) / tf.cast(tf.shape(x)[0], tf.float32)) == BatchScaling()
        assert find_scaling(tf.reduce_mean(logits) + tf.nn.l2_loss(w)) == BatchScaling()
        assert find_scaling(tf.matmul(x, logits, transpose_a=True)) == BatchScaling(power=1)
        assert find_scaling(tf.reduce_sum(logits) + tf.nn.l2_loss(w)) is None
        assert find_scaling(tf.exp(tf.reduce_sum(logits))) is None


@pytest.mark.parametrize(
    ("drop_last", "unbalanced", "lines"), [(True, False, [b"a", b"c"]), (False, True, [b"a", b"c", b"e"])]
)
def test_files_are_divided(tmp_path: Path, drop_last: bool, unbalanced: bool, lines: list[bytes]) -> None:
    v1 = tf.compat.v1
    names = [tmp_path / name for name in "abcde"]
    for name in names:
        name.write_text(f"{name.name}\n")
    with tf.Graph().as_default() as graph, v1.Session() as session:
        files = list(map(str, names))
        one_after_another = tf.data.TextLineDataset(files)
        interleaved = tf.data.Dataset.from_tensor_slices(files).repeat(1).interleave(tf.data.TextLineDataset)
        words = tf.data.Dataset.from_tensor_slices(files)  # no dataset opens these
        for dataset in (one_after_another, interleaved):
            iterator = v1.data.make_initializable_iterator(dataset)
            v1.add_to_collection("begin", iterator.initializer)
            v1.add_to_collection("next", iterator.get_next())
        others = v1.data.make_initializable_iterator(words)
        with pytest.raises(ProgramError, match="evenly"):
            slice_files(graph, 0, 2, False, False)
        assert slice_files(graph, 0, 2, drop_last, unbalanced) == 2
        session.run([*v1.get_collection("begin"), others.initializer])
        for read in v1.get_collection("next"):
            assert [session.run(read) for _ in lines] == lines
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(read)
