"""Runs cases one after the other and prints what they give: under ``whale run``, or alone and without the library.

python -m tests.epl.on_ranks alone 2 quick_start clip
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()


def main(who: str, ranks: int, names: list[str]) -> None:
    from tests.epl.cases import CASES, result_of

    alone = who == "alone"
    if alone:
        import tests.epl.one_device as epl
    else:
        import whale.epl as epl  # type: ignore[no-redef]
    rank = None if alone else int(os.environ["WHALE_RANK"])
    for case in CASES:
        if case.function not in names:
            continue
        try:
            found: object = result_of(case, epl, ranks, rank)
        except Exception as error:  # the others go on
            if len(names) == 1:
                raise
            traceback.print_exc()
            found = f"{type(error).__name__}: {error}"
        print(f"RESULT {json.dumps({'name': case.function, 'rank': rank, 'found': found})}", flush=True)
    assert not alone or "whale" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
