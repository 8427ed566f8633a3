"""A worker process: reads one job per line (JSON), answers one line per job."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers jobs until stdin ends. What the job prints goes to stderr, so that it cannot spoil the answers."""
    faulthandler.register(signal.SIGUSR1)  # how the pool learns where a job hangs
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            start_s = time.perf_counter()
            try:
                answer = handle(json.loads(line))
            except Exception:
                answer = {"failure": traceback.format_exc()}
            print(json.dumps(answer | {"seconds": time.perf_counter() - start_s}), file=answers, flush=True)
