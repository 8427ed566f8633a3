"""The page of keys is what the table of keys says."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.config import page
from whale.config.keys import KEYS, SECTIONS

pytestmark = pytest.mark.core
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "configuration.md"


def test_the_page_is_written_from_the_table() -> None:
    text = PAGE.read_text()
    assert page.with_tables(text) == text, "python -m whale.config.page docs/guides/configuration.md"


def test_every_key_has_a_row_in_its_section() -> None:
    section, rows = "", []
    for line in PAGE.read_text().partition(page.BEGIN)[2].splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        rows += [(section, line.split("`")[1])] if line.startswith("| `") else []
    assert rows == [(name, key.name) for name in SECTIONS for key in KEYS if key.section == name]


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the line"):
        page.with_tables("# Configuration")
