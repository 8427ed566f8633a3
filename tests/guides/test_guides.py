"""One of the programs; all of them: ``python -m tests.guides``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guides.table import NEEDS, alone, compared, names


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer_translation"])
def test_a_program_equals_itself_alone(name: str, tmp_path: Path) -> None:
    assert alone(name, tmp_path) == ""
    row = compared(name, 2, tmp_path)
    assert row.ok, row


def test_what_programs_need_is_known() -> None:
    assert set(NEEDS) <= set(names())
    assert len(names()) >= 25
