"""Reads and writes files of checkpoints and models on disks, and in the object stores that TensorFlow knows (``gs://``,
``s3://``).

A disk renames a file atomically, and keeps it once it is synced. A store keeps an object whole when its writer closes
it, but it has neither folders nor links, and renames by copying. So a writer puts that object last which makes the
others count, such as a checkpoint's index.

Decision: 0164.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

from whale.errors import CheckpointError

_DISK = "file://"
_FOUND_WITH = {
    "gs": "pip install tensorflow-io-gcs-filesystem",
    "s3": "pip install tensorflow-io, and `import tensorflow_io` in the script",
}


def normalize_path(path: Any) -> str:
    """Returns one name of a file or folder that is equal on all ranks: an absolute path, or a URI such as
    ``gs://bucket/run``.
    """
    text = os.fsdecode(os.fspath(path)).removeprefix(_DISK)
    return os.path.abspath(text) if is_on_disk(text) else text.rstrip("/")


def is_on_disk(path: str) -> bool:
    """Returns True if ``path`` is in one of the host's file systems, False if it is a URI of an object store."""
    return "://" not in path.removeprefix(_DISK)


def refuse_unknown_store(path: str) -> None:
    """Raises an error if ``path`` is a URI for which TensorFlow has no file system.

    Raises:
      CheckpointError: names the known schemes, and the package that adds this one.
    """
    scheme = path.partition("://")[0]
    known = sorted(name for name in tf.io.gfile.get_registered_schemes() if name)
    if is_on_disk(path) or scheme in known:
        return
    raise CheckpointError(
        f"TensorFlow has no file system for {scheme}://",
        given=path,
        expected=f"a path, or one of {', '.join(f'{name}://' for name in known)}",
        action=_FOUND_WITH.get(scheme, "import the package that registers it, before wh.init")
        + "; or mount the store as a folder",
    )


def list_names(folder: str) -> list[str]:
    """Returns the sorted names in a folder; [] for a folder of a store that does not exist, as stores have no empty
    folders.

    Raises:
      tf.errors.NotFoundError: there is no such folder on the disk.
    """
    try:
        return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    except tf.errors.NotFoundError:
        if is_on_disk(folder):
            raise
        return []


def remove(path: str) -> None:
    """Removes a file; does nothing if it does not exist."""
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


def remove_files(begin: str) -> None:
    """Removes the files named ``begin`` plus a dot and any suffix, such as ``ckpt-1.index`` for ``ckpt-1``."""
    folder, own = os.path.split(begin)
    for name in list_names(folder):
        if name.startswith(f"{own}."):
            remove(os.path.join(folder, name))


def remove_folder(path: str) -> None:
    """Removes a folder with its content, if it exists; of a symbolic link, only the link."""
    if os.path.islink(path):
        os.unlink(path)
        return
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.rmtree(path)


def duplicate(path: str, other: str) -> None:
    """Gives a file a second name: a link on a disk, a copy in a store."""
    if is_on_disk(path):
        os.link(path, other)
    else:
        tf.io.gfile.copy(path, other, overwrite=True)


def read_text(path: str, most: int) -> str:
    """Returns the first ``most`` characters of a file.

    Raises:
      tf.errors.OpError: the file cannot be read. ValueError: it is not text.
    """
    with tf.io.gfile.GFile(path) as file:
        return str(file.read(most))


def write_text(path: str, text: str) -> None:
    """Writes or replaces a file so that readers see either the old text or the new text, never a part."""
    written = f"{path}.tmp" if is_on_disk(path) else path
    with tf.io.gfile.GFile(written, "w") as file:
        file.write(text)
    if written != path:
        sync_to_disk(written)
        tf.io.gfile.rename(written, path, overwrite=True)
        sync_to_disk(os.path.dirname(path))


def move_files(folder: str, target: str, last: str) -> None:
    """Moves all files of ``folder`` into ``target``; files whose name ends with ``last`` are moved after the others."""
    for name in sorted(list_names(folder), key=lambda name: (name.endswith(last), name)):
        tf.io.gfile.rename(os.path.join(folder, name), os.path.join(target, name), overwrite=True)
    if is_on_disk(target):
        sync_to_disk(target)


def sync_to_disk(path: str) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk; returns at once for stores, which keep
    what is written.
    """
    if not is_on_disk(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
