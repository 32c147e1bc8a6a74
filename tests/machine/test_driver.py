"""The driver's facts come from NVML, else from nvidia-smi, else from the bus."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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
