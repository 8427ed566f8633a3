"""Manages the folder in memory where MPI shares segments between a host's ranks: one for each run.

Workers remove it at their end, and the launcher after them. Who is killed together with both leaves it; the next run
on the host removes it. Whether somebody uses a folder says a lock that its workers and their scripts hold as long as
they live.
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
    """Returns the folder where the ranks of a run share memory; its name must not give the token away."""
    return f"{MEMORY}/{_PREFIX}{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def open_folder(path: str) -> bool:
    """Makes the folder, for this user alone, and holds it until the process ends, with those that it forks.

    Folders beside it that nobody holds any more are removed.

    Returns:
        Whether there is memory to make it in.
    """
    memory = Path(path).parent
    if not memory.is_dir():
        return False
    try:
        while not _can_hold(path):
            continue  # another run took it for one that was left, and removed it before it was held
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT):
            raise
        return False  # what MPI makes of it, it says
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
    os.close(descriptor)  # a lock on a folder that has just been removed is worth nothing
    return False


def _remove_if_left(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or gone
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another may have removed it before the lock was had, and its run made and held it anew.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                shutil.rmtree(folder, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        pass  # in use, or gone
    finally:
        os.close(descriptor)
