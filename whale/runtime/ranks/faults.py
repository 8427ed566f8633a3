"""TensorFlow's errors that come from communication, as errors of Whale."""

from __future__ import annotations

import re

import tensorflow as tf

from whale.errors import CommError
from whale.runtime.ranks.ranks import Ranks


def raise_comm_error(error: tf.errors.OpError, context: Ranks) -> None:
    """Raises CommError when a communication op failed (a rank is gone, or ranks do not match); else returns.

    A failure in any other op of this rank is told to the other ranks first, which would wait for it otherwise.
    """
    text = error.message or ""
    # A receive keeps the name of what it receives; TensorFlow says what it was before it made it an internal error.
    unavailable = isinstance(error, tf.errors.UnavailableError) or "originally returned UnavailableError" in text
    if unavailable or "{{node whale/" in text or "whale/" in getattr(error.node_def, "name", "") or "Whale" in text:
        sentence = re.sub(
            r"\s*\[\[\{\{node .*|\s*\[Op:.*|^.*?\{\{function_node [^}]*\}\}\s*", "", text, flags=re.S
        ).strip()
        raise CommError(sentence or text) from None
    for comm in context.comms:
        comm.abort(f"rank {context.rank} failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}")
