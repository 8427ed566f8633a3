"""Filters out lines that TensorFlow prints whenever it starts, whatever ``TF_CPP_MIN_LOG_LEVEL`` is.

Decision: 0073.
"""

from __future__ import annotations

import re

# A pattern of a line, as bytes.
STARTUP = (
    rb"All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|oneDNN custom operations are on"
    rb"|This TensorFlow binary is optimized to use available CPU instructions"
    rb"|To enable the following instructions:"
    rb"|Could not find cuda drivers on your machine, GPU will not be used"
    rb"|Unable to register cu(DNN|BLAS|FFT) factory"
    rb"|TF-TRT Warning: Could not find TensorRT"
)
_LINE = re.compile(STARTUP)


def others(lines: list[bytes]) -> list[bytes]:
    """Returns the lines that are not among TensorFlow's startup messages."""
    return [line for line in lines if not _LINE.search(line)]
