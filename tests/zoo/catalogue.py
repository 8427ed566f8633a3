"""All cases of the zoo."""

from __future__ import annotations

from tests.zoo import convolution, giant, graphs, inputs, mlp, modules, more, normalization, recurrent, transformer
from tests.zoo.case import Case

CASES: tuple[Case, ...] = (
    *mlp.CASES,
    *convolution.CASES,
    *normalization.CASES,
    *transformer.CASES,
    *recurrent.CASES,
    *inputs.CASES,
    *modules.CASES,
    *giant.CASES,
    *graphs.CASES,
    *more.MORE_CASES,
)


def case_named(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for case in CASES}[name]
