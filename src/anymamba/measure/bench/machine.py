"""What the figures depend on: the processor or card, versions, and how busy the machine is while they are measured."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from typing import Any

import torch

from anymamba import __version__
from anymamba.machine.system import processor_name, read_system

__all__ = ["busy", "clock", "facts", "throttled", "versions"]

_PACKAGES = ("numba", "numpy", "triton", "triton-windows", "mamba-ssm", "causal-conv1d", "transformers", "mambapy")


def facts(device: torch.device) -> dict[str, Any]:
    """Return what this machine is."""
    system = read_system()
    found: dict[str, Any] = {
        "system": f"{system.name} {system.release}",
        "processor": processor_name(),
        "cores": system.cores,
        "memory_gb": system.memory_gb,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_gb": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _nvidia("driver_version"),
        }
    return found


def versions() -> dict[str, str]:
    """Return the versions of all that takes part."""
    found = {"anymamba": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def clock(device: torch.device) -> float | None:
    """Return the current clock of the device in MHz, None where the system does not tell."""
    if device.type == "cuda":
        try:
            return float(_nvidia("clocks.sm"))
        except ValueError:
            return None
    try:
        import psutil

        frequency = psutil.cpu_freq()
        return float(frequency.current) if frequency and frequency.current else None
    except Exception:  # some virtual machines have no such file; a note is not worth an error
        return None


_REASONS = {
    "sw_power_cap": "its power limit", "hw_power_brake_slowdown": "the power supply", "hw_slowdown": "heat or power",
    "sw_thermal_slowdown": "heat", "hw_thermal_slowdown": "heat",
}  # fmt: skip


def throttled(device: torch.device) -> set[str]:
    """Return why the card runs slower than it could right now, by what its driver says; nothing where it does not tell."""
    if device.type != "cuda":
        return set()
    for family in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the second: drivers before 535
        answers = _nvidia(",".join(f"{family}.{name}" for name in _REASONS)).split(",")
        if len(answers) == len(_REASONS):
            return {words for words, answer in zip(_REASONS.values(), answers) if answer.strip() == "Active"}
    return set()


def busy() -> str | None:
    """Return a sentence if other programs want more cores than there are."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has none
        return None
    cores = read_system().cores
    if load <= cores:
        return None
    return f"the machine is busy: {load:.1f} programs want {cores} cores; times are longer than on an idle one"


def _nvidia(field: str) -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=20, encoding="utf-8", errors="replace",
        )  # fmt: skip
        return answer.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
