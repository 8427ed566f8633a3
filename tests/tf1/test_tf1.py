"""A sample of ``python -m tests.tf1``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf1.table import compared

SAMPLE = ["optimizer_adam", "dynamic_rnn_with_lengths", "import_meta_graph", "reference_variable", "cond_of_version_1"]


@pytest.mark.core
def test_programs_of_tensorflow_1_are_equal_or_refused(tmp_path: Path) -> None:
    rows = {row.name: row for row in compared(SAMPLE, tmp_path)}
    assert list(rows) == SAMPLE
    assert {name: row.kind for name, row in rows.items()} == {
        **dict.fromkeys(SAMPLE[:3], "equal"),
        **dict.fromkeys(SAMPLE[3:], "refused"),
    }, rows
    assert [row.text for row in rows.values()][:3] == ["1e-10"] * 3
    assert "op: w; next: call wh.init()" in rows["reference_variable"].text
    assert "op: cond/Merge; next: call wh.init()" in rows["cond_of_version_1"].text
