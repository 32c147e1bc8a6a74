"""WSL's own traps: version 1 has no GPU, and a Linux driver inside hides the one of Windows."""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way
from anymamba.machine import Machine


def wsl_version(machine: Machine) -> Result | None:
    """Version 2, with Windows' driver mounted."""
    wsl = machine.wsl
    if wsl is None:
        return None
    if wsl.version == 1:
        return Result(
            "wsl-version",
            "WSL",
            Status.WARN,
            Way.BOTH,
            seen="WSL 1",
            wanted="WSL 2",
            why="WSL 1 has no GPU",
            fix="wsl --set-version Ubuntu 2    (in Windows, with your distribution's name)",
        )
    if wsl.own_driver and wsl.shared_driver:
        return Result(
            "wsl-version",
            "WSL",
            Status.WARN,
            Way.BOTH,
            seen="WSL 2 with a Linux NVIDIA driver installed inside",
            wanted="the driver of Windows only",
            why="the driver inside talks to a card that is not there and hides the one that works",
            fix='sudo apt purge "nvidia-driver*" "libnvidia-compute*"',
        )
    if not wsl.linked:
        return Result(
            "wsl-version",
            "WSL",
            Status.INFO,
            Way.BOTH,
            seen="WSL 2; libcuda.so.1 is a copy, not a link: ldconfig warns, nothing else",
            wanted="WSL 2",
        )
    seen = "WSL 2" if wsl.shared_driver else "WSL 2 (no NVIDIA driver shared by Windows)"
    return Result("wsl-version", "WSL", Status.OK if wsl.shared_driver else Status.INFO, Way.BOTH, seen, "WSL 2")


def wsl_folder(machine: Machine) -> Result | None:
    """Windows' disks are slow from inside."""
    if machine.wsl is None or not machine.python.prefix.startswith("/mnt/"):
        return None
    return Result(
        "wsl-folder",
        "Environment's disk",
        Status.WARN,
        Way.BOTH,
        seen=machine.python.prefix,
        wanted="a folder of the Linux file system",
        why="imports over /mnt take ten times longer",
        fix='python3 -m venv "$HOME/anymamba"',
    )
