"""Sets up exchanges of tensors directly between GPUs (`communication.backend` "nccl", "cuda-ipc" or "pinned").

``wh.init`` calls `start_device_exchange`. `ExchangeOps` then adds the TensorFlow ops of exchanges, through GPUs or
through the host, to a traced function.

Decision: 0193.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import whale_ops
from whale.config import Config
from whale.distributed.cache_files import CacheFolder, DamagedFileError, find_folder
from whale.errors import ClusterError, CommError, ConfigError
from whale.log import log
from whale.passes.resharding.on_devices import DEVICE_BACKENDS, PINNED
from whale.started import ProcessPlace, find_slot, joins
from whale_ops import device_code, device_library, gpu_driver

NO_GPU = "TensorFlow sees no GPU"
_AMPERE = 8  # major number of the compute capability
_LEAST_BUFFER_BYTES = 1 << 20  # tensors of more bytes travel in parts


def start_device_exchange(
    config: Config, place: ProcessPlace, size: int, comms: Sequence[whale_ops.Communicator]
) -> OwnGpu | None:
    """Assigns this rank's process its GPU, and opens the GPU for exchanges if the configuration asks for it;
    collective.

    If the process sees several GPUs, TensorFlow is restricted to the one with the process's local rank, whatever the
    backend: otherwise all processes of a host would compute on the first GPU, and one of them would take its memory. A
    single rank, and ranks that are threads of one process, keep all GPUs that TensorFlow sees. With "pinned", ranks
    without a GPU take part with host memory.

    Returns:
      The GPU, as it is before the run puts anything on it; None: there is none, the driver does not list it, or the
      ranks are threads.

    Raises:
      ConfigError: the ranks are threads of this process, which would share one GPU and one TensorFlow.
      ClusterError: raised on every rank, naming the ranks that cannot take part: no GPU, no compiler for the GPU
        kernels, no NCCL, TensorFlow has started with several GPUs, or the GPUs cannot be connected.
    """
    backend, threads = config["communication.backend"], config["communication.in_process_ranks"] > 0
    # The command `whale` sets it for its processes (whale/cli). Here it makes GPUs have the numbers of nvidia-smi also
    # under plain mpirun, unless CUDA has started already.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if backend not in DEVICE_BACKENDS:
        if threads:
            return None
        if (size > 1 or joins()) and (lacks := claim_gpu(find_slot(place)).lacks):
            log.warning(f"all ranks of this host compute on its first GPU: {lacks}")
        return look_at_own_gpu()
    if threads:
        raise ConfigError(
            "GPUs exchange tensors between processes, but communication.in_process_ranks makes all ranks one process",
            given=f'communication.backend "{backend}" with communication.in_process_ranks',
            expected="one process per rank",
            action='start the script with `whale run -np 2`, or set communication.backend to "whale"',
        )
    if size == 1:
        return look_at_own_gpu()
    (comm,) = comms
    gpu = take_gpu(place.local_rank)
    own = look_at_own_gpu()  # before the kernels' machine code takes some of its memory
    if gpu.ordinal is not None and not gpu.lacks:
        folder = find_folder(config["mesh.plan_cache"])
        gpu = Gpu(gpu.ordinal, find_missing(find_library(), backend, gpu.ordinal, folder))
    open_device(config, comm, gpu)
    return own


@dataclass(frozen=True, slots=True)
class Gpu:
    """Identifies the GPU of a rank, and says what is missing to use it for exchanges.

    Attributes:
      ordinal: its number among the GPUs that this process sees; None: TensorFlow sees no GPU.
      lacks: what is missing, as a text for an error message; "" if nothing.
    """

    ordinal: int | None
    lacks: str = ""


def open_device(config: Config, comm: whale_ops.Communicator, gpu: Gpu) -> None:
    """Opens this rank's GPU for exchanges, after all ranks have told each other whether they can take part; collective.

    Raises:
      ClusterError: a rank cannot take part, or the GPUs cannot be connected; raised on every rank.
    """
    backend, buffer_bytes = config["communication.backend"], config.bucket_bytes
    lacks = gpu.lacks or ("" if gpu.ordinal is not None or backend == PINNED else NO_GPU)
    said = comm.allgather_bytes(
        "whale/device",
        json.dumps([gpu.ordinal is not None, lacks]).encode(),
        purpose="the exchange of what ranks know of their GPUs",
    )
    have, lacking = zip(*map(json.loads, said))
    if not any(have) and not any(lacking):
        lacking = (NO_GPU,) * comm.size
    if any(lacking):
        mixed = any(have) and backend != PINNED and set(lacking) <= {"", NO_GPU}
        other = f'"{PINNED}", with which ranks without a GPU take part, or to ' if mixed else ""
        raise ClusterError(
            "communication.backend asks for exchanges between GPUs, but a rank has no GPU that it can use",
            **{f"rank {rank}": text for rank, text in enumerate(lacking) if text},
            given=f'communication.backend "{backend}" ({config.origin("communication.backend")})',
            expected="a GPU that TensorFlow sees, and the libraries that its exchanges need, on "
            + ("one rank or several" if backend == PINNED else "every rank"),
            action=f'see docs/gpu.md, or set communication.backend to {other}"whale"',
        )
    if not all(have) and comm.rank == 0:
        without = ", ".join(str(rank) for rank, has in enumerate(have) if not has)
        log.info(f'communication.backend="{backend}": ranks without a GPU compute on their processors: {without}')
    try:
        path = find_library() if gpu.ordinal is not None else ""
        comm.open_device(path, backend, gpu.ordinal or 0, max(buffer_bytes, _LEAST_BUFFER_BYTES))
    except CommError as error:
        others = " or ".join(f'"{name}"' for name in (*DEVICE_BACKENDS, "whale") if name != backend)
        raise ClusterError(
            "the ranks' GPUs cannot be connected",
            reason=str(error),
            given=f'communication.backend "{backend}"',
            expected="nccl: a GPU for each rank; cuda-ipc: ranks of one host, which may share a GPU; pinned: any",
            action=f"set communication.backend to {others}",
        ) from error


def connect_groups(groups: Sequence[Sequence[int]], comm: whale_ops.Communicator, backend: str) -> None:
    """Makes NCCL connect the given groups of ranks now, rather than at their first exchange in a step.

    During a step, connecting could fail because the step has taken the GPU's memory, and it would be part of the
    measured step time. Collective in each group: all ranks go through the groups in the same order, so that no deadlock
    arises. The other backends connect all ranks when they are opened, so nothing is done for them.

    Args:
      groups: the groups that this rank belongs to.
      comm: the communicator of all ranks.
      backend: the value of `communication.backend`.

    Raises:
      tf.errors.OpError: a rank is gone.
    """
    if backend != "nccl" or not groups:
        return
    import tensorflow as tf

    with tf.init_scope(), tf.device(None):
        for group in groups:
            key = f"whale/connect/{'-'.join(map(str, group))}"
            ExchangeOps(comm, backend)("all_reduce", [tf.zeros(1)], key=key, ranks=list(group))


def count_device_buffer_bytes(config: Config) -> int:
    """Returns the bytes of GPU memory that Whale's exchange buffers take, but for a small one, and for what NCCL itself
    allocates.
    """
    # Two are packed in turn, and "cuda-ipc" shows a third one to other ranks; "pinned" has buffers on the host.
    buffers = {"nccl": 2, "cuda-ipc": 3}.get(config["communication.backend"], 0)
    return buffers * max(config.bucket_bytes, _LEAST_BUFFER_BYTES)


def find_library() -> Path:
    """Returns the path of Whale's native library for GPUs, which may not be built."""
    return device_library.PATH


