"""Turns TensorFlow's errors that come from communication into errors of Whale.

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
    """Raises CommError when an exchange failed (a rank is gone, or ranks do not match); else returns.

    A failure in any other op of this rank is told to the other ranks first, which would wait for it otherwise.
    """
    marked = find_exchange_error(error)
    if marked is not None:
        raise CommError(re.sub(_AROUND, "", marked.message, flags=re.S).strip() or marked.message) from None
    text = error.message or ""
    for comm in context.comms:
        comm.abort(f"rank {context.rank} failed: {type(error).__name__}: {text.splitlines()[0] if text else ''}")


def find_exchange_error(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """Returns the error that an exchange reported, or None.

    Such errors are known by the mark that the ops' kernels give them, not by names or texts. What fails before the
    exchange begins, an allocation say, is this rank's own error. A session raises errors anew, without marks: the
    marked one is the new one's context.
    """
    for one in (error, error.__context__):
        if isinstance(one, tf.errors.OpError) and EXCHANGE_PAYLOAD in one.experimental_payloads:
            return one
    return None
