"""Stand in for the module `pynvml`: GPUs that a test describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLErrorLibraryNotFound(NVMLError):
    pass


class NVMLErrorDriverNotLoaded(NVMLError):
    pass


class NVMLErrorNotSupported(NVMLError):
    pass


@dataclass
class FakeNvml:
    """The functions of `pynvml` that this package calls. A handle is a GPU's number."""

    names: list[str] = field(default_factory=lambda: ["NVIDIA L4"])
    linked: Collection[tuple[int, int]] = ()
    """The pairs that NVLink connects."""
    raises: Mapping[str, Exception] = field(default_factory=dict)
    """What functions raise, by their name."""
    started: int = 0

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLErrorLibraryNotFound
    NVMLError_DriverNotLoaded = NVMLErrorDriverNotLoaded
    NVMLError_NotSupported = NVMLErrorNotSupported
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def _call(self, name: str) -> None:
        if name in self.raises:
            raise self.raises[name]

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._call("nvmlSystemGetDriverVersion")
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._call("nvmlDeviceGetHandleByUUID")
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return self.names[gpu]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        self._call("nvmlDeviceGetP2PStatus")
        return 0 if index == 2 and (one, other) in self.linked else 5

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        self._call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=90 + gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=2 * 10**9)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        self._call("nvmlDeviceGetPowerUsage")
        return 71_500
