"""Files that runs keep: what comes back is what was kept, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from whale.distributed.cache_files import CacheFolder, DamagedFileError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a" / "whale"


def test_what_is_kept_comes_back_and_is_this_users_alone(folder: Path) -> None:
    files = CacheFolder(folder)
    assert files.get("one") is None
    files.put("one", b"plan")
    files.put("one", b"another plan")
    assert files.get("one") == b"another plan" and files.get("two") is None
    assert os.listdir(folder) == ["one"]
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "one").stat().st_mode & 0o777 == 0o600


def test_damage_is_found_and_removed(folder: Path) -> None:
    files = CacheFolder(folder)
    files.put("one", b"plan" * 100)
    whole = (folder / "one").read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:50] + b"!" + whole[51:], whole + b"more"):
        (folder / "one").write_bytes(damaged)
        with pytest.raises(DamagedFileError):
            files.get("one")
        assert files.get("one") is None and not (folder / "one").exists()


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    files = CacheFolder(folder)
    files.put("one", b"plan")
    (folder / "two").symlink_to(folder / "one")
    os.mkfifo(folder / "three")
    assert files.get("two") is None and files.get("three") is None
    files.put("two", b"own")
    assert files.get("one") == b"plan" and files.get("two") == b"own" and not (folder / "two").is_symlink()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError):
        CacheFolder(tmp_path / "link").get("one")


def test_a_folder_that_others_may_enter_is_not_used(folder: Path) -> None:
    files = CacheFolder(folder)
    files.put("one", b"plan")
    folder.chmod(0o755)
    for use in (lambda: files.get("one"), lambda: files.put("one", b"plan")):
        with pytest.raises(PermissionError, match="700"):
            use()


def test_what_was_not_used_for_longest_goes(folder: Path) -> None:
    files = CacheFolder(folder, most_bytes=1000, most_files=3)
    for age, name in enumerate(("one", "two", "three")):
        files.put(name, bytes(100))
        os.utime(folder / name, (age, age))
    assert files.get("one") is not None  # used now
    files.put("four", bytes(100))
    assert sorted(os.listdir(folder)) == ["four", "one", "three"]
    files.put("five", bytes(800))
    assert sorted(os.listdir(folder)) == ["five", "four"] or os.listdir(folder) == ["five"]
    files.put("six", bytes(2000))  # more than all may take
    assert files.get("six") is None and files.get("five") is not None


_WRITES = """
import sys
from pathlib import Path
from whale.distributed.cache_files import CacheFolder
files, mine = CacheFolder(Path(sys.argv[1])), sys.argv[2].encode() * 100_000
for _ in range(100):
    files.put("one", mine)
    assert files.get("one") in (b"a" * 100_000, b"b" * 100_000)
"""


def test_two_processes_may_write_at_the_same_time(folder: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", _WRITES, str(folder), text]) for text in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    assert os.listdir(folder) == ["one"] and CacheFolder(folder).get("one") in (b"a" * 100_000, b"b" * 100_000)