def take_gpu(local_rank: int) -> Gpu:
    """Restricts this process to one GPU, and checks that it can be used for exchanges.

    Returns:
      The GPU; its `lacks` says what is missing, such as the native library or a driver that sees the same GPUs.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not tf.config.get_visible_devices("GPU"):
        return Gpu(None)
    if not find_library().exists():
        return Gpu(0, f"{find_library().name} is not built: python -m whale_ops.build")
    try:
        there = whale_ops.count_devices(find_library())
    except CommError as error:
        return Gpu(0, str(error))
    if there != len(gpus):
        return Gpu(0, f"TensorFlow sees {len(gpus)} GPUs, the driver {there}: set CUDA_VISIBLE_DEVICES to one of both")
    return claim_gpu(local_rank)


def claim_gpu(local_rank: int) -> Gpu:
    """Makes one GPU the only one that TensorFlow sees in this process, with memory allocated only as needed.

    Args:
      local_rank: number of this process on its host; it selects among the GPUs that the script has left visible.
    """
    import tensorflow as tf

    gpus, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    if not visible:
        return Gpu(None)
    gpu = visible[local_rank % len(visible)]
    try:
        tf.config.set_visible_devices(gpu, "GPU")
    except RuntimeError:
        if len(tf.config.list_logical_devices("GPU")) != 1:
            return Gpu(0, "TensorFlow has started with several GPUs: call wh.init first, or set CUDA_VISIBLE_DEVICES")
    with contextlib.suppress(RuntimeError, ValueError):  # TensorFlow has started, with the script's own settings
        tf.config.experimental.set_memory_growth(gpu, True)
    warn_of_taken_memory(gpu)
    return Gpu(gpus.index(gpu))


def warn_of_taken_memory(gpu: Any) -> None:
    """Warns if TensorFlow will allocate all memory of a GPU, which leaves none for exchanges and other ranks.

    Args:
      gpu: the tf.config.PhysicalDevice.
    """
    import tensorflow as tf

    said = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").strip().lower()
    is_growing = tf.config.experimental.get_memory_growth(gpu)
    parts = tf.config.get_logical_device_configuration(gpu) or ()
    if said == "true" or any(part.memory_limit for part in parts) or (is_growing and said != "false"):
        return
    why = "TF_FORCE_GPU_ALLOW_GROWTH=false" if is_growing else "it has started before wh.init"
    log.warning(
        f"TensorFlow takes all memory of the GPU at once ({why}), and exchanges, or ranks that share the GPU, may find "
        "none: call wh.init before TensorFlow computes anything, or set TF_FORCE_GPU_ALLOW_GROWTH=true"
    )


class OwnGpu(msgspec.Struct, frozen=True):
    """Describes the GPU on which a rank computes, as NVIDIA's driver reports it.

    Decision: 0204.

    Attributes:
      uuid: identifies the GPU, or with MIG the part of a GPU.
      name: its model, such as "NVIDIA H100".
      memory_bytes: its total memory.
      capability: major number of its compute capability.
      used_bytes: memory that other programs used when the run began.
      sharing: number of ranks of the run that compute on it.
    """

    uuid: str
    name: str
    memory_bytes: int
    capability: int
    used_bytes: int = 0
    sharing: int = 1


def list_visible_gpus() -> list[OwnGpu]:
    """Returns the GPUs that TensorFlow may use in this process, in TensorFlow's order; [] if the driver does not list
    them.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context as tf_context

    visible = tf.config.get_visible_devices("GPU")
    driver = gpu_driver.look() if visible else None
    gpus = tf.config.list_physical_devices("GPU")
    if driver is None or len(driver.gpus) != len(gpus):  # GPUs of another vendor, or a driver that does not answer
        return []
    is_free = tf_context.context()._context_handle is None  # else this process may have taken some of the memory
    return [
        OwnGpu(
            found.uuid or f"{platform.node()}/{gpus.index(one)}",
            found.name,
            found.memory_bytes,
            found.capability,
            gpu_driver.count_used_bytes(found) if is_free else 0,
        )
        for one, found in ((one, driver.gpus[gpus.index(one)]) for one in visible)
    ]


