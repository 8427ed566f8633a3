"""Golden texts: ``pytest tests/passes --update-golden`` writes them anew, to be read in the diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew from what the tests see")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/NAME.txt, or writes that file under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text)
        assert path.is_file(), f"{path.name} is missing: pytest tests/passes --update-golden"
        assert text == path.read_text(), f"{path.name} differs; if that is meant: pytest tests/passes --update-golden"

    return compare
