"""Cases of the zoo on two GPUs that are the host's, against one device in float64: ``python -m tests.host_gpu``.

    python -m tests.host_gpu                              all of them, through each backend
    python -m tests.host_gpu --backends pinned gpt/sgd/5,3/split

A line for each: the worst difference, or what went wrong; ends with 1 where one is wrong. A case that fails ends its
run: those behind it run in another.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import forkserver
from tests.forkserver import warm_python
from tests.host_gpu.build import ROOT, HostGpu, build_host_cuda, build_plugin
from tests.launcher.helpers import Launcher
from tests.oracle.execute import load
from tests.oracle.metric import difference, limit
from tests.oracle.pool import Pool, flavours

BACKENDS = ("cuda-ipc", "pinned", "nccl", "whale")
# case/optimizer/shares/scope, as of zoo_on_gpus.py.
CASES = (
    "mlp_metrics/sgd/5,3/replica",
    "mlp_adamw/adamw/6,2/zero:3",
    "mlp_clipped/clipped/3,5/zero:1",
    "mlp_lazy/sgd/5,3/replica",
    "convnet/sgd/5,3/replica",
    "conv1d/adam/4,4/split",
    "separable/sgd/5,3/replica",
    "group_norm/sgd/5,3/split",
    "layer_norm/sgd/5,3/split",
    "embedding/sgd/5,3/split",
    "embedding/adam/5,3/zero:3",
    "two_inputs/sgd/5,3/replica",
    "weighted/sgd/2,6/replica",
    "stateless_dropout/sgd/5,3/replica",
    "routed_experts/sgd/even,even/split",
    "margin/sgd/even,even/split",
    "experts/sgd/5,3/split",
    "words/sgd/5,3/replica",
    "lstm/sgd/5,3/replica",
    "gru/adam/6,2/zero:3",
    "masked_bilstm/sgd/5,3/replica",
    "module/sgd/5,3/replica",
    "einsum/sgd/5,3/split",
    "gather/sgd/5,3/replica",
    "while_loop/sgd/5,3/replica",
    "global_condition/sgd/5,3/replica",
    "contrastive/sgd/5,3/replica",
    "gradient_penalty/sgd/5,3/replica",
    "gpt/sgd/even,even/split",
    "tf1_mlp/sgd/even,even/stage:2",
    "tf1_momentum/momentum/8,0/replica",
    "tf1_convolution/sgd/5,3/replica",
)
IN_A_RUN, RUN_S = 5, 280.0


def outcomes(cases: Sequence[str], backend: str, folder: Path, pool: Pool) -> Iterator[tuple[str, str]]:
    """Yields (case, what is wrong; "" and the error where nothing is) as runs tell."""
    launcher = Launcher(folder, warm_python())
    gpus = HostGpu(2 << 30, name="A"), HostGpu((1024 if backend == "nccl" else 600) << 20, 2.0, name="B")
    launcher.environment.pop("CUDA_VISIBLE_DEVICES", None)
    launcher.environment |= build_host_cuda().variables(*gpus)
    launcher.environment |= {"WHALE_COMMUNICATION_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    left = list(cases)
    while left:
        scripts = str(ROOT / "tests/host_gpu/on_host_gpus.py"), "none", str(ROOT / "tests/host_gpu/zoo_on_gpus.py")
        done = launcher.run("-np", "2", *scripts, str(folder), *left[:IN_A_RUN], timeout_s=RUN_S)
        ran = left[:IN_A_RUN]
        while left and left[0] in ran and f"done: {left[0]}" in done.stdout:
            case = left.pop(0)
            yield case, compare(case, folder / case.replace("/", "_"), pool)
        if done.returncode != 0:
            yield left.pop(0), f"WRONG: {(done.stdout + done.stderr)[-1500:]}"


def compare(case: str, folder: Path, pool: Pool) -> str:
    """Compares what ranks have computed with one device."""
    name, optimizer, *_ = case.split("/")
    wanted = pool.reference(flavours()[0], name, "float64", optimizer)
    worst = max(
        (difference(load(wanted["path"]), load(folder / f"{rank}.npz"), wanted["floor"]) for rank in range(2)),
        key=lambda one: one.error,
    )
    wrong = "" if worst.error <= limit("float64", 0.0) else f"WRONG: {worst.where} "
    return f"{wrong}differs by {worst.error:.1e}"


def main() -> int:
    """Runs the cases; 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.host_gpu")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    parser.add_argument("--backends", nargs="*", default=[*BACKENDS], choices=BACKENDS)
    asked = parser.parse_args()
    build_plugin()
    wrong = 0
    forkserver.open_folder()
    with contextlib.ExitStack() as stack:
        stack.callback(forkserver.close_folder)
        pool = stack.enter_context(Pool())
        for backend in asked.backends:
            with tempfile.TemporaryDirectory(prefix="whale-host-gpu-") as folder:
                for case, said in outcomes(asked.cases, backend, Path(folder), pool):
                    wrong += said.startswith("WRONG")
                    print(f"{case} through {backend}: {said}", flush=True)
    print(f"{wrong} of {len(asked.cases) * len(asked.backends)} are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
