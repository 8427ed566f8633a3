"""Implements ``epl.profiler``: session hooks that log floating-point operations and memory of runs."""

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
    """Logs the floating-point operations of the graph, after the first run and on rank 0.

    Counts are TensorFlow's own registered "flops" statistics; ops without one count as 0.

    Args:
      cmds: how counts are summed: "graph", over the whole graph; "op", by op type; "scope", by the first part of the
        operations' names. May be a list of these.
    """

    def __init__(self, cmds: str | Sequence[str] = "scope") -> None:
        self.cmds = [cmds] if isinstance(cmds, str) else list(cmds)
        if unknown := [c for c in self.cmds if c not in _KINDS]:
            raise ProgramError(
                "FlopsProfilerHook cannot sum floating-point operations in this way",
                given=f"cmds={unknown[0]!r}",
                expected=f"{', '.join(_KINDS)}, or a list of these",
                action="pass one of these as cmds",
            )
        self.done = False

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Logs the counts after the first run, and does nothing after later ones."""
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
    """Returns (op type, floating-point operations per run) by operation name, as far as TensorFlow has statistics.

    Operations with shapes that are not fully known are left out.
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
    """Traces some runs of a session, and logs on rank 0 the peak memory of each device.

    Args:
      save_steps: every how many runs a run is traced.
      max_steps: number of the last run that may be traced.
      output_dir: folder for the files ``run_metadata_<run>.bin``, if ``dump_metadata`` is set.
      visualize: ignored, only accepted because EPL has it.
      dump_metadata: whether to write each traced run's RunMetadata to a file.
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
                "MemoryProfilerHook would trace no run",
                given=f"save_steps={save_steps}, max_steps={max_steps}",
                expected="save_steps <= max_steps",
                action="lower save_steps or raise max_steps",
            )
        self.save_steps, self.max_steps = save_steps, max_steps
        self.output_dir, self.dump_metadata = output_dir, dump_metadata
        self._runs = 0

    def before_run(self, run_context: Any) -> Any:
        """Returns run arguments that ask for a full trace, if this run is to be traced."""
        self._runs += 1
        if self._runs > self.max_steps or self._runs % self.save_steps:
            return None
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        return tf.compat.v1.train.SessionRunArgs([], options=options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Logs the peak memory of a traced run, and writes its metadata if asked to."""
        if self._runs > self.max_steps or self._runs % self.save_steps:
            return
        if require_current("MemoryProfilerHook").rank:
            return
        profile_memory(run_values.run_metadata, f"run {self._runs}: ")
        if self.dump_metadata:
            with tf.io.gfile.GFile(os.path.join(self.output_dir, f"run_metadata_{self._runs}.bin"), "wb") as file:
                file.write(run_values.run_metadata.SerializeToString())


def profile_memory(run_metadata: Any, prefix_name: str = "", visualize: bool = True) -> dict[str, int]:
    """Returns the peak bytes that a traced run allocated on each device, and logs them.

    Args:
      run_metadata: the RunMetadata of a run with ``FULL_TRACE``.
      prefix_name: text at the start of each logged line.
      visualize: ignored.
    """
    found: dict[str, int] = {}
    for device in run_metadata.step_stats.dev_stats:
        peaks = [m.peak_bytes for node in device.node_stats for m in node.memory]
        if peaks and max(peaks):
            found[device.device] = max(peaks)
            log.info(f"{prefix_name}{device.device}: peak memory {max(peaks)} bytes")
    return found
