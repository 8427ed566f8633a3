"""Writes the tables of the page of keys from the table of keys.

python -m whale.config.page docs/guides/configuration.md     # puts them behind the page's own text
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from whale.config.keys import KEYS, SECTIONS, Key

BEGIN = "<!-- What follows is written by `python -m whale.config.page`. -->"


def with_tables(page: str) -> str:
    """Returns a page with the tables of today's keys behind its own text, in the place of those that it has.

    Raises:
        ValueError: the page says nowhere where they are to be.
    """
    text, mark, _ = page.partition(BEGIN)
    if not mark:
        raise ValueError(f"the page has no line {BEGIN}")
    return text + mark + "\n" + tables()


def tables() -> str:
    """Returns a table for each section: its keys, with type, default and meaning."""
    lines = []
    for section, about in SECTIONS.items():
        lines += ["", f"## {section}", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{k.name}` | {_type(k)} | {_default(k)} | {k.help} |" for k in KEYS if k.section == section]
    return "\n".join(lines) + "\n"


def _type(key: Key) -> str:
    """Describes what a key's values are: one of some words, or its type."""
    words = ", ".join(choice or "empty" for choice in key.choices)
    return f"list of: {words}" if words and key.type.startswith("list") else words or key.type


def _default(key: Key) -> str:
    if not key.default and key.type not in ("bool", "int", "float"):
        return "empty"
    if key.choices:
        return "all" if key.default == key.choices else str(key.default)
    return json.dumps(key.default)


def main() -> None:
    """Brings the pages that are named up to date."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
