"""Runs the command ``whale`` as ``python -m whale``."""

from __future__ import annotations

import sys

from whale.cli import main

if __name__ == "__main__":
    sys.exit(main())
