"""Feeds the loss scale for float16 to a session's runs, and adjusts it after overflows.

Decision: 0070.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from whale.capture.attrs import LOSS_SCALE
from whale.capture.loss_scaling import LossScaleFeed
from whale.capture.v1 import GraphCapture
from whale.errors import PlanError
from whale.ir.program import Program


class ScaledLosses:
    """The scaled losses of one session's graph.

    Args:
      scale: of the run; None: losses are not scaled.
    """

    def __init__(self, scale: LossScaleFeed | None, captures: GraphCapture) -> None:
        self._scale, self._captures = scale, captures
        self._known: dict[Hashable, list[tf.Operation]] = {}

    def extend_run(
        self, wanted: Sequence[Any], feeds: Mapping[tf.Tensor, np.ndarray]
    ) -> tuple[Mapping[tf.Tensor, np.ndarray], list[tf.Tensor]]:
        """Returns the feeds and the additional fetches of a run of ``wanted``: the flag whether all gradients are
        finite.
        """
        if self._scale is None:
            return feeds, []
        key = tuple(w.name for w in wanted), frozenset(t.name for t in feeds)
        if key not in self._known:
            found = self._captures.find_operations(wanted, feeds, ("PlaceholderWithDefault",))
            self._known[key] = [op for op in found if LOSS_SCALE in op.node_def.attr]
        scales = self._known[key]
        fed = {op.outputs[0]: np.float32(self._scale.scale) for op in scales}
        return {**feeds, **fed}, [LossScaleFeed.answer(op) for op in scales]

    def update_scale(self, answers: Sequence[Any]) -> None:
        """Adjusts the scale after a run, by the fetched flags."""
        if self._scale is not None and answers:
            self._scale.update(all(answers))

    def refuse(self, program: Program) -> None:
        """Raises PlanError where updates read gradients of losses that were not scaled."""
        if self._scale is None or any(node.marks.unscaled for node in program.nodes):
            return
        update = next((n for n in program.nodes if n.op.startswith(("ResourceApply", "ResourceSparseApply"))), None)
        if update is not None:
            raise PlanError(
                "gradients of losses that are not scaled are lost in float16",
                op=update.name,
                given="gradients that were built before wh.init, or a MetaGraph of a run without scales",
                expected='gradients that are built after wh.init with precision.compute_dtype="float16"',
                action='call wh.init() before the graph is built, or set precision.compute_dtype="bfloat16"',
            )
