"""Triton, where it is installed: can it serve this card? Nothing here matters for the port, which never needs it."""

from __future__ import annotations

import re

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.machine import Machine

_OLDEST = (8, 0)  # Triton's own words: "NVIDIA GPUs (Compute Capability 8.0+)"
# (architecture, first Triton that makes code for it)
_LEARNT = (((10, 0), (3, 3)), ((9, 0), (2, 1)))


def triton_for_card(machine: Machine) -> Result | None:
    """Turing and Volta are not supported by Triton any more; a new card needs a new Triton."""
    triton, cards = machine.triton, [card for card in machine.driver.cards if card.capability is not None]
    if triton is None or not cards:
        return None
    for card in cards:
        capability = card.capability or (0, 0)
        if capability < _OLDEST:
            return Result(
                "triton-for-card",
                "Triton for this card",
                Status.WARN,
                Way.NATIVE,
                seen=f"{triton.distribution} {triton.version}, {card.name} ({card.architecture})",
                wanted="sm_80 or newer",
                why="Triton does not support this card: map::at on Turing, mma errors on Volta, no bfloat16, too little "
                "shared memory",
                fix="anymamba install    (its operators need no Triton)",
            )
        needed = next((release for architecture, release in _LEARNT if capability >= architecture), (0, 0))
        if _release(triton.version) < needed:
            return Result(
                "triton-for-card",
                "Triton for this card",
                Status.WARN,
                Way.NATIVE,
                seen=f"{triton.distribution} {triton.version}, {card.name} ({card.architecture})",
                wanted=f"Triton {needed[0]}.{needed[1]} or newer",
                why='this Triton does not know the card: "device kernel image is invalid", "gpu architecture not recognised"',
                fix="anymamba install    (its operators need no Triton; a newer torch brings a newer one)",
            )
    return Result(
        "triton-for-card", "Triton for this card", Status.OK, Way.NATIVE, cards[0].architecture, "sm_80 or newer"
    )


def triton_loads(machine: Machine) -> Result | None:
    """`import triton` in a process of its own."""
    module = next((one for one in machine.extensions if one.name == "triton"), None)
    if module is None or module.loads:
        return None
    return Result(
        "triton-loads",
        "import triton",
        Status.WARN,
        Way.NATIVE,
        seen=module.problem,
        wanted="works",
        why="its library needs a current Microsoft Visual C++ runtime; an older one beside python.exe wins over the system's"
        if "DLL" in module.problem
        else "the installation is damaged or mixed",
        fix=for_system(
            machine,
            windows="winget install Microsoft.VCRedist.2015+.x64",
            linux="anymamba install    (its operators need no Triton)",
        ),
    )


def triton_toolchain(machine: Machine) -> Result | None:
    """Triton compiles a launcher with the C compiler when a kernel first runs."""
    if machine.triton is None or machine.system.name != "Linux" or not machine.driver.cards:
        return None
    if machine.compilers.gcc or machine.compilers.clang:
        return None
    return Result(
        "triton-toolchain",
        "C compiler for Triton",
        Status.WARN,
        Way.NATIVE,
        seen="neither gcc nor clang",
        wanted="any C compiler",
        why='Triton compiles a launcher when a kernel first runs: "Failed to find C compiler"',
        fix="sudo apt install gcc    (or: anymamba install)",
    )


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)
