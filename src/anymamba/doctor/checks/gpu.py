"""Which accelerators are here, and can our kernels use them?"""

from __future__ import annotations

from anymamba.doctor.result import Result, Status, Way, for_system
from anymamba.machine import Machine


def gpu_seen(machine: Machine) -> Result:
    """The cards the driver sees; not having one is no fault."""
    driver = machine.driver
    if driver.cards:
        names = ", ".join(f"{card.name} ({card.architecture}, {card.memory_gb:g} GB)" for card in driver.cards)
        return Result(
            "gpu-seen", "GPU", Status.OK, Way.BOTH, f"{names}; driver {driver.version}, CUDA up to {driver.cuda}"
        )
    if driver.on_bus:
        return Result(
            "gpu-seen",
            "GPU",
            Status.WARN,
            Way.BOTH,
            seen=f"an NVIDIA card without a working driver ({driver.problem or 'no answer'})",
            wanted="a driver that answers",
            why="without it torch and anymamba compute on the CPU",
            fix=for_system(
                machine,
                windows="install the driver for your card from nvidia.com/drivers, restart, then: nvidia-smi",
                linux="install the distribution's NVIDIA driver package, restart, then: nvidia-smi",
            ),
        )
    torch = machine.torch
    other = next(
        (
            name
            for name, there in (
                ("Apple GPU (MPS)", torch is not None and torch.mps),
                ("Intel GPU (XPU)", torch is not None and torch.xpu),
                ("AMD GPU (ROCm)", torch is not None and bool(torch.hip) and torch.cuda_available),
            )
            if there
        ),
        None,
    )
    return Result("gpu-seen", "GPU", Status.INFO, Way.PORT, seen=other or "none: everything runs on the CPU")


def gpu_architecture(machine: Machine) -> Result | None:
    """Our CUDA kernels are written for sm_70 and newer."""
    old = [card for card in machine.driver.cards if card.capability is not None and card.capability < (7, 0)]
    if not old:
        return None
    return Result(
        "gpu-architecture",
        "GPU architecture",
        Status.WARN,
        Way.PORT,
        seen=", ".join(f"{card.name} ({card.architecture})" for card in old),
        wanted="sm_70 or newer for the CUDA kernels",
        why="older cards are served by plain torch operations: correct, slower",
    )


def triton_seen(machine: Machine) -> Result:
    """Triton is welcome and never needed."""
    triton = machine.triton
    return Result(
        "triton-seen",
        "Triton",
        Status.INFO if triton is None else Status.OK,
        Way.PORT,
        seen="not installed (not needed: every operator has its own implementation"
        + (")" if machine.system.name == "Linux" else "; the index has no `triton` for this system)")
        if triton is None
        else f"{triton.distribution} {triton.version}",
    )
