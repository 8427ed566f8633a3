"""Seeded cases: which ranks are taken away when, and what the others have to end with."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.forkserver import plain_python, warm_python
from tests.host_gpu.build import ROOT, HostGpu, build_host_cuda
from tests.launcher.helpers import read_partly

SCRIPT = Path(__file__).parent / "script.py"
_ON_GPUS = (str(ROOT / "tests/host_gpu/on_host_gpus.py"), "none")
MODES = ("loop", "shard", "save", "fit", "arrays")
# Under which ranks hold parts of variables: of a rank and the one with its copies, one may go at a time.
PARTS = tuple("zero1 zero3 stages split mesh zero3+save stages+save".split())
PARTS += tuple(f"{kind}+shard" for kind in ("zero1", "zero3", "stages", "split", "mesh"))
PARTS += tuple(f"{kind}+large" for kind in ("zero1+shard", "zero3", "stages", "split+shard", "mesh"))
HOSTS = tuple(f"{kind}+hosts" for kind in ("zero1", "zero3", "stages", "split", "zero3+large", "stages+shard"))
_STEPS = 12
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """A run of ``ranks`` ranks, and what happens to some of them, as script.py has it."""

    mode: str
    ranks: int
    faults: str

    @property
    def count(self) -> int:
        """How many ranks are taken away."""
        kinds = [fault.split(":")[2] for fault in self.faults.split(",")]
        return sum(2 if kind == "host" else kind not in ("slow", "join") for kind in kinds)

    def __str__(self) -> str:
        return f"{self.mode}/{self.ranks}/{self.faults}"


def drawn(seed: int, count: int) -> list[Case]:
    """Cases with ``count`` faults together, of which ranks that join and that are slow are some."""
    rng, cases, total = random.Random(seed), [], 0
    while total < count:
        if rng.random() < 0.08:  # a host is lost, with all of its ranks
            step, first, kind = (
                rng.randrange(_STEPS - 1),
                rng.choice([0, 2]),
                rng.choice(["kill", "kill", "late", "stop"]),
            )
            apart = f"{step}:{first}:{kind},{step}:{first + 1}:{kind}"
            cases.append(Case(rng.choice(HOSTS), 4, rng.choice([apart, f"{step}:{first}:host"])))
            total += 2
            continue
        if rng.random() < 0.05:  # stages are planned anew, and a rank goes then, or later
            ranks, slow = rng.choice([2, 4]), rng.randrange(2)
            anew = f"0:{1 - slow}:anew" if rng.random() < 0.5 else f"{_STEPS - 2}:{1 - slow}:kill"
            cases.append(Case("cuts", ranks, f"5:{slow}:slow,{anew}"))
            total += 2
            continue
        mode = rng.choice(rng.choice([MODES, PARTS]))
        ranks = 4 if mode.startswith("mesh") else rng.randint(6, 8) if rng.random() < 0.1 else rng.randint(2, 5)
        gone = rng.sample(range(ranks), rng.randint(1, ranks - 1))
        steps = [rng.randrange(_STEPS) for _ in gone]
        if mode in PARTS:
            steps = rng.sample(range(_STEPS), len(gone))
        elif rng.random() < 0.3:
            steps = [steps[0]] * len(steps)  # at once
        kinds = [rng.choice(["kill", "kill", "late", "stop", *["copy"] * (mode in PARTS)]) for _ in gone]
        if mode.endswith("save"):
            steps = [step + rng.choice([0, 101]) for step in steps]
        if len(gone) > 1 and not mode.endswith("save") and rng.random() < 0.5:
            _during_another(rng, mode, ranks, gone, steps, kinds)
        faults = [f"{s}:{r}:{k}" for s, r, k in zip(steps, gone, kinds)]
        if rng.random() < 0.2:
            faults.append(f"{rng.randrange(3)}:{rng.choice([r for r in range(ranks) if r not in gone])}:slow")
        if ("shard" in mode or mode in ("fit", "arrays")) and rng.random() < 0.6:
            faults += _joined(rng, ranks, gone, steps)
        cases.append(Case(mode, ranks, ",".join(faults)))
        total += len(faults)
    return cases


def _during_another(
    rng: random.Random, mode: str, ranks: int, gone: list[int], steps: list[int], kinds: list[str]
) -> None:
    """The second of those that go does so while the ranks go on without the first."""
    if mode in PARTS:  # so that neither has the other's copies
        if ranks < 4:
            return
        del gone[2:], steps[2:], kinds[2:]
        gone[1] = gone[0] ^ 1 if mode.startswith("mesh") else (gone[0] + 2) % ranks  # on a mesh, two apart are replicas
    steps[1] = steps[0]
    kinds[0], kinds[1] = rng.choice(["kill", "late", "stop"]), rng.choice(["meet", "move", "plan"])


def _joined(rng: random.Random, ranks: int, gone: list[int], steps: list[int]) -> list[str]:
    """A rank that joins between two steps, and may be taken away later, or, as others may, while it is taken in."""
    left = [step for step in range(_STEPS) if step not in steps]
    joins = rng.choice(left)
    asks = rng.choice([r for r in range(ranks) if r not in gone])
    faults = [f"{joins}:{asks}:join"]
    later = [step for step in left if step > joins]
    others = [r for r in range(ranks) if r not in gone and r != asks]
    draw = rng.random()
    if draw < 0.2:
        faults.append(f"-1:{ranks}:grow")
    elif draw < 0.5 and others and joins < _STEPS - 1:
        faults.append(f"{joins}:{rng.choice(others)}:grow")
    elif later and draw < 0.7:
        faults.append(f"{rng.choice(later)}:{ranks}:{rng.choice(['kill', 'late', 'stop'])}")
    return faults


@dataclass(frozen=True)
class Outcome:
    """What became of a case: what is wrong ("" if nothing), the largest difference, the time it took, what was said."""

    problem: str
    difference: float
    seconds: float
    said: str = ""


class Reference:
    """What one device computes, once for each mode that trains otherwise."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, {}

    def of(self, mode: str) -> list[np.ndarray]:
        """Losses and values."""
        otherwise = next((kind for kind in ("large", "cuts") if kind in mode), "")
        kind = mode if mode in ("fit", "arrays") else f"loop+{otherwise}" if otherwise else "loop"
        if kind not in self._known:
            result = self._folder / f"{kind}.npz"
            line = [plain_python(), str(SCRIPT), kind, str(result), ""]
            subprocess.run(line, check=True, capture_output=True, timeout=_LIMIT_S, env=_environment())
            self._known[kind] = _read(result)
        return self._known[kind]


