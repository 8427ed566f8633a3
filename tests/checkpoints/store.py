"""Opens a store of objects, ``objects://bucket/key``, that all processes of a test see, in place of gs:// and s3://."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import tensorflow as tf

SOURCE = Path(__file__).with_name("object_store.cc")
_BUILD = Path(__file__).resolve().parents[2] / "build"


def find_library() -> Path:
    """The file system, compiled for this TensorFlow; 1.5 s when it is not there yet."""
    found = _BUILD / f"object_store-{tf.__version__}-{sysconfig.get_python_version()}.so"
    if not found.exists() or found.stat().st_mtime < SOURCE.stat().st_mtime:
        _BUILD.mkdir(exist_ok=True)
        beside = found.with_suffix(f".{os.getpid()}")
        flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
        line = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", str(SOURCE), "-o", str(beside), *flags, "-std=c++17"]
        subprocess.run(line, check=True)
        beside.replace(found)
    return found


def open_store(folder: Path | str) -> None:
    """Lets this process, whose first store it is, reach the objects that are kept in a folder."""
    os.environ["OBJECT_STORE"] = str(folder)
    tf.experimental.register_filesystem_plugin(str(find_library()))


def list_keys(folder: Path | str, bucket: str = "") -> list[str]:
    """The keys of all objects, or of those of a bucket without its name."""
    keys = sorted(name.replace("%2F", "/").replace("%25", "%") for name in os.listdir(folder))
    return [key.removeprefix(f"{bucket}/") for key in keys if key.startswith(bucket)]
