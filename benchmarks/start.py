"""Seconds that a user waits for before and after the steps: starting, capturing, stopping.

    python -m benchmarks.start [--rounds 5]

Prints the median and the worst of the rounds for each. The tests assert what these seconds come from (what is imported,
how often something is called, who ends whom), and not the seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks.machine import machine

_ROOT = Path(__file__).resolve().parents[1]
_RULES = (
    "import time, numpy, whale.ir.program, whale.ir.layout; start_s = time.perf_counter()\n"
    "import whale.sharding_rules; whale.sharding_rules.load_rules(); print(time.perf_counter() - start_s)"
)
_UP = "import signal, time\n{handler}\nprint('up', flush=True)\nwhile True: time.sleep(1)"
_STUBBORN = "signal.signal(signal.SIGINT, lambda *_: print('told', flush=True))"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(machine())
    capture = capturing()
    measures: dict[str, Callable[[], float]] = {
        "importing whale.sharding_rules, with all rules": importing_rules,
        "the strategies of an op, asked for again": strategies,
        "ResNet50 with Adam, traced: to a program, inlined, folded": capture,
        "whale --help": lambda: command("--help"),
        "whale run -np 2 of an empty script": running,
        "whale run -np 2: from SIGINT to the end": lambda: stopping(signals=1),
        "whale run -np 2: from a second SIGINT, when the first is ignored, to the end": lambda: stopping(signals=2),
        "32 all-reduces of two ranks over a link of 20 ms": side_by_side,
        "an all-reduce of 1 MB over a link of 10 MB/s": narrow,
    }
    for name, measure in measures.items():
        seconds = [measure() for _ in range(rounds)]
        print(f"{statistics.median(seconds) * 1e3:10.3f} ms  worst {max(seconds) * 1e3:10.3f} ms  {name}", flush=True)


def importing_rules() -> float:
    """In a fresh process, beside NumPy and the program's types."""
    done = subprocess.run([sys.executable, "-c", _RULES], cwd=_ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def strategies() -> float:
    """Seconds for each of 3,000 questions about 100 additions of unlike shapes."""
    from whale.ir.layout import B, shard
    from whale.ir.program import Node
    from whale.ir.values import TensorType
    from whale.sharding_rules import OpView, find_rule

    rule = find_rule("AddV2")
    assert rule is not None
    asked = []
    for rows in range(2, 102):
        kinds = tuple(TensorType("float32", shape) for shape in ((rows, 6), (6,)))
        node = Node(f"add{rows}", "AddV2", (), (), {}, kinds[:1])
        asked.append((OpView(node, kinds, 2, lambda _: None), (shard(0, (rows - 1, 1)), B)))
    start_s = time.perf_counter()
    for _ in range(30):
        for op, current in asked:
            rule.strategies(op, current)
    return (time.perf_counter() - start_s) / 3000


def capturing() -> Callable[[], float]:
    """Traces once; what is returned measures all that is done with the graph up to a folded program."""
    import numpy as np

    from benchmarks.lowering import resnet50
    from benchmarks.steps import train_step
    from whale.capture.function import capture_function
    from whale.capture.graph import read_graph
    from whale.passes.normalize.folding.fold import fold
    from whale.passes.normalize.inline import inline

    arguments = [np.zeros((8, 64, 64, 3), np.float32), np.zeros(8, np.int32)]
    captured = capture_function(train_step(resnet50()), arguments)
    graph = captured.function.graph
    variables = [
        (graph.get_tensor_by_name(f"{v.node}:0"), v.name, v.type.dtype, v.type.shape)
        for v in captured.program.variables
    ]

    def measure() -> float:
        start_s = time.perf_counter()
        program = read_graph(
            graph,
            name="step",
            inputs=graph.inputs,
            variables=variables,
            outputs=graph.outputs,
            effects=graph.control_outputs,
        )
        fold(inline(program))
        return time.perf_counter() - start_s

    return measure


def command(*arguments: str) -> float:
    """The command `whale` from its start to its end."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "whale", *arguments], cwd=_ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_s


def running() -> float:
    """Two ranks that do nothing."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text("")
        return command("run", "-np", "2", str(script))


def stopping(signals: int) -> float:
    """From the last of so many interrupts to the end of a run of two ranks, which ignore all but the last."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(_UP.format(handler=_STUBBORN if signals > 1 else ""))
        line = [sys.executable, "-m", "whale", "run", "-np", "2", str(script)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(line, cwd=_ROOT, stdout=pipe, stderr=nothing, text=True) as process:
            assert process.stdout is not None
            for _signal in range(signals):
                for _ in range(2):  # a line of each rank: that it is up, that it was told
                    process.stdout.readline()
                start_s = time.perf_counter()
                process.send_signal(signal.SIGINT)
            process.stdout.read()
            process.wait()
            return time.perf_counter() - start_s


def side_by_side() -> float:
    """One after the other they would take 0.64 s and more."""
    return _reducing(3, 32, latency_s=0.02)


def narrow() -> float:
    """The bytes alone take 0.1 s."""
    return _reducing(250_000, 1, bytes_per_s=10e6)


def _reducing(elements: int, count: int, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> float:
    """Sums arrays of float32 on two ranks of this process."""
    import numpy as np

    import whale_ops
    from whale_ops import _native

    communicators = whale_ops.connect_in_process("start", 2)
    for communicator in communicators:
        communicator.set_link(latency_s, bytes_per_s)
    data = np.ones(elements, np.float32)
    start_s = time.perf_counter()
    operations = [
        _native.HostOperation(
            communicator.handle,
            "AllReduce",
            f"k{i}",
            dtype="float32",
            element_bytes=4,
            counts=[elements],
            input_address=data.ctypes.data,
            output_address=(output := np.empty_like(data)).ctypes.data,
            buffers=(data, output),
        )
        for i in range(count)
        for communicator in communicators
    ]
    for operation in operations:
        operation.wait(60)
    took_s = time.perf_counter() - start_s
    for communicator in communicators:
        communicator.leave()
    return took_s


if __name__ == "__main__":
    main()
