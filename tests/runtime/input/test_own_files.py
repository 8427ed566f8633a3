"""Files in which tf.data keeps what a dataset yields: one process's each, and what outlasts the run is the script's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from whale.runtime.input.own_files import OwnFiles

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary folders are the test's, and nothing is left in them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert not os.listdir(folder)


def read(name: str, count: int = 5) -> list[int]:
    return [int(v) for v in tf.data.Dataset.range(count).cache(name)]


def test_a_cache_is_the_processes_until_the_first_rank_keeps_it(tmp_path: Path) -> None:
    wanted, both = str(tmp_path / "deep" / "cache"), [OwnFiles(0), OwnFiles(1)]
    (tmp_path / "deep").mkdir()
    names = [files.name_cache(wanted) for files in both]
    assert len({wanted, *names}) == 3 and both[0].name_cache(wanted) == names[0]
    assert [read(name) for name in names] == [[0, 1, 2, 3, 4]] * 2
    both[1].end()
    assert not os.listdir(tmp_path / "deep")
    both[0].end()
    later = OwnFiles(1)
    assert later.name_cache(wanted) == wanted and read(wanted, count=3) == [0, 1, 2, 3, 4]
    later.end()


def test_a_cache_of_which_ranks_have_parts_is_not_kept(tmp_path: Path) -> None:
    files = OwnFiles(0)
    read(files.name_cache(str(tmp_path / "cache")))
    files.kept = False
    files.end()
    assert os.listdir(tmp_path) == ["temporary"]


def test_what_is_saved_is_there_for_others_and_this_process_reads_its_own(tmp_path: Path) -> None:
    wanted, both = str(tmp_path / "saved"), [OwnFiles(0), OwnFiles(1)]
    for files in both:
        own = files.name_new(wanted)
        tf.data.Dataset.range(4).save(own)
        files.note_saved(wanted, own)
        assert files.find_saved(wanted) == own and files.find_saved(str(tmp_path / "other")) == str(tmp_path / "other")
    assert [int(v) for v in tf.data.Dataset.load(wanted)] == [0, 1, 2, 3]
    for files in both:
        files.end()
    assert [int(v) for v in tf.data.Dataset.load(wanted)] == [0, 1, 2, 3]


def test_names_that_only_the_reading_knows() -> None:
    files = OwnFiles(0)
    found = [files.name_tensor(tf.constant(name)).numpy().decode() for name in ("", "/a/b c.txt")]
    assert found[0] == "" and found[1].endswith("/_a_b_c.txt")
    files.end()
