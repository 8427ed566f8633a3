"""Replaces a rank's process by the script given to ``epl-launch``; with --log_dir the output of the script goes to a
file.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Executes the script in place of this process."""
    script = os.environ["EPL_LAUNCH_SCRIPT"]
    folder = os.environ.get("EPL_LAUNCH_LOGS")
    if folder is not None:
        rank = os.environ["WHALE_RANK"]
        mine = os.path.join(folder, rank)
        os.makedirs(mine, exist_ok=True)
        file = os.open(os.path.join(mine, f"stderr_{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        print(f"[task_index: {rank}] log file: {mine}/stderr_{rank}.log", flush=True)
        os.dup2(file, 1)
        os.dup2(file, 2)
    program = sys.executable if script.endswith(".py") else "bash"
    os.execvp(program, [program, script, *([mine] if folder is not None else [])])


if __name__ == "__main__":
    main()
