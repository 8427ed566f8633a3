"""Variables get the first rank's values, also many of one shape, which few operations broadcast."""

from __future__ import annotations

from tests.launcher.helpers import Launcher

SCRIPT = """
import numpy as np
import tensorflow as tf
import whale as wh
from whale.runtime.variables import variable_store

wh.init()
sent = []
divide = variable_store._divide_for_broadcasts
variable_store._divide_for_broadcasts = lambda given: sent.extend(found := divide(given)) or found
draw, other = np.random.default_rng(wh.rank()), np.random.default_rng(0)
shapes = [(2,), (), (3, 1)] * 70 + [(i + 4,) for i in range(260)]  # 70 of each of three, and one of each of the others
variables = [tf.Variable(draw.normal(size=shape)) for shape in shapes]
firsts = [other.normal(size=shape) for shape in shapes]
wh.function(lambda x: tf.add_n([tf.reduce_sum(v) for v in variables]) + x)(tf.constant(0.0, tf.float64))
for variable, first in zip(variables, firsts):
    np.testing.assert_array_equal(variable.numpy(), first)
assert [len({str(v.shape) for v in many}) for many in sent[:3]] == [1, 1, 1]
assert [len(many) for many in sent] == [64, 64, 64, 256, 22], [len(many) for many in sent]
print("equal", flush=True)
wh.shutdown()
"""


def test_many_variables_get_the_first_ranks_values(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", launcher.script(SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 2, done.stdout
