"""The NVIDIA driver and the cards it sees, without torch and without making a CUDA context.

NVML first (ctypes over the library that comes with every driver; 20 ms), `nvidia-smi` where NVML cannot be loaded. Cards
without a working driver are looked for on the PCI bus, because "no card" and "no driver" need different cures.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anymamba.machine._programs import Ask, ask

__all__ = ["Card", "Driver", "read_driver"]


@dataclass(frozen=True)
class Card:
    """One GPU. `capability` is the compute capability, (8, 6) for an RTX 3060; None when the driver is too old to say."""

    name: str
    capability: tuple[int, int] | None
    memory_gb: float

    @property
    def architecture(self) -> str:
        """sm_86."""
        return "unknown" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver, or the lack of one (`version` None)."""

    version: str | None = None
    cuda: str | None = None  # newest CUDA it can run, "12.4"
    cards: tuple[Card, ...] = ()
    on_bus: bool = False  # an NVIDIA display device is in the machine, driver or not
    problem: str = ""  # what the driver said when it did not answer

    @property
    def cuda_release(self) -> tuple[int, int] | None:
        """(12, 4)."""
        if self.cuda is None:
            return None
        major, _, minor = self.cuda.partition(".")
        return int(major), int(minor or 0)


def read_driver(*, ask: Ask = ask, nvml: Callable[[], Any] | None = None) -> Driver:
    """Ask NVML, then nvidia-smi.

    Parameters
    ----------
    ask : callable
        Runs a program; tests pass their own.
    nvml : callable, optional
        Loads the NVML library or raises OSError.
    """
    problem = ""
    try:
        return _from_nvml((nvml or _load_nvml)())
    except OSError as failure:
        problem = str(failure)
    driver = _from_smi(ask)
    if driver is not None:
        return driver
    on_bus = _on_bus()
    return Driver(on_bus=on_bus, problem=problem if on_bus else "")


def _load_nvml() -> Any:
    if platform.system() == "Windows":
        return getattr(ctypes, "WinDLL")("nvml.dll")  # noqa: B009  (mypy looks from Linux)
    return ctypes.CDLL("libnvidia-ml.so.1")


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _from_nvml(library: Any) -> Driver:
    def call(function: str, *arguments: Any) -> None:
        code = getattr(library, function)(*arguments)
        if code != 0:
            # NVML's codes: 3 not supported, 9 driver not loaded, 18 library and kernel module differ
            raise OSError(f"{function} answers {code}")

    call("nvmlInit_v2")
    try:
        text = ctypes.create_string_buffer(96)
        call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        version = text.value.decode("ascii", "replace")
        number = ctypes.c_int()
        call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
        count = ctypes.c_uint()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        cards = tuple(_card(call, index) for index in range(count.value))
    finally:
        library.nvmlShutdown()
    return Driver(version, f"{number.value // 1000}.{number.value % 1000 // 10}", cards, on_bus=bool(cards))


def _card(call: Callable[..., None], index: int) -> Card:
    handle = ctypes.c_void_p()
    call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    name = ctypes.create_string_buffer(96)
    call("nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
    memory = _Memory()
    call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    major, minor = ctypes.c_int(), ctypes.c_int()
    capability: tuple[int, int] | None
    try:
        call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        capability = (major.value, minor.value)
    except OSError:
        capability = None
    return Card(name.value.decode("utf-8", "replace"), capability, round(memory.total / 2**30, 1))


def _from_smi(ask: Ask) -> Driver | None:
    header = ask(["nvidia-smi"])
    if not header.ok:
        return None
    cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", header.out)
    version = re.search(r"Driver Version:\s*([\d.]+)", header.out)
    fields = "name,memory.total,compute_cap"
    answer = ask(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if not answer.ok:  # drivers before 510 do not know compute_cap
        answer = ask(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    cards = tuple(_smi_card(line) for line in answer.out.splitlines() if line.count(",") >= 1)
    return Driver(version.group(1) if version else None, cuda.group(1) if cuda else None, cards, on_bus=bool(cards))


def _smi_card(line: str) -> Card:
    name, memory, *rest = (part.strip() for part in line.split(","))
    capability = re.fullmatch(r"(\d+)\.(\d+)", rest[0]) if rest else None
    return Card(
        name,
        (int(capability.group(1)), int(capability.group(2))) if capability else None,
        round(float(memory) / 1024, 1) if memory.replace(".", "").isdigit() else 0.0,
    )


def _on_bus() -> bool:
    if platform.system() == "Windows":
        return _on_windows_bus()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):  # display controller
            return True
    return False


def _on_windows_bus() -> bool:
    import winreg as registry_module

    registry: Any = registry_module
    root = r"SYSTEM\CurrentControlSet\Enum\PCI"
    display = "{4d36e968-e325-11ce-bfc1-08002be10318}"  # the device class of display adapters
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, root) as bus:
            for index in range(registry.QueryInfoKey(bus)[0]):
                device = registry.EnumKey(bus, index)
                if not device.upper().startswith("VEN_10DE"):
                    continue
                with registry.OpenKey(bus, device) as key:
                    for instance in range(registry.QueryInfoKey(key)[0]):
                        with registry.OpenKey(key, registry.EnumKey(key, instance)) as values:
                            try:
                                guid = registry.QueryValueEx(values, "ClassGUID")[0]
                            except OSError:
                                continue
                            if str(guid).lower() == display:
                                return True
    except OSError:
        return False
    return False
