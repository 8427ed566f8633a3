"""Keeps files for later runs in a folder of bounded size that belongs to this user alone, and detects damaged files.

A file begins with a checksum of the rest. It is written under another name and then renamed, and opened without
following links, in a folder that no other user can enter. Two processes that write the same name at once write equal
content.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

MOST_BYTES, MOST_FILES = 256 << 20, 1000
DEFAULT = "auto"
_DIGEST = 32


def find_folder(asked: str) -> Path | None:
    """Returns the folder that the key `mesh.plan_cache` names: None for "", the user's cache folder for "auto"."""
    if not asked:
        return None
    if asked != DEFAULT:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "whale"


class DamagedFileError(Exception):
    """Raised if a kept file's checksum is wrong; the file has been removed."""


class CacheFolder:
    """Stores byte strings by name in a folder; those that were not used for longest are removed first.

    Args:
      folder: the folder; created when something is stored, with its parents.
      most_bytes: largest total size of all files.
      most_files: largest number of files.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES):
        self.folder, self.most_bytes, self.most_files = folder, most_bytes, most_files

    def get(self, name: str) -> bytes | None:
        """Returns what is stored under a name, or None if there is nothing.

        Raises:
          OSError: the folder belongs to another user or is open to others, or cannot be read.
          DamagedFileError: the content is not what was written.
        """
        if not self.folder.exists():
            return None
        with self._open_folder() as folder:
            try:
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError:
                return None  # missing, a link, or not readable
            with open(file, "rb") as opened:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > self.most_bytes:
                    return None
                data = opened.read()
            if len(data) < _DIGEST or _compute_digest(data[_DIGEST:]) != data[:_DIGEST]:
                self._remove(folder, name)
                raise DamagedFileError(
                    f"the cached file {name} was damaged (its checksum is wrong), and has been removed"
                )
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder, follow_symlinks=False)
            return data[_DIGEST:]

    def put(self, name: str, data: bytes) -> None:
        """Stores data under a name; does nothing if it is larger than the whole folder may be.

        Raises:
          OSError: the folder belongs to another user or is open to others, or cannot be written to.
        """
        if len(data) + _DIGEST > self.most_bytes:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._open_folder() as folder:
            other = f"{name}.{os.getpid()}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._remove(folder, other)
            try:
                with open(os.open(other, flags, 0o600, dir_fd=folder), "wb") as opened:
                    opened.write(_compute_digest(data) + data)
                os.rename(other, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                self._remove(folder, other)
                raise
            self._keep_bounds(folder)

    def remove(self, name: str) -> None:
        """Removes what is stored under a name, if anything."""
        with self._open_folder() as folder:
            self._remove(folder, name)

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        """Yields a descriptor of the folder, after checking that it belongs to this user and is closed to others."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(folder)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(
                    f"the folder {self.folder} belongs to another user, or others can open it (its mode has to be 700)"
                )
            yield folder
        finally:
            os.close(folder)

    def _keep_bounds(self, folder: int) -> None:
        """Removes the files that were not used for longest until the rest are within the bounds."""
        found = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime_ns, name, about.st_size))
        count, size = len(found), sum(one[2] for one in found)
        for _, name, file_bytes in sorted(found):
            if count <= self.most_files and size <= self.most_bytes:
                break
            self._remove(folder, name)
            count, size = count - 1, size - file_bytes

    @staticmethod
    def _remove(folder: int, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _compute_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST).digest()
