"""Asks the NVIDIA driver about this process's GPUs, without the CUDA runtime and without taking GPU memory.

Only functions of cuda.h that need no context are called; they see the GPUs that CUDA_VISIBLE_DEVICES leaves. How much
of a GPU's memory is in use is asked of NVML, which comes with the driver.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass

LIBRARY = "libcuda.so.1"
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 256
_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR


@dataclass(frozen=True, slots=True)
class Gpu:
    """Describes one GPU.

    Attributes:
        name: name that the driver reports.
        memory_bytes: size of its memory.
        capability: major number of its compute capability.
        peers: for every GPU, by number, whether this one can access its memory; True for itself.
        minor: minor number of its compute capability.
        uuid: identifies the GPU; a part of a GPU (MIG) has its own. "" if the driver does not tell.
    """

    name: str
    memory_bytes: int
    capability: int
    peers: tuple[bool, ...]
    minor: int = 0
    uuid: str = ""

    @property
    def architecture(self) -> int:
        """Returns the compute capability times ten, e.g. 90 for 9.0."""
        return 10 * self.capability + self.minor


@dataclass(frozen=True, slots=True)
class Driver:
    """Describes the driver and its GPUs.

    Attributes:
        cuda: newest CUDA version that it supports, e.g. (13, 0).
        gpus: the GPUs, in CUDA's order.
        failure: error of the driver if it does not answer; else "".
    """

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]
    failure: str = ""


def look(library: str | None = None) -> Driver | None:
    """Asks the driver of this machine for its version and GPUs; None if no driver is installed.

    Args:
        library: driver library to load instead of `LIBRARY`; tests set it.
    """
    try:
        cuda = ctypes.CDLL(library or LIBRARY)
    except OSError:
        return None
    number = ctypes.c_int()

    def describe_failure(code: int, call: str) -> str:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        return f"{call}: {(text.value or b'error ' + str(code).encode()).decode()}"

    if code := cuda.cuInit(0):
        return Driver((0, 0), (), describe_failure(code, "cuInit"))
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    if code := cuda.cuDeviceGetCount(ctypes.byref(number)):
        return Driver(version, (), describe_failure(code, "cuDeviceGetCount"))
    devices = []
    for ordinal in range(number.value):
        device = ctypes.c_int()
        if code := cuda.cuDeviceGet(ctypes.byref(device), ordinal):
            return Driver(version, (), describe_failure(code, "cuDeviceGet"))
        devices.append(device)
    return Driver(version, tuple(_read_gpu(cuda, device, devices) for device in devices))


def _read_gpu(cuda: ctypes.CDLL, device: ctypes.c_int, devices: list[ctypes.c_int]) -> Gpu:
    name, memory_bytes, can = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(), ctypes.c_int()
    capability = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    for number, attribute in zip(capability, _CAPABILITY):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    peers = []
    for other in devices:
        same = other is device
        known = same or cuda.cuDeviceCanAccessPeer(ctypes.byref(can), device, other) == 0
        peers.append(same or (known and bool(can.value)))
    octets = ctypes.create_string_buffer(16)
    known = cuda.cuDeviceGetUuid_v2(octets, device) == 0
    major, minor = (number.value for number in capability)
    found = str(uuid.UUID(bytes=octets.raw)) if known else ""
    return Gpu(name.value.decode(), memory_bytes.value, major, tuple(peers), minor, found)


class _Memory(ctypes.Structure):
    """Mirrors the struct nvmlMemory_v2_t of nvml.h."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


def count_used_bytes(gpu: Gpu, library: str | None = None) -> int:
    """Returns the bytes of a GPU's memory that processes use, without the driver's own reserve; 0 if that is not known.

    Args:
        library: NVML library to load instead of `MANAGEMENT_LIBRARY`; tests set it.
    """
    try:
        nvml = ctypes.CDLL(library or MANAGEMENT_LIBRARY)
        start, find, look, end = (
            nvml[name]
            for name in ("nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo_v2", "nvmlShutdown")
        )
    except (OSError, AttributeError):  # not installed, or older than drivers of 510
        return 0
    if start():
        return 0
    device, memory = ctypes.c_void_p(), _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
    kinds = (f"{kind}-{gpu.uuid}".encode() for kind in ("GPU", "MIG"))
    known = any(find(name, ctypes.byref(device)) == 0 for name in kinds)
    known = known and look(device, ctypes.byref(memory)) == 0
    end()
    return memory.used if known else 0
