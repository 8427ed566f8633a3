"""Looks at the site in a browser, where one is installed: ``python -m tests.site build/docs``.

Nothing is wider than a window of 400 or 1,440 points, pages and their pictures have the reader's scheme, diagrams are
drawn, no other host is asked, and each page is in the search. With WHALE_TEST_PICTURES, a folder, it keeps some pages
as they were seen, narrow and wide, light and dark.

Decision: 0165.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PAGES = (
    "index",
    "architecture",
    "benchmarks",
    "comparison",
    "oracle",
    "guides/configuration",
    "guides/custom_loop",
    "guides/planner",
    "reference/api",
    "reference/cli",
)
HEIGHT = 1800
# What is looked at: width, scheme; Chromium's number of a scheme, the site's name for it.
VIEWS = ((400, "light"), (1440, "dark"))
SCHEMES = {"dark": (0, "slate"), "light": (1, "default")}
PICTURED = ("index", "architecture", "benchmarks", "guides/configuration", "reference/api", "reference/cli")
_LOOK = """<script>
const look = frame => { const d = frame.contentDocument, scheme = d.body.dataset.mdColorScheme;
  const pictures = [...d.querySelectorAll("img[src*='#only-']")].filter(i => i.offsetWidth);
  return {wide: d.documentElement.scrollWidth, main: d.querySelector("article") !== null, scheme,
    shown: pictures.map(i => i.src.split("#only-")[1]), text: d.querySelectorAll("pre.mermaid").length}; };
addEventListener("load", () => setTimeout(() => {
  document.body.dataset.seen = JSON.stringify([...document.querySelectorAll("iframe")].map(look)); }, 1500));
</script>"""
_OUTSIDE = re.compile(r'(?:src|srcset)="(https?:)?//|<link[^>]+href="(https?:)?//(?!localhost)')

# What markdown has taken for a paragraph of a list, and was indented as code: columns, lines of a terminal.
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
_OF_CODE = re.compile(r"\S {3,}\S|\n {2,}\[\d\]|^whale run: |```")


def open_frames(site: Path, pages: Sequence[str], width: int, scheme: str, folder: Path) -> list[str]:
    """Writes a page of frames so wide, and returns Chromium's arguments for it: a window has 500 points at least."""
    size = f"border:0;width:{width}px;height:{HEIGHT}px"
    frames = "".join(f'<iframe src="{(site / f"{page}.html").as_uri()}" style="{size}"></iframe>' for page in pages)
    frame = folder / f"{width}.html"
    frame.write_text(f'<html style="color-scheme:light dark"><body style="margin:0">{_LOOK}{frames}')
    return [
        f"--window-size={max(500, width)},{HEIGHT}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme][0]}",
        f"--user-data-dir={folder / scheme}",
        frame.as_uri(),
    ]


def look(site: Path, width: int, scheme: str, browser: list[str], folder: Path) -> list[str]:
    """Returns what is wrong with the pages in a window so wide."""
    line = [*browser, "--virtual-time-budget=20000", "--dump-dom", *open_frames(site, PAGES, width, scheme, folder)]
    dom = subprocess.run(line, capture_output=True, text=True, check=True, timeout=180).stdout
    found = re.search(r'data-seen="([^"]*)"', dom)
    if found is None:
        return [f"{width}: the pages did not load"]
    wrong = []
    for page, seen in zip(PAGES, json.loads(html.unescape(found[1]))):
        if not seen["main"]:
            wrong.append(f"{page}: has no text")
        if seen["wide"] > width + 1:
            wrong.append(f"{page}: {seen['wide']} points wide in a window of {width}")
        if seen["scheme"] != SCHEMES[scheme][1] or set(seen["shown"]) - {scheme}:
            wrong.append(
                f"{page}: {seen['scheme']} with {seen['shown'] or 'no'} pictures, where the reader's is {scheme}"
            )
        if seen["text"]:
            wrong.append(f"{page}: {seen['text']} diagrams are not drawn")
    return wrong


def take_pictures(site: Path, browser: list[str], scratch: Path, folder: Path) -> None:
    """Keeps some pages as they are seen."""
    for page in PICTURED:
        for width in (400, 1440):
            for scheme in SCHEMES:
                name = f"site-{page.replace('/', '-')}-{width}-{scheme}.png"
                shot = ["--virtual-time-budget=5000", f"--screenshot={(folder / name).resolve()}"]
                line = [*browser, *shot, *open_frames(site, (page,), width, scheme, scratch)]
                subprocess.run(line, capture_output=True, timeout=180)


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    pages = sorted(site.rglob("*.html"))
    outside = [str(page.relative_to(site)) for page in pages if _OUTSIDE.search(page.read_text())]
    wrong = [f"{len(outside)} pages ask other hosts: {', '.join(outside[:3])}"] if outside else []
    wrong += [
        f"{page.relative_to(site)}: code that is drawn as text: {text[:60]!r}"
        for page in pages
        for text in _PARAGRAPH.findall(page.read_text())
        if _OF_CODE.search(text)
    ]
    index = (site / "search" / "search_index.js").read_text()
    wrong += [f"{page}: is not in the search" for page in PAGES if f'"{page}.html' not in index]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on PATH: the site was not looked at", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as name:
            line = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            line.append("--allow-file-access-from-files")
            for width, scheme in VIEWS:
                wrong += look(site, width, scheme, line, Path(name))
            if pictures := os.environ.get("WHALE_TEST_PICTURES"):
                take_pictures(site, line, Path(name), Path(pictures))
    print("\n".join(wrong) or f"{len(pages)} pages, {len(PAGES)} looked at")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