def run(case: Case, reference: Reference, restarts: int = 0, gpus: int = 0) -> Outcome:
    """Runs a case, and compares what its last ranks end with, bit by bit but for rounding, and what is left behind.

    Args:
      restarts: how often `whale run` may start it again, which it then has to do each time.
      gpus: so many GPUs that are the host's (tests/host_gpu), which ranks have in turns.
    """
    expected = reference.of(case.mode)
    with tempfile.TemporaryDirectory(prefix="whale_elastic_") as folder:
        result = Path(folder) / "result.npz"
        hosts = Path(folder) / "hosts"
        several = case.mode.endswith("hosts")
        hosts.write_text("localhost:2\n127.0.0.1:2\n" if several else f"localhost:{case.ranks}\n")
        grows = several or "join" in case.faults
        started = ["--hosts-from", str(hosts)] if grows else ["-np", str(case.ranks)]
        started += ["--max-restarts", str(restarts)] * (restarts > 0)
        # Who kills a host kills mpirun and all above its rank, which may be no fork server.
        python = sys.executable if "host" in case.faults else warm_python()
        script = [*_ON_GPUS, str(SCRIPT)] if gpus else [str(SCRIPT)]
        line = [python, "-m", "whale", "run", *started, "--", *script, case.mode, str(result), case.faults]
        environment = {**_environment(), "ELASTIC_HOSTS": str(hosts)}
        if several:
            environment["WHALE_DEBUG_EMULATE_NETWORK"] = "hosts=2+2"
        if gpus:
            environment |= build_host_cuda().variables(*[HostGpu(600 << 20, name=f"GPU {n}") for n in range(gpus)])
            environment["PYTHONPATH"] = str(ROOT)
        start_s = time.monotonic()
        try:
            ended = subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)
        except subprocess.TimeoutExpired as late:
            said = read_partly(late)
            return Outcome(f"has not ended:\n{said}", 0.0, _LIMIT_S, said)
        seconds = time.monotonic() - start_s
        # Late in its last step a rank may be gone after the last exchange, and what it alone does is missing.
        last = any(fault.startswith(f"{_STEPS - 1}:") and fault.endswith("late") for fault in case.faults.split(","))
        if last and ended.returncode == 137 and "after the last step of the run" in ended.stderr:
            return Outcome("", 0.0, seconds, ended.stderr)
        if ended.returncode != 0 or not result.exists():
            return Outcome(f"exit code {ended.returncode}:\n{ended.stdout}{ended.stderr}", 0.0, seconds)
        if left := _processes(result):
            return Outcome(f"processes left behind: {sorted(left)}", 0.0, seconds)
        found = _read(result)
        worst = max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(found, expected, strict=True))
        wrong = "" if worst <= 1e-10 else f"differs from one device by {worst:.3g}:\n{ended.stdout}{ended.stderr}"
        gone = ended.stdout.count("the run went on without it") + ended.stderr.count("the run went on without it")
        if not wrong and not restarts and gone != case.count:
            wrong = f"{gone} ranks are said to be gone, {case.count} were taken away:\n{ended.stdout}{ended.stderr}"
        said = ended.stdout + ended.stderr
        joined, asked = len(re.findall(r" ranks? joins? after ", said)), case.faults.count("join")
        if not wrong and joined != asked and "grow" not in case.faults:
            wrong = f"ranks are said to have joined {joined} times, not {asked}:\n{ended.stdout}{ended.stderr}"
        return Outcome(wrong, worst, seconds, ended.stdout + ended.stderr)


def _read(path: Path) -> list[np.ndarray]:
    with np.load(path) as arrays:
        return [np.asarray(arrays[name], np.float64) for name in arrays.files]


def _environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("WHALE_", "OMPI_", "PMIX_"))}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _processes(result: Path) -> set[int]:
    """Processes of this machine that run the script for a result."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and str(result).encode() in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found
