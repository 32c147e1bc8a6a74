"""Which build of torch fits this machine's card and driver, as a pip command.

Known of PyTorch's wheel indexes (its "previous versions" page): cu118 up to torch 2.7, cu126, cu128, cu130 for 2.9; CUDA 12
runs from driver 525 on, 13 from 580 (NVIDIA's minor version compatibility table). cu130 dropped cards below sm_75, cu128
those below sm_70; sm_100 and sm_120 need 12.8.
"""

from __future__ import annotations

from anymamba.machine import Machine

__all__ = ["INDEX", "best_tag", "install_command"]

INDEX = "https://download.pytorch.org/whl"


def best_tag(machine: Machine) -> str:
    """Return cu130, cu128, cu126, cu118 or cpu: the newest CUDA that driver and cards can run."""
    release = machine.driver.cuda_release
    capabilities = [card.capability for card in machine.driver.cards if card.capability is not None]
    if release is None:
        return "cu126" if machine.driver.on_bus else "cpu"
    oldest = min(capabilities, default=(7, 5))
    if release >= (13, 0) and oldest >= (7, 5):
        return "cu130"
    if release >= (12, 8) and oldest >= (7, 5):
        return "cu128"
    if release >= (12, 0):
        return "cu126"
    return "cu118"


def install_command(machine: Machine, *, again: bool = False) -> str:
    """Return the pip command that installs (or replaces) torch with the build for this machine."""
    upgrade = "--upgrade --force-reinstall " if again else ""
    if machine.system.name == "Darwin":
        return f"python -m pip install {upgrade}torch"
    return f"python -m pip install {upgrade}torch --index-url {INDEX}/{best_tag(machine)}"
