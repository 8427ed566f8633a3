"""Hosts with other versions are refused before anything is computed."""

from __future__ import annotations

import re

import pytest

from tests.distributed.test_mistakes import fails
from tests.launcher.helpers import Launcher
from whale.distributed.versions import RankVersions, read_versions, refuse_other_versions
from whale.errors import ClusterError

SAME = {"Whale": "1.2", "TensorFlow": "2.21.0", "Python": "3.11"}


def test_versions_and_hosts_are_named() -> None:
    mine = read_versions()
    assert mine.keys() == SAME.keys() and all(mine.values())
    refuse_other_versions([RankVersions("h0", SAME), RankVersions("h1", SAME)])
    other = RankVersions("h1", {**SAME, "TensorFlow": "2.20.0"})
    with pytest.raises(ClusterError) as raised:
        refuse_other_versions([RankVersions("h0", SAME), other, RankVersions("h2", SAME), other])
    assert raised.value.facts["given"] == "TensorFlow 2.21.0 on h0, h2; TensorFlow 2.20.0 on h1"
    assert raised.value.action == "install TensorFlow 2.21.0 on h1, or the other one on h0"
    with pytest.raises(ClusterError, match="have Whale in different versions"):
        refuse_other_versions([RankVersions("h0", SAME), RankVersions("h1", {})])


def test_a_rank_with_another_tensorflow_is_refused_by_all(launcher: Launcher) -> None:
    done, said = fails(
        launcher,
        "import os, tensorflow as tf, whale as wh\n"
        "if os.environ['WHALE_RANK'] == '1': tf.__version__ = tf.__version__.rpartition('.')[0] + '.99'\n"
        "wh.init()\nprint('went on')",
    )
    assert done.returncode == 1 and re.search(r"given: TensorFlow \S+ on \S+; TensorFlow \S+\.99 on ", said), said