def look_at_own_gpu() -> OwnGpu | None:
    """Returns the GPU of this process; None if it has none, or one that the driver does not list.

    Warns if the driver lists GPUs and TensorFlow sees none of them.
    """
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        driver = gpu_driver.look()
        if driver is not None and driver.gpus:
            log.warning(
                f"NVIDIA's driver lists {len(driver.gpus)} GPU{'s' * (len(driver.gpus) != 1)}, of which TensorFlow "
                "sees none, so this process computes on the CPU: pip install 'tensorflow[and-cuda]' (TensorFlow says "
                "what it lacks when it is imported, unless TF_CPP_MIN_LOG_LEVEL hides that), or set "
                "CUDA_VISIBLE_DEVICES=-1 if the CPU is what you want"
            )
    return next(iter(list_visible_gpus()), None)


def find_gpus(comm: whale_ops.Communicator, own: OwnGpu | None) -> list[OwnGpu | None]:
    """Returns each rank's GPU, with the number of ranks that share it, by rank; collective.

    Args:
      comm: the communicator of all ranks, which are processes.
      own: this rank's GPU, as `start_device_exchange` returns it.
    """
    said = comm.allgather_bytes("whale/gpus", msgspec.json.encode(own), purpose="the exchange of which GPU is whose")
    each = [msgspec.json.decode(one, type=OwnGpu | None) for one in said]
    # Ranks that share a GPU may have opened it before others looked at its memory: the smallest figure is that of the
    # rank that looked first, and counts only what programs outside of the run use.
    sharing: dict[str, list[OwnGpu]] = {}
    for gpu in filter(None, each):
        sharing.setdefault(gpu.uuid, []).append(gpu)
    return [
        one
        and msgspec.structs.replace(
            one,
            used_bytes=min(other.used_bytes for other in sharing[one.uuid]),
            sharing=len(sharing[one.uuid]),
        )
        for one in each
    ]


