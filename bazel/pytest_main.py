"""Runs pytest on the files given, without long draws, beside the pyproject.toml of this tree of links."""

import os
import sys

import pytest

if __name__ == "__main__":
    options = ["-c", "pyproject.toml", "-p", "no:cacheprovider", "-q", "-m", "not long"]
    report = os.environ.get("XML_OUTPUT_FILE")
    sys.exit(pytest.main([*options, *([f"--junitxml={report}"] if report else []), *sys.argv[1:]]))
