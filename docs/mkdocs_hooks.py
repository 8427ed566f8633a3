"""What the site has besides the files of this folder: pages from outside, the command's help, the API's docstrings."""

from __future__ import annotations

import argparse
import ast
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
# Scripts that the theme would load from another host; `make docs` puts them there, where npm is. Decision: 0165.
SCRIPTS = ROOT / "build" / "site"
MERMAID, WORKER = SCRIPTS / "mermaid.min.js", SCRIPTS / "iframe-worker.js"
_WORKER_TAG = re.compile(r'<script src="https://unpkg.com/iframe-worker/shim"></script>')
# Where the function is that another place wraps.
WRAPPED = {"whale.frontends.start.init": "whale.runtime.start.init"}
# What tells more about a group of public names.
GUIDES = {
    "Starting and ending a run": "[Running](../guides/running.md), [configuration](../guides/configuration.md)",
    "Programs": "[A custom loop](../guides/custom_loop.md), [Keras](../guides/keras.md), "
    "[TensorFlow 1](../guides/tf1.md), [giant layers](../guides/giant.md)",
    "Scopes and annotations": "[Splitting](../guides/split.md), [pipelines](../guides/pipeline.md), "
    "[recompute](../guides/micro_batches.md)",
    "Data": "[Data](../guides/data.md)",
    "Keeping what was trained, and going on": "[Checkpoints](../guides/checkpoints.md), "
    "[faults](../guides/running.md#faults)",
    "Looking at plans and runs": "[The planner](../guides/planner.md), [memory](../guides/memory.md)",
    "Errors": "[By message](../troubleshooting.md)",
}
# A picture for each scheme, as GitHub shows it; a reader of the site may choose the scheme, and pictures follow.
_PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
    r'<img src="([^"]+)" (alt="[^"]*")></picture>'
)
_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Has diagrams drawn by a script of the site's own; without it they stay text, which is said."""
    if MERMAID.exists():
        config.extra_javascript.append("javascripts/mermaid.min.js")
    else:
        print(f"no {MERMAID.relative_to(ROOT)}: diagrams stay text (`make docs` takes it by npm)", file=sys.stderr)
    if not WORKER.exists():
        print("no iframe-worker.js: the search needs a server (python -m http.server -d build/docs)", file=sys.stderr)
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Takes the worker of the search from the site instead of from another host."""
    up = posixpath.relpath(".", posixpath.dirname(page.file.dest_uri) or ".")
    return _WORKER_TAG.sub(
        f'<script src="{up}/javascripts/iframe-worker.js"></script>' if WORKER.exists() else "", output
    )


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Does the same in pages of the theme, such as 404.html."""
    return _WORKER_TAG.sub("", output)


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, and the site's own scripts."""
    for script in filter(Path.exists, (MERMAID, WORKER)):
        files.append(File.generated(config, f"javascripts/{script.name}", abs_src_path=str(script)))
    pages = {page: (ROOT / name).read_text() for name, page in OUTSIDE.items()}
    pages |= {"reference/cli.md": command_line(), "reference/api.md": api()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files outside of the site lead to their page in it, or are text; pictures follow the site's scheme."""
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

    pictured = _PICTURE.sub(r'<img src="\2#only-light" \3><img src="\1#only-dark" \3>', markdown)
    return _LINK.sub(link, pictured)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keeps options in code whole: a browser may end a line behind each of their hyphens."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="whole">\g<0></span>', code[0]), html)


def command_line() -> str:
    """Every verb's help, as the parser has it in a terminal of 80 columns: a column of the page has hardly more."""
    from whale.cli import make_parser

    os.environ["COLUMNS"] = "80"
    top = make_parser()
    (verbs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["# Command line", "", f"```text\n{top.format_help()}```"]
    for name, verb in verbs.choices.items():
        parts += ["", f"## whale {name}", "", f"```text\n{verb.format_help()}```"]
    return "\n".join(parts) + "\n"


def api() -> str:
    """Every public name with its docstring, by task, as the stub file groups them."""
    parts = [
        "# API",
        "",
        "`import whale as wh`; names are loaded when they are first used. Each group links to what tells more.",
    ]
    for line in (ROOT / "whale" / "__init__.pyi").read_text().splitlines():
        if found := re.match(r"# (?!ruff|Decision|The public)([A-Z].*)", line):
            if found[1].startswith("Names of the first Whale"):
                break
            parts += ["", f"## {found[1]}", "", GUIDES.get(found[1], "")]
        elif found := re.match(r"from (\S+) import (\w+) as (?!_)(\w+)", line):
            module, name, public = found.groups()
            if public in ("layers", "losses", "optimizers"):
                parts += [name for inner in _list_public(module, name) for name in _documented(*inner)]
            else:
                parts += _documented(f"{module}.{name}", f"wh.{public}")
    return "\n".join(parts) + "\n"


def _list_public(module: str, name: str) -> list[tuple[str, str]]:
    """Returns (place, public name) of what a module of public names has, or takes from others."""
    tree = ast.parse((ROOT / module.replace(".", "/") / f"{name}.py").read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whale."):
            found += [(f"{node.module}.{one.name}", one.name) for one in node.names if one.asname == one.name]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append((f"{module}.{name}.{node.name}", node.name))
    return [(place, f"wh.{name}.{public}") for place, public in found if not public.startswith("_")]


def _documented(place: str, public: str) -> list[str]:
    place = WRAPPED.get(place, place)
    options = [f'heading: "{public}"', f'toc_label: "{public}"']
    return ["", f"::: {place}", "    options:", *(f"      {option}" for option in options)]
