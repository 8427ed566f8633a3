"""One process of ``python -m benchmarks.giant.steps``: builds its program, then runs steps as it is asked for them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.groups import Answer, serve

KINDS = ("plain", "whale", "replica", "horovod")
BATCHES = 2  # that are gone through in turn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS, help="replica: Whale's data parallelism, without scopes")
    parser.add_argument("model", choices=("experts", "dlrm"))
    parser.add_argument("sizes", type=json.loads, help="arguments of the model")
    options = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

    def start() -> tuple[Answer, Callable[[], None]]:
        step, moved, end = _start(options.kind, options.model, options.sizes)
        for number in range(BATCHES):
            step(number, 1)

        def answer(steps: int, part: int) -> dict[str, Any]:
            step(0, part)  # in the caches is what this row uses
            times_s, before, sent = [], time.process_time(), moved()
            for number in range(steps):
                start_s = time.perf_counter()
                step(number % BATCHES, part)
                times_s.append(time.perf_counter() - start_s)
            cpu_s = (time.process_time() - before) / steps
            return {"times_s": times_s, "cpu_s": cpu_s, "bytes": (moved() - sent) / steps}

        return answer, end

    serve(rank, start)


def _start(kind: str, name: str, sizes: dict[str, Any]) -> tuple[Callable[[int, int], Any], Callable[[], int], Any]:
    """(one step of a batch, of which part of the rows; bytes that this rank has sent so far; orderly end)."""
    import tensorflow as tf

    from benchmarks.giant.embeddings import Dlrm
    from benchmarks.giant.experts import Experts
    from benchmarks.giant.measure import ALONE, SPREAD, counted

    scopes, function, ends, moved = ALONE, tf.function, _nothing, _none
    if kind in ("whale", "replica"):
        import whale as wh

        wh.init()
        scopes, function = SPREAD if kind == "whale" else ALONE, wh.function
        ends, moved = wh.shutdown, counted
    if kind == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
        scopes, ends = replace(ALONE, tape=hvd.DistributedGradientTape), hvd.shutdown
        # Each rank has its part of the batch, and all experts.
        sizes = {**sizes, "tokens": sizes["tokens"] // hvd.size(), "groups": sizes["groups"] // hvd.size()}
    model = Experts(scopes, tf.float32, **sizes) if name == "experts" else Dlrm(scopes, tf.float32, **sizes)
    step = function(model.step)

    @functools.cache
    def batch(number: int, part: int) -> Any:
        return model.batch(number) if isinstance(model, Experts) else model.batch(number, part)

    return lambda number, part: float(step(*batch(number, part))), moved, ends


def _nothing() -> None:
    pass


def _none() -> int:
    return 0


if __name__ == "__main__":
    main()
