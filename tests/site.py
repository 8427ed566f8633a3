"""Looks at the site in a browser, where one is installed: ``python -m tests.site build/docs``.

Nothing is wider than a window of 400 or 1,440 points, diagrams are drawn, no other host is asked, and each page is in
the search. With WHALE_TEST_PICTURES, a folder, it keeps pages as they were seen, light and dark.

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
WIDTHS, HEIGHT = (400, 1440), 1800
PICTURED = ("index", "architecture", "benchmarks", "reference/api")
_LOOK = """<script>
const look = frame => { const d = frame.contentDocument;
  return {wide: d.documentElement.scrollWidth, main: d.querySelector("article") !== null,
    text: d.querySelectorAll("pre.mermaid").length, drawn: d.querySelectorAll("div.mermaid").length}; };
addEventListener("load", () => setTimeout(() => {
  document.body.dataset.seen = JSON.stringify([...document.querySelectorAll("iframe")].map(look)); }, 1500));
</script>"""
_OUTSIDE = re.compile(r'(?:src|srcset)="(https?:)?//|<link[^>]+href="(https?:)?//(?!localhost)')


def look(site: Path, width: int, browser: list[str], folder: Path) -> list[str]:
    """Returns what is wrong with the pages in a window so wide."""
    frames = "".join(
        f'<iframe src="{(site / f"{page}.html").as_uri()}" style="border:0;width:{width}px;height:{HEIGHT}px"></iframe>'
        for page in PAGES
    )
    frame = folder / f"{width}.html"
    frame.write_text(f"<body>{_LOOK}{frames}")
    line = [
        *browser,
        f"--window-size={max(500, width)},{HEIGHT}",
        "--virtual-time-budget=20000",
        "--dump-dom",
        frame.as_uri(),
    ]
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
        if seen["text"]:
            wrong.append(f"{page}: {seen['text']} diagrams are not drawn")
    return wrong


def take_pictures(site: Path, browser: list[str], profile: str, folder: Path) -> None:
    """Keeps some pages as they are seen."""
    for page in PICTURED:
        for scheme in (0, 1):  # dark, light; the site remembers which it was shown in, so that each has a profile
            name = f"site-{page.replace('/', '-')}-{'light' if scheme else 'dark'}.png"
            shot = [f"--screenshot={(folder / name).resolve()}", f"--blink-settings=preferredColorScheme={scheme}"]
            size = [f"--window-size=1440,{HEIGHT}", "--virtual-time-budget=5000", f"--user-data-dir={profile}{scheme}"]
            subprocess.run([*browser, *size, *shot, (site / f"{page}.html").as_uri()], capture_output=True, timeout=180)


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    pages = sorted(site.rglob("*.html"))
    outside = [str(page.relative_to(site)) for page in pages if _OUTSIDE.search(page.read_text())]
    wrong = [f"{len(outside)} pages ask other hosts: {', '.join(outside[:3])}"] if outside else []
    index = (site / "search" / "search_index.js").read_text()
    wrong += [f"{page}: is not in the search" for page in PAGES if f'"{page}.html' not in index]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium on PATH: the site was not looked at", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as name:
            line = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            line += ["--allow-file-access-from-files", f"--user-data-dir={name}/profile"]
            for width in WIDTHS:
                wrong += look(site, width, line, Path(name))
            if pictures := os.environ.get("WHALE_TEST_PICTURES"):
                take_pictures(site, line, f"{name}/seen", Path(pictures))
    print("\n".join(wrong) or f"{len(pages)} pages, {len(PAGES)} looked at")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