def describe_unequal_precision(gpus: Sequence[OwnGpu | None], compute_dtype: str) -> list[str]:
    """Returns sentences for the log that say what the ranks' GPUs compute with different precision or speed; [] if
    nothing.

    GPUs of compute capability 8.0 (Ampere) and newer multiply float32 in TF32, by TensorFlow's default, and have units
    for bfloat16; older ones do neither.

    Args:
      gpus: the GPU of each rank, by rank.
      compute_dtype: the dtype of mixed precision; "": none.
    """
    import tensorflow as tf

    recent = [gpu is not None and gpu.capability >= _AMPERE for gpu in gpus]
    older = ", ".join(
        f"{rank} ({gpu.name if gpu else 'a processor'})" for rank, gpu in enumerate(gpus) if not recent[rank]
    )
    said = []
    is_rounding = tf.config.experimental.tensor_float_32_execution_enabled()
    if any(recent) and not all(recent) and is_rounding and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        said.append(
            f"float32 products are rounded to TF32 (10 bits) on some ranks' GPUs, and not on ranks {older}: "
            "tf.config.experimental.enable_tensor_float_32_execution(False) makes all ranks alike, newer ones slower"
        )
    slow = ", ".join(
        f"{rank} ({gpu.name})" for rank, gpu in enumerate(gpus) if gpu is not None and gpu.capability < _AMPERE
    )
    if compute_dtype == "bfloat16" and slow:
        said.append(
            f'GPUs without units for bfloat16 compute it slowly, on ranks {slow}: precision.compute_dtype "float16" '
            "is fast on all"
        )
    return said


