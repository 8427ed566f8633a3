"""What the site has besides the files of this folder: pages from outside, the command's help, the API's docstrings."""

from __future__ import annotations

import argparse
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    pages = {page: (ROOT / name).read_text() for name, page in OUTSIDE.items()}
    pages |= {"reference/cli.md": command_line(), "reference/api.md": api()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside of the site lead to their page in it, or are text."""
    own = next((name for name, target in OUTSIDE.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path) or not path:
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(own), path))
        inside = OUTSIDE.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if inside is None or files.get_file_from_path(inside) is None:
            return text
        relative = posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{text}]({relative}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(link, markdown)


def command_line() -> str:
    """Every verb's help, as the parser has it."""
    from whale.cli import make_parser

    top = make_parser()
    (verbs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Command line", "", f"```text\n{top.format_help()}```"]
    for name, verb in verbs.choices.items():
        parts += ["", f"## whale {name}", "", f"```text\n{verb.format_help()}```"]
    return "\n".join(parts) + "\n"


def api() -> str:
    """Every public name with its docstring."""
    import whale as wh

    parts = ["# API", "", "`import whale as wh`; names are loaded when they are first used."]
    for name in sorted(name for name in wh.__all__ if not name.startswith("_")):
        thing = getattr(wh, name)
        if inspect.ismodule(thing):
            inside = {n: v for n, v in vars(thing).items() if not n.startswith("_") and _is_own(v, thing)}
            for inner, value in inside.items():
                parts += _documented(f"wh.{name}.{inner}", value)
        else:
            parts += _documented(f"wh.{name}", thing)
    return "\n".join(parts) + "\n"


def _is_own(value: Any, module: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _documented(name: str, thing: Any) -> list[str]:
    try:
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        signature = str(inspect.signature(thing)) if callable(thing) and not is_error else ""
    except (TypeError, ValueError):
        signature = ""
    signature = re.sub(r"'([^']*)'", r"\1", signature)
    text = inspect.getdoc(thing) or ""
    first, _, rest = text.partition("\n\n")
    found = ["", f"## {name}", "", f"```python\n{name}{signature}\n```", "", first.replace("``", "`")]
    return [*found, "", f"```text\n{rest}\n```"] if rest else found
