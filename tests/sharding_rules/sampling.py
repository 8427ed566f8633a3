"""Short ways to write a case for the prover: ``case("MatMul", F(4, 6), F(6, 8), transpose_a=True)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.sharding_rules.prover import Case
from whale.ir.marks import NO_MARKS, Marks


@dataclass(frozen=True)
class Arg:
    """How to draw one operand; ``const``: the rule sees its value."""

    make: Callable[[np.random.Generator], np.ndarray]
    text: str
    const: bool = False


def F(*shape: int) -> Arg:
    """Normal float64."""
    return Arg(lambda r: r.normal(size=shape), f"f64{list(shape)}")


def G(*shape: int) -> Arg:
    """Normal float32, for kernels that have no float64."""
    return Arg(lambda r: r.normal(size=shape).astype(np.float32), f"f32{list(shape)}")


def U(*shape: int, low: float = 0.1, high: float = 0.9, dtype: str = "float64") -> Arg:
    """Uniform in (low, high)."""
    return Arg(lambda r: r.uniform(low, high, shape).astype(dtype), f"u{list(shape)}")


def N(*shape: int, below: int = 4, low: int = 0, dtype: str = "int32") -> Arg:
    """Integers from ``low`` to ``below``, exclusive."""
    return Arg(lambda r: r.integers(low, below, shape).astype(dtype), f"{dtype}{list(shape)}")


def T(*shape: int) -> Arg:
    """Booleans."""
    return Arg(lambda r: r.random(shape) < 0.5, f"bool{list(shape)}")


def Z(*shape: int, dtype: str = "complex128") -> Arg:
    """Complex numbers."""
    return Arg(lambda r: (r.normal(size=shape) + 1j * r.normal(size=shape)).astype(dtype), f"{dtype}{list(shape)}")


def M(*shape: int) -> Arg:
    """Well conditioned symmetric positive matrices in the last two dimensions."""

    def make(r: np.random.Generator) -> np.ndarray:
        a = r.normal(size=shape)
        return a @ np.swapaxes(a, -1, -2) + shape[-1] * np.eye(shape[-1])

    return Arg(make, f"spd{list(shape)}")


def K(value: Any, dtype: str = "int32") -> Arg:
    """A constant."""
    return Arg(lambda r: np.array(value, dtype), str(value).replace(" ", ""), const=True)


def D(value: Any, dtype: str = "float64") -> Arg:
    """A fixed value that the rule does not see as a constant."""
    return Arg(lambda r: np.array(value, dtype), f"={value}".replace(" ", ""))


def case(op: str, *args: Arg, search: bool = True, marks: Marks = NO_MARKS, **attrs: Any) -> Case:
    """A case of ``op`` with these operands and attributes (``data_format="NHWC"``)."""

    def draw(seed: int) -> list[np.ndarray]:
        random = np.random.default_rng(seed)
        return [np.asarray(a.make(random)) for a in args]

    note = " ".join(a.text for a in args)
    shown = " ".join(f"{k}={v}".replace(" ", "") for k, v in (*attrs.items(), *marks.list_given().items()))
    consts = frozenset(i for i, a in enumerate(args) if a.const)
    return Case(op, draw, attrs, consts, f"{note} {shown}".strip(), search, marks)
