"""What a scope's path says."""

from __future__ import annotations

import re

_SCOPE = re.compile(r"split_\d+(?:\(dim=(?P<dim>-?\d+)\))?$")

# What passes a variable's elements on, so that what reads the result reads the variable.
PASSED_ON = frozenset(
    {"ReadVariableOp", "Identity", "StopGradient", "Snapshot", "Cast", "Reshape", "Transpose", "ExpandDims", "Squeeze"}
)


def split_scope(path: str) -> tuple[str, int | None] | None:
    """(path, ``dim`` as the user named it) of the scope a node is in, if that is a split; the innermost one counts."""
    match = _SCOPE.match(path.rsplit("/", 1)[-1])
    return None if match is None else (path, int(match["dim"]) if match["dim"] else None)
