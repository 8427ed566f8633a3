"""Manages the folder in /dev/shm where the ranks of a run share memory on a host; each run has its own.

The workers remove the folder when they end, and the launcher removes it after them. If all of these are killed together
the folder stays, and the next run on the host removes it. Whether a folder is still in use is told by a file lock,
which its workers and their scripts hold for as long as they live.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path

MEMORY = "/dev/shm"
_PREFIX = "whale-"


def find_folder(token: str) -> str:
    """Returns the path of a run's shared-memory folder, derived from the token by a hash that does not reveal it."""
    return f"{MEMORY}/{_PREFIX}{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def open_folder(path: str) -> bool:
    """Creates a run's shared-memory folder, readable by this user only, and locks it until this process and its forks
    end.

    Also removes the folders of earlier runs beside it that nobody holds a lock on.

    Returns:
        False if the folder cannot be created, since there is no /dev/shm or it is full or read-only.
    """
    memory = Path(path).parent
    if not memory.is_dir():
        return False
    try:
        while not _can_hold(path):
            continue  # another run took the folder for an abandoned one, and removed it before it was locked
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT):
            raise
        return False  # MPI then reports what it cannot do
    for other in memory.glob(f"{_PREFIX}*"):
        if str(other) != path:
            _remove_if_left(other)
    return True


def _can_hold(path: str) -> bool:
    os.makedirs(path, mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return True
    except FileNotFoundError:
        pass
    os.close(descriptor)  # the locked folder has just been removed; the path leads to another one, or to none
    return False


def _remove_if_left(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or gone
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have removed the folder before this lock was granted, and a run created it again.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        pass  # in use, or gone
    finally:
        os.close(descriptor)
