"""Runs a script under a saved plan and brings back what its ranks measured (see whale.runtime.tools.analyze)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from whale.errors import ClusterError
from whale.launcher.mpirun import PLAN_VARIABLE, Options
from whale.launcher.run import run


def measure_script(plan: str, script: Sequence[str], ranks: int, steps: int, profile: str) -> tuple[bytes, list[bytes]]:
    """Runs some steps of a script on that many ranks of this host and returns the prediction and the measurements.

    Args:
        plan: the plan's file.
        script: path and arguments.
        profile: file of measurements, by which is predicted.

    Returns:
        The prediction of the program that ran and each rank's measurements, as JSON (see
        whale.planner.report.analysis).

    Raises:
        ClusterError: the script is gone, or the run failed.
    """
    if not script or not Path(script[0]).is_file():
        raise ClusterError(
            "the script of the plan does not exist here",
            given=script[0] if script else "a plan without a script",
            expected="the script where it was when `whale plan -o FILE script` was called",
            action="put it back, or make the plan again",
        )
    os.environ[PLAN_VARIABLE] = os.path.abspath(plan)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, str(steps), os.path.abspath(profile), *script)
        code = run(Options(ranks, "whale.runtime.tools.analyze", arguments, as_module=True))
        found = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        prediction = Path(folder) / "prediction.json"
        if code or not all(path.exists() for path in (*found, prediction)):
            raise ClusterError(
                "the run under the plan failed",
                given=f"exit code {code}",
                action="correct what the ranks say above",
            )
        return prediction.read_bytes(), [path.read_bytes() for path in found]
