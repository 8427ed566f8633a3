"""A sample of the cases of ``python -m tests.elastic``."""

from __future__ import annotations

import pytest
import tensorflow as tf

import whale as wh
from tests.draws import one_of
from tests.elastic.cases import Case, Reference, run
from whale.errors import ConfigError


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("one_device"))


@pytest.mark.parametrize(
    "case",
    one_of(
        3,
        [
            Case("shard", 3, "0:1:slow,9:0:late,11:1:kill"),
            Case("zero3+save+large", 3, "0:1:slow,9:0:stop,111:2:copy"),
            Case("zero3+hosts", 4, "5:2:host"),
            Case("fit", 2, "2:1:kill,8:0:join"),
            pytest.param(Case("arrays", 3, "2:1:kill,2:0:move,7:2:join,9:2:kill"), marks=pytest.mark.long),
            pytest.param(Case("stages+shard", 3, "3:1:copy,5:0:join,5:2:grow"), marks=pytest.mark.long),
        ],
    ),
    ids=str,
)
def test_ranks_that_are_left_end_with_what_one_device_computes(case: Case, reference: Reference) -> None:
    outcome = run(case, reference)
    assert not outcome.problem, outcome.problem
    assert ("on its rows: they are divided anew, 8, 8, 8 -> " in outcome.said) == ("slow" in case.faults)


def test_who_loses_a_part_with_its_copy_starts_again_from_the_last_checkpoint(reference: Reference) -> None:
    outcome = run(Case("zero3+save", 3, "5:1:kill,5:2:kill"), reference, restarts=1)
    assert not outcome.problem, outcome.problem
    assert "parts of variables are lost with all ranks that had them" in outcome.said
    assert "next: start again from a checkpoint: `whale run --max-restarts`" in outcome.said


def test_runs_that_cannot_go_on_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot continue after a loss of ranks") as refused:
        wh.init({"fault.elastic": "memory", "communication.in_process_ranks": 2})
    assert "2 ranks" in str(refused.value)
    assert "--max-restarts" in str(refused.value)
    wh.shutdown()


def test_one_rank_has_nobody_to_go_on_without() -> None:
    wh.init(elastic=True)
    try:
        assert wh.function(lambda x: 2 * x)(tf.constant(3.0)) == 6.0
    finally:
        wh.shutdown()
