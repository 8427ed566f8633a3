"""Exchanges tensors directly between GPUs (`communication.backend` "nccl", "cuda-ipc", "pinned").

``wh.init`` opens them. `ExchangeOps` are the ops through which they, or the host, exchange.

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
    """Gives a rank's process its GPU, and opens it where the configuration asks for it; collective.

    Returns the GPU, before anything of this run is on it; None: there is none, the driver does not list it, or ranks
    are threads, which share it.

    Where the process sees several GPUs, TensorFlow gets that of the process's number on its host, and no other, with
    every backend: otherwise all processes of a host would compute on its first one, whose memory one of them takes.
    With "pinned" ranks for which TensorFlow sees no GPU take part with the host's memory. A single rank, and
    ranks that are threads, have what TensorFlow sees.

    Raises:
      ConfigError: the ranks are threads of this process, which would share one GPU and one TensorFlow.
      ClusterError: on every rank, naming those that cannot: there is no GPU, no compiler for its kernels, no NCCL,
        TensorFlow has started with several GPUs, or they cannot be connected.
    """
    backend, threads = config["communication.backend"], config["communication.in_process_ranks"] > 0
    # As `whale` does for what it starts (whale/cli): under mpirun alone ranks have nvidia-smi's numbers, too, if CUDA
    # has not started yet.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if backend not in DEVICE_BACKENDS:
        if threads:
            return None
        if (size > 1 or joins()) and (lacks := claim_gpu(find_slot(place)).lacks):
            log.warning(f"all ranks of this host compute on its first GPU: {lacks}")
        return look_at_own_gpu()
    if threads:
        raise ConfigError(
            "GPUs exchange tensors of processes, and the in-process transport has one",
            given=f'communication.backend "{backend}" with communication.in_process_ranks',
            expected="the transport between processes",
            action='start the script with `whale run -np 2`, or set communication.backend to "whale"',
        )
    if size == 1:
        return look_at_own_gpu()
    (comm,) = comms
    gpu = take_gpu(place.local_rank)
    own = look_at_own_gpu()  # the kernels' machine code takes memory
    if gpu.ordinal is not None and not gpu.lacks:
        folder = find_folder(config["mesh.plan_cache"])
        gpu = Gpu(gpu.ordinal, find_missing(find_library(), backend, gpu.ordinal, folder))
    open_device(config, comm, gpu)
    return own


@dataclass(frozen=True, slots=True)
class Gpu:
    """A rank's GPU, and what is missing to use it.

    Attributes:
      ordinal: its number, None where TensorFlow sees none.
      lacks: what is missing to use it; "" is nothing.
    """

    ordinal: int | None
    lacks: str = ""


def open_device(config: Config, comm: whale_ops.Communicator, gpu: Gpu) -> None:
    """Opens a rank's device, after all ranks have told each other what they have and lack.

    Raises:
      ClusterError: as `start_device_exchange`.
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
            "GPUs are to exchange what lies in their memory, and a rank has none that it can use",
            **{f"rank {rank}": text for rank, text in enumerate(lacking) if text},
            given=f'communication.backend "{backend}" ({config.origin("communication.backend")})',
            expected="a GPU that TensorFlow sees, and what its exchanges take, on "
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
    """Has NCCL connect groups of ranks now, and not when a step has taken the memory, or is timed.

    Collective in each group; ranks have theirs in one order, so that none wait for each other in a circle. Other
    transports connect ranks when they are opened.

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
    """Returns the bytes of GPU memory that exchanges take, beside what NCCL itself allocates."""
    copies = {"nccl": 1, "cuda-ipc": 2}.get(config["communication.backend"], 0)  # pinned: of the host
    return copies * max(config.bucket_bytes, _LEAST_BUFFER_BYTES)


def find_library() -> Path:
    """Returns the path of the library for GPUs."""
    return device_library.PATH


def take_gpu(local_rank: int) -> Gpu:
    """Gives this process its GPU and no other; the result names what is missing for exchanges from the GPU's memory."""
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
        return Gpu(0, f"TensorFlow sees {len(gpus)} GPUs, the driver {there}: set CUDA_VISIBLE_DEVICES")
    return claim_gpu(local_rank)


