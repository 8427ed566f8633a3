"""Defines the errors that a user of Whale can meet.

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


class WhaleError(Exception):
    """Base of every error that Whale raises on purpose.

    Attributes:
        message: one sentence that says what is wrong.
        facts: the facts in the order given; usual names are ``op``, ``given``, ``expected``.
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
    """Returns the known name that an unknown one most likely means; "" where none is spelt much like it."""
    import difflib  # `import whale` does without

    return next(iter(difflib.get_close_matches(name, list(known), 1, 0.6)), "")


class InstallError(WhaleError):
    """Something that Whale needs is not installed."""


def no_tensorflow(what: str) -> InstallError:
    """Creates the error that `what` is not available without TensorFlow."""
    return InstallError(
        f"{what} needs TensorFlow",
        given=f"no TensorFlow in {sys.executable}",
        expected="TensorFlow 2.15 to 2.21",
        action="pip install tensorflow, or tensorflow-cpu on a machine without GPUs; then see `whale doctor`",
    )


class ConfigError(WhaleError):
    """A configuration key, value, environment variable or file is wrong."""


class ClusterError(WhaleError):
    """The processes, hosts or devices asked for cannot be had."""


class CommError(WhaleError):
    """Ranks cannot exchange data: a peer is gone, ops do not match, or the op library does not fit."""


class CheckpointError(WhaleError):
    """A checkpoint cannot be written or read, or is damaged."""


class ProgramError(WhaleError):
    """A program (the captured graph) is malformed or used in a way it does not allow."""


class CaptureError(ProgramError):
    """A function or graph cannot be captured as a program."""


class RuleError(WhaleError):
    """A layout rule is malformed, or does not fit the op it is registered for."""


class LayoutError(WhaleError):
    """A tensor's layout is impossible: no such dimension, not divisible, or not allowed by the op."""


class PlanError(WhaleError):
    """A plan is not legal for its program, or no legal plan exists."""


class DoesNotFitError(PlanError):
    """Raised if a step needs more memory than its ranks have, under every strategy."""


class AcrossMicroBatchesError(PlanError):
    """Raised if a step cannot run in micro-batches, whatever their number: it needs a value of all before the last
    one.
    """
