"""Describes this host's processor, and finds out with which kernels TensorFlow multiplies matrices on it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from tensorflow.python.util import _pywrap_util_port as built

# Environment variables that make libraries compute as on another processor.
_CAPS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES",
    "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip
_NAMES = ("model name", "model", "flags", "CPU part", "Features")  # lines of /proc/cpuinfo: on x86, then on ARM


def describe_processor(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns lines that identify the processor's model and instruction sets, and variables that restrict these.

    Processes with equal descriptions compute with the same kernels.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.partition(":")[0].strip() in _NAMES} or {platform.processor()}
    return (*sorted(found), *(os.environ.get(name, "") for name in _CAPS))


def count_threads() -> int:
    """Returns the number of threads among which TensorFlow divides one operation in this process.

    That is the script's setting, else TF_NUM_INTRAOP_THREADS, else the number of cores that the process may use.
    """
    import tensorflow as tf

    asked = tf.config.threading.get_intra_op_parallelism_threads() or os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return (int(asked) if str(asked).isdecimal() else 0) or len(os.sched_getaffinity(0))


@cache
def can_multiply_by_avx2(root: Path = Path("/")) -> bool:
    """Returns True if TensorFlow multiplies float32 matrices here by oneDNN's kernels for AVX2.

    oneDNN is on by default on processors with AVX-512 VNNI, AVX-VNNI or newer instructions, elsewhere with
    TF_ENABLE_ONEDNN_OPTS=1. It uses its kernels for AVX-512 instead if the processor has the sets F, BW, DQ and VL
    (cpu_isa_traits.hpp: avx512_core) and ONEDNN_MAX_CPU_ISA allows them.
    """
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    if not built.IsMklEnabled() or cap in ("SSE41", "AVX"):
        return False
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False  # not Linux, or /proc is hidden
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            wider = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags and not cap.startswith("AVX2")
            return "avx2" in flags and not wider
    return False
