"""Every file that is read, changed at random: Whale answers, or says what is wrong, within two seconds."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cost_model.graph import machine_profile
from tests.attack.plans import changed
from tests.cost_model.test_captured import TABLE
from tests.programs import mlp, planned
from whale.cli import main
from whale.config import Config
from whale.config.reading import FILE_VARIABLE
from whale.errors import REPORT_FAULT, WhaleError
from whale.runtime.annotate import read_annotations
from whale.runtime.checkpoint.folder import CheckpointFolder

LIMIT_S = 2.0  # of the processor: beside other tests, an answer takes as long as they let it
CLUSTER = """\
name: small
networks: {fabric: {type: infiniband-hdr-200}}
hosts:
  - {name: new, count: 1, devices: [{type: a100-sxm-80gb, count: 2}], networks: {fabric: {nics: 1}}}
  - {name: old, devices: [{type: v100-sxm2-16gb, count: 1}, {type: t4, share: 0.5}], networks: {fabric: {nics: 1}}}
"""
JOB = """\
model: {layers: 4, hidden: 256, heads: 4, sequence: 128, vocabulary: 1024}
plan: {tensor: 1, stages: 1, data: 2, micro_batch: 1, batch: 8}
software: megatron-2022
"""
OFFERS = "offers:\n  - {name: one, cluster: cluster.yaml, price_per_hour: 2.0}\n"
JOBS = 'jobs:\n  - {name: a, describe: "gpt:layers=2,hidden=256,heads=4,batch=8", rows: 1000}\n'
_TOKENS = (
    "[" * 50_000, "{a: " * 3000, "- " * 3000, "&a [*a, *a]", ".inf", "-.inf", ".nan", "9" * 5000, "1e400", "0x",
    "2001-99-99",
    "!!python/object/apply:os.system [id]", "\0", "\ufeff", "? [a]\n: b", "-1", "0", "null", "~", "1" * 19,
    "\u0660", "<<: 1",
)  # fmt: skip


@dataclass
class Found:
    """What came of the inputs: how many were answered, how many refused, and what else happened."""

    answered: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def count(self) -> int:
        """Inputs that were tried."""
        return self.answered + self.refused + len(self.problems)


def noise(data: bytes, generator: random.Random) -> bytes:
    """The bytes with a few of them changed, cut, put twice, or with something that a parser may stumble over."""
    how, at = generator.random(), generator.randrange(len(data) + 1)
    if how < 0.3:
        out = bytearray(data)
        for _ in range(generator.randrange(1, 5)):
            out[generator.randrange(len(out))] = generator.randrange(256)
        return bytes(out)
    if how < 0.5:
        return data[:at] + data[generator.randrange(len(data) + 1) :]
    token = generator.choice(_TOKENS).encode("utf-8", "surrogatepass")
    words = data.split()
    if how < 0.75 and words:
        old = generator.choice(words).strip(b"[]{},:")
        return data.replace(old, token, 1) if old else token
    return data[:at] + token + data[at:]


class Inputs:
    """The files in a folder, and the commands that read them.

    Args:
      folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        texts = {"cluster.yaml": CLUSTER, "job.yaml": JOB, "offers.yaml": OFFERS, "jobs.yaml": JOBS}
        for name, text in texts.items():
            (folder / name).write_text(text)
        model = "gpt:layers=2,hidden=256,heads=4,sequence=128,vocabulary=1024,batch=8"
        asked = ["plan", "--describe", model, "--cluster", self._path("cluster.yaml"), "--budget", "1"]
        self._run(*asked, "-o", self._path("described.json"))
        plan = planned(mlp(8, 4, 4, 2), 4, 4)
        plan.save(folder / "captured.json")
        node = list(plan.strategies[""])[-1]
        (folder / "config.json").write_text(json.dumps({"mesh.auto_parallel": True, "zero": {"level": 1}}))
        (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-2"\n')
        machine_profile.write(TABLE, folder / "profile.json")
        (folder / "annotations.json").write_text('{"a/*": {"split": {"dim": -1}}, "b": {"stage": 1}}')
        described, captured, cluster = map(self._path, ("described.json", "captured.json", "cluster.yaml"))
        out = self._path("out")
        asked = ["plan", "--describe", "gpt:layers=2,hidden=256,heads=4,batch=8", "--budget", "0.2"]
        simulate = ["simulate", self._path("job.yaml"), "--cluster", cluster]
        self.commands: dict[str, list[list[str]]] = {
            "described.json": [
                *(["show", "-v", described], ["check", described], ["explain", described, "0"]),
                *(["diff", described, described], ["diff", captured, described]),
                *(["html", described, "-o", out], ["trace", described, "-o", out]),
            ],
            "captured.json": [["show", "-v", captured], ["explain", captured, node], ["diff", captured, captured]],
            "cluster.yaml": [simulate],
            "job.yaml": [simulate],
            "offers.yaml": [[*asked, "--offers", self._path("offers.yaml")]],
            "jobs.yaml": [["plan", "--jobs", self._path("jobs.yaml"), "--cluster", cluster]],
        }
        self.readers: dict[str, Callable[[str], Any]] = {
            "config.json": lambda path: Config(environment={FILE_VARIABLE: path}),
            "annotations.json": read_annotations,
            "checkpoint": lambda path: CheckpointFolder(str(folder), "ckpt", 3, None),
            "profile.json": machine_profile.read,
        }
        for command in (one for commands in self.commands.values() for one in commands):
            assert self._run(*command)[0] in (0, 1), command

    def tried(self, count: int, seed: int) -> Found:
        """Changes one file after the other, ``count`` times in all, and has each read by one of its commands."""
        found, generator = Found(), random.Random(seed)
        names = [*self.commands, *self.readers]
        whole = {name: (self.folder / name).read_bytes() for name in names}
        for number in range(count):
            name = names[number % len(names)]
            data = noise(whole[name], generator)
            if name.endswith(".json") and generator.random() < 0.7:
                data = msgspec.json.encode(changed(msgspec.json.decode(whole[name]), generator))
            (self.folder / name).write_bytes(data)
            self._try(name, generator, found, data)
            (self.folder / name).write_bytes(whole[name])
        return found

    def _try(self, name: str, generator: random.Random, found: Found, data: bytes) -> None:
        start_s, what = time.process_time(), name
        try:
            if name in self.readers:
                code, said = 0, ""
                self.readers[name](self._path(name))
            else:
                command = generator.choice(self.commands[name])
                what = f"{command[0]} {name}"
                code, said = self._run(*command)
            found.answered += code in (0, 1)
            found.refused += code == 2
            if code not in (0, 1, 2):
                found.problems.append(f"{what}: exit code {code}")
            self._find_blame(said, what, found, data)
        except WhaleError as error:
            found.refused += 1
            self._find_blame(str(error), what, found, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found.problems.append(f"{what}: {type(error).__name__}: {str(error)[:200]} ({_kept(data)})")
        took_s = time.process_time() - start_s
        found.slowest_s = max(found.slowest_s, took_s)
        if took_s > LIMIT_S:
            found.problems.append(f"{what}: took {took_s:.1f} s ({_kept(data)})")

    def _find_blame(self, said: str, what: str, found: Found, data: bytes) -> None:
        """Notes a problem where a damaged file is taken for a fault of Whale."""
        if REPORT_FAULT in said:
            found.problems.append(f"{what}: said to be a fault of Whale: {said[:200]} ({_kept(data)})")

    def _run(self, *command: str) -> tuple[int, str]:
        """Returns (the exit code, what was said on standard error)."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            return main(list(command)), said.getvalue()

    def _path(self, name: str) -> str:
        return str(self.folder / name)


def _kept(data: bytes) -> str:
    path = Path("/tmp") / f"whale-attack-{abs(hash(data)):x}"
    path.write_bytes(data)
    return str(path)
