"""All facts about this machine together: `Machine`, read by `read_machine`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from anymamba.machine.compilers import Compilers, read_compilers
from anymamba.machine.driver import Driver, read_driver
from anymamba.machine.extensions import Extension, read_extensions
from anymamba.machine.folders import Folders, read_folders
from anymamba.machine.network import Network, read_network
from anymamba.machine.packages import Packages, read_packages
from anymamba.machine.project import Project, read_project
from anymamba.machine.python import Python, read_python
from anymamba.machine.reach import Reached, read_reach
from anymamba.machine.system import System, read_system
from anymamba.machine.torch_build import OperatorRun, Torch, read_torch
from anymamba.machine.triton import Triton, read_triton
from anymamba.machine.windows import Windows, read_windows
from anymamba.machine.wsl import Wsl, read_wsl

__all__ = ["Machine", "read_machine"]


@dataclass(frozen=True)
class Machine:
    """All facts together. `torch`, `triton`, `windows`, `wsl` are None where there is no such thing."""

    system: System
    python: Python
    torch: Torch | None
    driver: Driver
    triton: Triton | None
    compilers: Compilers
    windows: Windows | None
    folders: Folders
    packages: Packages
    network: Network = field(default_factory=Network)
    wsl: Wsl | None = None
    operators: tuple[OperatorRun, ...] = ()
    extensions: tuple[Extension, ...] = ()  # compiled ones, each imported in a process of its own
    project: Project | None = None  # what the code in the working folder imports
    reached: tuple[Reached, ...] | None = None  # None: nobody asked to go on the network


def read_machine(*, operators: bool = True, network: bool = False) -> Machine:
    """Look at everything there is; the slow questions (torch, the driver, compilers) are asked at the same time.

    Parameters
    ----------
    operators : bool
        Also call each operator once on each device there is, in a process of its own.
    network : bool
        Also try whether the package index and GitHub answer; nothing goes on the network otherwise.
    """
    with ThreadPoolExecutor(max_workers=5) as pool:
        torch = pool.submit(read_torch, operators=operators)
        driver = pool.submit(read_driver)
        compilers = pool.submit(read_compilers)
        extensions = pool.submit(read_extensions)
        reached = pool.submit(read_reach) if network else None
        build, runs = torch.result()
        return Machine(
            system=read_system(),
            python=read_python(),
            torch=build,
            driver=driver.result(),
            triton=read_triton(),
            compilers=compilers.result(),
            windows=read_windows(),
            folders=read_folders(),
            packages=read_packages(),
            network=read_network(),
            wsl=read_wsl(),
            operators=runs,
            extensions=extensions.result(),
            project=read_project(),
            reached=None if reached is None else reached.result(),
        )