def claim_gpu(local_rank: int) -> Gpu:
    """Makes one GPU the only one that TensorFlow sees from now on; its memory is taken only as it is needed.

    Of those that the script has left visible it is that of this process's number on its host.
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
    with contextlib.suppress(RuntimeError, ValueError):  # TensorFlow has started: its memory is as the script says
        tf.config.experimental.set_memory_growth(gpu, True)
    warn_of_taken_memory(gpu)
    return Gpu(gpus.index(gpu))


def warn_of_taken_memory(gpu: Any) -> None:
    """Warns where TensorFlow takes all memory of a GPU at once, so that none is left for exchanges and other ranks."""
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
    """The GPU on which a rank computes, as NVIDIA's driver has it.

    Decision: 0204.

    Attributes:
      uuid: which one it is; of a part of a GPU (MIG), which part.
      memory_bytes: all that it has.
      capability: the major number of its compute capability.
      used_bytes: what other programs had of its memory when the run began.
      sharing: how many ranks of the run compute on it.
    """

    uuid: str
    name: str
    memory_bytes: int
    capability: int
    used_bytes: int = 0
    sharing: int = 1


def list_visible_gpus() -> list[OwnGpu]:
    """Returns the GPUs that TensorFlow may use in this process, in its order; none where the driver lists them not."""
    import tensorflow as tf
    from tensorflow.python.eager import context as tf_context

    visible = tf.config.get_visible_devices("GPU")
    driver = gpu_driver.look() if visible else None
    gpus = tf.config.list_physical_devices("GPU")
    if driver is None or len(driver.gpus) != len(gpus):  # GPUs of others, or a driver that does not answer
        return []
    is_free = tf_context.context()._context_handle is None  # else some of what is used may be this process's
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
    """Returns the GPU of this process; None: it has none, or one that the driver does not list.

    Warns where TensorFlow sees none of those that the driver lists.
    """
    import tensorflow as tf

    if not tf.config.list_physical_devices("GPU"):
        driver = gpu_driver.look()
        if driver is not None and driver.gpus:
            log.warning(
                f"NVIDIA's driver lists {len(driver.gpus)} GPU{'s' * (len(driver.gpus) != 1)}, of which TensorFlow "
                "sees none, and this process computes on processors: pip install 'tensorflow[and-cuda]' (what "
                "TensorFlow lacks it says at its import, unless TF_CPP_MIN_LOG_LEVEL hides it), or say that it is "
                "meant by CUDA_VISIBLE_DEVICES=-1"
            )
    return next(iter(list_visible_gpus()), None)


def find_gpus(comm: whale_ops.Communicator, own: OwnGpu | None) -> list[OwnGpu | None]:
    """Returns the GPU of each rank, a process, and by how many ranks it is shared. Collective.

    Args:
      own: this rank's, as `start_device_exchange` returns it.
    """
    said = comm.allgather_bytes("whale/gpus", msgspec.json.encode(own), purpose="the exchange of which GPU is whose")
    each = [msgspec.json.decode(one, type=OwnGpu | None) for one in said]
    # Ranks that share one look at it while others open it: the first saw what others than ranks have.
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
    """Returns sentences for people on what the ranks' GPUs compute with unlike precision or speed, if anything.

    Capability 8.0 (Ampere) is the first that computes float32 products in TF32, which TensorFlow has it do, and the
    first with units for bfloat16.

    Args:
      gpus: of the ranks.
      compute_dtype: of mixed precision; "" is none.
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
            "tf.config.experimental.enable_tensor_float_32_execution(False) makes all alike, and the former slower"
        )
    if compute_dtype == "bfloat16" and any(gpu is not None and not new for gpu, new in zip(gpus, recent)):
        said.append(
            f'GPUs without units for bfloat16 compute it slowly, on ranks {older}: precision.compute_dtype "float16" '
            "is fast on all"
        )
    return said


class ExchangeOps:
    """Exchanges of a communicator's ranks by ops of TensorFlow; made inside the function that is traced.

    Args:
      through: what carries them out: "" is the host, all else the devices that the communicator has opened.
    """

    def __init__(self, comm: whale_ops.Communicator, through: str) -> None:
        self._ops, self._prefix = whale_ops.load_ops(), "whale_device_" if through else "whale_"
        place = {"communicator": comm.name, "rank": comm.rank}
        # The devices' ops name the communicator; the host's take its handle.
        self._attrs: dict[str, Any] = place if through else {}
        self._handle: tuple[Any, ...] = () if through else (self._ops.whale_communicator(**place),)

    def __call__(self, kind: str, *inputs: Any, **attrs: Any) -> Any:
        """Adds the op of one exchange and returns its outputs. ``kind`` is "all_reduce", "all_gather", "send", ..."""
        op = getattr(self._ops, self._prefix + kind)
        if kind == "all_gather" and self._handle:  # the host's takes several tensors
            (found,) = op(*self._handle, list(inputs), **attrs)
            return found
        return op(*self._handle, *inputs, **self._attrs, **attrs)


def load_kernels(library: Path, ordinal: int, folder: Path | None) -> None:
    """Loads the kernels onto a GPU.

    Args:
      library: the library for GPUs.
      folder: where machine code is kept; None: nowhere.

    Raises:
      CommError: the GPU cannot be asked, no compiler for it is found, or the driver refuses what it has made.
    """
    architecture = device_library.find_architecture(library, ordinal)
    driver = gpu_driver.look()
    newest = driver.cuda[0] if driver is not None and not driver.failure else None
    nvrtc = device_code.choose([*device_code.find_nvrtcs()], architecture, newest)
    device_library.load_kernels(library, ordinal, load_code(nvrtc, architecture, folder))


def load_code(nvrtc: device_code.Nvrtc, architecture: int, folder: Path | None) -> bytes:
    """Returns machine code for GPUs of an architecture: kept from the same sources and compiler, or compiled now."""
    files = None if folder is None else CacheFolder(folder)
    version = ".".join(map(str, nvrtc.version))
    name = f"{nvrtc.find_target(architecture)}-nvrtc-{version}-{device_code.compute_source_digest()}.kernels"
    try:
        if files is not None and (kept := files.get(name)) is not None:
            return kept
    except DamagedFileError:
        log.warning("the GPU kernels that were kept are damaged, and are compiled anew")
    except OSError:
        pass  # writing says why
    code = device_code.compile_kernels(nvrtc, architecture)
    try:
        if files is not None:
            files.put(name, code)
    except OSError as error:
        log.warning(f"GPU kernels are not kept for later runs ({error}); plan_cache names another folder")
    return code


def find_missing(library: Path, backend: str, ordinal: int, folder: Path | None) -> str:
    """Prepares a GPU for a backend. Returns what is missing for it; "" is nothing."""
    try:
        if backend == "nccl":
            device_library.load_nccl()
        if backend != "pinned":  # which only copies
            load_kernels(library, ordinal, folder)
    except CommError as error:
        return " ".join(str(error).split())
    return ""
