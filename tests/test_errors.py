"""An error is a sentence, facts, and one next action."""

from __future__ import annotations

import pickle

import pytest

from whale import errors

pytestmark = pytest.mark.core


def test_the_text_of_an_error() -> None:
    error = errors.LayoutError("cannot split", op="MatMul", given=7, expected="a multiple of 2", action="pad the batch")
    assert str(error) == "cannot split\n  op: MatMul\n  given: 7\n  expected: a multiple of 2\n  next: pad the batch"
    assert str(errors.WhaleError("only a sentence")) == "only a sentence"


def test_an_error_survives_a_process_boundary() -> None:
    error = errors.CommError("rank 1 is gone", action="look at its log", op="AllReduce", rank=1)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CommError and str(copy) == str(error) and copy.facts == error.facts


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_is_one_of_whale(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.WhaleError)
    assert getattr(errors, name).__doc__
