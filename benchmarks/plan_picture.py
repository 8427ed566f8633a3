"""Takes the pictures of a plan's page that README and the site show: ``python -m benchmarks.plan_picture --out docs``.

Runs the commands that README gives below the picture, and lets Chromium draw the page that they write, light and dark,
from its beginning to the end of the part about layers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    "cluster --example",
    "plan --describe gpt:layers=48,hidden=4096,heads=32,batch=96 --cluster lab.yaml -o gpt.json",
    "html gpt.json -o gpt.html",
)
WIDTH = 1240
SCHEMES = (("plan.png", 1), ("plan-dark.png", 0))
_MEASURE = """<script>addEventListener("load", () => {
const layers = document.getElementById("heat").closest("section").getBoundingClientRect();
document.body.dataset.end = Math.ceil(layers.bottom + 14); });</script>"""


def write_page(folder: Path) -> Path:
    """Runs README's commands in a folder, and returns the page."""
    for command in COMMANDS:
        line = [sys.executable, "-m", "whale", *command.split()]
        done = subprocess.run(line, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        if command.startswith("cluster"):
            (folder / "lab.yaml").write_text(done.stdout)
    return folder / "gpt.html"


def take(page: Path, out: Path, browser: str) -> None:
    """Takes both pictures of a page."""
    line = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=3000",
        "--run-all-compositor-stages-before-draw",  # or a busy machine leaves tiles out
    ]
    line.append(f"--user-data-dir={page.parent / 'profile'}")
    measured = page.with_name("measured.html")
    measured.write_text(page.read_text().replace("<head>", f"<head>{_MEASURE}"))
    dom = subprocess.run(
        [*line, f"--window-size={WIDTH},2000", "--dump-dom", measured.as_uri()],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    end = re.search(r'data-end="(\d+)"', dom)
    assert end is not None, "the page has no part about layers"
    for name, scheme in SCHEMES:
        shot = [f"--window-size={WIDTH},{end[1]}", f"--blink-settings=preferredColorScheme={scheme}"]
        shot.append(f"--screenshot={(out / name).resolve()}")
        subprocess.run([*line, *shot, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that receives plan.png and plan-dark.png")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        parser.error("no Chromium on PATH")
    with tempfile.TemporaryDirectory() as name:
        take(write_page(Path(name)), options.out, browser)


if __name__ == "__main__":
    main()
