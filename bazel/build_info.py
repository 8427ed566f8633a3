"""Prints the build_info.json of libraries that Bazel has built: ``build_info.py description.json``."""

import json
import sys
from pathlib import Path

from whale_ops.build import compute_core_digest

core, compiler = compute_core_digest(), "the C++ toolchain of Bazel"
libraries = json.loads(Path(sys.argv[1]).read_text())["libraries"]
print(json.dumps({library["name"]: {**library["facts"], "core": core, "compiler": compiler} for library in libraries}))
