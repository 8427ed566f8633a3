"""Plans of a script that were changed after they were made: each is refused, or trains as on one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tensorflow as tf

import whale as wh
from tests.oracle.metric import difference, limit
from tests.runtime.compile.test_auto import Deep
from whale.errors import REPORT_FAULT, PlanError, WhaleError
from whale.ir.plan import Plan, PlanRecord, file_text, record_from_text
from whale.ir.program import Program
from whale.partition.verify_saved_plan import verify_saved_plan
from whale.passes.settings import PlanSettings
from whale.runtime.context import DryRun
from whale.runtime.start import plan_only

CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {},
    "zero": {"memory.zero": 1},
    "micro-batches": {"pipeline.micro_batches": 2},
}
_NUMBERS = (-1, 0, 1, 2, 3, 7, 10**9, 2**31, 2**63 - 1, -(2**63), 10**30)
_PLACEMENTS = "B O P(sum) P(max) S(0)[8,8] S(0)[16,0] S(1)[8,8] S(9)[1,1] S(0)[-8,24] S(0)[1] own[8,8] x".split()
# The parts of a plan by which a step is lowered; the others are told to people.
_PARTS = "graphs strategy_table reshards returned batch_inputs variables expanded micro_batches local_inputs".split()


def fresh() -> Deep:
    """The same program each time: Keras numbers the names of its layers."""
    tf.keras.backend.clear_session()
    return Deep(wh.function)


def one_step() -> None:
    deep = fresh()
    deep.step(*deep.batch(0))


@dataclass
class Counts:
    """What became of changed plans: refused when read, refused by the proof, and legal as they are."""

    unreadable: int = 0
    illegal: int = 0
    legal: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def changed(tree: Any, generator: random.Random) -> Any:
    """A copy of decoded JSON with one thing in it changed: gone, twice, another number, placement or kind."""
    tree = deepcopy(tree)
    parts = [part for part in _PARTS if part in tree] if generator.random() < 0.8 else []
    path = [generator.choice(parts or list(tree))]
    while True:
        parent = tree
        for step in path[:-1]:
            parent = parent[step]
        at = parent[path[-1]]
        if isinstance(at, dict | list) and at and generator.random() < 0.9:
            path.append(generator.choice(list(at) if isinstance(at, dict) else range(len(at))))
            continue
        break
    how = generator.random()
    if how < 0.2:
        del parent[path[-1]]
    elif how < 0.3 and isinstance(parent, list):
        parent.append(deepcopy(at))
    elif isinstance(at, bool):
        parent[path[-1]] = not at
    elif isinstance(at, int):
        parent[path[-1]] = generator.choice((at + 1, at - 1, *_NUMBERS))
    elif isinstance(at, str) and how < 0.9:
        parent[path[-1]] = generator.choice(_PLACEMENTS)
    else:
        parent[path[-1]] = generator.choice((None, [], {}, "", 1.5, [[[]]], {"a": 1}))
    return tree


def made(config: dict[str, Any]) -> tuple[Plan, Program, PlanSettings]:
    """What a dry run of two ranks plans for the model's step."""
    found: list[tuple[Plan, Program, PlanSettings]] = []
    with plan_only(DryRun(2, lambda plan, program, settings, _: found.append((plan, program, settings)))):
        wh.init(config)
        one_step()
    return found[0]


def judged(count: int, seed: int) -> Counts:
    """Changes plans ``count`` times; those that are found legal are kept, with their configurations."""
    counts, generator = Counts(), random.Random(seed)
    for number, (name, config) in enumerate(CONFIGS.items()):
        plan, program, settings = made(config)
        whole = msgspec.json.decode(file_text(plan.record()))
        for _ in range(number, count, len(CONFIGS)):
            tree = {**whole, "program": changed(whole["program"], generator)}
            start_s = time.monotonic()
            try:
                read = record_from_text(msgspec.json.encode(tree), PlanRecord).plan
                assert read is not None
                if read.ranks != 2:
                    counts.unreadable += 1
                    continue
                verify_saved_plan(program, read, settings, name)
                counts.legal.append((tree, config))
            except PlanError as error:
                counts.illegal += 1
                if REPORT_FAULT in str(error):
                    counts.problems.append(f"{name}: a changed plan is said to be a fault of Whale: {error}")
            except ValueError:
                counts.unreadable += 1
            except Exception as error:  # anything else is what this looks for
                counts.problems.append(f"{name}: {type(error).__name__}: {error}")
            counts.slowest_s = max(counts.slowest_s, time.monotonic() - start_s)
    return counts


def trained(folder: Path, plans: list[tuple[dict[str, Any], dict[str, Any]]], start: Callable[..., None]) -> list[str]:
    """Trains under each of these plans on two ranks of this process, and says which do not end as one device does."""
    expected, problems = Deep().train(), []
    for number, (tree, config) in enumerate(plans):
        path = folder / f"plan{number}.json"
        path.write_bytes(msgspec.json.encode(tree))
        try:
            start(2, **{"mesh.plan": str(path), **config})
            worst = difference(expected, fresh().train(), 0.1)
            if worst.error > limit("float64", 0.0):
                problems.append(f"{path}: {worst}")
        except WhaleError as error:  # its fingerprint or choice may be what was changed
            if REPORT_FAULT in str(error):
                problems.append(f"{path}: a changed plan is said to be a fault of Whale: {error}")
        except Exception as error:  # anything else is what this looks for
            problems.append(f"{path}: {type(error).__name__}: {error}")
        finally:
            wh.shutdown()
    return problems
