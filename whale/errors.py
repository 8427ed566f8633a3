"""Defines the errors that Whale raises on purpose.

An error is a sentence, then facts (which op, what was given, what was expected), then one next action:

    raise ConfigError("unknown configuration key", given="comunication.backend",
                      expected="communication.backend", action="correct the spelling")

prints as

    unknown configuration key
      given: comunication.backend
      expected: communication.backend
      next: correct the spelling
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

# The next action where only a fault of Whale itself can have led to an error.
REPORT_FAULT = "this is a fault of Whale: please report it with the program, which WHALE_DEBUG_DUMP=FOLDER writes"


class WhaleError(Exception):
    """Base class of every error that Whale raises on purpose.

    Attributes:
        message: one sentence that says what is wrong.
        facts: name -> value, printed in this order; usual names are ``op``, ``given``, ``expected``.
        action: one thing to do next, or None.
    """

    def __init__(self, message: str, *, action: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.action = action
        self.facts = facts

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  {name}: {value}" for name, value in self.facts.items()]
        if self.action is not None:
            lines.append(f"  next: {self.action}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries in tests and the launcher; the default forgets keyword arguments.
        return _rebuild, (type(self), self.message, self.action, self.facts)


def _rebuild(kind: type[WhaleError], message: str, action: str | None, facts: dict[str, Any]) -> WhaleError:
    return kind(message, action=action, **facts)


def find_similar(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is spelt most like an unknown one; "" if none is similar."""
    import difflib  # `import whale` does without

    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), "")


class InstallError(WhaleError):
    """Raised if something that Whale needs is not installed."""


def no_tensorflow(what: str) -> InstallError:
    """Returns the error to raise if `what` (the subject of its sentence) needs TensorFlow, and none is installed."""
    return InstallError(
        f"{what} needs TensorFlow",
        given=f"no TensorFlow in {sys.executable}",
        expected="TensorFlow 2.15 to 2.21",
        action="pip install tensorflow, or tensorflow-cpu on a machine without GPUs; then see `whale doctor`",
    )


class ConfigError(WhaleError):
    """Raised if a configuration key, value, environment variable or file is wrong."""


class ClusterError(WhaleError):
    """Raised if the requested processes, hosts or devices are not available, or a cluster's description is wrong."""


class CommError(WhaleError):
    """Raised if ranks cannot exchange data: a peer is gone, ops do not match, or the op library does not fit."""


class CheckpointError(WhaleError):
    """Raised if a checkpoint cannot be written or read, or is damaged."""


class ProgramError(WhaleError):
    """Raised if a program (the captured graph) is malformed, or used in a way that it does not allow."""


class CaptureError(ProgramError):
    """Raised if a function or graph cannot be captured as a program."""


class RuleError(WhaleError):
    """Raised if a sharding rule is malformed, or does not fit the op that it is registered for."""


class LayoutError(WhaleError):
    """Raised if a tensor cannot have a layout: no such dimension, not divisible, or not allowed by the op."""


class PlanError(WhaleError):
    """Raised if a plan is not legal for its program, or no legal plan exists."""


class DoesNotFitError(PlanError):
    """Raised if a step needs more memory than its ranks have, under every strategy."""


class AcrossMicroBatchesError(PlanError):
    """Raised if a step cannot run in any number of micro-batches, as it needs a value of all of them before the last
    one.
    """
