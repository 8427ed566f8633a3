"""Converts TensorFlow errors that were caused by communication to Whale's CommError.

Decision: 0130.
"""

from __future__ import annotations

import re

import tensorflow as tf

from whale.distributed.ranks import Ranks
from whale.errors import CommError
from whale_ops import EXCHANGE_PAYLOAD

# The text that TensorFlow writes before and behind a kernel's message: the functions and nodes that it was in.
_AROUND = (
    r"\s*\[\[\{\{(?:function_)?node .*|\s*\[Op:.*|^(?:Graph execution error:.*?)?(?:\{\{function_node [^}]*\}\}\s*)+"
)


def raise_comm_error(error: tf.errors.OpError, context: Ranks) -> None:
    """Raises CommError if an exchange failed (a rank is gone, or the ranks' exchanges do not match); else returns.

    If another op of this rank failed, the other ranks are told first, since they would wait for this rank in vain; the
    caller then raises the error itself.
    """
    marked = find_exchange_error(error)
    if marked is not None:
        raise CommError(re.sub(_AROUND, "", marked.message, flags=re.S).strip() or marked.message) from None
    text = error.message or ""
    for comm in context.comms:
        comm.abort(f"rank {context.rank} failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}")


def find_exchange_error(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """Returns the error that an exchange kernel has reported, or None if ``error`` has another cause.

    Exchange kernels mark their errors by a payload, so that neither names nor texts have to be matched. A session
    raises errors again without payloads; then the marked error is found as the ``__context__`` of the new one. An error
    before the exchange begins, such as a failed allocation, is not marked, since it concerns this rank alone.
    """
    for one in (error, error.__context__):
        if isinstance(one, tf.errors.OpError) and EXCHANGE_PAYLOAD in one.experimental_payloads:
            return one
    return None
