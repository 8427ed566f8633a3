"""Implements ``epl.profiler``: hooks that report the cost of runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from whale.errors import ProgramError
from whale.log import log
from whale.runtime.context import require_current

_KINDS = ("scope", "op", "graph")


class FlopsProfilerHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that writes once, on the first rank, the floating-point operations that TensorFlow registers for a graph.

    Args:
      cmds: "graph": the whole; "op": by type of operation; "scope": by the first part of their names; or several.
    """

    def __init__(self, cmds: str | Sequence[str] = "scope") -> None:
        self.cmds = [cmds] if isinstance(cmds, str) else list(cmds)
        if unknown := [c for c in self.cmds if c not in _KINDS]:
            raise ProgramError(
                "operations cannot be counted in this way",
                given=unknown[0],
                expected=", ".join(_KINDS),
                action="correct cmds",
            )
        self.done = False

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Writes the counts of floating-point operations after the first run."""
        if self.done:
            return
        self.done = True
        found = flops(run_context.session.graph)
        if require_current("FlopsProfilerHook").rank:
            return
        for kind in self.cmds:
            sums: dict[str, int] = {}
            for name, (op, count) in found.items():
                key = {"graph": "all", "op": op, "scope": name.split("/")[0]}[kind]
                sums[key] = sums.get(key, 0) + count
            for key, count in sorted(sums.items(), key=lambda item: -item[1]):
                log.info(f"{kind} {key}: {count} FLOPs")


def flops(graph: tf.Graph) -> dict[str, tuple[str, int]]:
    """Returns, by name of operation, its type and the floating-point operations of one run that TensorFlow registers.

    Those whose shapes the graph leaves open are not counted.
    """
    from tensorflow.python.framework import ops

    found = {}
    for op in graph.get_operations():
        try:
            count = ops.get_stats_for_node_def(graph, op.node_def, "flops").value
        except ValueError:  # a shape is not known
            count = None
        if count:
            found[op.name] = op.type, int(count)
    return found


class MemoryProfilerHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook that traces some runs of this rank, and writes what TensorFlow says of them.

    Args:
      save_steps: every so many runs.
      max_steps: up to this one.
      output_dir: where ``run_metadata_<run>.bin`` are written on the first rank, with ``dump_metadata``.
      visualize: taken for the library's sake; there are no pictures.
      dump_metadata: whether the metadata is written.
    """

    def __init__(
        self,
        save_steps: int = 1,
        max_steps: int = 5,
        output_dir: str = "",
        visualize: bool = True,
        dump_metadata: bool = False,
    ) -> None:
        if save_steps > max_steps:
            raise ProgramError(
                "no run would be traced",
                given=f"save_steps={save_steps}, max_steps={max_steps}",
                expected="save_steps of at most max_steps",
                action="correct them",
            )
        self.save_steps, self.max_steps = save_steps, max_steps
        self.output_dir, self.dump_metadata = output_dir, dump_metadata
        self._runs = 0

    def before_run(self, run_context: Any) -> Any:
        """Asks for a trace of each run that is to be written."""
        self._runs += 1
        if self._runs > self.max_steps or self._runs % self.save_steps:
            return None
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        return tf.compat.v1.train.SessionRunArgs([], options=options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Writes the trace."""
        if self._runs > self.max_steps or self._runs % self.save_steps:
            return
        if require_current("MemoryProfilerHook").rank:
            return
        profile_memory(run_values.run_metadata, f"run {self._runs}: ")
        if self.dump_metadata:
            with tf.io.gfile.GFile(os.path.join(self.output_dir, f"run_metadata_{self._runs}.bin"), "wb") as file:
                file.write(run_values.run_metadata.SerializeToString())


def profile_memory(run_metadata: Any, prefix_name: str = "", visualize: bool = True) -> dict[str, int]:
    """Returns the peak bytes that each device had allocated in a traced run, and prints them to standard error."""
    found: dict[str, int] = {}
    for device in run_metadata.step_stats.dev_stats:
        peaks = [m.peak_bytes for node in device.node_stats for m in node.memory]
        if peaks and max(peaks):
            found[device.device] = max(peaks)
            log.info(f"{prefix_name}{device.device}: {max(peaks)} bytes at most")
    return found
