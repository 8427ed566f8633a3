"""Writes the tables of the documentation's page of keys, from the definitions in `keys`.

python -m whale.config.page docs/guides/configuration.md     # replaces the tables after the page's own text
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from whale.config.keys import KEYS, SECTIONS, Key

BEGIN = "<!-- What follows is written by `python -m whale.config.page`. -->"


def with_tables(page: str) -> str:
    """Returns a page's text with the tables after its own text replaced by those of the present keys.

    Raises:
        ValueError: the page lacks the line `BEGIN`, after which tables are written.
    """
    text, mark, _ = page.partition(BEGIN)
    if not mark:
        raise ValueError(
            f"the page of configuration keys lacks the line {BEGIN}; add this line where the tables are to begin"
        )
    return text + mark + "\n" + tables()


def tables() -> str:
    """Returns a Markdown table for each section: its keys, with type, default and meaning."""
    lines = []
    for section, about in SECTIONS.items():
        lines += ["", f"## {section}", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{k.name}` | {_type(k)} | {_default(k)} | {k.help} |" for k in KEYS if k.section == section]
    return "\n".join(lines) + "\n"


def _type(key: Key) -> str:
    """Returns what the table says about a key's values: the choices, if there are any, else the type."""
    words = ", ".join(choice or "empty" for choice in key.choices)
    return f"list of: {words}" if words and key.type.startswith("list") else words or key.type


def _default(key: Key) -> str:
    if not key.default and key.type not in ("bool", "int", "float"):
        return "empty"
    if key.choices:
        return "all" if key.default == key.choices else str(key.default)
    return json.dumps(key.default)


def main() -> None:
    """Updates the pages that the command line names."""
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
