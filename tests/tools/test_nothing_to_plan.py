"""Scripts in which `whale plan` finds no step: it says what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale.errors import ProgramError
from whale.tools.dry_run import first_step

TRAINS = """
import tensorflow as tf
v = tf.Variable(1.0)
@tf.function
def descend(x):
    v.assign_sub(0.1 * tf.reduce_mean(x))
descend(tf.ones([4]))
"""
INIT = "import whale as wh; wh.init()\n"
ONE = "def one(): return 1.0\nwh.function(one)()"
BESIDE = "trained without Whale: the tf.function `descend`, called at script.py:"
NEVER = "script.py, which does not call wh.init()"


@pytest.mark.parametrize(
    "text, found, action",
    [
        pytest.param("print(1)", NEVER, "put `import whale as wh; wh.init()`", id="nothing"),
        pytest.param(TRAINS, BESIDE, "put `import whale as wh; wh.init()`", id="alone"),
        pytest.param(INIT + TRAINS, BESIDE, "replace tf.function by wh.function", id="a tf.function"),
        pytest.param(INIT + ONE, "without a batch: one", "check that the script", id="no batch"),
    ],
)
def test_what_a_script_lacks_is_said(text: str, found: str, action: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    with pytest.raises(ProgramError, match="before it ran a step that takes a batch") as caught:
        first_step(str(path), [], 2)
    assert found in str(caught.value)
    assert str(caught.value.action).startswith(action)
    assert (NEVER in str(caught.value)) == (INIT not in text)
