"""Writes which kernels for GPUs a TensorFlow for GPUs has: ``python -m tests.host_gpu.dump_kernels FILE``.

Run with the package ``tensorflow`` of that version; no GPU is needed. Each line is a kernel for several types: the op,
the types that each attribute may have (``T=float,half``), the arguments in the host's memory (``host:=shape``), its
label (``label:=...``). Ops that have no kernel for processors, which would take its place (late_kernels.cc), are left
out, and so is what only XLA, NCCL, or TensorFlow's own exchanges have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ELSEWHERE = ("Collective", "Nccl", "Xla", "_Xla", "_Send", "_Recv", "_HostSend", "_HostRecv", "Whale")
# (op, label, arguments in the host's memory), and a set of types of each attribute.
Head = tuple[str, str, tuple[str, ...]]
Types = tuple[tuple[str, frozenset[int]], ...]


def merged(kernels: Iterable[tuple[Head, Types]]) -> list[tuple[Head, Types]]:
    """Joins kernels that differ in the types of one attribute, as long as there are any."""
    found = list(dict.fromkeys(kernels))
    for place in range(max((len(types) for _, types in found), default=0)):
        groups: dict[Any, set[int]] = {}
        for head, types in found:
            names = tuple(name for name, _ in types)
            rest = types[:place] + types[place + 1 :]
            groups.setdefault((head, names, rest), set()).update(types[place][1] if place < len(types) else ())
        found = []
        for (head, names, rest), joined in groups.items():
            one = rest if place >= len(names) else (*rest[:place], (names[place], frozenset(joined)), *rest[place:])
            found.append((head, one))
    return found


def format_kernel(head: Head, types: Types) -> str:
    """Returns the line of a kernel."""
    from tensorflow.core.framework import types_pb2

    def name_types(of: frozenset[int]) -> str:
        return ",".join(types_pb2.DataType.Name(one).removeprefix("DT_").lower() for one in sorted(of))

    op, label, host = head
    words = [op, *(f"{name}={name_types(of)}" for name, of in types)]
    return " ".join([*words, *[f"host:={','.join(host)}"] * bool(host), *[f"label:={label}"] * bool(label)])


def format_kernels(kernels: Iterable[Any]) -> str:
    """Returns the lines of kernels (``KernelDef``) for GPUs."""
    found = []
    for one in kernels:
        # What others but types decide is left out: kernels for processors take any.
        types = ((c.name, frozenset(c.allowed_values.list.type)) for c in one.constraint if c.allowed_values.list.type)
        found.append(((one.op, one.label, tuple(one.host_memory_arg)), tuple(sorted(types, key=lambda t: t[0]))))
    return "".join(f"{line}\n" for line in sorted(format_kernel(*one) for one in merged(found)))


def main() -> None:
    """Writes the list of this environment's TensorFlow."""
    import tensorflow as tf
    from tensorflow.python.framework.kernels import get_all_registered_kernels

    if not tf.test.is_built_with_cuda():
        sys.exit("this TensorFlow has no kernels for GPUs: pip install tensorflow, the package for GPUs")
    every = get_all_registered_kernels().kernel
    on_processors = {one.op for one in every if one.device_type == "CPU"}
    kept = [
        one
        for one in every
        if one.device_type == "GPU" and one.op in on_processors and not one.op.startswith(_ELSEWHERE)
    ]
    Path(sys.argv[1]).write_text(f"# {__doc__.splitlines()[0]} TensorFlow {tf.__version__}\n{format_kernels(kept)}")


if __name__ == "__main__":
    main()
