"""The driver's facts come from NVML, else from nvidia-smi, else from the bus."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anymamba.machine import driver as driver_module
from anymamba.machine._programs import Answer
from anymamba.machine.driver import Card, Driver, read_driver

HEADER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 546.33                 Driver Version: 546.33       CUDA Version: 12.3       |
|-----------------------------------------+----------------------+------------------------+
"""


class FakeNvml:
    """A library with one RTX 3060 and a driver for CUDA 12.3."""

    def __init__(self, failing: str = "", code: int = 9) -> None:
        self.failing, self.code, self.shut = failing, code, False

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.code if name == self.failing else self.answer(name, arguments)

    def answer(self, name: str, arguments: Sequence[Any]) -> int:
        def put(argument: Any, value: Any) -> None:
            argument._obj.value = value

        if name == "nvmlSystemGetDriverVersion":
            arguments[0].value = b"546.33"
        elif name == "nvmlSystemGetCudaDriverVersion_v2":
            put(arguments[0], 12030)
        elif name == "nvmlDeviceGetCount_v2":
            put(arguments[0], 1)
        elif name == "nvmlDeviceGetName":
            arguments[1].value = b"NVIDIA GeForce RTX 3060"
        elif name == "nvmlDeviceGetMemoryInfo":
            arguments[1]._obj.total = 12 * 2**30
        elif name == "nvmlDeviceGetCudaComputeCapability":
            put(arguments[1], 8)
            put(arguments[2], 6)
        elif name == "nvmlShutdown":
            self.shut = True
        return 0


def no_library() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def test_nvml_tells_driver_cuda_and_cards() -> None:
    library = FakeNvml()
    driver = read_driver(nvml=lambda: library)
    assert driver == Driver("546.33", "12.3", (Card("NVIDIA GeForce RTX 3060", (8, 6), 12.0),), on_bus=True)
    assert driver.cuda_release == (12, 3)
    assert driver.cards[0].architecture == "sm_86"
    assert library.shut


def test_an_old_driver_that_does_not_know_the_capability_still_names_its_card() -> None:
    driver = read_driver(nvml=lambda: FakeNvml("nvmlDeviceGetCudaComputeCapability", code=3))
    assert driver.cards[0].capability is None
    assert driver.cards[0].architecture == "unknown"


def test_without_nvml_nvidia_smi_is_asked() -> None:
    def ask(command: Sequence[str]) -> Answer:
        if len(command) == 1:
            return Answer(0, HEADER, "")
        return Answer(0, "NVIDIA GeForce RTX 3060, 12288, 8.6\n", "")

    assert read_driver(ask=ask, nvml=no_library) == Driver(
        "546.33", "12.3", (Card("NVIDIA GeForce RTX 3060", (8, 6), 12.0),), on_bus=True
    )


def test_nvidia_smi_that_does_not_know_compute_cap_is_asked_again_without() -> None:
    def ask(command: Sequence[str]) -> Answer:
        if len(command) == 1:
            return Answer(0, HEADER, "")
        if "compute_cap" in command[1]:
            return Answer(2, 'Field "compute_cap" is not a valid field to query.\n', "")
        return Answer(0, "Tesla V100-SXM2-32GB, 32510\n", "")

    assert read_driver(ask=ask, nvml=no_library).cards == (Card("Tesla V100-SXM2-32GB", None, 31.7),)


@pytest.mark.parametrize("on_bus", [True, False])
def test_a_card_without_driver_is_told_from_no_card(on_bus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_on_bus", lambda: on_bus)
    driver = read_driver(ask=lambda command: Answer(None, "", "not found"), nvml=no_library)
    assert driver.version is None
    assert driver.on_bus is on_bus
    assert bool(driver.problem) is on_bus


def test_the_memory_structure_is_nvmls() -> None:
    assert ctypes.sizeof(driver_module._Memory) == 24


STUB = """
#include <string.h>
typedef void *device;
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "580.82.07", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *handle)
{
    *handle = (device)(0x7000000000000000ULL + index);  /* all 64 bits must survive the way there and back */
    return 0;
}
static int card(device handle) { return (int)((unsigned long long)handle - 0x7000000000000000ULL); }
int nvmlDeviceGetName(device handle, char *name, unsigned length)
{
    strncpy(name, card(handle) == 1 ? "second" : card(handle) == 0 ? "first" : "lost", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(device handle, memory *info) { info->total = (8ULL + card(handle)) << 30; return 0; }
int nvmlDeviceGetCudaComputeCapability(device handle, int *major, int *minor)
{
    *major = 9;
    *minor = card(handle);
    return 0;
}
"""


def test_the_calls_fit_nvmls_own_prototypes(tmp_path: Path) -> None:
    """Through a real shared library with the signatures of nvml.h."""
    compiler = shutil.which("gcc")
    if compiler is None or os.name == "nt":
        pytest.skip("no gcc")
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(STUB, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert read_driver(nvml=lambda: ctypes.CDLL(str(library))) == Driver(
        "580.82.07", "13.0", (Card("first", (9, 0), 8.0), Card("second", (9, 1), 9.0)), on_bus=True
    )