class ExchangeOps:
    """Adds the TensorFlow ops of exchanges between a communicator's ranks to the function that is being traced.

    Create the object inside that function.

    Args:
      comm: the communicator.
      through: the path of the data: "" through host memory; else the value of `communication.backend` ("nccl", ...) for
        which the communicator's GPUs were opened.
    """

    def __init__(self, comm: whale_ops.Communicator, through: str) -> None:
        self._ops, self._prefix = whale_ops.load_ops(), "whale_device_" if through else "whale_"
        place = {"communicator": comm.name, "rank": comm.rank}
        # The devices' ops name the communicator; the host's take its handle.
        self._attrs: dict[str, Any] = place if through else {}
        self._handle: tuple[Any, ...] = () if through else (self._ops.whale_communicator(**place),)

    def __call__(self, kind: str, *inputs: Any, **attrs: Any) -> Any:
        """Adds the op of one exchange and returns its outputs.

        Args:
          kind: the exchange: "all_reduce", "all_gather", "send", ...
          inputs: tensors, as the op takes them.
          attrs: the op's attributes, such as ``key`` and ``ranks``.
        """
        op = getattr(self._ops, self._prefix + kind)
        if kind == "all_gather" and self._handle:  # the host's takes several tensors
            (found,) = op(*self._handle, list(inputs), **attrs)
            return found
        return op(*self._handle, *inputs, **self._attrs, **attrs)


def load_kernels(library: Path, ordinal: int, folder: Path | None) -> None:
    """Compiles Whale's GPU kernels, or reads them from the cache, and loads them onto a GPU.

    Args:
      library: path of Whale's native library for GPUs.
      ordinal: number of the GPU.
      folder: cache folder for compiled kernels; None: no cache.

    Raises:
      CommError: the GPU does not answer, no compiler for it (NVRTC) is found, or the driver refuses the compiled
        kernels.
    """
    architecture = device_library.find_architecture(library, ordinal)
    driver = gpu_driver.look()
    newest = driver.cuda[0] if driver is not None and not driver.failure else None
    nvrtc = device_code.choose([*device_code.find_nvrtcs()], architecture, newest)
    device_library.load_kernels(library, ordinal, load_code(nvrtc, architecture, folder))


def load_code(nvrtc: device_code.Nvrtc, architecture: int, folder: Path | None) -> bytes:
    """Returns compiled GPU kernels, from the cache if sources, compiler and architecture are the same, else compiled
    now.

    Args:
      nvrtc: the compiler.
      architecture: compute capability of the GPU, such as 90.
      folder: cache folder; None: no cache.
    """
    files = None if folder is None else CacheFolder(folder)
    version = ".".join(map(str, nvrtc.version))
    name = f"{nvrtc.find_target(architecture)}-nvrtc-{version}-{device_code.compute_source_digest()}.kernels"
    try:
        if files is not None and (kept := files.get(name)) is not None:
            return kept
    except DamagedFileError:
        log.warning("the cached GPU kernels are damaged, and are compiled again")
    except OSError:
        pass  # writing to the folder, below, warns of the same error
    code = device_code.compile_kernels(nvrtc, architecture)
    try:
        if files is not None:
            files.put(name, code)
    except OSError as error:
        log.warning(f"compiled GPU kernels cannot be cached ({error}); set mesh.plan_cache to another folder")
    return code


def find_missing(library: Path, backend: str, ordinal: int, folder: Path | None) -> str:
    """Prepares a GPU for a backend, and returns what is missing for it as a text; "" if nothing.

    Args:
      library: path of Whale's native library for GPUs.
      backend: the value of `communication.backend`.
      ordinal: number of the GPU.
      folder: cache folder for compiled kernels; None: no cache.
    """
    try:
        if backend == "nccl":
            device_library.load_nccl()
        if backend != "pinned":  # "pinned" copies to the host, and needs no kernels
            load_kernels(library, ordinal, folder)
    except CommError as error:
        return " ".join(str(error).split())
    return ""
